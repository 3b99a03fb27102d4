"""Quantized experts whose weights something else changes: parametrizations, adapters, casts. None may be ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.integrations.transformers import quantize_experts
from support.hub_checkpoints import COMMON, MODELS, error, experts_of, load, logits

QUANTIZED = [("qwen3_moe", "bf16", FP8_BLOCK), ("qwen3_moe", "bf16", NVFP4)]
QUANTIZED += [("gpt_oss", "bf16", MXFP8), ("gpt_oss", "bf16", MXFP4)]
LOADED = [("qwen3_moe", "fp8", None), ("qwen3_moe", "ue8m0", None), ("gpt_oss", "mxfp4", None)]
KINDS = pytest.mark.parametrize(("name", "kind", "format"), QUANTIZED + LOADED)


class LowRank(nn.Module):
    """What PEFT puts on a parameter while its forward runs: weight + b @ a of each expert."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn(like.shape))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.float() + self.delta).to(weight.dtype)


class Wrapper(nn.Module):
    """As PEFT wraps a module one of whose parameters is a target; wrappers of several parameters lie in one another."""

    def __init__(self, base_layer: nn.Module, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name

    def forward(self, *arguments: Any) -> Any:
        return self.base_layer(*arguments)


def quantized(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> Any:
    model = load(folder_of(name, kind), experts_implementation="padless")
    return model if format is None else quantize_experts(model, format)


@KINDS
def test_a_parametrization_is_refused(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> None:
    """By name, at the first call with it, whether or not weights were built before; without it all is as before."""
    model = quantized(name, kind, format, folder_of)
    want = logits(model)
    experts = experts_of(model)[-1]
    for parameter in [n for n, p in experts.named_parameters() if "down_proj" in n and p.dim() > 1]:
        parametrize.register_parametrization(experts, parameter, LowRank(getattr(experts, parameter)), unsafe=True)
        said = rf"model\.layers\.1\.mlp\.experts\.{parameter} is parametrized \(LowRank\).*merge.*before"
        with pytest.raises(ValueError, match=said):
            logits(model)
        parametrize.remove_parametrizations(experts, parameter, leave_parametrized=False)
        assert torch.equal(logits(model), want)


def test_a_parametrization_is_refused_by_quantize_experts(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "bf16"))
    experts = experts_of(model)[1]
    parametrize.register_parametrization(experts, "down_proj", LowRank(experts.down_proj))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj is parametrized \(LowRank\)"):
        quantize_experts(model)
    assert experts_of(model)[0].down_proj.dtype == torch.bfloat16, "nothing is quantized of a model that is refused"


@pytest.mark.parametrize("parameters", [["down_proj"], ["gate_up_proj", "down_proj"]])
def test_an_adapter_is_refused_by_quantize_experts(parameters: list[str], folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "bf16"))
    for parameter in parameters:
        model.model.layers[1].mlp.experts = Wrapper(model.model.layers[1].mlp.experts, parameter)
    path = r"model\.layers\.1\.mlp\.experts(\.base_layer)+"
    with pytest.raises(ValueError, match=rf"{path}\.(gate_up|down)_proj has an adapter \(Wrapper\).*merge"):
        quantize_experts(model)
    assert experts_of(model)[0].down_proj.dtype == torch.bfloat16


def test_adapters_of_other_modules_are_no_matter(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "bf16"), experts_implementation="padless")
    model.model.layers[1].self_attn.q_proj = Wrapper(model.model.layers[1].self_attn.q_proj, "weight")
    parametrize.register_parametrization(model.lm_head, "weight", LowRank(model.lm_head.weight))
    assert logits(quantize_experts(model)).isfinite().all()


# --- casts -----------------------------------------------------------------------------------------------

CASTS: list[Callable[[Any], Any]] = [
    lambda model: model.half(),
    lambda model: model.bfloat16(),
    lambda model: model.float(),
    lambda model: model.to(torch.float16),
    lambda model: model.to("cpu", torch.float16),
    lambda model: model.model.layers.half(),
    lambda model: (
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True),
        model.model.layers.half(),
    ),
]


@KINDS
def test_codes_stay_codes(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> None:
    """A cast is of the other parameters, or is transformers' own refusal; codes and scales keep every bit."""
    original = quantized(name, kind, format, folder_of)
    stored = [n for n, _ in original.named_parameters() if ".experts." in n and not n.endswith("bias")]
    assert len(stored) == (12 if format == NVFP4 else 8)
    for number, cast in enumerate(CASTS):
        model = copy.deepcopy(original)
        try:
            cast(model)
        except ValueError as error:
            assert "is not supported for quantized model" in str(error)  # noqa: PT017  of transformers' quantizers
            assert format is None
        for n in stored:
            got, want = model.get_parameter(n).detach(), original.get_parameter(n).detach()
            assert got.dtype == want.dtype, (number, n)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (number, n)


def test_a_cast_model_computes(folder_of: Callable[..., Path]) -> None:
    """In float16: the same model, as far as the rest of it is."""
    model = quantized("qwen3_moe", "bf16", FP8_BLOCK, folder_of)
    want = logits(model)
    assert model.half().lm_head.weight.dtype == torch.float16
    assert 0 < error(logits(model), want) < 0.02


def test_codes_that_became_numbers_are_refused(folder_of: Callable[..., Path]) -> None:
    model = quantized("qwen3_moe", "bf16", FP8_BLOCK, folder_of)
    experts = experts_of(model)[1]
    experts.down_proj = nn.Parameter(experts.down_proj.detach().half())
    said = r"layers\.1\.mlp\.experts\.down_proj is torch\.float16 although it has scales: .*load or quantize the "
    with pytest.raises(ValueError, match=said):
        logits(model)


# --- other sentences -------------------------------------------------------------------------------------


def test_codes_without_scales_are_refused(folder_of: Callable[..., Path]) -> None:
    """As transformers loads an FP8 file whose scales it does not find: "load an FP8 checkpoint" is no help then."""
    model = load(folder_of("qwen3_moe", "fp8"), experts_implementation="padless")
    for experts in experts_of(model):
        del experts.gate_up_proj_scale_inv
    with pytest.raises(ValueError, match=r"gate_up_proj is torch\.float8_e4m3fn without scales.*to from_pretrained"):
        logits(model)


@pytest.mark.parametrize(("format", "width", "multiple"), [(FP8_BLOCK, 72, 16), (NVFP4, 80, 32)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_widths_that_no_product_takes(name: str, format: Any, width: int, multiple: int) -> None:
    """The message names the layer; nothing is quantized."""
    key = "intermediate_size" if name == "gpt_oss" else "moe_intermediate_size"
    sizes = COMMON | MODELS[name] | {key: width}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.bfloat16)
    said = rf"model\.layers\.0\.mlp\.experts\.down_proj has {width} columns; {format.name} .* multiple of {multiple}"
    with pytest.raises(ValueError, match=said):
        quantize_experts(model, format)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_gpt_oss_blocks_are_read_by_padless_alone(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless")
    want = logits(model)
    for name in ("eager", "grouped_mm", "padless_train"):
        model.set_experts_implementation(name)
        with pytest.raises(ValueError, match=rf"experts_implementation is '{name}' and model\.layers\.0\.mlp\.experts"):
            logits(model)
    model.set_experts_implementation("padless")
    assert torch.equal(logits(model), want)


def test_values_of_another_checkpoint(folder_of: Callable[..., Path]) -> None:
    """Whose quantizer gives transformers values in bfloat16: neither the file nor the user is at fault."""
    model = load(folder_of("qwen3_moe", "bf16"), experts_implementation="padless")
    model.config.quantization_config = SimpleNamespace(quant_method="compressed-tensors")
    said = r"gate_up_proj .* torch\.bfloat16, values that .* made of a compressed-tensors checkpoint.*load_experts"
    with pytest.raises(ValueError, match=said):
        logits(model)
    assert logits(quantize_experts(model)).isfinite().all()


def test_experts_that_transformers_does_not_dispatch(tmp_path: Path) -> None:
    """llama4's take all rows and no routing; transformers' FP8 experts in their place cannot be called so."""
    sizes = COMMON | {"intermediate_size": 128, "intermediate_size_mlp": 256, "num_local_experts": 4, "head_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **sizes), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    said = r"feed_forward\.experts is Llama4TextExperts, which transformers does not dispatch.*modules_to_not_convert"
    with pytest.raises(ValueError, match=said):
        load(tmp_path, quantization_config=FineGrainedFP8Config(), experts_implementation="padless")
    kept = FineGrainedFP8Config(modules_to_not_convert=["lm_head", "model.layers.*.feed_forward.experts"])
    assert logits(load(tmp_path, quantization_config=kept, experts_implementation="padless")).isfinite().all()
