"""`swiglu_backward_quantize` on the CPU: the float32 arithmetic against float64, and what is quantized of it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK, dequantize, group_offsets, quantize, swiglu_backward_quantize
from padless.quantization import swiglu_rules as rules
from padless.reference import activation
from support import triton_cases
from support.columns_judge import judge
from support.triton_cases import awkward, bits

LAYOUTS = (("concatenated", 144), ("concatenated", 128), ("interleaved", 160))
SIZES, PAST = (33, 0, 130, 1), 6
ROWS = sum(SIZES) + PAST


def problem(columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Any]:
    """dh, z and prob whose rows differ in size, NaN past the last group."""
    generator = torch.Generator().manual_seed(seed)

    def values(width: int) -> torch.Tensor:
        return torch.randn(ROWS, width, generator=generator)

    spread = torch.exp2(torch.randint(-8, 5, (ROWS, 1), generator=generator).float())
    dh, z = values(columns) * spread, values(2 * columns) * 3
    dh[-PAST:], z[-PAST:] = float("nan"), float("nan")
    prob = torch.rand(ROWS, generator=generator)
    return {"dh": dh.to(dtype), "z": z.to(dtype), "prob": prob, "offs": group_offsets(list(SIZES))}


# --- the arithmetic --------------------------------------------------------------------------------------


def exact_fma(a: float, b: float, c: float) -> Fraction:
    return Fraction(a) * Fraction(b) + Fraction(c)


def test_fma_rounds_once() -> None:
    """Against fractions: sums that cancel, halves that a second rounding would send the wrong way, subnormals."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4000, generator=generator) for _ in range(2))
    c = -(a * b) * (1 + torch.randint(-3, 4, (4000,), generator=generator) * 2.0**-23)
    c[::4] = torch.randn(1000, generator=generator) * torch.exp2(torch.randint(-60, 60, (1000,), generator=generator))
    a[1::8] *= 2.0**-75
    b[1::8] *= 2.0**-72
    c[1::8] *= 2.0**-147
    # 1 + 2^-24 + a bit that float64 drops: to float32 in two steps this is a tie, which goes down to even.
    a[2], b[2], c[2] = 1 + 2.0**-12, 2.0**-24, 1.0
    a[3], b[3], c[3] = 2.0**-30, 2.0**-30, 1 + 2.0**-23
    got = rules.fma(a, b, c)
    twice = (a.double() * b.double() + c.double()).float()
    for i in range(4000):
        exact = exact_fma(a[i].item(), b[i].item(), c[i].item())
        error = abs(Fraction(got[i].item()) - exact)
        for other in (torch.nextafter(got[i], torch.tensor(d)) for d in (float("inf"), -float("inf"))):
            beside = abs(Fraction(other.item()) - exact)
            is_even = int(got[i].view(torch.int32)) % 2 == 0
            assert error < beside or (error == beside and is_even), i
    x = torch.tensor([2.0**-40, 1 + 2.0**-23, 2.0**-24 + 2.0**-47])
    assert (rules.fma(*x) - (x[0].double() * x[1].double() + x[2].double()).float()).abs().max() <= 2.0**-47
    assert twice.shape == got.shape
    special = rules.fma(
        torch.tensor([float("inf"), float("inf"), 3e38, float("nan")]),
        torch.tensor([0.0, 1.0, 3e38, 1.0]),
        torch.tensor([1.0, -float("inf"), 0.0, 1.0]),
    )
    assert special[0].isnan()
    assert special[1].isnan()
    assert special[2] == float("inf")
    assert special[3].isnan()


def test_fma_is_not_rounded_twice() -> None:
    """A case that float64 gets wrong: the product's last bit decides a tie of float32, and float64 has dropped it."""
    a = torch.tensor(1 + 2.0**-23)
    b = torch.tensor(2.0**-24 * (1 - 2.0**-23))  # a * b = 2^-24 (1 - 2^-46): just below half a step of 1
    c = torch.tensor(1 + 2.0**-23)  # odd: a tie would go up
    exact = exact_fma(a.item(), b.item(), c.item())
    assert exact < Fraction(1 + 2.0**-23) + Fraction(2) ** -24
    assert (a.double() * b.double() + c.double()).float() == 1 + 2.0**-22
    assert rules.fma(a, b, c) == 1 + 2.0**-23


def test_sigmoid() -> None:
    """Within 2^-21.5 of the true value everywhere, and what the bounds are for."""
    x = torch.cat([torch.linspace(-87.25, 100, 400_001), torch.randn(200_000) * 2, torch.tensor([0.0, -0.0])])
    got = rules.sigmoid(x).double()
    error = (got / torch.sigmoid(x.double()) - 1).abs()
    assert error.max() < 2.0**-21.5
    assert rules.sigmoid(torch.tensor([200.0, 3e38, float("inf")])).tolist() == [1.0, 1.0, 1.0]
    assert rules.sigmoid(torch.tensor(rules.SMALLEST)) >= 2.0**-126


@pytest.mark.parametrize("with_prob", [True, False])
def test_gradients_against_float64(with_prob: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up, dh = (torch.randn(300, 200, generator=generator) * s for s in (20, 2, 3))
    gate[:20] = torch.linspace(-200, 200, 4000).view(20, 200)
    prob = torch.rand(300, generator=generator) if with_prob else None
    got = rules.backward(dh, gate, up, prob)
    g, u, d = (t.double().requires_grad_() for t in (gate, up, dh))
    p = (torch.ones(300) if prob is None else prob).double().requires_grad_()
    h = p[:, None] * torch.nn.functional.silu(g) * u
    (h * d).sum().backward()
    s = torch.sigmoid(g)
    slope = s + (g * s * (1 - s)).abs()  # what its terms come to where they cancel
    # 2^-19: near a gate of 16, 1 - s is of the size of the last bit of s, and is multiplied by the gate.
    tiny = 1e-33
    factor = (p[:, None] * d).abs()
    assert bool(((got.gate - g.grad).abs() <= 2.0**-19 * factor * u.abs() * slope + tiny).all())
    assert bool(((got.up - u.grad).abs() <= 2.0**-20 * u.grad.abs() + tiny).all())
    assert bool(((got.hidden - h).abs() <= 2.0**-20 * h.abs() + tiny).all())
    terms = (torch.nn.functional.silu(g) * u * d).abs().sum(1)
    assert bool(((rules.dprob(got.products) - p.grad).abs() <= 2.0**-20 * terms + tiny).all())


def test_the_order_of_dprob() -> None:
    """Neighbours first inside 128 columns, then block after block: seen with numbers that do not commute."""
    x = torch.zeros(1, 300)
    x[0, :4] = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24])  # (1 + e) + (e + e) = 1 + 2^-23; in turn it is 1
    assert rules.dprob(x).item() == 1 + 2.0**-23
    x[0, 128], x[0, 256] = 2.0**30, -(2.0**30)
    assert rules.dprob(x).item() == 0.0
    x[0, 5] = float("nan")
    assert bits(rules.dprob(x)).tolist() == [0, 0, 0xC0, 0x7F]


def test_gate_and_up_lie_as_in_the_epilogue() -> None:
    z = torch.randn(3, 192)
    for name in ("concatenated", "interleaved"):
        gate, up = rules.gate_and_up(z, name)
        for a, b in zip((gate, up), activation.gate_and_up(z, name), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(rules.merge_gate_and_up(gate, up, name), z)


# --- what is quantized -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize(("gate_up", "columns"), LAYOUTS, ids=str)
def test_outputs(gate_up: str, columns: int, alignment: int) -> None:
    """All outputs are those of the float32 gradients, to the bit."""
    for dtype, block, with_prob in (
        (torch.bfloat16, (1, 128), True),
        (torch.float16, (128, 128), True),
        (torch.float32, (128, 128), False),
    ):
        given = problem(columns, dtype)
        if not with_prob:
            given["prob"] = None
        got = swiglu_backward_quantize(**given, gate_up=gate_up, hidden_block=block, alignment=alignment)
        found = rules.backward(given["dh"], *rules.gate_and_up(given["z"], gate_up), given["prob"])
        dz = rules.merge_gate_and_up(found.gate, found.up, gate_up)
        triton_cases.assert_same(got.dz_rows, quantize(dz, FP8_BLOCK))
        judge(got.dz_columns, dz, given["offs"])
        judge(got.hidden_columns, found.hidden, given["offs"])
        assert got.dz_columns.block == (1, 128)
        assert got.hidden_columns.block == block
        if not with_prob:
            assert got.dprob is None
            continue
        want = rules.dprob(found.products)
        want[-PAST:] = 0.0  # whatever is in rows of no group
        assert torch.equal(bits(got.dprob), bits(want))


@pytest.mark.parametrize(("gate_up", "columns"), LAYOUTS, ids=str)
def test_dequantized_gradients_against_autograd(gate_up: str, columns: int) -> None:
    """Within half a step of e4m3 of the gradients that torch finds in float64."""
    given = problem(columns, torch.float32, 3)
    valid = ROWS - PAST
    got = swiglu_backward_quantize(**given, gate_up=gate_up)
    z = given["z"][:valid].double().requires_grad_()
    prob = given["prob"][:valid].double().requires_grad_()
    gate, up = rules.gate_and_up(z, gate_up)
    h = prob[:, None] * torch.nn.functional.silu(gate) * up
    (h * given["dh"][:valid].double()).sum().backward()
    values = dequantize(got.dz_rows)[:valid].double()
    scale = got.dz_rows.scale[:valid].double().repeat_interleave(128, 1)[:, : 2 * columns]
    limit = torch.maximum(z.grad.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-10) + scale * 448 * 2.0**-18
    assert bool(((values - z.grad).abs() <= limit).all())
    total = (h.detach() / prob[:, None] * given["dh"][:valid]).abs().sum(1)
    assert bool(((got.dprob[:valid] - prob.grad).abs() <= 2.0**-19 * total).all())
    assert got.dprob[valid:].tolist() == [0.0] * PAST


def test_specials_stay_in_their_rows_and_blocks() -> None:
    for seed, (gate_up, columns) in enumerate(LAYOUTS):
        given = problem(columns)
        given["z"] = awkward((ROWS, 2 * columns), torch.bfloat16, seed)
        before = swiglu_backward_quantize(**given, gate_up=gate_up)
        given["dh"][40, 5] = float("inf")
        after = swiglu_backward_quantize(**given, gate_up=gate_up)
        changed = torch.nonzero(bits(after.dz_rows.data) != bits(before.dz_rows.data))[:, 0]
        assert set(changed.tolist()) <= {40}
        changed = torch.nonzero(after.dprob.nan_to_num(7.0) != before.dprob.nan_to_num(7.0))
        assert set(changed.flatten().tolist()) <= {40}
        changed = torch.nonzero(bits(after.dz_columns.data) != bits(before.dz_columns.data))[:, 1]
        start = int(after.dz_columns.starts[2])  # row 40 is in the group of 130
        assert all(start <= column < start + 128 for column in changed.tolist())


def test_no_rows() -> None:
    given = {"dh": torch.zeros(0, 32), "z": torch.zeros(0, 64), "offs": torch.zeros(2, dtype=torch.int32)}
    got = swiglu_backward_quantize(**given, prob=torch.zeros(0), gate_up="interleaved")
    assert got.dz_rows.shape == (0, 64)
    assert not bits(got.dz_columns.data).any()
    assert got.dprob.shape == (0,)


# --- as an operator of torch -----------------------------------------------------------------------------


def test_operator() -> None:
    operator = torch.ops.padless.swiglu_backward_quantize.default
    for (gate_up, columns), block in itertools.product(LAYOUTS[::2], ((1, 128), (128, 128))):
        given = problem(columns)
        operands = [given[name].nan_to_num(0) for name in ("dh", "z", "offs", "prob")]
        torch.library.opcheck(operator, (*operands, gate_up, list(block), 32))
        torch.library.opcheck(operator, (*operands[:3], None, gate_up, list(block), 32))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    def step(dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = swiglu_backward_quantize(dh, z * 2, offs, prob, gate_up="concatenated")
        tensors = (got.dz_rows.data, got.dz_columns.data, got.hidden_columns.data)
        assert got.dprob is not None
        return (*(t.view(torch.uint8) for t in tensors), got.dz_rows.scale, got.hidden_columns.scale, got.dprob)

    given = problem(144)
    operands = [given[name] for name in ("dh", "z", "offs", "prob")]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for got, want in zip(compiled(*operands), step(*operands), strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dh": torch.zeros(4, 64, dtype=torch.int8)}, "dh must be bfloat16"),
        ({"z": torch.zeros(4, 64)}, r"z must be \(M, 2 I\) = \(4, 128\)"),
        ({"offs": torch.tensor([4.0])}, "offs must be a 1-D int32 or int64"),
        ({"prob": torch.zeros(4).double()}, r"prob must be \(4,\) float32"),
        ({"prob": torch.zeros(4, 1)}, r"prob must be \(4,\) float32"),
        ({"gate_up": "mixed"}, "gate_up must be one of"),
        ({"dh": torch.zeros(4, 48), "z": torch.zeros(4, 96), "gate_up": "interleaved"}, "multiple of 32 columns"),
        ({"hidden_block": (128, 1)}, "hidden_block must be one of"),
        ({"alignment": 64}, "alignment must be one of"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    given = {"dh": torch.zeros(4, 64), "z": torch.zeros(4, 128), "offs": torch.tensor([2, 4], dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        swiglu_backward_quantize(**({"gate_up": "concatenated"} | given | change))


def test_public_name() -> None:
    assert padless.swiglu_backward_quantize is swiglu_backward_quantize
