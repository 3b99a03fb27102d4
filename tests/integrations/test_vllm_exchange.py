"""vLLM's prepare and finalize over `ExpertParallel`, in two gloo processes, with the grouped experts between them.

Where vLLM can be imported its own modular kernel drives them; elsewhere they are called in its order.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK
from padless.distributed import ExpertParallel
from padless.testing.ranks import Rank, RankPool, raise_first
from support import vllm_seam
from support.moe_layer_problem import Layer, dense, draw_layer

HAS_VLLM = find_spec("vllm") is not None
PLUGIN = "padless.integrations.vllm.exchange"
_MOE = "vllm.model_executor.layers.fused_moe"
E, TOKENS = 6, (19, 8)


@pytest.fixture(scope="module", autouse=True)
def _seam() -> Iterator[None]:
    with vllm_seam.in_place():
        yield


def vllm(name: str) -> Any:
    return importlib.import_module(f"{_MOE}.{name}")


def experts_of(layer: Layer, own: slice) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(grouped experts of a rank, their w1 and w2)."""
    config, size = vllm("config"), own.stop - own.start
    parts = [w.scale[own].contiguous() for w in (layer.w13, layer.w2)]
    quant = config.fp8_w8a8_moe_quant_config(w1_scale=parts[0], w2_scale=parts[1], block_shape=[128, 128])
    moe_config = config.FusedMoEConfig(
        num_experts=E, experts_per_token=layer.ids.shape[1], hidden_dim=layer.x.shape[1],
        intermediate_size=layer.w2.logical_shape[2], num_local_experts=size, num_logical_experts=E,
        activation=vllm("activation").MoEActivation.SILU, device="cpu",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(), in_dtype=torch.bfloat16,
    )  # fmt: skip
    experts = importlib.import_module(PLUGIN).PadlessGroupedExperts(moe_config, quant)
    return experts, layer.w13.data[own].contiguous(), layer.w2.data[own].contiguous()


def through(
    exchange: Any, experts: Any, layer: Layer, w1: torch.Tensor, w2: torch.Tensor, on_input: bool
) -> torch.Tensor:
    """What vLLM's modular kernel does with them, by its own class where it is there."""
    silu = vllm("activation").MoEActivation.SILU
    if HAS_VLLM:
        workspace = importlib.import_module("vllm.v1.worker.workspace")
        workspace.init_workspace_manager(torch.device("cpu"))
        kernel = vllm("modular_kernel").FusedMoEKernel(exchange, experts)
        named = {
            "activation": silu,
            "global_num_experts": E,
            "expert_map": None,
            "apply_router_weight_on_input": on_input,
        }
        return kernel.apply(layer.x.clone(), w1, w2, layer.weights, layer.ids, **named)
    output = torch.full_like(layer.x, torch.nan)
    rows, scale, meta, ids, weights = exchange.prepare(
        layer.x, layer.weights, layer.ids, E, None, on_input, None, defer_input_quant=experts.expects_unquantized_inputs
    )
    y = torch.full(rows.shape, torch.nan, dtype=torch.bfloat16)
    experts.apply(y, rows, w1, w2, weights, ids, silu, E, None, scale, None, None, None, meta, on_input)
    exchange.finalize(output, y, weights, ids, on_input, experts.finalize_weight_and_reduce_impl())
    return output


def drawn(rank: int, top_k: int) -> Layer:
    layer = draw_layer((FP8_BLOCK, None), tokens=sum(TOKENS), experts=E, h=256, i=128, top_k=top_k)
    layer = replace(layer, ids=torch.where(layer.ids < E, layer.ids, -1))
    first = sum(TOKENS[:rank])
    return layer.only(torch.arange(first, first + TOKENS[rank]))


def errors(rank: Rank, bug: str = "") -> list[float]:
    """Largest error of a token's sum against float64, weighted behind and before the experts."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_VLLM:
            vllm_seam.install(patch)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # vLLM's workspace frees a GPU's memory
        plugin = importlib.import_module(PLUGIN)
        if bug == "counts":
            diff = torch.diff
            patch.setattr(torch, "diff", lambda offs, prepend: diff(offs, prepend=prepend).flip(0))
        if bug == "unweighted":
            combine = ExpertParallel.combine
            patch.setattr(ExpertParallel, "combine", lambda self, rows, plan, weighted: combine(self, rows, plan))
        found = []
        for on_input, top_k in ((False, 3), (True, 1)):
            layer = drawn(rank.rank, top_k)
            exchange = ExpertParallel(None, E, 256, top_k, max(TOKENS), backend=rank.backend)
            half = E // rank.size
            experts, w1, w2 = experts_of(layer, slice(rank.rank * half, (rank.rank + 1) * half))
            if on_input:  # the definition of it: rows are weighted, and nothing else
                x = (layer.x * layer.weights.to(layer.x.dtype)).to(layer.x.dtype)
                want = dense(replace(layer, x=x, weights=torch.ones_like(layer.weights)))
            else:
                want = dense(layer)
            prepared = plugin.PadlessPrepareAndFinalize(exchange)
            got = through(prepared, experts, layer, w1, w2, on_input)
            found.append(float((got.double() - want).norm() / want.norm()))
        return found


@pytest.mark.slow
def test_two_ranks() -> None:
    """Near float64; wrong counts and weights left out are found."""
    with RankPool(2, cuda=False, backend="collective") as pool:
        for found in raise_first(pool.call(errors, timeout_s=90)):
            assert all(0.005 < e < 0.06 for e in found), found
        for bug in ("counts", "unweighted"):
            found = raise_first(pool.call(errors, bug, timeout_s=90))
            assert any(f[0] > 0.15 for f in found), (bug, found)


def test_the_stand_in_is_like_vllm() -> None:
    plugin = importlib.import_module(PLUGIN)
    for name, parameters in vllm_seam.EXCHANGE.items():
        classes = [plugin.PadlessPrepareAndFinalize]
        if HAS_VLLM:
            classes.append(vllm("modular_kernel").FusedMoEPrepareAndFinalizeModular)
        assert all(list(inspect.signature(getattr(c, name)).parameters) == parameters for c in classes), name


def refused(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_VLLM:
            vllm_seam.install(patch)
        plugin = importlib.import_module(PLUGIN)
        layer = drawn(0, 3)
        made = {"num_experts": E, "hidden": 256, "top_k": 3, "max_tokens": 32}
        with pytest.raises(ValueError, match=r"exchange has rows in torch\.bfloat16; they must be in FP8_BLOCK"):
            plugin.PadlessPrepareAndFinalize(ExpertParallel(None, **made, fmt=torch.bfloat16))
        exchange = plugin.PadlessPrepareAndFinalize(ExpertParallel(None, **made))
        assert (exchange.num_dispatchers(), exchange.max_num_tokens_per_rank()) == (1, 32)
        given = (layer.x, layer.weights, layer.ids)
        with pytest.raises(ValueError, match="give the kernel PadlessGroupedExperts"):
            exchange.prepare(*given, E, None, False, None, defer_input_quant=True)
        with pytest.raises(ValueError, match="num_experts is 7 and the exchange was made for 6"):
            exchange.prepare(*given, 7, None, False, None, defer_input_quant=False)
        turned = torch.randperm(E, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        with pytest.raises(ValueError, match=r"expert_map has experts \(.*\) here and the exchange \(0, 1, 2,"):
            exchange.prepare(*given, E, turned, False, None, defer_input_quant=False)
        with pytest.raises(ValueError, match="finalize comes behind a prepare"):
            exchange.finalize(layer.x, layer.x, None, None, False, None)
        experts, w1, w2 = experts_of(layer, slice(0, E))
        silu = vllm("activation").MoEActivation.SILU
        with pytest.raises(ValueError, match="hidden_states are not quantized and grouped"):
            experts.apply(layer.x, layer.x, w1, w2, *given[1:], silu, E, None, None, None, None, None, None, False)
        in_place = torch.arange(E, dtype=torch.int32)
        rows, _, meta, ids, weights = exchange.prepare(*given, E, in_place, False, None, defer_input_quant=False)
        used = int(meta.expert_num_tokens.sum())
        assert used == int(((layer.ids >= 0) & (layer.ids < E)).sum())
        assert torch.equal(torch.bincount(ids[:used, 0].long(), minlength=E), meta.expert_num_tokens.long())
        assert (ids[used:] == -1).all()
        assert len(rows) == len(ids) == len(weights)


@pytest.mark.slow
def test_refusals_and_what_is_handed_over() -> None:
    with RankPool(1, cuda=False, backend="collective") as pool:
        raise_first(pool.call(refused, timeout_s=60))
