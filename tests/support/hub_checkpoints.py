"""Tiny random Mixture-of-Experts models of transformers, in bfloat16 and as quantized checkpoints in the hub's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from padless import FP8_BLOCK, MXFP4, quantize

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_ATTENTION = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
# Every projection's N and K differ: H 256, I 128 or 384, 2 I 256 or 768.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": 384,
        "intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "norm_topk_prob": True,
    },
    "deepseek_v3": _ATTENTION
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
        "intermediate_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "mixtral": {"intermediate_size": 384, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
    "glm4_moe": {
        "moe_intermediate_size": 128,
        "intermediate_size": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "head_dim": 64,
    },
    "gpt_oss": {
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "layer_types": ["full_attention", "full_attention"],
    },
}


def write_bf16(name: str, folder: Path) -> Path:
    """A random model in bfloat16, saved; every weight random, biases and the router's correction too."""
    torch.manual_seed(20240229)
    config = AutoConfig.for_model(name, **(COMMON | MODELS[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "experts." in parameter_name:
                parameter.normal_(0, 0.015)
    model.save_pretrained(folder)
    return folder


def write_fp8(source: Path, folder: Path, *, scales: str = "float", linear: bool = False) -> Path:
    """The bfloat16 model with experts in FP8, one weight and weight_scale_inv a projection of each expert.

    scales: "float", or "ue8m0": powers of two. linear: attention and dense layers in FP8 too.
    """
    tensors, quantized = load_file(source / "model.safetensors"), {}
    kept = {"lm_head"}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        is_expert = ".experts." in name
        is_linear = values.dim() == 2 and name.endswith("_proj.weight")
        if not name.endswith(".weight") or not (is_expert or (linear and is_linear)):
            quantized[name] = values
            if values.dim() == 2:
                kept.add(module)
            continue
        q = quantize(values[None].contiguous(), FP8_BLOCK, kind="weight")
        codes, scale = q.data[0], q.scale[0]
        if scales == "ue8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
            blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            blocks = blocks[: values.shape[0], : values.shape[1]]
            codes = (values.float() / blocks).to(torch.float8_e4m3fn)
            scale = scale.to(torch.float8_e8m0fnu)
        quantized[name], quantized[f"{name}_scale_inv"] = codes.contiguous(), scale.contiguous()
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": scales,
        "modules_to_not_convert": sorted(kept),
    }
    return _write(source, folder, quantized, settings)


def write_mxfp4(source: Path, folder: Path) -> Path:
    """The gpt-oss model with experts in MXFP4 blocks and scales."""
    tensors, quantized = load_file(source / "model.safetensors"), {}
    for name, values in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = values
            continue
        q = quantize(values.transpose(1, 2).contiguous(), MXFP4, kind="weight", scale_layout="plain")
        experts, n, packed = q.data.shape
        quantized[f"{name}_blocks"] = q.data.view(torch.uint8).reshape(experts, n, packed // 16, 16)
        quantized[f"{name}_scales"] = q.scale.view(torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _write(source, folder, quantized, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _write(source: Path, folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def load(folder: Path, **arguments: Any) -> Any:
    """The model for inference, in bfloat16 where it is not quantized."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **arguments).eval()


def load_dequantized(folder: Path, device: str = "cpu") -> Any:
    """The checkpoint as transformers itself dequantizes it to bfloat16."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    config = (FineGrainedFP8Config if method == "fp8" else Mxfp4Config)(dequantize=True)
    return load(folder, quantization_config=config).to(device)


def experts_of(model: Any) -> list[Any]:
    """The experts modules of a model."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def tokens(device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(7)).to(device)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(tokens(model.device.type)).logits.double()
    return result


# What an experts module was called with: ids and weights (tokens, k).
Decision = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def recorded_routing(model: Any) -> Iterator[list[Decision]]:
    """In this block every call of an experts module is noted down, in order."""
    found: list[Decision] = []

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        found.append((arguments[1], arguments[2].detach()))

    handles = [experts.register_forward_pre_hook(note) for experts in experts_of(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def following_routing(model: Any, decisions: list[Decision]) -> Iterator[list[list[int]]]:
    """In this block tokens that `model` would send to other experts than `decisions` go to those, with their weights;
    the others keep their own weights. Yields the tokens that were sent elsewhere, a list for each call.

    The router reads what the layers before it computed, and where two experts are nearly as likely a rounding decides
    between them. Which of the two is no matter of how exact the experts are, yet it changes a token by far more.
    """
    elsewhere: list[list[int]] = []

    def follow(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, weights = arguments[1], arguments[2]
        to, by = decisions[len(elsewhere)]
        differs = (ids.sort(-1).values != to.sort(-1).values).any(-1, keepdim=True)
        elsewhere.append(differs.flatten().nonzero().flatten().tolist())
        return arguments[0], torch.where(differs, to, ids), torch.where(differs, by, weights), *arguments[3:]

    handles = [experts.register_forward_pre_hook(follow) for experts in experts_of(model)]
    try:
        yield elsewhere
    finally:
        for handle in handles:
            handle.remove()


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(.., N, K) float64 values of e4m3 codes and their scales of 128 x 128."""
    n, k = codes.shape[-2:]
    codes, scale = codes.detach(), scale.detach()
    blocks = scale.float().double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.to(torch.float64) * blocks[..., :n, :k]


def reference_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    act: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The experts in float64, token by token; ids outside of w13 add nothing.

    rounded: applied to what each product reads. act: of the first product; SwiGLU of halves where it is None.
    """

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if 0 <= expert < w13.shape[0]:
                row = rounded(x[token : token + 1].double())
                h = (act or swiglu)(row @ w13[expert].T)
                out[token] += weights[token, slot].double() * (rounded(h) @ w2[expert].T)[0]
    return out


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Norm of the error of each row over the norm of the row."""
    return (got.double() - want).norm(dim=-1) / want.norm(dim=-1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())
