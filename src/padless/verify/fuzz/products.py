"""Products under judgement: grouped_gemm, gemm, grouped_gemm_list and scaled_grouped_mm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from padless.compat.torch import scaled_grouped_mm
from padless.formats import BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import ROUTES, Route
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.runtime.choices import BackendName
from padless.testing.operands import BF16
from padless.verify.formats import configs_of
from padless.verify.fuzz import judge as judging
from padless.verify.fuzz import operands
from padless.verify.fuzz.operands import Operand, Weight, spans
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

BESIDE = ("alone", "alone", "reversed", "gemm", "layout")


def routes_of(arch: str, operation: str) -> list[Route]:
    """The routes of an operation on an architecture; on none, of both, each pair once."""
    found = [r for r in ROUTES if r.operation == operation and (not arch or r.arch == arch)]
    return list({(r.a, r.b, r.module if arch else ""): r for r in found}.values())


def route_named(arch: str, operation: str, a: str, b: str, module: str) -> Route:
    """The route of a problem's options."""
    found = [r for r in routes_of(arch, operation) if (r.a, r.b) == (a, b)]
    return next((r for r in found if r.module == module), found[0])


def arch_of(draw: Draw) -> str:
    """The architecture whose kernels the backend runs, without asking a GPU."""
    return {"reference": "", "emulator": "sm_90a", "emulator:sm_100a": "sm_100a"}.get(draw.backend, cuda_arch())


def cuda_arch() -> str:
    """The kernels' architecture of this machine's GPU, "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    from padless.kernels.table import kernels_arch
    from padless.runtime.driver import cuda_driver

    return kernels_arch(cuda_driver().arch)


# --- drawing ---------------------------------------------------------------------------------------------


def pair(draw: Draw, operation: str) -> Options:
    """What a kernel is compiled for: formats, output, the layout of the weights' scales, the tile."""
    route = draw.one(routes_of(arch_of(draw), operation))
    blocked = route.b != "FP8_BLOCK" and draw.maybe(0.4)
    out = draw.one(tuple(DTYPES))
    tile = 0
    if arch_of(draw) and operation == "grouped_gemm":
        tile = draw.randrange(len(_configs(route, out))) if draw.maybe(0.7) else 0
    return {
        "a": route.a,
        "b": route.b,
        "module": route.module if arch_of(draw) else "",
        "out": out,
        "b_layout": "blocked" if blocked else "plain",
        "tile": tile,
    }


def _configs(route: Route, out: str) -> list[KernelChoice | None]:
    """The default, then tiles."""
    # FP8_BLOCK's tallest tile with float32 output leaves too little shared memory.
    too_tall = route.module == "sm90_fp8" and out == "float32"
    return [c for c in configs_of(route) if not (too_tall and isinstance(c, Sm90Fp8Config) and c.block_m == 256)]


def config_of(place: Place, options: Options, operation: str = "grouped_gemm") -> KernelChoice | None:
    """The configuration that a problem's ``module`` and ``tile`` stand for."""
    if not place.arch:
        return None
    route = route_named(place.arch, operation, options["a"], options["b"], options.get("module", ""))
    if operation == "grouped_gemm":
        configs = _configs(route, options["out"])
        return configs[options.get("tile", 0) % len(configs)]
    default = routes_of(place.arch, operation)
    first = next(r for r in default if (r.a, r.b) == (route.a, route.b))
    return None if first is route else route.config_class


def k_multiple(a: str, b: str) -> int:
    return 16 if {a, b} <= {"FP8_BLOCK", BF16} else 32


def n_multiple(out: str) -> int:
    return 16 // DTYPES[out].itemsize


def shape(draw: Draw, constants: Options) -> Options:
    """Everything that no kernel is compiled for: sizes, strides, layouts of activations, what is special."""
    sizes = draw.sizes()
    rows, groups = sum(sizes), len(sizes)
    k = k_multiple(constants["a"], constants["b"])
    valid = list(range(min(rows, 64)))
    found: Options = {
        "sizes": sizes,
        "past": draw.past(),
        "n": draw.multiple(n_multiple(constants["out"]), draw.limits.n if groups < 20 else 64),
        "k": draw.multiple(k, draw.limits.k if groups < 20 else 256),
        "a_layout": a_layout(draw, constants["a"]),
        "globals": draw.one((0, 1, groups)),
        "b_globals": draw.one((0, 1, groups)),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_row": draw.one(valid) if valid and draw.maybe(0.1) else -1,
        "nan_group": draw.randrange(groups) if draw.maybe(0.05) else -1,
        "beside": draw.one(BESIDE),
        "offs64": draw.maybe(0.1),
        "hostile": [],
        "seed": draw.data_seed(),
    }
    if draw.backend != "reference" and draw.maybe(0.04):
        found["hostile"] = draw.hostile_ends(groups, rows + found["past"])
    return found


def a_layout(draw: Draw, a: str) -> str:
    if a == BF16:
        return "plain"
    return draw.one(("plain", "k") if a == "FP8_BLOCK" else ("plain", "blocked", "blocked_groups"))


# --- operands and judgement ------------------------------------------------------------------------------


class Product:
    """The operands of a problem's options and the exact product of its groups."""

    def __init__(self, o: Options, place: Place) -> None:
        sizes = o["sizes"]
        self.o, self.place, self.sizes = o, place, sizes
        self.rows, self.groups = sum(sizes) + o["past"], len(sizes)
        self.ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.valid = self.ends[-1]
        self.offs = place.ends(o.get("hostile") or self.ends)
        self.offs = self.offs.long() if o.get("offs64") else self.offs
        generator = place.generator(o["seed"])
        gaps = o["gaps"]
        self.a = operands.activation(
            place,
            o["a"],
            self.rows,
            o["k"],
            generator,
            ends=o.get("hostile") or self.ends,
            offs=self.offs,
            layout=o["a_layout"],
            gap=gaps[0],
            globals_=o["globals"],
            nan_row=o["nan_row"],
        )
        self.b = operands.weight(
            place,
            o["b"],
            self.groups,
            o["n"],
            o["k"],
            generator,
            layout=o["b_layout"],
            gap=gaps[1],
            globals_=o["b_globals"],
            nan_group=o["nan_group"],
        )
        self.dtype = DTYPES[o["out"]]

    def exact(self) -> judging.Product:
        """Float64 products of the valid rows."""
        return judging.exact_grouped(self.a.values, self.b.values, spans(self.ends, self.rows))

    def near(self, name: str, out: torch.Tensor, config: object) -> None:
        """The valid rows of ``out`` against float64."""
        fp8 = self.place.has_kernels and not _is_bf16(self.o, config, self.place)
        self.place.judge.product(name, out[: self.valid], self.exact, judging.precision_of(fp8))

    def some_rows(self) -> tuple[int, int, int] | None:
        """(group, first row, end row) of a few rows of one group, picked by the seed."""
        draw = random.Random(self.o["seed"])
        filled = [g for g, size in enumerate(self.sizes) if size > 0]
        if not filled:
            return None
        group = draw.choice(filled)
        start, end = spans(self.ends, self.rows)[group]
        first = draw.randrange(start, end)
        return group, first, min(end, first + draw.choice((1, 1, 2, 9, 70)))


def _is_bf16(o: Options, config: object, place: Place) -> bool:
    """Whether the kernel sums in float32 of exact values."""
    if isinstance(config, Sm90Bf16Config) or config is Sm90Bf16Config:
        return True
    return place.arch == "sm_90a" and o["module"].startswith("sm90_bf16")


def judge_grouped_gemm(o: Options, place: Place) -> None:
    p, judge = Product(o, place), place.judge
    config = config_of(place, o)
    call: dict[str, Any] = {"backend": place.backend, "config": config}
    guarded = place.output(p.rows, o["n"], p.dtype, o["gaps"][2])
    out = grouped_gemm(p.a.given, p.b.given, p.offs, out=guarded.out, **call)
    judge.wrong("the result is not out", out is not guarded.out)
    if o["hostile"]:
        judge.written("fences with wrong offsets", guarded, p.rows, anything=True)
        return
    judge.written("fences", guarded, p.valid)
    p.near("float64", out, config)
    beside = o["beside"]
    if beside == "alone":
        _judge_alone(p, out, config)
    elif beside == "reversed":
        _judge_reversed(p, out, config)
    elif beside == "gemm":
        _judge_gemm_beside(p, out)
    else:
        again = grouped_gemm(p.a.plain, p.b.plain, p.offs, out_dtype=p.dtype, **call)
        judge.same("plain operands", again[: p.valid], out[: p.valid])


def _judge_alone(p: Product, out: torch.Tensor, config: KernelChoice | None) -> None:
    """Some rows of one group by themselves, with the weights of that group alone."""
    if (some := p.some_rows()) is None:
        return
    group, first, end = some
    index = torch.arange(first, end, device=p.place.device)
    a, b = operands.rows_alone(p.a.plain, index, group), operands.weights_alone(p.b.given, group)
    alone = grouped_gemm(a, b, p.place.ends([end - first]), out_dtype=p.dtype, backend=p.place.backend, config=config)
    p.place.judge.same("rows alone", alone, out[first:end])


def _judge_reversed(p: Product, out: torch.Tensor, config: KernelChoice | None) -> None:
    """Groups, and the rows in them, in reverse."""
    if p.valid == 0 or p.groups > 20:
        return
    device = p.place.device
    index = torch.arange(p.valid - 1, -1, -1, device=device)
    a: Any = p.a.plain
    if isinstance(a, BlockScaledTensor) and a.global_scale is not None and a.global_scale.numel() > 1:
        turned = operands.rows_alone(BlockScaledTensor(a.data, a.scale, a.format, a.global_scale[:1]), index, 0)
        assert isinstance(turned, BlockScaledTensor)
        a = BlockScaledTensor(turned.data, turned.scale, a.format, a.global_scale.flip(0))
    else:
        a = operands.rows_alone(a, index, 0)
    b = p.b.plain
    shared = b.global_scale if b.global_scale is None else b.global_scale.flip(0)
    raw = b.data.view(torch.uint8).flip(0).view(b.data.dtype)
    scale = (
        b.scale.flip(0) if b.scale.dtype == torch.float32 else (b.scale.view(torch.uint8).flip(0).view(b.scale.dtype))
    )
    sizes = p.sizes[::-1]
    offs = p.place.ends([sum(sizes[: i + 1]) for i in range(len(sizes))])
    turned_b = BlockScaledTensor(raw, scale, b.format, shared)
    got = grouped_gemm(a, turned_b, offs, out_dtype=p.dtype, backend=p.place.backend, config=config)
    p.place.judge.same("groups in reverse", got.flip(0), out[: p.valid])


def _judge_gemm_beside(p: Product, out: torch.Tensor) -> None:
    """The rows of one group as a dense product."""
    some = p.some_rows()
    if some is None or p.o.get("tile"):
        return
    group = some[0]
    start, end = spans(p.ends, p.rows)[group]
    index = torch.arange(start, end, device=p.place.device)
    a = operands.rows_alone(p.a.plain, index, group)
    b = operands.dense(operands.weights_alone(p.b.given, group))
    config = config_of(p.place, p.o, "gemm") if p.place.arch == "sm_90a" else None
    if p.place.arch == "sm_100a":  # the dense kernel adds up otherwise
        return
    got = gemm(a, b, out_dtype=p.dtype, backend=p.place.backend, config=config)
    p.place.judge.same("as a dense product", got, out[start:end])


# --- gemm ------------------------------------------------------------------------------------------------


def one_group(draw: Draw, constants: Options) -> Options:
    found = shape(draw, constants)
    limits = draw.limits
    return found | {
        "sizes": [draw.one((0, 1, 2, 17, 64)) if draw.maybe(0.5) else draw.randint(0, 2 * limits.rows)],
        "past": 0,
        "a_layout": "plain" if found["a_layout"] == "blocked_groups" else found["a_layout"],
        "globals": min(found["globals"], 1),
        "b_globals": min(found["b_globals"], 1),
        "nan_row": -1,
        "nan_group": -1,
        "hostile": [],
        "n": draw.multiple(n_multiple(constants["out"]), limits.n),
        "k": draw.multiple(k_multiple(constants["a"], constants["b"]), limits.k),
    }


def judge_gemm(o: Options, place: Place) -> None:
    p, judge = Product(o, place), place.judge
    config = config_of(place, o, "gemm")
    b = operands.dense(p.b.given)
    guarded = place.output(p.rows, o["n"], p.dtype, o["gaps"][2])
    out = gemm(operands.without_groups(p.a.given), b, out=guarded.out, backend=place.backend, config=config)
    judge.written("fences", guarded, p.valid)
    p.near("float64", out, config)
    if p.valid > 1:
        rows = torch.arange(p.valid // 2, p.valid, device=place.device)
        alone = gemm(
            operands.rows_alone(p.a.plain, rows, 0), b, out_dtype=p.dtype, backend=place.backend, config=config
        )
        judge.same("rows alone", alone, out[p.valid // 2 :])


# --- lists -----------------------------------------------------------------------------------------------


def list_constants(draw: Draw) -> Options:
    """Formats that Blackwell's list takes."""
    pairs = [(r.a, r.b) for r in ROUTES if (r.operation, r.arch) == ("grouped_gemm", "sm_100a")]
    a, b = draw.one(list(dict.fromkeys(pairs)))
    return {"a": a, "b": b, "out": draw.one(tuple(DTYPES)), "blocked": b != "FP8_BLOCK" and draw.maybe(0.4)}


def list_rest(draw: Draw, constants: Options) -> Options:
    count = draw.randint(1, 4)
    step = n_multiple(constants["out"])
    return {
        "problems": [
            [
                draw.one((0, 1, 2, 17, draw.randint(0, draw.limits.rows))),
                draw.multiple(step, draw.limits.n),
                draw.multiple(32, draw.limits.k),
            ]
            for _ in range(count)
        ],
        "alpha": draw.maybe(0.5),
        "seed": draw.data_seed(),
    }


def judge_list(o: Options, place: Place) -> None:
    generator = place.generator(o["seed"])
    layout = "blocked" if o["blocked"] else "plain"
    dtype = DTYPES[o["out"]]
    a: list[Operand] = []
    b: list[Weight] = []
    fences = []
    for m, n, k in o["problems"]:
        ends = [m]
        a += [
            operands.activation(
                place, o["a"], m, k, generator, ends=ends, offs=place.ends(ends), layout=layout, globals_=1
            )
        ]
        b += [operands.weight(place, o["b"], 1, n, k, generator, layout=layout, globals_=1)]
        fences.append(place.output(m, n, dtype, 16))
    alpha = None
    if o["alpha"]:
        alpha = torch.rand(len(a), device=place.device, generator=generator) + 0.5
    outs: Sequence[torch.Tensor] = grouped_gemm_list(
        [x.given for x in a],  # type: ignore[misc]
        [operands.dense(x.given) for x in b],
        out=[f.out for f in fences],
        alpha=alpha,
        backend=place.backend,
    )
    fp8 = place.has_kernels
    for i, (out, guarded) in enumerate(zip(outs, fences, strict=True)):
        place.judge.written("fences", guarded, out.shape[0])
        if out.numel() == 0:
            continue
        exact = judging.exact_product(a[i].values, b[i].values[0].t())
        exact = exact if alpha is None else exact.scaled(alpha[i])
        place.judge.product("float64", out, exact, judging.precision_of(fp8))
        if alpha is None and not fp8:
            one = gemm(a[i].plain, operands.dense(b[i].plain), out_dtype=dtype, backend=place.backend)
            place.judge.same("as a dense product", out, one)


# --- torch's call ----------------------------------------------------------------------------------------


def torch_constants(draw: Draw) -> Options:
    del draw
    return {"a": "FP8_BLOCK", "b": "FP8_BLOCK", "module": "sm90_fp8", "b_layout": "plain", "tile": 0}


def torch_rest(draw: Draw, constants: Options) -> Options:
    out = draw.one(tuple(DTYPES))
    found = shape(draw, constants | {"out": out})
    groups = len(found["sizes"])
    return (
        found
        | {"out": out, "hostile": [], "nan_group": -1, "b_globals": 0, "globals": 0, "transposed": draw.maybe(0.5)}
        | ({"sizes": found["sizes"][:8]} if groups > 20 else {})
    )


def judge_scaled_grouped_mm(o: Options, place: Place) -> None:
    p = Product(o, place)
    a, b = p.a.given, p.b.given
    assert isinstance(a, BlockScaledTensor)
    scale_b = b.scale.transpose(-2, -1)
    got = scaled_grouped_mm(
        a.data,
        b.data.transpose(-2, -1),
        [a.scale] if o["transposed"] else a.scale,
        "BlockWise1x128",
        scale_b.contiguous() if o["transposed"] else scale_b,
        ["BlockWise128x128"],
        offs=p.offs,
        output_dtype=p.dtype,
    )
    p.near("float64", got, None)
    backend: BackendName | None = None if place.device.type == "cuda" else "reference"
    want = grouped_gemm(p.a.plain, p.b.plain, p.offs, out_dtype=p.dtype, backend=backend)
    place.judge.same("grouped_gemm", got[: p.valid], want[: p.valid])
