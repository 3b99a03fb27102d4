"""The check of ``padless verify`` for a training step of expert layers: its gradients, and what they may depend on.

Each part raises AssertionError. Groups have 0, 1, 127 and 129 rows among others, some ids are no expert, and tokens
without one hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from padless.formats import FP8_BLOCK
from padless.moe.fused import swiglu
from padless.moe.routing import route
from padless.nn import RECIPES, Experts, Recipe
from padless.nn.linear_function import operands_of_rows
from padless.nn.recipe import WGRAD_MODES
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.quantize import quantize
from padless.quantization.rows_columns import quantize_rows_columns
from padless.quantization.weight_both import quantize_weight_both
from padless.runtime.choices import BackendName

DEVICE = "cuda"
SIZES = (129, 1, 127, 0, 40)  # tokens of the first experts
WORST_DB = {True: 19.0, False: 38.0}  # against float64 of nothing quantized, by whether anything is FP8
AS_ON_CPU_DB = 30.0  # the tensor core keeps 13 fraction bits of a sum, and a code may be another one for it
LEFT_OUT = ("mxfp8", "nvfp4")  # sizes are other ones; gradients are rounded by chance
CHECKED: dict[str, Recipe] = {
    **{name: recipe for name, recipe in RECIPES.items() if name not in LEFT_OUT},
    "fp8, recompute": Recipe(save="recompute"),
}
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


def check_training_layer() -> str:
    """Gradients near float64 and the CPU's; the same repeated, checkpointed, compiled, accumulated and replayed."""
    least = float("inf")
    for seed, (hidden, intermediate) in enumerate(PROBLEMS):
        problem = draw(hidden, intermediate, seed)
        there, exact = problem.to(DEVICE), in_float64(problem)
        for name, recipe in CHECKED.items():
            where = f"{name}, H {hidden}, I {intermediate}"
            experts = experts_of(there, recipe)
            got = step(there, experts)
            found = check_values(where, got, exact, step(problem, experts_of(problem, recipe)), recipe)
            least = min(least, found) if name != "bf16" else least
            if seed == 0:
                check_invariance(where, there, experts, got)
    there = draw(*PROBLEMS[0], 0).to(DEVICE)
    check_main_grad(there, CHECKED["fp8"])
    if torch.cuda.is_available():
        for name in ("fp8", "fp8, recompute"):
            _check_graph(name, there, CHECKED[name])
    return f"{len(CHECKED)} recipes of {len(PROBLEMS)} layers, FP8 gradients at least {least:.1f} dB of float64"


def check_values(where: str, got: Result, exact: Result, on_cpu: Result, recipe: Recipe) -> float:
    """The least SQNR against float64."""
    fp8 = recipe.fp8_forward or recipe.fp8_dgrad or recipe.fp8_wgrad
    least = float("inf")
    for name, want in exact.items():
        found = sqnr(got[name], want)
        assert found >= WORST_DB[fp8], f"{where}: {name} is {found:.1f} dB of float64, allowed {WORST_DB[fp8]}"
        near = sqnr(got[name], on_cpu[name].cpu())
        assert near >= AS_ON_CPU_DB, f"{where}: {name} is {near:.1f} dB of the CPU's, allowed {AS_ON_CPU_DB}"
        least = min(least, found)
    assert bool((got["w13"][3] == 0).all()), f"{where}: an expert without tokens has a gradient"
    return least


def check_invariance(where: str, problem: Problem, experts: Experts, want: Result) -> None:
    """The bits of a step: again, without a wait, checkpointed, compiled, with codes that are kept, without the NaN."""

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
    if torch.cuda.is_available():
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = step(problem, experts)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        require("where waiting is an error", found)


def check_main_grad(problem: Problem, recipe: Recipe) -> None:
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
        assert torch.equal(main, want), f"main_grad of {name} is not the sum of its microbatches"


def _rolled(problem: Problem, i: int) -> Problem:
    """Other gradients of the output."""
    return Problem(*(t.roll(i, 0) if name == "dout" else t for name, t in vars(problem).items()))


def _check_graph(name: str, problem: Problem, recipe: Recipe) -> None:
    """A step in a CUDA graph, replayed with other tokens, ids, weights and gradients."""
    static, experts = problem.to(DEVICE), experts_of(problem, recipe)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static, experts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, experts)
    other = draw(problem.x.shape[1], problem.w2.shape[2], 5).to(DEVICE)
    with torch.no_grad():
        for mine, its in zip(vars(static).values(), vars(other).values(), strict=True):
            mine.copy_(its)
        experts.w13.copy_(other.w13)
        experts.w2.copy_(other.w2)
    graph.replay()
    torch.cuda.synchronize()
    want = step(other, experts_of(other, recipe))
    for part, value in want.items():
        assert torch.equal(captured[part], value), f"{name}: {part} of a graph's replay differs"


def rehearse(backend: BackendName) -> None:
    """The products of the check on the CPU, by ``backend``; nobody looks at the outputs."""
    for seed, (hidden, intermediate) in enumerate(PROBLEMS):
        problem = draw(hidden, intermediate, seed)
        offs, tokens, _ = route(problem.ids, problem.w2.shape[0])
        x = problem.x.nan_to_num(0.0)[tokens.long()]
        both13, both2 = quantize_weight_both(problem.w13), quantize_weight_both(problem.w2)
        for weight in (*both13, *both2):
            a = quantize(x.new_ones((x.shape[0], weight.shape[2])), FP8_BLOCK)
            grouped_gemm(a, weight, offs, backend=backend)
        if 2 * intermediate % 128 == 0:
            swiglu(
                quantize(x, FP8_BLOCK), both13[0], offs, gate_up="concatenated", bias=None, format=FP8_BLOCK,
                global_scale=None, backend=backend,
            )  # fmt: skip
        for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
            _, dy = operands_of_rows(x.new_ones((x.shape[0], n)), offs, None, FP8_BLOCK, (1, 128))
            for block in WGRAD_MODES.values():
                _, columns = quantize_rows_columns(x.new_ones((x.shape[0], k)), offs, column_block=block, rows=False)
                grouped_gemm_wgrad(dy, columns, backend=backend)  # type: ignore[arg-type]
                main = torch.zeros((offs.shape[0], n, k))
                for accumulate in (False, True):
                    grouped_gemm_wgrad(dy, columns, out=main, accumulate=accumulate, backend=backend)  # type: ignore[arg-type]
