"""NVFP4 for gradients: stochastic rounding without bias, and the random Hadamard transform ahead of it."""

from __future__ import annotations

import torch

from padless import layouts
from padless.formats import NVFP4, BlockScaledTensor, ceil_div
from padless.quantization import nvfp4_random_rules
from padless.quantization.quantize import _nvfp4_global, has_triton
from padless.quantization.rows_columns import check_values
from padless.runtime.devices import on_device_of
from padless.runtime.operators import register_operator


def quantize_nvfp4_stochastic(
    x: torch.Tensor, *, seed: int | torch.Tensor, global_scale: torch.Tensor | None = None
) -> BlockScaledTensor:
    """NVFP4 activations of x as ``quantize(x, NVFP4)`` makes them, with stochastic rounding of codes.

    x: (M, K) bfloat16, float16 or float32, any strides, K even.
    seed: an int of 64 bits, or a () int64 tensor on x's device (a CUDA graph then sees new ones). The same seed gives
        the same codes; another step of training must bring another.
    global_scale: () float32 decode scale where it is known; None computes amax / 2688 of x.

    Scales are those of ``quantize``, scale_rule "te", in their plain layout. The expectation of a decoded value is
    within 2^-24 of a step of e2m1 of x, unless its scale's rounding sent it above 6 codes, where it saturates. The
    generator and the rounding are in `padless.quantization.nvfp4_random_rules`. Raises ValueError for what is not
    allowed above.
    """
    check_values("x", x, "(M, K)")
    if x.shape[1] % 2 != 0:
        raise ValueError(f"x must have an even number of columns for NVFP4, got shape {tuple(x.shape)}")
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int of 64 bits, got {seed}")
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    elif seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != x.device:
        raise ValueError(
            f"seed must be an int or a () int64 tensor on {x.device}, "
            f"got {seed.dtype} {tuple(seed.shape)} on {seed.device}"
        )
    if global_scale is not None and (
        global_scale.dtype != torch.float32 or global_scale.dim() != 0 or global_scale.device != x.device
    ):
        raise ValueError(
            f"global_scale must be a () float32 tensor on {x.device} or None, "
            f"got {global_scale.dtype} {tuple(global_scale.shape)} on {global_scale.device}"
        )
    data, scale, decode = _quantize_operator(x, seed, global_scale)
    return BlockScaledTensor(data.view(NVFP4.data_dtype), scale.view(NVFP4.scale_dtype), NVFP4, decode)


def random_hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """(M, K) float32: H s / 4 of every 16 neighbours in a row of x, which spreads an outlier over all of them.

    x: (M, K) bfloat16, float16 or float32, any strides, K a multiple of 16.
    signs: 16 bits; bit i of them changes the sign of element i before the transform. Both operands of a product are
        transformed along the summed dimension with the same signs, and their product stays what it was.

    Raises ValueError for what is not allowed above.
    """
    check_values("x", x, "(M, K)")
    if x.shape[1] % nvfp4_random_rules.GROUP != 0:
        raise ValueError(f"x must have a multiple of 16 columns, got shape {tuple(x.shape)}")
    if not 0 <= signs < 1 << nvfp4_random_rules.GROUP:
        raise ValueError(f"signs must have 16 bits, 0 .. 65535, got {signs}")
    return _hadamard_operator(x, signs)


def _run_quantize(
    x: torch.Tensor, seed: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    on_gpu = x.is_cuda and has_triton()
    with on_device_of(x):
        decode, factors = _nvfp4_global(x, "te", global_scale, None, on_gpu)
        if on_gpu:
            from padless.quantization.triton import nvfp4_random

            data, scale = nvfp4_random.nvfp4_stochastic(x, seed, factors)
        else:
            data, scale = stochastic_torch(x, seed, factors)
    return data, scale, decode.clone()  # of its own, for outputs share no memory with operands


def stochastic_torch(x: torch.Tensor, seed: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8, scale bytes uint8): what the Triton kernel writes, in plain torch."""
    codes, scale = nvfp4_random_rules.nvfp4_stochastic(x, seed, factors)
    return layouts.pack_fp4(codes).view(torch.uint8), scale


def _fake_quantize(
    x: torch.Tensor, seed: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    data = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = x.new_empty((rows, ceil_div(columns, NVFP4.block_k)), dtype=torch.uint8)
    return data, scale, x.new_empty((), dtype=torch.float32)


def _run_hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    if x.is_cuda and has_triton():
        from padless.quantization.triton import nvfp4_random

        with on_device_of(x):
            return nvfp4_random.hadamard(x, signs)
    return nvfp4_random_rules.hadamard(x, signs)


def _fake_hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    return x.new_empty(tuple(x.shape), dtype=torch.float32)


_quantize_operator = register_operator(
    "quantize_nvfp4_stochastic(Tensor x, Tensor seed, Tensor? global_scale) -> (Tensor, Tensor, Tensor)",
    _run_quantize,
    _fake_quantize,
)
_hadamard_operator = register_operator("random_hadamard(Tensor x, int signs) -> Tensor", _run_hadamard, _fake_hadamard)
