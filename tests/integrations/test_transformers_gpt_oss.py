"""gpt-oss in transformers with experts_implementation="padless": MXFP4 blocks, one layer, tokens, scales in tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK, MXFP4, dequantize
from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import MXFP4_REPACKED
from padless.integrations import weights as shared_weights
from padless.integrations.codes import repack
from padless.integrations.transformers import adapt_experts, quantize_experts, set_activations
from padless.integrations.transformers.weights import expert_weights
from padless.kernels.sm90_bf16 import host as sm90_bf16
from support.hopper import pretended
from support.hub_checkpoints import VOCABULARY, error, experts_of, load, load_dequantized, logits, row_errors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_gpt_oss_keeps_its_blocks(device: str, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = folder_of("gpt_oss", "mxfp4")
    model = load(folder, experts_implementation="padless").to(device)
    experts = experts_of(model)[0]
    bits = sum(p.numel() * 8 for name, p in experts.named_parameters() if not name.endswith("bias"))
    values = 2 * experts.gate_up_proj.numel() + 2 * experts.down_proj.numel()
    assert bits / values == 4.25
    want = logits(load_dequantized(folder, device))
    got = logits(model)
    assert error(got, want) < 0.01
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", experts_implementation="padless").to(device)
    assert torch.equal(logits(again), got)
    with torch.no_grad():
        for each in experts_of(model):
            each.gate_up_proj_bias.zero_()
    assert error(logits(model), want) > 0.02, "the bias must count"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized_here", [False, True])
def test_repacked_blocks(quantized_here: bool, device: str, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    """The same logits and the same file, of a second projection that cannot be repacked, too; no adapters."""
    if quantized_here:
        model = quantize_experts(load_dequantized(folder_of("gpt_oss", "mxfp4"), device), MXFP4)
        model.set_experts_implementation("padless")
    else:
        model = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless").to(device)
    want = logits(model)
    repack(model)
    built = expert_weights(experts_of(model)[0])
    assert (built.w13.format, built.w2.format, built.activations) == (MXFP4_REPACKED, MXFP4, "BF16")
    assert torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved", experts_implementation="padless").to(device)), want)
    with pytest.raises(ValueError, match="from_repacked"):
        adapt_experts(model, rank=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activations", [torch.bfloat16, FP8_BLOCK], ids=str)
def test_one_block_of_gpt_oss(activations: Any, device: str, folder_of: Callable[..., Path]) -> None:
    """Against float64 with the dequantized weights, biases and gpt-oss' gate; some ids are no expert of this rank."""
    model = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless").to(device)
    experts = experts_of(model)[-1]
    set_activations(model, activations)
    generator = torch.Generator().manual_seed(3)
    x = (8 * torch.randn(37, model.config.hidden_size, generator=generator)).bfloat16().to(device)
    ids = torch.rand(37, experts.num_experts + 1, generator=generator).argsort(-1)[:, :2].to(device)
    weights = torch.rand(37, 2, generator=generator).bfloat16().to(device)
    assert (ids == experts.num_experts).any()
    with torch.no_grad():
        got = experts(x, ids, weights)
    built = expert_weights(experts)
    want = torch.zeros(x.shape, dtype=torch.float64, device=device)
    w13, w2 = (dequantize(w, torch.float32).double() for w in (built.w13, built.w2))
    bias13, bias2 = (b.detach().double() for b in (experts.gate_up_proj_bias, experts.down_proj_bias))
    for e in range(experts.num_experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = x[token].double() @ w13[e].T + bias13[e]
        gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
        y = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ w2[e].T + bias2[e]
        want.index_add_(0, token, weights[token, slot, None].double() * y)
    bound = 0.06 if activations == FP8_BLOCK else 0.01
    assert error(got, want) < bound
    busy = (ids < experts.num_experts).any(-1)
    assert row_errors(got, want)[busy].max() < 1.5 * bound


def test_gpt_oss_scales_are_copied_once(folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in tiles, which kernels read where they are; the same logits, and the file's parameters stay."""
    model = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless")
    want = logits(model)
    before = expert_weights(experts_of(model)[0])
    monkeypatch.setattr(shared_weights, "is_on_gpu", lambda t: True)
    again = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless")
    assert torch.equal(logits(again), want)
    built = expert_weights(experts_of(again)[0])
    rows = torch.randn(9, 256).bfloat16()
    offs = torch.tensor([2, 2, 9, 9], dtype=torch.int32)
    for plain, tiled in ((before.w13, built.w13), (before.w2, built.w2)):
        assert (plain.scale_layout, tiled.scale_layout) == ("plain", "blocked")
        copies = []
        for t in (plain, tiled):  # a file's tensors lie anywhere
            t = padless.BlockScaledTensor(t.data.clone(), t.scale.clone(), t.format, None, t.scale_layout)
            out = torch.empty(9, t.data.shape[1], dtype=torch.bfloat16)
            given = rows[:, : t.logical_shape[-1]].contiguous()
            copies.append(sm90_bf16.prepare(EmulatedDriver(), given, t, offs, out, None).copies)
        assert len(copies[0]) == 1
        assert copies[1] == ()
    assert {name for name, _ in experts_of(again)[0].named_parameters()} == {
        name for name, _ in experts_of(model)[0].named_parameters()
    }


def test_a_token_is_one_launch_that_is_packed_once(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases in bfloat16 are converted once: converted at every call they would be other tensors to every launch."""
    model = load(folder_of("gpt_oss", "mxfp4"), experts_implementation="padless")
    experts = experts_of(model)[0]
    assert experts.down_proj_bias.dtype == torch.bfloat16
    x = torch.randn(1, model.config.hidden_size).bfloat16()
    ids = torch.rand(1, experts.num_experts).argsort(-1)[:, :2]
    packed, counts = [], []
    with torch.no_grad(), pretended() as gpu:
        monkeypatch.setattr(gpu, "packed", lambda *launch, pack=gpu.packed: (packed.append(launch), pack(*launch)))
        for _ in range(12):
            experts(x, ids, torch.rand(1, 2).bfloat16())
            counts.append((len(packed), len(gpu.launched)))
    assert counts[0][0] > 0
    assert counts[-1][0] == counts[5][0], "launches are packed again"
    assert counts[-1][1] - counts[5][1] == 6


def test_gpt_oss_generates_the_tokens_of_dequantized_weights(folder_of: Callable[..., Path]) -> None:
    """Greedy tokens of every prompt at which no step is a near tie: the two round differently on their way."""
    folder = folder_of("gpt_oss", "mxfp4")
    prompts = torch.randint(0, VOCABULARY, (96, 9), generator=torch.Generator().manual_seed(7))
    model, stock = load(folder, experts_implementation="padless"), load_dequantized(folder, "cpu")
    with torch.no_grad():  # loud enough to decide the tokens
        for kept, dequantized_experts in zip(experts_of(model), experts_of(stock), strict=True):
            kept.down_proj_scales.add_(4)
            dequantized_experts.down_proj.mul_(16)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = stock.generate(prompts, output_logits=True, return_dict_in_generate=True, **arguments)
    steps = torch.stack(found.logits).double()  # (6, 96, vocabulary)
    first, second = steps.topk(2).values.unbind(-1)
    decided = ((first - second) / steps.std(-1)).amin(0) > 0.06  # logits differ by 0.04 at most
    assert decided.sum() >= 8
    want = found.sequences[decided]
    assert want.shape[1] == 15
    assert torch.equal(model.generate(prompts, **arguments)[decided], want)
    with torch.no_grad():
        for each in experts_of(model):
            each.down_proj_blocks.bitwise_xor_(0x88)  # every sign
    wrong = model.generate(prompts, **arguments)[decided]
    assert (wrong != want).any(-1).sum() > 0.8 * len(want)
