"""A grouped GEMM of FP8_BLOCK operands whose sums get a low-rank product before the epilogue, in one launch.

    acc[row] = fma(t[row] @ factor[g].T, scaling, acc[row])        float32, row of group g

and then what `padless.epilogue` defines. The products of bfloat16 are summed in float32 by the tensor core.
"""

from __future__ import annotations

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.launch import Prepared
from padless.kernels.remembered import facts_of, launch_remembered
from padless.kernels.sm90_fp8 import host_quant
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_fp8.host_quant import LowRankProduct
from padless.ops.checks import check_offs_values, check_operands, check_operands_of_kernel
from padless.ops.epilogue_run import check_columns
from padless.reference.epilogue import epilogue_reference
from padless.reference.gemm import fma_float32, group_rows, grouped_gemm_reference
from padless.runtime.architecture import HOPPER
from padless.runtime.devices import chosen_backend, device_of, kernels_for
from padless.runtime.driver import stream_of


def takes_low_rank(weights: BlockScaledTensor, rank: int) -> bool:
    """Whether `grouped_gemm_low_rank` multiplies by these weights: on Hopper and, without a kernel, on a CPU."""
    backend = chosen_backend(None, weights.data)
    is_here = backend == "reference" or kernels_for(weights.device, backend) == HOPPER.name
    is_plain = weights.format == FP8_BLOCK and weights.scale_layout == "plain"
    return is_here and is_plain and rank % 8 == 0 and rank <= host_quant.MAX_RANK and weights.data.shape[1] % 8 == 0


def grouped_gemm_low_rank(
    a: BlockScaledTensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor,
    low: LowRankProduct,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    config: Sm90Fp8Config | None = None,
) -> None:
    """Computes the outputs of ``epilogue`` into ``tensors``, which has them all.

    a: (M, K), weights: (G, N, K), in FP8_BLOCK, offs: (G,) int32. Rows from offs[-1] on are left as they are. Raises
    ValueError for what the kernel cannot do.
    """
    backend = chosen_backend(None, a.data)

    def pack() -> Prepared | None:
        check_operands("grouped_gemm", a, weights, offs)
        check_columns(epilogue, weights.data.shape[1])
        if a.shape[0] == 0 or backend == "reference":
            return None
        check_operands_of_kernel(a, weights)
        driver = device_of(backend, a.data)
        return host_quant.prepare(driver, a, weights, offs, tensors, config, epilogue=epilogue, low=low)

    if backend == "cuda":
        t = tensors
        written = (t.bias, t.d, t.row_codes, t.row_scale)
        options = ("low rank", epilogue, low.scaling, config)
        launch_remembered(facts_of(options, a, weights, offs, low.t, low.factor, *written), pack, a.data)
        return
    prepared = pack()
    if prepared is not None:
        prepared.launch(stream_of(a.data))
    elif a.shape[0] > 0:
        check_offs_values(offs, a.shape[0])
        acc = grouped_gemm_reference(a, weights, offs, out_dtype=torch.float32)
        scaling, rank = torch.tensor(low.scaling, dtype=torch.float32, device="cpu"), low.factor.shape[2]
        for group, (start, end) in enumerate(group_rows(offs, a.shape[0])):
            found = low.t[start:end, :rank].float() @ low.factor[group].float().T
            acc[start:end] = fma_float32(found, scaling, acc[start:end])
        epilogue_reference(acc, offs, epilogue, tensors)
