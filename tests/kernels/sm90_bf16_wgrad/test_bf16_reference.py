"""The reference of bf16 products against the emulator's tensor core, exact sums, and itself with bugs in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padless.emulator.units import arithmetic
from padless.reference import bf16
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference, multiply_accumulate, product
from padless.testing.bits import same_bits
from support.bf16_problems import Shape, random_rows


def operands(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (24, 16), b (40, 16), c (24, 40): normal, over many powers of two, close to subnormal, or any bits."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((24, 16), (40, 16), (24, 40)))
    if kind == "any":
        a, b = (
            torch.randint(-(2**15), 2**15, t.shape, generator=generator).to(torch.int16).view(torch.bfloat16)
            for t in (a, b)
        )
        c = torch.randint(-(2**31), 2**31, c.shape, generator=generator).to(torch.int32).view(torch.float32)
        return a, b, c
    spread, shift = {"normal": (0, 0), "wide": (40, 0), "tiny": (4, -66)}[kind]
    a, b, c = (
        t * torch.exp2(torch.randint(-spread, spread + 1, t.shape, generator=generator) + float(shift))
        for t in (a, b, c)
    )
    if kind == "tiny":
        c = c * 2.0**-66
    a[0], a[2, ::2], c[:, 0], c[1] = 0.0, 0.0, 0.0, -0.0
    return a.bfloat16(), b.bfloat16(), c


def emulated(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    x, y = (arithmetic.decode_operand(t.view(torch.int16).numpy().view(np.uint16), "bf16") for t in (a, b))
    return torch.from_numpy(arithmetic.dot_product_add(x, y, c.numpy(), arithmetic.WIDE, mode="truncate", result="f32"))


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "any"])
def test_one_instruction_is_the_emulators(kind: str) -> None:
    for seed in range(8):
        a, b, c = operands(seed, kind)
        ours, theirs = multiply_accumulate(a, b, c), emulated(a, b, c)
        is_nan = theirs.isnan()
        assert torch.equal(ours.isnan(), is_nan)
        assert same_bits(ours.masked_fill(is_nan, 0.0), theirs.masked_fill(is_nan, 0.0))


@pytest.mark.parametrize(("name", "value"), [("_FRACTION", 24), ("_SIGNIFICANT", 23)])
def test_a_bit_less_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(bf16, name, value)
    a, b, c = operands(0, "normal")
    assert not same_bits(multiply_accumulate(a, b, c), emulated(a, b, c))


def test_the_tensor_core_is_close_to_exact_sums() -> None:
    rows = random_rows(Shape((200, 0, 33), 2, 24, 40))
    results = {
        kind: grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=torch.float64, accumulation=kind)
        for kind in bf16.ACCUMULATIONS
    }
    exact = results["float64"]
    assert (results["float32"] - exact).norm() <= 2.0**-24 * exact.norm()
    off = (results["tensor_core"] - exact).norm() / exact.norm()
    assert 2.0**-26 < off < 2.0**-20
    start = 0
    for group, end in enumerate(rows.offs.tolist()):
        assert torch.equal(exact[group], rows.dy[start:end].double().t() @ rows.x[start:end].double())
        start = end


def test_zeros_change_no_bit() -> None:
    a, b, _ = operands(3, "normal")
    zeros = torch.zeros((24, 7), dtype=torch.bfloat16), torch.zeros((40, 7), dtype=torch.bfloat16)
    longer = [torch.cat([t, z], 1) for t, z in zip((a, b), zeros, strict=True)]
    assert same_bits(product(*longer, "tensor_core"), product(a, b, "tensor_core"))


def test_what_is_not_allowed() -> None:
    rows = random_rows(Shape((3,), 0, 16, 24))
    with pytest.raises(ValueError, match="accumulation is 'bf16'; allowed: 'tensor_core'"):
        grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, accumulation="bf16")
    with pytest.raises(ValueError, match="accumulate needs out"):
        grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, accumulate=True)
