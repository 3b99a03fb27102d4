"""Weight gradients of bf16 rows on a GPU: bits against the reference of the tensor core's arithmetic, and what must not
move them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from padless.kernels.wgrad import GRADIENT_DTYPES
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.runtime.choices import BackendName
from padless.verify.bf16.problems import SHAPES, VARIANTS, Rows, RowsShape, padded, permuted, poisoned, random_rows, run
from padless.verify.problems.wgrad import same_bits

_REPEATS = 20
_REPEATED = RowsShape((300, 0, 7, 1029, 127, 64, 1), 0, 1008, 1040)
_REPLAYED = (RowsShape((100, 0, 57, 99), 0, 272, 400), RowsShape((0, 199, 1, 56), 0, 272, 400))
_MICROBATCHES = tuple(
    RowsShape(sizes, 256 - sum(sizes), 272, 400)
    for sizes in ((100, 0, 57, 90), (0, 199, 1, 56), (33, 0, 0, 223), (0, 0, 256, 0))
)
_SMALL = (RowsShape((5, 0, 130, 1), 3, 272, 144), RowsShape((0, 64, 700), 7, 144, 208))


def check_bf16_wgrad() -> str:
    """All of the checks of this module; raises AssertionError. For Hopper."""
    return "; ".join(
        check() for check in (check_bits, check_independence, check_accumulation, check_repeats, check_graph_replay)
    )


def _reference(rows: Rows) -> torch.Tensor:
    return grouped_gemm_wgrad_rows_reference(
        rows.dy, rows.x, rows.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )


def check_bits(shapes: Sequence[RowsShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None) -> str:
    """Every shape and kernel, normal values and values over many powers of two: the bits of the reference, in outputs of
    poison between guards."""
    results = elements = 0
    for shape, wide in itertools.product(shapes, (False, True)):
        rows = random_rows(shape, wide=wide).to(device)
        wanted = _reference(rows)
        for config in VARIANTS:
            out = run(rows, config, backend)
            kind = {2: torch.int16, 4: torch.int32}[out.element_size()]
            wrong = int((out.view(kind) != wanted.to(config.out_dtype).view(kind)).sum())
            assert wrong == 0, f"{wrong} of {out.numel()} elements of {shape} by {config}"
            results, elements = results + 1, elements + out.numel()
    return f"{results} results, {elements} elements, bit for bit the reference's"


def check_independence(
    shapes: Sequence[RowsShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None
) -> str:
    """NaN in rows of no group, groups filled up with zeros, groups in another order behind one of NaN: the same bits."""
    count = 0
    for shape, config in itertools.product(shapes, VARIANTS):
        rows = random_rows(shape, 1).to(device)
        out = run(rows, config, backend)
        assert same_bits(run(poisoned(rows), config, backend), out), f"{shape} sees NaN of no group"
        assert same_bits(run(padded(rows), config, backend), out), f"{shape} differs from its padded groups"
        order = list(reversed(range(len(shape.sizes))))
        turned = run(permuted(rows, order), config, backend)
        assert same_bits(turned[1:], out[order]), f"{shape} differs where its groups come in another order"
        count += 3
    return f"{count} changes of other groups that change no bit"


def check_accumulation(device: str = "cuda", backend: BackendName | None = None) -> str:
    """Four microbatches in one stream: what the first stored, and a float32 addition for each of the others."""
    configs = [c for c in VARIANTS if c.out_dtype == torch.float32]
    for config in configs:
        batches = [random_rows(shape, seed).to(device) for seed, shape in enumerate(_MICROBATCHES)]
        shape = _MICROBATCHES[0]
        out = torch.full((len(shape.sizes), shape.n, shape.k), float("nan"), device=device)
        for i, rows in enumerate(batches):
            grouped_gemm_wgrad(
                rows.dy, rows.x, offs=rows.offs, out=out, accumulate=i > 0, backend=backend, config=config
            )
        total = _reference(batches[0])
        for rows in batches[1:]:
            kept = torch.tensor([end > start for start, end in rows.groups], device=device)
            total[kept] = total[kept] + _reference(rows)[kept]
        assert same_bits(out, total), f"four microbatches by {config} are not four additions"
        marked = torch.zeros_like(out)
        marked[0].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
        after = run(batches[1], config, backend, marked)  # of which the first group is empty
        assert same_bits(after[0], marked[0]), f"{config} touched the gradient of a group without rows"
    return f"{len(configs)} kernels accumulate in float32"


def check_repeats(device: str = "cuda", backend: BackendName | None = None) -> str:
    """The same call many times over gives the same bits: one that moves is a race."""
    for config in VARIANTS:
        rows = random_rows(_REPEATED, 2).to(device)
        first = run(rows, config, backend).clone()
        for _ in range(_REPEATS):
            assert same_bits(run(rows, config, backend), first), f"{config} moved"
    return f"{len(VARIANTS)} kernels, {_REPEATS} calls each"


def check_graph_replay() -> str:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers; no call waits."""
    rows, other = (random_rows(shape, seed).to("cuda") for seed, shape in enumerate(_REPLAYED))
    out = torch.empty((4, 272, 400), device="cuda")

    def calls() -> None:
        grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, out=out)
        grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, out=out, accumulate=True)

    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for target, source in ((rows.dy, other.dy), (rows.x, other.x), (rows.offs, other.offs)):
        target.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    once = _reference(other)
    assert same_bits(out, once + once), "a replay does not see new values and new sizes of groups"
    return "replay sees new values and new sizes of groups"


def small_launches(device: str = "cuda", backend: BackendName | None = None) -> int:
    """A few small launches of every kernel, stored and accumulated, for compute-sanitizer; returns how many."""
    count = 0
    for shape, config in itertools.product(_SMALL, VARIANTS):
        rows = random_rows(shape).to(device)
        out = run(rows, config, backend)
        if config.out_dtype == torch.float32:
            run(rows, config, backend, out.clone())
        count += 1
    return count


def rehearse(backend: BackendName) -> None:
    """Every kernel that the checks ask for, on the CPU, by ``backend``; nobody looks at the outputs."""
    for config in (*VARIANTS, None):
        dtypes = GRADIENT_DTYPES if config is None else (config.out_dtype,)
        for shape, dtype in itertools.product((_SMALL[0], *_REPLAYED), dtypes):
            rows = random_rows(shape)
            grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, out_dtype=dtype, backend=backend, config=config)


if __name__ == "__main__":
    print(f"{small_launches()} launches")
    print("small problems done")
