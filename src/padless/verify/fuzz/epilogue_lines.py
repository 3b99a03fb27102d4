"""Fixed problems of the quantising calls, which `padless verify` runs: by check, those of an architecture."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from padless.compat.cudnn.request import D_DTYPES, FORMAT_OF_DTYPE
from padless.epilogue import COLUMN_FORMATS
from padless.formats import FORMATS, FP8_BLOCK, NVFP4, BlockScaledFormat
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import QUANT, Route, find_route, kernels_arch
from padless.verify.fuzz.epilogues import N_MULTIPLE, fitting, norm_const_rule
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.product_lines import Lines, whole_code_tiles
from padless.verify.tiles import FUSED, routes_of

GATE_UP = (None, "interleaved", "concatenated")
OUT_FORMATS: tuple[BlockScaledFormat | None, ...] = (None, *FORMATS)
PROBLEMS = 54
_FORMAT_DTYPES = {fmt: dtype for dtype, fmt in FORMAT_OF_DTYPE.items()}


def line(route: Route, sizes: Sequence[int], n: int, k: int, *properties: str, **others: Any) -> Options:
    """A problem of a route's kernel: bfloat16 values, or codes of ``format`` along rows."""
    one: Options = {"a": route.a, "b": route.b, "module": route.module, "b_layout": "plain", "gate_up": None}
    n, k = whole_code_tiles(route, n, k)
    one |= {"format": None, "out": "bfloat16", "row_layout": "plain", "column_layout": "plain"}
    one |= {"alpha": False, "bias": False, "prob": False, "amax": False, "semantics": "implementation"}
    one |= {"sizes": [*sizes], "past": 0, "n": n, "k": k, "a_layout": "plain", "globals": 1, "b_globals": 1}
    one |= {"d_globals": 1, "gaps": [0, 0, 0], "nan_row": -1, "nan_group": -1, "offs64": False, "hostile": []}
    one |= {"m_aligned": 1, "seed": 0, "drawn": "normal", "properties": [*properties]} | others
    fixed: Options = {"rows": one["format"] is not None, "columns": False, "rule": _rule(one["format"])}
    return fixed | one


def _rule(format: str | None) -> str:
    return {None: "", "FP8_BLOCK": "", "NVFP4": "te"}.get(format, "rceil")


def default_of(route: Route) -> Route:
    """The route of the kernel that a call takes for the route's formats by itself."""
    return find_route(QUANT, route.arch, route.a, route.b)


# --- any options -----------------------------------------------------------------------------------------


def random_line(route: Route, seed: int, *properties: str) -> Options:
    """A function of the route and the seed. Eighteen seeds in a row have each activation with each output format."""
    draw = random.Random(f"{route.module} {route.a} {route.b} {seed}")
    own = draw.randrange(2**31)
    gate_up, format = GATE_UP[seed % 3], OUT_FORMATS[seed // 3 % 6]
    m_aligned = draw.choice((1, 1, 1, 128))
    small = (0, 1, 5, 63, 64, 65, 127, 129, draw.randrange(150))
    sizes = [draw.choice(small if m_aligned == 1 else (0, 128, 128, 256)) for _ in range(draw.randint(1, 4))]
    past, n = draw.randrange(4), _columns(draw, gate_up, format)
    k = (16 if route.a == route.b == "FP8_BLOCK" else 32) * draw.randint(1, 20)
    special = draw.randrange(6) == 0
    o = line(route, sizes, n, k, *properties, past=past, seed=own, m_aligned=m_aligned, gate_up=gate_up)
    o |= _outputs(draw, route, gate_up is not None, format, len(sizes))
    o |= {"special": draw.choice(("inf", "nan")) if special and sum(sizes) + past > 3 else ""}
    for name in ("alpha", "bias", "prob"):
        o[name] = draw.choice(("float32", "bfloat16", "float16")) if draw.random() < 0.6 else False
    o |= {"prob_of_rank_3": bool(o["prob"]) and draw.random() < 0.5}
    o |= {"drawn": "extreme" if special else "normal", "semantics": draw.choice(("implementation", "documented"))}
    if o["rule"] == "norm_const":
        o["rule"] = norm_const_rule(o["semantics"])
    return o | {"tile": _tile(draw, route, gate_up is not None, format, o)}


def _columns(draw: random.Random, gate_up: str | None, format: BlockScaledFormat | None) -> int:
    """N: tails of the 128-column tile, in the steps that 16 bytes a row of the output allow."""
    if gate_up is not None:
        multiple = N_MULTIPLE[gate_up]
        return multiple * draw.randint(1, 512 // multiple)
    multiple = 8 if format is None else 16 * format.codes_per_byte
    return multiple * draw.randint(1, 352 // multiple)


def _outputs(draw: random.Random, route: Route, gated: bool, format: BlockScaledFormat | None, groups: int) -> Options:
    """left_out: what cuDNN's call is not told, as its defaults are the same."""
    amax, left_out = draw.choice((None, True, False)), ["scale_rule"]
    if format is None:
        dtype = draw.choice(D_DTYPES)
        left_out += ["return_amax"] if amax is None else []
        amax = dtype != torch.float32 if amax is None else amax
        return {"format": None, "out": str(dtype)[6:], "amax": amax, "left_out": left_out}
    left_out += ["d_format"] if format in _FORMAT_DTYPES and draw.random() < 0.5 else []
    left_out += ["return_amax"] if amax is None else []
    choices: tuple[tuple[bool, bool | None], ...] = ((True, None), (True, False), (False, True))
    rows, columns = draw.choice(choices) if format in COLUMN_FORMATS else (True, False)
    o: Options = {"format": format.name, "amax": bool(amax), "rule": _rule(format.name), "left_out": left_out}
    o["rows"], o["columns"] = fitting(route, gated, format, rows, columns is not False)
    left_out += ["column_output"] if columns is None and o["columns"] else []
    layouts = ("plain", "plain_mn") if format == FP8_BLOCK else ("plain", "blocked", "blocked_groups")
    given = draw.choice((None, *layouts))
    left_out += ["row_layout"] if given is None else []
    o["row_layout"] = given or ("plain_mn" if format == FP8_BLOCK else "blocked")
    if format == FP8_BLOCK:
        return o
    if format in COLUMN_FORMATS and columns is not False:
        given, discrete = draw.choice((None, *layouts)), draw.random() < 0.5
        left_out += ["column_layout"] if given is None else []
        o["column_layout"] = given or ("blocked_groups" if discrete else "blocked")
    if format == NVFP4:
        o["d_globals"] = draw.choice((1, groups))
    elif draw.random() < 0.5:
        o["rule"] = "norm_const"
    else:
        rule = draw.choice((None, "rceil", "floor"))
        o |= {"rule": rule or "rceil", "left_out": [name for name in left_out if name != "scale_rule" or rule is None]}
    return o


def _tile(draw: random.Random, route: Route, gated: bool, format: BlockScaledFormat | None, o: Options) -> int:
    """The kernel's own choice or, on Hopper, any tile that can do this epilogue."""
    if route.config_class is not Sm90Fp8Config:
        return 0
    heights = [128]
    if format is not None or o["out"] != "float32" or gated:
        heights.append(256)  # twice the shared memory for float32 values leaves too few stages
    if format != FP8_BLOCK or not o["columns"]:
        heights.append(64)
    swaps = gated and format == FP8_BLOCK and o["rows"]
    tiles = [(m, cluster) for m in heights for cluster in ((2,) if swaps else (1, 2))]
    fit = [i for i, c in enumerate(FUSED) if c is None or (c.block_m, c.cluster_n) in tiles]
    return draw.choice(fit)


def random_lines(arch: str) -> Iterator[Options]:
    """Routes in turn, each with another seed; where the route's kernel is not the default one, that too."""
    routes = routes_of(arch, QUANT)
    for seed in range(PROBLEMS):
        route = routes[seed % len(routes)]
        one = random_line(route, seed, "near", "bits", "changes")
        yield from (one | {"module": module} for module in dict.fromkeys((route.module, default_of(route).module)))


# --- SwiGLUs with a rule, such as gpt-oss' --------------------------------------------------------------

_RULES = ((1.702, 7.0, 1.0), (1.0, 0.75, 0.0))
# Activations, weights, output (None for bfloat16), order of gate and up.
_GATED: dict[str, tuple[tuple[str, str, str | None, str], ...]] = {
    "sm_90a": (
        ("BF16", "MXFP4", None, "alternating"),
        ("FP8_BLOCK", "MXFP4", "FP8_BLOCK", "alternating"),
        ("NVFP4", "NVFP4", "NVFP4", "alternating"),
        ("FP8_BLOCK", "FP8_BLOCK", "FP8_BLOCK", "concatenated"),
        ("MXFP8", "MXFP8", "MXFP8", "interleaved"),
    ),
    "sm_100a": (
        ("FP8_BLOCK", "FP8_BLOCK", "FP8_BLOCK", "concatenated"),
        ("MXFP8", "MXFP4", "MXFP8", "interleaved"),
        ("NVFP4", "NVFP4", "NVFP4", "concatenated"),
    ),
}


def gated_lines(arch: str) -> Iterator[Options]:
    """Products of every kernel that stores a layer's SwiGLU, few rows a group as in decoding and many as in prefill."""
    routes = {(route.a, route.b): route for route in routes_of(arch, QUANT)[::-1]}
    for (seed, (a, b, format, order)), sizes in itertools.product(
        enumerate(_GATED[kernels_arch(arch)]), ((1, 0, 9, 2), (200, 0, 130, 7))
    ):
        one = line(routes[a, b], sizes, 384, 256, "near", "bits", past=3, seed=seed, format=format, gate_up=order)
        layout = "plain_mn" if format == "FP8_BLOCK" else "plain"
        yield one | {"bias": True, "drawn": "gates", "row_layout": layout, "gate": [*_RULES[seed % 2]]}


# --- small launches, for compute-sanitizer -------------------------------------------------------------

_EVERYTHING: Options = {"alpha": True, "bias": True, "prob": True, "amax": True}
_SMALL: tuple[Options, ...] = (
    {"format": "FP8_BLOCK", "columns": True, "row_layout": "plain_mn"} | _EVERYTHING,
    {"format": "MXFP8", "columns": True, "row_layout": "blocked", "column_layout": "blocked_groups"},
    {"format": "NVFP4", "row_layout": "blocked_groups"},
    # Two CTAs of a cluster swap the maxima of their rows.
    {"gate_up": "concatenated", "format": "FP8_BLOCK", "row_layout": "plain_mn"} | _EVERYTHING,
    {"gate_up": "interleaved", "format": "FP8_BLOCK", "columns": True, "row_layout": "plain_mn", "prob": True},
    {"gate_up": "interleaved", "amax": True},
)


def small(arch: str) -> Iterator[Options]:
    """Every output of every route: no rows, one row, more than a tile of 128 rows; rows past the last group. A tail of
    the 128 columns; five blocks of 128 along K and a tail, so that a ring of four stages goes round.
    """
    for route, options in itertools.product(routes_of(arch, QUANT), _SMALL):
        gated = options.get("gate_up") is not None
        one = line(route, (5, 0, 130, 1), 384 if gated else 160, 672, past=3, seed=1, **options)
        format = None if one["format"] is None else next(f for f in FORMATS if f.name == one["format"])
        one["rows"], one["columns"] = fitting(route, gated, format, one["rows"], one["columns"])
        yield one


CHECKS: dict[str, Lines] = {"epilogues": random_lines, "gated epilogues": gated_lines}
