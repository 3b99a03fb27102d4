"""`load_experts`: every layout of a layer's experts, bit for bit and through `padless.moe`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor, dequantize, quantize
from padless.checkpoints import Checkpoint
from padless.integrations.checkpoints import load_experts
from padless.layouts import plain_scale
from padless.moe import moe

EXPERTS, H, INTER = 5, 256, 128
PREFIX = "model.layers.3.mlp.experts"
Tensors = dict[str, torch.Tensor]


def drawn(format: BlockScaledFormat, *, gated: bool = True) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """w13 (E, 2 I, H) and w2 (E, H, I), every expert of another size; NVFP4 with a global scale an expert."""
    g = torch.Generator().manual_seed(1)
    size = torch.rand(EXPERTS, 1, 1, generator=g) + 0.5
    weights = []
    for n, k in (((2 if gated else 1) * INTER, H), (H, INTER)):
        values = torch.randn(EXPERTS, n, k, generator=g) * size / k**0.5
        more = {"global_scale": 0.01 * size.flatten()} if format == NVFP4 else {}
        weights.append(quantize(values, format, kind="weight", scale_layout="plain", **more))
    return weights[0], weights[1]


def parts(t: BlockScaledTensor, rows: slice, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some rows of one expert."""
    block = t.format.weight_block[0]
    scale = t.scale.contiguous().view(torch.uint8).view(*t.scale.shape, -1)
    scale = scale[expert, rows.start // block : rows.stop // block].contiguous().view(t.scale.dtype)[..., 0]
    data = t.data.view(torch.uint8)[expert, rows].contiguous()
    return data if t.format.codes_per_byte == 2 else data.view(t.data.dtype), scale.contiguous()


def one_by_one(
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    names: tuple[str, str, str],
    store: Callable[[str, torch.Tensor, torch.Tensor, Any], Tensors],
) -> Tensors:
    tensors: Tensors = {}
    gated = w13.data.shape[1] == 2 * INTER
    for e in range(EXPERTS):
        for name, t, rows in (
            (names[0], w13, slice(0, INTER)),
            (names[1], w13, slice(INTER, 2 * INTER) if gated else slice(0, INTER)),
            (names[2], w2, slice(0, H)),
        ):
            if gated or name != names[0]:
                one = None if t.global_scale is None else t.global_scale[e].clone()
                tensors |= store(f"{PREFIX}.{e}.{name}", *parts(t, rows, e), one)
    return tensors


def deepseek(name: str, codes: torch.Tensor, scale: torch.Tensor, _: Any) -> Tensors:
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def deepseek_v4(name: str, codes: torch.Tensor, scale: torch.Tensor, _: Any) -> Tensors:
    return {f"{name}.weight": codes.view(torch.int8), f"{name}.scale": scale}


def fp4_float_scales(name: str, codes: torch.Tensor, scale: torch.Tensor, _: Any) -> Tensors:
    return {f"{name}.weight": codes.view(torch.int8), f"{name}.weight_scale_inv": scale.float()}


def compressed_tensors(name: str, codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> Tensors:
    return {
        f"{name}.weight_packed": codes,
        f"{name}.weight_scale": scale,
        f"{name}.weight_global_scale": (1 / one).reshape(1),
        f"{name}.input_global_scale": torch.tensor([64.0]),
    }


def modelopt(name: str, codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> Tensors:
    smaller = "up_proj" in name  # what gate and up read is the same, so the larger of two scales holds
    return {
        f"{name}.weight": codes,
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": one,
        f"{name}.input_scale": torch.tensor(0.01 if smaller else 0.02) * (1 + int(name.split(".")[-2])),
    }


def torchao(name: str, codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor) -> Tensors:
    return {f"{name}._weight_qdata": codes, f"{name}._weight_scale": scale, f"{name}._weight_per_tensor_scale": one}


HUB, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
LAYOUTS: dict[str, tuple[BlockScaledFormat, tuple[str, str, str], Any]] = {
    "qwen3": (FP8_BLOCK, HUB, deepseek),
    "mixtral": (FP8_BLOCK, MIXTRAL, deepseek),
    "ue8m0": (MXFP8, HUB, deepseek),
    "deepseek-v4": (MXFP4, MIXTRAL, deepseek_v4),
    "fp4": (MXFP4, HUB, fp4_float_scales),
    "compressed-tensors": (NVFP4, HUB, compressed_tensors),
    "modelopt": (NVFP4, HUB, modelopt),
    "torchao": (NVFP4, HUB, torchao),
}


def same_bits(got: BlockScaledTensor, want: BlockScaledTensor) -> None:
    assert got.format == want.format
    assert got.shape == want.shape
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(plain_scale(got).float(), plain_scale(want).float())
    if want.global_scale is not None:
        assert got.global_scale is not None
        torch.testing.assert_close(got.global_scale, want.global_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_by_one(layout: str, tmp_path: Path) -> None:
    """From a file; all experts, and some of them in another order."""
    format, names, store = LAYOUTS[layout]
    w13, w2 = drawn(format)
    save_file(one_by_one(w13, w2, names, store), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        found = load_experts(checkpoint, PREFIX)
        some = load_experts(checkpoint, PREFIX, experts=[4, 1])
    same_bits(found.w13, w13)
    same_bits(found.w2, w2)
    assert found.options["gate_up"] == "concatenated"
    for got, want in ((some.w13, w13), (some.w2, w2)):
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8)[[4, 1]])
        assert torch.equal(dequantize(got, torch.float32), dequantize(want, torch.float32)[[4, 1]]) or (
            layout == "compressed-tensors"  # the reciprocal of a reciprocal
        )


def test_through_the_layer() -> None:
    """The call that the module's docstring shows equals the one with the tensors that were stored."""
    x = torch.randn(23, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids = torch.rand(23, EXPERTS, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :2]
    weights = torch.rand(23, 2, generator=torch.Generator().manual_seed(4))
    w13, w2 = drawn(FP8_BLOCK)
    found = load_experts(Checkpoint(one_by_one(w13, w2, HUB, deepseek)), PREFIX)
    got = moe(x, ids, weights, found.w13, found.w2, **found.options)
    assert torch.equal(got, moe(x, ids, weights, w13, w2))
    swapped = load_experts(Checkpoint(one_by_one(w13, w2, ("w3", "w1", "w2"), deepseek)), PREFIX)
    assert not torch.equal(moe(x, ids, weights, swapped.w13, swapped.w2), got)


def test_input_scales() -> None:
    """compressed-tensors' divide and are one for all; ModelOpt's multiply, one an expert, gate's the larger."""
    w13, w2 = drawn(NVFP4)
    found = load_experts(Checkpoint(one_by_one(w13, w2, HUB, compressed_tensors)), PREFIX)
    for name in ("global_scale1", "global_scale2"):
        assert torch.equal(found.options[name], torch.tensor(1 / 64))
    found = load_experts(Checkpoint(one_by_one(w13, w2, HUB, modelopt)), PREFIX, experts=[0, 2])
    torch.testing.assert_close(found.options["global_scale1"], torch.tensor([0.02, 0.06]))
    assert "global_scale1" not in load_experts(Checkpoint(one_by_one(w13, w2, HUB, torchao)), PREFIX).options
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, weights = torch.tensor([[0, 1]] * 9), torch.ones(9, 2)
    assert moe(x, ids, weights, found.w13, found.w2, **found.options).isfinite().all()


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, MXFP4, NVFP4], ids=lambda format: format.name)
def test_at_once(format: BlockScaledFormat) -> None:
    """As transformers saves experts, and NVFP4 as torchao does: one tensor for all, scales beside it."""
    w13, w2 = drawn(format)
    tensors: Tensors = {}
    for name, t in (("gate_up_proj", w13), ("down_proj", w2)):
        if format == NVFP4:
            tensors |= torchao(f"{PREFIX}.{name}", t.data.view(torch.uint8), t.scale, t.global_scale)
            continue
        tensors[f"{PREFIX}.{name}"] = t.data.view(torch.int8) if format == MXFP4 else t.data
        tensors[f"{PREFIX}.{name}_scale_inv"] = t.scale
    found, some = (load_experts(Checkpoint(tensors), PREFIX, experts) for experts in (None, range(2, 4)))
    same_bits(found.w13, w13)
    same_bits(found.w2, w2)
    assert found.options == {"gate_up": "concatenated"}
    for got, want in ((some.w13, w13), (some.w2, w2)):
        assert torch.equal(dequantize(got), dequantize(want)[2:4])


def test_scales_without_dimensions_of_one() -> None:
    """transformers 5.17 saves them so: (1, K / 128) and (N / 128, 1) scales as vectors."""
    w13, w2 = drawn(FP8_BLOCK)
    tensors = {name: t.squeeze() if "scale" in name else t for name, t in one_by_one(w13, w2, HUB, deepseek).items()}
    found = load_experts(Checkpoint(tensors), PREFIX)
    same_bits(found.w13, w13)
    same_bits(found.w2, w2)
    first = f"{PREFIX}.0.gate_proj.weight_scale_inv"
    tensors[first] = tensors[first].reshape(-1)[:1]
    with pytest.raises(ValueError, match=r"the scales of .* have shape"):
        load_experts(Checkpoint(tensors), PREFIX)


def test_gpt_oss() -> None:
    w13, w2 = drawn(MXFP4)
    bias13, bias2 = torch.randn(EXPERTS, 2 * INTER).bfloat16(), torch.randn(EXPERTS, H).bfloat16()
    tensors: Tensors = {}
    for name, t, bias in (("gate_up_proj", w13, bias13), ("down_proj", w2, bias2)):
        tensors[f"{PREFIX}.{name}_blocks"] = t.data.view(torch.uint8).unflatten(-1, (-1, 16))
        tensors[f"{PREFIX}.{name}_scales"] = t.scale.view(torch.uint8)
        tensors[f"{PREFIX}.{name}_bias"] = bias
    found = load_experts(Checkpoint(tensors), PREFIX)
    same_bits(found.w13, w13)
    same_bits(found.w2, w2)
    assert found.options["gate_up"] == "alternating"
    assert torch.equal(found.options["bias13"], bias13.float())
    assert torch.equal(load_experts(Checkpoint(tensors), PREFIX, [3]).options["bias2"], bias2[3:4].float())


def test_without_a_gate() -> None:
    w13, w2 = drawn(FP8_BLOCK, gated=False)
    found = load_experts(Checkpoint(one_by_one(w13, w2, HUB, deepseek)), PREFIX)
    same_bits(found.w13, w13)
    assert "gate_up" not in found.options


def test_what_cannot_be_read() -> None:
    w13, w2 = drawn(NVFP4)
    tensors = one_by_one(w13, w2, HUB, compressed_tensors)
    checkpoint = Checkpoint(tensors)
    with pytest.raises(ValueError, match=r"experts is \[0, 5\] .* from 0 to 4"):
        load_experts(checkpoint, PREFIX, [0, 5])
    with pytest.raises(ValueError, match=r"prefix is 'model[.]layers[.]4"):
        load_experts(checkpoint, "model.layers.4.mlp.experts")
    plain = {f"{PREFIX}.0.{name}.weight": torch.randn(8, 8) for name in HUB}
    with pytest.raises(ValueError, match="has no quantized experts there"):
        load_experts(Checkpoint(plain), PREFIX)
    tensors[f"{PREFIX}.2.up_proj.weight_global_scale"] *= 2
    with pytest.raises(ValueError, match="another global_scale"):
        load_experts(checkpoint, PREFIX)
