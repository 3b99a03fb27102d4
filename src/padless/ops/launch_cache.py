"""Launches that were packed before, found again by what they were packed from.

A packed launch depends on the operands' addresses, shapes, strides, types and formats alone. All of them are read again
at every call and compared, so nothing here depends on which objects hold them: a tensor that was resized, replaced or
freed, and another one in its place or with its id, are seen for what they are. No operand is kept alive. Reading is a
few dictionary look-ups, which threads may do at the same time.

This is the part of a call that an eager loop pays for, so it is written for few interpreter steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from padless.formats import OUT_DTYPES, BlockScaledTensor
from padless.kernels.launch import keep
from padless.row_groups import is_traced
from padless.runtime.driver import PreparedLaunch

# The handle of torch's current stream on a device, by index. A torch without CUDA has no such function and no tensors
# on a GPU that would need it.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)

is_grad_enabled = torch.is_grad_enabled

_Facts = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Known:
    """Operands that were found good, and the launches that write their product.

    formats: held so that no other format can take the id of one that the facts name.
    launches: by address, type and strides of the output and the caller's config.
    """

    facts: _Facts
    formats: tuple[Any, ...]
    shape: tuple[int, int]
    device: torch.device
    index: int
    launches: dict[_Facts, PreparedLaunch] = field(default_factory=dict)


_KNOWN: dict[_Facts, _Known] = {}
_MAX_OPERANDS = 4096
_MAX_OUTPUTS = 256


def _facts_of(operation: str, a: Any, b: Any, offs: Any) -> tuple[_Facts, _Facts] | None:
    """A key that tells most calls apart, and all that a launch depends on; None for what is not on a GPU, or traced.

    None too for what a memory of launches cannot speak for, since it changes without the addresses: what requires grad
    while grad mode is on, and scales that were made for other groups than those of offs.

    The GPU of each is among the facts: an address that one GPU gave back may be another one's next.
    """
    if type(b) is not BlockScaledTensor or not b.data.is_cuda or is_traced(b.data):
        return None
    w, w_scale = b.data, b.scale
    if type(a) is BlockScaledTensor:
        if a.row_groups is not None and not a.row_groups.is_of(offs):
            return None
        x, x_scale = a.data, a.scale
        x_facts: _Facts = (id(a.format), a.scale_layout, x_scale.data_ptr(), x_scale.shape, x_scale.stride())
        if a.global_scale is not None:
            if a.global_scale.requires_grad and is_grad_enabled():
                return None
            x_facts += _tensor_facts(a.global_scale)
    elif isinstance(a, torch.Tensor):
        x = x_scale = a
        x_facts = (a.dtype,)
    else:
        return None
    if offs is None:
        ends: int | None = None
        ends_facts: _Facts = ()
    elif isinstance(offs, torch.Tensor):
        ends, ends_facts = offs.data_ptr(), (offs.shape, offs.stride(), offs.dtype, offs.get_device())
    else:
        return None
    if is_grad_enabled() and (x.requires_grad or x_scale.requires_grad or w.requires_grad or w_scale.requires_grad):
        return None
    shape = x.shape
    w_facts = (id(b.format), b.scale_layout, w.shape, w.stride(), w.get_device())
    scale_facts: _Facts = (w_scale.data_ptr(), w_scale.shape, w_scale.stride())
    if b.global_scale is not None:
        if b.global_scale.requires_grad and is_grad_enabled():
            return None
        scale_facts += _tensor_facts(b.global_scale)
    facts = (operation, shape, x.stride(), x.get_device(), x_facts, w_facts, scale_facts, ends_facts)
    return (x.data_ptr(), w.data_ptr(), ends, shape[0] if shape else 0), facts


def _tensor_facts(t: Any) -> _Facts:
    return (t.data_ptr(), t.shape, t.stride(), t.dtype)


class Missed:
    """A call whose launch is not remembered, with the facts that it was looked up by.

    checked: whether operands like these passed every check before.
    """

    __slots__ = ("_found", "_known", "checked")

    def __init__(self, found: tuple[_Facts, _Facts] | None, known: _Known | None) -> None:
        self._found = found
        self._known = known
        self.checked = known is not None

    def remember_checked(self, a: Any, b: Any, out: torch.Tensor) -> None:
        """Keeps that these operands passed every check. Tensors that are not on a GPU are not remembered."""
        if self._found is None or not out.is_cuda:
            return
        formats = (b.format, a.format if isinstance(a, BlockScaledTensor) else None)
        key, facts = self._found
        self._known = _Known(facts, formats, (out.shape[0], out.shape[1]), out.device, out.get_device())
        keep(_KNOWN, _MAX_OPERANDS, key, self._known)

    def remember_launch(self, out: torch.Tensor, config: object, launch: PreparedLaunch) -> None:
        """Keeps a launch for operands that are remembered."""
        if self._known is not None:
            key = (out.data_ptr(), out.dtype, out.stride(), config)
            keep(self._known.launches, _MAX_OUTPUTS, key, launch)


NOT_LOOKED_UP = Missed(None, None)  # a call that nothing is remembered of


def launch_again(
    operation: str, a: Any, b: Any, offs: Any, out: Any, out_dtype: torch.dtype, config: object, backend: str | None
) -> tuple[Any, Missed | None]:
    """Launches a call like one that was remembered: (output, None). Where there is none: (``out``, what was missed).

    For operands that are known and no ``out`` the output is a new one, to be packed for: another allocation would have
    another address every time.
    """
    if backend is not None and backend != "cuda":
        return out, NOT_LOOKED_UP
    found = _facts_of(operation, a, b, offs)
    if found is None or (known := _KNOWN.get(found[0])) is None or known.facts != found[1]:
        return out, Missed(found, None)
    if out is None:
        if out_dtype not in OUT_DTYPES:
            return None, Missed(found, known)
        out = torch.empty(known.shape, dtype=out_dtype, device=known.device)
    elif (
        not isinstance(out, torch.Tensor)
        or out.shape != known.shape
        or out.get_device() != known.index
        or (out.requires_grad and is_grad_enabled())
    ):
        return out, Missed(found, known)
    launch = known.launches.get((out.data_ptr(), out.dtype, out.stride(), config))
    if launch is None:
        return out, Missed(found, known)
    launch(current_stream(known.index))
    return out, None


def stream_of(t: torch.Tensor) -> int:
    """The handle of torch's current stream on the device of ``t``; 0 on the CPU."""
    return current_stream(t.device.index or 0) if t.is_cuda else 0
