"""padless' experts in Megatron-Core's own MoELayer, on a CPU: both forms of its seam, dispatchers, checkpoints, hooks.

What would convince: with the same weights the layer of bfloat16 products is near Megatron's own experts, outputs and all
gradients, the router's included; FP8 is near it as FP8 is; checkpoints have the keys, shapes, places and values of
Megatron's; main_grad and delayed gradients are the same numbers. The package is not in the tests' environment: it is
read from PYTHONPATH (docs/frameworks.md), and of CUDA nothing but streams and events is stood in for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padless.testing.ranks import raise_first, run_ranks
from support.megatron_layer import (
    EXPERTS,
    HIDDEN,
    config_of,
    copied,
    layer_of,
    over_ranks,
    plugin,
    sequential,
    shards,
    stand_ins,
    step,
)
from support.training_layer import sqnr

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core on PYTHONPATH")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """megatron.core with process groups of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        state = importlib.import_module("megatron.core.parallel_state")
        store = tmp_path_factory.mktemp("megatron") / "store"
        torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
        state.initialize_model_parallel()
        try:
            yield importlib.import_module("megatron.core")
        finally:
            state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("recipe", "least"), [("bf16", 38.0), ("fp8", 20.0), ("mxfp8", 20.0)])
def test_near_megatrons_own_experts(core: Any, dispatcher: str, recipe: str, least: float) -> None:
    torch.manual_seed(1)
    config = config_of(moe_token_dispatcher_type=dispatcher)
    theirs, ours = layer_of(config, sequential()), layer_of(config, plugin().experts_spec(recipe))
    copied(ours, theirs)
    got, want = step(ours), step(theirs)
    for what in want:
        assert sqnr(got[what], want[what]) > least, (what, sqnr(got[what], want[what]))


def test_probabilities_on_the_input(core: Any) -> None:
    config = config_of(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True)
    theirs, ours = layer_of(config, sequential()), layer_of(config, plugin().experts_spec("bf16"))
    copied(ours, theirs)
    got, want = step(ours), step(theirs)
    for what in want:
        assert sqnr(got[what], want[what]) > 38.0, what


def test_rows_behind_the_counts_take_part_in_nothing(core: Any) -> None:
    ours = layer_of(config_of(), plugin().experts_spec("fp8")).experts
    x = torch.randn(40, HIDDEN).bfloat16()
    counts, probs = torch.tensor([10, 0, 1, 20]), torch.rand(40)
    want, _ = ours(x[:31], counts, probs[:31])
    x[31:], probs[31:] = float("nan"), float("nan")
    got, bias = ours(x, counts, probs)
    assert bias is None
    assert torch.equal(got[:31], want)
    assert (got[31:] == 0).all()


def test_main_grad_and_delayed_gradients(core: Any) -> None:
    """As Megatron's data parallelism has them: added once, hooks behind backward_dw, the same numbers."""
    torch.manual_seed(2)
    plain = layer_of(config_of(), plugin().experts_spec("fp8"))
    want = step(plain)
    config = config_of()
    config.delay_wgrad_compute = True  # Megatron asks for overlapped communication with it, which one rank has not
    late = layer_of(config, plugin().experts_spec("fp8"))
    late.load_state_dict(plain.state_dict(), strict=False)
    seen: list[bool] = []
    weights = late.experts.w13, late.experts.w2
    for weight in weights:
        assert weight.skip_backward_post_hook
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        late.experts.register_wgrad_accumulation_and_reduce_hooks(
            lambda weight=weight: seen.append(weight.grad is not None and weight.grad_added_to_main_grad)
        )

    def dw() -> None:
        assert all((weight.main_grad == 0).all() for weight in weights)
        late.backward_dw() if hasattr(late, "backward_dw") else late.experts.backward_dw()

    step(late, before=dw)
    assert seen == [True, True]
    for weight, name in zip(weights, ("w13", "w2"), strict=True):
        assert torch.equal(weight.main_grad.bfloat16(), want[name]), name
    plain.experts.backward_dw()


def test_checkpoints_are_megatrons(core: Any) -> None:
    """Keys, shapes, offsets and values; and what is read joins to the parameters."""
    config = config_of()
    theirs, ours = layer_of(config, sequential()), layer_of(config, plugin().experts_spec("fp8"))
    copied(ours, theirs)
    got, want = shards(ours), shards(theirs)
    assert got.keys() == want.keys()
    assert len(got) == 3 * EXPERTS
    assert all(torch.equal(got[where].view(-1), want[where].view(-1)) for where in want)
    state = ours.experts.sharded_state_dict("mlp.experts.")
    for name, factory in state.items():
        merged = factory.merge_fn([part.data for part in factory.build()])
        assert torch.equal(merged, getattr(ours.experts, name.rpartition(".")[2]))


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_two_processes(dispatcher: str) -> None:
    """Expert parallelism over gloo: an expert's rows are those of both ranks; each has its part of the checkpoint."""
    for recipe, least in (("bf16", 38.0), ("fp8", 20.0)):
        found = raise_first(
            run_ranks(over_ranks, 2, dispatcher, recipe, cuda=False, backend="collective", timeout_s=120)
        )
        for of_rank in found:
            assert of_rank.pop("checkpoints")
            assert min(of_rank.values()) > least, of_rank


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gated_linear_unit": False}, "experts are not SwiGLU"),
        ({"activation_func": torch.nn.functional.gelu}, "experts are not SwiGLU"),
        ({"add_bias_linear": True}, "add_bias_linear is set"),
    ],
)
def test_what_is_not_computed_is_refused(core: Any, changed: dict[str, Any], message: str) -> None:
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=group, expt_tp=group, expt_dp=group)
    with pytest.raises(ValueError, match=message):
        plugin().PadlessExperts(2, config_of(**changed), pg_collection=groups)
    halves = SimpleNamespace(ep=group, expt_tp=SimpleNamespace(size=lambda: 2), expt_dp=group)
    with pytest.raises(ValueError, match="expert tensor parallelism is not 1"):
        plugin().PadlessExperts(2, config_of(), pg_collection=halves)
    with pytest.raises(ValueError, match="recipe is 'fp9'"):
        plugin().experts_spec("fp9")
