"""Codes of a trainer in running experts: transformers', vLLM's and SGLang's parameters, written in place.

What would convince: after `load_codes` each plug-in gives the bits of the layer that trains; no tensor that was read
before, by a kernel or a captured graph, has moved, copies that a plug-in made for itself included, and all of them have
the new values; without `refresh` a copy is stale; nothing is written where something does not fit.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from padless import FP8_BLOCK, MXFP4, moe, quantize
from padless.integrations import weights
from padless.integrations.codes import load_codes, refresh, repack
from padless.layouts import to_repacked
from padless.nn import ExpertCodes, expert_codes
from padless.nn.recipe import RECIPES
from support import sglang_seam, vllm_seam
from support.moe_layer_problem import Layer, draw_layer
from support.training_layer import layer, module

FP8_NAMES = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
MXFP4_NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


class EngineLayer(nn.Module):
    """An engine's layer: parameters by the engine's names, with random codes."""

    def __init__(self, drawn: Layer, names: tuple[str, ...], in_inference: bool = False) -> None:
        super().__init__()
        values = (drawn.w13.data, drawn.w13.scale, drawn.w2.data, drawn.w2.scale)
        for name, t in zip(names, values, strict=True):
            bytewise = drawn.w13.format == MXFP4
            with torch.inference_mode() if in_inference else nullcontext():
                parameter = nn.Parameter((t.view(torch.uint8) if bytewise else t).clone(), requires_grad=False)
            self.register_parameter(name, parameter)
        self.names = names

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vllm":
        with vllm_seam.in_place():
            yield "vllm"
        return
    import sys

    with pytest.MonkeyPatch.context() as patch:
        sglang_seam.install(patch)
        yield "sglang"
        for name in [name for name in sys.modules if name.startswith("padless.integrations.sglang")]:
            del sys.modules[name]


def running(engine: str, of: EngineLayer, drawn: Layer, **biases: Any) -> Any:
    """A call of the engine's plug-in with its layer's parameters, as that engine makes it."""
    w13, scale13, w2, scale2 = of.tensors
    if engine == "sglang":
        base = importlib.import_module("sglang.srt.layers.moe.moe_runner.base")
        config = base.MoeRunnerConfig()
        core = importlib.import_module("padless.integrations.sglang.runner").PadlessRunnerCore(config)
        top_k = importlib.import_module("sglang.srt.layers.moe.topk")
        dispatcher = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")

        def call() -> torch.Tensor:
            chosen = top_k.StandardTopKOutput(drawn.weights, drawn.ids.int(), None)
            dispatched = dispatcher.StandardDispatchOutput(drawn.x, None, chosen)
            given = (w13, w2, scale13, scale2, biases.get("bias13"), biases.get("bias2"))
            info = type("Info", (), dict(zip(sglang_seam.QUANT_INFO, given, strict=True)))
            out: torch.Tensor = core.run_from_dispatch(dispatched, info, config).hidden_states
            return out

        return call, core._cache
    seam = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    activation = importlib.import_module("vllm.model_executor.layers.fused_moe.activation").MoEActivation
    named = {"w1_bias": biases.get("bias13"), "w2_bias": biases.get("bias2")}
    if w13.dtype in (torch.uint8, torch.int32):
        quant = seam.mxfp4_w4a16_moe_quant_config(w1_scale=scale13, w2_scale=scale2, **named)
    else:
        quant = seam.fp8_w8a8_moe_quant_config(w1_scale=scale13, w2_scale=scale2, block_shape=[128, 128], **named)
    kind = activation.SWIGLUOAI if w13.dtype in (torch.uint8, torch.int32) else activation.SILU
    config = vllm_seam.moe_config(drawn, kind.name)
    experts = importlib.import_module("padless.integrations.vllm.experts").PadlessExperts(config, quant)

    def run() -> torch.Tensor:
        out = torch.full_like(drawn.x, float("nan"))
        experts.apply(
            out, drawn.x, w13, w2, drawn.weights, drawn.ids, kind, len(w13), None, None, None, None, None, None, False
        )
        return out

    return run, experts._cache


def parts(built: Any) -> list[torch.Tensor]:
    return [t for t in weights._parts(built) if t is not None]


@pytest.mark.parametrize("in_inference", [False, True])
def test_an_engine_has_the_trainers_bits(engine: str, in_inference: bool) -> None:
    """Where nothing moves, and where torch counts no writes; biases in bfloat16 are kept as float32 copies."""
    problem = layer(tokens=40, hidden=256, intermediate=128, experts=5)
    problem.index.clamp_(-1, 4)
    drawn = draw_layer((FP8_BLOCK, None), tokens=40, h=256, i=128)
    drawn = replace(drawn, x=problem.x.bfloat16(), ids=problem.index, weights=problem.prob)
    of = EngineLayer(drawn, FP8_NAMES, in_inference)
    call, cache = running(engine, of, drawn)
    made = module(problem, "fp8", dtype=torch.bfloat16)
    want = made(drawn.x, drawn.ids, drawn.weights).detach()
    with torch.inference_mode():
        before = call().clone()
        addresses = [t.data_ptr() for t in parts(cache._built.weights)]
        load_codes(of, made.codes())
        assert not torch.equal(before, want)
        assert torch.equal(call(), want)
        assert [t.data_ptr() for t in parts(cache._built.weights)] == addresses


def mxfp4_codes(seed: int, i: int = 160, h: int = 160) -> ExpertCodes:
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(5, 2 * i, h, generator=g) / 12, torch.randn(5, h, i, generator=g) / 12
    first, second = (quantize(w, MXFP4, kind="weight", scale_layout="plain") for w in (w13, w2))
    return ExpertCodes(first, second, "alternating")


def test_copies_are_written_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MXFP4 experts as on a GPU: scales in tiles and float32 biases are the plug-in's own, which graphs read."""
    monkeypatch.setattr(weights, "is_on_gpu", lambda t: True)
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=160, i=160, bias=True)
    codes = mxfp4_codes(1)
    with vllm_seam.in_place():
        of = EngineLayer(replace(drawn, w13=mxfp4_codes(0).w13, w2=mxfp4_codes(0).w2), MXFP4_NAMES)
        biases = [drawn.options[name].bfloat16() for name in ("bias13", "bias2")]
        call, cache = running("vllm", of, drawn, bias13=biases[0], bias2=biases[1])
        call()
        kept = parts(cache._built.weights)
        assert cache._built.weights.w13.scale_layout == cache._built.weights.w2.scale_layout == "blocked"
        shared = {t.data_ptr() for t in of.tensors}
        assert sum(t.data_ptr() not in shared for t in kept) == 4, "tiles of both and two biases"
        for t in of.tensors[1::2]:  # the engine's own loader, through .data: nothing is counted
            t.data.copy_(torch.randint(118, 124, t.shape, dtype=torch.uint8))
        stale = call()
        refresh()
        assert not torch.equal(call(), stale), "what is not refreshed is stale"
        load_codes(of, codes)
        options = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
        want = moe.moe(
            drawn.x, drawn.ids, drawn.weights, codes.w13, codes.w2, bias13=biases[0], bias2=biases[1],
            activations=torch.bfloat16, **options,
        )  # fmt: skip
        assert torch.equal(call(), want)
        assert [t.data_ptr() for t in parts(cache._built.weights)] == [t.data_ptr() for t in kept]
        biases[1].copy_(torch.randn(biases[1].shape))
        refresh(biases[1])
        assert torch.equal(cache._built.weights.bias2, biases[1].float())
        assert cache._built.weights.bias2.data_ptr() == kept[-1].data_ptr()


def test_repacked_codes_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MXFP4 experts: the bits stay, a trainer's codes are repacked, and a state dict has them as they were."""
    monkeypatch.setattr(weights, "is_on_gpu", lambda t: True)
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=192, i=192)
    codes = mxfp4_codes(1, 192, 192)
    with vllm_seam.in_place():
        of = EngineLayer(replace(drawn, w13=mxfp4_codes(0, 192, 192).w13, w2=mxfp4_codes(0, 192, 192).w2), MXFP4_NAMES)
        before = {name: t.clone() for name, t in of.state_dict().items()}
        want = running("vllm", of, drawn)[0]()
        assert repack(of) is of
        assert of.w13_weight.dtype == of.w2_weight.dtype == torch.int32
        call, cache = running("vllm", of, drawn)
        assert torch.equal(call(), want)
        assert cache._built.weights.w13.data.data_ptr() == of.w13_weight.data_ptr(), "no copy of the codes"
        after = of.state_dict()
        assert {name for name, t in before.items() if torch.equal(t, after[name]) and t.dtype == after[name].dtype} == {
            *MXFP4_NAMES
        }
        kept = parts(cache._built.weights)
        load_codes(of, codes)
        other = running("vllm", EngineLayer(replace(drawn, w13=codes.w13, w2=codes.w2), MXFP4_NAMES), drawn)[0]
        assert torch.equal(call(), other())
        assert not torch.equal(call(), want)
        assert [t.data_ptr() for t in parts(cache._built.weights)] == [t.data_ptr() for t in kept]
    with pytest.raises(RuntimeError, match="size mismatch"):  # what another loader writes
        of.load_state_dict(before)
    assert torch.equal(of.w2_weight.view(torch.uint8), to_repacked(codes.w2).data.view(torch.uint8))


@pytest.mark.parametrize("i", [192, 160])
def test_repacking_twice(i: int) -> None:
    """Of a second projection that cannot be repacked, too: it says that nothing is left to do, and writes nothing."""
    codes = mxfp4_codes(0, i, 192)
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=192, i=i)
    of = EngineLayer(replace(drawn, w13=codes.w13, w2=codes.w2), MXFP4_NAMES)
    model = nn.ModuleList([repack(of)])
    assert (of.w13_weight.dtype, of.w2_weight.dtype == torch.int32) == (torch.int32, i == 192)
    before = of.tensors
    with pytest.raises(ValueError, match=r"^model is ModuleList, whose MXFP4 codes are already repacked: nothing"):
        repack(model)
    assert all(now is then for now, then in zip(of.tensors, before, strict=True))
    added = EngineLayer(replace(drawn, w13=codes.w13, w2=codes.w2), MXFP4_NAMES)
    repack(model.append(added))
    assert added.w13_weight.dtype == torch.int32, "a layer that was added is repacked"


def test_repacking_what_has_no_such_codes() -> None:
    """No experts, codes whose sizes do not fit, and int32 words of another order, as vLLM makes for Marlin."""
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=160, i=160)
    odd = EngineLayer(replace(drawn, w13=mxfp4_codes(0).w13, w2=mxfp4_codes(0).w2), MXFP4_NAMES)
    marlin = EngineLayer(drawn, MXFP4_NAMES)
    for name, n in (("w13_weight", 320), ("w2_weight", 160)):
        words, scale = torch.zeros(5, 160 // 16, 2 * n, dtype=torch.int32), torch.zeros(5, 160 // 32, n).to(torch.uint8)
        setattr(marlin, name, nn.Parameter(words, requires_grad=False))
        setattr(marlin, f"{name}_scale", nn.Parameter(scale, requires_grad=False))
    for model in (nn.Linear(3, 3), odd, marlin):
        with pytest.raises(ValueError, match=f"^model is {type(model).__name__}, which has no experts with MXFP4"):
            repack(model)


def test_a_write_that_is_not_told_leaves_a_copy_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: without `refresh` a captured graph would read tiles of the old scales."""
    monkeypatch.setattr(weights, "is_on_gpu", lambda t: True)
    monkeypatch.setattr("padless.integrations.codes.refresh", lambda *written: None)
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=160, i=160)
    with vllm_seam.in_place():
        of = EngineLayer(replace(drawn, w13=mxfp4_codes(0).w13, w2=mxfp4_codes(0).w2), MXFP4_NAMES)
        call, cache = running("vllm", of, drawn)
        call()
        tiles = cache._built.weights.w2.scale
        load_codes(of, mxfp4_codes(1))
        call()
        assert cache._built.weights.w2.scale.data_ptr() != tiles.data_ptr()


# --- transformers ----------------------------------------------------------------------------------------


def quantized_by_transformers(format: Any, problem: Any) -> Any:
    """Experts of transformers with random codes, dispatched to padless."""
    pytest.importorskip("transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from padless.integrations.transformers import quantize_experts

    experts, hidden, intermediate = problem.w2.shape
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts)
    config._experts_implementation = "padless"
    made = Qwen3MoeExperts(config).bfloat16()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    holder = nn.ModuleDict({"experts": made})
    quantize_experts(holder, format)
    return holder["experts"]


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_experts_of_transformers_have_the_trainers_bits(recipe: str) -> None:
    """Also through a codes' file, and for a module whose weights were not built yet."""
    problem = layer(tokens=40, hidden=256, intermediate=128)
    running = quantized_by_transformers(RECIPES[recipe].forward, problem)
    given = problem.x.bfloat16(), problem.index, problem.prob
    made = module(problem, recipe, dtype=torch.bfloat16)
    want = made(*given).detach()
    with torch.no_grad():
        before = running(*given)
        addresses = {name: t.data_ptr() for name, t in running.named_parameters()}
        load_codes(running, made.codes())
        assert not torch.equal(before, want)
        assert torch.equal(running(*given), want)
        assert {name: t.data_ptr() for name, t in running.named_parameters()} == addresses
        fresh = quantized_by_transformers(RECIPES[recipe].forward, problem)
        load_codes(fresh, made.codes())
        assert torch.equal(fresh(*given), want)


def test_gpt_oss_experts_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 bytes, and with them the tiles that the plug-in made of both scales as on a GPU."""
    pytest.importorskip("transformers")
    from padless.integrations.transformers.quantizers import GptOssMxfp4Experts
    from padless.integrations.transformers.weights import expert_weights

    monkeypatch.setattr(weights, "is_on_gpu", lambda t: True)
    sizes = {"num_local_experts": 5, "hidden_size": 160, "intermediate_size": 160}
    config = SimpleNamespace(_experts_implementation="padless", **sizes)
    made = GptOssMxfp4Experts(config).requires_grad_(False)
    drawn = draw_layer((MXFP4, torch.bfloat16), tokens=20, h=160, i=160)
    for name, parameter in made.named_parameters():
        parameter.copy_(torch.randn(parameter.shape) if name.endswith("bias") else torch.full(parameter.shape, 119))
    given = drawn.x, drawn.ids, drawn.weights
    before = made(*given)
    kept = parts(expert_weights(made))
    codes = mxfp4_codes(3)
    load_codes(made, codes)
    options: Any = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    biases = {"bias13": made.gate_up_proj_bias.detach(), "bias2": made.down_proj_bias.detach()}
    want = moe.moe(*given, codes.w13, codes.w2, activations=torch.bfloat16, **options, **biases)
    got = made(*given)
    assert torch.equal(got, want)
    assert not torch.equal(got, before)
    assert [t.data_ptr() for t in parts(expert_weights(made))] == [t.data_ptr() for t in kept]
    assert expert_weights(made).w13.scale_layout == "blocked"
    with pytest.raises(ValueError, match="gate_up of the codes is 'concatenated'"):
        load_codes(made, replace(codes, gate_up="concatenated"))


# --- what does not fit -----------------------------------------------------------------------------------


def test_nothing_is_written_where_something_does_not_fit() -> None:
    drawn = draw_layer((FP8_BLOCK, None), tokens=20, h=256, i=128)
    of = EngineLayer(drawn, FP8_NAMES)
    before = [t.clone() for t in of.tensors]
    small, right = layer(hidden=256, intermediate=64), layer(hidden=256, intermediate=128)
    fp8, mxfp8 = RECIPES["fp8"], RECIPES["mxfp8"]
    good = expert_codes(right.w13, right.w2, fp8)
    for codes, message in (
        (expert_codes(small.w13, small.w2, fp8), "w13_weight is .* and the codes' is"),
        (expert_codes(right.w13, right.w2, mxfp8), "w13_weight_scale_inv is"),
        (ExpertCodes(good.w13, expert_codes(small.w13, small.w2, fp8).w2), "w2_weight is"),
        (replace(good, gate_up="interleaved"), "gate_up of the codes is 'interleaved'"),
        (mxfp4_codes(0), "w13_weight is"),
    ):
        with pytest.raises(ValueError, match=message):
            load_codes(of, codes)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, of.tensors, strict=True))
    with pytest.raises(ValueError, match="module is Linear"):
        load_codes(nn.Linear(4, 4), good)
