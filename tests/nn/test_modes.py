"""The experts under activation checkpointing, torch.compile and FSDP2: the bits of the eager step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from padless.nn import GroupedLinear, MoE
from support.ragged import ROOT
from support.training_layer import EVERY_RECIPE, gradients, layer, module


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("fp8", True), *((name, False) for name in ("fp8", "fp8_compact", "fp8, recompute", "bf16"))],
)
def test_checkpointing(name: str, reentrant: bool) -> None:
    problem, recipe = layer(tokens=40), EVERY_RECIPE[name]
    want = gradients(module(problem, recipe), problem)
    made = module(problem, recipe)
    got = gradients(made, problem, call=lambda *a: checkpoint(made, *a, use_reentrant=reentrant))
    assert_same(got, want)


def test_checkpointing_keeps_nothing_of_the_layer() -> None:
    """What a layer saves goes through torch's hooks, without which checkpointing would not free it."""
    problem = layer(tokens=40)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
        gradients(module(problem, "fp8_compact"), problem)
    shapes = {tuple(t.shape) for t in kept}
    assert (40 * 3, 288) in shapes, "values before the activation"
    assert any(shape[0] == 160 and len(shape) == 2 for shape in shapes), "columns of x"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fp8" else pytest.mark.slow) for name in EVERY_RECIPE]
)
def test_compiled_without_a_break(name: str) -> None:
    problem, recipe = layer(tokens=40, intermediate=160), EVERY_RECIPE[name]
    made = module(problem, recipe)
    want = gradients(made, problem)
    torch._dynamo.reset()
    got = gradients(made, problem, call=torch.compile(made, fullgraph=True, backend="aot_eager"))
    assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_compiled_by_inductor(name: str) -> None:
    problem, recipe = layer(tokens=40), EVERY_RECIPE[name]
    made = module(problem, recipe)
    want = gradients(made, problem)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True)
    assert_same(gradients(made, problem, call=compiled), want)
    with torch.no_grad():  # and follows its weights
        made.w13 *= 2
    assert_same(gradients(made, problem, call=compiled), gradients(made, problem))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_add_to_main_grad(backend: str) -> None:
    problem = layer(tokens=40)
    made = module(problem, "fp8")
    want = gradients(made, problem)
    made.zero_grad()
    for name in ("w13", "w2"):
        weight = getattr(made, name)
        weight.main_grad = torch.full_like(weight, 2.0, requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for _ in range(2):
        p = problem.leaves(torch.float32)
        compiled(p["x"], problem.index, p["prob"], p["shared"]).backward(problem.dout)
    for name in ("w13", "w2"):
        weight = getattr(made, name)
        assert weight.grad is None
        assert torch.equal(weight.main_grad, 2.0 + want[name] + want[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_layers_around_the_experts(dtype: torch.dtype) -> None:
    """Also in the layer's own dtype, where the product is the output: torch 2.11 lost such gradients."""
    torch._dynamo.reset()
    moe = MoE(64, 48, 4, 2, shared_intermediate=32).to(dtype)
    linear = GroupedLinear(2, 64, 48).to(dtype)
    offs = torch.tensor([5, 9], dtype=torch.int32)

    def step(x: torch.Tensor) -> torch.Tensor:
        return linear(moe(x), offs)

    x = torch.randn(12, 64).to(dtype)
    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        moe.zero_grad(), linear.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        results.append([leaf.grad, linear.weight.grad, *(p.grad for p in moe.parameters())])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


# --- FSDP2 -----------------------------------------------------------------------------------------------


def two_processes(*arguments: str) -> dict[str, float]:
    """The differences that fsdp_training.py prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    program = [sys.executable, str(ROOT / "tests/support/fsdp_training.py"), port]
    ranks = [
        subprocess.Popen([*program, str(rank), *arguments], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    return json.loads(printed[0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_fsdp_of_two_processes_is_one_process(recipe: str) -> None:
    """Three steps of two microbatches; the mean over ranks is one float32 addition."""
    assert set(two_processes(recipe).values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("kept",), ("checkpointed",), ("kept", "checkpointed"), ("compiled",)], ids=str)
def test_fsdp_with_checkpoints_and_compiled(flags: tuple[str, ...]) -> None:
    assert set(two_processes("fp8", *flags).values()) == {0.0}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("flags", [(), ("kept",), ("checkpointed",), ("compiled",)], ids=str)
def test_fsdp_of_two_gpus(recipe: str, flags: tuple[str, ...]) -> None:
    """NCCL's mean of two float32 numbers is one addition too, but for the order of its halving."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs and this machine has {torch.cuda.device_count()}")
    assert max(two_processes(recipe, "cuda", *flags).values()) <= 2.0**-23


@pytest.mark.slow
def test_stale_codes_under_fsdp_are_seen() -> None:
    """FSDP2 gathers new values into the parameter that was there, and no version counts it."""
    differences = two_processes("fp8", "kept", "stale")
    assert differences["w13 of step 0"] == 0.0
    assert differences["w13 of step 1"] > 0.1
