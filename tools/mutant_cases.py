"""Launches whose mutants `tools/mutants.py` judges: every product kernel and quantizing kernel of both architectures.

A case is a public call, or a kernel's own host side, on random operands by the emulator's backend, of two sizes: small
and ragged, each CTA with several tiles through a ring of few stages, so that barriers come to their later phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.runtime.choices import BackendName

Call = Callable[[EmulatedDriver], object]
PAST = 3  # rows of no group


@dataclass(frozen=True)
class Sizes:
    """Rows of the groups, n, k, and the multiprocessors of the device, of which a cluster takes several.

    A problem has several stages of K to a tile and few workers; SHORT is what that hides: tiles of one stage or two,
    whole along N, and workers that compete.
    """

    groups: tuple[int, ...]
    n: int
    k: int
    num_sms: int


LONG = Sizes((100, 0, 129, 30), 272, 1056, 2)
SHORT = Sizes((5, 0, 200, 64, 129), 256, 96, 4)
# A group of nine tiles by three, in two bands of the order of tiles. Of the second, one tile high, two are first tiles
# of workers; the scheduler draws the third.
TALL = Sizes((5, 0, 1033, 64), 272, 96, 26)
_sizes = LONG


@contextmanager
def of_sizes(device: EmulatedDriver, sizes: Sizes) -> Iterator[None]:
    """In this block calls of cases are made with these sizes, on a device of so many multiprocessors."""
    global _sizes
    before, _sizes = _sizes, sizes
    try:
        with device.configured(num_sms=sizes.num_sms):
            yield
    finally:
        _sizes = before


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rows() -> int:
    return sum(_sizes.groups) + PAST


def offsets() -> torch.Tensor:
    return padless.group_offsets(_sizes.groups)


def activation(fmt: Any, k: int, **options: Any) -> Any:
    return padless.quantize(normal(rows(), k), fmt, **options)


def weight(fmt: Any, n: int, k: int, groups: int | None = None) -> Any:
    return padless.quantize(normal(groups or len(_sizes.groups), n, k), fmt, kind="weight")


def product(a: Any, b: Any, config: KernelConfig, short: Sizes = SHORT) -> Call:
    """`grouped_gemm` on quantized operands; a, b: formats, or None for plain bfloat16; short: sizes in SHORT's place."""

    def call(device: EmulatedDriver) -> object:
        with of_sizes(device, short if _sizes is SHORT else _sizes):
            n, k = _sizes.n, _sizes.k if a is not None or _sizes is LONG else 64
            left = normal(rows(), k).bfloat16() if a is None else activation(a, k, **of_groups(a))
            right = normal(len(_sizes.groups), n, k).bfloat16() if b is None else weight(b, n, k)
            return padless.grouped_gemm(left, right, offsets(), backend=backend_of(device), config=config)

    return call


def quantizing(a: Any, b: Any, epilogue: padless.Epilogue, config: KernelConfig) -> Call:
    """`grouped_gemm_epilogue` with numbers of every kind that the epilogue has."""

    def call(device: EmulatedDriver) -> object:
        n, k, groups = 256, 512 if _sizes is LONG else 128, len(_sizes.groups)
        tensors = padless.EpilogueTensors(
            alpha=normal(groups) if epilogue.alpha else None,
            bias=normal(groups, n) if epilogue.bias else None,
            prob=normal(rows()) if epilogue.prob else None,
            global_scale=torch.tensor([0.01]) if epilogue.row_format is NVFP4 else None,
        )
        operands = activation(a, k, **of_groups(a)), weight(b, n, k)
        backend = backend_of(device)
        return padless.grouped_gemm_epilogue(*operands, offsets(), epilogue, tensors, backend=backend, config=config)

    return call


def of_groups(fmt: Any) -> dict[str, Any]:
    return {"offs": offsets()} if fmt is NVFP4 else {}


def backend_of(device: EmulatedDriver) -> BackendName:
    return "emulator" if device.arch == "sm_90a" else "emulator:sm_100a"


def dense(device: EmulatedDriver) -> object:
    k = 1280 if _sizes is LONG else 128
    a, b = (padless.quantize(normal(rows, k), MXFP8, scale_layout="blocked") for rows in (300, 520))
    config = Sm100DenseConfig(num_stages=3, block_n=128)
    return padless.gemm(a, b, backend=backend_of(device), config=config)


def fp8_gradient(config: WgradConfig) -> Call:
    """The product of a weight gradient, stored, or added to numbers; of a group of six blocks for the inmost loop."""

    def call(device: EmulatedDriver) -> object:
        with of_sizes(device, replace(LONG, groups=(100, 0, 680, 30)) if _sizes is LONG else _sizes):
            n, k = _sizes.n, _sizes.n - 128 // config.cluster_n  # of a cluster both CTAs have columns
            (_, dy), (_, x) = (
                padless.quantize_rows_columns(normal(rows(), features), offsets(), column_block=block, rows=False)
                for features, block in ((n, (1, 128)), (k, (128, 128)))
            )
            out = normal(len(_sizes.groups), n, k) if config.accumulate else None
            return padless.grouped_gemm_wgrad(
                dy, x, out=out, accumulate=config.accumulate, backend=backend_of(device), config=config
            )

    return call


def mxfp8_gradient(device: EmulatedDriver) -> object:
    """A CTA has one tile; of ten blocks of tokens each wait of a loop that is unrolled by four has to wait."""
    groups = (0, 1185, 30) if _sizes is LONG else (5, 0, 130)
    m, offs = sum(groups) + PAST, padless.group_offsets(groups)

    def columns(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = padless.quantize(normal(m, 32), MXFP8), weight(MXFP8, n, 32, len(groups))
        epilogue = padless.Epilogue(column_format=MXFP8, scale_rule="rceil")
        made = padless.grouped_gemm_epilogue(a, b, offs, epilogue, backend="reference")
        assert made.column_codes is not None
        assert made.column_scale is not None
        return made.column_codes, made.column_scale

    dy, x = map(columns, (48, 144) if _sizes is LONG else (144, 48))
    return grouped_gemm_wgrad_mxfp8(dy, x, offs, backend=backend_of(device), config=Mxfp8WgradConfig(num_stages=2))


def bf16_gradient(device: EmulatedDriver) -> object:
    dy, x = (normal(rows(), _sizes.n - less).bfloat16() for less in (8, 0))
    config = Bf16WgradConfig(num_stages=3)
    return padless.grouped_gemm_wgrad(dy, x, offs=offsets(), backend=backend_of(device), config=config)


def rows_columns(device: EmulatedDriver) -> object:
    from padless.quantization.triton import rows_columns

    x = normal(rows(), 264).bfloat16()
    return rows_columns.rows_columns(x, offsets(), (1, 128), 32, True, device)


def swiglu_backward(device: EmulatedDriver) -> object:
    from padless.quantization.triton import swiglu_backward

    dh, z, prob = normal(rows(), 256).bfloat16(), normal(rows(), 512).bfloat16(), normal(rows())
    return swiglu_backward.swiglu_backward(dh, z, offsets(), prob, "concatenated", (1, 128), 32, device)


SWIGLU = padless.Epilogue(
    alpha=True, bias=True, prob=True, activation="swiglu", gate_up="concatenated", row_format=MXFP8, scale_rule="rceil"
)
BOTH = padless.Epilogue(alpha=True, prob=True, amax=True, row_format=MXFP8, column_format=MXFP8, scale_rule="rceil")
FP8_ROWS = padless.Epilogue(alpha=True, prob=True, d_dtype=torch.bfloat16, row_format=FP8_BLOCK)
NVFP4_ROWS = padless.Epilogue(alpha=True, amax=True, row_format=NVFP4, row_layout="blocked", scale_rule="te")
PAIR = Sm100GroupedConfig(cta_group=2, num_stages=3)
ADDING = WgradConfig(num_stages=2, cluster_n=2, out_dtype=torch.float32, accumulate=True, reduced_pieces=2)

# name -> architecture, the call
CASES: dict[str, tuple[str, Call]] = {
    "sm90_fp8": ("sm_90a", product(FP8_BLOCK, FP8_BLOCK, Sm90Fp8Config(num_stages=3))),
    "sm90_fp8, clusters": ("sm_90a", product(FP8_BLOCK, FP8_BLOCK, Sm90Fp8Config(num_stages=3, cluster_n=2))),
    "sm90_fp8, quantizing": ("sm_90a", quantizing(FP8_BLOCK, FP8_BLOCK, FP8_ROWS, Sm90Fp8Config(num_stages=3))),
    "sm90_bf16": ("sm_90a", product(FP8_BLOCK, MXFP4, Sm90Bf16Config("FP8_BLOCK", "MXFP4", num_stages=3))),
    "sm90_bf16, quantizing": (
        "sm_90a", quantizing(NVFP4, NVFP4, NVFP4_ROWS, Sm90Bf16Config("NVFP4", "NVFP4", num_stages=3)),
    ),
    "sm90_mxfp8": ("sm_90a", product(MXFP8, MXFP8, Sm90Mxfp8Config(num_stages=3))),
    "sm90_mxfp8, quantizing": ("sm_90a", quantizing(MXFP8, MXFP8, SWIGLU, Sm90Mxfp8Config(num_stages=3))),
    "sm90_bf16_plain": ("sm_90a", product(None, None, Bf16PlainConfig(block_n=128, num_stages=3))),
    "sm90_fp8_wgrad": ("sm_90a", fp8_gradient(WgradConfig(num_stages=2))),
    "sm90_fp8_wgrad, adding in clusters": ("sm_90a", fp8_gradient(ADDING)),
    "sm90_bf16_wgrad": ("sm_90a", bf16_gradient),
    "sm90_rows_columns": ("sm_90a", rows_columns),
    "sm90_swiglu_backward": ("sm_90a", swiglu_backward),
    "sm100_grouped": ("sm_100a", product(MXFP8, MXFP8, Sm100GroupedConfig(num_stages=3), TALL)),
    "sm100_grouped, pairs": ("sm_100a", product(MXFP8, MXFP4, PAIR)),
    "sm100_grouped, FP8_BLOCK": ("sm_100a", product(FP8_BLOCK, FP8_BLOCK, Sm100GroupedConfig(num_stages=3))),
    "sm100_grouped, quantizing": ("sm_100a", quantizing(MXFP8, MXFP8, BOTH, PAIR)),
    "sm100_dense": ("sm_100a", dense),
    "sm100_mxfp8_wgrad": ("sm_100a", mxfp8_gradient),
}  # fmt: skip
