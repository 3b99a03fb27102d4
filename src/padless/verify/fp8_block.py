"""The checks of ``padless verify`` of Hopper's FP8_BLOCK kernel.

Inputs are random, outputs are poisoned and guarded, references are in float64, and errors are judged per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.ops.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.quantization.quantize import quantize
from padless.row_groups import clamped_ends
from padless.runtime.choices import Kind, ScaleMajor
from padless.testing.judge import values_of
from padless.testing.operands import mn_major_in_nan
from padless.verify import train_quantizers
from padless.verify.checks import Check, run_small
from padless.verify.fuzz.judge import FP8_PRECISION, Precision, Product, exact_grouped
from padless.verify.fuzz.place import Place

Shape = tuple[tuple[int, ...], int, int, int]  # sizes, rows past the last group, N, K

# M, N and K differ everywhere; tails in every dimension; groups of 0, 1, 127, 129 rows; tensors under 128 KiB.
SHAPES: tuple[Shape, ...] = (
    ((1,), 0, 8, 16),
    ((0, 0, 0), 3, 72, 144),
    ((5, 0, 130, 1), 3, 136, 272),
    ((127, 128, 129, 1), 0, 264, 400),
    ((0, 64, 65, 63, 0), 7, 384, 512),
    ((300, 0, 7, 129, 127), 11, 1000, 1040),
    ((1000,), 0, 520, 4112),
    (tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
)
CONFIGS: tuple[Sm90Fp8Config, ...] = tuple(
    Sm90Fp8Config(block_m=block_m, block_n=block_n, cluster_n=cluster_n, store=store, scales=scales)
    for block_m, block_n, scales in (
        (256, 128, "mn"),
        (128, 128, "mn"),
        (128, 128, "k"),
        (128, 192, "mn"),
        (128, 64, "mn"),
        (64, 128, "mn"),
        (64, 192, "k"),
    )
    for cluster_n in (1, 2)
    for store in ("ragged", "pool")
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAJORS = ("mn", "k")  # of A's scales


class Variant(NamedTuple):
    """One call on a problem: the kernel (None for the one that is chosen), the output, A's scales."""

    config: Sm90Fp8Config | None = None
    dtype: torch.dtype = torch.bfloat16
    major: str = "mn"


CHOSEN = Variant()
CHOSEN_OF_EACH = tuple(Variant(None, dtype, major) for dtype, major in itertools.product(DTYPES, MAJORS))
EVERY_CONFIG = tuple(Variant(config) for config in CONFIGS)
EVERY_VARIANT = tuple(
    Variant(config, dtype, major)
    for dtype, config, major in itertools.product(DTYPES, CONFIGS, MAJORS)
    if not (config.block_m == 256 and dtype == torch.float32)  # does not fit in shared memory
)
_WRONG_OFFS: Shape = ((64, 64, 64, 64), 0, 136, 272)
_REPEATS = 50
_REPEATED: Shape = ((300, 0, 7, 129, 127, 64, 1), 0, 1000, 1040)
_REPLAYED: tuple[Shape, ...] = (((100, 0, 57, 99), 0, 264, 400), ((0, 199, 1, 56), 0, 264, 400))
_STREAMED: tuple[Shape, ...] = tuple(((g * 31 % 97, 130, g), g, 136, 272) for g in range(8))
_DENSE: tuple[Shape, ...] = tuple(((m,), 0, n, k) for m, n, k in ((1, 8, 16), (333, 264, 400), (1024, 520, 1040)))
# Together they send every ring round more than once: 14 K blocks in one, and more than three tiles a CTA in the last.
_SMALL: tuple[Shape, ...] = (((5, 0, 130, 1), 3, 136, 272), ((0, 64, 65), 7, 200, 1680), ((20,) * 30, 5, 2000, 64))
_SMALL_VARIANTS = (
    *(Variant(config, major=major) for config, major in itertools.product(CONFIGS, MAJORS)),
    Variant(dtype=torch.float32),
)


# Per row, |out - float64| / |float64|. The tensor core keeps 13 fractional bits of the largest of 33 terms, truncating
# toward zero, four times in 128 of K: about 2^-12.6 on normal data. The output dtype rounds by half a unit in the last
# place: 2^-9 for bf16, 2^-12 for fp16. The limits leave a factor of two to three.
ROW_ERROR_LIMIT = {torch.float32: 2.0**-11, torch.float16: 2.0**-10.5, torch.bfloat16: 2.0**-7.5}


def precision_of(dtype: torch.dtype, factor: float = 1.0) -> Precision:
    """Of FP8 tensor cores; factor: of the limit of rows."""
    return FP8_PRECISION._replace(of_norm=ROW_ERROR_LIMIT[dtype] * factor)


@dataclass(frozen=True)
class Operands:
    """A random problem at a place."""

    a: BlockScaledTensor
    b: BlockScaledTensor
    offs: torch.Tensor
    sizes: tuple[int, ...]

    @property
    def valid_rows(self) -> int:
        return sum(self.sizes)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.a.data, self.a.scale, self.b.data, self.b.scale, self.offs]

    def with_scales(self, major: str) -> Operands:
        scale = self.a.scale.contiguous() if major == "k" else mn_major_in_nan(self.a.scale)
        return replace(self, a=BlockScaledTensor(self.a.data, scale, FP8_BLOCK))

    def exact(self) -> Product:
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return exact_grouped(values_of(self.a), values_of(self.b), itertools.pairwise(ends))


def random_operands(place: Place, sizes: tuple[int, ...], past: int, n: int, k: int, *, seed: int = 0) -> Operands:
    """Normal activations and weights whose rows differ in size by up to 2^8, quantised."""
    generator = torch.Generator().manual_seed(hash((sizes, past, n, k, seed)) % 2**31)
    m = sum(sizes) + past
    spread = torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    x = torch.randn(m, k, generator=generator) * spread
    w = torch.randn(len(sizes), n, k, generator=generator)
    a, b = quantize(x, FP8_BLOCK, kind="activation", scale_major="k"), quantize(w, FP8_BLOCK, kind="weight")
    a, b, offs = (place.put(t) for t in (a, b, group_offsets(sizes)))
    return Operands(a, b, offs, sizes).with_scales("mn")


def _each_problem(place: Place) -> Iterator[Operands]:
    for shape in place.some(SHAPES):
        yield random_operands(place, *shape)


def _result(
    place: Place, operands: Operands, variant: Variant = CHOSEN, ends: Sequence[int] | None = None
) -> torch.Tensor:
    """The valid rows of a guarded output. ends: other offsets than the operands'."""
    given, m = operands.with_scales(variant.major), operands.a.shape[0]
    guarded = place.output(m, operands.b.shape[1], variant.dtype)
    offs = operands.offs if ends is None else place.ends(list(ends))
    grouped_gemm(given.a, given.b, offs, out=guarded.out, backend=place.backend, config=variant.config)
    valid = operands.valid_rows if ends is None else clamped_ends(ends, m)[-1]
    place.judge.written(f"{variant} on {operands.sizes}", guarded, valid)
    return guarded.out[:valid]


def check_accuracy(place: Place) -> None:
    """Every shape and dtype: error per row within what 13-bit accumulation and output rounding explain."""
    for operands in _each_problem(place):
        exact = cache(operands.exact)
        for variant in CHOSEN_OF_EACH:
            out = _result(place, operands, variant)
            place.judge.product(f"{operands.sizes}", out, exact, precision_of(variant.dtype))


def check_configs_agree(place: Place) -> None:
    """Every tile shape, cluster, store and scale path gives the same bits: K is summed in one order."""
    for operands in _each_problem(place):
        first: dict[torch.dtype, torch.Tensor] = {}
        for variant in EVERY_VARIANT:
            out = _result(place, operands, variant)
            place.judge.same(f"{variant} on {operands.sizes}", out, first.setdefault(variant.dtype, out))


def check_padding_changes_nothing(place: Place) -> None:
    """Each group padded to 128 rows gives the same bits in its valid rows."""
    for operands in _each_problem(place):
        valid, padded_sizes = operands.valid_rows, [-(-size // 128) * 128 for size in operands.sizes]
        starts = [0, *itertools.accumulate(padded_sizes)]
        picks = [start + row for start, size in zip(starts, operands.sizes, strict=False) for row in range(size)]
        at = place.put(torch.tensor(picks, dtype=torch.long))
        data = torch.zeros((starts[-1], operands.a.shape[1]), dtype=torch.uint8, device=place.device)
        scale = torch.ones((starts[-1], operands.a.scale.shape[1]), device=place.device)
        data[at], scale[at] = operands.a.data.view(torch.uint8)[:valid], operands.a.scale[:valid]
        padded_a = BlockScaledTensor(data.view(torch.float8_e4m3fn), scale, FP8_BLOCK)
        offs = place.put(group_offsets(padded_sizes))
        padded = grouped_gemm(padded_a, operands.b, offs, backend=place.backend)
        place.judge.same(f"{operands.sizes} padded", padded[at], _result(place, operands))


def check_wrong_offs_stay_inside(place: Place) -> None:
    """Decreasing, negative and too large offsets: no access outside the tensors, every fence intact."""
    operands = random_operands(place, *_WRONG_OFFS)
    wrong = ([300, 10, -5, 200], [-1, -1, -1, -1], [2**31 - 1] * 4, [0, 2**30, -(2**31), 5], [256, 128, 64, 0])
    for values, variant in itertools.product(wrong, EVERY_CONFIG[:4]):
        _result(place, operands, variant, values)


def check_repeats_agree(place: Place) -> None:
    """The same call many times over, other work in between: the same bits (a moving result is a race)."""
    operands = random_operands(place, *_REPEATED)
    for variant in EVERY_CONFIG:
        first = _result(place, operands, variant).clone()
        for _ in place.times(_REPEATS):
            place.judge.same(f"{variant} moved", _result(place, operands, variant), first)


def check_graph_replay(place: Place) -> None:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers; no call waits."""
    operands, other = (random_operands(place, *shape, seed=seed) for seed, shape in enumerate(_REPLAYED))
    out = torch.empty((256, 264), dtype=torch.bfloat16, device=place.device)
    call = partial(grouped_gemm, operands.a, operands.b, operands.offs, out=out, backend=place.backend)
    place.replayed(call, [*operands.parts, out], [*other.parts, torch.full_like(out, float("nan"))])
    place.judge.same("a replay with new values and new group sizes", out, _result(place, other))


def check_streams_and_threads(place: Place) -> None:
    """Eight threads, each with a stream of its own and its own problem, at once."""
    problems = [random_operands(place, *shape, seed=g) for g, shape in enumerate(_STREAMED)]
    expected = [_result(place, p).clone() for p in problems]

    def work(index: int) -> None:
        p = problems[index]
        for _ in place.times(_REPEATS):
            out = grouped_gemm(p.a, p.b, p.offs, backend=place.backend)
        place.judge.same(f"thread {index}", out[: p.valid_rows], expected[index])

    place.in_threads(work, len(problems))


def check_dense(place: Place) -> None:
    """gemm is grouped_gemm with one group, without offsets."""
    for shape in _DENSE:
        p = random_operands(place, *shape)
        dense = gemm(p.a, p.b[0], backend=place.backend)
        place.judge.same(f"dense {shape}", dense, grouped_gemm(p.a, p.b, p.offs, backend=place.backend))


def check_quantizers_agree(place: Place) -> None:
    """The GPU's quantisers give torch's bits, tails and outliers included."""
    cases: tuple[tuple[Kind, tuple[int, ...], ScaleMajor], ...] = (
        ("activation", (1, 16), "mn"),
        ("activation", (777, 1040), "mn"),
        ("activation", (777, 1040), "k"),
        ("activation", (129, 4112), "mn"),
        ("weight", (3, 200, 1040), "mn"),
        ("weight", (136, 144), "mn"),
    )
    for (kind, shape, major), dtype in itertools.product(cases, DTYPES):
        x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 7, shape).float())).to(dtype)
        want = quantize(x, FP8_BLOCK, kind=kind, scale_major=major)
        got = quantize(place.put(x), FP8_BLOCK, kind=kind, scale_major=major)
        place.judge.same(f"scales of {kind} {shape} {dtype}", got.scale, place.put(want.scale))
        place.judge.same(f"codes of {kind} {shape} {dtype}", got.data, place.put(want.data))


def small_problems(place: Place) -> None:
    """Small launches of every store and scale path, for compute-sanitizer: ``python -m padless.verify.fp8_block``."""
    for shape in place.some(_SMALL):
        operands = random_operands(place, *shape)
        for variant in _SMALL_VARIANTS:
            _result(place, operands, variant)


CHECKS: dict[str, Callable[[], str]] = {
    "accuracy": Check(check_accuracy),
    "configs agree": Check(check_configs_agree, 4),
    "padding changes nothing": Check(check_padding_changes_nothing),
    "wrong offsets stay inside": Check(check_wrong_offs_stay_inside),
    "repeats agree": Check(check_repeats_agree),
    "graph replay": Check(check_graph_replay),
    "streams and threads": Check(check_streams_and_threads),
    "dense": Check(check_dense),
    "quantizers agree": Check(check_quantizers_agree, 0),
    "training quantizers agree": train_quantizers.CHECK,
}
SMALL = Check(small_problems)

if __name__ == "__main__":
    run_small(SMALL)
