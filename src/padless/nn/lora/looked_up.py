"""The layer for few slots outside of autograd: every slot looks its adapter up, by `adapter_ids` of its token.

Rows are sorted by expert alone, as without adapters, and rows between both low-rank products are in the order of slots.
The bits are those of `padless.nn.lora.low_rank` with groups (expert, adapter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.checks import on_device_of, runs_triton
from padless.moe.combining import combine
from padless.moe.layer import Projection, gathered
from padless.nn.calls import call
from padless.nn.lora.frozen import Frozen
from padless.nn.lora.low_rank import Factors, activates_up, as_read, up_activated_fake, width_of
from padless.runtime.choices import ActivationKind, GateUp


def looks_up(format: BlockScaledFormat | None, activation: Activation, b: Sequence[torch.Tensor]) -> bool:
    """Whether `looked_up_experts` takes rows of this format, with this activation and these B."""
    return format in (None, FP8_BLOCK) and activates_up(activation, b)


def _slots(
    factors: Sequence[torch.Tensor], ids: torch.Tensor, adapter_ids: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The slots of each expert and adapter that has some, and its factor."""
    experts, adapters = ids.flatten(), adapter_ids.repeat_interleave(ids.shape[1])
    for adapter, factor in enumerate(factors):
        for expert in experts[adapters == adapter].unique().tolist():
            if 0 <= expert < factor.shape[0]:
                yield ((experts == expert) & (adapters == adapter)).nonzero()[:, 0], factor[expert]


def _rows(inverse: torch.Tensor) -> torch.Tensor:
    """(slots,) int64 rows; slots of no expert have one too."""
    flat = inverse.flatten().to(torch.int64)
    return torch.where(flat < 0, -1 - flat, flat)


def _down_fake(rows: torch.Tensor, factors: Sequence[torch.Tensor], ids: torch.Tensor, *others: Any) -> torch.Tensor:
    return rows.new_empty((ids.numel(), width_of(factors[0].shape[1])))


@ops.operator(
    "looked_up_down",
    "(Tensor rows, Tensor[] factors, Tensor ids, Tensor adapter_ids, Tensor? inverse) -> Tensor",
    _down_fake,
)
def down(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], ids: torch.Tensor, adapter_ids: torch.Tensor,
    inverse: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """rows @ factor.T of each slot's expert and adapter, rounded to bfloat16; (T k, `width_of` (r)), in slots' order.

    rows: (T k, K) bfloat16 with inverse, (T, k) int32, the row of each slot; without it (T, K), of tokens. factors: (E,
    r, K), one by adapter. ids: (T, k), adapter_ids: (T,), int32 or int64, both contiguous. Slots without an expert or
    adapter hold anything.
    """
    width = width_of(factors[0].shape[1])
    if runs_triton(rows) and rows.numel() > 0:
        from padless.nn.triton import looked_up as kernels

        with on_device_of(rows):
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            return kernels.down(rows, factors, kernels.Slots(ids, adapter_ids, inverse), width)
    place = torch.arange(ids.numel(), device=ids.device) // ids.shape[1] if inverse is None else _rows(inverse)
    t = rows.new_zeros((ids.numel(), width))
    for some, factor in _slots(factors, ids, adapter_ids):
        t[some, : factor.shape[0]] = (rows[place[some]].float() @ as_read(factor).T).to(rows.dtype)
    return t


def _added(
    t: torch.Tensor, factors: Sequence[torch.Tensor], ids: torch.Tensor, adapter_ids: torch.Tensor,
    inverse: torch.Tensor, scaling: float, added: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The result of `padless.nn.lora.low_rank.up`, by rows."""
    rows, out = _rows(inverse), added.clone()
    for some, factor in _slots(factors, ids, adapter_ids):
        found = t[some, : factor.shape[1]].float() @ as_read(factor).T * scaling
        out[rows[some]] = (added[rows[some]].float() + found).to(added.dtype)
    return out


@ops.operator(
    "looked_up_up_activated",
    "(Tensor t, Tensor[] factors, Tensor ids, Tensor adapter_ids, Tensor inverse, float scaling, Tensor added, "
    "str kind, str gate_up, float alpha, float? limit, float up_offset, str format) -> (Tensor, Tensor, Tensor)",
    lambda t, factors, ids, adapter_ids, inverse, scaling, added, *how: up_activated_fake(added, *how),
)
def up_activated(
    t: torch.Tensor, factors: Sequence[torch.Tensor], ids: torch.Tensor, adapter_ids: torch.Tensor,
    inverse: torch.Tensor, scaling: float, added: torch.Tensor,
    kind: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float, format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`padless.nn.lora.low_rank.up_activated` for t in the order of slots; added and the results are of rows."""
    activation, is_quantized = Activation(kind, gate_up, alpha, limit, up_offset), format != "BF16"
    nothing, no_scale = (torch.empty(0, dtype=torch.uint8, device=t.device) for _ in range(2))
    if runs_triton(t) and added.numel() > 0:
        from padless.nn.triton import looked_up as kernels

        with on_device_of(t):
            slots = kernels.Slots(ids, adapter_ids, inverse)
            values, codes, scale = kernels.up_activated(t, factors, slots, scaling, added, activation, is_quantized)
        return values, nothing if codes is None else codes, no_scale if scale is None else scale
    h = _added(t, factors, ids, adapter_ids, inverse, scaling, added)
    how = (kind, gate_up, alpha, limit, up_offset, format, "", "plain", None, None)
    if not is_quantized:
        return ops.call("activate_quantize", h, *how)[0], nothing, no_scale
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ops.call("activate_and_quantize", h, *how)
    return found


def _combined_fake(t: torch.Tensor, factors: Any, ids: torch.Tensor, *others: Any) -> torch.Tensor:
    y, dtype = others[3], others[-1]
    return t.new_empty((ids.shape[0], y.shape[1]), dtype=dtype)


@ops.operator(
    "looked_up_combined",
    "(Tensor t, Tensor[] factors, Tensor ids, Tensor adapter_ids, Tensor inverse, float scaling, Tensor y, "
    "Tensor weights, Tensor? shared, ScalarType dtype) -> Tensor",
    _combined_fake,
)
def combined(
    t: torch.Tensor, factors: Sequence[torch.Tensor], ids: torch.Tensor, adapter_ids: torch.Tensor,
    inverse: torch.Tensor, scaling: float, y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`padless.moe.combine` of what `padless.nn.lora.low_rank.up` adds to rows y (T k, N) bfloat16; (T, N)."""
    if runs_triton(t) and y.numel() > 0:
        from padless.nn.triton import looked_up as kernels

        with on_device_of(t):
            slots = kernels.Slots(ids, adapter_ids, inverse)
            return kernels.combined(t, factors, slots, scaling, y.contiguous(), weights, shared, dtype)
    added = _added(t, factors, ids, adapter_ids, inverse, scaling, y)
    return combine(added, inverse, weights, shared, out_dtype=dtype)


def looked_up_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, adapter_ids: torch.Tensor,
    frozen: Frozen, of13: Factors, of2: Factors,
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.experts.adapted_experts` for few slots, outside of autograd and without dropout; (T, H).

    of13, of2: A and B of the adapters, of each projection; per_expert is not used.
    """
    # All that kernels of slots read before they wait is made ahead of the first launch, which waits for it.
    x16, ids, adapter_ids, weights = (t.contiguous() for t in (x.to(torch.bfloat16), ids, adapter_ids, weights))
    shared = None if shared is None else shared.contiguous()
    format, scale = frozen.how
    routing, rows = gathered(x16 if format is None else x, ids, frozen.w13.data.shape[0], format, scale)
    a = frozen.activation
    t = call("looked_up_down", x16, list(of13.a), ids, adapter_ids, None)
    y = Projection(frozen.w13, frozen.bias13, None).product(rows, routing.offs)
    how = (a.kind, a.gate_up, a.alpha, a.limit, a.up_offset, "BF16" if format is None else format.name)
    chosen = (ids, adapter_ids, routing.inverse)
    hidden, codes, codes_scale = call("looked_up_up_activated", t, list(of13.b), *chosen, of13.scaling, y, *how)
    t = call("looked_up_down", hidden, list(of2.a), *chosen)
    if format is not None:
        hidden = BlockScaledTensor(codes.view(format.data_dtype), codes_scale, format)
    y = Projection(frozen.w2, frozen.bias2, None).product(hidden, routing.offs)
    out: torch.Tensor
    out = call("looked_up_combined", t, list(of2.b), *chosen, of2.scaling, y, weights, shared, x.dtype)
    return out
