"""Host side of sm100_grouped_gemm.cu: MXFP8, NVFP4, MXFP4 and MXFP8 x MXFP4 on Blackwell, ragged M."""

from __future__ import annotations

import struct
from dataclasses import replace

import torch

from padless.formats import FP8_BLOCK, MXFP8_E5M2, TILE_ROWS, BlockScaledTensor, blocked_size, ceil_div
from padless.kernels.config import room_for_groups
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.maps import scale_tiles, tiled_scale
from padless.kernels.padded_fp4 import has_padded_b, padded_fp4, spreadable
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.runtime import tensor_map
from padless.runtime.driver import Driver, LaunchShape
from padless.runtime.tensor_map import TensorMapSpec

KERNEL = "sm100_grouped/sm100_grouped_gemm.cu"
Config = Sm100GroupedConfig

_KINDS = {"MXFP8": "MXFP8", "MXFP8_E5M2": "MXFP8", "NVFP4": "NVFP4", "MXFP4": "MXFP4", "FP8_BLOCK": "FP8_BLOCK"}


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm100GroupedConfig | None,
    alpha: torch.Tensor | None = None,
) -> Prepared:
    """Packs the launch of out = alpha * a @ b of its group.

    a: (M, K); b: (G, N, K); offs: (G,) int32 end rows or None for one group of all rows; out: (M, N), rows or columns
    contiguous; alpha: float32, one value or one per group. Scales that are not a multiple of 4 columns wide and plain
    are copied into 32x4x4 tiles first; any other are read as they are. FP4 weights beside 8-bit activations are copied
    where K is no multiple of 64, or 32 or 96, or where they do not start on 32-byte boundaries.
    """
    check_operands(a, b)
    _check(b, out, alpha)
    a, b, copies = readable(a, b)
    m, (num_groups, n, _) = a.data.shape[0], b.data.shape
    device = out.device.index or 0
    if config is None:
        row_bytes = a.data.shape[1] * a.data.element_size()
        config = select_grouped_config(m, n, num_groups, row_bytes, kind_of(a, b), driver.num_sms(device))
    config = fit(config, a, b, out)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    tiles = most_tiles(m, n, num_groups, config.tile_m, config.cluster_n)

    counter = tile_counter(config, device, out.data_ptr())
    operands = operand_bytes(driver, a, b, out, alpha, config)
    problem = problem_bytes(operands, 0, 0, 0 if offs is None else offs.data_ptr(), num_groups, counter)
    optional = (a.global_scale, b.global_scale, alpha, offs)
    tensors = [a.data, a.scale, b.data, b.scale, out, *(t for t in optional if t is not None), *copies]
    shape = launch_shape(driver, device, config, tiles, kernel.num_threads)
    return Prepared(driver.prepare(function, kernel, shape, [problem], tensors), copies)


def launch_shape(driver: Driver, device: int, config: Sm100GroupedConfig, tiles: int, num_threads: int) -> LaunchShape:
    """The persistent grid of at most ``tiles`` tiles. Raises ValueError where the device is too small for a cluster."""
    grid = persistent_grid(driver.num_sms(device), tiles, config.cluster)
    if grid == 0:
        raise ValueError(
            f"config has cta_group {config.cta_group} and multicast {config.multicast}, clusters of "
            f"{config.cluster} CTAs; the device has {driver.num_sms(device)} multiprocessors; lower one of the two"
        )
    return LaunchShape(grid, num_threads, config.cluster, programmatic=True)


def operand_bytes(
    driver: Driver, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor | None,
    alpha: torch.Tensor | None, config: Sm100GroupedConfig, gate_and_up_apart: bool = False,
) -> bytes:  # fmt: skip
    """struct Operands; no ``out`` where an epilogue stores."""
    maps = b"".join(driver.encode(spec) for spec in tensor_maps(a, b, config, gate_and_up_apart))
    output = bytes(16) if out is None else output_bytes(out, config.column_major)
    factors = b"".join(_factor(t) for t in (a.global_scale, b.global_scale, alpha))
    shape = struct.pack("=3i", a.data.shape[0], b.data.shape[1], a.data.shape[1])
    sources = _source(a, config.scales_a) + _source(b, config.scales_b)
    return padded(maps + sources + output + factors + shape)


def output_bytes(out: torch.Tensor, column_major: bool) -> bytes:
    """struct Output."""
    return struct.pack("=Qq", out.data_ptr(), out.stride(1) if column_major else out.stride(0))


def problem_bytes(operands: bytes, table: int, order: int, offs: int, num_groups: int, counter: int) -> bytes:
    """struct Problem; table, order and offs are addresses."""
    return padded(operands + struct.pack("=3Q2i", table, order, offs, num_groups, counter))


def check_operands(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """Raises ValueError for operands that the common checks let through and this kernel cannot multiply."""
    if _KINDS[a.format.name] != _KINDS[b.format.name] and not has_padded_b(a, b):
        raise ValueError(
            f"a has format {a.format.name} and b {b.format.name}; they must have one element size, but for MXFP4 "
            "weights beside MXFP8 activations"
        )
    for name, t in (("a", a), ("b", b)):
        count = 1 if t.global_scale is None else t.global_scale.numel()
        if count not in (1, b.data.shape[0]):
            raise ValueError(f"{name}.global_scale has {count} values; one, or one per group ({b.data.shape[0]})")


def _check(b: BlockScaledTensor, out: torch.Tensor, alpha: torch.Tensor | None) -> None:
    rows_contiguous = out.stride(1) == 1 or out.shape[1] == 1
    if not (rows_contiguous or out.stride(0) == 1):
        raise ValueError(f"out has strides {out.stride()}; its rows or its columns must be contiguous")
    if alpha is not None and (alpha.dtype != torch.float32 or alpha.numel() not in (1, b.data.shape[0])):
        raise ValueError(f"alpha must be float32, one value or one per group, got {tuple(alpha.shape)} {alpha.dtype}")


def readable(
    a: BlockScaledTensor, b: BlockScaledTensor
) -> tuple[BlockScaledTensor, BlockScaledTensor, tuple[torch.Tensor, ...]]:
    """The operands with scales and codes that the kernel can read, and the copies that had to be made of them."""
    new_a, new_b = _readable(a), _readable(b)
    copies = [new.scale for new, old in ((new_a, a), (new_b, b)) if new is not old]
    new_b = spreadable(new_a, new_b, copies)
    return new_a, new_b, tuple(copies)


def kind_of(a: BlockScaledTensor, b: BlockScaledTensor) -> str:
    """The operands as ``select_grouped_config`` has them."""
    return "MXFP8 x MXFP4" if has_padded_b(a, b) else a.format.name


def _readable(t: BlockScaledTensor) -> BlockScaledTensor:
    """``t`` with scales that the kernel can read: plain ones in words of 4, 32x4x4 tiles in pieces of 16 bytes."""
    if t.format == FP8_BLOCK:
        return t
    if t.scale_layout == "plain" and t.scale_columns % 4 == 0:
        scale, layout = t.scale.clone() if t.scale.data_ptr() % 16 != 0 else t.scale, "plain"
    else:
        scale, layout = tiled_scale(t), "blocked" if t.scale_layout == "plain" else t.scale_layout
    return t if scale is t.scale else BlockScaledTensor(t.data, scale, t.format, t.global_scale, layout)


def fit(
    config: Sm100GroupedConfig, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor
) -> Sm100GroupedConfig:
    """``config`` with what has to follow from the operands and the output."""
    column_major = out.stride(1) != 1 and out.shape[1] > 1
    ld_bytes = (out.stride(1) if column_major else out.stride(0)) * out.element_size()
    single = out.shape[1 if column_major else 0] == 1
    return replace(
        fit_operands(config, a, b),
        column_major=column_major,
        wide_stores=out.data_ptr() % 32 == 0 and (single or ld_bytes % 32 == 0),
        out_dtype=out.dtype,
    )


def fit_operands(
    config: Sm100GroupedConfig, a: BlockScaledTensor, b: BlockScaledTensor, gate_and_up_apart: bool = False
) -> Sm100GroupedConfig:
    """``config`` with what has to follow from the operands."""
    # An FP4 product takes the scales of 64 of K at once. Where K ends in the middle the padding of the second half meets
    # zeros, and must not be a NaN: the gathering warps clear it.
    whole_products = a.format.codes_per_byte == 1 or a.data.shape[-1] % 32 == 0
    on_tiles = a.scale_layout == "blocked_groups"
    sources = {
        "a": "plain" if a.scale_layout == "plain" else "window",
        "b": "plain" if b.scale_layout == "plain" else "window",
    }
    if whole_products and on_tiles and config.tile_m % 128 == 0:
        sources["a"] = "tiled"
    # Up's scales start half way.
    up_on_tiles = not gate_and_up_apart or b.data.shape[1] % 256 == 0
    if whole_products and b.scale_layout == "blocked" and config.tile_n % 128 == 0 and up_on_tiles:
        sources["b"] = "tiled"
    return replace(
        config,
        kind=_KINDS[a.format.name],
        a_e5m2=a.format == MXFP8_E5M2,
        b_e5m2=b.format == MXFP8_E5M2,
        b_e2m1=has_padded_b(a, b),
        scales_a=sources["a"],
        scales_b=sources["b"],
        groups_on_tiles=on_tiles,
        max_groups=room_for_groups(b.data.shape[0]),
    )


def tensor_maps(
    a: BlockScaledTensor, b: BlockScaledTensor, config: Sm100GroupedConfig, gate_and_up_apart: bool = False
) -> list[TensorMapSpec]:
    """The kernel's four tensor maps: A, B, scales of A, scales of B. Those of gathered scales describe nothing used.

    gate_and_up_apart: half of a tile's 256 columns come from either half of B, by copies of 128 rows.
    """
    a_rows = config.token_box
    b_rows = config.weight_box
    atoms = {"NVFP4": 4, "MXFP4": 2}.get(config.kind, 1)
    column_atoms = ceil_div(config.mma_n, 128)
    a_atoms, b_atoms = (column_atoms, 1) if config.tokens_on_n else (1, column_atoms)
    a_atoms = 1 if config.shortens_tiles else a_atoms
    if gate_and_up_apart:
        b_rows, b_atoms = min(b_rows, 128), 1
    map_a = tensor_map.operand(a.data.view(torch.uint8)[None], a_rows)
    map_b = (padded_fp4 if config.b_e2m1 else tensor_map.operand)(b.data.view(torch.uint8), b_rows)
    return [
        map_a,
        map_b,
        scale_tiles(a, atoms, a_atoms) if config.scales_a == "tiled" else map_a,
        scale_tiles(b, atoms, b_atoms) if config.scales_b == "tiled" else map_b,
    ]


def _source(t: BlockScaledTensor, source: str) -> bytes:
    """struct ScaleSource. FP8_BLOCK: its scales, floats from one K block of a row to the next, last row; of weights the
    rows of a group in place of these.
    """
    if t.format == FP8_BLOCK:
        step = t.scale.shape[-2] if t.data.dim() == 3 else 1 if t.scale_major == "k" else t.scale.stride(1)
        return struct.pack("=Qii", t.scale.data_ptr(), step, t.scale.shape[-2] - 1)
    if source == "plain":
        rows = t.scale.numel() // t.scale_columns
    else:
        rows = t.scale.numel() // blocked_size(1, t.scale_columns) * TILE_ROWS
    return struct.pack("=Qii", t.scale.data_ptr(), t.scale_columns, rows - 1)


def _factor(values: torch.Tensor | None) -> bytes:
    """struct Factor."""
    if values is None:
        return struct.pack("=Qq", 0, 0)
    return struct.pack("=Qq", values.data_ptr(), 0 if values.numel() == 1 else 1)


def padded(struct_bytes: bytes) -> bytes:
    """Up to the 64-byte alignment that tensor maps give a struct."""
    return struct_bytes + bytes(-len(struct_bytes) % 64)
