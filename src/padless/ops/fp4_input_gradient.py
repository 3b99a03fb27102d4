"""The gradient of the rows of a grouped product with FP4 weights, from their codes: checks, launch."""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor
from padless.kernels.config import MAX_GROUPS
from padless.kernels.launch import Prepared
from padless.kernels.remembered import facts_of, launch_remembered
from padless.kernels.sm90_fp4_dgrad import host
from padless.kernels.sm90_fp4_dgrad.config import Fp4DgradConfig
from padless.ops.checks import check_alignment, describe
from padless.reference.fp4_input_gradient import fp4_input_gradient_reference
from padless.runtime.architecture import HOPPER, kernels_arch
from padless.runtime.devices import BackendName, chosen_backend, device_of
from padless.runtime.driver import Driver


def reads_codes(dy: torch.Tensor, weights: BlockScaledTensor, backend: BackendName | None = None) -> bool:
    """Whether a kernel does `fp4_input_gradient` of these operands on this device.

    It is Hopper's, for MXFP4 and NVFP4 whose N is a multiple of 8 and K of 32, rows of dy and of codes on 16 bytes.
    """
    return _driver_of(dy, weights, backend) is not None


def fp4_input_gradient(
    dy: torch.Tensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
    config: Fp4DgradConfig | None = None,
) -> torch.Tensor:
    """dy @ weights[g] for the rows of each group, (M, K) bfloat16, by the kernel that reads the codes.

    Args:
        dy: (M, N) bfloat16, contiguous along N.
        weights: (G, N, K) MXFP4 or NVFP4 codes.
        offs: (G,) int32, cumulative END row of each group, or None for one group of all rows. Rows of the result from
            offs[-1] on are not written.
        out: (M, K) bfloat16 to write into, or None for a new tensor.
        backend: as for `padless.grouped_gemm`.
        config: the kernel to use in place of the one that is picked; format, layout of the scales and room for groups
            are taken from the weights.

    Returns:
        ``out``. The sum over N is made in order, 16 at a time, in float32, and rounded once; for MXFP4 its bits are
        those of the bfloat16 product with the dequantized weights. The reference sums in float64.

    Raises:
        ValueError: ``out`` is not allowed, or no kernel `reads_codes` of these operands.
    """
    shape = (dy.shape[0], weights.logical_shape[2])
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=dy.device)
    elif tuple(out.shape) != shape or out.dtype != torch.bfloat16 or out.stride(1) != 1:
        raise ValueError(f"out must be (M, K) = {shape} bfloat16, contiguous along K, got {describe(out)}")
    if chosen_backend(backend, dy) == "reference":
        return fp4_input_gradient_reference(dy, weights, offs, out=out)
    driver = _driver_of(dy, weights, backend)
    if driver is None:
        raise ValueError(
            f"no kernel reads the codes of weights {weights.format.name} {weights.logical_shape} along N beside dy "
            f"{describe(dy)}; there is one for {HOPPER.name}, MXFP4 and NVFP4, N a multiple of 8 and K of 32"
        )
    check_alignment("out", out)
    if dy.shape[0] == 0 or weights.data.shape[0] == 0:
        return out

    def prepare() -> Prepared:
        return host.prepare(driver, dy, weights, offs, out, config)

    options = ("input gradient of FP4", config)
    launch_remembered(facts_of(options, out, dy, weights, offs) if dy.is_cuda else None, prepare, out)
    return out


def _driver_of(dy: torch.Tensor, weights: BlockScaledTensor, backend: BackendName | None) -> Driver | None:
    """The device whose kernel reads the operands, None where none does."""
    chosen = chosen_backend(backend, dy)
    if chosen == "reference" or weights.data.shape[0] > MAX_GROUPS or not host.can_read(dy, weights):
        return None
    driver = device_of(chosen, dy)
    return driver if kernels_arch(driver.arch) == HOPPER.name else None
