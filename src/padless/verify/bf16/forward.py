"""Products of plain bf16 tensors on a GPU: bits against the reference of the tensor core's arithmetic, and what must not
move them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.row_groups import clamped_ends
from padless.runtime.choices import BackendName
from padless.testing.guarded import GuardedOutput

_REPEATS = 20


@dataclass(frozen=True)
class PlainShape:
    """Rows of each group, rows past the last group, N, K."""

    sizes: tuple[int, ...]
    past: int
    n: int
    k: int


# M, N and K differ everywhere; K of every length of a last step; groups of 0, 1, 127, 129 rows; more tiles than CTAs.
SHAPES = (
    PlainShape((1,), 0, 16, 8),
    PlainShape((0, 0, 0), 3, 80, 144),
    PlainShape((5, 0, 130, 1), 3, 264, 136),
    PlainShape((127, 128, 129, 1), 0, 272, 400),
    PlainShape((0, 64, 65, 63, 0), 7, 520, 1032),
    PlainShape((300, 0, 7, 1029, 127), 11, 1008, 1048),
    PlainShape((4112,), 0, 528, 656),
    PlainShape(tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
    PlainShape((257, 0, 640), 1, 4104, 2064),
)
VARIANTS = tuple(
    Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=dtype)
    for dtype, (block_n, slabs) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ((256, 2), (256, 1), (128, 1))
    )
)
_REPEATED = PlainShape((300, 0, 7, 1029, 127, 64, 1), 0, 1008, 1040)
_SMALL = (PlainShape((5, 0, 130, 1), 3, 272, 144), PlainShape((0, 64, 100), 7, 144, 712))


@dataclass(frozen=True)
class Plain:
    """a (M, K) and b (G, N, K) bfloat16, and where groups end."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor

    def to(self, device: str) -> Plain:
        """The same on another device."""
        return Plain(self.a.to(device), self.b.to(device), self.offs.to(device))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return list(itertools.pairwise([0, *clamped_ends(self.offs.tolist(), self.a.shape[0])]))

    def n_major(self) -> Plain:
        """The same with weights of which N is contiguous."""
        return replace(self, b=self.b.transpose(1, 2).contiguous().transpose(1, 2))


def random_plain(shape: PlainShape, seed: int = 0, *, wide: bool = False) -> Plain:
    """Operands on the CPU, a function of the arguments alone: normal, or over forty powers of two (``wide``)."""
    generator = torch.Generator().manual_seed(seed + 7919 * shape.n + shape.k)

    def values(*dims: int) -> torch.Tensor:
        found = torch.randn(dims, generator=generator)
        if wide:
            found *= torch.exp2(torch.randint(-20, 21, dims, generator=generator).float())
        return found.to(torch.bfloat16)

    offs = torch.tensor(shape.sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    a = values(sum(shape.sizes) + shape.past, shape.k)
    return Plain(a, values(len(shape.sizes), shape.n, shape.k), offs)


def run(plain: Plain, config: Bf16PlainConfig, backend: BackendName | None = None) -> torch.Tensor:
    """The kernel's result in a guarded output: rows of groups alone, which may hold NaN."""
    guarded = GuardedOutput(plain.a.shape[0], plain.b.shape[1], config.out_dtype, plain.a.device)
    grouped_gemm(plain.a, plain.b, plain.offs, out=guarded.out, backend=backend, config=config)
    if guarded.out.is_cuda:
        torch.cuda.synchronize()
    last = max((end for _, end in plain.groups), default=0)
    guarded.check(last, expect_finite=False)
    return guarded.out[:last].clone()


def check_bf16_products() -> str:
    """All of the checks of this module; raises AssertionError. For Hopper."""
    return "; ".join(check() for check in (check_bits, check_independence, check_repeats, check_graph_replay))


def _reference(plain: Plain) -> torch.Tensor:
    whole = grouped_gemm_plain_reference(
        plain.a, plain.b, plain.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )
    return whole[: max((end for _, end in plain.groups), default=0)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits agree, those of NaN and the signs of zeros included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_bits(shapes: Sequence[PlainShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None) -> str:
    """Every shape, kernel and order of the weights, normal values and values over many powers of two: the bits of the
    reference, in outputs of poison between guards.
    """
    results = elements = 0
    for shape, wide in itertools.product(shapes, (False, True)):
        plain = random_plain(shape, wide=wide).to(device)
        wanted = _reference(plain)
        for config, operands in itertools.product(VARIANTS, (plain, plain.n_major())):
            out = run(operands, config, backend)
            order = "N" if operands.b.stride(2) != 1 else "K"
            assert same_bits(out, wanted.to(config.out_dtype)), f"{shape} by {config}, {order} contiguous"
            results, elements = results + 1, elements + out.numel()
    return f"{results} results, {elements} elements, bit for bit the reference's"


def check_independence(
    shapes: Sequence[PlainShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None
) -> str:
    """NaN in all rows but one group's, each group alone, and ``gemm`` of it: the same bits."""
    count = 0
    for shape, config in itertools.product(shapes, VARIANTS):
        plain = random_plain(shape, 1).to(device)
        out = run(plain, config, backend)
        filled = [group for group, (start, end) in enumerate(plain.groups) if end > start]
        for group in {*filled[:1], *filled[-1:]}:
            start, end = plain.groups[group]
            a = torch.full_like(plain.a, float("nan"))
            a[start:end] = plain.a[start:end]
            others = run(replace(plain, a=a), config, backend)
            assert same_bits(others[start:end], out[start:end]), f"{shape} sees NaN of others"
            dense = gemm(a[start:end], plain.b[group], out_dtype=config.out_dtype, backend=backend)
            assert same_bits(dense, out[start:end]), f"{shape}: gemm differs from group {group}"
            row = gemm(a[end - 1 : end], plain.b[group], out_dtype=config.out_dtype, backend=backend)
            assert same_bits(row, out[end - 1 : end]), f"{shape}: row {end - 1} differs when it is alone"
            count += 3
    return f"{count} changes of other rows that change no bit"


def check_repeats(device: str = "cuda", backend: BackendName | None = None) -> str:
    """The same call many times over gives the same bits: one that moves is a race."""
    for config in VARIANTS:
        plain = random_plain(_REPEATED, 2).to(device)
        first = run(plain, config, backend)
        for _ in range(_REPEATS):
            assert same_bits(run(plain, config, backend), first), f"{config} moved"
    return f"{len(VARIANTS)} kernels, {_REPEATS} calls each"


def check_graph_replay() -> str:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers; no call waits."""
    shapes = (PlainShape((100, 0, 57, 99), 0, 272, 400), PlainShape((0, 199, 1, 56), 0, 272, 400))
    plain, other = (random_plain(shape, seed).to("cuda") for seed, shape in enumerate(shapes))
    out = torch.empty((256, 272), dtype=torch.bfloat16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_gemm(plain.a, plain.b, plain.offs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(plain.a, plain.b, plain.offs, out=out)
    for target, source in ((plain.a, other.a), (plain.b, other.b), (plain.offs, other.offs)):
        target.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, _reference(other).bfloat16()), "a replay does not see new values and new sizes of groups"
    return "replay sees new values and new sizes of groups"


def small_launches(device: str = "cuda", backend: BackendName | None = None) -> int:
    """A few small launches of every kernel, for compute-sanitizer; returns how many."""
    count = 0
    for shape, config in itertools.product(_SMALL, VARIANTS):
        plain = random_plain(shape).to(device)
        for operands in (plain, plain.n_major()):
            run(operands, config, backend)
            count += 1
    return count


def rehearse(backend: BackendName) -> None:
    """Every kernel that the checks ask for, on the CPU, by ``backend``; nobody looks at the outputs."""
    plain = random_plain(_SMALL[0])
    for config, operands in itertools.product(VARIANTS, (plain, plain.n_major())):
        grouped_gemm(operands.a, operands.b, operands.offs, out_dtype=config.out_dtype, backend=backend, config=config)


if __name__ == "__main__":
    print(f"{small_launches()} launches")
    print("small problems done")
