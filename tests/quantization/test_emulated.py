"""The quantisers' own machine code, compiled for Hopper by Triton and executed in the emulator, against
torch.

Triton's interpreter shows that the kernels say the right thing; this shows that what the compiler makes of
them does
it: the conversion instructions, the division, NaN and subnormals, the packing of FP4, 16-byte accesses and
    masks.
"""

from __future__ import annotations

import pytest
import torch

from support import triton_cases
from support.emulated_triton import EmulatedKernel

triton = pytest.importorskip("triton")


# The others take up to half a minute each.
QUICK = {"fp8_block_code_boundaries", "fp8_block_amax_floor", "fp8_block_strides", "mx_code_boundaries"}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every quantiser kernel replaced by its emulated machine code, with the hardware's casts."""
    from padless.quantization.triton import casts as triton_casts
    from padless.quantization.triton import fp8_block as quantize_triton
    from padless.quantization.triton import global_scale as quantize_triton_global
    from padless.quantization.triton import row_blocks as quantize_triton_rows

    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (quantize_triton, "_fp8_block_activation"),
        (quantize_triton, "_fp8_block_weight"),
        (quantize_triton_rows, "_row_blocks"),
        (quantize_triton_global, "_chunk_amax"),
        (quantize_triton_global, "_derive"),
        (quantize_triton_global, "_factors_of_given"),
    ):
        kernels.append(EmulatedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    return kernels


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in triton_cases.CASES]
)
def test_machine_code(name: str, emulated: list[EmulatedKernel]) -> None:
    triton_cases.CASES[name]("cpu")
    assert sum(k.launches for k in emulated) > 0


@pytest.mark.parametrize("name", triton_cases.ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_few_rows(name: str, dtype: torch.dtype, emulated: list[EmulatedKernel]) -> None:
    x = triton_cases.awkward((21, 144), dtype, 5)
    for rule in triton_cases.rules(name):
        triton_cases.row_blocks_pair(x, name, rule, "cpu")
    assert sum(k.launches for k in emulated) == (6 if name == "NVFP4" else 2)


@pytest.mark.parametrize("name", triton_cases.ROW_FORMATS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float16, torch.float32))]
)
def test_nans_of_every_bit_pattern(name: str, dtype: torch.dtype, emulated: list[EmulatedKernel]) -> None:
    triton_cases.nans_of_row_blocks(name, dtype, "cpu", triton_cases.rules(name)[:1])
    assert sum(k.launches for k in emulated) == (6 if name == "NVFP4" else 2)


@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_nans_of_fp8_blocks(kind: str, emulated: list[EmulatedKernel]) -> None:
    x = triton_cases.with_nans(15, 130, torch.float32, 34)
    triton_cases.fp8_block_pair(x, kind, "k", "cpu")
    assert sum(k.launches for k in emulated) == 1
