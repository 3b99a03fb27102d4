"""The public calls. One call, top to bottom: check, choose a kernel, compile, encode tensor maps, launch.

The walk is described in docs/walkthrough.md; the table of what runs where is padless.paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from padless.backends import NAMES, backends
from padless.checks import Activation, check_offs_values, check_operands, data_of, describe, output
from padless.driver import Driver, PreparedLaunch, cuda_driver
from padless.formats import BlockScaledTensor
from padless.paths import find_path, format_name
from padless.paths.launching import KernelConfig
from padless.reference import grouped_gemm_reference


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
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    check_offs: bool = False,
    config: KernelConfig | None = None,
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
        check_operands("grouped_gemm", a, b, offs)
        check_offs_values(offs, data_of(a).shape[0])
    return _run("grouped_gemm", a, b, offs, out, out_dtype, backend, config)


def gemm(
    a: Activation,
    b: BlockScaledTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """The dense product a @ b.T: a (M, K), b (N, K), out (M, N). Otherwise as grouped_gemm with one group."""
    if not isinstance(b, BlockScaledTensor) or b.data.dim() != 2:
        raise ValueError(f"b must be a BlockScaledTensor of rank 2, (N, K), got {describe(b)}")
    if not b.is_weight:
        raise ValueError(f"b has scales of shape {tuple(b.scale.shape)}; quantize it with kind='weight'")
    b = BlockScaledTensor(b.data[None], b.scale[None], b.format, b.global_scale, b.scale_layout)
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
    config: KernelConfig | None,
) -> torch.Tensor:
    operands = _operands_key(a, b, offs)
    if operands is None or operands not in _CHECKED:
        check_operands(operation, a, b, offs)
        _remember(_CHECKED, operands, True)
    out = output(a, b, out, out_dtype)
    if backend is None:
        backend = "cuda" if out.is_cuda else "reference"
    if backend == "reference":
        ends = torch.tensor([a.shape[0]], dtype=torch.int32) if offs is None else offs
        return grouped_gemm_reference(a, b, ends, out=out)
    driver = _driver(backend, out)
    if out.numel() == 0 or b.data.shape[0] == 0:
        return out
    key = (operands, out.data_ptr(), out.dtype, out.stride(0), config) if out.is_cuda and operands else None
    if (launch := _PREPARED.get(key)) is None:
        path = find_path(operation, driver.arch, format_name(a), b.format.name, config)
        prepared = path.load().prepare(driver, a, b, offs, out, config)
        launch = prepared.launch
        if not prepared.copies:  # a copy has a new address every time, so there is nothing to remember
            _remember(_PREPARED, key, launch)
    launch(torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0)
    return out


# What is known of operands that came before: a check and a packed launch depend on addresses, shapes, strides, types
# and devices alone, so a caller that keeps its buffers pays for them once.
_CHECKED: dict[tuple[object, ...] | None, bool] = {}
_PREPARED: dict[tuple[object, ...] | None, PreparedLaunch] = {}
_REMEMBERED = 4096


def _operands_key(a: object, b: object, offs: object) -> tuple[object, ...] | None:
    """All that check_operands and a path look at in the operands; None when it has to be looked at every time."""
    if not isinstance(b, BlockScaledTensor) or not b.data.is_cuda:
        return None
    tensors: list[Any] = [b.data, b.scale, b.global_scale, offs]
    formats: list[object] = [b.format, b.scale_layout]
    if isinstance(a, BlockScaledTensor):
        tensors += [a.data, a.scale, a.global_scale]
        formats += [a.format, a.scale_layout]
    else:
        tensors.append(a)
    for t in tensors:
        if t is not None and not isinstance(t, torch.Tensor):
            return None
    described = [t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return (*described, *formats)


def _remember(memory: dict[Any, Any], key: tuple[object, ...] | None, value: Any) -> None:
    if key is not None:
        if len(memory) >= _REMEMBERED:
            memory.clear()
        memory[key] = value


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
