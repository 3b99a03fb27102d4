"""Passes of the Mixture-of-Experts layer, and the layer, under judgement."""

from __future__ import annotations

import math
from typing import Any

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, BlockScaledTensor
from padless.moe.activation import Activation, split_gate_up
from padless.quantization.quantize import SCALE_RULES
from padless.verify.fuzz import exact
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

_GLOBAL = 0.1  # NVFP4's for activated values: up to 2688 times as large
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
        "experts": draw.one((1, 2, 8, 60, 128, 257, 512, draw.randint(1, 1024))),
        "same": draw.maybe(0.1),
        "seed": draw.data_seed(),
    }


def draw_ids(o: Options, place: Place) -> torch.Tensor:
    """(T, k) ids, some of them no expert; all the same where the problem says so."""
    generator = place.generator(o["seed"])
    shape, dtype = (o["tokens"], o["top_k"]), getattr(torch, o["id_dtype"])
    ids = torch.randint(0, o["experts"], shape, device=place.device, generator=generator)
    if o["same"]:
        ids = torch.full_like(ids, o["experts"] // 2)
    chance = torch.rand(shape, device=place.device, generator=generator)
    ids = torch.where(chance < 0.03, o["experts"], ids)
    ids = torch.where(chance > 0.98, -1, ids)
    return ids.to(dtype)


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


def judge_route(o: Options, place: Place) -> None:
    ids = draw_ids(o, place)
    got = moe.route(ids, o["experts"])
    for name, one, other in zip(("offs", "tokens", "inverse"), got, routing_of(ids, o["experts"]), strict=True):
        place.judge.same(name, one, other)


# --- gathered quantization -------------------------------------------------------------------------------


def gather_constants(draw: Draw) -> Options:
    name = draw.one(tuple(FORMAT_BY_NAME))
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
        "tokens": min(found["tokens"], 300),
        "k": draw.one((even * draw.randint(1, most // even), draw.multiple(32, most))),
    }


def judge_gather_quantize(o: Options, place: Place) -> None:
    """gather_quantize and route_quantize."""
    ids = draw_ids(o, place)
    format = FORMAT_BY_NAME[o["format"]]
    generator = place.generator(o["seed"] + 1)
    x = torch.randn((o["tokens"], o["k"]), device=place.device, generator=generator).to(DTYPES[o["dtype"]])
    shared = torch.full((), 0.003, device=place.device) if format.has_global_scale else None
    options: dict[str, Any] = {"scale_rule": o["rule"], "scale_layout": o["layout"], "global_scale": shared}
    offs, tokens, inverse = routing_of(ids, o["experts"])
    if o["routed"]:
        routing, t = moe.route_quantize(x, ids, o["experts"], format, **options)
        place.judge.same("offs", routing.offs, offs)
        place.judge.same("inverse", routing.inverse, inverse)
    else:
        t = moe.gather_quantize(x, inverse, format, **options)
    factors = None if shared is None else exact.nvfp4_factors(o["rule"], shared, None)
    codes, scale = exact.quantized(x[tokens.long()], format, "activation", o["rule"] or "", factors)
    place.judge.same("codes by the rules", t.data.view(torch.uint8), exact.packed(codes, format))
    if o["layout"] == "blocked":
        place.judge.same("scales in tiles", t.scale.view(torch.uint8), exact.tiled(scale))
    else:
        got = t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
        place.judge.same("scales by the rules", got, scale)


# --- activations -----------------------------------------------------------------------------------------


def activation_constants(draw: Draw) -> Options:
    kind = draw.one(("swiglu", "swiglu", "geglu", "relu2", "gelu", "silu"))
    gated = kind in ("swiglu", "geglu")
    name = draw.one((None, *FORMAT_BY_NAME))
    return {
        "kind": kind,
        "gate_up": draw.one(("concatenated", "interleaved", "alternating")),
        "alpha": draw.one((1.0, 1.702)) if kind == "swiglu" else 1.0,
        "limit": draw.one((None, 7.0, 0.5)) if gated else None,
        "up_offset": draw.one((0.0, 1.0)) if gated else 0.0,
        "format": name,
        "dtype": draw.one(tuple(DTYPES)),
        "layout": "plain" if name in (None, "FP8_BLOCK") else draw.one(("plain", "blocked")),
    }


def activation_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "rows": draw.one((0, 1, 2, 17, draw.randint(0, draw.limits.rows))),
        "n": draw.multiple(64, draw.limits.n * 2),
        "seed": draw.data_seed(),
    }


def judge_activate_quantize(o: Options, place: Place) -> None:
    """activate_quantize: rounded values against float64, and the codes against those of the values without rounding."""
    activation = Activation(o["kind"], o["gate_up"], o["alpha"], o["limit"], o["up_offset"])
    generator = place.generator(o["seed"])
    x = torch.randn((o["rows"], o["n"]), device=place.device, generator=generator) * 3
    x = x.to(DTYPES[o["dtype"]])
    judge = place.judge
    wanted, size = exact_activation(x.double(), activation)
    values = moe.activate_quantize(x, activation, None)
    assert isinstance(values, torch.Tensor)
    judge.near("float64", values, wanted, size * 2.0**-8 + 2.0**-100, math.inf)
    if o["format"] is None or o["rows"] == 0:
        return
    format = FORMAT_BY_NAME[o["format"]]
    shared = torch.full((), _GLOBAL, device=place.device) if format.has_global_scale else None
    t = moe.activate_quantize(x, activation, format, scale_layout=o["layout"], global_scale=shared)
    assert isinstance(t, BlockScaledTensor)
    first = o["seed"] % o["rows"]
    some = moe.activate_quantize(x[first : first + 2], activation, format, global_scale=shared)
    assert isinstance(some, BlockScaledTensor)
    judge.same("rows alone", some.data.view(torch.uint8), t.data.view(torch.uint8)[first : first + 2])
    # Codes of values in float64, each of which float32's own may have moved to a neighbour.
    decoded = exact.decoded(t.data, format)
    plain = moe.activate_quantize(x, activation, format, global_scale=shared)
    assert isinstance(plain, BlockScaledTensor)
    scale = plain.scale if plain.scale.dtype == torch.float32 else plain.scale.view(torch.uint8)
    if o["layout"] == "blocked":
        judge.same("scales in tiles", t.scale.view(torch.uint8), exact.tiled(scale))
    factor = 1.0 if shared is None else shared.double()
    each = exact.spread(exact.scales(plain.scale), format, "activation", tuple(wanted.shape)) * factor
    step = {"FP8_BLOCK": 2.0**-4, "MXFP8": 2.0**-4, "MXFP8_E5M2": 2.0**-3}.get(o["format"], 0.25)
    least = {"FP8_BLOCK": 2.0**-10, "MXFP8": 2.0**-10, "MXFP8_E5M2": 2.0**-17}.get(o["format"], 0.25)
    tolerance = wanted.abs() * step * 1.001 + each * least * 1.001 + size * 2.0**-16
    if shared is not None:  # scales of small blocks are subnormal, in steps of 2^-9
        tolerance = tolerance + 6 * _GLOBAL * 2.0**-10
    judge.near("codes' float64", decoded * each, wanted, tolerance, math.inf)


def exact_activation(x: torch.Tensor, a: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 values, what their errors are measured by)."""
    if not a.is_gated:
        if a.kind == "relu2":
            value = x.clamp(min=0).square()
            return value, value
        value = _gelu(x) if a.kind == "gelu" else x * torch.sigmoid(x)
        return value, x.abs()
    gate, up = split_gate_up(x, a)
    if a.limit is not None:
        gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    size = gate.abs() * (up.abs() + abs(a.up_offset))
    up = up + a.up_offset
    value = _gelu(gate) * up if a.kind == "geglu" else gate * torch.sigmoid(gate * a.alpha) * up
    return value, size


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


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
    return found | {"tokens": min(found["tokens"], 300), "n": draw.randint(1, draw.limits.n)}


def judge_combine(o: Options, place: Place) -> None:
    """combine, combine_backward and gather_backward."""
    ids = draw_ids(o, place)
    _, _, inverse = routing_of(ids, o["experts"])
    generator = place.generator(o["seed"] + 1)
    tokens, k, n = o["tokens"], o["top_k"], o["n"]

    def normal(dtype: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator).to(DTYPES[dtype])

    y = normal(o["dtype"], tokens * k, n)
    dropped = torch.where(inverse < 0, -1 - inverse, 0).reshape(-1).long()
    away = torch.zeros(tokens * k, dtype=torch.bool, device=place.device)
    away[dropped] = (inverse < 0).reshape(-1)
    away = away & _no_slot(inverse)
    y = torch.where(away[:, None], math.nan, y)
    weights = None if o["weights"] is None else normal(o["weights"], tokens, k)
    shared = None if o["shared"] is None else normal(o["shared"], tokens, n)
    out_dtype = DTYPES[o["out"]]
    got = moe.combine(y, inverse, weights, shared, out_dtype=out_dtype)
    total = torch.zeros((tokens, n), device=place.device)
    for j in range(k if tokens else 0):
        kept = (inverse[:, j] >= 0)[:, None]
        value = y[inverse[:, j].clamp(min=0).long()].float()
        if weights is not None:
            value = value * weights[:, j, None].float()
        total = torch.where(kept, total + value, total)
    if shared is not None:
        total = total + shared.float()
    place.judge.same("the sum in order", got, total.to(out_dtype))
    exact_sum, size = _exact_sum(y, inverse, weights, shared)
    unit = _UNIT[out_dtype]
    place.judge.near("float64", got, exact_sum, size * 2.0**-19 + exact_sum.abs() * unit + 2.0**-24, math.inf)
    plain = moe.combine(y, inverse, None)
    backward = moe.gather_backward(y, inverse)
    place.judge.same("gather_backward is combine without weights", backward, plain)
    if weights is not None and tokens:
        _judge_combine_backward(o, place, y, inverse, weights, generator)


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


def _judge_combine_backward(
    o: Options, place: Place, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, generator: torch.Generator
) -> None:
    dout = torch.randn((o["tokens"], o["n"]), device=place.device, generator=generator).to(DTYPES[o["out"]])
    dy, dweights = moe.combine_backward(dout, y, inverse, weights)
    kept = inverse >= 0
    row = torch.where(kept, inverse, -1 - inverse).long()
    products = (weights.float()[..., None] * dout.float()[:, None, :]).to(y.dtype)
    wanted = torch.zeros_like(y)
    wanted[row.reshape(-1)] = torch.where(kept[..., None], products, 0.0).flatten(0, 1)
    place.judge.same("dy", dy, wanted)
    rows = y[row.reshape(-1)].double().view(*inverse.shape, y.shape[1]) * dout.double()[:, None, :]
    rows = torch.where(kept[..., None], rows, 0.0)
    place.judge.near("dweights' float64", dweights, rows.sum(2), rows.abs().sum(2) * 2.0**-18 + 2.0**-100, math.inf)
