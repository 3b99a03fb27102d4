"""Fuzz checks of the Mixture-of-Experts layer's activations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, FORMAT_NAMES, BlockScaledTensor
from padless.moe import twins
from padless.moe.activation import Activation, split_gate_up
from padless.quantization.quantize import quantize
from padless.verify.fuzz import exact
from padless.verify.fuzz.case import judge_case
from padless.verify.fuzz.defined import Defined
from padless.verify.fuzz.layers import EDGES
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

_GLOBAL = 0.1  # NVFP4's for activated values: up to 2688 times as large


def constants(draw: Draw) -> Options:
    kind = draw.one(("swiglu", "swiglu", "geglu", "relu2", "gelu", "silu"))
    gated = kind in ("swiglu", "geglu")
    name = draw.one((None, *FORMAT_NAMES))
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


def rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "rows": draw.one((0, 1, 2, 17, draw.randint(0, draw.limits.rows))),
        "n": draw.multiple(64, draw.limits.n * 2),
        "wide": False,
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


ACTIVATIONS = (
    *(Activation("swiglu", gate_up) for gate_up in ("concatenated", "interleaved", "alternating")),
    Activation("swiglu", "alternating", alpha=1.702, limit=7.0, up_offset=1.0),
    Activation("geglu", limit=3.0),
    Activation("relu2"),
    Activation("gelu"),
    Activation("silu"),
)


def lines(arch: str) -> Iterator[Options]:
    """Values over five powers of ten, NaN and Inf; as many rows as the edges have slots."""
    shapes = [(5, 512, "bfloat16"), (700, 5760, "bfloat16"), (33, 1152, "float32")]
    every = [(a, *shape, name) for a in ACTIVATIONS for shape in shapes for name in (None, *FORMAT_NAMES)]
    for i, edge in enumerate(EDGES):
        rows = edge["tokens"] * edge["top_k"]
        every += [(a, rows, 256, "bfloat16", "FP8_BLOCK") for a in (ACTIVATIONS[0], ACTIVATIONS[i])]
    for a, rows, n, dtype, name in every:
        one = vars(a) | {"rows": rows, "n": n, "dtype": dtype, "format": name, "layout": "plain", "wide": rows > 0}
        yield one | {"seed": rows, "properties": ["bits"]}


class Activate(Defined):
    """`moe.activate_quantize`."""

    any_nan = True

    def __init__(self, o: Options, place: Place) -> None:
        self.activation = Activation(o["kind"], o["gate_up"], o["alpha"], o["limit"], o["up_offset"])
        x = torch.randn((o["rows"], o["n"]), device=place.device, generator=place.generator(o["seed"])) * 3
        if o["wide"]:
            x *= torch.logspace(-3, 2, o["n"], device=place.device)
            x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
        self.format = None if o["format"] is None else FORMAT_BY_NAME[o["format"]]
        has_shared = self.format is not None and self.format.has_global_scale
        shared = torch.full((), _GLOBAL, device=place.device) if has_shared else None
        super().__init__(o, place, x=x.to(DTYPES[o["dtype"]]), shared=shared)

    def call(self, x: torch.Tensor, shared: torch.Tensor | None) -> Any:
        return moe.activate_quantize(
            x, self.activation, self.format, scale_layout=self.o["layout"], global_scale=shared
        )

    def definition(self, x: torch.Tensor, shared: torch.Tensor | None) -> Any:
        values = twins.activated(x, self.activation, in_bfloat16=self.format is None)
        if self.format is None:
            return values
        return quantize(values, self.format, scale_layout=self.o["layout"], global_scale=shared)

    def near(self, t: Any) -> None:
        """Rounded values against float64, and the codes against those of the values without rounding."""
        o, judge, activation, format = self.o, self.place.judge, self.activation, self.format
        x, shared = self.operands.values()
        wanted, size = exact_activation(x.double(), activation)
        values = moe.activate_quantize(x, activation, None)
        assert isinstance(values, torch.Tensor)
        judge.near("float64", values, wanted, size * 2.0**-8 + 2.0**-100, math.inf)
        if format is None or o["rows"] == 0:
            return
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


judge = partial(judge_case, Activate)


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
