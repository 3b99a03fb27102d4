"""Bugs planted in both weight gradients, one at a time, and what of their fixed problems finds each.

In the kernel's place stands the reference of the tensor core's arithmetic, so that a bit is a bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from padless.layouts import GroupedColumns
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.testing.bits import bits
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.testing.gradients import Rows
from padless.verify.bf16 import fuzz as plain
from padless.verify.checks import Check
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz import case, training
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import Draw, Limits, Options, Problem
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.run import jobs_of
from support.weight_gradients import BF16_VARIANTS, FP8_ADDING, FP8_VARIANTS

pytestmark = pytest.mark.usefixtures("one_thread")

COLUMNS, ROWS = "grouped_gemm_wgrad", "plain.grouped_gemm_wgrad"
DRAWS = 30


@dataclass
class Planted:
    """One call of a kernel with a bug: operands, output, whether it is added; and what earlier calls left."""

    operands: Any
    out: torch.Tensor
    accumulate: bool
    memory: dict[Any, Any]

    @property
    def of_columns(self) -> bool:
        return isinstance(self.operands, tuple)

    @property
    def offs(self) -> torch.Tensor:
        offs = self.operands[0].offs if self.of_columns else self.operands.offs
        assert isinstance(offs, torch.Tensor)
        return offs

    @property
    def sizes(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise([0, *self.offs.tolist()])]

    def product(self, operands: Any = None, *, exact: bool = False) -> torch.Tensor:
        operands = self.operands if operands is None else operands
        how: Any = {"out_dtype": torch.float32}
        if self.of_columns:
            return grouped_gemm_wgrad_reference(*operands, accumulation="fp8_block" if exact else "tensor_core", **how)
        return grouped_gemm_wgrad_rows_reference(
            operands.dy, operands.x, operands.offs, accumulation="float64" if exact else "tensor_core", **how
        )

    def store(self, product: torch.Tensor | None = None) -> None:
        """What the kernel should do, or the same with another product."""
        product = self.product() if product is None else product
        if not self.accumulate:
            self.out.copy_(product.to(self.out.dtype))
        for group, size in enumerate(self.sizes):
            if self.accumulate and size:
                self.out[group] += product[group]


Bug = Callable[[Planted], None]


def nudge(t: torch.Tensor) -> None:
    """Every element's next one."""
    bits(t).add_(1)


def one_ulp(p: Planted) -> None:
    p.store()
    nudge(p.out[-1, 1, 2:3])


def lost_tail(p: Planted) -> None:
    """The tokens behind a whole number of steps are not added."""
    step = 32 if p.of_columns else 16
    if p.of_columns:
        dy, x = p.operands
        codes = dy.data.view(torch.uint8).clone()
        for start, size in zip(dy.starts.tolist(), p.sizes, strict=True):
            if size > step and size % step:
                codes[:, start + size // step * step : start + size] = 0
        p.store(p.product((replace(dy, data=codes.view(dy.data.dtype)), x)))
        return
    dy = p.operands.dy.clone()
    for end, size in zip(p.offs.tolist(), p.sizes, strict=True):
        if size > step and size % step:
            dy[end - size % step : end] = 0
    p.store(p.product(Rows(dy, p.operands.x, p.offs)))


def sees_nan_of_others(p: Planted) -> None:
    p.store()
    if sum(p.sizes) == 0:
        return
    if p.of_columns:
        dy = p.operands[0]
        before = [dy.data[:, max(start - 1, 0)].float().isnan().any() for start in dy.starts.tolist()]
    else:
        before = [
            p.operands.dy[max(end - size - 1, 0)].isnan().any() for end, size in zip(p.offs, p.sizes, strict=True)
        ]
    for group in range(1, len(p.sizes)):
        if p.sizes[group] and before[group]:
            p.out[group] = float("nan")


def adds_to_empty_groups(p: Planted) -> None:
    if p.accumulate:
        p.out.add_(p.product())
    else:
        p.store()


def writes_behind(p: Planted) -> None:
    p.store()
    whole = torch.empty(0, dtype=p.out.dtype).set_(p.out.untyped_storage())
    end = p.out.storage_offset() + (p.out.shape[0] * p.out.shape[1] - 1) * p.out.stride(1) + p.out.shape[2]
    if end < whole.numel():
        whole[end] = 1.0


def leaves_one_out(p: Planted) -> None:
    before = p.out[0, 0, :1].clone()
    p.store()
    if not p.accumulate:
        bits(p.out)[0, 0, :1] = bits(before)


def by_group_index(p: Planted) -> None:
    """The bits of the second group are its own only where it is second."""
    p.store()
    if len(p.sizes) > 1 and p.sizes[1]:
        nudge(p.out[1, 0, :1])


def moves(p: Planted) -> None:
    """Every seventh call differs."""
    p.memory["calls"] = p.memory.get("calls", 0) + 1
    p.store()
    if p.memory["calls"] % 7 == 0 and any(p.sizes):
        nudge(p.out[-1, 0, :1])


def adds_bfloat16(p: Planted) -> None:
    product = p.product()
    if not p.accumulate:
        p.store(product)
    for group, size in enumerate(p.sizes):
        if p.accumulate and size:
            p.out[group] = p.out[group].bfloat16().float() + product[group]


def flushes(p: Planted) -> None:
    p.store()
    if p.out.dtype == torch.float32:
        p.out[p.out.abs() < torch.finfo(torch.float32).tiny] = 0


def flushes_when_adding(p: Planted) -> None:
    p.store()
    if p.accumulate:
        p.out[p.out.abs() < torch.finfo(torch.float32).tiny] = 0


def by_alignment(p: Planted) -> None:
    p.store()
    filled = [group for group, size in enumerate(p.sizes) if size]
    if filled and p.operands[0].alignment == 128:
        nudge(p.out[filled[-1], 0, :1])


def last_scale(p: Planted) -> None:
    """The last, shorter block of a group takes the scale of the one before."""
    dy, x = p.operands
    scale = x.scale.clone()
    for block, size in zip(x.block_starts.tolist(), p.sizes, strict=True):
        if size > 128 and size % 128:
            scale[block + size // 128] = x.scale[block + size // 128 - 1]
    p.store(p.product((dy, replace(x, scale=scale))))


def rounds_twice(p: Planted) -> None:
    product = p.product()
    p.store(product.half().float() if p.out.dtype == torch.bfloat16 else product)


def sums_exactly(p: Planted) -> None:
    """Better than the tensor core: no bit is the kernel's."""
    p.store(p.product(exact=True))


def stale(p: Planted) -> None:
    """The product of what these buffers held when they were first seen: what a graph may not remember."""
    pointers = tuple(t.data_ptr() for t in case.tensors_of(p.operands))
    product, _ = p.memory.setdefault(pointers, (p.product(), p.operands))
    p.store(product)


def overwrites(p: Planted) -> None:
    """Nothing is ever added."""
    p.accumulate = False
    p.store()


def too_large(part: float) -> Bug:
    def bug(p: Planted) -> None:
        p.store(p.product() * (1 + part))

    return bug


def one_half_too_large(p: Planted) -> None:
    """One element of each group."""
    product = p.product()
    product[:, 3, 5] *= 1.5
    p.store(product)


# Parts of the names of what finds a bug.
NEAR, ROWS_NEAR, BITS = "float64", "float64: rows", "reference's bits"
PADDED, TURNED, NAN = "padded", "groups in reverse", "NaN in all other groups"
MOVED, ADDED, BATCHES, REPLAY = "from call to call", "one addition", "microbatches", "replay"
UNWRITTEN, OUTSIDE, SUBNORMAL, FUZZ = (
    "not written",
    "outside of the valid rows",
    "subnormal",
    f"{DRAWS} random problems",
)
KINDS = (
    ROWS_NEAR, NEAR, BITS, PADDED, TURNED, NAN, MOVED, ADDED, BATCHES, REPLAY, UNWRITTEN, OUTSIDE, SUBNORMAL, FUZZ
)  # fmt: skip
# Bugs, and what finds them: in both gradients, and in those of columns and of rows alone; None where there is no such
# thing in rows. What is not obvious: a replay of additions compares with the doubled gradient, whose last bit a unit may
# or may not round away; columns have NaN between groups as they are, rows where a change puts it; 2^-8 of FP8 passes the
# bound of elements but where the tensor core truncates one of few terms, too; float16 loses small results, which weigh
# little in a row; what moves is found where the seventh call is the one that is compared.
BUGS: dict[str, tuple[Bug, set[str], set[str], set[str] | None]] = {
    "a result one unit off": (one_ulp, {BITS, TURNED, ADDED, BATCHES, FUZZ}, set(), {REPLAY}),
    "tokens of a last step lost": (lost_tail, {ROWS_NEAR, NEAR, BITS, PADDED, BATCHES, FUZZ}, set(), set()),
    "NaN of another group": (sees_nan_of_others, {TURNED, NAN, FUZZ}, {ROWS_NEAR, NEAR, BITS, PADDED}, set()),
    "zeros added to empty groups": (adds_to_empty_groups, {ADDED, FUZZ}, set(), set()),
    "a store behind the output": (writes_behind, {OUTSIDE, FUZZ}, set(), set()),
    "an element not stored": (
        leaves_one_out,
        {ROWS_NEAR, NEAR, BITS, TURNED, ADDED, BATCHES, REPLAY, UNWRITTEN, FUZZ},
        set(),
        set(),
    ),
    "bits that depend on a group's number": (by_group_index, {TURNED, BATCHES, FUZZ}, {BITS, ADDED}, {REPLAY}),
    "bits that move": (moves, {MOVED, ADDED, REPLAY}, set(), {FUZZ}),
    "sums rounded to bfloat16": (adds_bfloat16, {ADDED, BATCHES, REPLAY, FUZZ}, set(), set()),
    "subnormal numbers flushed": (flushes, {BITS, ADDED, SUBNORMAL}, set(), None),
    "subnormal sums flushed": (flushes_when_adding, {ADDED}, set(), None),
    "bits that depend on alignment": (by_alignment, {BITS, PADDED, TURNED, FUZZ}, set(), None),
    "the scale of the block before": (last_scale, {ROWS_NEAR, NEAR, BITS, PADDED, FUZZ}, set(), None),
    "rounded to float16 first": (rounds_twice, {BITS, FUZZ}, set(), {NEAR}),
    "sums in float64": (sums_exactly, {BITS, BATCHES, FUZZ}, set(), set()),
    "operands remembered": (stale, {REPLAY, FUZZ}, set(), set()),
    "nothing added": (overwrites, {ADDED, BATCHES, REPLAY, FUZZ}, set(), set()),
    "too large by 2^-8": (too_large(2.0**-8), {ROWS_NEAR, NEAR, BITS, BATCHES, FUZZ}, set(), set()),
    "too large by 2^-6": (too_large(2.0**-6), {ROWS_NEAR, NEAR, BITS, BATCHES, FUZZ}, set(), set()),
    "one element half too large": (one_half_too_large, {ROWS_NEAR, NEAR, BITS, BATCHES, FUZZ}, set(), set()),
}


def call_with(bug: Bug, memory: dict[Any, Any], call: str) -> Callable[..., torch.Tensor]:
    def of_columns(
        dy: GroupedColumns, x: GroupedColumns, *, out: torch.Tensor, accumulate: bool = False, **_: Any
    ) -> torch.Tensor:
        bug(Planted((dy, x), out, accumulate, memory))
        return out

    def of_rows(
        dy: torch.Tensor, x: torch.Tensor, *, offs: torch.Tensor, out: torch.Tensor, accumulate: bool = False, **_: Any
    ) -> torch.Tensor:
        bug(Planted(Rows(dy, x, offs), out, accumulate, memory))
        return out

    return of_columns if call == COLUMNS else of_rows


def few_lines(call: str) -> list[Options]:
    """Fixed problems of one kernel, of each kind the smallest, cut to a tile."""
    one = {"mode": "1d2d", "tile": 128, "cluster": 1, "pieces": 0} if call == COLUMNS else {"tile": 3}
    found: dict[str, Options] = {}
    for o in sorted(SUBJECTS[call].lines("sm_90a"), key=lambda o: sum(o["sizes"])):
        kind = [o[name] for name in ("properties", "out", "accumulate")]
        kind += [o.get(name) for name in ("tiny", "normal", "wide", "alignments")]
        if one.items() <= o.items() and len([size for size in o["sizes"] if size]) > 1:
            found.setdefault(str(kind), o | {"n": min(o["n"], 16), "k": 48})
    return [*found.values()]


def found_by(bug: Bug, call: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of what is wrong with fixed and with random problems."""
    monkeypatch.setattr(case, "REPEATS", 7)
    memory: dict[Any, Any] = {}
    monkeypatch.setattr(training if call == COLUMNS else plain, "grouped_gemm_wgrad", call_with(bug, memory, call))
    place = Place(torch.device("cpu"), "emulator", "sm_90a", Judge(any_nan=False))
    for options in few_lines(call):
        memory.clear()
        SUBJECTS[call].judge(options, place)
    wrong = [name for names in place.judge.verdicts().values() for name in names]
    found = {next(kind for kind in KINDS if kind in name) for name in wrong}
    for number in range(DRAWS):
        memory.clear()
        draw = Draw(f"planted {number}", "emulator")
        draw.limits = Limits(3, 140, 16, 48)
        problem: Problem = SUBJECTS[call].draw(call, draw)
        SUBJECTS[call].judge(problem.options, place)
    return found | ({FUZZ} if place.judge.verdicts() else set())


@pytest.mark.parametrize("call", [COLUMNS, ROWS])
def test_nothing_is_wrong_with_what_the_kernels_should_do(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by(Planted.store, call, monkeypatch) == set()


@pytest.mark.parametrize("call", [COLUMNS, ROWS])
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_all_that_should(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, both, of_columns, of_rows = BUGS[name]
    own = of_columns if call == COLUMNS else of_rows
    if own is None:
        pytest.skip("the bug is of the other call")
    assert both | own <= found_by(bug, call, monkeypatch)


# --- the fixed problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [COLUMNS, ROWS])
def test_shapes_have_what_is_hard(call: str) -> None:
    lines = list(SUBJECTS[call].lines("sm_90a"))
    checked = [o for o in lines if "bits" in o["properties"]]
    assert {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129} <= {size for o in checked for size in o["sizes"]}
    assert any(o["past"] for o in checked)
    assert all(len({sum(o["sizes"]) + o["past"], o["n"], o["k"]}) == 3 for o in checked)
    if call == COLUMNS:
        alignments = {tuple(o["alignments"]) for o in checked}
        assert alignments == {(32, 32), (32, 128), (128, 32), (128, 128)}
        assert {o["normal"] for o in checked} == {True, False}
    else:
        assert any(o["n"] % 16 for o in checked)
        assert {o["wide"] for o in checked} == {True, False}
    for name in ("near", "bits", "changes", "repeats", "replay", "microbatches"):
        assert any(name in o["properties"] for o in lines), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "check", "source", "configs"),
    [
        (COLUMNS, "weight gradients", "sm90_fp8_wgrad/sm90_fp8_wgrad.cu", (*FP8_VARIANTS, *FP8_ADDING)),
        (ROWS, "bf16 weight gradients", "sm90_bf16_wgrad/sm90_bf16_wgrad.cu", BF16_VARIANTS),
    ],
)
def test_every_kernel_is_compiled_ahead_on_hopper_alone(
    call: str, check: str, source: str, configs: Sequence[Any]
) -> None:
    jobs, sanitized = jobs_of("sm_90a")
    assert f"padless.verify.lines {call}" in sanitized
    elsewhere, others = jobs_of("sm_100a")
    assert check not in elsewhere
    assert f"padless.verify.lines {call}" not in others
    found = jobs[check]
    assert isinstance(found, Check)
    kernels, problems = kernels_of(found.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert not problems
    assert {kernel.source for kernel in kernels} == {source}
    assert {config.prelude() for config in configs} <= {kernel.prelude for kernel in kernels}


@pytest.mark.parametrize("call", [COLUMNS, ROWS])
def test_they_pass_in_the_emulator(call: str) -> None:
    """Some of each kind on the kernel itself, of a few tokens."""
    place = place_of("emulator")
    with settings_of("emulator"):
        for o in few_lines(call)[::4]:
            if "repeats" not in o["properties"]:
                SUBJECTS[call].judge(o, place)
    assert "elements" in place.judge.outcome()


@pytest.mark.parametrize("call", [COLUMNS, ROWS, "plain.grouped_gemm"])
def test_problems_that_share_a_reference_have_the_same_operands(call: str) -> None:
    """Of a small shape: those whose bits are compared need one reference for each kind of operands."""
    made: dict[Any, list[torch.Tensor]] = {}
    place, lines = place_of("reference"), SUBJECTS[call].lines("sm_90a")
    small = [o for o in lines if "bits" in o["properties"] and o["sizes"] == [5, 0, 130, 1]]
    for o in small:
        one: Any = {COLUMNS: training.Wgrad, ROWS: plain.Wgrad}.get(call, plain.Product)(o, place)
        found = [bits(t) for t in case.tensors_of(one.operands)]
        same = made.setdefault(case.reference_of(one), found)
        assert all(map(torch.equal, found, same)), o
    assert 2 <= len(made) <= len(small) // 4
