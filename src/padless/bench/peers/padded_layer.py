"""A Mixture-of-Experts layer around a product whose groups begin at multiples of 128 rows, as frameworks build it.

Around DeepGEMM's contiguous product vLLM and SGLang quantize the tokens, count the slots of each expert, place the
groups, scatter codes and scales into the padded rows, bring the scales into the order of the product, run one kernel for
SwiGLU and quantization between the products, and gather and sum with weights behind them. Here it is the same with fewer
launches and less memory traffic, so that its time is not that of slow passes:

    clear, count, place          three small launches
    scatter_quantize             a token is read and quantized once and stored to its experts' rows, the scales in the
                                 product's order: quantization, scatter and reordering in one
    product                      with the ends of the groups, so that it computes no tile behind the last one
    swiglu_quantize              skips what lies behind the last group
    product
    combine                      padless' own

Buffers have room for every possible routing, S + min(S, E) * 127 rows, with no device-to-host sync. Rows of a
group come in the order of atomics; a token's result does not depend on it. Ids must be experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from padless.bench.group_sizes import PADDED_GROUP_MULTIPLE
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div, round_up

_MAX_COLUMNS = 8192


class PaddedProduct(Protocol):
    """out[rows of group g] = a[those rows] @ b[g] transposed, rows starting at multiples of 128, up to ends[g]."""

    def __call__(
        self, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, ends: torch.Tensor, rows_a_group: int
    ) -> None: ...


def rows_bound(slots: int, experts: int) -> int:
    """Rows that hold the slots of any routing, every group padded to a multiple of 128."""
    return round_up(slots + min(slots, experts) * (PADDED_GROUP_MULTIPLE - 1), PADDED_GROUP_MULTIPLE)


def padded_layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    product: PaddedProduct,
) -> torch.Tensor:
    """(T, H) bfloat16 of x (T, H) bfloat16, ids (T, k) int64, weights (T, k) float32, all contiguous.

    w13: (E, 2 I, H) FP8_BLOCK weights, gate above up; w2: (E, H, I). H and I are multiples of 128, H up to 8192, E up
    to 1023. product is told the mean number of rows a group.
    """
    from padless.bench.peers import padded_layer_kernels as kernels  # Triton only where it is used
    from padless.moe import combine
    from padless.quantization.triton.casts import casts_in_hardware

    experts, (tokens, top_k), (_, hidden, intermediate) = w13.data.shape[0], ids.shape, w2.data.shape
    slots = tokens * top_k
    if hidden > _MAX_COLUMNS or hidden % 128 or intermediate % 128:
        raise ValueError(f"H, I are {hidden}, {intermediate}; they must be multiples of 128, H up to {_MAX_COLUMNS}")
    rows, mean_rows, hardware = rows_bound(slots, experts), ceil_div(slots, experts), casts_in_hardware(x.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    next_row, ends = torch.empty((2, experts), dtype=torch.int32, device=x.device)
    inverse = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    bins = _power_of_two(experts + 1)
    common: dict[str, Any] = {"NUM_EXPERTS": experts}
    kernels.count_slots[(ceil_div(slots, 1024),)](ids, counts, slots, **common, BINS=bins, BLOCK=1024)
    kernels.place_groups[(1,)](counts, next_row, ends, **common, BLOCK=bins, MULTIPLE=PADDED_GROUP_MULTIPLE)
    a = _empty(rows, hidden, x.device)
    kernels.scatter_quantize[(tokens,)](
        x, ids, next_row, a.data.view(torch.uint8), a.scale, inverse, rows,
        K=hidden, TOP_K=top_k, SLOTS=_power_of_two(top_k), BLOCK=_power_of_two(hidden), HARDWARE_CAST=hardware,
        num_warps=8 if hidden > 4096 else 4,
    )  # fmt: skip
    h = torch.empty((rows, 2 * intermediate), dtype=torch.bfloat16, device=x.device)
    product(a, w13, h, ends, mean_rows)
    z = _empty(rows, intermediate, x.device)
    kernels.swiglu_quantize[(ceil_div(intermediate, 256) * (rows // 16),)](
        h, ends, z.data.view(torch.uint8), z.scale, rows,
        **common, K=intermediate, ROWS=16, COLUMNS=256, HARDWARE_CAST=hardware, num_warps=4,
    )  # fmt: skip
    y = torch.empty((rows, hidden), dtype=torch.bfloat16, device=x.device)
    product(z, w2, y, ends, mean_rows)
    return combine(y, inverse, weights)


def _empty(rows: int, columns: int, device: torch.device) -> BlockScaledTensor:
    """FP8_BLOCK rows with MN-major scales, uninitialised."""
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return BlockScaledTensor(codes, torch.empty((columns // 128, rows), device=device).t(), FP8_BLOCK)


def _power_of_two(value: int) -> int:
    return max(1 << (value - 1).bit_length(), 2)
