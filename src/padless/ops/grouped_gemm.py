"""The public calls. One call, top to bottom: check, choose a kernel, compile, encode tensor maps, launch.

The walk is described in docs/walkthrough.md; the table of what runs where is padless.kernels.table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from padless.arguments import check_flag, check_readable, refuse_kinds, shown
from padless.formats import OUT_DTYPES, BlockScaledTensor
from padless.kernels import ahead
from padless.kernels.launch import KernelChoice, tile_of
from padless.kernels.remembered import Facts, facts_of, keep, known, remember
from padless.kernels.table import check_config, find_route, format_name
from padless.ops import traced
from padless.ops.checks import (
    Activation,
    as_int32,
    as_one_group,
    check_offs_values,
    check_operands,
    check_operands_of_kernel,
    check_output_of_kernel,
    data_of,
    describe,
    output,
    tensors_of,
)
from padless.ops.grouped_gemm_plain import grouped_gemm_plain
from padless.ops.outputs import check_outputs
from padless.reference.gemm import grouped_gemm_reference
from padless.row_groups import is_readable, is_traced
from padless.runtime.devices import BackendName, chosen_backend, device_of
from padless.runtime.driver import PreparedLaunch, stream_of

_MOST_OUTPUTS = 256


def group_offsets(sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Cumulative end rows of groups of the given sizes: int32, on the device of ``sizes`` (the CPU for a list).

    Raises ValueError for sizes that are negative or do not fit; those on a GPU are not validated (would synchronize).

    Example: sizes [3, 0, 2] give [3, 3, 5].
    """
    if not isinstance(sizes, torch.Tensor):
        if not isinstance(sizes, Sequence) or not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"sizes must be a 1-D list or tensor of integers, got {shown(sizes)}")
        _check_sizes(list(sizes))  # before torch meets an integer of more than 64 bits
        sizes = torch.tensor(sizes, dtype=torch.int64)
    refuse_kinds(sizes=sizes)
    if sizes.dim() != 1 or sizes.is_floating_point() or sizes.is_complex():
        raise ValueError(f"sizes must be a 1-D list or tensor of integers, got {sizes.dim()}-D {sizes.dtype}")
    if is_readable(sizes):
        _check_sizes(sizes.tolist())
    ends = sizes.cumsum(0)
    return ends.to(torch.int32)


def _check_sizes(sizes: list[int]) -> None:
    if min(sizes, default=0) < 0 or sum(sizes) >= 2**31:  # Python's sum does not wrap around
        raise ValueError(f"sizes must not be negative and sum to less than 2^31, got {sizes}")


def grouped_gemm(
    a: Activation,
    b: BlockScaledTensor | torch.Tensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: BackendName | None = None,
    check_offs: bool = False,
    config: KernelChoice | None = None,
) -> torch.Tensor:
    """Multiplies every group's rows by that group's weights: out[rows of g] = a[rows of g] @ b[g].T.

    Args:
        a: activations, data (M, K) in values: FP8_BLOCK, MXFP8, MXFP4 or NVFP4, scales in any of the format's layouts,
            or a plain bfloat16 tensor. M may be 0; K is a multiple of 16 where b is FP8_BLOCK, else of 32.
        b: weights, data (G, N, K) in values. N is a multiple of 8 (of 4 for float32 output). docs/supported.md lists the
            pairs of formats that have a kernel on each architecture. With plain activations a plain bfloat16 tensor
            too: then K is a multiple of 8, and K or N is contiguous (``w.transpose(1, 2)`` of weights (G, K, N), as an
            input gradient has them, is read in place).
        offs: (G,) int32 on a's device, cumulative END row of each group; equal neighbours are an empty group. G is at
            most 4096. int64, what torch's cumsum gives, is cast first, a launch more on a GPU.
        out: (M, N) to write into, or None for a new tensor. Rows at or past offs[-1] are left as they are, so in a
            new tensor they hold whatever was in memory. It shares no memory with what the call reads.
        out_dtype: torch.bfloat16, float16 or float32, when ``out`` is None.
        backend: "cuda", "reference", "emulator" (Hopper's kernels on the CPU), "emulator:sm_100a" (Blackwell's), or
            None: the GPU's kernel for tensors on a GPU, else the reference.
        check_offs: validate the values of offs first (this synchronises with the device). Without it a decreasing,
            negative or too large value gives a wrong result on a GPU and in the emulator, but never an access outside
            the tensors. The reference looks every time.
        config: the kernel to use in place of the one that is picked (Sm90Fp8Config for FP8_BLOCK; each kernel has
            its own class); what has to follow from the operands, such as the output dtype, is taken from them. The
            class itself chooses the kernel and leaves the tile to it: Sm90Bf16Config for MXFP8 on Hopper, see below.

    Returns:
        ``out``, (M, N).

    The kernels read and write rows that start on multiples of 16 bytes; the reference takes tensors at any address, such
    as those of a memory-mapped file.

    Arithmetic: nothing is requantized, and K is summed in one order whatever the tile. For FP8_BLOCK, for each 128 of
    K in order, the tensor core's sum of products times (scale of a * scale of b) is added in float32 by a fused
    multiply-add; what the other pairs do is a column of ``padless.kernels.table.ROUTES``. The bits of a row depend on
    the row, its weights, the architecture, ``out.dtype`` and the class of ``config`` alone: not on M, on G, on other
    rows or on the tile, and ``gemm`` and ``grouped_gemm_quant`` add up alike (docs/supported.md). For MXFP8 on Hopper
    ``config=Sm90Bf16Config`` takes a second kernel with other, more precise sums, which took 0.87 to 1.06 of the
    default's time with at most 16 rows a group. No synchronisation; safe in CUDA graphs, streams and threads. It is
    one kernel launch where the kernel reads the scales' layout: MN-major for FP8_BLOCK (row-major ones are copied
    first, which is faster than reading them in place), blocked or plain for the others.

    There is no backward pass here: with grad mode on an operand or ``out`` that requires grad is refused, as by every
    call outside `padless.autograd` and `padless.nn`. Under torch.no_grad() it is read as any other tensor, and a new
    result requires no grad.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    if isinstance(offs, torch.Tensor) and offs.dtype is torch.int64:
        a, offs = as_int32(a, offs)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return grouped_gemm_plain(
            a, b, offs, dense=False, out=out, out_dtype=out_dtype, backend=backend, check_offs=check_offs, config=config
        )
    b = cast("BlockScaledTensor", b)
    if check_offs is not False:
        check_flag("check_offs", check_offs)
        check_operands("grouped_gemm", a, b, offs)
        check_offs_values(offs, data_of(a).shape[0])
    return _run("grouped_gemm", a, b, offs, out, out_dtype, backend, config, check_offs)


def gemm(
    a: Activation,
    b: BlockScaledTensor | torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: BackendName | None = None,
    config: KernelChoice | None = None,
) -> torch.Tensor:
    """The dense product a @ b.T: a (M, K), b (N, K), out (M, N). As grouped_gemm of one group, to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        refuse_kinds(b=b)
        if b.dim() != 2:
            raise ValueError(f"b must have rank 2, (N, K), got {describe(b)}")
        return grouped_gemm_plain(
            a, b, None, dense=True, out=out, out_dtype=out_dtype, backend=backend, check_offs=False, config=config
        )
    b = cast("BlockScaledTensor", b)
    return _run("gemm", a, b, None, out, out_dtype, backend, config)


# -------------------------------------------------------------------------------------------------- running


def _run(
    operation: str, a: Activation, b: BlockScaledTensor, offs: torch.Tensor | None, out: torch.Tensor | None,
    out_dtype: torch.dtype, backend: BackendName | None, config: KernelChoice | None, check_offs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A call: one like it before is launched again; else check, find, prepare, launch. The weights of "gemm" come as
    (N, K)."""
    # Launches are kept by output, of operands that passed every check. One without an output is looked up with a new
    # one, and packed for that: another allocation would have another address every time.
    facts = (
        facts_of((operation, ahead.facts()), a, b, offs, offs=offs) if backend is None or backend == "cuda" else None
    )
    launches = known(facts)
    if launches is not None:
        if out is None and isinstance(out_dtype, torch.dtype) and out_dtype in OUT_DTYPES:
            out = torch.empty((a.shape[0], b.data.shape[-2]), dtype=out_dtype, device=b.data.device)
        launch = _launch_to(launches, config, out)
        if launch is not None:
            launch(stream_of(b.data))
            return out  # type: ignore[return-value]

    # Check what any way of computing needs.
    check_readable(a=a, b=b, offs=offs, out=out)
    weights = as_one_group(b) if operation == "gemm" else b
    if launches is None:
        check_operands(operation, a, weights, offs)
    if is_traced(data_of(a)):
        result = output(a, weights, out, out_dtype, any_n=True)  # kernels differ in it: read when the program runs
        return traced.product(a, b, offs, result, backend, check_offs, config)
    backend = chosen_backend(backend, data_of(a))
    if backend == "reference":
        check_config(operation, format_name(a), b.format.name, config)
        if offs is not None:
            check_offs_values(offs, a.shape[0])
        result = output(a, weights, out, out_dtype)
        check_outputs([("out", result)], [*tensors_of("a", a), *tensors_of("b", b), ("offs", offs)])
        ends = torch.tensor([a.shape[0]], dtype=torch.int32, device="cpu") if offs is None else offs
        return grouped_gemm_reference(a, weights, ends, out=result)

    # Find the device and the kernel, and check what they need.
    driver = device_of(backend, data_of(a))
    if launches is None:
        check_operands_of_kernel(a, weights)
    route = find_route(operation, driver.arch, format_name(a), b.format.name, config)
    result = output(a, weights, out, out_dtype, any_n=route.any_n)
    check_output_of_kernel(result)
    check_outputs([("out", result)], [*tensors_of("a", a), *tensors_of("b", b), ("offs", offs)])
    if launches is None and facts is not None:
        launches = remember(facts, {})
    if result.numel() == 0 or weights.data.shape[0] == 0:
        return result

    # Prepare, and launch.
    prepared = route.load().prepare(driver, a, weights, offs, result, tile_of(config))
    if launches is not None and not prepared.copies:  # a copy has a new address every time
        written = facts_of((config,), result)
        if written is not None:  # a subclass of a tensor has no facts
            keep(launches, _MOST_OUTPUTS, written, prepared.launch)
    prepared.launch(stream_of(result))
    return result


def _launch_to(launches: dict[Facts, PreparedLaunch], config: object, out: object) -> PreparedLaunch | None:
    """The launch among ``launches`` that writes ``out``; None for what has no facts, and for a config without a hash."""
    written = facts_of((config,), out)
    try:
        return None if written is None else launches.get(written)
    except TypeError:
        return None
