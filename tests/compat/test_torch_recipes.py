"""Recipes of torch's call with one-byte scales, and products along groups; layouts are made here by their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

import padless
from padless.compat.torch_recipes import columns
from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledTensor

ROWS, SQUARES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
RECIPES = {format.name: ScalingType.BlockWise1x32 for format in (MXFP8, MXFP8_E5M2, MXFP4)}
RECIPES["NVFP4"] = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
TILES, PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE
SIZES = (1, 0, 129, 127)  # of 270 rows: 13 are in no group
M, N, K = 270, 72, 288
OFFS = padless.group_offsets(SIZES)
PAIRS = [(MXFP8, MXFP8), (MXFP8_E5M2, MXFP8), (MXFP4, MXFP4), (NVFP4, NVFP4), (MXFP8, MXFP4)]


def tiles(scale: torch.Tensor) -> torch.Tensor:
    """(R, C) scales in tiles of 128 x 4, 512 bytes each, by the formula: (bytes,) with junk where no scale is."""
    (rows, cols), codes = scale.shape, scale.view(torch.uint8)
    across = -(-cols // 4)
    out = torch.full((-(-rows // 128) * across * 512,), 0x7B, dtype=torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    out[((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = codes
    return out


def operands(a_format: Any, b_format: Any) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((M, K), generator=generator) * torch.rand((M, 1), generator=generator).mul(6).exp2()
    w = torch.randn((len(SIZES), N, K), generator=generator) * torch.tensor([1.0, 3.0, 0.2, 9.0])[:, None, None]
    a = padless.quantize(x, a_format, **({"offs": OFFS} if a_format is NVFP4 else {}))
    return a, padless.quantize(w, b_format, kind="weight", scale_layout="plain")


def call(a: BlockScaledTensor, b: BlockScaledTensor, swizzled: bool, **changes: Any) -> torch.Tensor:
    scale_a, scale_b, swizzle = a.scale, b.scale, TILES if swizzled else PLAIN
    if swizzled:
        ends = OFFS.tolist()
        of_groups = [tiles(a.scale[i:j]) for i, j in zip([0, *ends], ends, strict=False)]
        spare = -(-M // 128) * 128 + len(SIZES) * 128  # as torchao allocates
        whole = torch.full((spare, -(-a.scale.shape[1] // 4) * 4), 0x7B, dtype=torch.uint8)
        whole.view(-1)[: sum(len(part) for part in of_groups)] = torch.cat(of_groups)
        scale_a = whole.view(a.scale.dtype)
        scale_b = torch.stack([tiles(one) for one in b.scale]).view(b.scale.dtype)
    arguments = {
        "mat_a": a.data,
        "mat_b": b.data.transpose(-2, -1),
        "scale_a": scale_a if a.global_scale is None else [scale_a, a.global_scale],
        "scale_recipe_a": RECIPES[a.format.name],
        "scale_b": scale_b if b.global_scale is None else [scale_b, b.global_scale],
        "scale_recipe_b": RECIPES[b.format.name],
        "swizzle_a": swizzle,
        "swizzle_b": [swizzle, PLAIN] if b.format is NVFP4 else swizzle,
        "offs": OFFS,
        **changes,
    }
    return padless.scaled_grouped_mm(**arguments)


@pytest.mark.parametrize("swizzled", [True, False], ids=["32x4x4", "plain"])
@pytest.mark.parametrize(("a_format", "b_format"), PAIRS, ids=lambda format: format.name)
def test_recipes_of_one_byte_scales(a_format: Any, b_format: Any, swizzled: bool) -> None:
    a, b = operands(a_format, b_format)
    out = call(a, b, swizzled, output_dtype=torch.float32)
    assert torch.equal(out[:257], padless.grouped_gemm(a, b, OFFS, out_dtype=torch.float32)[:257])
    values = padless.dequantize(a, offs=OFFS if a_format is NVFP4 else None).double()
    weights, start = padless.dequantize(b).double(), 0
    for group, end in enumerate(OFFS.tolist()):
        exact = values[start:end] @ weights[group].T
        error = (out[start:end] - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error < 1e-5).all(), group
        start = end


def test_a_swizzle_that_is_not_said_is_a_sentence_and_a_wrong_one_another_number() -> None:
    """Where every shape is a multiple of a tile, shapes cannot tell plain scales from tiles."""
    a, b = operands(MXFP8, MXFP8)
    for name in ("swizzle_a", "swizzle_b"):
        with pytest.raises(ValueError, match=f"{name} is None; pass SwizzleType.SWIZZLE_32_4_4 or"):
            call(a, b, True, **{name: None})
    whole = padless.quantize(torch.randn(128, 128), MXFP8)
    weights = padless.quantize(torch.randn(1, N, 128), MXFP8, kind="weight")
    given = {"mat_a": whole.data, "mat_b": weights.data.transpose(-2, -1), "scale_b": weights.scale}
    given |= {"swizzle_b": PLAIN, "offs": padless.group_offsets([128]), "scale_a": whole.scale}
    plain = call(a, b, False, **given)
    assert torch.equal(plain, padless.grouped_gemm(whole, weights, padless.group_offsets([128])))
    in_tiles = tiles(whole.scale).view(128, 4).view(whole.scale.dtype)
    assert torch.equal(call(a, b, False, **{**given, "scale_a": in_tiles, "swizzle_a": TILES}), plain)
    assert not torch.equal(call(a, b, False, **{**given, "swizzle_a": TILES}), plain)


def test_one_scale_of_a_tensor_and_none() -> None:
    a, b = operands(NVFP4, NVFP4)
    shared = torch.tensor(0.25)
    one = BlockScaledTensor(a.data, a.scale, NVFP4, shared)
    out = call(one, b, True)
    assert torch.equal(out[:257], padless.grouped_gemm(one, b, OFFS)[:257])
    alone = {"scale_a": a.scale, "scale_recipe_a": ScalingType.BlockWise1x16, "swizzle_a": PLAIN}
    none = padless.grouped_gemm(BlockScaledTensor(a.data, a.scale, NVFP4), b, OFFS)
    assert torch.equal(call(a, b, False, **alone)[:257], none[:257])
    assert torch.equal(call(a, b, False, contraction_dim=(-1, -2), **alone)[:257], none[:257])


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (MXFP8, {"scale_recipe_a": ScalingType.BlockWise1x16}, "mat_a is torch.float8_e4m3fn; .*1x16 scales torch.float4"),
    (MXFP8, {"scale_recipe_b": [ScalingType.BlockWise1x32, ScalingType.TensorWise]}, "scale_recipe_b is"),
    (MXFP8, {"scale_recipe_a": ScalingType.TensorWise}, "scale_recipe_a is .*; supported: .*1x128, .*1x32, .*1x16"),
    (MXFP8, {"scale_a": torch.ones(M, K // 32)}, "scale_a's scale must be torch.float8_e8m0fnu blocks, got"),
    (MXFP8, {"scale_a": torch.ones(4).to(torch.float8_e8m0fnu)}, "scale_a is .*2-D and contiguous, 1536 bytes"),
    (MXFP8, {"scale_a": torch.ones(384, 12).to(torch.float8_e8m0fnu)}, "these groups have 6144 bytes of tiles"),
    (MXFP8, {"scale_b": torch.ones(4, N, 9).to(torch.float8_e8m0fnu)}, r"with a swizzle .*= \(4, 1536\)"),
    (MXFP8, {"swizzle_b": PLAIN}, r"without a swizzle .*\(G, N, K blocks\) = \(4, 72, 9\)"),
    (MXFP8, {"swizzle_a": "32"}, "swizzle_a is 32; pass"),
    (NVFP4, {"scale_a": [torch.ones(1)]}, "scale_a must be a list of 2 tensors"),
    (MXFP8, {"offs": [1, 1, 130, 257]}, "offs must be a 1-D tensor of integers"),
]


@pytest.mark.parametrize(
    ("format", "changes", "message"), BAD, ids=lambda value: "-".join(value) if type(value) is dict else ""
)
def test_a_bad_call_is_refused_in_words(format: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*operands(format, format), True, **changes)


# --- groups along the summed dimension -----------------------------------------------------------------------

T, TOKENS = 256, (32, 0, 160)  # 64 tokens in no group


def copies(square: bool) -> Any:
    """dY (48 features) and X (144) along the tokens, and junk where no group is."""
    generator = torch.Generator().manual_seed(6)
    offs = padless.group_offsets(TOKENS)
    made = []
    for features, block in ((48, (1, 128)), (144, (128, 128) if square else (1, 128))):
        values = torch.randn((T, features), generator=generator) * torch.arange(1, T + 1)[:, None]
        whole = padless.quantize_rows_columns(values.bfloat16(), offs, column_block=block, alignment=32)[1]
        data = whole.data[:, :T].clone()
        data.view(torch.uint8)[:, sum(TOKENS) :] = 0x77
        made.append((whole, data))
    return offs, *made


def given(square: bool, **changes: Any) -> dict[str, Any]:
    offs, (dy, data_a), (x, data_b) = copies(square)
    return {
        "mat_a": data_a,
        "mat_b": data_b.t(),
        "scale_a": dy.scale.t(),
        "scale_recipe_a": ROWS,
        "scale_b": x.scale,
        "scale_recipe_b": SQUARES if square else ROWS,
        "offs": offs,
        "output_dtype": torch.float32,
        **changes,
    }


@pytest.mark.parametrize("square", [True, False], ids=["1x128 by 128x128", "1x128 by 1x128"])
def test_along_groups_it_is_the_weight_gradient(square: bool) -> None:
    offs, (dy, data_a), (x, data_b) = copies(square)
    out = padless.scaled_grouped_mm(**given(square))
    assert torch.equal(out, padless.grouped_gemm_wgrad(dy, x, out_dtype=torch.float32))
    start, block = 0, 0
    for group, size in enumerate(TOKENS):
        exact = torch.zeros((48, 144), dtype=torch.float64)
        for at in range(start, start + size, 128):
            end = min(at + 128, start + size)
            scale_b = x.scale[block].double().repeat_interleave(128 if square else 1)[:144]
            left = data_a[:, at:end].double() * dy.scale[block].double()[:, None]
            exact += left @ (data_b[:, at:end].double() * scale_b[:, None]).T
            block += 1
        assert torch.allclose(out[group].double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6), group
        start += size
    strided = given(square, offs=offs.long(), scale_a=dy.scale.t().contiguous(), swizzle_a=PLAIN)
    assert torch.equal(padless.scaled_grouped_mm(**strided), out)


def test_hoppers_kernel_reads_groups_that_follow_each_other() -> None:
    """What lies behind a group is the next one, or junk, and no zeros."""
    g = given(True)
    pairs = [(g[f"{name}_a"], g[f"{name}_b"]) for name in ("mat", "scale", "scale_recipe")]
    dy, x = columns(pairs[0], pairs[1], pairs[2], (None, None), g["offs"])
    out = padless.grouped_gemm_wgrad(dy, x, out_dtype=torch.float32, backend="emulator")
    exact = padless.scaled_grouped_mm(**g)
    assert (out[1] == 0).all()
    for group in (0, 2):
        assert (out[group] - exact[group]).norm() < 1e-3 * exact[group].norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_recipe_b": ScalingType.BlockWise1x32}, "scale_recipe_b .*1x32.* of 2-D mat_a and mat_b; supported"),
        ({"offs": padless.group_offsets([16, 0, 176])}, "multiples of 32"),
        ({"offs": torch.tensor([32, 0, 64], dtype=torch.int32)}, "ends must ascend to 256 at most"),
        ({"offs": torch.tensor([32, 64, 288], dtype=torch.int32)}, "ends must ascend to 256 at most"),
        ({"offs": [32, 32, 192]}, "offs must be a 1-D int32 or int64 tensor"),
        ({"scale_b": torch.ones(2, 2)}, "scale_b 2; these groups have 3"),
        ({"scale_b": torch.ones(5, 3)}, "x.scale must be"),
        ({"output_dtype": torch.float16}, "out_dtype is torch.float16"),
        ({"mat_b": torch.zeros(T, 144).to(torch.float8_e4m3fn)}, r"mat_b must be \(K, N\) and column-major"),
        ({"mat_b": torch.zeros(144, 192).to(torch.float8_e4m3fn).t()}, "256 columns and mat_b 192 rows"),
        ({"swizzle_b": TILES}, "swizzle_b is .*leave it None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_call_along_groups_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        padless.scaled_grouped_mm(**given(True, **changes))
