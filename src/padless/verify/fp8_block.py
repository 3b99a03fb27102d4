"""The checks of ``padless verify``: what must hold on a GPU, each a function that raises AssertionError.

Inputs are random, outputs are poisoned and guarded, references are in float64, and errors are judged per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.ops.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.quantization.quantize import quantize
from padless.row_groups import clamped_ends
from padless.runtime.choices import BackendName, Kind, ScaleMajor
from padless.testing.guarded import GuardedOutput
from padless.testing.judge import float64_rows, row_errors
from padless.testing.operands import mn_major_in_nan, moved
from padless.testing.timing import capture
from padless.verify.train_quantizers import check_train_quantizers

DEVICE = "cuda"
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


# What the checks call. A check reads its own list, and so does what compiles ahead of all of them (``CALLS``).
CHOSEN = (Variant(),)
CHOSEN_OF_EACH = tuple(Variant(None, dtype, major) for dtype, major in itertools.product(DTYPES, MAJORS))
EVERY_CONFIG = tuple(Variant(config) for config in CONFIGS)
EVERY_VARIANT = tuple(
    Variant(config, dtype, major)
    for dtype, config, major in itertools.product(DTYPES, CONFIGS, MAJORS)
    if not (config.block_m == 256 and dtype == torch.float32)  # does not fit in shared memory
)
_WRONG_OFFS: tuple[Shape, ...] = (((64, 64, 64, 64), 0, 136, 272),)
_WRONG_OFFS_VARIANTS = EVERY_CONFIG[:4]
_REPEATS = 50
_REPEATED: tuple[Shape, ...] = (((300, 0, 7, 129, 127, 64, 1), 0, 1000, 1040),)
_REPLAYED: tuple[Shape, ...] = (((100, 0, 57, 99), 0, 264, 400), ((0, 199, 1, 56), 0, 264, 400))
_STREAMED: tuple[Shape, ...] = tuple(((g * 31 % 97, 130, g), g, 136, 272) for g in range(8))
_DENSE: tuple[Shape, ...] = tuple(((m,), 0, n, k) for m, n, k in ((1, 8, 16), (333, 264, 400), (1024, 520, 1040)))
# Together they send every ring round more than once: 14 K blocks in one, and more than three tiles a CTA in the last.
_SMALL: tuple[Shape, ...] = (((5, 0, 130, 1), 3, 136, 272), ((0, 64, 65), 7, 200, 1680), ((20,) * 30, 5, 2000, 64))
_SMALL_VARIANTS = (
    *(Variant(config, major=major) for config, major in itertools.product(CONFIGS, MAJORS)),
    Variant(dtype=torch.float32),
)


def padded_to_tiles(sizes: Sequence[int]) -> tuple[int, ...]:
    """Each group padded to 128 rows."""
    return tuple(-(-size // 128) * 128 for size in sizes)


# Per row, |out - float64| / |float64|. The tensor core keeps 13 fractional bits of the largest of 33 terms, truncating
# toward zero, four times in 128 of K: about 2^-12.6 on normal data. The output dtype rounds by half a unit in the last
# place: 2^-9 for bf16, 2^-12 for fp16. The limits leave a factor of two to three.
ROW_ERROR_LIMIT = {torch.float32: 2.0**-11, torch.float16: 2.0**-10.5, torch.bfloat16: 2.0**-7.5}


@dataclass(frozen=True)
class Operands:
    """A random problem on the GPU."""

    a: BlockScaledTensor
    b: BlockScaledTensor
    offs: torch.Tensor
    sizes: tuple[int, ...]

    @property
    def valid_rows(self) -> int:
        return sum(self.sizes)

    def with_scales(self, major: str) -> Operands:
        scale = self.a.scale.contiguous() if major == "k" else mn_major_in_nan(self.a.scale)
        return replace(self, a=BlockScaledTensor(self.a.data, scale, FP8_BLOCK))


def random_operands(
    sizes: tuple[int, ...], past: int, n: int, k: int, seed: int = 0, device: str | None = None
) -> Operands:
    """Normal activations and weights whose rows differ in size by up to 2^8, quantised, on the GPU (or ``device``)."""
    device = device or DEVICE
    generator = torch.Generator().manual_seed(hash((sizes, past, n, k, seed)) % 2**31)
    m = sum(sizes) + past
    spread = torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    x = torch.randn(m, k, generator=generator) * spread
    w = torch.randn(len(sizes), n, k, generator=generator)
    a, b = quantize(x, FP8_BLOCK, kind="activation", scale_major="k"), quantize(w, FP8_BLOCK, kind="weight")
    a, b, offs = (moved(t, device) for t in (a, b, group_offsets(sizes)))
    return Operands(a, b, offs, sizes).with_scales("mn")


def _each_problem() -> Iterator[Operands]:
    for shape in SHAPES:
        yield random_operands(*shape)


def _guarded_result(operands: Operands, variant: Variant) -> torch.Tensor:
    operands = operands.with_scales(variant.major)
    guarded = GuardedOutput(operands.a.data.shape[0], operands.b.data.shape[1], variant.dtype, DEVICE)
    grouped_gemm(operands.a, operands.b, operands.offs, out=guarded.out, config=variant.config)
    torch.cuda.synchronize()
    guarded.check(operands.valid_rows)
    return guarded.out[: operands.valid_rows]


def check_accuracy() -> str:
    """Every shape and dtype: error per row within what 13-bit accumulation and output rounding explain."""
    worst = dict.fromkeys(DTYPES, 0.0)
    for operands in _each_problem():
        expected = float64_rows(operands.a, operands.b, operands.sizes, rows=None).values
        for variant in CHOSEN_OF_EACH:
            out, dtype = _guarded_result(operands, variant), variant.dtype
            if operands.valid_rows:
                error = float(row_errors(out, expected).max())
                worst[dtype] = max(worst[dtype], error)
                assert error < ROW_ERROR_LIMIT[dtype], f"a row of {operands.a.shape} is off by {error:.2e}"
    return "worst row error " + ", ".join(f"{str(d)[6:]} {e:.1e}" for d, e in worst.items())


def check_configs_agree() -> str:
    """Every tile shape, cluster, store and scale path gives the same bits: K is summed in one order."""
    count = 0
    for operands in _each_problem():
        first: dict[torch.dtype, torch.Tensor] = {}
        for variant in EVERY_VARIANT:
            out = _guarded_result(operands, variant)
            same = torch.equal(out, first.setdefault(variant.dtype, out))
            assert same, f"{variant.config} with {variant.major}-major scales differs on {operands.a.shape}"
            count += 1
    return f"{count} results, bit for bit the same within each problem"


def check_padding_changes_nothing() -> str:
    """Each group padded to 128 rows gives the same bits in its valid rows."""
    rows = 0
    for operands in _each_problem():
        valid, padded_sizes = operands.valid_rows, padded_to_tiles(operands.sizes)
        starts = [0, *itertools.accumulate(padded_sizes)]
        picks = [start + row for start, size in zip(starts, operands.sizes, strict=False) for row in range(size)]
        at = torch.tensor(picks, dtype=torch.long, device=DEVICE)
        data = torch.zeros((starts[-1], operands.a.shape[1]), dtype=torch.uint8, device=DEVICE)
        scale = torch.ones((starts[-1], operands.a.scale.shape[1]), device=DEVICE)
        data[at], scale[at] = operands.a.data.view(torch.uint8)[:valid], operands.a.scale[:valid]
        padded_a = BlockScaledTensor(data.view(torch.float8_e4m3fn), scale, FP8_BLOCK)
        padded = grouped_gemm(padded_a, operands.b, group_offsets(padded_sizes).to(DEVICE))
        assert torch.equal(padded[at], _guarded_result(operands, *CHOSEN))
        rows += valid
    return f"{rows} rows, bit for bit the same"


def check_wrong_offs_stay_inside() -> str:
    """Decreasing, negative and too large offsets: no access outside the tensors, every fence intact."""
    operands = random_operands(*_WRONG_OFFS[0])
    m, n = operands.a.data.shape[0], operands.b.data.shape[1]
    wrong = ([300, 10, -5, 200], [-1, -1, -1, -1], [2**31 - 1] * 4, [0, 2**30, -(2**31), 5], [256, 128, 64, 0])
    for values in wrong:
        offs = torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for variant in _WRONG_OFFS_VARIANTS:
            guarded = GuardedOutput(m, n, variant.dtype, DEVICE)
            grouped_gemm(operands.a, operands.b, offs, out=guarded.out, config=variant.config)
            torch.cuda.synchronize()
            guarded.check(clamped_ends(values, m)[-1])
    return f"{len(wrong)} kinds of wrong offsets"


def check_repeats_agree() -> str:
    """The same call many times over, other work in between: the same bits (a moving result is a race)."""
    operands = random_operands(*_REPEATED[0])
    for variant in EVERY_CONFIG:
        first = _guarded_result(operands, variant).clone()
        for _ in range(_REPEATS):
            assert torch.equal(_guarded_result(operands, variant), first), f"{variant.config} moved"
    return f"{len(EVERY_CONFIG)} configurations, {_REPEATS} calls each"


def check_graph_replay() -> str:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers."""
    operands, other = (random_operands(*shape, seed=seed) for seed, shape in enumerate(_REPLAYED))
    out = torch.empty((256, 264), dtype=torch.bfloat16, device=DEVICE)
    graph = capture(lambda: grouped_gemm(operands.a, operands.b, operands.offs, out=out))
    for target, source in ((operands.a, other.a), (operands.b, other.b)):
        target.data.copy_(source.data)
        target.scale.copy_(source.scale)
    operands.offs.copy_(other.offs)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, grouped_gemm(other.a, other.b, other.offs))
    return "replay sees new values and new group sizes"


def check_streams_and_threads() -> str:
    """Eight threads, each with a stream of its own and its own problem, at once."""
    problems = [random_operands(*shape, seed=g) for g, shape in enumerate(_STREAMED)]
    expected = [_guarded_result(p, *CHOSEN).clone() for p in problems]

    def work(index: int) -> str:
        try:
            operands, stream = problems[index], torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(_REPEATS):
                    out = grouped_gemm(operands.a, operands.b, operands.offs)
                stream.synchronize()
                same = torch.equal(out[: operands.valid_rows], expected[index])
            return "" if same else f"thread {index} got other bits"
        except Exception as error:
            return f"thread {index}: {error!r}"

    with ThreadPoolExecutor(len(problems)) as threads:
        failures = [failure for failure in threads.map(work, range(len(problems))) if failure]
    assert not failures, "; ".join(failures)
    return f"{len(problems)} threads on as many streams, {_REPEATS} calls each"


def check_dense() -> str:
    """gemm is grouped_gemm with one group, without offsets."""
    for shape in _DENSE:
        operands = random_operands(*shape)
        assert torch.equal(gemm(operands.a, operands.b[0]), grouped_gemm(operands.a, operands.b, operands.offs))
    return f"{len(_DENSE)} shapes"


def check_quantizers_agree() -> str:
    """The GPU's quantisers give torch's bits, tails and outliers included."""
    count = 0
    cases: tuple[tuple[Kind, tuple[int, ...], ScaleMajor], ...] = (
        ("activation", (1, 16), "mn"),
        ("activation", (777, 1040), "mn"),
        ("activation", (777, 1040), "k"),
        ("activation", (129, 4112), "mn"),
        ("weight", (3, 200, 1040), "mn"),
        ("weight", (136, 144), "mn"),
    )
    for kind, shape, major in cases:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 7, shape).float())).to(dtype)
            on_cpu = quantize(x, FP8_BLOCK, kind=kind, scale_major=major)
            on_gpu = quantize(x.to(DEVICE), FP8_BLOCK, kind=kind, scale_major=major)
            assert torch.equal(on_gpu.scale.cpu(), on_cpu.scale), f"scales differ: {kind} {shape} {dtype}"
            same = torch.equal(on_gpu.data.cpu().view(torch.uint8), on_cpu.data.view(torch.uint8))
            assert same, f"codes differ: {kind} {shape} {dtype}"
            count += 1
    return f"{count} tensors, bit for bit the same"


class Check(NamedTuple):
    """A check, and what it calls: every variant on every shape."""

    run: Callable[[], str]
    shapes: tuple[Shape, ...] = ()
    variants: tuple[Variant, ...] = CHOSEN


_TILED = tuple((padded_to_tiles(sizes), 0, n, k) for sizes, _, n, k in SHAPES)
_CHECKS = {
    "accuracy": Check(check_accuracy, SHAPES, CHOSEN_OF_EACH),
    "configs agree": Check(check_configs_agree, SHAPES, EVERY_VARIANT),
    "padding changes nothing": Check(check_padding_changes_nothing, (*SHAPES, *_TILED)),
    "wrong offsets stay inside": Check(check_wrong_offs_stay_inside, _WRONG_OFFS, _WRONG_OFFS_VARIANTS),
    "repeats agree": Check(check_repeats_agree, _REPEATED, EVERY_CONFIG),
    "graph replay": Check(check_graph_replay, _REPLAYED),
    "streams and threads": Check(check_streams_and_threads, _STREAMED),
    "dense": Check(check_dense, _DENSE),
    "quantizers agree": Check(check_quantizers_agree),
    "training quantizers agree": Check(check_train_quantizers),
}
CHECKS = {name: check.run for name, check in _CHECKS.items()}
# What each check and this module's small launches call.
CALLS = {name: (check.shapes, check.variants) for name, check in _CHECKS.items()}
CALLS["padless.verify.fp8_block"] = (_SMALL, _SMALL_VARIANTS)


def rehearse(shapes: Sequence[Shape], variants: Sequence[Variant], backend: BackendName) -> None:
    """Calls of CALLS on the CPU, by ``backend``; nobody looks at the outputs."""
    for shape in shapes:
        operands = random_operands(*shape, device="cpu")
        for config, dtype, major in variants:
            given = operands.with_scales(major)
            grouped_gemm(given.a, given.b, given.offs, out_dtype=dtype, backend=backend, config=config)


def small_problems() -> None:
    """Small launches of every store and scale path, for compute-sanitizer: ``python -m padless.verify.fp8_block``."""
    for shape in _SMALL:
        operands = random_operands(*shape)
        for variant in _SMALL_VARIANTS:
            _guarded_result(operands, variant)
    print("small problems done")


if __name__ == "__main__":
    small_problems()
