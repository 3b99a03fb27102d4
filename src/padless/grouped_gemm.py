"""The public calls. One call, top to bottom: check, choose a kernel, compile, encode tensor maps, launch.

The walk is described in docs/walkthrough.md; the kernel it ends in is kernels/sm90_fp8_grouped_gemm.cu.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from padless import tensor_map
from padless.backends import NAMES, backends
from padless.config import MAX_GROUPS, OUT_DTYPES, GemmConfig, Problem, fit_config, select_config
from padless.driver import Argument, Driver, LaunchShape, PreparedLaunch, cuda_driver
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.jit import CompiledKernel, CompileError, compile_kernel
from padless.layouts import to_mn_major
from padless.reference import grouped_gemm_reference

KERNEL = "sm90_fp8_grouped_gemm.cu"


def group_offsets(sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Cumulative end rows of groups of the given sizes: int32, on the device of ``sizes`` (the CPU for a list).

    Example: sizes [3, 0, 2] give [3, 3, 5].
    """
    if not isinstance(sizes, torch.Tensor):
        sizes = torch.tensor(sizes, dtype=torch.int64 if sizes == [] else None)
    if sizes.dim() != 1 or sizes.is_floating_point():
        raise ValueError(f"sizes must be a 1-D list or tensor of integers, got {sizes.dim()}-D {sizes.dtype}")
    ends = sizes.cumsum(0)
    on_host = not ends.is_cuda and ends.numel() > 0  # on a GPU a look at the values would wait for it
    if on_host and (int(sizes.min()) < 0 or int(ends[-1]) >= 2**31):
        raise ValueError(f"sizes must not be negative and sum to less than 2^31, got {sizes.tolist()}")
    return ends.to(torch.int32)


def grouped_gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    check_offs: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Multiplies every group's rows by that group's weights: out[rows of g] = a[rows of g] @ b[g].T.

    Args:
        a: activations, FP8_BLOCK, data (M, K), scales row-major or MN-major. M may be 0; K is a multiple of 16.
        b: weights, FP8_BLOCK, data (G, N, K). N is a multiple of 8 (of 4 for float32 output).
        offs: (G,) int32 on a's device, cumulative END row of each group; equal neighbours are an empty group.
        out: (M, N) to write into, or None for a new tensor. Rows at or past offs[-1] are left as they are, so in a
            new tensor they hold whatever was in memory.
        out_dtype: torch.bfloat16, float16 or float32, when ``out`` is None.
        backend: "cuda", "reference", "emulator", or None: the GPU's kernel for tensors on a GPU, else the reference.
        check_offs: look at the values of offs first (this synchronises with the device). Without it a decreasing,
            negative or too large value gives a wrong result, but never an access outside the tensors.
        config: the kernel to use in place of the one select_config picks; its out_dtype and group room are taken
            from the operands.

    Returns:
        ``out``, (M, N).

    Arithmetic: for each 128 of K in order, the tensor core's sum of products times (scale of a * scale of b) is added
    in float32 by a fused multiply-add. No synchronisation; safe in CUDA graphs, streams and threads. MN-major scales
    make it one kernel launch; row-major ones are copied to MN-major first, which is faster than reading them in place.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    if check_offs:
        _check_operands(a, b, offs)
        _check_offs_values(offs, a.data.shape[0])
    return _run(a, b, offs, out, out_dtype, backend, config)


def gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """The dense product a @ b.T: a (M, K), b (N, K), out (M, N). Otherwise as grouped_gemm with one group."""
    if not isinstance(b, BlockScaledTensor) or b.data.dim() != 2:
        raise ValueError(f"b must be a BlockScaledTensor of rank 2, (N, K), got {_describe(b)}")
    if not b.is_weight:
        raise ValueError(f"b has scales of shape {tuple(b.scale.shape)}; quantize it with kind='weight'")
    b = BlockScaledTensor(b.data[None], b.scale[None], b.format, b.global_scale)
    return _run(a, b, None, out, out_dtype, backend, config)


# --------------------------------------------------------------------------------------------------- checks


def _describe(value: object) -> str:
    if isinstance(value, BlockScaledTensor):
        value = value.data
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def _check_operands(a: BlockScaledTensor, b: BlockScaledTensor, offs: torch.Tensor | None) -> None:
    """Raises ValueError for what can be seen without looking at values."""
    for name, t, rank, shape in (("a", a, 2, "(M, K)"), ("b", b, 3, "(G, N, K)")):
        if not isinstance(t, BlockScaledTensor):
            raise ValueError(f"{name} must be a BlockScaledTensor (see padless.quantize), got {_describe(t)}")
        if t.format is not FP8_BLOCK and t.format != FP8_BLOCK:
            raise ValueError(f"{name} has format {t.format.name}; supported: FP8_BLOCK x FP8_BLOCK")
        if t.data.dim() != rank:
            raise ValueError(f"{name} must have rank {rank}, {shape}, got {_describe(t)}")
    (m, k), (num_groups, n, b_k) = a.data.shape, b.data.shape
    if k != b_k:
        raise ValueError(
            f"a is (M, K) = {(m, k)} and b is (G, N, K) = {(num_groups, n, b_k)}: K must be the same"
        )
    if k == 0 or k % 16 != 0:
        raise ValueError(f"K is {k}; it must be a positive multiple of 16 (quantize a zero-filled tail)")
    if not a.is_activation:
        raise ValueError(f"a has scales of shape {tuple(a.scale.shape)}; quantize it with kind='activation'")
    if not b.is_weight:
        raise ValueError(f"b has scales of shape {tuple(b.scale.shape)}; quantize it with kind='weight'")
    if b.device != a.device:
        raise ValueError(f"b is on {b.device} and a on {a.device}; they must be on one device")
    if num_groups > MAX_GROUPS:
        raise ValueError(f"b has {num_groups} groups; at most {MAX_GROUPS} are supported")
    if offs is not None:
        if not isinstance(offs, torch.Tensor) or offs.dtype != torch.int32 or offs.dim() != 1:
            raise ValueError(
                f"offs must be a 1-D int32 tensor (see padless.group_offsets), got {_describe(offs)}"
            )
        if offs.shape[0] != num_groups:
            raise ValueError(
                f"offs has {offs.shape[0]} entries and b {num_groups} groups; they must be as many"
            )
        if offs.device != a.device:
            raise ValueError(f"offs is on {offs.device} and a on {a.device}; they must be on one device")
        if not offs.is_contiguous():
            raise ValueError(f"offs must be contiguous, got stride {offs.stride(0)}; call .contiguous()")
    _check_layout("a.data", a.data)
    _check_layout("b.data", b.data)
    if a.scale.data_ptr() % 16 != 0:
        address = a.scale.data_ptr()
        raise ValueError(f"a.scale is at address {address:#x}; it must be 16-byte aligned; clone() it")
    if a.scale.numel() >= 2**31 - 2**20 or m >= 2**30:
        raise ValueError(f"M is {m} and K is {k}; M must be below 2^30 and M * ceil(K / 128) below 2^31")


def _output(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``out`` if it will do, or a new tensor. Raises ValueError."""
    m, n = a.data.shape[0], b.data.shape[1]
    if out is None:
        if out_dtype not in OUT_DTYPES:
            raise ValueError(
                f"out_dtype is {out_dtype}; allowed: torch.bfloat16, torch.float16, torch.float32"
            )
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    else:
        if not isinstance(out, torch.Tensor) or out.dtype not in OUT_DTYPES:
            raise ValueError(f"out must be a bfloat16, float16 or float32 tensor, got {_describe(out)}")
        if tuple(out.shape) != (m, n) or out.device != a.device:
            raise ValueError(f"out must be (M, N) = {(m, n)} on {a.device}, got {_describe(out)}")
    alignment = 16 // out.element_size()
    if n % alignment != 0:
        raise ValueError(f"N is {n}; it must be a multiple of {alignment} for {out.dtype} output")
    _check_layout("out", out)
    return out


def _check_layout(name: str, tensor: torch.Tensor) -> None:
    size = tensor.element_size()
    if tensor.numel() == 0:
        return
    rows_overlap = tensor.shape[-2] > 1 and tensor.stride(-2) < tensor.shape[-1]
    outer = [s for s, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1]
    if tensor.stride(-1) != 1 or any(s * size % 16 for s in outer) or rows_overlap:
        raise ValueError(
            f"{name} has strides {tensor.stride()} elements; the last must be 1 and the others multiples of 16 bytes; "
            "call .contiguous()"
        )
    if tensor.data_ptr() % 16 != 0:
        raise ValueError(
            f"{name} is at address {tensor.data_ptr():#x}; it must be 16-byte aligned; clone() it"
        )


def _check_offs_values(offs: torch.Tensor, m: int) -> None:
    ends = [0, *offs.tolist()]
    for g, (before, end) in enumerate(itertools.pairwise(ends)):
        if end < before or end > m:
            raise ValueError(
                f"offs[{g}] is {end}; offs must not be negative nor decrease (the entry before is {before}) "
                f"nor pass M = {m}"
            )


# -------------------------------------------------------------------------------------------------- running


def _run(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str | None,
    config: GemmConfig | None,
) -> torch.Tensor:
    operands = _operands_key(a, b, offs)
    if operands is None or operands not in _CHECKED:
        _check_operands(a, b, offs)
        _remember(_CHECKED, operands, True)
    out = _output(a, b, out, out_dtype)
    if backend is None:
        backend = "cuda" if out.is_cuda else "reference"
    if backend == "reference":
        ends = torch.tensor([a.data.shape[0]], dtype=torch.int32) if offs is None else offs
        return grouped_gemm_reference(a, b, ends, out=out)
    driver = _driver(backend, out)
    if out.numel() == 0 or b.data.shape[0] == 0:
        return out
    key = (operands, out.data_ptr(), out.dtype, out.stride(0), config) if out.is_cuda and operands else None
    if (launch := _PREPARED.get(key)) is None:
        chosen = _config(driver, a, b, out, config)
        if a.scale_major == chosen.scales:
            launch = _prepare(driver, a, b, offs, out, chosen)
            _remember(_PREPARED, key, launch)
        else:  # a copy has a new address every time, so there is nothing to remember
            a = BlockScaledTensor(a.data, _as_major(a.scale, chosen.scales), a.format)
            launch = _prepare(driver, a, b, offs, out, chosen)
    launch(torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0)
    return out


# What is known of operands that came before: a check and a packed launch depend on addresses, shapes, strides, types
# and devices alone, so a caller that keeps its buffers pays for them once.
_CHECKED: dict[tuple[object, ...] | None, bool] = {}
_PREPARED: dict[tuple[object, ...] | None, PreparedLaunch] = {}
_REMEMBERED = 4096


def _operands_key(a: object, b: object, offs: object) -> tuple[object, ...] | None:
    """All that _check_operands and _prepare look at in the operands; None when it has to be looked at every time."""
    if not (isinstance(a, BlockScaledTensor) and isinstance(b, BlockScaledTensor)):
        return None
    if not (a.format is FP8_BLOCK and b.format is FP8_BLOCK and a.data.is_cuda):
        return None
    tensors = [a.data, a.scale, b.data, b.scale]
    if offs is not None:
        if not isinstance(offs, torch.Tensor):
            return None
        tensors.append(offs)
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def _remember(memory: dict[Any, Any], key: tuple[object, ...] | None, value: Any) -> None:
    if key is not None:
        if len(memory) >= _REMEMBERED:
            memory.clear()
        memory[key] = value


def _config(
    driver: Driver, a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, config: GemmConfig | None
) -> GemmConfig:
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    problem = Problem(m, n, k, num_groups, out.dtype, driver.num_sms(out.device.index or 0))
    return select_config(problem) if config is None else fit_config(config, problem)


def _as_major(scale: torch.Tensor, major: str) -> torch.Tensor:
    return to_mn_major(scale) if major == "mn" else scale.contiguous()


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
    from padless.emulator.fake_driver import emulated_driver

    return emulated_driver()


@lru_cache(maxsize=1)
def _cuda_is_available() -> bool:
    return backends()["cuda"].available


def _prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: GemmConfig,
) -> PreparedLaunch:
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    device = out.device.index or 0
    kernel, function = _load(driver, config, device)
    maps = _tensor_maps(a, b, out, config)
    # As many CTAs as multiprocessors: a tile costs far more than finding the next one. No more than there can be tiles.
    most_tiles = (-(-m // config.block_m) + num_groups) * -(-n // (config.block_n * config.cluster_n))
    grid = min(driver.num_sms(device) // config.cluster_n, most_tiles) * config.cluster_n
    arguments: list[Argument] = [b"".join(driver.encode(spec) for spec in specs) for specs in maps]
    arguments += [(b.scale.data_ptr(), 8), (0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(value, 4) for value in (m, n, k, num_groups, _counter(config, device, out.data_ptr()))]
    tensors = [a.data, a.scale, b.data, b.scale, out] + ([] if offs is None else [offs])
    shape = LaunchShape(grid, kernel.num_threads, config.cluster_n)
    return driver.prepare(function, kernel, shape, arguments, tensors)


@lru_cache(maxsize=256)
def _load(driver: Driver, config: GemmConfig, device: int) -> tuple[CompiledKernel, Any]:
    try:
        kernel = compile_kernel(KERNEL, config.prelude(), driver.arch, driver.kind)
    except CompileError as error:
        if "does not fit in shared memory" not in str(error):
            raise
        raise ValueError(
            f"config does not fit in shared memory: {config}; lower num_stages (0 takes as many as fit) or the tile"
        ) from None
    return kernel, driver.load(kernel, device)


_NUM_COUNTERS = 1 << 15  # the same number as in kernels/tile_queue.cuh
_COUNTERS: dict[tuple[GemmConfig, int], dict[int, int]] = {}
_COUNTERS_GUARD = threading.Lock()


def _counter(config: GemmConfig, device: int, out_address: int) -> int:
    """The kernel's tile counter for launches that write to ``out_address``, or -1 when all are taken.

    Launches that run at the same time need different counters. Those that write to one address cannot run at the same
    time (the caller would lose one of the results), so the address decides. Once taken a counter is never given to
    another address, since a CUDA graph may replay an old launch at any time.
    """
    with _COUNTERS_GUARD:
        taken = _COUNTERS.setdefault((config, device), {})
        if out_address not in taken and len(taken) == _NUM_COUNTERS:
            return -1
        return taken.setdefault(out_address, len(taken))


def _tensor_maps(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, config: GemmConfig
) -> list[tuple[tensor_map.TensorMapSpec, ...]]:
    """The kernel's four tensor-map arguments, in its order: A, B, scales of A, D."""
    if config.scales == "mn":
        scales = tensor_map.mn_major_scales(a.scale, 96 if config.block_m == 256 else config.block_m + 4)
    else:
        scales = tensor_map.flat(a.scale, 256)
    return [
        (tensor_map.operand(a.data, 64),),
        (tensor_map.operand(b.data, config.block_n),),
        (scales,),
        tensor_map.output_pool(out, 64) if config.store == "pool" else (tensor_map.output_ragged(out, 64),),
    ]
