"""Kernels of every route: the one that is picked, and every tile that checks and the fuzzer choose by ``config``."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from padless.kernels.launch import KernelChoice, KernelConfig
from padless.kernels.sm90_bf16.config import Sm90Bf16Config, select_config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.table import QUANT, ROUTES, Route, find_route, kernels_arch
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options

# Of Blackwell's dense kernel and of its lists of problems; None is the kernel's own choice.
_DENSE: tuple[KernelChoice | None, ...] = (
    None,
    Sm100DenseConfig(),
    Sm100DenseConfig(store="staged", tile_order="hilbert"),
    Sm100DenseConfig(block_n=128, tile_order="hilbert"),
    Sm100DenseConfig(cta_group=1, block_n=128),
)
_LISTS: tuple[KernelChoice | None, ...] = (
    None,
    Sm100GroupedConfig(),
    Sm100GroupedConfig(cta_group=2, mma_n=256),
    Sm100GroupedConfig(cta_group=2, mma_n=256, multicast=2),
    Sm100GroupedConfig(cta_group=2, mma_n=64, tokens_on_n=True),
)
# Of Hopper's FP8_BLOCK kernel with an epilogue.
FUSED: tuple[Sm90Fp8Config | None, ...] = (
    None, *(Sm90Fp8Config(block_m=m, cluster_n=cluster) for m in (128, 256, 64) for cluster in (1, 2))
)  # fmt: skip


def routes_of(arch: str, operation: str = "grouped_gemm") -> list[Route]:
    """The routes of an operation on an architecture; on none, "", of all, each pair once."""
    arch = arch and kernels_arch(arch)
    found = [r for r in ROUTES if r.operation == operation and (not arch or r.arch == arch)]
    return list({(r.a, r.b, r.module if arch else ""): r for r in found}.values())


def pairs_of(arch: str, operation: str) -> set[tuple[str, str]]:
    """The pairs of formats that have an operation."""
    return {(route.a, route.b) for route in routes_of(arch, operation)}


def route_of(arch: str, o: Options, operation: str = "grouped_gemm") -> Route:
    """The route of a problem's options; where it is for another call, the default of its pair."""
    found = [r for r in routes_of(arch, operation) if (r.a, r.b) == (o["a"], o["b"])]
    return next((r for r in found if r.module == o.get("module", "")), found[0])


def config_of(
    place: Place, o: Options, operation: str = "grouped_gemm", tile: int | None = None
) -> KernelChoice | None:
    """The configuration that a problem's ``module`` and ``tile`` stand for. tile: another one than the problem's."""
    tile = o.get("tile", 0) if tile is None else tile
    if not place.arch:
        return None
    if operation == "grouped_gemm_list":
        return _LISTS[tile]
    route = route_of(place.arch, o, operation)
    if operation == "grouped_gemm":
        configs = configs_of(route, o["out"])
        return configs[tile % len(configs)]
    if route.config_class is Sm100DenseConfig:
        return _DENSE[tile]
    if operation == QUANT and tile:
        return FUSED[tile]
    default = find_route(operation, route.arch, route.a, route.b) == route
    return None if default else route.config_class


def configs_of(route: Route, out: str = "bfloat16") -> list[KernelChoice | None]:
    """The route's kernel with the tile that it picks (None where the route is the default), and all of its tiles."""
    default = find_route(route.operation, route.arch, route.a, route.b) == route
    tiles = _TILES[route.config_class](route)
    # FP8_BLOCK's tallest tile with float32 output leaves too little shared memory.
    fitting = [c for c in tiles if not (out == "float32" and isinstance(c, Sm90Fp8Config) and c.block_m == 256)]
    return [None if default else route.config_class, *fitting]


def _fp8_tiles(route: Route) -> list[KernelChoice]:
    shapes = ((256, 128, "mn"), (128, 128, "mn"), (128, 128, "k"), (128, 192, "mn"), (128, 64, "mn"), (64, 128, "mn"))
    return [
        Sm90Fp8Config(block_m=m, block_n=n, cluster_n=cluster, store=store, scales=scales)
        for (m, n, scales), cluster, store in itertools.product(
            (*shapes, (64, 192, "k")), (1, 2), ("ragged", "pool")
        )
    ]  # fmt: skip


def _bf16_tiles(route: Route) -> list[KernelChoice]:
    promoted, is_fp4 = "FP8_BLOCK" in (route.a, route.b), route.b.startswith(("MXFP4", "NVFP4"))
    # 128 tokens by FP8_BLOCK weights are not for every output: those of the kernel's own choice.
    tiles = [(m, 128, 2) for m in (8, 16, 32, 64, 128) if m < 128 or route.b != "FP8_BLOCK"]
    tiles += [(m, 256, warpgroups) for m in (8, 16, 32) for warpgroups in (2, 4)]
    tiles += [] if promoted else [(64, 256, 2)]
    tiles += [(64, 256, 4)] if not promoted and is_fp4 else []
    configs: list[KernelChoice] = [
        Sm90Bf16Config(route.a, route.b, block_m=m, block_n=n, num_warpgroups=warpgroups) for m, n, warpgroups in tiles
    ]
    # As chosen for 32 and 64 tokens: two blocks of K to a stage, where that is done.
    return configs + [select_config(route.a, route.b, tokens, 4096, 1) for tokens in (32, 64)]


def _sm100_tiles(route: Route) -> list[KernelChoice]:
    shapes = ((False, 128), (False, 256), (True, 32), (True, 64), (True, 128), (True, 256))
    return [
        Sm100GroupedConfig(cta_group=ctas, multicast=multicast, tokens_on_n=tokens_on_n, mma_n=n)
        for ctas, multicast in ((1, 1), (1, 4), (2, 1), (2, 2))
        for tokens_on_n, n in shapes
    ]


# By the kernel's configuration: every tile of it. A kernel without an entry is not verified: KeyError.
_TILES: dict[type[KernelConfig], Callable[[Route], list[KernelChoice]]] = {
    Sm90Fp8Config: _fp8_tiles,
    Sm90Bf16Config: _bf16_tiles,
    Sm90Mxfp8Config: lambda route: [Sm90Mxfp8Config(block_m=m, block_n=n) for m in (64, 128) for n in (64, 128)],
    Sm100GroupedConfig: _sm100_tiles,
}
