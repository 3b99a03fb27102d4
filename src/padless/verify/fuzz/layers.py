"""Fuzz checks of the Mixture-of-Experts layer's passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, FORMAT_NAMES
from padless.moe import ops, twins
from padless.quantization.quantize import SCALE_RULES, dequantize, quantize
from padless.testing.guarded import guarded_memory
from padless.verify.fuzz import exact
from padless.verify.fuzz.case import Change, judge_case, same_parts, whole
from padless.verify.fuzz.defined import Defined
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


# --- routing ---------------------------------------------------------------------------------------------


def routing_constants(draw: Draw) -> Options:
    return {"top_k": draw.one((1, 2, 3, 6, 8, 16)), "id_dtype": draw.one(("int32", "int64"))}


def routing_rest(draw: Draw, fixed: Options) -> Options:
    most = 1500 if draw.backend == "cuda" else 40
    tokens = draw.one((0, 1, 2, 17, 64, draw.randint(0, most)))
    if draw.backend == "cuda" and draw.maybe(0.1):
        tokens = draw.randint(4096 // fixed["top_k"] - 3, 4096 // fixed["top_k"] + 40)
    return {
        "tokens": tokens,
        "experts": draw.one((1, 2, 8, 60, 128, 257, 512, draw.randint(1, 4096))),
        "same": draw.maybe(0.1),
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


def draw_ids(o: Options, place: Place) -> torch.Tensor:
    """(T, k) ids; all the same where the problem says so, or those of a token distinct.

    strays: the part of them that is past the last expert; two thirds as many are -1.
    """
    generator, experts, strays = place.generator(o["seed"]), o["experts"], o.get("strays", 0.03)
    shape, dtype = (o["tokens"], o["top_k"]), getattr(torch, o["id_dtype"])
    ids = torch.randint(0, experts, shape, device=place.device, generator=generator)
    if o.get("distinct"):
        order = torch.rand((o["tokens"], experts), device=place.device, generator=generator).argsort(1)
        ids = order[:, : o["top_k"]]
    if o["same"]:
        ids = torch.full_like(ids, experts - 1 if o["same"] == "last" else experts // 2)
    chance = torch.rand(shape, device=place.device, generator=generator)
    ids = torch.where(chance < strays, experts, ids)
    ids = torch.where(chance > 1 - strays / 1.5, -1, ids)
    return ids.to(dtype)


# No tokens, one expert for all, no expert for any or for some, k of 1 and of 16.
EDGES: tuple[Options, ...] = tuple(
    {"tokens": tokens, "top_k": k, "experts": 20, "id_dtype": "int64", "strays": 0.0, "same": False, "seed": k} | how
    for tokens, k, how in (
        (0, 4, {}),
        (131, 1, {"same": "last"}),
        (33, 4, {"same": True}),
        (17, 2, {"strays": 1.0}),
        (33, 4, {"strays": 0.2, "distinct": True}),
        (37, 1, {"distinct": True}),
        (21, 16, {"distinct": True}),
    )
)
# (tokens, k, experts): one launch and two, up to 512 experts, k from 1 to 16, no tokens.
_ROUTINGS = (
    (0, 4, 8), (1, 8, 128), (64, 8, 512), (61, 16, 60), (513, 8, 257), (4097, 1, 512), (8192, 8, 128), (20011, 6, 64)
)  # fmt: skip
# (tokens, k, experts, columns)
_GATHERS = ((1, 8, 16, 256), (64, 8, 128, 2880), (700, 3, 9, 1040), (3000, 8, 64, 512))


def _routing(seed: int, tokens: int, k: int, experts: int, **others: Any) -> Options:
    one: Options = {"tokens": tokens, "top_k": k, "experts": experts, "id_dtype": "int64", "same": False, "seed": seed}
    return one | others


def routing_lines(arch: str) -> Iterator[Options]:
    every = [_routing(seed, *sizes, same=same) for seed, sizes in enumerate(_ROUTINGS) for same in (False, True)]
    for one, dtype in itertools.product((*every, *EDGES), ("int64", "int32")):
        yield one | {"id_dtype": dtype, "properties": ["near", "bits"]}


def routing_of(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offs, tokens, inverse) by counting: a slot's row is the number of slots that come before it."""
    flat = ids.reshape(-1).long()
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    slots = flat.numel()
    position = key * max(slots, 1) + torch.arange(slots, device=flat.device)
    order = position.sort().indices
    row = torch.empty_like(order)
    row[order] = torch.arange(slots, device=flat.device)
    bounds = torch.arange(1, experts + 1, device=flat.device) * max(slots, 1)
    offs = torch.searchsorted(position[order], bounds)
    inverse = torch.where(key == experts, -1 - row, row)
    tokens = torch.div(order, ids.shape[1], rounding_mode="floor")
    return offs.int(), tokens.int(), inverse.int().view(ids.shape)


def strayed(places: torch.Tensor, rows: int, place: Place, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(places, a quarter of them neither rows 0 .. rows - 1 nor complements of such; which of them stayed)."""
    generator = place.generator(seed)
    wild = place.ends([rows, rows + 200, 2**31 - 1, -1 - rows, -201 - rows, -(2**31)])
    drawn = wild[torch.randint(len(wild), places.shape, device=place.device, generator=generator)]
    stays = torch.rand(places.shape, device=place.device, generator=generator) >= 0.25
    return torch.where(stays, places, drawn), stays


def named_rows(inverse: torch.Tensor, stays: torch.Tensor) -> torch.Tensor:
    """(rows,) whether the slot of each row is one that stayed."""
    flat = inverse.flatten().long()
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(0, torch.where(flat < 0, -1 - flat, flat), stays.flatten())


def guarded_call(judge: Judge, x: torch.Tensor, call: Callable[[], Any]) -> Any:
    """The result of a call with rows that there are not, of x; None where no kernel runs, which has to refuse it."""
    has_kernels = ops.runs_triton(x)
    with guarded_memory() as changed:
        try:
            out = call()
        except ValueError:
            if has_kernels:
                raise
            return None
    judge.wrong("rows that there are not were taken", not has_kernels)
    judge.wrong("memory around the tensors was written", changed())
    return out


class Route(Defined):
    """`moe.route`."""

    def __init__(self, o: Options, place: Place) -> None:
        super().__init__(o, place, ids=draw_ids(o, place))

    def call(self, ids: torch.Tensor) -> moe.Routing:
        return moe.route(ids, self.o["experts"])

    def definition(self, ids: torch.Tensor) -> moe.Routing:
        return moe.Routing(*twins.route(ids, self.o["experts"]))

    def near(self, out: moe.Routing) -> None:
        wanted = moe.Routing(*routing_of(self.operands["ids"], self.o["experts"]))
        same_parts(self.place.judge, "counted", out, wanted)


judge_route = partial(judge_case, Route)


# --- gathered quantization -------------------------------------------------------------------------------


def gather_constants(draw: Draw) -> Options:
    name = draw.one(FORMAT_NAMES)
    format = FORMAT_BY_NAME[name]
    return routing_constants(draw) | {
        "format": name,
        "dtype": draw.one(tuple(DTYPES)),
        "rule": draw.one(SCALE_RULES[format] or (None,)),
        "layout": "plain" if name == "FP8_BLOCK" else draw.one(("plain", "blocked")),
        "routed": draw.maybe(0.5),
    }


def gather_rest(draw: Draw, fixed: Options) -> Options:
    found = routing_rest(draw, fixed)
    even = FORMAT_BY_NAME[fixed["format"]].codes_per_byte
    most = draw.limits.k // 2
    return found | {
        "hostile": draw.backend == "cuda" and draw.maybe(0.05),
        "tokens": min(found["tokens"], 300),
        "k": draw.one((even * draw.randint(1, most // even), draw.multiple(32, most))),
    }


def gather_lines(arch: str) -> Iterator[Options]:
    drawn = [(_routing(seed, *sizes), {"k": k, "special": True}) for seed, (*sizes, k) in enumerate(_GATHERS)]
    every = [*drawn, *((edge, {"k": 256}) for edge in EDGES)]
    for (ids, how), (name, dtype) in itertools.product(every, zip(FORMAT_NAMES, (*DTYPES, *DTYPES), strict=False)):
        one = ids | how | {"format": name, "rule": (*SCALE_RULES[FORMAT_BY_NAME[name]], None)[0], "routed": True}
        one |= {"dtype": dtype if "special" in how else "bfloat16", "properties": ["near", "bits", "changes"]}
        for layout in ("plain",) if name == "FP8_BLOCK" or "special" not in how else ("plain", "blocked"):
            yield one | {"layout": layout}
    # Rows that there are not; in the last one scales are placed by another launch.
    few, many = _routing(1, 61, 8, 128) | {"k": 544}, _routing(2, 4096, 8, 64) | {"k": 1024}
    how = {"rule": None, "routed": False, "dtype": "bfloat16", "hostile": True, "properties": []}
    for one, name in (*itertools.product((few,), FORMAT_NAMES), (many, "FP8_BLOCK")):
        for layout in ("plain",) if name == "FP8_BLOCK" else ("plain", "blocked"):
            yield one | how | {"format": name, "layout": layout}


class Gather(Defined):
    """`moe.gather_quantize`, or `moe.route_quantize`. special: with a NaN."""

    any_nan = True

    def __init__(self, o: Options, place: Place) -> None:
        self.format = FORMAT_BY_NAME[o["format"]]
        generator = place.generator(o["seed"] + 1)
        x = torch.randn((o["tokens"], o["k"]), device=place.device, generator=generator).to(DTYPES[o["dtype"]])
        if o.get("special"):
            x[o["tokens"] // 2, 3] = math.nan
        shared = torch.full((), 0.003, device=place.device) if self.format.has_global_scale else None
        super().__init__(o, place, x=x, ids=draw_ids(o, place), shared=shared)

    def call(self, x: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None) -> Any:
        if self.o["routed"]:
            return moe.route_quantize(x, ids, self.o["experts"], self.format, **self._options(shared))
        routing = moe.Routing(*routing_of(ids, self.o["experts"]))
        return routing, moe.gather_quantize(x, routing.inverse, self.format, **self._options(shared))

    def definition(self, x: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None) -> Any:
        routing = moe.Routing(*twins.route(ids, self.o["experts"]))
        return routing, quantize(x[routing.tokens.long()], self.format, **self._options(shared))

    def _options(self, shared: torch.Tensor | None) -> dict[str, Any]:
        return {"scale_rule": self.o["rule"], "scale_layout": self.o["layout"], "global_scale": shared}

    def near(self, out: Any) -> None:
        o, judge, (routing, t) = self.o, self.place.judge, out
        x, ids, shared = self.operands.values()
        wanted = moe.Routing(*routing_of(ids, o["experts"]))
        same_parts(judge, "counted", routing, wanted)
        factors = None if shared is None else exact.nvfp4_factors(o["rule"], shared, None)
        codes, scale = exact.quantized(x[wanted.tokens.long()], self.format, "activation", o["rule"] or "", factors)
        judge.same("codes by the rules", t.data.view(torch.uint8), exact.packed(codes, self.format))
        if o["layout"] == "blocked":
            judge.same("scales in tiles", t.scale.view(torch.uint8), exact.tiled(scale))
        else:
            got = t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
            judge.same("scales by the rules", got, scale)

    def changes(self) -> Iterator[Change]:
        x, ids, shared = self.operands.values()
        routing, options = moe.Routing(*routing_of(ids, self.o["experts"])), self._options(shared)
        its = itemgetter(1)
        yield "gather_quantize", partial(moe.gather_quantize, x, routing.inverse, self.format, **options), whole, its
        yield "quantize(rows=)", partial(quantize, x, self.format, rows=routing.tokens, **options), whole, its

    def hostile(self) -> None:
        """Rows and tokens that there are not lead nowhere; the rows whose slot and token stayed are right."""
        o, judge, (x, ids, shared) = self.o, self.place.judge, self.operands.values()
        routing, options = moe.Routing(*routing_of(ids, o["experts"])), self._options(shared)
        inverse, stays = strayed(routing.inverse, ids.numel(), self.place, o["seed"])
        tokens, known = strayed(routing.tokens, o["tokens"], self.place, o["seed"] + 1)
        named = named_rows(routing.inverse, stays)
        for given, right in ((None, named), (tokens, named & known)):
            call = partial(moe.gather_quantize, x, inverse, self.format, tokens=given, **options)
            if (t := guarded_call(judge, x, call)) is not None:
                want = dequantize(quantize(x[routing.tokens.long()], self.format, **options))
                judge.same("rows of slots that stayed", torch.where(right[:, None], dequantize(t), want), want)


judge_gather_quantize = partial(judge_case, Gather)


# --- combine ---------------------------------------------------------------------------------------------


def combine_constants(draw: Draw) -> Options:
    return routing_constants(draw) | {
        "dtype": draw.one(tuple(DTYPES)),
        "out": draw.one(tuple(DTYPES)),
        "weights": draw.one((None, *DTYPES)),
        "shared": draw.one((None, *DTYPES)),
    }


def combine_rest(draw: Draw, fixed: Options) -> Options:
    found = routing_rest(draw, fixed)
    found |= {"hostile": draw.backend == "cuda" and draw.maybe(0.05)}
    return found | {"tokens": min(found["tokens"], 300), "n": draw.randint(1, draw.limits.n)}


def combine_lines(arch: str) -> Iterator[Options]:
    drawn = [_routing(seed, *sizes, n=n) for seed, (*sizes, n) in enumerate(_GATHERS)]
    kinds = [*itertools.product(drawn, zip(DTYPES, ("float32", "bfloat16", "float32"), strict=True))]
    for one, (dtype, weights) in (*kinds, *((edge | {"n": 256}, ("bfloat16", "float32")) for edge in EDGES)):
        same = {"dtype": dtype, "out": dtype, "shared": dtype, "weights": weights}
        yield one | same | {"properties": ["near", "bits"]}
    for dtype in DTYPES:
        same = {"dtype": dtype, "out": dtype, "shared": dtype, "weights": dtype}
        yield _routing(1, 61, 8, 128, n=300) | same | {"hostile": True, "properties": []}


class Combine(Defined):
    """`moe.combine`, `moe.combine_backward` and `moe.gather_backward`; NaN in what no expert's slot has."""

    def __init__(self, o: Options, place: Place) -> None:
        _, _, inverse = routing_of(draw_ids(o, place), o["experts"])
        generator, dropped = place.generator(o["seed"] + 1), inverse < 0
        tokens, k, n = o["tokens"], o["top_k"], o["n"]

        def normal(dtype: str | None, *shape: int) -> torch.Tensor | None:
            t = torch.randn(shape, device=place.device, generator=generator)
            return None if dtype is None else t.to(DTYPES[dtype])

        y, weights = normal(o["dtype"], tokens * k, n), normal(o["weights"], tokens, k)
        assert y is not None
        y = torch.where(_no_slot(inverse)[:, None], math.nan, y)
        weights = None if weights is None else torch.where(dropped, math.nan, weights)
        shared, dout = normal(o["shared"], tokens, n), normal(o["out"], tokens, n)
        super().__init__(o, place, y=y, inverse=inverse, weights=weights, shared=shared, dout=dout)

    def call(self, y: Any, inverse: Any, weights: Any, shared: Any, dout: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sum": moe.combine(y, inverse, weights, shared, out_dtype=DTYPES[self.o["out"]]),
            "plain sum": moe.combine(y, inverse, None, out_dtype=torch.float32),
            "gather_backward": moe.gather_backward(y, inverse),
        }
        return found if weights is None else found | {"gradients": moe.combine_backward(dout, y, inverse, weights)}

    def definition(self, y: Any, inverse: Any, weights: Any, shared: Any, dout: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sum": twins.combine(y, inverse, weights, shared, DTYPES[self.o["out"]]),
            "plain sum": twins.combine(y, inverse, None, None, torch.float32),
            "gather_backward": twins.combine(y, inverse, None, None, y.dtype),
        }
        return found if weights is None else found | {"gradients": twins.combine_backward(dout, y, inverse, weights)}

    def near(self, out: dict[str, Any]) -> None:
        judge, p = self.place.judge, self.operands
        y, inverse, weights, shared = (p[name] for name in ("y", "inverse", "weights", "shared"))
        tokens, k = inverse.shape
        total = torch.zeros((tokens, y.shape[1]), device=y.device)
        for j in range(k if tokens else 0):
            kept = (inverse[:, j] >= 0)[:, None]
            value = y[inverse[:, j].clamp(min=0).long()].float()
            if weights is not None:
                value = value * weights[:, j, None].float()
            total = torch.where(kept, total + value, total)
        if shared is not None:
            total = total + shared.float()
        got = out["sum"]
        judge.same("the sum in order", got, total.to(got.dtype))
        exact_sum, size = _exact_sum(y, inverse, weights, shared)
        unit = _UNIT[got.dtype]
        judge.near("float64", got, exact_sum, size * 2.0**-19 + exact_sum.abs() * unit + 2.0**-24, math.inf)
        plain = moe.combine(y, inverse, None)
        judge.same("gather_backward is combine without weights", out["gather_backward"], plain)
        judge.wrong("rows of no expert are counted", ~got.isfinite().all())
        if weights is not None and tokens:
            dy, dweights = out["gradients"]
            _near_gradients(judge, dy, dweights, p)

    def hostile(self) -> None:
        """Slots of rows that there are not add nothing and get no gradient; the other rows' gradients are right."""
        y, inverse = self.operands["y"], self.operands["inverse"]
        wild, stays = strayed(inverse, len(y), self.place, self.o["seed"])

        def call() -> dict[str, Any]:
            among_others = torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)
            return self.call(**self.operands | {"y": among_others, "inverse": wild})

        if (out := guarded_call(self.place.judge, y, call)) is None:
            return
        dropped = torch.where(stays | (inverse < 0), inverse, -1 - inverse)
        want = self.definition(**self.operands | {"inverse": dropped})
        for found in (out, want) if "gradients" in out else ():
            dy, dweights = found["gradients"]
            found["gradients"] = torch.where(named_rows(inverse, stays)[:, None], dy, 0.0), dweights
        same_parts(self.place.judge, "slots that stayed", out, want)


judge_combine = partial(judge_case, Combine)


def _no_slot(inverse: torch.Tensor) -> torch.Tensor:
    """(rows,) whether no slot of an expert has the row."""
    rows = torch.ones(inverse.numel(), dtype=torch.bool, device=inverse.device)
    flat = inverse.reshape(-1).long()
    used = torch.zeros_like(rows)
    used.index_fill_(0, flat.clamp(min=0), True)
    # Row 0 is clamped to: whether it is used has to be asked for by itself.
    first = (flat == 0).any()
    index = torch.arange(flat.numel(), device=flat.device)
    return rows & ~torch.where(index == 0, first, used)


def _exact_sum(
    y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (inverse >= 0)[..., None]
    rows = y[inverse.clamp(min=0).long().reshape(-1)].double().view(*inverse.shape, y.shape[1])
    if weights is not None:
        rows = rows * weights.double()[..., None]
    rows = torch.where(kept, rows, 0.0)
    total, size = rows.sum(1), rows.abs().sum(1)
    if shared is not None:
        total, size = total + shared.double(), size + shared.double().abs()
    return total, size


def _near_gradients(judge: Judge, dy: torch.Tensor, dweights: torch.Tensor, p: dict[str, torch.Tensor]) -> None:
    y, inverse, weights, dout = (p[name] for name in ("y", "inverse", "weights", "dout"))
    kept = inverse >= 0
    row = torch.where(kept, inverse, -1 - inverse).long()
    products = (weights.float()[..., None] * dout.float()[:, None, :]).to(y.dtype)
    wanted = torch.zeros_like(y)
    wanted[row.reshape(-1)] = torch.where(kept[..., None], products, 0.0).flatten(0, 1)
    judge.same("dy", dy, wanted)
    rows = y[row.reshape(-1)].double().view(*inverse.shape, y.shape[1]) * dout.double()[:, None, :]
    rows = torch.where(kept[..., None], rows, 0.0)
    judge.near("dweights' float64", dweights, rows.sum(2), rows.abs().sum(2) * 2.0**-18 + 2.0**-100, math.inf)
