"""Fuzz checks of the quantising calls: grouped_gemm_quant, grouped_gemm_swiglu_quant and grouped_gemm_epilogue.

Without an activation every element follows from the kernel's float32 sums, which have other checks. SwiGLU's
exponential is approximate: such a call is made again for its float32 values, which are compared by the error that the
exponential may have, and everything else has to follow from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant, grouped_gemm_swiglu_quant
from padless.compat.cudnn.request import FORMAT_OF_DTYPE
from padless.epilogue import COLUMN_FORMATS, INTERLEAVE, MX_FORMATS, Epilogue, EpilogueTensors, GateRule
from padless.formats import FORMAT_BY_NAME, FORMAT_NAMES, FP8_BLOCK, MXFP4_REPACKED, NVFP4, BlockScaledFormat
from padless.kernels.table import QUANT, Route
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
from padless.reference.epilogue import epilogue_reference
from padless.testing.operands import moved
from padless.verify.fuzz import exact, operands
from padless.verify.fuzz.case import Change, judge_case, whole
from padless.verify.fuzz.epilogue_outputs import Layout, Outputs, Parts
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.products import Product, arch_of, k_multiple, may_replay, shape
from padless.verify.tiles import config_of, routes_of

# SwiGLU: the exponential within 2^-21, of which the sigmoid takes at most all, and four roundings of 2^-24; and what
# subnormals on the way lose.
GLU_RELATIVE, GLU_ABSOLUTE = 2.0**-21 + 2.0**-22, 2.0**-140
N_MULTIPLE = {None: 32, "interleaved": 64, "concatenated": 128}
_DTYPE_OF = {fmt: dtype for dtype, fmt in FORMAT_OF_DTYPE.items()}


def fitting(
    route: Route, gated: bool, format: BlockScaledFormat | None, rows: bool, columns: bool
) -> tuple[bool, bool]:
    """(rows, columns): those outputs, or what a kernel stores that has no room for them."""
    if gated and format == FP8_BLOCK and rows:
        if route.b.startswith("MXFP8") and route.module in ("sm90_mxfp8_quant", "sm90_bf16_quant"):
            return False, True
        return True, columns and route.module != "sm90_bf16_quant"
    return rows, columns


def constants(gate_ups: tuple[str | None, ...], draw: Draw) -> Options:
    """Options that a kernel is compiled for."""
    route = draw.one(routes_of(arch_of(draw), QUANT))
    gate_up = draw.one(gate_ups)
    name = draw.one((None, *FORMAT_NAMES))
    format = None if name is None else FORMAT_BY_NAME[name]
    columns = format in COLUMN_FORMATS and draw.maybe(0.4)
    layouts = ("plain", "plain_mn") if format == FP8_BLOCK else ("plain", "blocked", "blocked_groups")
    column_layouts = ("plain",) if format == FP8_BLOCK else ("plain", "blocked", "blocked_groups")
    rows, columns = fitting(route, gate_up is not None, format, not columns or draw.maybe(0.7), columns)
    blocked = route.b != "FP8_BLOCK" and gate_up != "concatenated" and draw.maybe(0.3)
    semantics = "documented" if gate_up is not None else draw.one(("implementation", "documented"))
    rules = ("",) if format not in MX_FORMATS else ("rceil", "floor", norm_const_rule(semantics))
    return {
        "a": route.a,
        "b": route.b,
        "module": route.module if arch_of(draw) else "",
        "b_layout": "blocked" if blocked else "plain",
        "gate_up": gate_up,
        "format": name,
        "out": draw.one(tuple(DTYPES)),
        "rows": rows,
        "columns": columns,
        "row_layout": draw.one(layouts) if format is not None else "plain",
        "column_layout": draw.one(column_layouts),
        "rule": "te" if format == NVFP4 else draw.one(rules),
        "alpha": draw.maybe(0.5),
        "bias": draw.maybe(0.5),
        "prob": draw.maybe(0.5),
        "amax": draw.maybe(0.5),
        "semantics": semantics,
    }


def norm_const_rule(semantics: str) -> str:
    return "cudnn" if semantics == "implementation" else "cudnn_documented"


def rest(always: tuple[str, ...], draw: Draw, fixed: Options) -> Options:
    """always: properties that every problem has."""
    found = shape(draw, fixed)
    groups = min(len(found["sizes"]), 5)
    multiple = max(N_MULTIPLE[fixed["gate_up"]], 16 if fixed["b"] == MXFP4_REPACKED.name else 1)
    found["globals"] = draw.one((0, 1, groups))
    tiled = "blocked" in fixed["row_layout"] + fixed["column_layout"]  # a kernel may store zeros next to scales
    no_replay = tiled or not may_replay(draw, fixed, found)
    others = [name for name in found["properties"] if name not in always and not (no_replay and name == "replay")]
    return found | {
        "sizes": found["sizes"][:groups],
        "n": draw.multiple(multiple, max(draw.limits.n, multiple)),
        "k": draw.multiple(k_multiple(fixed["a"], fixed["b"]), min(draw.limits.k, 512)),
        "b_globals": draw.one((0, 1, groups)),
        "d_globals": draw.one((1, groups)),
        "nan_row": -1 if found["nan_row"] >= sum(found["sizes"][:groups]) else found["nan_row"],
        "nan_group": -1 if found["nan_group"] >= groups else found["nan_group"],
        "hostile": [] if not found["hostile"] else found["hostile"][:groups],
        "m_aligned": 1,
        "properties": [*always, *others],
    }


# --- a call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Operands of a call. numbers: float32, as an epilogue takes them; asked: as the problem has them."""

    a: Any
    b: Any
    offs: torch.Tensor
    numbers: EpilogueTensors
    asked: Parts


class Fused:
    """A grouped GEMM with an epilogue, of a problem's options.

    Optional ones: tile; gate, of a `GateRule`; alpha, bias and prob as names of dtypes; special, "inf" or "nan" among
    prob. Of cuDNN's call alone: left_out, arguments that its defaults stand for; prob_of_rank_3.
    """

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place, self.product = o, place, Product(o | {"out": "float32"}, place)
        self.format = None if o["format"] is None else FORMAT_BY_NAME[o["format"]]
        self.config, self.epilogue = config_of(place, o, QUANT), self._epilogue()
        p = self.product
        self.rows, self.groups, self.spans, self.valid = p.rows, p.groups, p.spans, p.valid
        asked = {name: t.to(place.device) for name, t in self._numbers(operands.generator_of(place, o))}
        floats: dict[str, Any] = {name: t.float() for name, t in asked.items()}
        numbers = EpilogueTensors(**floats)
        self.operands = Given(p.a.given, p.b.given, p.offs, numbers, asked)
        self.layout = self._layout_of(self.epilogue)

    def _layout_of(self, epilogue: Epilogue) -> Layout:
        return Layout(epilogue, self.place, self.rows, self.o["n"], self.spans, self.o["m_aligned"])

    def _numbers(self, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
        o = self.o
        shapes = {"alpha": (self.groups,), "bias": (self.groups, o["n"]), "prob": (self.rows,)}
        for name, size in shapes.items():
            if o[name]:
                t = torch.randn(size, device=generator.device, generator=generator)
                if name == "prob" and o.get("special") and self.rows > 3:
                    t[self.rows // 5], t[self.rows // 2] = float(o["special"]), 0.0
                yield name, t.to(DTYPES.get(o[name], torch.float32))
        if self.epilogue.norm_const:
            yield "norm_const", torch.rand(1, device=generator.device, generator=generator) + 0.01
        if self.format == NVFP4:
            count = 1 if o["d_globals"] == 1 else self.groups
            yield "global_scale", torch.rand(count, device=generator.device, generator=generator) * 0.1 + 0.001

    def _epilogue(self) -> Epilogue:
        o, format = self.o, self.format
        gated_bias = o["gate_up"] is None and o["semantics"] == "implementation"
        return Epilogue(
            alpha=bool(o["alpha"]),
            bias=bool(o["bias"]),
            prob=bool(o["prob"]),
            bias_rule="gated_bias" if gated_bias else "gated_sum",
            activation="none" if o["gate_up"] is None else "swiglu",
            gate_up=o["gate_up"] or "concatenated",
            gate_rule=GateRule(*o["gate"]) if o.get("gate") else None,
            amax=o["amax"],
            d_dtype=DTYPES[o["out"]] if format is None else None,
            row_format=format if o["rows"] else None,
            row_layout=o["row_layout"] if format is not None and o["rows"] else "plain",
            column_format=format if o["columns"] else None,
            column_layout=o["column_layout"] if o["columns"] else "plain",
            scale_rule=o["rule"],
        )

    @property
    def epilogue_of_values(self) -> Epilogue:
        """Of the float32 values that this call rounds or quantises."""
        plain: dict[str, Any] = {"amax": False, "row_layout": "plain", "column_layout": "plain", "scale_rule": ""}
        return replace(self.epilogue, d_dtype=torch.float32, row_format=None, column_format=None, **plain)

    # --- the calls

    def run(self, given: Given) -> Parts:
        return self._run(given, self.layout)

    def _run(self, given: Given, layout: Layout) -> Parts:
        outputs = Outputs(layout, self.place.device, self.o["gaps"][2])
        self._call(given, layout.epilogue, outputs.tensors)
        for name, stray in outputs.strays(anywhere=bool(self.o["hostile"])):
            self.place.judge.wrong(f"{name}: something else was written", stray)
        return outputs.parts()

    def _call(self, given: Given, epilogue: Epilogue, outputs: dict[str, Any]) -> None:
        of_scales: dict[str, Any] = {} if epilogue.format else {"norm_const": None, "global_scale": None}
        tensors = replace(given.numbers, **of_scales, **outputs)
        how: dict[str, Any] = {"m_aligned": self.o["m_aligned"], "backend": self.place.backend, "config": self.config}
        grouped_gemm_epilogue(given.a, given.b, given.offs, epilogue, tensors, **how)

    def hostile(self) -> None:
        self.run(self.operands)
        for _, call, _, _ in self.changes():
            call()

    def make(self, out: Parts) -> None:
        """out: (elements,) of each output, however it is laid out."""
        tensors: dict[str, Any] = {"column_tiles": self.layout.like.column_tiles}
        for name, t in self.layout.likes.items():
            tensors[name] = out[name].view(t.dtype).as_strided(t.shape, t.stride())
        if "amax" in tensors:
            tensors["amax"].fill_(-math.inf)
        self._call(self.operands, self.epilogue, tensors)

    def made(self, fresh: Parts) -> Parts:
        found: Parts = {}
        for name, t in self.layout.likes.items():
            places = torch.arange(t.untyped_storage().nbytes() // t.element_size(), device=self.place.device)
            poison = math.nan if fresh[name].is_floating_point() else 0x7F
            found[name] = torch.full_like(places, poison, dtype=fresh[name].dtype)
            found[name][self.layout.part(name, places.as_strided(t.shape, t.stride()))] = fresh[name]
        return found

    def changes(self) -> Iterator[Change]:
        if self.epilogue.gate_rule is None and self.epilogue.order != "alternating":
            yield "cuDNN's call", self._by_cudnn, whole, whole

    def _by_cudnn(self) -> Parts:
        o, given, epilogue = self.o, self.operands, self.epilogue
        outputs: dict[str, Any] = {"d_dtype": DTYPES[o["out"]]}
        if self.format is not None:
            outputs = {"d_format": self.format, "row_output": o["rows"], "column_output": o["columns"]}
            outputs |= {"row_layout": epilogue.row_layout if o["rows"] else None}
            outputs |= {"column_layout": epilogue.column_layout if o["columns"] else None}
            outputs |= {"discrete_col_sfd": epilogue.column_layout == "blocked_groups"}
            outputs |= {"scale_rule": o["rule"] if o["rule"] in ("rceil", "floor") else None}
            if "d_format" in o.get("left_out", ()):
                outputs |= {"d_dtype": _DTYPE_OF[self.format]}
        keywords: dict[str, Any] = {
            "a_tensor": given.a,
            "b_tensor": given.b,
            "padded_offsets": given.offs,
            "return_amax": o["amax"],
            "semantics": o["semantics"],
            "m_aligned": o["m_aligned"],
            "backend": self.place.backend,
            "config": self.config,
            **{f"{name}_tensor": t for name, t in given.asked.items()},
            **({} if o["gate_up"] is None else {"gate_up": o["gate_up"]}),
        }
        if o.get("prob_of_rank_3"):
            keywords["prob_tensor"] = given.asked["prob"].view(-1, 1, 1)
        keywords = {name: v for name, v in (keywords | outputs).items() if name not in o.get("left_out", ())}
        made = (grouped_gemm_quant if o["gate_up"] is None else grouped_gemm_swiglu_quant)(**keywords)
        column_scale = made["sfd_col_tensor"]
        if column_scale is not None and column_scale.dim() == 6:  # cuDNN's view of the bytes in order
            column_scale = column_scale.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(-1)
        found = {
            "d" if self.format is None else "row_codes": made["d_tensor"],
            "row_scale": None if made.row is None else made.row.scale,
            "column_codes": made["d_col_tensor"],
            "column_scale": column_scale,
            "amax": None if made["amax_tensor"] is None else made["amax_tensor"].view(-1),
        }
        return {name: self.layout.part(name, t) for name, t in found.items() if t is not None}

    # --- what must come out

    @cached_property
    def sums(self) -> torch.Tensor:
        """Of the valid rows by the same kernel, (valid, N) float32."""
        kernel: Any = self.config if self.config is None or isinstance(self.config, type) else type(self.config)
        how: dict[str, Any] = {"out_dtype": torch.float32, "backend": self.place.backend, "config": kernel}
        p = self.product
        return grouped_gemm(p.a.given, p.b.given, p.offs, **how)[: self.valid]

    @cached_property
    def values(self) -> torch.Tensor:
        """D of the valid rows, (valid, N_out) float32: with an activation the call's own."""
        if self.epilogue.is_glu:
            return self._run(self.operands, self._layout_of(self.epilogue_of_values))["d"]
        x, prob = self._stepped()
        return x if prob is None or (self.epilogue.bias_rule == "gated_bias" and self.epilogue.bias) else x * prob

    def _stepped(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums behind alpha and bias, and prob (valid, 1)."""
        sums, numbers, groups = self.sums, self.operands.numbers, torch.arange(self.groups, device=self.place.device)
        sizes = self.place.ends([end - start for start, end in self.spans]).long()
        group = torch.repeat_interleave(groups, sizes, output_size=self.valid)
        prob = None if numbers.prob is None else numbers.prob[: self.valid, None]
        alpha = None if numbers.alpha is None else numbers.alpha[group][:, None]
        if numbers.bias is None:
            return (sums if alpha is None else sums * alpha), prob
        bias = numbers.bias[group]
        bias = bias * prob if prob is not None and self.epilogue.bias_rule == "gated_bias" else bias
        return (sums + bias if alpha is None else exact.fused(sums, alpha, bias)), prob

    def _near_swiglu(self) -> None:
        x, prob = self._stepped()
        gate, up = _gate_and_up(x, self.epilogue.order)
        rule = self.epilogue.gate_rule or GateRule()
        if rule.limit is not None:
            gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
        inner, up, gate = (gate * rule.alpha).double(), (up + rule.up_offset).double(), gate.double()
        factor = torch.ones_like(gate[:, :1]) if prob is None else prob.double()
        wanted = gate * torch.sigmoid(inner) * up * factor
        # Where the sigmoid would be subnormal it counts as 0.
        floor = gate.abs() * up.abs() * 2.0**-125 * factor.abs()
        tolerance = (wanted.abs() * GLU_RELATIVE + GLU_ABSOLUTE + floor).nan_to_num(0.0)
        self.place.judge.near("SwiGLU's float64", self.values, wanted, tolerance, 3e38)

    def near(self, out: Parts) -> None:
        """Every output by rules that share nothing with the package."""
        values, judge = self.values, self.place.judge
        if self.place.is_rehearsal:
            return
        if self.epilogue.is_glu:
            self._near_swiglu()
        wanted = self._stored(values)
        judge.wrong(f"there are {[*out]}, not {[*wanted]}", out.keys() != wanted.keys())
        for name in out.keys() & wanted.keys():
            judge.same(name, out[name], wanted[name])

    def _stored(self, values: torch.Tensor) -> Parts:
        """Outputs of these values."""
        found: Parts = {}
        if self.epilogue.amax:
            least = values.new_full((1,), -math.inf)
            found["amax"] = torch.stack([torch.cat([values[s:e].abs().flatten(), least]).max() for s, e in self.spans])
        if self.epilogue.d_dtype is not None:
            found["d"] = values.to(self.epilogue.d_dtype)
        filled = [(group, values[start:end]) for group, (start, end) in enumerate(self.spans) if start < end]
        for name, is_turned in (("row", False), ("column", True)):
            if getattr(self.epilogue, f"{name}_format") is None:
                continue
            both = [self._quantized(group, x.t() if is_turned else x) for group, x in filled]
            both = both or [self._quantized(0, values.t() if is_turned else values)]
            codes, scales = ([t.t() if is_turned else t for t in parts] for parts in zip(*both, strict=True))
            assert self.format is not None
            found |= {f"{name}_codes": exact.packed(torch.cat(codes), self.format), f"{name}_scale": torch.cat(scales)}
        return found

    def _quantized(self, group: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.format is not None
        numbers, factors = self.operands.numbers, None
        if numbers.global_scale is not None:
            one = numbers.global_scale[group if numbers.global_scale.numel() > 1 else 0]
            factors = exact.nvfp4_factors("te", one, None)
        return exact.quantized(x, self.format, "activation", self.o["rule"], factors, numbers.norm_const)

    def reference(self) -> Parts:
        """Outputs that the reference stores for the kernel's sums, or for SwiGLU's values, which are near its own."""
        stored, epilogue, sums = self.values, self.epilogue, self.sums
        if self.place.is_rehearsal:
            return {}
        if epilogue.is_glu:
            its = self.epilogue_of_values
            values = self._by_reference(sums, its, its)["d"].to(stored.device).double()
            tolerance = (values.abs() * GLU_RELATIVE + GLU_ABSOLUTE).nan_to_num(0.0)
            self.place.judge.near("the reference's values", stored, values, tolerance, math.inf)
            plain: dict[str, Any] = {"activation": "none", "gate_rule": None}
            epilogue, sums = replace(epilogue, alpha=False, bias=False, prob=False, **plain), stored
        return self._by_reference(sums, epilogue, self.epilogue)

    def _by_reference(self, sums: torch.Tensor, epilogue: Epilogue, shaped_by: Epilogue) -> Parts:
        outputs = Outputs(self._layout_of(shaped_by), torch.device("cpu"))
        given = {
            name: moved(t, "cpu") for name, t in vars(self.operands.numbers).items() if isinstance(t, torch.Tensor)
        }
        epilogue_reference(sums.cpu(), self.product.offs.cpu(), epilogue, EpilogueTensors(**given, **outputs.tensors))
        return outputs.parts()


def _gate_and_up(x: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    if order == "alternating":
        return x[:, 0::2], x[:, 1::2]
    if order == "concatenated":
        half = x.shape[1] // 2
        return x[:, :half], x[:, half:]
    runs = x.unflatten(1, (-1, 2, INTERLEAVE))
    return runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)


judge_epilogue: Callable[[Options, Place], None] = partial(judge_case, Fused)
