"""Codes of a layer that trains: what it multiplies with, in the forms of the hub, read back bit for bit.

What would convince: `padless.moe.moe` of the codes has the bits of the layer's forward pass, before and after a step of
an optimizer, with codes kept and not; files of every form, read by the checkpoint's loader, have the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, BlockScaledTensor, moe, quantize
from padless.checkpoints import Checkpoint
from padless.integrations.checkpoints import load_experts
from padless.nn import ExpertCodes, expert_codes
from support.training_layer import EVERY_RECIPE, layer, module

RECIPES = ("fp8", "fp8, recompute", "mxfp8")  # each way to a forward operand


def same(one: BlockScaledTensor, other: BlockScaledTensor) -> bool:
    codes, scales = ((t.data.view(torch.uint8), t.scale.float()) for t in (one, other))
    assert one.format == other.format
    return torch.equal(codes[0], scales[0]) and torch.equal(codes[1], scales[1])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("keep", [False, True])
def test_they_are_what_the_layer_multiplies_with(name: str, keep: bool) -> None:
    """After a step, too, and with codes that the layer kept; other weights are seen."""
    problem = layer(tokens=40, intermediate=160)
    made = module(problem, EVERY_RECIPE[name], dtype=torch.bfloat16, keep_codes=keep)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.3)
    given = problem.x.bfloat16(), problem.index, problem.prob
    seen = []
    for _ in range(2):
        out = made(*given)
        codes = made.codes()
        seen.append(out.detach())
        assert torch.equal(moe.moe(*given, codes.w13, codes.w2), out)
        out.float().square().sum().backward()
        optimizer.step()
    assert not torch.equal(*seen)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
@pytest.mark.parametrize("joined", [False, True])
def test_files_have_the_bits(name: str, joined: bool) -> None:
    """Without a copy: tensors of the file are views of the codes."""
    problem = layer(tokens=40, intermediate=128)
    made = module(problem, name, dtype=torch.bfloat16)
    codes = made.codes()
    tensors = codes.tensors("model.layers.3.mlp.experts", joined=joined)
    addresses = {
        t.untyped_storage().data_ptr() for t in (codes.w13.data, codes.w13.scale, codes.w2.data, codes.w2.scale)
    }
    assert {t.untyped_storage().data_ptr() for t in tensors.values()} == addresses
    with Checkpoint(tensors) as checkpoint:
        read = load_experts(checkpoint, "model.layers.3.mlp.experts")
    assert same(read.w13, codes.w13)
    assert same(read.w2, codes.w2)
    given = problem.x.bfloat16(), problem.index, problem.prob
    assert torch.equal(moe.moe(*given, read.w13, read.w2, **read.options), made(*given))


def test_files_of_one_rank() -> None:
    problem = layer(tokens=20, intermediate=128)
    names = module(problem, "fp8").codes().tensors("experts", first=10)
    assert {name.split(".")[1] for name in names} == {"10", "11", "12", "13", "14"}
    assert names["experts.12.down_proj.weight_scale_inv"].shape == (2, 1)


def test_gpt_oss_blocks() -> None:
    """MXFP4 with alternating rows of gate and up, as gpt-oss' files have them."""
    g = torch.Generator().manual_seed(5)
    w13, w2 = (torch.randn(3, n, k, generator=g) for n, k in ((192, 160), (160, 96)))
    first, second = (quantize(w, MXFP4, kind="weight", scale_layout="plain") for w in (w13, w2))
    codes = ExpertCodes(first, second, "alternating")
    tensors = codes.tensors("experts")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "experts.gate_up_proj_blocks": (3, 192, 5, 16),
        "experts.gate_up_proj_scales": (3, 192, 5),
        "experts.down_proj_blocks": (3, 160, 3, 16),
        "experts.down_proj_scales": (3, 160, 3),
    }
    with Checkpoint(tensors) as checkpoint:
        for name, t in (("gate_up_proj", first), ("down_proj", second)):
            assert same(checkpoint.weight(f"experts.{name}"), t)


def test_weights_the_other_way_round() -> None:
    problem, recipe = layer(intermediate=160), EVERY_RECIPE["fp8"]
    got = expert_codes(problem.w13.mT.contiguous(), problem.w2.mT.contiguous(), recipe, input_major=True)
    want = expert_codes(problem.w13, problem.w2, recipe)
    assert same(got.w13, want.w13)
    assert same(got.w2, want.w2)


def test_a_dtensor_is_gathered(tmp_path: Any) -> None:
    """One process with a mesh of one rank: its parameters are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    problem = layer(tokens=20, intermediate=160)
    made = module(problem, "fp8")
    want = made.codes()
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name in ("w13", "w2"):
            sharded = distribute_tensor(getattr(made, name).detach(), mesh, [Shard(0)])
            setattr(made, name, torch.nn.Parameter(sharded))
        got = made.codes()
    finally:
        torch.distributed.destroy_process_group()
    assert same(got.w13, want.w13)
    assert same(got.w2, want.w2)


def test_what_has_no_form_is_refused() -> None:
    problem = layer(tokens=20, intermediate=160)
    for name in ("bf16", "nvfp4"):
        with pytest.raises(ValueError, match="forward product has no codes"):
            module(problem, name).codes()
    codes = module(problem, "fp8").codes()
    with pytest.raises(ValueError, match="I is 160, and gate and up share scales"):
        codes.tensors("experts")
    with pytest.raises(ValueError, match="gate_up is 'interleaved'"):
        module(problem, "fp8", gate_up="interleaved").codes().tensors("experts", joined=True)
    with pytest.raises(ValueError, match="w13 must be"):
        ExpertCodes(codes.w13.data, codes.w2)
    with pytest.raises(ValueError, match="w2 must be"):
        ExpertCodes(codes.w13, quantize(problem.w2[0], FP8_BLOCK, kind="weight"))
