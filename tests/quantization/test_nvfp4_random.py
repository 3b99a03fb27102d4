"""NVFP4 with codes rounded by chance and the Hadamard transform, on the CPU: the generator, no bias, orthogonality."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from padless import NVFP4, dequantize, quantize
from padless.layouts import unpack_fp4
from padless.quantization import nvfp4_random_rules as rules
from padless.quantization import rules as quantize_rules
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from support.triton_cases import awkward, bits

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor(v) for v in values]


# --- the generator ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """The answers that Random123 publishes for 4x32, 10 rounds."""
    seed = key[0] | key[1] << 32
    seed -= (1 << 64) if seed >= 1 << 63 else 0
    assert tuple(int(w) for w in rules.philox(torch.tensor(seed), tuple(words(*counter)))) == expected


def test_uniform() -> None:
    v = rules.uniform(torch.tensor(5), 400, 250)
    assert v.dtype == torch.float32
    assert v.min() > 0.0
    assert v.max() < 1.0
    assert torch.equal((v * 2**24) % 2, torch.ones_like(v))
    count = v.numel()
    # Five standard deviations: of the mean, of a count in 20 bins, of products of neighbours in rows and columns.
    assert abs(v.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    bins = torch.histc(v, 20, 0.0, 1.0)
    assert (bins - count / 20).abs().max() < 5 * (count * 0.05 * 0.95) ** 0.5
    centred = v.double() - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(4, 1), centred.flip(0)):
        assert (centred * other).mean().abs() < 5 / 12 / count**0.5
    assert (v == rules.uniform(torch.tensor(6), 400, 250)).float().mean() < 1e-3


def test_a_number_is_of_its_place() -> None:
    """Not of the shape, so that a slice of a tensor is rounded as it was."""
    seed = torch.tensor(-7)
    whole = rules.uniform(seed, 9, 70)
    assert torch.equal(whole[:5, :33], rules.uniform(seed, 5, 33))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor(0.01)
    codes = [quantize_nvfp4_stochastic(t, seed=-7, global_scale=scale).data.view(torch.uint8) for t in (x, x[:5, :32])]
    assert torch.equal(codes[0][:5, :16], codes[1])


# --- rounding --------------------------------------------------------------------------------------------


def test_the_probability_of_every_code() -> None:
    """All 2^23 random numbers: the expectation is within 2^-24 of a step, and only the neighbours occur."""
    v = (2 * torch.arange(1 << 23) + 1).to(torch.float32) * 2.0**-24
    for y in (0.0, 0.1, 1.99, 2.7182817, 3.9999998, 4.3, 6.0):
        how_often = torch.bincount(rules.to_e2m1(torch.tensor(-y), v), minlength=16).double()
        assert not how_often[:8].any()
        exact = torch.tensor(y).double()
        above = int(torch.searchsorted(E2M1.double(), exact))
        assert int(how_often[8 + max(above - 1, 0)] + how_often[8 + above] * (above > 0)) == 1 << 23
        step = 0.5 if y < 2 else 1.0 if y < 4 else 2.0
        assert (how_often[8:] @ E2M1.double() / (1 << 23) - exact).abs() <= step * 2.0**-24


def test_what_has_no_neighbours() -> None:
    v = torch.full((6,), 0.5)
    y = torch.tensor([7.0, -1e38, float("inf"), float("nan"), -0.0, -float("nan")])
    assert rules.to_e2m1(y, v).tolist() == [7, 15, 7, 0, 8, 0]


def biases(quantized: Callable[[int], torch.Tensor], x: torch.Tensor, count: int) -> torch.Tensor:
    """(mean of decoded values - x) in standard deviations of the mean, at most half a step each."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for seed in range(count):
        total += quantized(seed).double()
    t = quantize(x, NVFP4)
    unit = t.scale.float().repeat_interleave(16, 1) * t.global_scale
    y = x.abs() / unit
    step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0)) * unit
    deviation = (total / count - x).abs() / (step / 2 / count**0.5)
    return torch.where(y <= 6, deviation, 0.0)  # above, the scale's rounding makes it saturate


def test_no_bias() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))

    def by_chance(seed: int) -> torch.Tensor:
        return dequantize(quantize_nvfp4_stochastic(x, seed=seed))

    assert biases(by_chance, x, 400).max() < 5
    nearest = dequantize(quantize(x, NVFP4))
    assert biases(lambda seed: nearest, x, 400).max() > 15  # what is seen of a rounding that has one


def test_scales_are_those_of_quantize() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = awkward((33, 146), dtype, 4)
        for global_scale in (None, torch.tensor(0.003)):
            got = quantize_nvfp4_stochastic(x, seed=1, global_scale=global_scale)
            want = quantize(x, NVFP4, global_scale=global_scale)
            assert torch.equal(bits(got.scale), bits(want.scale))
            assert torch.equal(got.global_scale, want.global_scale)
            broken = ~quantize_rules.block_amax(x.float(), 1, 16).isfinite().repeat_interleave(16, 1)[:, :146]
            assert not unpack_fp4(got.data)[~broken & (x == 0)].bitwise_and(7).any()


# --- the transform ---------------------------------------------------------------------------------------


def matrix(signs: int) -> torch.Tensor:
    """H diag(s) / 4 in float64, from its definition."""
    h = torch.tensor([[1.0]], dtype=torch.float64)
    for _ in range(4):
        h = torch.kron(h, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    s = torch.tensor([-1.0 if signs >> i & 1 else 1.0 for i in range(16)], dtype=torch.float64)
    return h * s / 4


@pytest.mark.parametrize("signs", [0, 0x5A3C, 0xFFFF, 1])
def test_hadamard(signs: int) -> None:
    generator = torch.Generator().manual_seed(signs)
    x, w = (torch.randn(n, 48, generator=generator) for n in (20, 30))
    m = matrix(signs)
    assert torch.allclose(m @ m.t(), torch.eye(16, dtype=torch.float64))
    got = random_hadamard(x, signs)
    exact = (x.double().unflatten(1, (-1, 16)) @ m.t()).flatten(1)
    largest = x.abs().unflatten(1, (-1, 16)).sum(2).repeat_interleave(16, 1)
    assert bool(((got - exact).abs() <= largest * 2.0**-23).all())
    product = got.double() @ random_hadamard(w, signs).double().t()
    assert bool(
        ((product - x.double() @ w.double().t()).abs() <= 2.0**-20 * (x.norm(dim=1)[:, None] * w.norm(dim=1))).all()
    )
    wrong = got.double() @ random_hadamard(w, signs ^ 0x0F0F).double().t()  # other signs: another product
    assert (wrong - product).abs().max() > 1


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = 64.0
    got = random_hadamard(x.bfloat16(), 0x1234)
    assert got.abs().tolist() == [[16.0] * 16 + [0.0] * 16]


# --- as operators of torch -------------------------------------------------------------------------------


def test_operators() -> None:
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(6)).bfloat16()
    ops = torch.ops.padless
    for global_scale in (None, torch.tensor(0.01)):
        torch.library.opcheck(ops.quantize_nvfp4_stochastic.default, (x, torch.tensor(3), global_scale))
    torch.library.opcheck(ops.random_hadamard.default, (x, 0x1234))


def test_compiled() -> None:
    def step(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = quantize_nvfp4_stochastic(random_hadamard(x * 2, 0x1234), seed=seed)
        assert t.global_scale is not None
        return t.data.view(torch.uint8), t.global_scale

    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(7))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        for got, want in zip(compiled(x, torch.tensor(seed)), step(x, torch.tensor(seed)), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_nvfp4_stochastic(torch.zeros(2, 3), seed=1), "even number of columns"),
        (lambda: quantize_nvfp4_stochastic(torch.zeros(2), seed=1), r"x must be \(M, K\)"),
        (lambda: quantize_nvfp4_stochastic(torch.zeros(2, 4), seed=2**63), "seed must be an int of 64 bits"),
        (lambda: quantize_nvfp4_stochastic(torch.zeros(2, 4), seed=torch.zeros(1)), r"seed must be an int or a \(\)"),
        (
            lambda: quantize_nvfp4_stochastic(torch.zeros(2, 4), seed=1, global_scale=torch.ones(2)),
            r"global_scale must be a \(\) float32",
        ),
        (lambda: random_hadamard(torch.zeros(2, 24), 0), "multiple of 16 columns"),
        (lambda: random_hadamard(torch.zeros(2, 32), 1 << 16), "signs must have 16 bits"),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
