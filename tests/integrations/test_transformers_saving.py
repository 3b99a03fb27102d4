"""save_pretrained after quantize_experts: files that load with and without padless, or a sentence."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat
from padless.checkpoints import Checkpoint
from padless.integrations.checkpoints import load_experts
from padless.integrations.transformers import quantize_experts
from padless.integrations.transformers.weights import expert_weights
from support.hub_checkpoints import COMMON, MODELS, error, experts_of, load, load_dequantized, logits

OLD = "expert_dtype" not in inspect.signature(FineGrainedFP8Config.__init__).parameters  # transformers 5.17
FORMS = [(name, FP8_BLOCK) for name in ("qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe")]
FORMS += [("qwen3_moe", MXFP8), ("mixtral", MXFP8), ("gpt_oss", MXFP4)]
FORMS += [] if OLD else [("qwen3_moe", MXFP4), ("deepseek_v3", MXFP4)]
BOUNDS = {FP8_BLOCK: 0.015, MXFP8: 0.015, MXFP4: 0.05}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.uint8)


def random_model(name: str, **sizes: int) -> Any:
    torch.manual_seed(5)
    config = AutoConfig.for_model(name, **(COMMON | MODELS[name] | sizes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="padless").eval()


@pytest.mark.parametrize(("name", "format"), FORMS, ids=lambda each: getattr(each, "name", each))
def test_save_and_load(name: str, format: BlockScaledFormat, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """With padless: every bit of codes, scales and logits. Without: transformers dequantizes the file to the model."""
    original = load(folder_of(name, "bf16"), experts_implementation="eager")
    model = quantize_experts(load(folder_of(name, "bf16"), experts_implementation="padless"), format)
    want = logits(model)
    with torch.device("meta"):  # where a caller has tensors made is no matter
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(model), want)
    again = load(tmp_path, experts_implementation="padless")
    for kept, read in zip(experts_of(model), experts_of(again), strict=True):
        for first, second in zip(*((w.w13, w.w2) for w in map(expert_weights, (kept, read))), strict=True):
            assert (first.format, first.shape) == (second.format, second.shape)
            assert torch.equal(bits(first.data), bits(second.data))
            assert torch.equal(bits(first.scale), bits(second.scale))
    assert torch.equal(logits(again), want)
    for parameter, kept in original.named_parameters():
        if ".experts." not in parameter:
            assert torch.equal(kept, again.get_parameter(parameter)), parameter
    if not OLD or name in ("qwen3_moe", "mixtral"):  # it raises for the others' scales, a dimension of which is 1
        assert error(logits(load_dequantized(tmp_path)), logits(original)) < BOUNDS[format]
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(bits(t), bits(second[n])) and t.dtype == second[n].dtype for n, t in first.items())


def test_the_file_is_the_hubs_form(tmp_path: Path) -> None:
    """One weight and weight_scale_inv for each projection of each expert, which `load_experts` reads too."""
    model = quantize_experts(random_model("qwen3_moe"))  # of a configuration: no file has told transformers the names
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    for projection, shape in (("gate_proj", (384, 256)), ("up_proj", (384, 256)), ("down_proj", (256, 384))):
        codes, scale = (tensors[f"{prefix}.7.{projection}.{part}"] for part in ("weight", "weight_scale_inv"))
        assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, shape)
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, tuple(n // 128 for n in shape))
    assert not [n for n in tensors if "experts.gate_up_proj" in n]
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["weight_block_size"]) == ("fp8", [128, 128])
    kept = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {"lm_head", "model.layers.0.self_attn.q_proj"} <= kept <= set(settings["modules_to_not_convert"])
    assert all(tensors[f"{n}.weight"].dtype == torch.bfloat16 for n in kept)
    built = expert_weights(experts_of(model)[1])
    with Checkpoint(tmp_path) as checkpoint:
        read = load_experts(checkpoint, prefix)
    for first, second in ((built.w13, read.w13), (built.w2, read.w2)):
        assert torch.equal(bits(first.data), bits(second.data))
        assert torch.equal(bits(first.scale), bits(second.scale))


def test_a_model_quantized_while_it_is_loaded(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """By transformers' own FineGrainedFP8Config: scales go into the file by the names of their weights."""
    model = load(
        folder_of("qwen3_moe", "bf16"), quantization_config=FineGrainedFP8Config(), experts_implementation="padless"
    )
    model.save_pretrained(tmp_path)
    assert not [n for n in load_file(tmp_path / "model.safetensors") if "experts.gate_up_proj" in n]
    assert torch.equal(logits(load(tmp_path, experts_implementation="padless")), logits(model))
    assert error(logits(load_dequantized(tmp_path)), logits(load(folder_of("qwen3_moe", "bf16")))) < 0.1


@pytest.mark.parametrize(
    ("name", "sizes", "format", "said"),
    [
        ("qwen3_moe", {}, NVFP4, "NVFP4 experts .* no form that transformers loads"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 192},
            FP8_BLOCK,
            r"\(384, 256\) and \(256, 192\), for FP8_BLOCK no multiples of 128",
        ),
        (
            "qwen3_moe",
            {"hidden_size": 320},
            FP8_BLOCK,
            r"\(768, 320\) and \(320, 384\), for FP8_BLOCK no multiples of 128",
        ),
        ("gpt_oss", {}, FP8_BLOCK, "biases"),
        ("gpt_oss", {}, NVFP4, "NVFP4 experts .* no form that transformers loads"),
    ],
)
def test_what_has_no_form_is_refused(
    name: str, sizes: dict[str, int], format: BlockScaledFormat, said: str, tmp_path: Path
) -> None:
    model = quantize_experts(random_model(name, **sizes), format)
    with pytest.raises(ValueError, match=rf"{said}.*: save the model before quantize_experts"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*"))
    assert logits(model).isfinite().all()


def softcapped(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return 3 * torch.tanh(torch.nn.functional.silu(gate) / 3) * up


def test_another_gate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' FP8 experts would compute their own."""
    model = quantize_experts(random_model("qwen3_moe"))
    monkeypatch.setattr(type(experts_of(model)[0]), "_apply_gate", softcapped)
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.mlp\.experts .*another activation.*: save the model before"
    ):
        model.save_pretrained(tmp_path)


def test_formats_that_differ_are_refused(tmp_path: Path) -> None:
    model = random_model("qwen3_moe")
    quantize_experts(model.model.layers[0], FP8_BLOCK)
    quantize_experts(model, MXFP8)
    with pytest.raises(ValueError, match=r"FP8_BLOCK and MXFP8.*: save the model before quantize_experts"):
        model.save_pretrained(tmp_path)


def test_experts_beside_another_quantizer_are_refused(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """Dense layers in FP8 by transformers, experts by padless: nothing writes both."""
    config = FineGrainedFP8Config(modules_to_not_convert=["model.layers.*.mlp.experts", "lm_head"])
    model = load(folder_of("qwen3_moe", "bf16"), quantization_config=config, experts_implementation="padless")
    assert experts_of(model)[0].gate_up_proj.dtype == torch.bfloat16
    quantize_experts(model)
    with pytest.raises(ValueError, match=r"fp8.*: save the model before quantize_experts"):
        model.save_pretrained(tmp_path)


def test_the_backbone_alone(tmp_path: Path) -> None:
    """The part of a model below its head is saved in the form as well."""
    model = quantize_experts(random_model("qwen3_moe"))
    model.model.save_pretrained(tmp_path)
    again = load(tmp_path, experts_implementation="padless")
    assert torch.equal(bits(experts_of(again)[1].down_proj), bits(experts_of(model)[1].down_proj))
    assert torch.equal(experts_of(again)[1].down_proj_scale_inv, experts_of(model)[1].down_proj_scale_inv)
