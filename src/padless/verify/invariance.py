"""Batch invariance on this GPU: the bits of a row do not depend on what is around it, nor on the call that computes it.

A problem is multiplied once, and then again and again with the same rows in other surroundings: every group alone, one
row alone, permuted, behind a crowd that moves the average number of rows, in front of rows of no group, as a dense
product, as a list, with scales in other layouts, and by the quantising call. Every row must have the bits it had.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FP8_BLOCK, MXFP8, BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.kernels.table import BF16, QUANT, ROUTES, Route, find_route, format_name, kernels_arch
from padless.ops.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.testing.bits import bits
from padless.testing.guarded import GuardedOutput
from padless.testing.operands import Activation, groups_of, in_layout, moved, quantized, rows_of
from padless.verify.checks import Check
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz.place import Place

PROBLEMS = 2  # of each route: float32, which hides nothing, and bfloat16
DTYPES = (torch.float32, torch.bfloat16)
_CROWD = 40  # rows a group on average, at least, where groups of a few are put among many
# Looks at what a launch wrote: the number of elements that it compared. Raises AssertionError.
Judge = Callable[[], int]


@dataclass(frozen=True, eq=False)
class InvarianceProblem:
    """Rows of groups, sorted, and nothing behind them. ``kernel``: the class that chooses it, None for the default."""

    a: Activation
    b: BlockScaledTensor
    sizes: tuple[int, ...]
    dtype: torch.dtype
    kernel: KernelChoice | None
    arch: str


def invariance_routes(arch: str) -> list[Route]:
    """The grouped routes of an architecture; each kernel of a pair is a route of its own."""
    return [p for p in ROUTES if (p.operation, p.arch) == ("grouped_gemm", kernels_arch(arch))]


def quant_pairs(arch: str) -> set[tuple[str, str]]:
    """Pairs that have a quantizing call too."""
    return {(p.a, p.b) for p in ROUTES if (p.operation, p.arch) == (QUANT, kernels_arch(arch))}


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


# --- launches --------------------------------------------------------------------------------------------


class _Calls:
    """The calls of a problem on a device, and the product that every row of them is compared with."""

    def __init__(self, problem: InvarianceProblem, device: str, backend: BackendName | None) -> None:
        self.problem = replace(problem, a=moved(problem.a, device), b=moved(problem.b, device))
        self.device, self.backend = device, backend
        self.options: dict[str, Any] = {"backend": backend, "config": problem.kernel}
        self.offs = self.ends_of(problem.sizes)
        self.whole = GuardedOutput(problem.a.shape[0], problem.b.shape[1], problem.dtype, device)
        self.same = partial(_same, problem, self.whole.out)
        self.quantizes = (format_name(problem.a), problem.b.format.name) in quant_pairs(problem.arch)

    def ends_of(self, sizes: Sequence[int]) -> torch.Tensor:
        return group_offsets(sizes).to(self.device)

    def empty(self, rows: int) -> torch.Tensor:
        shape = (rows, self.whole.out.shape[1])
        return torch.full(shape, float("nan"), dtype=self.problem.dtype, device=self.device)

    def product(
        self, a: Activation, b: BlockScaledTensor, offs: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.empty(a.shape[0]) if out is None else out
        return grouped_gemm(a, b, offs, out=out, **self.options)

    def quantizing(self, **outputs: Any) -> Any:
        p = self.problem
        return grouped_gemm_quant(
            a_tensor=p.a, b_tensor=p.b, padded_offsets=self.offs, return_amax=False, **outputs, **self.options
        )

    def part(self, group: int, start: int, size: int) -> tuple[Activation, BlockScaledTensor, torch.Tensor]:
        """Rows of one group with its weights, and their numbers."""
        index = torch.arange(start, start + size, device=self.device)
        return rows_of(self.problem.a, index), groups_of(self.problem.b, [group]), index


def launches(
    problem: InvarianceProblem, device: str, backend: BackendName | None, surroundings: Sequence[str] | None = None
) -> Iterator[Judge]:
    """Multiplies the problem and then its rows in other surroundings, each time with the judge of what came out.

    ``surroundings``: names out of `SURROUNDINGS`, None for all of them.
    """
    calls = _Calls(problem, device, backend)
    p = calls.problem
    calls.product(p.a, p.b, calls.offs, calls.whole.out)
    yield partial(_whole, calls.whole, p.a.shape[0])
    for name in SURROUNDINGS if surroundings is None else surroundings:
        yield from SURROUNDINGS[name](calls)


def _reversed(calls: _Calls) -> Iterator[Judge]:
    """Groups in reverse order, and the rows in each."""
    p = calls.problem
    everybody = torch.arange(sum(p.sizes), device=calls.device).split(p.sizes)
    order = torch.cat([rows.flip(0) for rows in reversed(everybody)])
    b, offs = groups_of(p.b, range(len(p.sizes))[::-1]), calls.ends_of(p.sizes[::-1])
    yield partial(calls.same, "in reverse", calls.product(rows_of(p.a, order), b, offs), order)


def _crowded(calls: _Calls) -> Iterator[Judge]:
    """A large group behind, and then as many rows of no group: M, and M / G, of another size."""
    p = calls.problem
    m, num_groups = sum(p.sizes), len(p.sizes)
    order = torch.arange(m + _CROWD * (num_groups + 1), device=calls.device) % m
    a, crowd = rows_of(p.a, order), order.numel() - m
    out = calls.product(a, groups_of(p.b, [*range(num_groups), 0]), calls.ends_of([*p.sizes, crowd]))
    # What the crowd computes, by the first group's weights, is compared with nothing.
    yield partial(calls.same, "before a crowded group", out, order, m)
    yield partial(calls.same, "before rows of no group", calls.product(a, p.b, calls.offs), order, m)


def _alone(calls: _Calls) -> Iterator[Judge]:
    """Each group by itself; on Blackwell all of them as a list too."""
    p, start = calls.problem, 0
    listed: list[tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor]] = []
    for group, size in enumerate(p.sizes):
        if size > 0:
            a, b, index = calls.part(group, start, size)
            out = calls.product(a, b, calls.ends_of([size]))
            yield partial(calls.same, f"the {size} rows of group {group} alone", out, index)
            if isinstance(a, BlockScaledTensor):
                listed.append((a, b[0], index))
        start += size
    if p.arch == "sm_100a" and p.kernel is None:
        outs = [calls.empty(index.numel()) for *_, index in listed]
        grouped_gemm_list([a for a, *_ in listed], [b for _, b, _ in listed], out=outs, backend=calls.backend)
        for out, (*_, index) in zip(outs, listed, strict=True):
            yield partial(calls.same, "in a list", out, index)


def _dense_products(calls: _Calls) -> Iterator[Judge]:
    """The largest group, and its last row, as dense products."""
    p = calls.problem
    group = max(range(len(p.sizes)), key=lambda g: p.sizes[g])
    end, size = sum(p.sizes[: group + 1]), p.sizes[group]
    for rows in (1, size):
        a, b, index = calls.part(group, end - rows, rows)
        out = gemm(a, b[0], out=calls.empty(rows), **calls.options)
        yield partial(calls.same, f"gemm of {rows} rows", out, index)


def _layouts(calls: _Calls) -> Iterator[Judge]:
    """The same operands with their scales elsewhere."""
    a, b = calls.problem.a, calls.problem.b

    tiled = b if b.format == FP8_BLOCK else in_layout(b, "blocked")
    if isinstance(a, torch.Tensor):
        moved_scales: list[Activation] = [a]
    elif a.format == FP8_BLOCK:
        moved_scales = [BlockScaledTensor(a.data, a.scale.contiguous(), a.format)]
    else:
        moved_scales = [in_layout(a, layout, calls.offs) for layout in ("blocked", "blocked_groups")]
    for activations in moved_scales:
        out = calls.product(activations, tiled, calls.offs)
        yield partial(calls.same, "scales in another layout", out)


def _quantizing_values(calls: _Calls) -> Iterator[Judge]:
    """D of the quantising call, where it has nothing to do but to round."""
    if not calls.quantizes:
        return
    out = calls.quantizing(d_dtype=calls.problem.dtype)["d_tensor"]
    yield partial(calls.same, "D of the quantising call", out)


def _quantizing_codes(calls: _Calls) -> Iterator[Judge]:
    """Codes of the quantising call, against `quantize` of the float32 product."""
    if calls.quantizes and calls.problem.dtype == torch.float32:
        codes = calls.quantizing(d_format=MXFP8, column_output=False, row_layout="plain").row
        yield partial(_quantized, calls.problem, calls.whole.out, codes)


SURROUNDINGS: dict[str, Callable[[_Calls], Iterator[Judge]]] = {
    "reversed": _reversed,
    "crowded": _crowded,
    "alone": _alone,
    "dense": _dense_products,
    "layouts": _layouts,
    "values": _quantizing_values,
    "codes": _quantizing_codes,
}


# --- judging ---------------------------------------------------------------------------------------------


def _bits(t: torch.Tensor) -> torch.Tensor:
    return bits(t.cpu())


def _whole(guarded: GuardedOutput, rows: int) -> int:
    """Every row was written, with numbers that are worth comparing, and nothing else was."""
    guarded.check(rows)
    assert bool((guarded.out != 0).any(dim=1).all()), "a row has nothing but zeros"
    return 0


def _same(
    problem: InvarianceProblem,
    whole: torch.Tensor,
    what: str,
    got: torch.Tensor,
    order: torch.Tensor | None = None,
    count: int | None = None,
) -> int:
    """``order``: the rows of ``whole`` that ``got`` should be, of which the first ``count`` are computed."""
    expected = whole if order is None else whole[order]
    count = min(expected.shape[0] if count is None else count, sum(problem.sizes))
    wrong = (_bits(got[:count]) != _bits(expected[:count])).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        a = BF16 if isinstance(problem.a, torch.Tensor) else problem.a.format.name
        name = "the default" if problem.kernel is None else getattr(problem.kernel, "__name__", problem.kernel)
        raise AssertionError(
            f"{a} x {problem.b.format.name} on {problem.arch} by {name}, sizes {problem.sizes}, (N, K) "
            f"{tuple(problem.b.shape[1:])}, {problem.dtype}: {what}: {len(wrong)} of {count} rows have other bits, the "
            f"first is {wrong[0]}"
        )
    return got[:count].numel()


def _quantized(problem: InvarianceProblem, whole: torch.Tensor, codes: BlockScaledTensor) -> int:
    """The row codes are those that `quantize` makes of the float32 product."""
    wanted = quantize(whole.cpu(), codes.format, kind="activation")
    for what, got, expected in (
        ("codes of the quantising call", codes.data, wanted.data),
        ("scales of the quantising call", codes.scale, wanted.scale),
    ):
        _same(problem, expected, what, got)
    return codes.data.numel()


def judge_problem(
    problem: InvarianceProblem,
    device: str = "cuda",
    backend: BackendName | None = None,
    surroundings: Sequence[str] | None = None,
) -> int:
    """Elements that were compared. Raises AssertionError at the first surroundings in which a row has other bits."""
    with settings_of(backend):
        return sum(judge() for judge in launches(problem, device, backend, surroundings))


def check_batch_invariance(place: Place) -> None:
    """A row's bits do not depend on what is around it."""
    jobs = [(route, seed) for route in invariance_routes(place.arch) for seed in range(PROBLEMS)]
    for route, seed in place.some(jobs):
        for judge in launches(random_problem(route, seed), str(place.device), place.backend):
            place.judge.ask(judge)


CHECK = Check(check_batch_invariance, 16)
