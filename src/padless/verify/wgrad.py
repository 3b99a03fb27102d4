"""Weight gradients on a GPU: bits against the reference of the tensor core's arithmetic, and what must not move them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from padless.kernels.sm90_fp8_wgrad.config import MODES, WgradConfig
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.runtime.choices import BackendName
from padless.verify.problems.wgrad import (
    ADDING,
    SHAPES,
    VARIANTS,
    WgradShape,
    moved,
    padded_to_blocks,
    permuted,
    poisoned,
    random_operands,
    run,
    same_bits,
    sizes_of,
)

_REPEATS = 20
_REPEATED = WgradShape((300, 0, 7, 1029, 127, 64, 1), 0, 1008, 1040)
_REPLAYED = (WgradShape((100, 0, 57, 99), 0, 272, 400), WgradShape((0, 199, 1, 56), 0, 272, 400))
_MICROBATCHES = tuple(
    WgradShape(sizes, 0, 272, 400) for sizes in ((100, 0, 57, 99), (0, 199, 1, 56), (33, 0, 0, 223), (0, 0, 256, 0))
)
_SMALL = (WgradShape((5, 0, 130, 1), 3, 272, 144), WgradShape((0, 64, 700), 7, 144, 208, (32, 128)))
# What a GPU's own reference of a problem may take is bounded, so the largest shapes are compared with one kind of codes.
_LARGE = 1 << 22  # elements of a result


def check_wgrad() -> str:
    """All of the checks of this module; raises AssertionError. For Hopper."""
    return "; ".join(
        check() for check in (check_bits, check_independence, check_accumulation, check_repeats, check_graph_replay)
    )


def _reference(dy: GroupedColumns, x: GroupedColumns) -> torch.Tensor:
    return grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32, accumulation="tensor_core")


def check_bits(shapes: Sequence[WgradShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None) -> str:
    """Every shape, kernel and alignment: the bits of the reference, in outputs of poison between guards."""
    results = elements = 0
    for shape, mode, any_code in itertools.product(shapes, MODES, (False, True)):
        if any_code and len(shape.sizes) * shape.n * shape.k > _LARGE:
            continue
        operands = [moved(operand, device) for operand in random_operands(shape, mode, any_code=any_code)]
        wanted = _reference(*operands)
        for config in (c for c in VARIANTS if c.mode == mode):
            out = run(operands[0], operands[1], config, backend)
            wrong = ~same_elements(out, wanted.to(config.out_dtype))
            assert not bool(wrong.any()), f"{int(wrong.sum())} of {out.numel()} elements of {shape} by {config}"
            results, elements = results + 1, elements + out.numel()
    return f"{results} results, {elements} elements, bit for bit the reference's"


def same_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise equality of bits."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.contiguous().view(kind) == b.contiguous().view(kind)


def check_independence(
    shapes: Sequence[WgradShape] = SHAPES, device: str = "cuda", backend: BackendName | None = None
) -> str:
    """NaN in every code of others, groups padded to 128 tokens with zeros, groups in another order: the same bits."""
    count = 0
    for shape, config in itertools.product(shapes, VARIANTS):
        dy, x = (moved(operand, device) for operand in random_operands(shape, config.mode, 1))
        out = run(dy, x, config, backend)
        assert same_bits(run(poisoned(dy), poisoned(x), config, backend), out), f"{shape} sees NaN of others"
        padded = run(padded_to_blocks(dy), padded_to_blocks(x), config, backend)
        assert same_bits(padded, out), f"{shape} differs from its groups padded to 128 tokens"
        order = list(reversed(range(dy.num_groups)))
        turned = run(permuted(dy, order), permuted(x, order), config, backend)
        assert same_bits(turned, out[order]), f"{shape} differs where its groups come in another order"
        count += 3
    return f"{count} changes of other groups that change no bit"


def check_accumulation(device: str = "cuda", backend: BackendName | None = None) -> str:
    """Four microbatches in one stream: what the first stored, and a float32 addition for each of the others."""
    configs = [*(c for c in VARIANTS if c.out_dtype == torch.float32), *ADDING]
    for config in configs:
        batches = [
            tuple(moved(operand, device) for operand in random_operands(shape, config.mode, seed))
            for seed, shape in enumerate(_MICROBATCHES)
        ]
        shape = _MICROBATCHES[0]
        out = torch.full((len(shape.sizes), shape.n, shape.k), float("nan"), device=device)
        for i, (dy, x) in enumerate(batches):
            chosen = None if i == 0 and config in ADDING else config
            grouped_gemm_wgrad(dy, x, out=out, accumulate=i > 0, backend=backend, config=chosen)
        total = _reference(*batches[0])
        for dy, x in batches[1:]:
            kept = torch.tensor([size > 0 for size in sizes_of(dy)], device=device)
            total[kept] = total[kept] + _reference(dy, x)[kept]
        assert same_bits(out, total), f"four microbatches by {config} are not four additions"
        dy, x = batches[1]
        marked = torch.zeros_like(out)
        marked[0].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep; the group is empty
        after = run(dy, x, config, backend, marked)
        assert same_bits(after[0], marked[0]), f"{config} touched the gradient of a group without tokens"
    _check_subnormals(device, backend)
    return f"{len(configs)} kernels accumulate in float32, subnormal numbers too"


def _check_subnormals(device: str, backend: BackendName | None) -> None:
    """Raises AssertionError unless a subnormal number added to another gives their sum."""
    dy, x = (moved(operand, device) for operand in random_operands(_SMALL[0], "1d2d"))
    tiny = (
        replace(dy, scale=torch.full_like(dy.scale, 2.0**-100)),
        replace(x, scale=torch.full_like(x.scale, 2.0**-44)),
    )
    config = WgradConfig(block_m=128, out_dtype=torch.float32)
    part = run(*tiny, config, backend)
    least = torch.finfo(torch.float32).tiny
    assert bool(((part != 0) & (part.abs() < least)).any()), "no product is subnormal"
    has_tokens = torch.tensor(sizes_of(dy), device=device)[:, None, None] > 0
    wanted = torch.where(has_tokens, part + part, part)
    for adding in (config, replace(config, accumulate=True, reduced_pieces=1)):
        assert same_bits(run(*tiny, adding, backend, part.clone()), wanted), "subnormal numbers are not added"


def check_repeats(device: str = "cuda", backend: BackendName | None = None) -> str:
    """The same call many times over gives the same bits: one that moves is a race."""
    for config in VARIANTS:
        dy, x = (moved(operand, device) for operand in random_operands(_REPEATED, config.mode, 2))
        first = run(dy, x, config, backend).clone()
        for _ in range(_REPEATS):
            assert same_bits(run(dy, x, config, backend), first), f"{config} moved"
    return f"{len(VARIANTS)} kernels, {_REPEATS} calls each"


def check_graph_replay() -> str:
    """Captured in a CUDA graph, replayed with other values and other group sizes in the same buffers; no call waits."""
    (dy, x), (other_dy, other_x) = (
        tuple(moved(operand, "cuda") for operand in random_operands(shape, "1d2d", seed))
        for seed, shape in enumerate(_REPLAYED)
    )
    out = torch.empty((4, 272, 400), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_gemm_wgrad(dy, x, out=out)
        grouped_gemm_wgrad(dy, x, out=out, accumulate=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm_wgrad(dy, x, out=out)
        grouped_gemm_wgrad(dy, x, out=out, accumulate=True)
    for target, source in ((dy, other_dy), (x, other_x)):
        for part in ("data", "scale", "offs", "starts", "block_starts"):
            getattr(target, part).view(torch.uint8).copy_(getattr(source, part).view(torch.uint8))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    once = _reference(other_dy, other_x)
    assert same_bits(out, once + once), "a replay does not see new values and new sizes of groups"
    return "replay sees new values and new sizes of groups"


def small_launches(device: str = "cuda", backend: BackendName | None = None) -> int:
    """A few small launches of every kernel, stored and accumulated, for compute-sanitizer; returns how many."""
    count = 0
    for shape, config in itertools.product(_SMALL, VARIANTS):
        dy, x = (moved(operand, device) for operand in random_operands(shape, config.mode))
        out = run(dy, x, config, backend)
        if config.out_dtype == torch.float32:
            run(dy, x, config, backend, out.clone())
        count += 1
    return count


def rehearse(backend: BackendName) -> None:
    """Every kernel that the checks ask for, on the CPU, by ``backend``; nobody looks at the outputs."""
    for config in (*VARIANTS, None):
        mode = "1d2d" if config is None else config.mode
        dtypes = (torch.bfloat16, torch.float32) if config is None else (config.out_dtype,)
        for shape in (_SMALL[0], *_REPLAYED):
            dy, x = random_operands(shape, mode)
            for dtype in dtypes:
                grouped_gemm_wgrad(dy, x, out_dtype=dtype, backend=backend, config=config)
    for config in ADDING:
        dy, x = random_operands(_SMALL[0], config.mode)
        run(dy, x, config, backend, torch.zeros((dy.num_groups, dy.features, x.features)))


if __name__ == "__main__":
    print(f"{small_launches()} launches")
    print("small problems done")
