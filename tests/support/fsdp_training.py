"""Two processes that train `padless.nn.Experts` under FSDP2, and one that trains it alone: a program.

``python fsdp_training.py PORT RANK RECIPE [kept] [stale] [cuda] [checkpointed] [compiled]`` is one of two ranks on this
machine: of a gloo group, or with ``cuda`` of an NCCL group of two GPUs. Each rank has half of the tokens. The sharded
layer is checkpointed, compiled and keeps its codes where it says so, the one alone never. Rank 0 prints a JSON object:
the largest difference between the two trainings, by what was compared. Addresses of weights are not looked at, since
a GPU's allocator would give gathered weights the same one every time.
With ``stale`` the codes of a replaced weight are kept as well, which has to be seen.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from padless.nn import Experts, weight_codes
from support.training_layer import Layer, layer, module

WORLD = 2
STEPS = 3


def halves(problem: Layer, rank: int) -> Layer:
    """The tokens of one rank."""
    count = problem.x.shape[0] // WORLD
    mine = slice(rank * count, (rank + 1) * count)
    parts = {name: getattr(problem, name)[mine] for name in ("x", "index", "prob", "shared", "dout")}
    return Layer(w13=problem.w13, w2=problem.w2, **parts)


def update(trained: Experts) -> None:
    """A step of descent that no torch.optim.Optimizer takes part in: only the module can see that weights changed."""
    with torch.no_grad():
        for weight in trained.parameters():
            weight.sub_(0.05 * weight.grad)
    trained.zero_grad()


def step(trained: Experts, problem: Layer, checkpointed: bool = False) -> dict[str, torch.Tensor]:
    """Two microbatches."""
    p = problem.leaves(torch.float32)
    for _ in range(2):
        inputs = (p["x"], problem.index, p["prob"], p["shared"])
        out = checkpoint(trained, *inputs, use_reentrant=False) if checkpointed else trained(*inputs)
        out.backward(problem.dout)
    return {"out": out.detach(), "x": p["x"].grad}


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def main(port: str, rank: int, recipe: str, *flags: str) -> None:
    device = "cuda" if "cuda" in flags else "cpu"
    facts_of = weight_codes.facts_of
    weight_codes.facts_of = lambda weight, recipe: [f for f in facts_of(weight, recipe) if f != weight.data_ptr()]
    if "stale" in flags:
        weight_codes.WeightCodes.forget = lambda self: None
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    drawn = layer(tokens=64, hidden=48, intermediate=32)
    problem = Layer(**{name: t.to(device) for name, t in vars(drawn).items()})
    sharded, *alone = (module(problem, recipe).to(device) for _ in range(1 + WORLD))
    sharded.keep_codes = "kept" in flags
    if "compiled" in flags:
        sharded.compile(backend="aot_eager")
    fully_shard(sharded, mesh=init_device_mesh(device, (WORLD,)))
    differences: dict[str, float] = {}
    for number in range(STEPS):
        got = step(sharded, halves(problem, rank), "checkpointed" in flags)
        found = [step(one, halves(problem, other)) for other, one in enumerate(alone)]
        want = dict(found[rank])
        for name in ("w13", "w2"):
            mean = sum(getattr(one, name).grad for one in alone) / WORLD
            got[name], want[name] = full(getattr(sharded, name).grad), mean
            for one in alone:
                getattr(one, name).grad = mean.clone()
        for name, value in got.items():
            differences[f"{name} of step {number}"] = float((value - want[name]).abs().max() / want[name].abs().max())
        for one in (sharded, *alone):
            update(one)
    if rank == 0:
        print(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
