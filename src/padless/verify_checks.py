"""The checks of ``padless verify``: what must hold on a GPU, each a function that raises AssertionError.

Inputs are random, outputs are poisoned and fenced, references are in float64, and errors are judged per row.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from padless.config import GemmConfig
from padless.fence import GuardedOutput
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.quantize import quantize
from padless.schedule import clean_offs

# M, N and K differ everywhere; tails in every dimension; groups of 0, 1, 127, 129 rows; tensors under 128 KiB.
SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    # sizes, rows past the last group, N, K
    ((1,), 0, 8, 16),
    ((0, 0, 0), 3, 72, 144),
    ((5, 0, 130, 1), 3, 136, 272),
    ((127, 128, 129, 1), 0, 264, 400),
    ((0, 64, 65, 63, 0), 7, 384, 512),
    ((300, 0, 7, 129, 127), 11, 1000, 1040),
    ((1000,), 0, 520, 4112),
    (tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
)
CONFIGS: tuple[GemmConfig, ...] = tuple(
    GemmConfig(block_m=block_m, block_n=block_n, cluster_n=cluster_n, store=store, scales=scales)
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
    valid_rows: int

    def with_scales(self, major: str) -> Operands:
        scale = self.a.scale
        if major == "k":
            moved = scale.contiguous()
        else:
            ld = max(-(-scale.shape[0] // 4) * 4, 4)
            moved = torch.full(
                (scale.shape[1], ld), float("nan"), device=scale.device
            )  # poison in the padding
            moved = moved.t()[: scale.shape[0]]
            moved.copy_(scale)
        return replace(self, a=BlockScaledTensor(self.a.data, moved, FP8_BLOCK))


def random_operands(sizes: tuple[int, ...], past: int, n: int, k: int, seed: int = 0) -> Operands:
    """Normal activations and weights whose rows differ in size by up to 2^8, quantised, on the GPU."""
    generator = torch.Generator().manual_seed(hash((sizes, past, n, k, seed)) % 2**31)
    m = sum(sizes) + past
    spread = torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    x = torch.randn(m, k, generator=generator) * spread
    w = torch.randn(len(sizes), n, k, generator=generator)
    a, b = quantize(x, FP8_BLOCK, kind="activation", scale_major="k"), quantize(w, FP8_BLOCK, kind="weight")
    a = BlockScaledTensor(a.data.cuda(), a.scale.cuda(), FP8_BLOCK)
    b = BlockScaledTensor(b.data.cuda(), b.scale.cuda(), FP8_BLOCK)
    return Operands(a, b, group_offsets(sizes).cuda(), sum(sizes)).with_scales("mn")


def float64_product(operands: Operands) -> torch.Tensor:
    """The valid rows, (rows, N) float64, from codes and scales."""

    def values(t: BlockScaledTensor, rows: int) -> torch.Tensor:
        scale = t.scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
        return t.data.double() * scale[..., : t.data.shape[-2], : t.data.shape[-1]]

    a, b = values(operands.a, 1), values(operands.b, 128)
    ends = [0, *operands.offs.tolist()]
    parts = [a[s:e] @ b[g].t() for g, (s, e) in enumerate(itertools.pairwise(ends))]
    return torch.cat(parts)


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|out - expected| / |expected|, one for each row."""
    return (out.double() - expected).norm(dim=1) / expected.norm(dim=1)


def _each_problem() -> Iterator[Operands]:
    for sizes, past, n, k in SHAPES:
        yield random_operands(sizes, past, n, k)


def _fenced_result(operands: Operands, config: GemmConfig | None, dtype: torch.dtype) -> torch.Tensor:
    fenced = GuardedOutput(operands.a.data.shape[0], operands.b.data.shape[1], dtype, "cuda")
    grouped_gemm(operands.a, operands.b, operands.offs, out=fenced.out, config=config)
    torch.cuda.synchronize()
    fenced.check(operands.valid_rows)
    return fenced.out[: operands.valid_rows]


def check_accuracy() -> str:
    """Every shape and dtype: error per row within what 13-bit accumulation and output rounding explain."""
    worst = dict.fromkeys(DTYPES, 0.0)
    for operands in _each_problem():
        expected = float64_product(operands)
        for dtype, major in itertools.product(DTYPES, ("mn", "k")):
            out = _fenced_result(operands.with_scales(major), None, dtype)
            if operands.valid_rows:
                error = float(row_errors(out, expected).max())
                worst[dtype] = max(worst[dtype], error)
                assert error < ROW_ERROR_LIMIT[dtype], f"a row of {operands.a.shape} is off by {error:.2e}"
    return "worst row error " + ", ".join(f"{str(d)[6:]} {e:.1e}" for d, e in worst.items())


def check_configs_agree() -> str:
    """Every tile shape, cluster, store and scale path gives the same bits: K is summed in one order."""
    count = 0
    for operands, dtype in itertools.product(_each_problem(), DTYPES):
        first: torch.Tensor | None = None
        for config, major in itertools.product(CONFIGS, ("mn", "k")):
            if config.block_m == 256 and dtype == torch.float32:
                continue  # does not fit in shared memory
            out = _fenced_result(operands.with_scales(major), config, dtype)
            first = out.clone() if first is None else first
            assert torch.equal(out, first), (
                f"{config} with {major}-major scales differs on {operands.a.shape}"
            )
            count += 1
    return f"{count} results, bit for bit the same within each problem"


def check_padding_changes_nothing() -> str:
    """Each group padded to 128 rows gives the same bits in its valid rows."""
    rows = 0
    for operands in _each_problem():
        ends = [0, *operands.offs.tolist()]
        sizes = [e - s for s, e in itertools.pairwise(ends)]
        padded_sizes = [-(-size // 128) * 128 for size in sizes]
        m, k = sum(padded_sizes), operands.a.data.shape[1]
        data = torch.zeros((m, k), dtype=torch.uint8, device="cuda")
        scale = torch.ones((m, operands.a.scale.shape[1]), device="cuda")
        picks: list[int] = []
        start = 0
        for s, size, padded in zip(ends, sizes, padded_sizes, strict=False):
            data[start : start + size] = operands.a.data.view(torch.uint8)[s : s + size]
            scale[start : start + size] = operands.a.scale[s : s + size]
            picks += range(start, start + size)
            start += padded
        padded_a = BlockScaledTensor(data.view(torch.float8_e4m3fn), scale, FP8_BLOCK)
        padded = grouped_gemm(padded_a, operands.b, group_offsets(padded_sizes).cuda())
        out = _fenced_result(operands, None, torch.bfloat16)
        assert torch.equal(padded[torch.tensor(picks, dtype=torch.long, device="cuda")], out)
        rows += len(picks)
    return f"{rows} rows, bit for bit the same"


def check_wrong_offs_stay_inside() -> str:
    """Decreasing, negative and too large offsets: no access outside the tensors, every fence intact."""
    operands = random_operands((64, 64, 64, 64), 0, 136, 272)
    m = operands.a.data.shape[0]
    wrong = (
        [300, 10, -5, 200],
        [-1, -1, -1, -1],
        [2**31 - 1] * 4,
        [0, 2**30, -(2**31), 5],
        [256, 128, 64, 0],
    )
    for values in wrong:
        offs = torch.tensor(values, dtype=torch.int32, device="cuda")
        for config in CONFIGS[:4]:
            fenced = GuardedOutput(m, 136, torch.bfloat16, "cuda")
            grouped_gemm(operands.a, operands.b, offs, out=fenced.out, config=config)
            torch.cuda.synchronize()
            fenced.check(clean_offs(values, m)[-1])
    return f"{len(wrong)} kinds of wrong offsets"


def check_repeats_agree() -> str:
    """The same call fifty times over, other work in between: the same bits (a moving result is a race)."""
    operands = random_operands((300, 0, 7, 129, 127, 64, 1), 0, 1000, 1040)
    for config in CONFIGS:
        first = _fenced_result(operands, config, torch.bfloat16).clone()
        for _ in range(50):
            assert torch.equal(_fenced_result(operands, config, torch.bfloat16), first), f"{config} moved"
    return f"{len(CONFIGS)} configurations, 50 calls each"


def check_graph_replay() -> str:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers."""
    operands = random_operands((100, 0, 57, 99), 0, 264, 400)
    other = random_operands((0, 199, 1, 56), 0, 264, 400, seed=1)
    out = torch.empty((256, 264), dtype=torch.bfloat16, device="cuda")
    grouped_gemm(operands.a, operands.b, operands.offs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(operands.a, operands.b, operands.offs, out=out)
    for target, source in (
        (operands.a.data, other.a.data),
        (operands.a.scale, other.a.scale),
        (operands.b.data, other.b.data),
        (operands.b.scale, other.b.scale),
        (operands.offs, other.offs),
    ):
        target.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, grouped_gemm(other.a, other.b, other.offs))
    return "replay sees new values and new group sizes"


def check_streams_and_threads() -> str:
    """Eight threads, each with a stream of its own and its own problem, at once."""
    problems = [random_operands((g * 31 % 97, 130, g), g, 136, 272, seed=g) for g in range(8)]
    expected = [_fenced_result(p, None, torch.bfloat16).clone() for p in problems]
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            operands = problems[index]
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    out = grouped_gemm(operands.a, operands.b, operands.offs)
                stream.synchronize()
                if not torch.equal(out[: operands.valid_rows], expected[index]):
                    failures.append(f"thread {index} got other bits")
        except Exception as error:
            failures.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "; ".join(failures)
    return "8 threads on 8 streams, 50 calls each"


def check_dense() -> str:
    """gemm is grouped_gemm with one group, without offsets."""
    for m, n, k in ((1, 8, 16), (333, 264, 400), (1024, 520, 1040)):
        operands = random_operands((m,), 0, n, k)
        b = BlockScaledTensor(operands.b.data[0], operands.b.scale[0], FP8_BLOCK)
        assert torch.equal(gemm(operands.a, b), grouped_gemm(operands.a, operands.b, operands.offs))
    return "3 shapes"


def check_quantizers_agree() -> str:
    """The GPU's quantisers give torch's bits, tails and outliers included."""
    count = 0
    for kind, shape, major in (
        ("activation", (1, 16), "mn"),
        ("activation", (777, 1040), "mn"),
        ("activation", (777, 1040), "k"),
        ("activation", (129, 4112), "mn"),
        ("weight", (3, 200, 1040), "mn"),
        ("weight", (136, 144), "mn"),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 7, shape).float())).to(dtype)
            on_cpu = quantize(x, FP8_BLOCK, kind=kind, scale_major=major)
            on_gpu = quantize(x.cuda(), FP8_BLOCK, kind=kind, scale_major=major)
            assert torch.equal(on_gpu.scale.cpu(), on_cpu.scale), f"scales differ: {kind} {shape} {dtype}"
            same = torch.equal(on_gpu.data.cpu().view(torch.uint8), on_cpu.data.view(torch.uint8))
            assert same, f"codes differ: {kind} {shape} {dtype}"
            count += 1
    return f"{count} tensors, bit for bit the same"


CHECKS: dict[str, Callable[[], str]] = {
    "accuracy": check_accuracy,
    "configs agree": check_configs_agree,
    "padding changes nothing": check_padding_changes_nothing,
    "wrong offsets stay inside": check_wrong_offs_stay_inside,
    "repeats agree": check_repeats_agree,
    "graph replay": check_graph_replay,
    "streams and threads": check_streams_and_threads,
    "dense": check_dense,
    "quantizers agree": check_quantizers_agree,
}


# Together they send every ring round more than once: 14 K blocks in one, and more than three tiles a CTA in the last.
_SMALL = (((5, 0, 130, 1), 3, 136, 272), ((0, 64, 65), 7, 200, 1680), ((20,) * 30, 5, 2000, 64))


def small_problems() -> None:
    """A few small launches of every store and scale path, for compute-sanitizer: ``python -m padless.verify_checks``."""
    for sizes, past, n, k in _SMALL:
        operands = random_operands(sizes, past, n, k)
        for config, major in itertools.product(CONFIGS, ("mn", "k")):
            _fenced_result(operands.with_scales(major), config, torch.bfloat16)
        _fenced_result(operands, None, torch.float32)
    print("small problems done")


if __name__ == "__main__":
    small_problems()
