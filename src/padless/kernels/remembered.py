"""Launches that were packed before, found again by everything that they depend on.

A packed launch depends on options and on addresses, shapes, strides, dtypes and formats alone. All of it is read again
at every call and compared, so nothing here depends on which objects hold the operands: a tensor that was resized,
replaced or freed, and another one in its place, are seen for what they are. No operand is kept alive. Reading is a few
dictionary look-ups, which threads may do at the same time.

This is the part of a call that an eager loop pays for, so it is written for few interpreter steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from padless.formats import FORMAT_BY_NAME, BlockScaledTensor
from padless.row_groups import PLAIN_TENSORS
from padless.runtime.driver import PreparedLaunch, stream_of

Facts = tuple[Any, ...]

is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

_KNOWN: dict[Facts, Any] = {}
_MOST = 8192


@dataclass(frozen=True)
class Prepared:
    """A packed launch, and the copies of operands that were made for this call alone.

    The copies have to live until the launch is under way; a launch that has any cannot be used again.
    """

    launch: PreparedLaunch
    copies: tuple[torch.Tensor, ...] = ()


def facts_of(options: Facts, *operands: Any, offs: torch.Tensor | None = None) -> Facts | None:
    """``options``, and of each operand all that a launch depends on: address, shape, strides, dtype, GPU, and format.

    The GPU is among them since an address that one gave back may be another one's next. None for what is not on a GPU or
    traced, and where a memory of launches cannot speak, since it changes without the facts: for what requires grad while
    grad mode is on, in forward mode, and for scales that were made for other groups than those of ``offs``.
    """
    if is_compiling() or forward_ad._current_level >= 0:
        return None
    facts = [*options]
    tensors: list[Any] = []
    try:
        for operand in operands:
            if type(operand) is not BlockScaledTensor:
                tensors.append(operand)
                continue
            format, groups = operand.format, operand.row_groups
            if FORMAT_BY_NAME.get(format.name) is not format:
                return None
            if operand.offs is not None and (groups is None or not groups.is_of(offs)):
                return None
            facts += (format.name, operand.scale_layout)
            tensors += (operand.data, operand.scale, operand.global_scale)
        grads = is_grad_enabled()
        for t in tensors:
            if t is None:
                facts.append(None)
            elif type(t) not in PLAIN_TENSORS or not t.is_cuda or t.is_neg() or (grads and t.requires_grad):
                return None
            else:
                facts.append((t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device()))
    except RuntimeError:  # a sparse or nested tensor has none of these
        return None
    return tuple(facts)


def known(facts: Facts | None) -> Any:
    """The value kept by these facts, None where there is none."""
    try:
        return None if facts is None else _KNOWN.get(facts)
    except TypeError:  # an option without a hash, which the call refuses
        return None


def remember(facts: Facts, value: Any) -> Any:
    """Keeps a value by everything that it depends on, and returns it."""
    return keep(_KNOWN, _MOST, facts, value)


def keep(memory: dict[Any, Any], most: int, key: object, value: Any) -> Any:
    """Keeps what was made from ``key``, and returns it; a memory that holds ``most`` begins anew."""
    if len(memory) >= most:
        memory.clear()
    memory[key] = value
    return value


def forget() -> None:
    """Forgets everything: the next call with any tensors is as the first one."""
    _KNOWN.clear()


def launch_remembered(facts: Facts | None, prepare: Callable[[], Prepared | None], out: torch.Tensor) -> None:
    """Launches on the current stream of ``out`` what was packed from ``facts`` before: a new output may have the address
    of an old one. Else what ``prepare`` packs, if anything, which is kept where there are facts and no copies."""
    launch = known(facts)
    if launch is None:
        prepared = prepare()
        if prepared is None:
            return
        launch = prepared.launch
        if facts is not None and not prepared.copies:
            remember(facts, launch)
    launch(stream_of(out))
