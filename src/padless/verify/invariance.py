"""Batch invariance on this GPU: the bits of a row do not depend on what is around it, nor on the call that computes it.

A problem is multiplied once, and then again and again with the same rows in other surroundings: every group alone, one
row alone, permuted, behind a crowd that moves the average number of rows, in front of rows of no group, as a dense
product, as a list, with scales in other layouts, and by the quantizing call. Every row must have the bits it had.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FP8_BLOCK, MXFP8, BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.kernels.table import QUANT, Route, find_route, format_name
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.quantization.quantize import quantize
from padless.testing.operands import Activation, groups_of, in_layout, quantized, rows_of
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.products import routes_of

PROBLEMS = 2  # of each route: float32, which hides nothing, and bfloat16
DTYPES = (torch.float32, torch.bfloat16)
_CROWD = 40  # rows a group on average, at least, where groups of a few are put among many


@dataclass(frozen=True, eq=False)
class InvarianceProblem:
    """Rows of groups, sorted, and nothing behind them. ``kernel``: the class that chooses it, None for the default."""

    a: Activation
    b: BlockScaledTensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    kernel: KernelChoice | None
    arch: str

    def __str__(self) -> str:
        name = "the default" if self.kernel is None else getattr(self.kernel, "__name__", self.kernel)
        return (
            f"{format_name(self.a)} x {self.b.format.name} on {self.arch} by {name}, sizes {self.sizes}, (N, K) "
            f"{tuple(self.b.shape[1:])}, {self.dtype}:"
        )


def quant_pairs(arch: str) -> set[tuple[str, str]]:
    """Pairs that have a quantizing call too."""
    return {(p.a, p.b) for p in routes_of(arch, QUANT)}


def make_problem(
    route: Route, sizes: Sequence[int], n: int, k: int, dtype: torch.dtype, seed: int
) -> InvarianceProblem:
    """Normal values, rows of which differ by up to 2^8. In groups of two rows and more the second row is 2^20 times as
    large and the last 2^-40 times, which takes a tile of MXFP4 out of float16's range in the middle of K for them alone.
    (Not so NVFP4, in whose global scale they would be seen by all.)
    """
    generator = torch.Generator().manual_seed(seed)
    m = sum(sizes)
    x = torch.randn(m, k, generator=generator)
    x *= torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        if size > 1 and route.a != "NVFP4":
            x[end - size + 1, k // 2 :] *= 2.0**20
            x[end - 1, k // 2 :] *= 2.0**-40
    w = torch.randn(len(sizes), n, k, generator=generator)
    a, b = quantized(x, route.a, "activation"), quantized(w, route.b, "weight")
    default = find_route(route.operation, route.arch, route.a, route.b) == route
    kernel = None if default else route.config_class
    return InvarianceProblem(a, b, tuple(sizes), dtype, kernel, route.arch)


def random_problem(route: Route, seed: int, factor: int = 1) -> InvarianceProblem:
    """Groups of every size that tiles are chosen by, tails of N and K. ``factor``: how many times larger N and K are."""
    draw = random.Random(f"invariance {route.module} {route.a} {route.b} {seed}")
    sizes = [0, 1, *(draw.randint(*span) for span in ((2, 8), (9, 16), (17, 32), (33, 64), (65, 131)))]
    draw.shuffle(sizes)
    n, k = factor * 16 * draw.randint(1, 24), factor * 32 * draw.randint(1, 20)
    return make_problem(route, sizes, n, k, DTYPES[seed % len(DTYPES)], draw.randrange(2**31))


# --- surroundings ----------------------------------------------------------------------------------------


class _Calls:
    """The calls of a problem at a place, and the product that every row of them is compared with."""

    def __init__(self, problem: InvarianceProblem, place: Place) -> None:
        self.place, self.dtype, self.arch = place, problem.dtype, problem.arch
        self.a, self.b = place.put(problem.a), place.put(problem.b)
        self.sizes, self.rows = problem.sizes, sum(problem.sizes)
        self.options: dict[str, Any] = {"backend": place.backend, "config": problem.kernel}
        self.offs = self.ends_of(problem.sizes)
        self.is_default = problem.kernel is None
        self.quantizes = (format_name(problem.a), problem.b.format.name) in quant_pairs(problem.arch)
        guarded = place.output(self.rows, self.b.shape[1], self.dtype)
        self.whole = self.product(self.a, self.b, self.offs, guarded.out)
        place.judge.now(str(problem))
        place.judge.written("the whole", guarded)
        place.judge.wrong("numbers of the whole are not finite", ~self.whole.isfinite().all())
        place.judge.wrong("a row has nothing but zeros", ~(self.whole != 0).any(dim=1).all())

    def same(self, name: str, got: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """order: numbers of the rows that ``got`` should be, None for all."""
        self.place.judge.same(name, got, self.whole if order is None else self.whole[order])

    def ends_of(self, sizes: Sequence[int]) -> torch.Tensor:
        return self.place.ends(list(itertools.accumulate(sizes)))

    def empty(self, rows: int) -> torch.Tensor:
        return self.whole.new_full((rows, self.whole.shape[1]), float("nan"))

    def product(
        self, a: Activation, b: BlockScaledTensor, offs: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return grouped_gemm(a, b, offs, out=self.empty(a.shape[0]) if out is None else out, **self.options)

    def quantizing(self, **outputs: Any) -> Any:
        offs = self.offs
        return grouped_gemm_quant(
            a_tensor=self.a, b_tensor=self.b, padded_offsets=offs, return_amax=False, **outputs, **self.options
        )

    def part(self, group: int, start: int, size: int) -> tuple[Activation, BlockScaledTensor, torch.Tensor]:
        """Rows of one group with its weights, and their numbers."""
        index = torch.arange(start, start + size, device=self.place.device)
        return rows_of(self.a, index), groups_of(self.b, [group]), index


def _reversed(calls: _Calls) -> None:
    """Groups in reverse order, and the rows in each."""
    order = torch.arange(calls.rows - 1, -1, -1, device=calls.place.device)
    b, offs = groups_of(calls.b, range(len(calls.sizes))[::-1]), calls.ends_of(calls.sizes[::-1])
    calls.same("in reverse", calls.product(rows_of(calls.a, order), b, offs), order)


def _crowded(calls: _Calls) -> None:
    """A large group behind, and then as many rows of no group: M, and M / G, of another size."""
    m, groups = calls.rows, len(calls.sizes)
    order = torch.arange(m + _CROWD * (groups + 1), device=calls.place.device) % m
    a, crowd = rows_of(calls.a, order), order.numel() - m
    out = calls.product(a, groups_of(calls.b, [*range(groups), 0]), calls.ends_of([*calls.sizes, crowd]))
    calls.same("before a crowded group", out[:m])  # what the crowd computes, by the first group's weights, is discarded
    calls.same("before rows of no group", calls.product(a, calls.b, calls.offs)[:m])


def _alone(calls: _Calls) -> None:
    """Each group by itself; on Blackwell all of them as a list too."""
    ends = itertools.accumulate(calls.sizes)
    parts = [calls.part(g, end - n, n) for g, (n, end) in enumerate(zip(calls.sizes, ends, strict=True)) if n]
    for a, b, index in parts:
        out = calls.product(a, b, calls.ends_of([index.numel()]))
        calls.same(f"{index.numel()} rows of a group alone", out, index)
    if calls.arch == "sm_100a" and calls.is_default and isinstance(calls.a, BlockScaledTensor):
        outs = [calls.empty(index.numel()) for *_, index in parts]
        a_list: list[Any] = [a for a, *_ in parts]
        grouped_gemm_list(a_list, [b[0] for _, b, _ in parts], out=outs, backend=calls.place.backend)
        for out, (*_, index) in zip(outs, parts, strict=True):
            calls.same("in a list", out, index)


def _dense_products(calls: _Calls) -> None:
    """The largest group, and its last row, as dense products."""
    group = max(range(len(calls.sizes)), key=lambda g: calls.sizes[g])
    end, size = sum(calls.sizes[: group + 1]), calls.sizes[group]
    for rows in (1, size):
        a, b, index = calls.part(group, end - rows, rows)
        calls.same(f"gemm of {rows} rows", gemm(a, b[0], out=calls.empty(rows), **calls.options), index)


def _layouts(calls: _Calls) -> None:
    """The same operands with their scales elsewhere."""
    a, b = calls.a, calls.b if calls.b.format == FP8_BLOCK else in_layout(calls.b, "blocked")
    if isinstance(a, torch.Tensor):
        moved_scales: list[Activation] = [a]
    elif a.format == FP8_BLOCK:
        moved_scales = [BlockScaledTensor(a.data, a.scale.contiguous(), a.format)]
    else:
        moved_scales = [in_layout(a, layout, calls.offs) for layout in ("blocked", "blocked_groups")]
    for activations in moved_scales:
        calls.same("scales in another layout", calls.product(activations, b, calls.offs))


def _quantizing_values(calls: _Calls) -> None:
    """D of the quantizing call, where it has nothing to do but to round."""
    if calls.quantizes:
        calls.same("D of the quantizing call", calls.quantizing(d_dtype=calls.dtype)["d_tensor"])


def _quantizing_codes(calls: _Calls) -> None:
    """Codes of the quantizing call, against `quantize` of the float32 product on the CPU."""
    if calls.quantizes and calls.dtype == torch.float32:
        got = calls.quantizing(d_format=MXFP8, column_output=False, row_layout="plain").row
        want = calls.place.put(quantize(calls.whole.cpu(), got.format, kind="activation"))
        calls.place.judge.same("codes of the quantizing call", got.data, want.data)
        calls.place.judge.same("scales of the quantizing call", got.scale, want.scale)


SURROUNDINGS: dict[str, Callable[[_Calls], None]] = {
    "reversed": _reversed,
    "crowded": _crowded,
    "alone": _alone,
    "dense": _dense_products,
    "layouts": _layouts,
    "values": _quantizing_values,
    "codes": _quantizing_codes,
}


def judge_problem(problem: InvarianceProblem, place: Place, surroundings: Sequence[str] = tuple(SURROUNDINGS)) -> None:
    """Multiplies the problem, and then its rows in other surroundings, out of `SURROUNDINGS`."""
    calls = _Calls(problem, place)
    for name in surroundings:
        SURROUNDINGS[name](calls)


def check_batch_invariance(place: Place) -> None:
    """A row's bits do not depend on what is around it."""
    jobs = [(route, seed) for route in routes_of(place.arch, "grouped_gemm") for seed in range(PROBLEMS)]
    for route, seed in place.some(jobs):
        judge_problem(random_problem(route, seed), place)


CHECK = Check(check_batch_invariance, 16)
