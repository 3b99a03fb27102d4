"""Other people's checkpoints: every convention, against decoding written out here from its description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from padless import layouts
from padless.checkpoints import (
    Checkpoint,
    concatenate_rows,
    from_compressed_tensors,
    from_deepseek,
    from_gpt_oss,
    from_torch,
    stack_experts,
)
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledTensor
from padless.quantization.quantize import dequantize, quantize
from support import slow_formats

safetensors = pytest.importorskip("safetensors.torch")

E2M1 = [float(slow_formats.E2M1.decode(c)) for c in range(16)]


def random_bytes(*shape: int, seed: int, below: int = 256) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def e4m3(*shape: int, seed: int) -> torch.Tensor:
    """Any finite non-negative e4m3 numbers."""
    return random_bytes(*shape, seed=seed, below=0x7F).view(torch.float8_e4m3fn)


def codes_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """(.., K) float64 values, byte by byte: the low half first."""
    values = [[E2M1[b & 15], E2M1[b >> 4]] for b in packed.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(*packed.shape[:-1], -1)


def decoded(packed: torch.Tensor, scale: torch.Tensor, block: int, global_scale: object = 1.0) -> torch.Tensor:
    """float32 values of FP4 codes and plain scales, from float64."""
    per_element = scale.to(torch.float64).repeat_interleave(block, -1)[..., : 2 * packed.shape[-1]]
    return (codes_of_bytes(packed) * per_element * torch.as_tensor(global_scale, dtype=torch.float64)).float()


@pytest.fixture
def nvfp4_parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed (130, 24), scale (130, 3), decode global scale."""
    return random_bytes(130, 24, seed=1), e4m3(130, 3, seed=2), torch.tensor(0.0123)


# --- DeepSeek --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_deepseek_scales_multiply(dtype: torch.dtype) -> None:
    weight = (random_bytes(200, 144, seed=3, below=0x7F)).view(torch.float8_e4m3fn)
    scale_inv = (2.0 ** torch.randint(-9, 3, (2, 2), generator=torch.Generator().manual_seed(4))).to(dtype)
    t = from_deepseek(weight, scale_inv)
    assert t.format is FP8_BLOCK
    assert t.is_weight
    values = dequantize(t)
    for n, k in ((0, 0), (127, 127), (128, 127), (127, 128), (199, 143)):
        exact = slow_formats.E4M3.decode(weight.view(torch.uint8)[n, k].item())
        assert values[n, k].item() == float(exact) * scale_inv.float()[n // 128, k // 128].item()


def test_deepseek_scales_of_another_block_size_are_refused() -> None:
    weight = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale must have shape"):
        from_deepseek(weight, torch.ones(4, 4))


def test_deepseek_experts_from_files(tmp_path: Path) -> None:
    """Experts spread over two files, by the names DeepSeek-V3 uses."""
    experts = [quantize(torch.randn(136, 144), FP8_BLOCK, kind="weight") for _ in range(3)]
    for part, members in enumerate(([0, 2], [1])):
        tensors = {}
        for g in members:
            tensors[f"model.layers.3.mlp.experts.{g}.down_proj.weight"] = experts[g].data
            tensors[f"model.layers.3.mlp.experts.{g}.down_proj.weight_scale_inv"] = experts[g].scale
        safetensors.save_file(tensors, tmp_path / f"model-{part}.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        stacked = checkpoint.experts("model.layers.3.mlp.experts.{}.down_proj", 3)
    assert stacked.shape == (3, 136, 144)
    assert stacked.is_weight
    for g in range(3):
        assert torch.equal(stacked.data[g].view(torch.uint8), experts[g].data.view(torch.uint8))
        assert torch.equal(stacked.scale[g], experts[g].scale)


# --- NVFP4 -----------------------------------------------------------------------------------------------


def test_compressed_tensors_divides_by_its_global_scale(nvfp4_parts: tuple) -> None:
    packed, scale, _ = nvfp4_parts
    encode = torch.tensor([81.25])
    t = from_compressed_tensors(packed, scale, encode)
    assert t.format is NVFP4
    assert t.global_scale.shape == ()
    assert t.global_scale.item() == float(slow_formats.fl32(1 / slow_formats.Fraction(81.25)))
    assert torch.equal(dequantize(t), decoded(packed, scale, 16, t.global_scale))


def test_torch_multiplies_by_its_global_scale(nvfp4_parts: tuple) -> None:
    packed, scale, global_scale = nvfp4_parts
    for data in (packed, packed.view(torch.float4_e2m1fn_x2)):
        t = from_torch(data, scale, global_scale)
        assert torch.equal(dequantize(t), decoded(packed, scale, 16, global_scale))
    assert torch.equal(dequantize(from_torch(packed, scale)), decoded(packed, scale, 16))


def test_tiled_scales_are_recognised(nvfp4_parts: tuple) -> None:
    packed, scale, global_scale = nvfp4_parts
    tiles = layouts.to_blocked(scale)
    want = decoded(packed, scale, 16, global_scale)
    for shape in ((-1,), (64, 16)):
        assert torch.equal(dequantize(from_torch(packed, tiles.view(shape), global_scale)), want)
    # As many bytes as plain scales would have: the shape still tells them apart.
    packed, scale = random_bytes(128, 32, seed=5), e4m3(128, 4, seed=6)
    tiles = layouts.to_blocked(scale).view(32, 16)
    assert torch.equal(dequantize(from_torch(packed, tiles)), decoded(packed, scale, 16))


def test_stacked_weights_with_a_global_scale_each() -> None:
    packed, scale = random_bytes(2, 128, 32, seed=7), e4m3(2, 128, 4, seed=8)
    global_scale = torch.tensor([0.5, 3.0])
    want = decoded(packed, scale, 16, global_scale.view(2, 1, 1))
    t = from_torch(packed, scale, global_scale.view(2, 1, 1))
    assert t.global_scale.shape == (2,)
    assert torch.equal(dequantize(t), want)
    tiles = layouts.to_blocked(scale).view(2, 32, 16)
    assert torch.equal(dequantize(from_torch(packed, tiles, global_scale)), want)


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt", "torch", "torchao"])
def test_nvfp4_from_a_file(convention: str, nvfp4_parts: tuple, tmp_path: Path) -> None:
    packed, scale, global_scale = nvfp4_parts
    name, metadata = "model.layers.0.mlp.up_proj", {}
    if convention == "compressed-tensors":
        global_scale = 1.0 / torch.tensor([64.0])
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([64.0])}
    elif convention == "torchao":
        tensors = {"_weight_qdata": packed, "_weight_scale": scale, "_weight_per_tensor_scale": global_scale}
        metadata = {f"{name}.weight": json.dumps({"_type": "NVFP4Tensor", "_data": {"block_size": 16}})}
    else:
        data = packed if convention == "modelopt" else packed.view(torch.float4_e2m1fn_x2)
        tensors = {"weight": data, "weight_scale": scale, "weight_scale_2": global_scale}
    path = tmp_path / "model.safetensors"
    safetensors.save_file({f"{name}.{key}": t for key, t in tensors.items()}, path, metadata=metadata)
    with Checkpoint(path) as checkpoint:
        assert f"{name}.{next(iter(tensors))}" in checkpoint
        t = checkpoint.weight(name)
    assert torch.equal(dequantize(t), decoded(packed, scale, 16, global_scale.reshape(())))


def test_another_tensor_of_torchao_is_refused(nvfp4_parts: tuple, tmp_path: Path) -> None:
    packed, scale, _ = nvfp4_parts
    path = tmp_path / "model.safetensors"
    metadata = {"a.weight": json.dumps({"_type": "Int4Tensor", "_data": {}})}
    safetensors.save_file({"a._weight_qdata": packed, "a._weight_scale": scale}, path, metadata=metadata)
    with Checkpoint(path) as checkpoint, pytest.raises(ValueError, match="'a' is a Int4Tensor"):
        checkpoint.weight("a")


# --- MX --------------------------------------------------------------------------------------------------


def test_gpt_oss_blocks() -> None:
    blocks, scales = random_bytes(2, 24, 3, 16, seed=9), random_bytes(2, 24, 3, seed=10, below=255)
    t = Checkpoint({"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}).weight(
        "mlp.experts.down_proj"
    )
    assert t.format is MXFP4
    assert t.logical_shape == (2, 24, 96)
    want = decoded(blocks.flatten(-2), 2.0 ** (scales.to(torch.float64) - 127), 32)
    assert torch.equal(dequantize(t), want)


def test_mx_weights_of_compressed_tensors_and_torchao() -> None:
    packed, scale = random_bytes(130, 48, seed=11), random_bytes(130, 3, seed=12, below=255)
    want = decoded(packed, 2.0 ** (scale.to(torch.float64) - 127), 32)
    t = Checkpoint({"up.weight_packed": packed, "up.weight_scale": scale}).weight("up")
    assert t.format is MXFP4
    assert torch.equal(dequantize(t), want)
    e8m0 = scale.view(torch.float8_e8m0fnu)
    t = Checkpoint({"e._up_qdata": packed, "e._up_scale": layouts.to_blocked(e8m0)}).weight("e.up")
    assert torch.equal(dequantize(t), want)
    weight = quantize(torch.randn(9, 64), MXFP8, kind="weight")
    t = Checkpoint({"w._weight_qdata": weight.data, "w._weight_scale": weight.scale}).weight("w")
    assert t.format is MXFP8
    assert torch.equal(dequantize(t), dequantize(weight))


# --- putting weights together ----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [FP8_BLOCK, MXFP4, NVFP4], ids=lambda f: f.name)
def test_stack_experts_keeps_every_value(fmt: object) -> None:
    weights = [quantize(torch.randn(136, 96) * 10.0**g, fmt, kind="weight") for g in range(3)]
    stacked = stack_experts(weights)
    assert stacked.logical_shape == (3, 136, 96)
    for g in range(3):
        assert torch.equal(dequantize(stacked)[g], dequantize(weights[g]))


@pytest.mark.parametrize("fmt", [FP8_BLOCK, MXFP4, NVFP4], ids=lambda f: f.name)
def test_concatenate_rows_keeps_every_value(fmt: object) -> None:
    options = {"global_scale": 0.01} if fmt is NVFP4 else {}
    gate, up = (quantize(torch.randn(2, n, 96), fmt, kind="weight", **options) for n in (128, 72))
    both = concatenate_rows([gate, up])
    assert both.logical_shape == (2, 200, 96)
    assert torch.equal(dequantize(both), torch.cat([dequantize(gate), dequantize(up)], dim=1))


def weight(rows: int, K: int, fmt: object = FP8_BLOCK, **options: object) -> BlockScaledTensor:
    return quantize(torch.ones(rows, K), fmt, kind="weight", **options)


WRONG = {
    "weights must not be empty": lambda: stack_experts([]),
    "weights must be FP8_BLOCK with scales of weights, weights[1] is MXFP8": lambda: stack_experts(
        [weight(4, 128), weight(4, 128, MXFP8)]
    ),
    "weights must all be (4, 128), weights[1] is (5, 128)": lambda: stack_experts([weight(4, 128), weight(5, 128)]),
    "weights must agree in K": lambda: concatenate_rows([weight(128, 128), weight(128, 256)]),
    "weights[0] has N = 72; before another one it must be a multiple of 128": lambda: concatenate_rows(
        [weight(72, 128), weight(128, 128)]
    ),
    "weights[1] has another global_scale than weights[0]": lambda: concatenate_rows(
        [weight(4, 32, NVFP4, global_scale=1.0), weight(4, 32, NVFP4, global_scale=2.0)]
    ),
    "data must be uint8 or float4_e2m1fn_x2": lambda: from_torch(torch.zeros(4, 4), e4m3(4, 1, seed=1)),
    "scale must be float8_e4m3fn, float8_e8m0fnu or uint8, got torch.float32": lambda: from_torch(
        random_bytes(4, 8, seed=1), torch.ones(4, 1)
    ),
    "scale must have shape (4, 1), or be 32x4x4 tiles of shape (512,) or (32, 16), got (4, 2)": lambda: from_torch(
        random_bytes(4, 8, seed=1), e4m3(4, 2, seed=1)
    ),
    "global_scale must be None beside power-of-two scales": lambda: from_compressed_tensors(
        random_bytes(4, 16, seed=1), random_bytes(4, 1, seed=1), torch.ones(1)
    ),
    "blocks must be uint8 (.., N, K / 32, 16)": lambda: from_gpt_oss(
        random_bytes(4, 16, seed=1), random_bytes(4, 1, seed=1)
    ),
    "name must be a quantized weight in a known convention; under 'up' there is ['up.weight']": lambda: Checkpoint(
        {"up.weight": torch.ones(2, 2)}
    ).weight("up"),
    "which has no 'down'": lambda: Checkpoint({}).tensor("down"),
    "source must be a .safetensors file or a folder of them": lambda: Checkpoint("/nowhere"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_parts_are_named(message: str) -> None:
    with pytest.raises(ValueError) as error:
        WRONG[message]()
    assert message in str(error.value)
