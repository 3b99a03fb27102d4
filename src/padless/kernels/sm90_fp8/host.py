"""Host side of sm90_fp8_grouped_gemm.cu: FP8_BLOCK x FP8_BLOCK on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from padless.epilogue import INTERLEAVE
from padless.formats import BlockScaledTensor
from padless.kernels import ahead, maps
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.schedule import has_half_tiles
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config, fit_config, select_config
from padless.layouts import to_mn_major
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape, PreparedLaunch
from padless.runtime.jit import CompiledKernel

Config = Sm90Fp8Config
KERNEL = Config().source  # with tokens on rows


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm90Fp8Config | None,
) -> Prepared:
    """Packs the launch of out = a @ b of its group. Scales of ``a`` in another layout than the kernel's are copied."""
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    device = out.device.index or 0
    problem = Problem(m, n, k, num_groups, out.dtype, driver.num_sms(device))
    config = select_config(problem) if config is None else fit_config(config, problem)
    a, copies = readable(a, config.scales)
    loaded = load_kernel(driver, config.source, config, device)
    counter = tile_counter(config, device, out.data_ptr())
    if config.few_rows:
        specs = (*few_rows_maps(a, b, config), maps.output_ragged(out, config.block_m))
        few: list[Argument] = [driver.encode(spec) for spec in specs]
        return Prepared(packed(driver, loaded, a, b, offs, problem, config, few, counter, [out]), copies)
    encoded: list[Argument] = [b"".join(map(driver.encode, specs)) for specs in _tensor_maps(a, b, out, config)]
    strides = (tensor_map.outer_stride(b.data, dim) for dim in (1, 0))
    weights = [(value, 8) for value in (b.data.data_ptr(), *strides)]
    return Prepared(packed(driver, loaded, a, b, offs, problem, config, encoded, counter, [out], weights), copies)


def readable(a: BlockScaledTensor, scales: str) -> tuple[BlockScaledTensor, tuple[torch.Tensor, ...]]:
    """``a`` with scales in the layout that the kernel reads, "mn" or "k", and the copy that this took."""
    if a.scale_major == scales:
        return a, ()
    scale = to_mn_major(a.scale) if scales == "mn" else a.scale.contiguous()
    return BlockScaledTensor(a.data, scale, a.format), (scale,)


def packed(
    driver: Driver,
    loaded: tuple[CompiledKernel, Any],
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    problem: Problem,
    tile: Sm90Fp8Config,
    encoded: list[Argument],
    counter: int,
    written: list[torch.Tensor],
    others: Sequence[Argument] = (),
) -> PreparedLaunch:
    """The launch of a kernel whose first arguments are ``encoded`` and whose last are ``others``."""
    kernel, function = loaded
    arguments = [*encoded, (b.scale.data_ptr(), 8), (0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(value, 4) for value in (problem.m, problem.n, problem.k, problem.num_groups, counter)]
    use = usable(b.data, offs, problem.m, tile)
    arguments += use.arguments() if tile.few_rows else use.arguments()[:1]
    tensors = [t for t in (a.data, a.scale, b.data, b.scale, *written, offs, use.ids) if t is not None]
    grid = ctas_of(problem, tile)
    shape = LaunchShape(grid, kernel.num_threads, tile.cluster_n, programmatic=True, ready=use.addresses())
    return driver.prepare(function, kernel, shape, [*arguments, *others], tensors)


def usable(weights: torch.Tensor, offs: torch.Tensor | None, m: int, tile: Sm90Fp8Config) -> ahead.Use:
    """The kernel's use of what is ready: offs without clusters, and ids with tokens on columns."""
    can_wait = tile.few_rows or (tile.cluster_n == 1 and tile.scales == "mn")
    return ahead.usable(offs, m, [weights], counts=tile.few_rows) if can_wait else ahead.Use()


def ctas_of(problem: Problem, config: Sm90Fp8Config) -> int:
    """The grid. Where tiles that have halves are few, every one is cut in two (``schedule.tiles_to_cut``)."""
    columns = config.block_n * config.cluster_n
    tiles = most_tiles(problem.m, problem.n, problem.num_groups, config.block_m, columns)
    half_tiles = tiles * (2 if has_half_tiles(config.block_m) else 1)
    return persistent_grid(problem.num_sms, half_tiles, config.cluster_n)


def few_rows_maps(
    a: BlockScaledTensor, b: BlockScaledTensor, config: Sm90Fp8Config, gate_and_up_apart: bool = False
) -> tuple[tensor_map.TensorMapSpec, ...]:
    """A, B and scales of A, as sm90_fp8_few reads them."""
    n = config.block_n
    return (
        tensor_map.operand(a.data, config.block_m),
        tensor_map.gate_up_operand(b.data, n, INTERLEAVE) if gate_and_up_apart else tensor_map.operand(b.data, n),
        tensor_map.mn_major_scales(a.scale, config.block_m + 4),
    )


def _tensor_maps(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, config: Sm90Fp8Config
) -> list[tuple[tensor_map.TensorMapSpec, ...]]:
    """The kernel's four tensor-map arguments, in its order: A, B, scales of A, D."""
    if config.scales == "mn":
        scales = tensor_map.mn_major_scales(a.scale, 96 if config.block_m == 256 else config.block_m + 4)
    else:
        scales = tensor_map.flat(a.scale, 256)
    return [
        (maps.rows_operand(a.data, b.data.shape[0] if config.scales == "mn" else None),),
        (tensor_map.operand(b.data, config.block_n),),
        (scales,),
        maps.output_pool(out, 64) if config.store == "pool" else (maps.output_ragged(out, 64),),
    ]
