"""Fixed problems of products, which `padless verify` runs: by check, those of an architecture."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from padless.formats import MXFP4_REPACKED, round_up
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.table import BF16, Route, find_route
from padless.verify.fuzz.problem import DTYPES, Options
from padless.verify.tiles import configs_of, routes_of

_NEAR, _INVARIANT = 6, 2  # problems of each route
# M, N and K differ everywhere; tails in every dimension; groups of 0, 1, 127, 129 rows; tensors under 128 KiB.
_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 0, 8, 16),
    ((0, 0, 0), 3, 72, 144),
    ((5, 0, 130, 1), 3, 136, 272),
    ((127, 128, 129, 1), 0, 264, 400),
    ((0, 64, 65, 63, 0), 7, 384, 512),
    ((300, 0, 7, 129, 127), 11, 1000, 1040),
    ((1000,), 0, 520, 4112),
    (tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
)
# Together they send every ring round more than once: 14 K blocks in one, and more than three tiles a CTA in the last.
_SMALL: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((5, 0, 130, 1), 3, 136, 272),
    ((0, 64, 65), 7, 200, 1680),
    ((20,) * 30, 5, 2000, 64),
)
_WRONG = ([300, 10, -5, 200], [-1, -1, -1, -1], [2**31 - 1] * 4, [0, 2**30, -(2**31), 5], [256, 128, 64, 0])
_SMALL_PAIRS = (("NVFP4", "NVFP4"), ("MXFP8", "MXFP8"), (BF16, "MXFP4"), ("FP8_BLOCK", "NVFP4"))
Lines = Callable[[str], Iterable[Options]]
_FP8 = find_route("grouped_gemm", "sm_90a", "FP8_BLOCK", "FP8_BLOCK")


def whole_code_tiles(route: Route, n: int, k: int) -> tuple[int, int]:
    """n and k, rounded up to tiles of 16 x 64 codes where b is repacked."""
    return (round_up(n, 16), round_up(k, 64)) if route.b == MXFP4_REPACKED.name else (n, k)


def _line(route: Route, sizes: Sequence[int], n: int, k: int, *properties: str, **others: Any) -> Options:
    """A problem of a route's default kernel, in bfloat16."""
    one: Options = {"a": route.a, "b": route.b, "module": route.module, "out": "bfloat16", "b_layout": "plain"}
    n, k = whole_code_tiles(route, n, k)
    one |= {"tile": 0, "sizes": [*sizes], "past": 0, "n": n, "k": k, "a_layout": "plain", "globals": 1, "b_globals": 1}
    one |= {"gaps": [0, 0, 0], "nan_row": -1, "nan_group": -1, "offs64": False, "hostile": [], "seed": 0}
    return one | {"properties": [*properties]} | others


def _shapes(*properties: str, **others: Any) -> Iterator[Options]:
    for seed, (sizes, past, n, k) in enumerate(_SHAPES):
        yield _line(_FP8, sizes, n, k, *properties, past=past, seed=seed, **others)


# --- Hopper's kernel of FP8_BLOCK -----------------------------------------------------------------------


def _accuracy(arch: str) -> Iterator[Options]:
    for out, layout in itertools.product(DTYPES, ("plain", "k")):
        yield from _shapes("near", out=out, a_layout=layout, drawn="normal", tight=True)


def _configs_agree(arch: str) -> Iterator[Options]:
    for out in DTYPES:
        yield from _shapes("tiles", out=out)


def _wrong_offsets(arch: str) -> Iterator[Options]:
    for wrong, tile in itertools.product(_WRONG, range(1, 5)):
        yield _line(_FP8, [64] * 4, 136, 272, tile=tile, hostile=wrong)


def _repeats(arch: str) -> Iterator[Options]:
    for tile in range(1, len(configs_of(_FP8))):
        yield _line(_FP8, [300, 0, 7, 129, 127, 64, 1], 1000, 1040, "repeats", tile=tile, times=50)


def _dense(arch: str) -> Iterator[Options]:
    for m, n, k in ((1, 8, 16), (333, 264, 400), (1024, 520, 1040)):
        yield _line(_FP8, [m], n, k, "near", "changes", drawn="normal")


# --- every route ---------------------------------------------------------------------------------------


def random_line(route: Route, seed: int, *properties: str) -> Options:
    """A function of the route and the seed, alike on every device: ragged sizes, tails of M, N and K, scales in any
    layout, any configuration. FP8_BLOCK's own kernel has scales over 20 powers of two, and normal codes for odd seeds.
    """
    draw = random.Random(f"{route.module} {route.a} {route.b} {seed}")
    own = draw.randrange(2**31)
    sizes = [draw.choice((0, 1, 5, 63, 64, 65, 127, 129, draw.randrange(150))) for _ in range(draw.randint(1, 4))]
    of_fp8_block = route.config_class is Sm90Fp8Config
    past, n, k = draw.randrange(4), 8 * draw.randint(1, 34), (16 if of_fp8_block else 32)
    k *= draw.randint(1, 25 if of_fp8_block else 14)
    a_layout = "plain" if route.a == BF16 else draw.choice(("plain", "blocked", "blocked_groups"))
    b_layout = draw.choice(("plain", "blocked"))
    config, out = draw.choice(configs_of(route)), draw.choice(tuple(DTYPES))
    if isinstance(config, Sm90Fp8Config) and out == "float32":
        config = replace(config, block_m=min(config.block_m, 128))  # twice the shared memory
    o = _line(route, sizes, n, k, *properties, past=past, out=out, seed=own)
    o |= {"tile": configs_of(route, out).index(config), "drawn": "anywhere", "tight": route.arch == "sm_100a"}
    o |= {"globals": draw.choice((1, len(sizes))), "b_globals": draw.choice((1, len(sizes)))}
    if of_fp8_block:
        return o | {"drawn": "wide normal" if seed % 2 else "wide"}
    plain = {f"{x}_layout": "plain" for x, name in (("a", route.a), ("b", route.b)) if name == "FP8_BLOCK"}
    return o | {"a_layout": a_layout, "b_layout": b_layout} | plain


def _random(count: int, properties: tuple[str, ...], arch: str) -> Iterator[Options]:
    """Of every grouped route but the first kernel's."""
    routes = (route for route in routes_of(arch) if route != _FP8)
    return (random_line(route, seed, *properties) for route in routes for seed in range(count))


def _random_fp8(arch: str) -> Iterator[Options]:
    return (random_line(_FP8, seed) for seed in range(200))


def _padding(arch: str) -> Iterable[Options]:
    return _shapes("changes")


def _replay(arch: str) -> Iterable[Options]:
    return [_line(_FP8, [100, 0, 57, 99], 264, 400, "replay")]


def _threads(arch: str) -> Iterable[Options]:
    return [_line(_FP8, [31, 130, 1], 136, 272, "threads", times=50)]


def invariant_line(route: Route, seed: int, factor: int = 1) -> Options:
    """Groups of every size that tiles are chosen by, tails of N and K, in float32, which hides nothing, or bfloat16.

    factor: how many times larger N and K are.
    """
    draw = random.Random(f"invariance {route.module} {route.a} {route.b} {seed}")
    sizes = [0, 1, *(draw.randint(*span) for span in ((2, 8), (9, 16), (17, 32), (33, 64), (65, 131)))]
    draw.shuffle(sizes)
    n, k = factor * 16 * draw.randint(1, 24), factor * 32 * draw.randint(1, 20)
    out = ("float32", "bfloat16")[seed % 2]
    return _line(route, sizes, n, k, "near", "changes", out=out, drawn="loud", seed=draw.randrange(2**31))


def _invariance(arch: str) -> Iterator[Options]:
    for route, seed in itertools.product(routes_of(arch), range(_INVARIANT)):
        yield invariant_line(route, seed)


# --- Blackwell's dense kernel and its lists ------------------------------------------------------------


def _dense_mxfp8(arch: str) -> Iterator[Options]:
    for seed in range(20):
        draw = random.Random(f"dense {seed}")
        m, n, k = draw.randint(1, 600), draw.randint(1, 600), 32 * draw.randint(1, 20)
        a, b = draw.choice([*itertools.product(("MXFP8", "MXFP8_E5M2"), repeat=2)])
        out, tile = draw.choice(tuple(DTYPES)), seed % 5
        n = -(-n // 8) * 8 if tile == 2 else n  # rows on 16-byte boundaries, for staged stores
        layouts = {"a_layout": draw.choice(("plain", "blocked")), "b_layout": draw.choice(("plain", "blocked"))}
        route = find_route("gemm", "sm_100a", a, b)
        yield _line(route, [m], n, k, "bits", out=out, tile=tile, drawn="exact", seed=seed, **layouts)


def _lists(arch: str) -> Iterator[Options]:
    for seed in range(12):
        draw = random.Random(f"list {seed}")
        format, out = ("NVFP4", "MXFP8", "MXFP4")[seed % 3], draw.choice(tuple(DTYPES))
        column_major = draw.random() < 0.5
        problems = [
            [draw.choice((0, 1, 72, 129, 200)), 8 * draw.randint(1, 40), 32 * draw.randint(1, 16)]
            for _ in range(draw.randint(1, 5))
        ]
        problems.append([60, 264, 160])  # one that is not empty, with tails
        one: Options = {"a": format, "b": format, "out": out, "blocked": draw.random() < 0.5, "alpha": True}
        one |= {"problems": problems, "column_major": column_major, "tile": seed % 5, "drawn": "exact"}
        yield one | {"gap": 0, "seed": seed, "properties": ["bits"]}


# --- small launches, for compute-sanitizer -------------------------------------------------------------


def small(arch: str) -> Iterator[Options]:
    """Every store and scale path of FP8_BLOCK's kernel; a launch of every other kernel, on Hopper of a few pairs of the
    bf16 kernel, which differ in how operands are read. Operands are drawn on the CPU: a tool sees who wrote them.
    """
    for (sizes, past, n, k), layout in itertools.product(_SMALL if arch == "sm_90a" else (), ("plain", "k")):
        one = _line(_FP8, sizes, n, k, past=past, a_layout=layout, drawn="anywhere")
        yield from (one | {"tile": tile} for tile in range(1, len(configs_of(_FP8))))
        yield one | {"out": "float32"}
    for route in routes_of(arch):
        # A tail of the 128 columns; five blocks of 128 along K and a tail, so that a ring of four stages goes round.
        one = _line(route, (5, 0, 130, 1), 160, 672, past=3, drawn="anywhere")
        of_bf16 = route.config_class is Sm90Bf16Config
        if not (of_bf16 or route.config_class is Sm90Mxfp8Config):
            yield one
        elif (route.a, route.b) in _SMALL_PAIRS:
            config = Sm90Bf16Config(route.a, route.b) if of_bf16 else Sm90Mxfp8Config()
            yield one | {"tile": configs_of(route).index(config)}
            if of_bf16:  # the one for so few rows, with twice the warpgroups
                yield one


def small_dense(arch: str) -> Iterator[Options]:
    """The first of `_dense_mxfp8`."""
    return (o | {"properties": []} for o in itertools.islice(_dense_mxfp8(arch) if arch == "sm_100a" else (), 1))


def small_lists(arch: str) -> Iterator[Options]:
    return (o | {"properties": []} for o in itertools.islice(_lists(arch) if arch == "sm_100a" else (), 1))


# By check: the call, and its problems on an architecture. No lambda: processes that compile ahead get these pickled.
CHECKS: dict[str, tuple[str, Lines]] = {
    "accuracy": ("grouped_gemm", _accuracy),
    "configs agree": ("grouped_gemm", _configs_agree),
    "padding changes nothing": ("grouped_gemm", _padding),
    "wrong offsets stay inside": ("grouped_gemm", _wrong_offsets),
    "repeats agree": ("grouped_gemm", _repeats),
    "graph replay": ("grouped_gemm", _replay),
    "streams and threads": ("grouped_gemm", _threads),
    "dense": ("gemm", _dense),
    "formats": ("grouped_gemm", partial(_random, _NEAR, ("near",))),
    "batch invariance": ("grouped_gemm", _invariance),
    "dense MXFP8": ("gemm", _dense_mxfp8),
    "lists of problems": ("grouped_gemm_list", _lists),
}
# Problems that are compared with the emulator.
EMULATED: dict[str, Lines] = {"emulator agrees": _random_fp8, "emulator agrees on formats": partial(_random, 10, ())}
