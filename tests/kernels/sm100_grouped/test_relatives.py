"""Blackwell's kernels compiled for the other targets that run them, and their families, run in the emulator.

What would convince: the PTX that ran is of that target, by its own line; no check reports anything; and every bit is
that of sm_100a, whose bits other tests compare with exact sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.emulator.fake_driver import EmulatedDriver, standing_in
from padless.kernels import launch
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.quantization.mx_rows_columns import quantize_mx_rows_columns
from padless.runtime.architecture import ARCHITECTURES
from padless.runtime.devices import backend_on_cpu

BACKEND = "emulator:sm_100a"
RELATIVES = [a for a in ARCHITECTURES if a.kernels == "sm_100a" and a.name != "sm_100a"]
TARGETS = sorted({a.name for a in RELATIVES} | {a.family for a in RELATIVES if a.family})
OFFS = torch.tensor([3, 3, 73], dtype=torch.int32)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def grouped(a: Any, b: Any) -> Callable[[], torch.Tensor]:
    weights = padless.quantize(rows(3, 160, 256), b, kind="weight")
    return lambda: padless.grouped_gemm(padless.quantize(rows(73, 256), a), weights, OFFS, backend=BACKEND)


def dense() -> torch.Tensor:
    a, b = (padless.quantize(rows(n, 256), MXFP8, kind=kind) for n, kind in ((73, "activation"), (160, "weight")))
    return padless.gemm(a, b, backend=BACKEND)


def quantizing() -> torch.Tensor:
    a, b = padless.quantize(rows(73, 256), MXFP8), padless.quantize(rows(3, 256, 256), MXFP8, kind="weight")
    found = padless.grouped_gemm_swiglu_quant(
        gate_up="concatenated", a_tensor=a, b_tensor=b, padded_offsets=OFFS, d_format=MXFP8, column_output=False,
        backend=BACKEND,
    ).row  # fmt: skip
    return torch.cat([found.data.view(torch.uint8).flatten(), found.scale.view(torch.uint8).flatten()])


def weight_gradient() -> torch.Tensor:
    columns = [quantize_mx_rows_columns(rows(73, n), OFFS, rows=False)[1] for n in (96, 64)]
    with backend_on_cpu(BACKEND):
        return grouped_gemm_wgrad_mxfp8(*columns, OFFS, out_dtype=torch.float32)


CALLS = {
    "MXFP8": grouped(MXFP8, MXFP8),
    "NVFP4": grouped(NVFP4, NVFP4),
    "MXFP8 x MXFP4": grouped(MXFP8, MXFP4),
    "FP8_BLOCK": grouped(FP8_BLOCK, FP8_BLOCK),
    "dense": dense,
    "quantizing": quantizing,
    "weight gradient": weight_gradient,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(CALLS))
def test_relatives_have_the_bits_of_sm_100a(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, made, right = CALLS[name](), [], launch.compile_kernel

    def compile_kernel(source: str, prelude: str, arch: str, kind: str) -> Any:
        assert arch == "sm_100a"
        made.append(right(source, prelude, target, kind))
        return made[-1]

    monkeypatch.setattr(launch, "compile_kernel", compile_kernel)
    device = EmulatedDriver("sm_100a")
    with standing_in(device, "sm_100a"):
        got = CALLS[name]()
    (kernel,) = made
    assert re.findall(r"^\.target (\w+)", bytes(kernel.image).decode(errors="replace"), re.MULTILINE) == [target]
    assert device.last_result is not None
    assert device.last_result.reports == ()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
