"""The public calls. One call, top to bottom: check, choose a kernel, compile, encode tensor maps, launch.

The walk is described in docs/walkthrough.md; the table of what runs where is padless.kernels.table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from padless.formats import BlockScaledTensor
from padless.gradients import refuse_gradients
from padless.kernels.launch import KernelChoice, tile_of
from padless.kernels.table import find_route, format_name
from padless.ops import launch_cache
from padless.ops.checks import (
    Activation,
    as_one_group,
    check_offs_values,
    check_operands,
    check_operands_of_kernel,
    check_output_of_kernel,
    data_of,
    output,
)
from padless.reference.gemm import grouped_gemm_reference
from padless.runtime.devices import NAMES, backends
from padless.runtime.driver import Driver, cuda_driver


def group_offsets(sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Cumulative end rows of groups of the given sizes: int32, on the device of ``sizes`` (the CPU for a list).

    Raises ValueError for sizes that are negative or do not fit; those on a GPU are not looked at, since that would wait.

    Example: sizes [3, 0, 2] give [3, 3, 5].
    """
    if not isinstance(sizes, torch.Tensor):
        if isinstance(sizes, Sequence) and all(type(size) is int for size in sizes):
            _check_sizes(list(sizes))  # before torch meets an integer of more than 64 bits
        sizes = torch.tensor(sizes, dtype=torch.int64 if sizes == [] else None)
    if sizes.dim() != 1 or sizes.is_floating_point():
        raise ValueError(f"sizes must be a 1-D list or tensor of integers, got {sizes.dim()}-D {sizes.dtype}")
    if sizes.is_cpu:
        _check_sizes(sizes.tolist())
    ends = sizes.cumsum(0)
    return ends.to(torch.int32)


def _check_sizes(sizes: list[int]) -> None:
    if min(sizes, default=0) < 0 or sum(sizes) >= 2**31:  # Python's sum does not wrap around
        raise ValueError(f"sizes must not be negative and sum to less than 2^31, got {sizes}")


def grouped_gemm(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    check_offs: bool = False,
    config: KernelChoice | None = None,
) -> torch.Tensor:
    """Multiplies every group's rows by that group's weights: out[rows of g] = a[rows of g] @ b[g].T.

    Args:
        a: activations, data (M, K) in values: FP8_BLOCK, MXFP8, MXFP4 or NVFP4, scales in any of the format's layouts,
            or a plain bfloat16 tensor. M may be 0; K is a multiple of 16 for FP8_BLOCK x FP8_BLOCK, else of 32.
        b: weights, data (G, N, K) in values. N is a multiple of 8 (of 4 for float32 output). docs/supported.md lists the
            pairs of formats that have a kernel on each architecture.
        offs: (G,) int32 on a's device, cumulative END row of each group; equal neighbours are an empty group.
        out: (M, N) to write into, or None for a new tensor. Rows at or past offs[-1] are left as they are, so in a
            new tensor they hold whatever was in memory.
        out_dtype: torch.bfloat16, float16 or float32, when ``out`` is None.
        backend: "cuda", "reference", "emulator" (Hopper's kernels on the CPU), "emulator:sm_100a" (Blackwell's), or
            None: the GPU's kernel for tensors on a GPU, else the reference.
        check_offs: look at the values of offs first (this synchronises with the device). Without it a decreasing,
            negative or too large value gives a wrong result, but never an access outside the tensors.
        config: the kernel to use in place of the one that is picked (Sm90Fp8Config for FP8_BLOCK; each kernel has a
            class of its own); what has to follow from the operands, such as the output dtype, is taken from them. The
            class itself chooses the kernel and leaves the tile to it: Sm90Bf16Config for MXFP8 on Hopper, see below.

    Returns:
        ``out``, (M, N).

    The kernels read and write rows that start on multiples of 16 bytes; the reference takes tensors at any address, such
    as those of a memory-mapped file.

    Arithmetic: nothing is requantised, and K is summed in one order whatever the tile. For FP8_BLOCK, for each 128 of K
    in order, the tensor core's sum of products times (scale of a * scale of b) is added in float32 by a fused
    multiply-add; what the other pairs do is a column of ``padless.kernels.table.ROUTES``. The bits of a row depend on
    the row, its weights, the architecture, ``out.dtype`` and the class of ``config`` alone: not on M, on G, on other
    rows or on the tile, and ``gemm`` and ``grouped_gemm_quant`` add up alike (docs/supported.md). For MXFP8 on Hopper
    ``config=Sm90Bf16Config`` takes a second kernel with other, more precise sums, which took 0.87 to 1.06 of the
    default's time with at most 16 rows a group. No synchronisation; safe in CUDA graphs, streams and threads. It is
    one kernel launch where the kernel reads the scales' layout: MN-major for
    FP8_BLOCK (row-major ones are copied first, which is faster than reading them in place), blocked or plain for
    the others.

    There is no backward pass: with grad mode on an operand or ``out`` that requires grad is refused, here and in every
    other call. Under torch.no_grad() it is read as any other tensor, and a new result requires no grad.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    if check_offs:
        check_operands("grouped_gemm", a, b, offs)
        check_offs_values(offs, data_of(a).shape[0])
    if backend is None or backend == "cuda":
        out, launched = launch_cache.launch_again("grouped_gemm", a, b, offs, out, out_dtype, config)
        if launched:
            return out
    return _run("grouped_gemm", a, b, offs, out, out_dtype, backend, config)


def gemm(
    a: Activation,
    b: BlockScaledTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    config: KernelChoice | None = None,
) -> torch.Tensor:
    """The dense product a @ b.T: a (M, K), b (N, K), out (M, N). Otherwise as grouped_gemm with one group."""
    if backend is None or backend == "cuda":
        out, launched = launch_cache.launch_again("gemm", a, b, None, out, out_dtype, config)
        if launched:
            return out
    return _run("gemm", a, b, None, out, out_dtype, backend, config)


# -------------------------------------------------------------------------------------------------- running


def _run(
    operation: str,
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str | None,
    config: KernelChoice | None,
) -> torch.Tensor:
    """A call that is not like one before. The weights of "gemm" come as (N, K)."""
    refuse_gradients(a=a, b=b, out=out)
    weights = as_one_group(b) if operation == "gemm" else b
    known = launch_cache.were_checked(operation, a, b, offs)
    if not known:
        check_operands(operation, a, weights, offs)
    result = output(a, weights, out, out_dtype, any_n=_takes_any_n(operation, a, b, backend, config))
    if backend is None:
        backend = "cuda" if result.is_cuda else "reference"
    if backend == "reference":
        ends = torch.tensor([a.shape[0]], dtype=torch.int32) if offs is None else offs
        return grouped_gemm_reference(a, weights, ends, out=result)
    driver = _driver(backend, result)
    check_output_of_kernel(result)
    if not known:
        check_operands_of_kernel(a, weights)
        launch_cache.remember_checked(operation, a, b, offs, result)
    if result.numel() == 0 or weights.data.shape[0] == 0:
        return result
    path = find_route(operation, driver.arch, format_name(a), b.format.name, config)
    prepared = path.load().prepare(driver, a, weights, offs, result, tile_of(config))
    if not prepared.copies:  # a copy has a new address every time, so there is nothing to remember
        launch_cache.remember_launch(operation, a, b, offs, result, config, prepared.launch)
    prepared.launch(launch_cache.current_stream(result.device.index or 0) if result.is_cuda else 0)
    return result


def _takes_any_n(
    operation: str, a: Activation, b: BlockScaledTensor, backend: str | None, config: KernelChoice | None
) -> bool:
    """Whether the kernel writes rows that do not start on 16 bytes: Blackwell's dense one does."""
    if operation != "gemm" or backend == "reference" or (backend is None and not data_of(a).is_cuda):
        return False
    arch = _driver(backend or "cuda", data_of(a)).arch
    return getattr(find_route(operation, arch, format_name(a), b.format.name, config).load(), "ANY_N", False)


def _driver(backend: str, out: torch.Tensor) -> Driver:
    if backend == "cuda" and out.is_cuda and _cuda_is_available():
        return cuda_driver()
    if backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; allowed: None, {', '.join(map(repr, NAMES))}")
    found = backends()[backend]
    if not found.available:
        raise ValueError(f"backend {backend!r} is not available here: {found.reason}")
    if (backend == "cuda") != out.is_cuda:
        raise ValueError(
            f"backend is {backend!r} and the tensors are on {out.device}; move them or leave it None"
        )
    from padless.emulator.fake_driver import driver_of

    return driver_of(backend)


@lru_cache(maxsize=1)
def _cuda_is_available() -> bool:
    return backends()["cuda"].available
