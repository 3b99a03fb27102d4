"""Products of plain bf16 tensors on a GPU: bits against the reference of the tensor core's arithmetic, and what must not
move them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.row_groups import clamped_ends
from padless.verify.checks import Check, run_small
from padless.verify.fuzz.place import Place

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


def run(place: Place, plain: Plain, config: Bf16PlainConfig) -> torch.Tensor:
    """The kernel's result in a guarded output: rows of groups alone, which may hold NaN."""
    guarded = place.output(plain.a.shape[0], plain.b.shape[1], config.out_dtype)
    grouped_gemm(plain.a, plain.b, plain.offs, out=guarded.out, backend=place.backend, config=config)
    last = max((end for _, end in plain.groups), default=0)
    place.judge.written(f"{config}", guarded, last)
    return guarded.out[:last].clone()


def check_bf16_products(place: Place) -> None:
    """All of the checks of this module. For Hopper."""
    for check in (check_bits, check_independence, check_repeats, check_graph_replay):
        check(place)


def _reference(plain: Plain, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    whole = grouped_gemm_plain_reference(
        plain.a, plain.b, plain.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )
    return whole[: max((end for _, end in plain.groups), default=0)].to(dtype)


def check_bits(place: Place) -> None:
    """Every shape, kernel and order of the weights, normal values and values over many powers of two: the bits of the
    reference, in outputs of poison between guards.
    """
    for shape, wide in itertools.product(place.some(SHAPES), (False, True)):
        plain = random_plain(shape, wide=wide).to(str(place.device))
        wanted = cache(partial(_reference, plain))
        for config, operands in itertools.product(VARIANTS, (plain, plain.n_major())):
            order = "N" if operands.b.stride(2) != 1 else "K"
            name = f"{shape} by {config}, {order} contiguous"
            place.judge.same(name, run(place, operands, config), partial(wanted, config.out_dtype))


def check_independence(place: Place) -> None:
    """NaN in all rows but one group's, each group alone, and ``gemm`` of it: the same bits."""
    for shape, config in itertools.product(place.some(SHAPES), VARIANTS):
        plain = random_plain(shape, 1).to(str(place.device))
        out = run(place, plain, config)
        filled = [group for group, (start, end) in enumerate(plain.groups) if end > start]
        for group in {*filled[:1], *filled[-1:]}:
            start, end = plain.groups[group]
            a = torch.full_like(plain.a, float("nan"))
            a[start:end] = plain.a[start:end]
            others = run(place, replace(plain, a=a), config)
            place.judge.same(f"{shape} sees NaN of others", others[start:end], out[start:end])
            for first, what in ((start, "gemm"), (end - 1, "its last row alone")):
                dense = gemm(a[first:end], plain.b[group], out_dtype=config.out_dtype, backend=place.backend)
                place.judge.same(f"{shape}: {what} differs from group {group}", dense, out[first:end])


def check_repeats(place: Place) -> None:
    """The same call many times over gives the same bits: one that moves is a race."""
    for config in VARIANTS:
        plain = random_plain(_REPEATED, 2).to(str(place.device))
        first = run(place, plain, config)
        for _ in place.times(_REPEATS):
            place.judge.same(f"{config} moved", run(place, plain, config), first)


def check_graph_replay(place: Place) -> None:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers; no call waits."""
    shapes = (PlainShape((100, 0, 57, 99), 0, 272, 400), PlainShape((0, 199, 1, 56), 0, 272, 400))
    plain, other = (random_plain(shape, seed).to(str(place.device)) for seed, shape in enumerate(shapes))
    out = torch.empty((256, 272), dtype=torch.bfloat16, device=place.device)
    call = partial(grouped_gemm, plain.a, plain.b, plain.offs, out=out, backend=place.backend)
    sources = [other.a, other.b, other.offs, torch.full_like(out, float("nan"))]
    place.replayed(call, [plain.a, plain.b, plain.offs, out], sources)
    wanted = partial(_reference, other, torch.bfloat16)
    place.judge.same("a replay with new values and new sizes of groups", out, wanted)


def small_launches(place: Place) -> None:
    """A few small launches of every kernel, for compute-sanitizer."""
    for shape, config in itertools.product(_SMALL, VARIANTS):
        plain = random_plain(shape).to(str(place.device))
        for operands in (plain, plain.n_major()):
            run(place, operands, config)


CHECK, SMALL = Check(check_bf16_products, 4), Check(small_launches)

if __name__ == "__main__":
    run_small(SMALL)
