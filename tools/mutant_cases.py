"""Launches whose mutants `tools/mutants.py` judges: every product kernel and quantizing kernel of both architectures.

A case is a public call, or a kernel's own host side, on random operands by the emulator's backend. The problems are
small and ragged; each CTA takes several tiles through a ring of few stages, so that barriers come to their later phases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import padless
from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.emulator.fake_driver import EmulatedDriver
from padless.kernels.launch import KernelConfig
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig

Call = Callable[[EmulatedDriver], object]
SIZES, PAST = (100, 0, 129, 30), 3
N, K = 272, 1056
SHORT_K = 512


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def offsets() -> torch.Tensor:
    return padless.group_offsets(SIZES)


def activation(fmt: Any, k: int = K, **options: Any) -> Any:
    return padless.quantize(normal(sum(SIZES) + PAST, k), fmt, **options)


def weight(fmt: Any, n: int = N, k: int = K, **options: Any) -> Any:
    return padless.quantize(normal(len(SIZES), n, k), fmt, kind="weight", **options)


def product(a: Any, b: Any, config: KernelConfig) -> Call:
    """`grouped_gemm` on quantized operands; a, b: formats, or None for plain bfloat16."""

    def call(device: EmulatedDriver) -> object:
        rows = normal(sum(SIZES) + PAST, K).bfloat16() if a is None else activation(a, **of_groups(a))
        columns = normal(len(SIZES), N, K).bfloat16() if b is None else weight(b)
        return padless.grouped_gemm(rows, columns, offsets(), backend=backend_of(device), config=config)

    return call


def quantizing(a: Any, b: Any, epilogue: padless.Epilogue, config: KernelConfig) -> Call:
    """`grouped_gemm_epilogue` with numbers of every kind that the epilogue has."""

    def call(device: EmulatedDriver) -> object:
        n, groups = 256, len(SIZES)
        tensors = padless.EpilogueTensors(
            alpha=normal(groups) if epilogue.alpha else None,
            bias=normal(groups, n) if epilogue.bias else None,
            prob=normal(sum(SIZES) + PAST) if epilogue.prob else None,
            global_scale=torch.tensor([0.01]) if epilogue.row_format is NVFP4 else None,
        )
        operands = activation(a, SHORT_K, **of_groups(a)), weight(b, n, SHORT_K)
        backend = backend_of(device)
        return padless.grouped_gemm_epilogue(*operands, offsets(), epilogue, tensors, backend=backend, config=config)

    return call


def of_groups(fmt: Any) -> dict[str, Any]:
    return {"offs": offsets()} if fmt is NVFP4 else {}


def backend_of(device: EmulatedDriver) -> str:
    return "emulator" if device.arch == "sm_90a" else f"emulator:{device.arch}"


def dense(device: EmulatedDriver) -> object:
    a, b = (padless.quantize(normal(rows, K + 224), MXFP8, scale_layout="blocked") for rows in (300, 520))
    config = Sm100DenseConfig(num_stages=3, block_n=128)
    return padless.gemm(a, b, backend=backend_of(device), config=config)


def fp8_gradient(device: EmulatedDriver) -> object:
    rows = sum(SIZES) + PAST
    (_, dy), (_, x) = (
        padless.quantize_rows_columns(normal(rows, features), offsets(), column_block=block, rows=False)
        for features, block in ((272, (1, 128)), (144, (128, 128)))
    )
    return padless.grouped_gemm_wgrad(dy, x, backend=backend_of(device), config=WgradConfig(num_stages=2))


def bf16_gradient(device: EmulatedDriver) -> object:
    rows = sum(SIZES) + PAST
    dy, x = normal(rows, 264).bfloat16(), normal(rows, 272).bfloat16()
    config = Bf16WgradConfig(num_stages=3)
    return padless.grouped_gemm_wgrad(dy, x, offs=offsets(), backend=backend_of(device), config=config)


def rows_columns(device: EmulatedDriver) -> object:
    from padless.quantization.triton import rows_columns

    x = normal(sum(SIZES) + PAST, 264).bfloat16()
    return rows_columns.rows_columns(x, offsets(), (1, 128), 32, True, device)


def swiglu_backward(device: EmulatedDriver) -> object:
    from padless.quantization.triton import swiglu_backward

    rows = sum(SIZES) + PAST
    dh, z, prob = normal(rows, 256).bfloat16(), normal(rows, 512).bfloat16(), normal(rows)
    return swiglu_backward.swiglu_backward(dh, z, offsets(), prob, "concatenated", (1, 128), 32, device)


SWIGLU = padless.Epilogue(
    alpha=True, bias=True, prob=True, activation="swiglu_concatenated", row_format=MXFP8, scale_rule="rceil"
)
BOTH = padless.Epilogue(alpha=True, prob=True, amax=True, row_format=MXFP8, column_format=MXFP8, scale_rule="rceil")
FP8_ROWS = padless.Epilogue(alpha=True, prob=True, d_dtype=torch.bfloat16, row_format=FP8_BLOCK)
NVFP4_ROWS = padless.Epilogue(alpha=True, amax=True, row_format=NVFP4, row_layout="blocked", scale_rule="te")
PAIR = Sm100GroupedConfig(cta_group=2, num_stages=3)

# name -> architecture, multiprocessors of the device, the call
CASES: dict[str, tuple[str, int, Call]] = {
    "sm90_fp8": ("sm_90a", 2, product(FP8_BLOCK, FP8_BLOCK, Sm90Fp8Config(num_stages=3))),
    "sm90_fp8, clusters": ("sm_90a", 2, product(FP8_BLOCK, FP8_BLOCK, Sm90Fp8Config(num_stages=3, cluster_n=2))),
    "sm90_fp8, quantizing": ("sm_90a", 2, quantizing(FP8_BLOCK, FP8_BLOCK, FP8_ROWS, Sm90Fp8Config(num_stages=3))),
    "sm90_bf16": ("sm_90a", 2, product(FP8_BLOCK, MXFP4, Sm90Bf16Config("FP8_BLOCK", "MXFP4", num_stages=3))),
    "sm90_bf16, quantizing": (
        "sm_90a", 2, quantizing(NVFP4, NVFP4, NVFP4_ROWS, Sm90Bf16Config("NVFP4", "NVFP4", num_stages=3)),
    ),
    "sm90_mxfp8": ("sm_90a", 2, product(MXFP8, MXFP8, Sm90Mxfp8Config(num_stages=3))),
    "sm90_mxfp8, quantizing": ("sm_90a", 2, quantizing(MXFP8, MXFP8, SWIGLU, Sm90Mxfp8Config(num_stages=3))),
    "sm90_bf16_plain": ("sm_90a", 2, product(None, None, Bf16PlainConfig(block_n=128, num_stages=3))),
    "sm90_fp8_wgrad": ("sm_90a", 2, fp8_gradient),
    "sm90_bf16_wgrad": ("sm_90a", 2, bf16_gradient),
    "sm90_rows_columns": ("sm_90a", 1, rows_columns),
    "sm90_swiglu_backward": ("sm_90a", 1, swiglu_backward),
    "sm100_grouped": ("sm_100a", 2, product(MXFP8, MXFP8, Sm100GroupedConfig(num_stages=3))),
    "sm100_grouped, pairs": ("sm_100a", 2, product(MXFP8, MXFP4, PAIR)),
    "sm100_grouped, FP8_BLOCK": ("sm_100a", 2, product(FP8_BLOCK, FP8_BLOCK, Sm100GroupedConfig(num_stages=3))),
    "sm100_grouped, quantizing": ("sm_100a", 2, quantizing(MXFP8, MXFP8, BOTH, PAIR)),
    "sm100_dense": ("sm_100a", 2, dense),
}  # fmt: skip
