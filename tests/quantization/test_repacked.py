"""MXFP4 weights with the bits of their words in another order: the same values, the same products, and nothing else.

What would convince a sceptic: the order of the 32 bits worked out once more, here, from what the kernel's four
rotations leave in a bf16's bits 15, 8, 7 and 6; every code in every place of a word; there and back again, in pieces;
products by each tile, in the emulator, with the bits of those of the weights as they were; layers in one launch and in
several; and refusals of all that would read the codes as they were.
"""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

import padless
from padless import layouts
from padless.formats import FP8_BLOCK, MXFP4, MXFP4_REPACKED, MXFP8, NVFP4
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.moe import moe
from padless.nn import LoraExperts
from padless.reference.gemm import grouped_gemm_reference

OFFS = torch.tensor([5, 5, 70], dtype=torch.int32)


def weights(*shape: int, seed: int = 0) -> padless.BlockScaledTensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return padless.quantize(values, MXFP4, kind="weight")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def halves_of(word: int) -> list[tuple[int, int]]:
    """Bits 15, 8, 7 and 6 of both halves of what each of the kernel's four expressions makes of a word, as codes."""
    rotated = word << 12 & 0xFFFFFFFF | word >> 20
    words = [word & 0x81808180 | word >> 8 & 0x00400040, word << 2 & 0x81C081C0, word << 6 & 0x81C081C0]
    words.append(rotated & 0x81C081C0)
    return [tuple((w >> at + 12 & 8) | (w >> at + 6 & 7) for at in (0, 16)) for w in words]  # type: ignore[misc]


def test_words_are_what_the_kernel_expands() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (48, 192), generator=generator, dtype=torch.uint8)
    codes[:16, :8] = torch.arange(16, dtype=torch.uint8)[:, None]
    scale = torch.full((48, 6), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    plain = padless.BlockScaledTensor(layouts.pack_fp4(codes), scale, MXFP4)
    words = layouts.to_repacked(plain).data.view(torch.uint8).view(torch.int32).flatten().tolist()
    for row, octet in itertools.product(range(48), range(24)):
        tile, lies = row // 16 * 3 + octet // 8, row % 16 ^ (3 if octet // 8 % 2 else 0)
        wanted = codes[row, 8 * octet : 8 * octet + 8].tolist()
        word = words[tile * 128 + lies * 8 + octet % 8] & 0xFFFFFFFF
        assert halves_of(word) == [(wanted[i], wanted[i + 4]) for i in range(4)]


@pytest.mark.parametrize("shape", [(3, 32, 64), (48, 192), (1, 16, 64), (5, 16, 320)])
def test_there_and_back(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(layouts, "_REPACKED_AT_A_TIME", 12)  # so that no tensor is one piece
    plain = weights(*shape)
    there = layouts.to_repacked(plain)
    assert there.format == MXFP4_REPACKED != MXFP4
    assert there.shape == plain.shape
    assert there.scale is plain.scale
    assert not same(there.data, plain.data)
    assert same(layouts.from_repacked(there).data, plain.data)
    assert torch.equal(padless.dequantize(there), padless.dequantize(plain))
    again = pickle.loads(pickle.dumps(there))
    assert again.format == MXFP4_REPACKED
    assert same(again.data, there.data)


def test_quantize_makes_them() -> None:
    x = torch.randn(2, 16, 64)
    assert same(padless.quantize(x, MXFP4_REPACKED, kind="weight").data, layouts.to_repacked(weights_of(x)).data)
    blocked = padless.quantize(x, MXFP4_REPACKED, kind="weight", scale_layout="blocked")
    assert blocked.scale_layout == "blocked"
    with pytest.raises(ValueError, match="format must be one of"):
        padless.quantize(x[0], MXFP4_REPACKED)
    with pytest.raises(ValueError, match="offs must be None"):
        padless.quantize(x, MXFP4_REPACKED, kind="weight", offs=OFFS)


def weights_of(x: torch.Tensor) -> padless.BlockScaledTensor:
    return padless.quantize(x, MXFP4, kind="weight")


TILES = [
    {"block_m": m, "block_n": n, "num_warpgroups": w}
    for m, n, w in ((8, 256, 4), (32, 256, 4), (64, 128, 2), (128, 256, 2))
]


@pytest.mark.parametrize(("tile", "layout"), [*zip(TILES, ("plain", "blocked") * 2, strict=True)], ids=str)
def test_products_have_the_bits_of_the_weights_as_they_were(tile: dict[str, int], layout: str) -> None:
    """K that ends inside of a block of 128, scales with a second factor."""
    plain = weights(3, 144, 448, seed=2)
    scale = plain.scale.view(torch.uint8).clone()
    scale[1, 3, 2], scale[2, 70, 12] = 131, 129  # beyond what a bf16 factor holds
    scale = scale.view(torch.float8_e8m0fnu)
    plain = padless.BlockScaledTensor(
        plain.data, layouts.to_blocked(scale) if layout == "blocked" else scale, MXFP4, None, layout
    )
    a = torch.randn(72, 448, generator=torch.Generator().manual_seed(3)).bfloat16()
    config = Sm90Bf16Config("BF16", "MXFP4", **tile)
    got, want = (
        padless.grouped_gemm(a, w, OFFS, backend="emulator", config=config)[:70]
        for w in (layouts.to_repacked(plain), plain)
    )
    assert same(got, want)
    exact = grouped_gemm_reference(a, plain, OFFS, out_dtype=torch.float64, accumulate="float64")[:70]
    assert ((got - exact).norm(dim=1) / exact.norm(dim=1)).max() < 2**-8


@pytest.mark.parametrize("tokens", [1, 17])
def test_layers(tokens: int) -> None:
    """gpt-oss' gate in the epilogue, in one launch and in several."""
    w13, w2 = (layouts_blocked(weights(4, n, k, seed=n)) for n, k in ((384, 320), (320, 192)))
    x = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    chosen, ids = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(5)).topk(2)
    bias = torch.randn(4, 384) / 4
    options = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0, "bias13": bias}
    for backend in ("emulator", "reference"):
        want = moe(x, ids, chosen, w13, w2, activations=torch.bfloat16, backend=backend, **options)  # type: ignore[arg-type]
        got = moe(x, ids, chosen, *map(layouts.to_repacked, (w13, w2)), backend=backend, **options)  # type: ignore[arg-type]
        assert same(got, want), backend
        assert got.count_nonzero() > got.numel() // 2


def layouts_blocked(t: padless.BlockScaledTensor) -> padless.BlockScaledTensor:
    return padless.BlockScaledTensor(t.data, layouts.to_blocked(t.scale), MXFP4, None, "blocked")


def test_what_else_would_read_them_is_refused() -> None:
    there = layouts.to_repacked(weights(3, 64, 64))
    a = torch.randn(70, 64)
    for activations in (FP8_BLOCK, MXFP8, MXFP4, NVFP4):
        with pytest.raises(ValueError, match="b has format MXFP4_REPACKED"):
            padless.grouped_gemm(padless.quantize(a, activations), there, OFFS, backend="reference")
    with pytest.raises(ValueError, match=r"no kernel for sm_100a"):
        padless.grouped_gemm(a.bfloat16(), there, OFFS, backend="emulator:sm_100a")
    with pytest.raises(ValueError, match="from_repacked"):
        LoraExperts(there, there)
    with pytest.raises(ValueError, match="weights must be MXFP4 of kind"):
        layouts.to_repacked(there)
    with pytest.raises(ValueError, match="weights must be MXFP4_REPACKED of kind"):
        layouts.from_repacked(weights(3, 64, 64))
    for n, k in ((24, 64), (32, 96)):
        with pytest.raises(ValueError, match="N a multiple of 16 and K of 64"):
            layouts.to_repacked(weights(3, n, k))
