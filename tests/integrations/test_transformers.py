"""Whole models of transformers with experts_implementation="padless": logits, tokens, files, switching, compiling."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface, FP8Linear

import padless
import padless.integrations.transformers
from padless import FP8_BLOCK, MXFP4, MXFP8, dequantize, quantize
from padless.integrations.transformers import quantize_experts
from support.hub_checkpoints import (
    dequantized,
    error,
    experts_of,
    following_routing,
    load,
    load_dequantized,
    logits,
    recorded_routing,
    reference_experts,
    row_errors,
    tokens,
)

FP8_MODELS = ("qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FP8_MODELS)
def test_logits_of_fp8_checkpoints(name: str, device: str, folder_of: Callable[..., Path]) -> None:
    original = load(folder_of(name, "bf16")).to(device)
    model = load(folder_of(name, "fp8"), experts_implementation="padless").to(device)
    for experts in experts_of(model):
        assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    with recorded_routing(original) as decisions:
        want = logits(original)
    with following_routing(model, decisions) as elsewhere:
        got = logits(model)
    found = (
        f"{error(got, want):.4f} with the original's choice of experts, {error(logits(model), want):.4f} with its own; "
        f"tokens of {want.shape[0] * want.shape[1]} that chose others, by layer: {elsewhere}; errors of tokens: "
        f"{sorted(row_errors(got, want).flatten().tolist())[-4:]}"
    )
    assert error(got, want) < 0.015, found
    assert row_errors(got, want).max() < 0.025, found
    # Near ties are few: a wrong router, or wrong layers before it, would change most choices.
    assert len(elsewhere) == len(decisions), found
    assert sum(map(len, elsewhere)) <= 0.05 * len(decisions) * want.shape[0] * want.shape[1], found
    with torch.no_grad():  # the bound says something: without the experts the logits are far away
        for experts in experts_of(original):
            experts.down_proj.zero_()
    assert error(logits(original), want) > 0.03


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fp8", "ue8m0"])
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FP8_MODELS)
def test_one_block(
    name: str, router_dtype: torch.dtype, kind: str, device: str, folder_of: Callable[..., Path]
) -> None:
    """Against float64 with the dequantized weights, by row and by expert; some ids are no expert of this rank."""
    model = load(folder_of(name, kind), experts_implementation="padless").to(device)
    experts = experts_of(model)[-1]
    assert experts.gate_up_proj_scale_inv.dtype == (torch.float8_e8m0fnu if kind == "ue8m0" else torch.float32)
    generator = torch.Generator().manual_seed(3)
    x = (8 * torch.randn(37, model.config.hidden_size, generator=generator)).bfloat16().to(device)
    ids = torch.rand(37, experts.num_experts + 1, generator=generator).argsort(-1)[:, :2].to(device)
    weights = torch.rand(37, 2, generator=generator).to(router_dtype).to(device)
    assert (ids == experts.num_experts).any()
    with torch.no_grad():
        got = experts(x, ids, weights)
        lonely = experts(x, torch.full_like(ids, experts.num_experts), weights)
    assert got.dtype == torch.bfloat16
    assert torch.equal(lonely, torch.zeros_like(lonely))
    w13 = dequantized(experts.gate_up_proj, experts.gate_up_proj_scale_inv)
    w2 = dequantized(experts.down_proj, experts.down_proj_scale_inv)
    want = reference_experts(x, ids, weights, w13, w2)
    assert error(got, want) < 0.06
    assert row_errors(got, want).max() < 0.08
    for expert in range(experts.num_experts):
        rows = (ids == expert).any(-1)
        assert error(got[rows], want[rows]) < 0.065, expert
    # The same numbers with the activations rounded as padless rounds them: what is left is rounding to bfloat16.
    rounded = reference_experts(x, ids, weights, w13, w2, rounded=as_quantized, act=swiglu_of_bfloat16)
    assert error(got, rounded) < 0.006
    swapped = reference_experts(x, ids, weights, w13.roll(w13.shape[1] // 2, 1), w2)
    assert error(got, swapped) > 0.3, "gate and up must not be interchangeable"


def swiglu_of_bfloat16(h: torch.Tensor) -> torch.Tensor:
    """Gate and up rounded as the first product is."""
    gate, up = h.bfloat16().double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def as_quantized(t: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(t.float(), FP8_BLOCK), torch.float32).double()


@pytest.mark.parametrize(("name", "loudness"), list(zip(FP8_MODELS, (1, 1, 8, 8), strict=True)))
def test_generates_the_tokens_of_dequantized_weights(name: str, loudness: int, folder_of: Callable[..., Path]) -> None:
    """Greedy tokens equal those of experts computed in float64 from the same codes with the roundings of padless.

    Logits are bfloat16, and those of random models tie: where two first differ, by 2^-5 (four roundings) at most.
    """

    def reference(self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        w13 = dequantized(self.gate_up_proj, self.gate_up_proj_scale_inv)
        w2 = dequantized(self.down_proj, self.down_proj_scale_inv)
        out = reference_experts(hidden, ids, weights, w13, w2, rounded=as_quantized, act=swiglu_of_bfloat16)
        return out.to(hidden.dtype)

    FP8ExpertsInterface.register("padless_test_reference", reference)
    model = load(folder_of(name, "fp8"), experts_implementation="padless")
    with torch.no_grad():  # loud enough to decide the tokens of a random model
        for experts in experts_of(model):
            experts.down_proj_scale_inv.mul_(loudness)
    prompt = tokens()[:, :9]

    def generated(implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows, 6) and the logits that they were chosen by."""
        model.set_experts_implementation(implementation)
        out = model.generate(
            prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return out.sequences[:, 9:], torch.stack(out.logits, 1).float()

    got, _ = generated("padless")
    want, logits_of_want = generated("padless_test_reference")
    assert got.shape == want.shape == (len(prompt), 6)
    compared = 0
    for row in range(len(prompt)):
        differ = (got[row] != want[row]).nonzero().flatten().tolist()
        same = differ[0] if differ else 6
        compared += same
        if differ:
            at = logits_of_want[row, same]
            assert at.max() - at[got[row, same]] <= 2**-5
    assert compared >= got.numel() / 2
    with torch.no_grad():
        for experts in experts_of(model):
            experts.down_proj.view(torch.uint8).bitwise_xor_(0x80)  # every sign
    wrong, _ = generated("padless")
    assert not torch.equal(wrong, want)


# --- files and switching ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP8_MODELS)
def test_save_and_load(name: str, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    model = load(folder_of(name, "fp8"), experts_implementation="padless")
    before = logits(model)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert any("experts" in name and t.dtype == torch.float8_e4m3fn for name, t in saved.items())
    again = load(tmp_path / "saved", experts_implementation="padless")
    assert torch.equal(logits(again), before)


@pytest.mark.parametrize("device", DEVICES)
def test_switching_implementations(device: str, folder_of: Callable[..., Path]) -> None:
    """transformers' own implementations multiply by padless where its kernel is missing, linear layers too."""
    model = load(folder_of("qwen3_moe", "linear"), experts_implementation="padless").to(device)
    assert isinstance(model.model.layers[0].self_attn.q_proj, FP8Linear)
    before = logits(model)
    for name in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(name)
        other = logits(model)
        assert 0 < error(other, before) < 0.05, name
    model.set_experts_implementation("padless")
    assert torch.equal(logits(model), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers keeps FP8 where there is a GPU")
def test_other_implementations_load_as_ever(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "fp8"))
    assert experts_of(model)[0].gate_up_proj.dtype == torch.bfloat16
    asked = load_dequantized(folder_of("qwen3_moe", "fp8"))
    assert torch.equal(logits(model), logits(asked))


@pytest.mark.slow
def test_expert_parallelism(folder_of: Callable[..., Path]) -> None:
    """transformers' own, on two gloo processes with half of the experts each: the logits of one process."""
    program = str(Path(__file__).parents[1] / "support" / "transformers_ep.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, program, str(folder_of("qwen3_moe", "fp8"))]
    done = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=200, check=False)
    found = re.search(r"errors: ([\d.]+) ([\d.]+)", done.stdout)
    assert found, done.stderr[-2000:]
    assert float(found[1]) < 0.025  # attention in halves rounds otherwise, and a near tie may go to another expert
    assert float(found[2]) > 2 * float(found[1]), "experts of the other rank must count"


# --- bfloat16 models -------------------------------------------------------------------------------------


def test_bf16_experts_are_refused(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("mixtral", "bf16"), experts_implementation="padless")
    with pytest.raises(ValueError, match=r"gate_up_proj of MixtralExperts is torch.bfloat16.*quantize_experts"):
        logits(model)


@pytest.mark.parametrize(
    ("name", "format", "bound"),
    [
        *((name, FP8_BLOCK, 0.015) for name in (*FP8_MODELS, "gpt_oss")),
        ("mixtral", MXFP8, 0.015),
        ("mixtral", MXFP4, 0.05),
        ("mixtral", padless.NVFP4, 0.04),
        ("gpt_oss", MXFP4, 0.05),  # transposed, with biases and a gate of its own
    ],
)
def test_quantize_experts(
    name: str, format: padless.BlockScaledFormat, bound: float, folder_of: Callable[..., Path]
) -> None:
    model = load(folder_of(name, "bf16"), experts_implementation="padless")
    want = logits(load(folder_of(name, "bf16"), experts_implementation="eager"))
    size = sum(p.numel() * p.element_size() for p in experts_of(model)[0].parameters())
    assert quantize_experts(model, format) is model
    assert sum(p.numel() * p.element_size() for p in experts_of(model)[0].parameters()) < 0.56 * size
    assert 1e-4 < error(logits(model), want) < bound
    with pytest.raises(ValueError, match="model has no experts in bfloat16"):
        quantize_experts(model, format)


def test_quantize_experts_takes_four_formats(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("mixtral", "bf16"))
    with pytest.raises(ValueError, match="format is 'MXFP8_E5M2'; allowed: FP8_BLOCK, MXFP8, MXFP4, NVFP4"):
        quantize_experts(model, padless.MXFP8_E5M2)


# --- compiling and importing -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", "ue8m0"), pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.slow)]
)
def test_compiled_experts(name: str, kind: str, device: str, folder_of: Callable[..., Path]) -> None:
    model = load(folder_of(name, kind), experts_implementation="padless").to(device)
    experts = experts_of(model)[0]
    x = torch.randn(11, model.config.hidden_size).bfloat16().to(device)
    weights, ids = torch.rand(11, 4).softmax(-1).to(device).topk(2)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, ids, weights), experts(x, ids, weights))


@pytest.mark.slow
def test_compiled_model(folder_of: Callable[..., Path]) -> None:
    """Attention, FP8 linear layers, routers and experts as one graph."""
    model = load(folder_of("qwen3_moe", "linear"), experts_implementation="padless")
    before = logits(model)
    assert torch.equal(logits(torch.compile(model, fullgraph=True, backend="eager")), before)


def test_needs_transformers_to_be_there() -> None:
    code = """
import sys, padless
padless.quantize
assert "transformers" not in sys.modules, "importing padless imports nothing of transformers"
sys.modules["transformers"] = None
try:
    import padless.integrations.transformers
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'padless[transformers]'" in found.stdout


@pytest.mark.gpu
def test_experts_in_a_cuda_graph(folder_of: Callable[..., Path]) -> None:
    """A captured layer replays with other tokens and ids: nothing waits for the device."""
    model = load(folder_of("qwen3_moe", "fp8"), experts_implementation="padless").to("cuda")
    experts = experts_of(model)[0]
    x = torch.randn(16, model.config.hidden_size, device="cuda").bfloat16()
    weights, ids = torch.rand(16, experts.num_experts, device="cuda").topk(2)
    with torch.no_grad():
        experts(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, weights)
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.rand(16, experts.num_experts, device="cuda").topk(2).indices)
        graph.replay()
        assert torch.equal(out, experts(x, ids, weights))


@pytest.mark.slow
def test_importing_leaves_the_public_names() -> None:
    """Importing the integration first must not put a module in the place of a public name."""
    code = """
import types
import padless.integrations.transformers
import padless
wrong = [name for name in padless.__all__ if isinstance(getattr(padless, name), types.ModuleType)]
assert not wrong, wrong
"""
    subprocess.run([sys.executable, "-c", code], check=True)
