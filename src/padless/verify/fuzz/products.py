"""Products under judgement: grouped_gemm, gemm, grouped_gemm_list and scaled_grouped_mm."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.compat.torch import scaled_grouped_mm
from padless.formats import FP8_BLOCK, MXFP4_REPACKED, MXFP8, NVFP4, BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.table import QUANT, ROUTES
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.runtime.architecture import with_own_kernels
from padless.runtime.choices import BackendName
from padless.testing.operands import BF16, in_layout, spans
from padless.verify.fuzz import exact, operands
from padless.verify.fuzz import judge as judging
from padless.verify.fuzz.case import Change, ends_of, judge_case, whole
from padless.verify.fuzz.operands import Operand
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.tiles import config_of, configs_of, pairs_of, route_of, routes_of

# Of normal values, |out - float64| / |float64| of a row: the tensor core keeps 13 fractional bits of the largest of 33
# terms, truncating toward zero, four times in 128 of K: about 2^-12.6. The output dtype rounds by half a unit in the
# last place: 2^-9 for bf16, 2^-12 for fp16. The limits leave a factor of two to three.
ROW_ERROR_LIMIT = {torch.float32: 2.0**-11, torch.float16: 2.0**-10.5, torch.bfloat16: 2.0**-7.5}
_CROWD = 40  # rows a group on average, at least, where groups of a few are put among many
_MANY = 64  # groups, of which not all are put elsewhere


def arch_of(draw: Draw) -> str:
    """The architecture whose kernels the backend runs, without asking a GPU."""
    if draw.backend == "cuda":
        return cuda_arch()
    return next((own.name for own in with_own_kernels() if own.backend == draw.backend), "")


def cuda_arch() -> str:
    """The kernels' architecture of this machine's GPU, "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    from padless.kernels.table import kernels_arch
    from padless.runtime.driver import cuda_driver

    return kernels_arch(cuda_driver().arch)


# --- drawing ---------------------------------------------------------------------------------------------


def pair(draw: Draw, operation: str) -> Options:
    """Options that a kernel is compiled for: formats, output, the layout of the weights' scales, the tile."""
    route = draw.one(routes_of(arch_of(draw), operation))
    blocked = route.b != "FP8_BLOCK" and draw.maybe(0.4)
    out = draw.one(tuple(DTYPES))
    tile = 0
    if arch_of(draw) and operation == "grouped_gemm":
        tile = draw.randrange(len(configs_of(route, out))) if draw.maybe(0.7) else 0
    return {
        "a": route.a,
        "b": route.b,
        "module": route.module if arch_of(draw) else "",
        "out": out,
        "b_layout": "blocked" if blocked else "plain",
        "tile": tile,
    }


def k_multiple(a: str, b: str) -> int:
    return 64 if b == MXFP4_REPACKED.name else 16 if {a, b} <= {"FP8_BLOCK", BF16} else 32


def n_multiple(out: str, b: str) -> int:
    return 16 if b == MXFP4_REPACKED.name else 16 // DTYPES[out].itemsize


def shape(draw: Draw, constants: Options) -> Options:
    """Everything that no kernel is compiled for: sizes, strides, layouts of activations, what is special."""
    sizes = draw.sizes()
    rows, groups = sum(sizes), len(sizes)
    k = k_multiple(constants["a"], constants["b"])
    valid = list(range(min(rows, 64)))
    found: Options = {
        "sizes": sizes,
        "past": draw.past(),
        "n": draw.multiple(n_multiple(constants["out"], constants["b"]), draw.limits.n if groups < 20 else 64),
        "k": draw.multiple(k, draw.limits.k if groups < 20 else 256),
        "a_layout": a_layout(draw, constants["a"]),
        "globals": draw.one((0, 1, groups)),
        "b_globals": draw.one((0, 1, groups)),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_row": draw.one(valid) if valid and draw.maybe(0.1) else -1,
        "nan_group": draw.randrange(groups) if draw.maybe(0.05) else -1,
        "properties": ["near", *draw.one((["change"], ["change"], ["change"], ["replay"], []))],
        "offs64": draw.maybe(0.1),
        "hostile": [],
        "seed": draw.data_seed(),
    }
    if not may_replay(draw, constants, found):
        found["properties"] = [name for name in found["properties"] if name != "replay"]
    if draw.backend != "reference" and draw.maybe(0.04):
        found["hostile"] = draw.hostile_ends(groups, rows + found["past"])
    return found


def may_replay(draw: Draw, constants: Options, found: Options) -> bool:
    """Whether a call with other ends in the same memory may follow: a CPU compares those that scales were made for."""
    has_groups = found["a_layout"] == "blocked_groups" or (constants["a"] == NVFP4.name and found["globals"] > 1)
    return draw.backend == "cuda" or not has_groups


def a_layout(draw: Draw, a: str) -> str:
    if a == BF16:
        return "plain"
    return draw.one(("plain", "k") if a == "FP8_BLOCK" else ("plain", "blocked", "blocked_groups"))


# --- operands and calls ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grouped:
    """a (M, K) and b (G, N, K), where groups end, and rows in them. offs None: b (N, K) of a dense product."""

    a: Any
    b: Any
    offs: torch.Tensor | None
    valid: int
    config: KernelChoice | None


class Product:
    """`grouped_gemm` of a problem's options, among NaN. hostile: with offsets that are no partition."""

    a: Any
    b: Any

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place, self.sizes, self.dtype = o, place, o["sizes"], DTYPES[o["out"]]
        self.ends = list(itertools.accumulate(self.sizes))
        self.valid, self.groups = self.ends[-1], len(self.sizes)
        self.rows = self.valid + o["past"]
        self.spans = spans(self.ends, self.rows)
        self.offs = self._offs(o.get("hostile") or self.ends)
        self.a, self.b = self.drawn(operands.generator_of(place, o))
        self.operands = Grouped(self.a.given, self.b.given, self.offs, self.valid, self.kernel_of())

    def drawn(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        o, drawing = self.o, self.o.get("drawn", "codes")
        a = operands.activation(
            self.place, o["a"], self.rows, o["k"], generator, ends=o.get("hostile") or self.ends, offs=self.offs,
            layout=o["a_layout"], gap=o["gaps"][0], globals_=o["globals"], nan_row=o["nan_row"], drawing=drawing,
        )  # fmt: skip
        b = operands.weight(
            self.place, o["b"], self.groups, o["n"], o["k"], generator, layout=o["b_layout"], gap=o["gaps"][1],
            globals_=o["b_globals"], nan_group=o["nan_group"], drawing=drawing,
        )  # fmt: skip
        return a, b

    def kernel_of(self, tile: int | None = None) -> KernelChoice | None:
        """The problem's configuration. tile: 0 for the kernel alone, which the other calls take too."""
        return config_of(self.place, self.o, tile=tile)

    def _offs(self, ends: list[int]) -> torch.Tensor:
        made = self.place.ends(ends)
        return made.long() if self.o.get("offs64") else made

    def run(self, p: Grouped) -> torch.Tensor:
        judge = self.place.judge
        guarded = self.place.output(p.a.shape[0], self.o["n"], self.dtype, self.o["gaps"][2])
        out = self._made(guarded.out, p)
        judge.wrong("the result is not out", out is not guarded.out)
        judge.written("fences", guarded, p.valid)
        return out[: p.valid]

    def hostile(self) -> None:
        """Wrong offsets: the rows of ascending ones within the operand are written, and nothing outside of them."""
        guarded = self.place.output(self.rows, self.o["n"], self.dtype, self.o["gaps"][2])
        self._made(guarded.out, self.operands)
        self.place.judge.written("fences with wrong offsets", guarded, spans(self.o["hostile"], self.rows)[-1][1])

    def _made(self, out: torch.Tensor, p: Grouped) -> torch.Tensor:
        how: dict[str, Any] = {"out": out, "backend": self.place.backend, "config": p.config}
        return gemm(p.a, p.b, **how) if p.offs is None else grouped_gemm(p.a, p.b, p.offs, **how)

    def make(self, out: torch.Tensor) -> None:
        self._made(out, self.operands)

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        """Rows past the last group are as `run` found them."""
        return torch.cat([fresh, fresh.new_full((self.o["past"], self.o["n"]), torch.nan)])

    def exact(self) -> judging.Product:
        """Float64 products of the valid rows."""
        return judging.exact_grouped(self.a.values, self.b.values, self.spans)

    def near(self, out: torch.Tensor) -> None:
        """tight: values are spread so that no sum of a row cancels."""
        fp8 = self.place.has_kernels and not self._is_bf16()
        precision = judging.precision_of(fp8)
        if fp8 and self.o.get("tight"):
            precision = precision._replace(of_norm=ROW_ERROR_LIMIT[self.dtype])
        self.place.judge.product("float64", out, self.exact, precision)

    def _is_bf16(self) -> bool:
        """Whether the kernel sums in float32 of exact values."""
        config, module = self.operands.config, self.o.get("module", "")
        chosen = isinstance(config, Sm90Bf16Config) or config is Sm90Bf16Config
        return chosen or (self.place.arch == "sm_90a" and module.startswith("sm90_bf16"))

    def reference(self) -> torch.Tensor:
        """Of operands that are drawn as "exact"."""
        return self.exact().values

    def changes(self) -> Iterator[Change]:
        yield "plain operands", partial(self.run, replace(self.operands, a=self.a.plain, b=self.b.plain)), whole, whole
        for layout in self._layouts():
            yield f"scales {layout}", partial(self._run_in_layout, layout), whole, whole
        yield from self.surroundings()
        if (self.o["a"], self.o["b"]) in pairs_of(self.place.arch, QUANT) and self.valid and self.o["n"] % 16 == 0:
            yield "D of the quantizing call", self._quantizing_values, whole, whole
            if self.dtype == torch.float32:
                yield "codes of the quantizing call", self._quantizing_codes, whole, _codes_of

    def surroundings(self) -> Iterator[Change]:
        """The same rows elsewhere. They are multiplied by the weights of their own group, so all are compared."""
        rows = {group: range(*span) for group, span in enumerate(self.spans)}
        filled = [group for group in rows if rows[group]]
        if not filled:
            return
        largest = max(filled, key=lambda group: self.sizes[group])
        some = filled if len(filled) <= _MANY else [*ends_of(self.sizes)]
        if len(rows) <= _MANY:
            crowd = [*itertools.islice(itertools.cycle(rows[largest]), _CROWD * (len(rows) + 1))]
            every = [*rows.items()]
            padded = [(g, [*own, *itertools.repeat(own[0], -len(own) % 128)] if own else own) for g, own in every]
            yield self._arranged("in reverse", [(group, own[::-1]) for group, own in every[::-1]])
            yield self._arranged("before a crowded group", [*every, (largest, crowd)])
            yield self._arranged("padded", padded)
            yield self._arranged("before rows of no group", every, crowd)
        draw = random.Random(self.o["seed"])
        group = draw.choice(filled)
        first = draw.choice(rows[group])
        yield self._arranged(
            "rows alone", [(group, rows[group][first - rows[group][0] :][: draw.choice((1, 2, 9, 70))])]
        )
        for group in some:
            yield self._arranged("a group alone", [(group, rows[group])])
        for own in (rows[largest], rows[largest][-1:]):
            yield self._arranged("as a dense product", [(largest, own)], dense=True)
        if (
            self.place.arch == "sm_100a"
            and self.operands.config is None
            and isinstance(self.a.plain, BlockScaledTensor)
        ):
            its = self._index([row for group in some for row in rows[group]])
            yield "in a list", partial(self._in_a_list, [(group, rows[group]) for group in some]), whole, its

    def tiles(self) -> Iterator[Change]:
        """Every configuration, and the other order of FP8_BLOCK's scales."""
        layouts = self._layouts() if self.o["a"] == "FP8_BLOCK" else ()
        every = (self.operands, *map(self._in_layout, layouts))
        for config, p in itertools.product(configs_of(route_of(self.place.arch, self.o), self.o["out"]), every):
            yield f"{config}", partial(self.run, replace(p, config=config)), whole, whole

    def _layouts(self) -> tuple[str, ...]:
        """Of the activations' scales."""
        if self.o["a"] == BF16:
            return ("plain",)
        return ("k",) if self.o["a"] == "FP8_BLOCK" else ("blocked", "blocked_groups")

    def _in_layout(self, layout: str) -> Grouped:
        a, b = self.a.plain, self.b.plain
        if layout == "k":
            a = BlockScaledTensor(a.data, a.scale.contiguous(), a.format)
        elif layout != "plain":
            a = replace(in_layout(a, layout, self.offs), offs=a.offs if layout == "blocked" else self.offs)
        return replace(self.operands, a=a, b=b if b.format == FP8_BLOCK else in_layout(b, "blocked"))

    def _run_in_layout(self, layout: str) -> torch.Tensor:
        return self.run(self._in_layout(layout))

    def _index(self, rows: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda out: out[self.place.ends([*rows]).long()]

    def _arranged(
        self, name: str, parts: Sequence[tuple[int, Sequence[int]]], behind: Sequence[int] = (), dense: bool = False
    ) -> Change:
        """Groups with these rows, and rows of no group behind them."""
        rows = [row for _, own in parts for row in own]
        return name, lambda: self.run(self._rearranged(parts, [*rows, *behind], dense)), whole, self._index(rows)

    def _rearranged(self, parts: Sequence[tuple[int, Sequence[int]]], rows: Sequence[int], dense: bool) -> Grouped:
        groups, ends = [group for group, _ in parts], [*itertools.accumulate(len(own) for _, own in parts)]
        offs, index = self._offs(ends), self.place.ends([*rows]).long()
        a = operands.rows_alone(self.a.plain, index, groups, offs)
        b = self.b.given if groups == [*range(self.groups)] else operands.groups_alone(self.b.given, groups)
        if dense:
            return Grouped(a, operands.dense(b), None, ends[-1], self.kernel_of(0))
        return Grouped(a, b, offs, ends[-1], self.operands.config)

    def _in_a_list(self, parts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        products = [self._rearranged([part], part[1], True) for part in parts]
        outs = [
            torch.full((p.valid, self.o["n"]), torch.nan, dtype=self.dtype, device=self.place.device) for p in products
        ]
        how: dict[str, Any] = {"out": outs, "backend": self.place.backend}
        grouped_gemm_list([p.a for p in products], [p.b for p in products], **how)
        return torch.cat(outs)

    def _quantizing(self, **outputs: Any) -> Any:
        how: dict[str, Any] = {"return_amax": False, "backend": self.place.backend, "config": self.kernel_of(0)}
        a, b = self.a.plain, self.b.plain
        return grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=self.offs, **outputs, **how)

    def _quantizing_values(self) -> torch.Tensor:
        """D of the quantizing call, which has nothing to do but to round."""
        made: torch.Tensor = self._quantizing(d_dtype=self.dtype)["d_tensor"]
        return made[: self.valid]

    def _quantizing_codes(self) -> torch.Tensor:
        got = self._quantizing(d_format=MXFP8, column_output=False, row_layout="plain").row
        return torch.cat([t.view(torch.uint8)[: self.valid] for t in (got.data, got.scale)], 1)


def _codes_of(values: torch.Tensor) -> torch.Tensor:
    """MXFP8 codes and scales of rows."""
    return torch.cat(exact.quantized(values, MXFP8, "activation", "rceil"), 1)


judge_grouped_gemm = partial(judge_case, Product)


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
        "n": draw.multiple(n_multiple(constants["out"], constants["b"]), limits.n),
        "k": draw.multiple(k_multiple(constants["a"], constants["b"]), limits.k),
    }


class Dense(Product):
    """`gemm`."""

    def __init__(self, o: Options, place: Place) -> None:
        super().__init__(o, place)
        a, b = operands.without_groups(self.a.given), operands.dense(self.b.given)
        self.operands = Grouped(a, b, None, self.valid, config_of(place, o, "gemm"))

    def changes(self) -> Iterator[Change]:
        p, half = self.operands, range(self.valid // 2, self.valid)
        if half:
            own = replace(self._rearranged([(0, half)], half, True), config=p.config)
            yield "rows alone", partial(self.run, own), whole, self._index(half)
        grouped = Grouped(self.a.given, self.b.given, self.offs, self.valid, self.kernel_of(0))
        yield "as the only group", partial(self.run, grouped), whole, whole


judge_gemm = partial(judge_case, Dense)


# --- lists -----------------------------------------------------------------------------------------------


def list_constants(draw: Draw) -> Options:
    """Formats that Blackwell's list takes."""
    pairs = [(r.a, r.b) for r in ROUTES if (r.operation, r.arch) == ("grouped_gemm", "sm_100a")]
    a, b = draw.one(list(dict.fromkeys(pairs)))
    return {"a": a, "b": b, "out": draw.one(tuple(DTYPES)), "blocked": b != "FP8_BLOCK" and draw.maybe(0.4)}


def list_rest(draw: Draw, constants: Options) -> Options:
    count = draw.randint(1, 4)
    step = n_multiple(constants["out"], constants["b"])
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
    """Every product is near float64 in its own fence; every bit of those that are drawn as "exact"."""
    drawing, generator = o.get("drawn", "codes"), operands.generator_of(place, o)
    layouts = {"layout": "blocked" if o["blocked"] else "plain", "globals_": 0 if drawing == "exact" else 1}
    dtype, column_major = DTYPES[o["out"]], o.get("column_major", False)
    a: list[Operand] = []
    b: list[Operand] = []
    fences = []
    for m, n, k in o["problems"]:
        groups: dict[str, Any] = {"ends": [m], "offs": place.ends([m])}
        a += [operands.activation(place, o["a"], m, k, generator, drawing=drawing, **groups, **layouts)]  # type: ignore[arg-type]
        b += [operands.weight(place, o["b"], 1, n, k, generator, drawing=drawing, **layouts)]  # type: ignore[arg-type]
        fences.append(place.output(*((n, m) if column_major else (m, n)), dtype, o.get("gap", 16)))
    config: Any = config_of(place, o, "grouped_gemm_list")
    alpha = None
    if o["alpha"]:
        alpha = (torch.rand(len(a), device=generator.device, generator=generator) + 0.5).to(place.device)
    outs = grouped_gemm_list(
        [x.given for x in a],
        [operands.dense(x.given) for x in b],
        out=[f.out.t() if column_major else f.out for f in fences],
        alpha=alpha,
        backend=place.backend,
        config=config,
    )
    for i, (out, guarded) in enumerate(zip(outs, fences, strict=True)):
        place.judge.written("fences", guarded)
        if out.numel() == 0:
            continue
        place.judge.product(
            "float64", out, partial(_exact_of, a[i], b[i], alpha, i), judging.precision_of(place.has_kernels)
        )
        if drawing == "exact":
            place.judge.same("the exact product's bits", out, partial(_bits_of, a[i], b[i], alpha, i, dtype))
        elif alpha is None and not place.has_kernels:
            one = gemm(a[i].plain, operands.dense(b[i].plain), out_dtype=dtype, backend=place.backend)
            place.judge.same("as a dense product", out, one)


def _exact_of(a: Operand, b: Operand, alpha: torch.Tensor | None, number: int) -> judging.Product:
    product = judging.exact_product(a.values, b.values[0].t())
    return product if alpha is None else product.scaled(alpha[number])


def _bits_of(a: Operand, b: Operand, alpha: torch.Tensor | None, number: int, dtype: torch.dtype) -> torch.Tensor:
    product = (a.values @ b.values[0].t()).float()
    return (product if alpha is None else product * alpha[number]).to(dtype)


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
    p.near(got[: p.valid])
    backend: BackendName | None = None if place.device.type == "cuda" else "reference"
    want = grouped_gemm(p.a.plain, p.b.plain, p.offs, out_dtype=p.dtype, backend=backend)
    place.judge.same("grouped_gemm", got[: p.valid], want[: p.valid])
