"""Layers of Megatron-Core on a CPU, its own experts and padless', for tests of one process and of several."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from padless.testing.ranks import Rank
from support.training_layer import sqnr

HIDDEN, HALF, EXPERTS, TOP_K = 128, 64, 4, 2


class Nothing:
    """A stream or an event where there is no GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def stand_ins(patch: pytest.MonkeyPatch) -> None:
    """For what Megatron asks of CUDA where there is none, and for Transformer Engine's product, which 0.16 names."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    patch.setattr(utils, "te_general_gemm", None, raising=False)
    if torch.cuda.is_available():
        return
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, Nothing)
    patch.setattr(torch.cuda, "current_stream", Nothing)
    patch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    dispatchers = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = dispatchers.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        found = move(tensor, as_numpy, False)
        return found.numpy() if as_numpy and torch.is_tensor(found) else found

    patch.setattr(dispatchers, "maybe_move_tensor_to_cpu", moved)


def config_of(**more: Any) -> Any:
    given = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": HALF, "ffn_hidden_size": HALF, "moe_router_topk": TOP_K, "add_bias_linear": False,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16, "bf16": True, "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall", "bias_activation_fusion": False,
    }  # fmt: skip
    return importlib.import_module("megatron.core.transformer").TransformerConfig(**(given | more))


def layer_of(config: Any, experts: Any) -> Any:
    moe_layer = importlib.import_module("megatron.core.transformer.moe.moe_layer")
    made = moe_layer.MoELayer(config, moe_layer.MoESubmodules(experts=experts), layer_number=1)
    return made.train()


def sequential() -> Any:
    """Megatron's own experts, one after the other, by the form of its version."""
    experts = importlib.import_module("megatron.core.transformer.moe.experts")
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    mlp = importlib.import_module("megatron.core.transformer.mlp")
    spec = importlib.import_module("megatron.core.transformer.spec_utils").ModuleSpec
    parts = mlp.MLPSubmodules(linear_fc1=layers.ColumnParallelLinear, linear_fc2=layers.RowParallelLinear)
    moe_layer = importlib.import_module("megatron.core.transformer.moe.moe_layer")
    if hasattr(moe_layer, "ExpertsBuilder"):
        return lambda n, config, *, pg_collection, name=None: experts.SequentialMLP(
            n, config, parts, pg_collection=pg_collection
        )
    return spec(module=experts.SequentialMLP, submodules=parts)


def plugin() -> Any:
    return importlib.import_module("padless.integrations.megatron")


def copied(ours: Any, theirs: Any) -> None:
    """The weights of Megatron's layer into ours."""
    with torch.no_grad():
        for e, expert in enumerate(theirs.experts.local_experts):
            ours.experts.w13[e].copy_(expert.linear_fc1.weight)
            ours.experts.w2[e].copy_(expert.linear_fc2.weight)
        ours.router.load_state_dict(theirs.router.state_dict())


def step(layer: Any, seed: int = 0, before: Any = None) -> dict[str, torch.Tensor]:
    """The output and the gradients of x, the router, and the experts as (E, N, K)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(33, 1, HIDDEN, generator=g).bfloat16().requires_grad_()
    dout = torch.randn(33, 1, HIDDEN, generator=g).bfloat16()
    layer.zero_grad()
    out, _ = layer(x)
    out.backward(dout)
    if before is not None:
        before()
    if hasattr(layer.experts, "w13"):
        weights = {name: getattr(layer.experts, name).grad for name in ("w13", "w2")}
    else:
        linears = [(e.linear_fc1, e.linear_fc2) for e in layer.experts.local_experts]
        weights = {name: torch.stack([pair[i].weight.grad for pair in linears]) for i, name in enumerate(("w13", "w2"))}
    return {"out": out.detach(), "x": x.grad, "router": layer.router.weight.grad, **weights}


def shards(layer: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """Every tensor that a checkpoint of the layer's experts has, by all that says where it belongs."""
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    found = {}
    state = layer.experts.sharded_state_dict("decoder.layers.0.mlp.experts.", metadata=None)
    for each in state.values():
        parts = each.build() if isinstance(each, mapping.ShardedTensorFactory) else each
        for t in parts if isinstance(parts, list) else [parts]:
            if isinstance(t, mapping.ShardedTensor):
                where = (t.key, t.global_shape, t.global_offset, t.axis_fragmentations, t.local_shape, t.replica_id)
                found[where] = t.data.detach()
    return found


def over_ranks(rank: Rank, dispatcher: str, recipe: str) -> dict[str, Any]:
    """Of expert parallelism: SQNR of a step against Megatron's own experts, and whether checkpoints are the same."""
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        state = importlib.import_module("megatron.core.parallel_state")
        state.initialize_model_parallel(expert_model_parallel_size=rank.size)
        torch.manual_seed(3)
        config = config_of(expert_model_parallel_size=rank.size, moe_token_dispatcher_type=dispatcher)
        theirs, ours = layer_of(config, sequential()), layer_of(config, plugin().experts_spec(recipe))
        copied(ours, theirs)
        assert len(ours.experts.w13) == EXPERTS // rank.size
        assert not ours.experts.w13.allreduce
        got, want = step(ours, rank.rank), step(theirs, rank.rank)
        found: dict[str, Any] = {what: sqnr(got[what], want[what]) for what in want}
        mine, other = shards(ours), shards(theirs)
        found["checkpoints"] = mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in other)
        state.destroy_model_parallel()
    return found
