"""The check of ``padless verify`` for a training step of expert layers: its gradients, and what they may depend on.

Each part raises AssertionError. Groups have 0, 1, 127 and 129 rows among others, some ids are no expert, and tokens
without one hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from padless.nn import RECIPES, Experts, Recipe
from padless.runtime.devices import backend_on_cpu
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place

SIZES = (129, 1, 127, 0, 40)  # tokens of the first experts
WORST_DB = {True: 19.0, False: 38.0}  # against float64 of nothing quantized, by whether anything is FP8
AS_ON_CPU_DB = 30.0  # the tensor core keeps 13 fraction bits of a sum, and a code may be another one for it
LEFT_OUT = ("mxfp8", "mxfp8_bf16_wgrad", "nvfp4")  # sizes are other ones; gradients are rounded by chance
CHECKED: dict[str, Recipe] = {
    **{name: recipe for name, recipe in RECIPES.items() if name not in LEFT_OUT},
    "fp8, recompute": Recipe(save="recompute"),
}
REPLAYED = {name: CHECKED[name] for name in ("fp8", "fp8, recompute")}
Result = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """Bfloat16 values of a layer of E experts, (T, H) and (T, k), and its weights."""

    x: torch.Tensor
    ids: torch.Tensor
    prob: torch.Tensor
    shared: torch.Tensor
    dout: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    def to(self, device: str) -> Problem:
        """Copies on a device."""
        return Problem(*(t.to(device, copy=True) for t in vars(self).values()))


def draw(hidden: int, intermediate: int, seed: int, tokens: int = 200, top_k: int = 3) -> Problem:
    """A random layer on the CPU; token 7 has no expert, and NaN."""
    g = torch.Generator().manual_seed(seed)
    experts = len(SIZES) + 2
    ids = [expert for expert, size in enumerate(SIZES) for _ in range(size)]
    others = torch.randint(len(SIZES) - 1, experts + 2, (tokens * top_k - len(ids),), generator=g)
    index = torch.cat([torch.tensor(ids), others])[torch.randperm(tokens * top_k, generator=g)].view(tokens, top_k)
    index[7], index[8, 0] = experts + 3, -1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    x, dout = normal(tokens, hidden), normal(tokens, hidden)
    dout *= torch.exp2(torch.randint(-5, 6, (tokens, 1), generator=g).float())
    x[7] = float("nan")
    shared = normal(tokens, hidden)
    prob = torch.rand((tokens, top_k), generator=g)
    w13 = normal(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = normal(experts, hidden, intermediate) / intermediate**0.5
    return Problem(*(t.bfloat16() if t.is_floating_point() else t for t in (x, index, prob, shared, dout, w13, w2)))


PROBLEMS = ((272, 208), (256, 192))  # (H, I): blocks cut everywhere; 2 I for the product's epilogue


def experts_of(problem: Problem, recipe: Recipe) -> Experts:
    """The layer with copies of the problem's weights."""
    count, hidden, intermediate = problem.w2.shape
    made = Experts(hidden, intermediate, count, recipe=recipe, device="meta", dtype=problem.w2.dtype)
    made.w13, made.w2 = (torch.nn.Parameter(w.clone()) for w in (problem.w13, problem.w2))
    return made


def step(problem: Problem, experts: Experts, call: Callable[..., torch.Tensor] | None = None) -> Result:
    """The output and the gradients of one step of the layer, or of ``call``, made of it."""
    leaves = [t.detach().clone().requires_grad_() for t in (problem.x, problem.prob, problem.shared)]
    experts.w13.grad = experts.w2.grad = None
    x, prob, shared = leaves
    out = (experts if call is None else call)(x, problem.ids, prob, shared)
    out.backward(problem.dout)
    found = {"out": out.detach(), "x": x.grad, "prob": prob.grad, "shared": shared.grad}
    found |= {"w13": experts.w13.grad, "w2": experts.w2.grad}
    return {name: t for name, t in found.items() if t is not None}


def in_float64(problem: Problem) -> Result:
    """The same by torch's autograd, expert by expert; rows of token 7 are those of its shared row alone."""
    clean = [t.double().nan_to_num(0.0).requires_grad_() for t in (problem.x, problem.prob, problem.shared)]
    w13, w2 = (w.double().requires_grad_() for w in (problem.w13, problem.w2))
    x, prob, shared = clean
    out = shared
    for e in range(w13.shape[0]):
        token, slot = torch.nonzero(problem.ids == e, as_tuple=True)
        gate, up = (x[token] @ w13[e].T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[e].T
        out = out.index_add(0, token, y * prob[token, slot, None])
    out.backward(problem.dout.double())
    found = {"out": out.detach(), "x": x.grad, "prob": prob.grad, "w13": w13.grad, "w2": w2.grad}
    return {name: t for name, t in found.items() if t is not None}


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal over error in dB; NaN where either is."""
    want = want.double()
    error = (got.to(want.device).double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / error)) if error != 0 else float("inf")


# --- the check -------------------------------------------------------------------------------------------


def check_training_layer(place: Place) -> None:
    """Gradients near float64 and the CPU's; the same repeated, checkpointed, compiled, accumulated and replayed."""
    for seed, (hidden, intermediate) in enumerate(PROBLEMS):
        problem = draw(hidden, intermediate, seed)
        there = problem.to(str(place.device))
        for name, recipe in CHECKED.items():
            where = f"{name}, H {hidden}, I {intermediate}"
            experts = experts_of(there, recipe)
            got = step(there, experts)
            place.judge.ask(partial(check_values, where, got, problem, recipe))
            if seed == 0:
                place.judge.ask(partial(check_invariance, place, where, there, experts, got))
    there = draw(*PROBLEMS[0], 0).to(str(place.device))
    check_main_grad(place, there, CHECKED["fp8"])
    for name, recipe in REPLAYED.items():
        _check_graph(place, name, there, recipe)


def check_values(where: str, got: Result, problem: Problem, recipe: Recipe) -> int:
    """The number of elements whose SQNRs are enough, against float64 and the CPU."""
    with backend_on_cpu("reference"):
        exact, on_cpu = in_float64(problem), step(problem, experts_of(problem, recipe))
    fp8 = recipe.fp8_forward or recipe.fp8_dgrad or recipe.fp8_wgrad
    for name, want in exact.items():
        found = sqnr(got[name], want)
        assert found >= WORST_DB[fp8], f"{where}: {name} is {found:.1f} dB of float64, allowed {WORST_DB[fp8]}"
        near = sqnr(got[name], on_cpu[name].cpu())
        assert near >= AS_ON_CPU_DB, f"{where}: {name} is {near:.1f} dB of the CPU's, allowed {AS_ON_CPU_DB}"
    assert bool((got["w13"][3] == 0).all()), f"{where}: an expert without tokens has a gradient"
    return sum(value.numel() for value in got.values())


def check_invariance(place: Place, where: str, problem: Problem, experts: Experts, want: Result) -> int:
    """The number of elements of a step. Their bits are the same: again, without a wait, checkpointed, compiled, with
    codes that are kept, without the NaN."""

    def require(how: str, got: Result) -> None:
        for name, value in want.items():
            assert torch.equal(got[name], value), f"{where}: {name} differs {how}"

    for _ in range(3):
        require("from call to call", step(problem, experts))
    experts.keep_codes = True
    for which in ("first", "second"):
        require(f"with codes that are kept, {which} step", step(problem, experts))
    experts.keep_codes = False
    with torch.no_grad():
        out = experts(problem.x, problem.ids, problem.prob, problem.shared)
    assert torch.equal(out, want["out"]), f"{where}: the output differs where no backward pass follows"
    require("checkpointed", step(problem, experts, lambda *a: checkpoint(experts, *a, use_reentrant=False)))
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    require("compiled", step(problem, experts, compiled))
    clean = Problem(problem.x.nan_to_num(3.0), *list(vars(problem).values())[1:])
    require("without the NaN of a token that has no expert", step(clean, experts))
    with place.no_wait():
        found = step(problem, experts)
    require("where waiting is an error", found)
    return sum(value.numel() for value in want.values())


def check_main_grad(place: Place, problem: Problem, recipe: Recipe) -> None:
    """Three microbatches into a main gradient are float32 sums of three, bit for bit, and the first one stores."""
    wide = Problem(*(t.float() if t.is_floating_point() else t for t in vars(problem).values()))
    single = [step(_rolled(wide, i), experts_of(wide, recipe)) for i in range(3)]
    experts = experts_of(wide, recipe)
    weights: dict[str, torch.Tensor] = {"w13": experts.w13, "w2": experts.w2}
    for weight in weights.values():
        weight.main_grad = torch.full_like(weight, float("nan"), requires_grad=False)  # type: ignore[attr-defined]
    for i in range(3):
        for weight in weights.values():
            weight.overwrite_main_grad = i == 0  # type: ignore[attr-defined]
        step(_rolled(wide, i), experts)
    for name, weight in weights.items():
        want = single[0][name].clone()
        want += single[1][name]
        want += single[2][name]
        main = weight.main_grad  # type: ignore[attr-defined]
        place.judge.same(f"main_grad of {name} is not the sum of its microbatches", main, want)


def _rolled(problem: Problem, i: int) -> Problem:
    """Other gradients of the output."""
    return Problem(*(t.roll(i, 0) if name == "dout" else t for name, t in vars(problem).items()))


def _check_graph(place: Place, name: str, problem: Problem, recipe: Recipe) -> None:
    """A step in a CUDA graph, replayed with other tokens, ids, weights and gradients."""
    static, experts = problem.to(str(place.device)), experts_of(problem, recipe)
    other = draw(problem.x.shape[1], problem.w2.shape[2], 5).to(str(place.device))
    targets = [*vars(static).values(), experts.w13.detach(), experts.w2.detach()]
    captured: Result = {}
    place.replayed(
        lambda: captured.update(step(static, experts)), targets, [*vars(other).values(), other.w13, other.w2]
    )
    for part, value in step(other, experts_of(other, recipe)).items():
        place.judge.same(f"{name}: {part} of a graph's replay differs", captured[part], value)


CHECK = Check(check_training_layer)
