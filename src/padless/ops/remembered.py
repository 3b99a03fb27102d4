"""Launches that are remembered by everything that they depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.kernels.launch import keep
from padless.ops.launch_cache import stream_of
from padless.row_groups import is_traced
from padless.runtime.driver import PreparedLaunch

# A packed launch depends on addresses, shapes and strides alone; all of them are compared again at every call, and no
# operand is kept alive.
_LAUNCHES: dict[tuple[Any, ...], PreparedLaunch] = {}
_MOST_LAUNCHES = 4096


def facts_of(settings: tuple[Any, ...], *tensors: Any) -> tuple[Any, ...] | None:
    """All that a launch of these tensors depends on beside ``settings``; None where one is no tensor, or traced."""
    facts = list(settings)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or is_traced(tensor):
            return None
        facts += [tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device]
    return tuple(facts)


def known_launch(facts: tuple[Any, ...] | None) -> PreparedLaunch | None:
    """The launch that was packed from ``facts`` before."""
    return None if facts is None else _LAUNCHES.get(facts)


def remember_launch(facts: tuple[Any, ...], launch: PreparedLaunch) -> None:
    """Keeps a launch by everything that it depends on."""
    keep(_LAUNCHES, _MOST_LAUNCHES, facts, launch)


def launch_remembered(facts: tuple[Any, ...] | None, prepare: Callable[[], PreparedLaunch], out: torch.Tensor) -> None:
    """Launches on the current stream of ``out`` what was packed from ``facts`` before: a new output may have the address
    of an old one. Else what ``prepare`` packs, which is kept where there are facts."""
    launch = known_launch(facts)
    if launch is None:
        launch = prepare()
        if facts is not None:
            remember_launch(facts, launch)
    launch(stream_of(out))
