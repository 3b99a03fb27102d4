"""Cases of exchanges among other parts of torch, which `support.ep_cases` runs with its own: copies of modules, weights
that are DTensors, inference mode, torch.device, FSDP2, and arguments that are wrong on one rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from padless.distributed import ExpertParallel, expert_parallel_moe
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.moe import Activation, moe
from padless.nn import DelayedWgrad, Experts, LoraExperts, MoE
from padless.quantization.quantize import quantize
from padless.testing.exchange import draw
from padless.verify.ranks.exchange import Ranks
from padless.verify.ranks.layers import assert_bits

HIDDEN, INTERMEDIATE, TOP_K, MOST = 64, 32, 2, 8


def exchange(ranks: Ranks, fmt: Any = torch.float32, **options: Any) -> ExpertParallel:
    given = {"backend": ranks.backend, "device": ranks.device, "timeout": ranks.timeout}
    return ExpertParallel(None, 2 * ranks.size, HIDDEN, TOP_K, MOST, fmt, **{**given, **options})


def own(ranks: Ranks, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids and weights of this rank in float32."""
    p = draw([4] * ranks.size, 2 * ranks.size, HIDDEN, TOP_K, seed, distinct=True, dtype=torch.float32)
    return ranks.own(p)


def codes(experts: int, fmt: Any = FP8_BLOCK) -> list[Any]:
    """Weights of so many experts, the same on all ranks."""
    generator = torch.Generator().manual_seed(2)
    shapes = (experts, 2 * INTERMEDIATE, HIDDEN), (experts, HIDDEN, INTERMEDIATE)
    return [quantize(torch.randn(s, generator=generator) / 8, fmt, kind="weight") for s in shapes]


def copies(ranks: Ranks) -> None:
    """A deep copy of a layer has other weights and the same exchange: averages of weights can be kept."""
    layer = MoE(HIDDEN, INTERMEDIATE, 2 * ranks.size, TOP_K, ep=exchange(ranks), device=ranks.device)
    x, _, _ = own(ranks, 1)
    other = copy.deepcopy(layer)
    assert other.experts.ep is layer.experts.ep
    assert other.experts.w13 is not layer.experts.w13
    assert_bits(other(x), layer(x), "copy")
    averaged = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(layer)
    before = layer.experts.w13.detach().clone()
    with torch.no_grad():
        layer.experts.w13.mul_(3.0)
    averaged.update_parameters(layer)
    torch.testing.assert_close(averaged.module.experts.w13, 2.0 * before)
    averaged(x).sum().backward()


def inference_tensors(ranks: Ranks) -> None:
    """Tokens that rank 0 made in inference mode are constants as others are, with the same bits."""
    x, ids, weights = own(ranks, 3)
    with torch.inference_mode():
        made = x.clone() if ranks.rank == 0 else x
    mine = [w.to(ranks.device) for w in codes(2)]
    layers: list[Callable[..., Any]] = [
        Experts(HIDDEN, INTERMEDIATE, 2 * ranks.size, ep=exchange(ranks), recipe=recipe, device=ranks.device)
        for recipe in ("fp8", "bf16")
    ]
    layers.append(LoraExperts(*mine, rank=4, ep=exchange(ranks)))
    layers.append(partial(moe, w13=mine[0], w2=mine[1], ep=exchange(ranks)))
    layers.append(lambda *given, ep=layers[0].ep: ep.dispatch(*given)[0])
    for number, layer in enumerate(layers):
        found = []
        for given in (x, made):
            out = layer(given, ids, weights)
            out.nan_to_num().sum().backward()
            found.append([out.detach()] + [p.grad for p in getattr(layer, "parameters", list)()])
            getattr(layer, "zero_grad", list)()
        for got, want in zip(found[1], found[0], strict=True):
            assert_bits(got, want, f"layer {number}")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def wrong_on_one_rank(ranks: Ranks) -> None:
    """What the first rank can see before rows are sent is told to all."""
    if ranks.backend != "collective":
        return
    n = ranks.size
    x, ids, weights = own(ranks, 4)
    w13, w2 = (w.to(ranks.device) for w in codes(2))
    wider, plain = (w.to(ranks.device) for w in codes(3)), torch.randn(2, 2 * INTERMEDIATE, HIDDEN)

    def experts(change: Callable[[Experts], None], **options: Any) -> Callable[[bool], Any]:
        def call(wrong: bool) -> Any:
            layer = Experts(HIDDEN, INTERMEDIATE, 2 * n, ep=exchange(ranks), device=ranks.device, **options)
            if wrong:
                change(layer)
            return layer(x, ids, weights)

        return call

    def parametrized(layer: Experts) -> None:
        register_parametrization(layer, "w13", Doubled())

    def of_all(layer: Experts) -> None:
        layer.w13 = nn.Parameter(torch.randn(2 * n + 2, 2 * INTERMEDIATE, HIDDEN, device=ranks.device))

    def of_other_rows(layer: Experts) -> None:
        layer.w2 = nn.Parameter(torch.randn(2, HIDDEN, 2 * INTERMEDIATE, device=ranks.device))

    def adapted(wrong: bool) -> Any:
        layer = LoraExperts(w13, w2, rank=4, ep=exchange(ranks))
        layer.active = "nothing" if wrong else "default"
        return layer(x, ids, weights)

    def served(function: Callable[..., Any], fmt: Any, **wrong: Any) -> Callable[[bool], Any]:
        right = {"w13": w13, "w2": w2}
        return lambda is_wrong: function(x, ids, weights, ep=exchange(ranks, fmt), **(wrong if is_wrong else right))

    def named(weights: list[Any]) -> dict[str, Any]:
        return dict(zip(("w13", "w2"), weights, strict=True))

    both = named([w13, w2])
    first, second = wider
    cases: tuple[tuple[Callable[[bool], Any], str], ...] = (
        (experts(parametrized, delayed_wgrad=DelayedWgrad()), "delayed_wgrad is given and w13 is computed"),
        (experts(of_all), r"w13 is \(\d+, .*; it must be \(2, 64, 64\)"),
        (experts(of_other_rows), r"w2 is \(2, .*; it must be \(2, 64, 32\)"),
        (adapted, "active is 'nothing'"),
        (served(moe, FP8_BLOCK, **both, backend="fast"), "backend is 'fast'; allowed"),
        (served(expert_parallel_moe, FP8_BLOCK, **both, backend="fast"), "backend is 'fast'; allowed"),
        (served(expert_parallel_moe, FP8_BLOCK, w13=first, w2=second), "w13 has 3 experts and rank 0 has 2"),
        (served(expert_parallel_moe, FP8_BLOCK, w13=w13, w2=second), "w2 must be"),
        (served(expert_parallel_moe, FP8_BLOCK, w13=plain, w2=w2), "w13 must be a .* BlockScaledTensor"),
        (served(expert_parallel_moe, FP8_BLOCK, w13=[w13], w2=w2), "w13 must be a .* BlockScaledTensor"),
        (served(expert_parallel_moe, FP8_BLOCK, **both, activation="swiglu"), "activation must be a Activation"),
        (served(expert_parallel_moe, FP8_BLOCK, **both, activation=Activation("relu2")), "w2 must be"),
        (served(expert_parallel_moe, FP8_BLOCK, **both, global_scale2=torch.ones(1)), "global_scale2 must be None"),
        (served(expert_parallel_moe, FP8_BLOCK, experts_fn=3), "experts_fn must be a function"),
        (served(expert_parallel_moe, FP8_BLOCK, experts_fn=lambda rows, _: rows, w13=w13), "and not both"),
        (served(expert_parallel_moe, FP8_BLOCK, **named(codes(2, MXFP8))), "w13 has format MXFP8"),
    )
    for call, words in cases:
        told = words if ranks.rank == 0 else "rank 0 was given wrong arguments"
        with pytest.raises(ValueError, match=told):
            call(ranks.rank == 0)
    with pytest.raises(ValueError, match=r"ep must be a padless\.distributed\.ExpertParallel"):
        expert_parallel_moe(x, ids, weights, None, **both)


def settings(ranks: Ranks) -> None:
    """Arguments of another type are refused where they are given, by name; a map may come from an iterator."""
    right = {"num_experts": 2 * ranks.size, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": MOST}
    turns = [e % ranks.size for e in range(2 * ranks.size)]
    for name, wrong in (
        ("num_experts", float(2 * ranks.size)), ("num_experts", None), ("hidden", 64.0), ("hidden", torch.tensor(64)),
        ("top_k", 2.0), ("top_k", True), ("max_tokens", 8.0), ("max_tokens", "8"), ("timeout", float("nan")),
        ("timeout", "1"), ("timeout", None), ("programs", 1.5), ("capacity", True), ("scale_rule", "floor"),
        ("device", 3.5), ("expert_map", [float(r) for r in turns]),
        ("expert_map", "".join(map(str, turns))), ("expert_map", 7), ("expert_map", torch.tensor(3)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name} (is|must be)"):
            ExpertParallel(None, **{**right, "device": ranks.device, name: wrong})
    with pytest.raises(ValueError, match=r"^scale_rule must be None for rows that are not quantized"):
        ExpertParallel(None, **right, device=ranks.device, fmt=torch.bfloat16, scale_rule="te")
    ExpertParallel(None, **right, device=ranks.device, backend="collective", fmt=NVFP4, scale_rule="torchao")
    for given in (iter(turns), torch.tensor(turns)):
        assert exchange(ranks, expert_map=given).expert_map == tuple(turns)


def on_the_meta_device(ranks: Ranks) -> None:
    """An exchange that is made in a block of torch.device("meta"), as models are, is one of its own device."""
    made = exchange(ranks)
    with torch.device("meta"):
        ep = exchange(ranks)
        layer = MoE(HIDDEN, INTERMEDIATE, 2 * ranks.size, TOP_K, ep=ep)
    assert layer.experts.w13.is_meta
    for got, want in zip(ep.dispatch(*own(ranks, 5)), made.dispatch(*own(ranks, 5)), strict=True):
        for mine, other in zip(got, want, strict=True) if isinstance(got, tuple) else ((got, want),):
            assert torch.equal(mine, other)


def groups(ranks: Ranks) -> None:
    """A rank outside of a group is told so."""
    one = dist.new_group([0])
    mesh = DeviceMesh(ranks.device.type, [0], mesh_dim_names=("ep",))
    for given in (one, mesh):
        options = {"backend": "collective", "device": ranks.device}
        if ranks.rank == 0:
            assert ExpertParallel(given, 2, HIDDEN, TOP_K, MOST, **options).num_ranks == 1
        else:
            with pytest.raises(ValueError, match="group_or_mesh is of other ranks than this one"):
                ExpertParallel(given, 2, HIDDEN, TOP_K, MOST, **options)


def distributed_weights(ranks: Ranks) -> None:
    """`distribute` takes the mesh of its exchange alone, once, and leaves frozen weights frozen. A main_grad is refused
    before it, and behind it by calls that would add nothing to it, whichever rank has one.
    """
    n = ranks.size
    mesh = init_device_mesh(ranks.device.type, (1, n), mesh_dim_names=("efsdp", "ep"))
    others = [mesh, None, "ep", *([mesh["efsdp"]] if n > 1 else [])]
    if n == 2:  # as many ranks, and others
        others.append(DeviceMesh(ranks.device.type, [1, 0], mesh_dim_names=("ep",)))
    layer = Experts(HIDDEN, INTERMEDIATE, 2 * n, ep=exchange(ranks), device=ranks.device)
    layer.w13.requires_grad_(False)
    for given in others:
        with pytest.raises(ValueError, match=r"^mesh must be the one-dimensional DeviceMesh of ep's ranks"):
            layer.distribute(given)
    layer.w2.main_grad = torch.zeros_like(layer.w2)
    with pytest.raises(ValueError, match="w2 has a main_grad, and gradients of DTensors go to autograd"):
        layer.distribute(mesh["ep"])
    assert not hasattr(layer.w13, "to_local"), "nothing is changed where it is refused"
    del layer.w2.main_grad
    layer.distribute(mesh["ep"])
    assert (layer.w13.requires_grad, layer.w2.requires_grad) == (False, True)
    layer(*own(ranks, 6)).sum().backward()
    assert layer.w13.grad is None
    assert tuple(layer.w2.grad.shape) == (2 * n, HIDDEN, INTERMEDIATE)
    with pytest.raises(ValueError, match=r"^w13 is a DTensor already"):
        layer.distribute(mesh["ep"])
    wanted, layer.w2.grad = layer.w2.grad.full_tensor(), None
    layer.w13.main_grad = torch.zeros(())  # frozen: nothing is to be added to it
    mains = [layer.w2.detach().clone(), torch.zeros_like(layer.w2.to_local())]
    for owner, main in ((n - 1, mains[0]), (0, mains[1])):
        words = f"rank {owner} was given wrong arguments"
        if ranks.rank == owner:
            layer.w2.main_grad, words = main, r"^w2 has a main_grad, and .*; delete w2\.main_grad and read w2\.grad$"
        with pytest.raises(ValueError, match=words):
            layer(*own(ranks, 6))
        with torch.no_grad():
            layer(*own(ranks, 6))
        if ranks.rank == owner:
            del layer.w2.main_grad
    layer(*own(ranks, 6)).sum().backward()
    assert_bits(layer.w2.grad.full_tensor(), wanted, "gradient")


def adapters_that_are_off(ranks: Ranks) -> None:
    """With no adapter active, codes that `moe` has no gradients for and tokens that need them on rank 0 alone, all
    ranks have a backward pass.
    """
    x, ids, weights = own(ranks, 7)
    layer = LoraExperts(*(w.to(ranks.device) for w in codes(2, MXFP8)), rank=4, ep=exchange(ranks))
    layer.active = None
    x.requires_grad_(ranks.rank == 0)
    out = layer(x, ids, weights)
    out.sum().backward()
    assert (x.grad is not None) == (ranks.rank == 0)
    with torch.no_grad():
        assert_bits(layer(x, ids, weights), out.detach(), "served")


def written_in_place(ranks: Ranks) -> None:
    """FSDP2's hooks stay on the output of a layer that is written to: it is no view, which torch loses them of."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for shape in ((4, HIDDEN), (2, 2, HIDDEN)):
        found = []
        for in_place in (False, True):
            torch.manual_seed(1)
            layer = MoE(HIDDEN, INTERMEDIATE, 2, TOP_K, shared_intermediate=16, device=ranks.device)
            fully_shard(layer, mesh=mesh)
            out = layer(own(ranks, 8)[0].view(shape))
            out = out.add_(1.0) if in_place else out + 1.0
            out.square().sum().backward()
            found.append([p.grad.full_tensor() for p in layer.parameters()])
        for got, want in zip(found[1], found[0], strict=True):
            assert_bits(got, want, f"{shape}")


CASES = {
    function.__name__: function
    for function in (
        copies, inference_tensors, wrong_on_one_rank, settings, on_the_meta_device, groups, distributed_weights,
        adapters_that_are_off, written_in_place,
    )
}  # fmt: skip
