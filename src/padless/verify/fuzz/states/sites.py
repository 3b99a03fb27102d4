"""Call sites whose operands change between calls: other values, sizes, strides and formats in the same memory.

Operands lie at fixed addresses of an arena, one slot each, or in memory of their own that is freed for the next ones. So
a call often has the addresses of one before and something else that differs, which is what remembers of launches are to
see. A fresh call has copies of the operands elsewhere, contiguous, and no output.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, MXFP4, MXFP4_REPACKED
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.quantize import dequantize, quantize
from padless.quantization.rows_columns import quantize_rows_columns
from padless.verify.fuzz import operands, products
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.states.layers import FRESH
from padless.verify.fuzz.states.sequence import Operation, drawn, table

_SLOT = 1 << 20
_OF_HOPPER = ("plain", "plain_gemm", "plain_wgrad", "wgrad")
_OF_MOE = (("FP8_BLOCK", "FP8_BLOCK"), ("MXFP8", "MXFP8"), ("FP8_BLOCK", "MXFP4"), ("BF16", "NVFP4"))


def constants(draw: Draw) -> Options:
    """Two of each thing that kernels are compiled for."""
    arch = products.arch_of(draw)
    routes = [(r.a, r.b) for r in products.routes_of(arch, "grouped_gemm")]
    calls = ["grouped_gemm", "gemm", "quantize", "moe"]
    calls += ["list"] if arch != "sm_90a" else []
    calls += _OF_HOPPER if arch != "sm_100a" else []
    pairs = draw.sample(routes, 2)
    multiple = max(products.k_multiple(a, b) for a, b in pairs)
    every = (64, 96, 128, 160) if draw.backend != "cuda" else (128, 256, 384)
    sizes = [size for size in every if size % multiple == 0]
    return {
        "pairs": pairs,
        "layers": draw.one([one for one in _OF_MOE if one in routes]),
        "calls": draw.sample(calls, 3),
        "n": [draw.one(sizes) for _ in range(2)],
        "k": [draw.one(sizes) for _ in range(2)],
    }


def rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {"seed": draw.data_seed(), "operations": drawn(draw, SITES)}


@dataclass(eq=False)
class Site:
    """A call and its operands.

    what: the choices that operations change. old: operands in memory of their own, let go
    when the next ones are made.
    """

    o: Options
    place: Place
    what: dict[str, Any] = field(default_factory=dict)
    old: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = _arena(self.place.device)
        pair, n, k = (self.o[name][0] for name in ("pairs", "n", "k"))
        self.what = {"call": self.o["calls"][0], "pair": pair, "sizes": [3, 0, 17], "n": n, "k": k, "past": 2}
        self.what |= {"gap": 0, "layout": 0, "out": "bfloat16", "given": 1, "apart": 0, "offs64": False, "shift": 0}
        self.what |= {"seed": self.o["seed"], "accumulate": False, "in_tiles": False, "column": False, "slot": 12}

    def close(self) -> None:
        """Nothing outlives a site."""

    # --- memory ------------------------------------------------------------------------------------------

    def put(self, slot: int, t: torch.Tensor) -> torch.Tensor:
        """t with its strides, at the slot's address or in memory of its own."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True) if size)
        if self.what["apart"] & (1 << slot % 8) or extent * t.element_size() > _SLOT or t.numel() == 0:
            whole = torch.empty(max(extent, 1), dtype=t.dtype, device=t.device)
            self.old.append(whole)
        else:
            start = slot * _SLOT + 256 * self.what["shift"]
            whole = self.arena[start : start + extent * t.element_size()].view(t.dtype)
        placed = whole.as_strided(t.shape, t.stride())
        _bytes(placed).copy_(_bytes(t))
        return placed

    def placed(self, slot: int, t: Any) -> Any:
        """The same of all parts of an operand."""
        if isinstance(t, torch.Tensor):
            return self.put(slot, t)
        if isinstance(t, GroupedColumns):
            parts: dict[str, Any] = {
                name: getattr(t, name) for name in ("data", "scale", "offs", "starts", "block_starts")
            }
            parts = {name: self.put(slot + i, part) for i, (name, part) in enumerate(parts.items())}
            return replace(t, **parts)
        scales = {"data": t.data, "scale": t.scale}
        if t.global_scale is not None:
            scales["global_scale"] = t.global_scale
        return replace(t, **{name: self.put(slot + i, part) for i, (name, part) in enumerate(scales.items())})

    # --- operands ----------------------------------------------------------------------------------------

    @property
    def ends(self) -> list[int]:
        """End rows of the groups."""
        sizes = self.what["sizes"]
        return [sum(sizes[: i + 1]) for i in range(len(sizes))]

    @property
    def rows(self) -> int:
        """Rows, those of no group among them."""
        return sum(self.what["sizes"]) + int(self.what["past"])

    def offs(self, slot: int) -> torch.Tensor:
        """End rows of the groups at a slot's address."""
        made = self.place.ends(self.ends)
        made = made.long() if self.what["offs64"] else made
        return self.put(slot, made)

    def generator(self) -> torch.Generator:
        """A source of values, the same one until an operation draws others."""
        return self.place.generator(self.what["seed"])

    def normal(self, *shape: int) -> torch.Tensor:
        """Plain values in bfloat16, other ones for another shape."""
        drawn_ = torch.randn(
            shape, device=self.place.device, generator=self.place.generator(self.what["seed"] + len(shape))
        )
        return drawn_.bfloat16()

    def gapped(self, t: torch.Tensor) -> torch.Tensor:
        """t with a gap behind each row."""
        gap = 8 * self.what["gap"]
        wide = torch.zeros((*t.shape[:-1], t.shape[-1] + gap), dtype=t.dtype, device=t.device)
        return wide[..., : t.shape[-1]].copy_(t)

    def output(self, *shape: int) -> torch.Tensor | None:
        """An output that is given, of no value, or None."""
        if not self.what["given"]:
            return None
        wide = torch.full((*shape[:-1], shape[-1] + 16 * (self.what["given"] - 1)), torch.nan, device=self.place.device)
        return self.put(self.what["slot"], wide.to(DTYPES[self.what["out"]])[..., : shape[-1]])

    # --- calls -------------------------------------------------------------------------------------------

    def check(self, when: str) -> None:
        """The call, again, against a fresh one."""
        self.old.clear()
        got, want = _MADE[self.what["call"]](self)
        for number, (mine, fresh) in enumerate(zip(got, want, strict=True)):
            self.place.judge.same(f"{FRESH} call: result {number} of {self.what['call']} {when}", mine, fresh)


@cache
def _arena(device: torch.device) -> torch.Tensor:
    """The memory of all sites of a process, one after the other."""
    return torch.zeros(16 * _SLOT, dtype=torch.uint8, device=device)


Made = tuple[list[torch.Tensor], list[torch.Tensor]]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _product(site: Site, dense: bool) -> Made:
    what, generator, place = site.what, site.generator(), site.place
    a_name, b_name = what["pair"]
    sizes = what["sizes"][:1] if dense else what["sizes"]
    rows, ends = (sum(sizes), [sum(sizes)]) if dense else (site.rows, site.ends)
    a_layout = ("k" if what["layout"] else "plain") if a_name == "FP8_BLOCK" else ("plain", "blocked")[what["layout"]]
    layout, gap = "plain" if a_name == "BF16" else a_layout, 16 * what["gap"]
    globals_ = what["layout"]
    n, k = what["n"], what["k"]
    a = operands.activation(
        place, a_name, rows, k, generator, ends=ends, offs=place.ends(ends), layout=layout, gap=gap, globals_=globals_
    )
    tiled = what["in_tiles"] and b_name != "FP8_BLOCK"
    b = operands.weight(
        place, b_name, len(sizes), n, k, generator, layout="blocked" if tiled else "plain", gap=gap, globals_=globals_
    )
    weight = operands.dense(b.given) if dense else b.given
    plain = operands.dense(b.plain) if dense else b.plain
    out, dtype = site.output(rows, n), DTYPES[what["out"]]
    how: dict[str, Any] = {"out": out, "out_dtype": dtype, "backend": place.backend}
    if dense:
        got = gemm(site.placed(0, operands.without_groups(a.given)), site.placed(4, weight), **how)
        want = gemm(operands.without_groups(a.plain), plain, out_dtype=dtype, backend=place.backend)
        return [got], [want]
    got = grouped_gemm(site.placed(0, a.given), site.placed(4, weight), site.offs(10), **how)
    want = grouped_gemm(a.plain, plain, place.ends(ends), out_dtype=dtype, backend=place.backend)
    return [got[: ends[-1]]], [want[: ends[-1]]]


def _plain(site: Site, dense: bool) -> Made:
    what, dtype = site.what, DTYPES[site.what["out"]]
    groups, n, k = len(what["sizes"]), what["n"], what["k"]
    a, b = site.normal(site.rows, k), site.normal(groups, n, k)
    given = site.gapped(b.mT.contiguous()).mT if what["column"] else site.gapped(b)
    placed_a, placed_b = site.put(0, site.gapped(a)), site.put(4, given)
    how: dict[str, Any] = {"out": site.output(site.rows, n), "out_dtype": dtype, "backend": site.place.backend}
    fresh: dict[str, Any] = {"out_dtype": dtype, "backend": site.place.backend}
    if dense:
        return [gemm(placed_a, placed_b[0], **how)], [gemm(a, b[0], **fresh)]
    valid = site.ends[-1]
    got = grouped_gemm(placed_a, placed_b, site.offs(10), **how)
    return [got[:valid]], [grouped_gemm(a, b, site.place.ends(site.ends), **fresh)[:valid]]


def _accumulated(site: Site, n: int, k: int, call: Callable[..., torch.Tensor], *given: Any, fresh: Any) -> Made:
    """A weight gradient: stored, or added to what is there."""
    what = site.what
    accumulate = what["accumulate"] and what["out"] == "float32" and what["given"] > 0
    dtype = torch.bfloat16 if what["out"] == "float16" else DTYPES[what["out"]]
    before, out = site.normal(len(what["sizes"]), n, k).to(dtype), None
    if what["given"]:
        out = site.put(what["slot"], before)
    got = call(*given, out=out, accumulate=accumulate, out_dtype=dtype, backend=site.place.backend)
    into = before.clone() if accumulate else None
    want = call(*fresh, out=into, accumulate=accumulate, out_dtype=dtype, backend=site.place.backend)
    return [got], [want]


def _plain_wgrad(site: Site) -> Made:
    n, k = site.what["n"], site.what["k"]
    dy, x = site.normal(site.rows, n), site.normal(site.rows, k)

    def call(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, **how: Any) -> torch.Tensor:
        return grouped_gemm_wgrad(dy, x, offs=offs, **how)

    given = site.put(0, site.gapped(dy)), site.put(4, site.gapped(x)), site.offs(10)
    return _accumulated(site, n, k, call, *given, fresh=(dy, x, site.place.ends(site.ends)))


def _wgrad(site: Site) -> Made:
    n, k, offs = site.what["n"], site.what["k"], site.place.ends(site.ends)
    alignment = (32, 128)[site.what["layout"]]
    block = (128, 128) if site.what["gap"] else (1, 128)
    _, dy = quantize_rows_columns(site.normal(site.rows, n), offs, alignment=alignment, rows=False)
    _, x = quantize_rows_columns(site.normal(site.rows, k), offs, column_block=block, alignment=alignment, rows=False)
    return _accumulated(site, n, k, grouped_gemm_wgrad, site.placed(0, dy), site.placed(5, x), fresh=(dy, x))


def _quantize(site: Site) -> Made:
    what = site.what
    x = site.normal(max(site.rows, 1), what["k"]).to(DTYPES[what["out"]])
    name = what["pair"][1]
    format = MXFP4 if name == MXFP4_REPACKED.name else FORMAT_BY_NAME[name]  # codes are repacked, not quantized
    made = quantize(site.put(0, site.gapped(x)), format)
    fresh = quantize(x, format)
    again, values = dequantize(site.placed(4, made)), dequantize(fresh)
    codes = [made.data.view(torch.uint8), made.scale, again]
    return codes, [fresh.data.view(torch.uint8), fresh.scale, values]


def _list(site: Site) -> Made:
    what, place, backend = site.what, site.place, site.place.backend
    a_name, b_name = next(((a, b) for a, b in (what["pair"], ("MXFP8", "MXFP8")) if a != "BF16"), ("MXFP8", "MXFP8"))
    generator, plain, given = site.generator(), [], []
    for i, rows in enumerate(what["sizes"][:2]):
        ends = [rows]
        a = operands.activation(place, a_name, rows, what["k"], generator, ends=ends, offs=place.ends(ends))
        b = operands.weight(place, b_name, 1, what["n"], what["k"], generator)
        plain.append((operands.without_groups(a.plain), operands.dense(b.plain)))
        of_b = operands.dense(b.given)
        given.append((site.placed(5 * i, operands.without_groups(a.given)), site.placed(5 * i + 2, of_b)))
    a_given, b_given, a_plain, b_plain = (list(part) for both in (given, plain) for part in zip(*both, strict=True))
    return grouped_gemm_list(a_given, b_given, backend=backend), grouped_gemm_list(a_plain, b_plain, backend=backend)


def _moe(site: Site) -> Made:
    what, place = site.what, site.place
    a_name, b_name = site.o["layers"]
    generator, tokens, experts = site.generator(), site.rows, len(what["sizes"])
    h, i = 128, 128
    x = site.normal(tokens, h)
    ids = torch.randint(-1, experts, (tokens, 2), device=place.device, generator=generator)
    weights = torch.rand((tokens, 2), device=place.device, generator=generator)
    b = FORMAT_BY_NAME[b_name]
    w13, w2 = (quantize(site.normal(experts, rows, k) / 8, b, kind="weight") for rows, k in ((2 * i, h), (h, i)))
    how: dict[str, Any] = {"activations": torch.bfloat16 if a_name == "BF16" else FORMAT_BY_NAME[a_name]}
    how |= {"backend": place.backend}
    placed = site.put(0, x), site.put(1, ids), site.put(2, weights), site.placed(3, w13), site.placed(6, w2)
    return [moe.moe(*placed, **how)], [moe.moe(x, ids, weights, w13, w2, **how)]


_MADE: dict[str, Callable[[Site], Made]] = {
    "grouped_gemm": lambda site: _product(site, False),
    "gemm": lambda site: _product(site, True),
    "plain": lambda site: _plain(site, False),
    "plain_gemm": lambda site: _plain(site, True),
    "plain_wgrad": _plain_wgrad,
    "wgrad": _wgrad,
    "quantize": _quantize,
    "list": _list,
    "moe": _moe,
}


# --- operations ------------------------------------------------------------------------------------------


def again(site: Site, r: random.Random) -> None:
    """The same call of the same operands, once or twice."""
    for _ in range(r.randint(1, 2)):
        site.check("again")


def values(site: Site, r: random.Random) -> None:
    """Other values in the same memory."""
    site.what["seed"] = r.randrange(1000)


def sizes(site: Site, r: random.Random) -> None:
    """Other sizes of groups: of the same sum, or not; none at all."""
    old = site.what["sizes"]
    others = [[0] * len(old), [r.choice((0, 1, 5, 17, 33)) for _ in range(r.randint(1, 3))], [sum(old)], [1, *old][:3]]
    site.what["sizes"] = r.choice([r.sample(old, len(old)), *others])
    site.what["past"] = r.choice((0, 2, site.what["past"]))


def features(site: Site, r: random.Random) -> None:
    """Other N and K."""
    site.what["n"], site.what["k"] = r.choice(site.o["n"]), r.choice(site.o["k"])


def formats(site: Site, r: random.Random) -> None:
    """Other formats, perhaps for one call alone."""
    before = site.what["pair"]
    site.what["pair"] = r.choice(site.o["pairs"])
    if r.random() < 0.4:
        site.check("with other formats")
        site.what["pair"] = before


def strides(site: Site, r: random.Random) -> None:
    """Gaps behind rows, scales in another layout, columns in place of rows."""
    name, of = r.choice(
        (("gap", (0, 1, 3)), ("layout", (0, 1)), ("in_tiles", (False, True)), ("column", (False, True)))
    )
    site.what[name] = r.choice(of)


def outputs(site: Site, r: random.Random) -> None:
    """An output that is given or not, of other strides, of another type, added to."""
    site.what["given"] = r.choice((0, 1, 1, 2))
    site.what["out"] = r.choice(list(DTYPES))
    site.what["accumulate"], site.what["slot"] = r.random() < 0.5, r.choice((12, 13))


def ends(site: Site, r: random.Random) -> None:
    """offs in another type."""
    site.what["offs64"] = r.random() < 0.5


def moved(site: Site, r: random.Random) -> None:
    """Operands to other addresses, or to memory of their own, which the next ones take."""
    site.what["shift"] = r.choice((0, 0, 1, 2))
    site.what["apart"] = r.choice((0, r.randrange(256), 255))


def call(site: Site, r: random.Random) -> None:
    """Another call in the same memory."""
    site.what["call"] = r.choice(site.o["calls"])


def refused(site: Site, r: random.Random) -> None:
    """A call that raises leaves nothing behind."""
    offs, a = site.place.ends([1]), torch.zeros((1, 64), dtype=torch.bfloat16, device=site.place.device)
    wrong = (a[:, :-1], a.to(torch.int32), a[0], a.clone().requires_grad_())
    b = site.normal(1, 64, 64)
    try:
        grouped_gemm(site.put(0, r.choice(wrong[:3])) if r.random() < 0.7 else wrong[3], b, offs)
    except ValueError:
        return
    site.place.judge.wrong("a wrong call was not refused", True)


def without_grad(site: Site, r: random.Random) -> None:
    """Under inference_mode or no_grad."""
    with r.choice((torch.inference_mode, torch.no_grad))():
        site.check("within without_grad")


def changed_in_place(site: Site, r: random.Random) -> None:
    """One part of an operand is written behind the call's back, at the address that it has."""
    before = site.what["seed"]
    site.what["seed"] = r.randrange(1000)
    site.check("with other values")
    site.what["seed"] = before


SITES: dict[str, Operation] = {
    **table(values, sizes, formats, strides, outputs, call, share=2.0),
    **table(again, features, ends, moved, changed_in_place),
    **table(refused, without_grad, share=0.4),
}
