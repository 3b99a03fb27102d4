"""Host side of sm100_grouped_gemm.cu for a list of problems, each with its own M, N, K and tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.launch import load_kernel, tile_counter
from padless.kernels.maps import tiled_scale
from padless.kernels.padded_fp4 import spreadable
from padless.kernels.schedule import walk_of_list
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.kernels.sm100_grouped.host import KERNEL, fit, kind_of, launch_shape, operand_bytes, problem_bytes
from padless.runtime.driver import Driver, PreparedLaunch
from padless.runtime.streams import Kept

Config = Sm100GroupedConfig


@dataclass(frozen=True)
class PreparedList:
    """A packed launch with the table in device memory that it reads, and the copies of scales made for this call alone.

    Table and copies have to live until the launch is under way; a launch without copies can be used again, on any stream
    if ``kept``, which has the table, is told of it.
    """

    launch: PreparedLaunch
    table: torch.Tensor
    kept: Kept
    copies: tuple[torch.Tensor, ...] = ()


def prepare_list(
    driver: Driver,
    a: Sequence[BlockScaledTensor],
    b: Sequence[BlockScaledTensor],
    out: Sequence[torch.Tensor],
    alpha: torch.Tensor | None,
    config: Sm100GroupedConfig | None,
) -> PreparedList:
    """Packs the launch of out[i] = alpha[i] * a[i] @ b[i].T; a[i] (M_i, K_i), b[i] (N_i, K_i), none of them empty.

    All of one pair of formats, all out with contiguous rows or all with contiguous columns. Plain scales are copied into
    32x4x4 tiles first. The table of problems is copied to the device: not while a CUDA graph is being captured.
    """
    copies: list[torch.Tensor] = []
    left = [_tiled(t, copies) for t in a]
    right = [spreadable(x, _as_group(_tiled(y, copies)), copies) for x, y in zip(a, b, strict=True)]
    device = out[0].device
    index = device.index or 0
    if config is None:
        rows = [t.data.shape[0] for t in a]
        row_bytes = max(t.data.shape[1] for t in a)
        columns = max(t.data.shape[0] for t in b)
        kind = kind_of(a[0], b[0])
        config = select_grouped_config(sum(rows), columns, len(rows), row_bytes, kind, driver.num_sms(index))
    config = _fit_all(config, left, right, out)
    kernel, function = load_kernel(driver, KERNEL, config, index)

    sizes = [(x.data.shape[0], y.data.shape[0], x.data.shape[1]) for x, y in zip(a, b, strict=True)]
    walk = walk_of_list(sizes, config.tile_m, config.cluster_n)
    alphas = [None if alpha is None else alpha.view(-1)[i] for i in range(len(a))]
    operands = [operand_bytes(driver, x, y, d, s, config) for x, y, d, s in zip(left, right, out, alphas, strict=True)]
    order = b"".join(struct.pack("=4i", i, *sizes[i][:2], end) for i, end in walk)
    table = _on_device(b"".join(operands) + order, device)
    counter = tile_counter(config, index, out[0].data_ptr())
    at = table.data_ptr()
    problem = problem_bytes(operands[0], at, at + sum(map(len, operands)), 0, len(a), counter)

    shape = launch_shape(driver, index, config, walk[-1][1], kernel.num_threads)
    tensors = [t for x, y, d in zip(left, right, out, strict=True) for t in (x.data, x.scale, y.data, y.scale, d)]
    tensors += [t.global_scale for t in (*left, *right) if t.global_scale is not None]
    tensors += [table, *copies] if alpha is None else [table, alpha, *copies]
    launch = driver.prepare(function, kernel, shape, [problem], tensors)
    return PreparedList(launch, table, Kept([table]), tuple(copies))


def _tiled(t: BlockScaledTensor, copies: list[torch.Tensor]) -> BlockScaledTensor:
    """``t`` with scales in 32x4x4 tiles on a 16-byte boundary; a copy that this takes is added to ``copies``."""
    if t.format == FP8_BLOCK:
        return t
    if (scale := tiled_scale(t)) is t.scale:
        return t
    copies.append(scale)
    return BlockScaledTensor(t.data, scale, t.format, t.global_scale, "blocked")


def _as_group(t: BlockScaledTensor) -> BlockScaledTensor:
    """(N, K) weights as the (1, N, K) of one group."""
    return BlockScaledTensor(t.data[None], t.scale[None], t.format, t.global_scale, t.scale_layout)


def _fit_all(
    config: Sm100GroupedConfig,
    a: Sequence[BlockScaledTensor],
    b: Sequence[BlockScaledTensor],
    out: Sequence[torch.Tensor],
) -> Sm100GroupedConfig:
    """``config`` with what has to follow from all of the operands."""
    fitted = [fit(config, x, y, d) for x, y, d in zip(a, b, out, strict=True)]
    first = fitted[0]
    for i, one in enumerate(fitted):
        for field in ("kind", "a_e5m2", "b_e5m2", "b_e2m1", "out_dtype", "column_major"):
            if getattr(one, field) != getattr(first, field):
                raise ValueError(
                    f"problem {i} has {field} {getattr(one, field)} and problem 0 {getattr(first, field)}; "
                    "all problems of a list must have the same"
                )
    # Every problem's rows start on a scale tile of their own; b is only gathered where K ends inside a product.
    whole_products = all(one.scales_b == "tiled" for one in fitted) or first.kind == "MXFP8"
    otherwise = "plain" if first.kind == "FP8_BLOCK" else "window"
    return replace(
        first,
        problem_list=True,
        scales_a="tiled" if whole_products and first.tile_m % 128 == 0 else otherwise,
        scales_b="tiled" if whole_products and first.tile_n % 128 == 0 else otherwise,
        wide_stores=all(one.wide_stores for one in fitted),
        max_groups=256,
    )


def _on_device(content: bytes, device: torch.device) -> torch.Tensor:
    """The bytes in memory of ``device``, on a 64-byte boundary as tensor maps want it."""
    host = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    whole = torch.empty(len(content) + 64, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 64
    table = whole[start : start + len(content)]
    table.copy_(host)
    return table
