"""`padless.nn.Experts` on a CPU: gradients against float64, and against the recipe's own arithmetic done slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.formats import FP8_BLOCK
from padless.moe import Router, topk
from padless.nn import Experts, GroupedLinear, MoE, Recipe, experts_function, linear_function
from padless.nn.experts import SCORES
from padless.nn.products import Rows
from padless.quantization.quantize import dequantize, quantize
from padless.runtime.choices import Score
from support import fake_quant
from support.training_layer import EVERY_RECIPE, Layer, gradients, layer, least_db, module, sqnr, truth, worst_row

SOME = ("fp8", "fp8, recompute", "bf16", "bf16 dgrad")  # between them, every branch


@pytest.mark.parametrize(
    ("name", "gate_up"),
    [*((name, "concatenated") for name in EVERY_RECIPE), ("fp8", "interleaved"), ("bf16", "interleaved")],
)
def test_gradients_against_float64(name: str, gate_up: str) -> None:
    """SQNR of every gradient; products of every format err as their formats do, and no more."""
    problem, recipe = layer(intermediate=160), EVERY_RECIPE[name]
    got = gradients(module(problem, recipe, gate_up=gate_up), problem)
    for what, want in truth(problem, gate_up).items():
        assert sqnr(got[what], want) >= least_db(recipe) or what == "shared", what
    assert torch.equal(got["shared"], problem.dout)
    assert (got["w13"][3] == 0).all(), "the expert without tokens"


@pytest.mark.parametrize(
    ("name", "intermediate"),
    [
        *((name, 160 if "mxfp8" in name else 144) for name in EVERY_RECIPE if "nvfp4" not in name),
        ("fp8, recompute", 192),  # 384 columns: the epilogue activates
        ("fp8", 192),
    ],
)
def test_gradients_are_those_of_the_recipe(name: str, intermediate: int) -> None:
    """Every row of every gradient; where float32 sums and float64 sums round apart, a code is another one."""
    problem, recipe = layer(intermediate=intermediate, seed=intermediate), EVERY_RECIPE[name]
    got, want = gradients(module(problem, recipe), problem), fake_quant.step(problem, recipe)
    for what in want:
        assert sqnr(got[what], want[what]) >= 50.0, what
        assert worst_row(got[what], want[what]) <= 0.02, what


def test_a_compact_layer_keeps_the_least_slack() -> None:
    """Bytes that are kept, from the tensors that autograd is given: codes and scales of x and of Z, and the routing."""
    problem = layer(tokens=400)
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    made = module(problem, "fp8_compact", keep_codes=True)
    p = problem.leaves(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        made(p["x"], problem.index, p["prob"])
    weights = {
        t.untyped_storage().data_ptr()
        for o in made._codes.values()
        for w in o._made.operands
        for t in (w.data, w.scale)
    }
    rows, hidden, half = 1200, 160, 144
    tokens = (rows + 31 * 5 + 127) // 128 * 128
    least = hidden * tokens + rows * (2 * half + 4 * 3) + 4 * 2 * (rows // 128 + 5)
    routing = rows * (4 + 4 + 4) + 3 * 4 * 5
    assert least <= sum(size for at, size in kept.items() if at not in weights) <= least + routing


# --- faults ----------------------------------------------------------------------------------------------


def outliers(seed: int = 1) -> Layer:
    """Rows of dout that differ in size by 2^16, as gradients of tokens do."""
    problem = layer(seed=seed)
    problem.dout *= 2.0 ** torch.randint(-8, 9, (len(problem.dout), 1), generator=torch.Generator().manual_seed(1))
    return problem


def worst_of_each(recipe: str) -> dict[str, float]:
    """The error of the worst row of each gradient against the recipe's arithmetic."""
    problem = outliers()
    got, want = gradients(module(problem, recipe), problem), fake_quant.step(problem, EVERY_RECIPE[recipe])
    return {what: worst_row(got[what], want[what]) for what in want}


def test_without_a_fault() -> None:
    assert max(worst_of_each("fp8").values()) <= 0.02


def test_blocks_of_dy_in_dgrad_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale for 128 rows of dy drowns the small ones: what made training diverge for DeepSeek-V3's authors."""
    right = experts_function.operands_of_rows

    def by_blocks(
        x: torch.Tensor, *arguments: object, tokens: torch.Tensor | None = None, is_gradient: bool
    ) -> tuple[Rows, object]:
        x = x if tokens is None else x[tokens.long()]
        square = dequantize(quantize(x, FP8_BLOCK, kind="weight"))
        rows, columns = (right(t, *arguments, is_gradient=is_gradient) for t in (square, x))
        return rows[0], columns[1]

    problem = outliers()
    want = fake_quant.step(problem, EVERY_RECIPE["fp8"])
    made = module(problem, "fp8")
    p = problem.leaves(torch.float32)
    out = made(p["x"], problem.index, p["prob"], p["shared"])
    monkeypatch.setattr(experts_function, "operands_of_rows", by_blocks)
    out.backward(problem.dout)
    assert worst_row(p["x"].grad, want["x"]) > 0.1
    assert worst_row(p["prob"].grad, want["prob"]) > 0.1


@pytest.mark.parametrize("part", ["starts", "scale"])
def test_a_row_of_scales_off_by_one_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns where they would lie without slack between groups, and scales moved down by a row."""
    right = experts_function.joined_columns

    def moved(saved: list[torch.Tensor], facts: object, offs: torch.Tensor) -> object:
        data, scale, starts, block_starts = saved
        if part == "starts":
            starts = torch.cat([offs.new_zeros(1), offs[:-1]])
        else:
            scale = scale.roll(1, 0)
        return right([data, scale, starts, block_starts], facts, offs)

    monkeypatch.setattr(experts_function, "joined_columns", moved)
    found = worst_of_each("fp8")
    assert found.pop("w13") > 0.2
    assert max(found.values()) <= 0.02


def test_a_gradient_that_forgets_the_routing_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_function._activation_gradients

    def without_prob(dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor, *others: Any) -> object:
        return right(dh, z, offs, torch.ones_like(prob), *others)

    monkeypatch.setattr(experts_function, "_activation_gradients", without_prob)
    found = worst_of_each("fp8")
    assert min(found[what] for what in ("x", "w13", "w2")) > 0.2


# --- edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_no_tokens(name: str) -> None:
    problem = layer(tokens=0)
    got = gradients(module(problem, EVERY_RECIPE[name]), problem)
    assert got["out"].shape == got["x"].shape == (0, 160)
    assert (got["w13"] == 0).all()
    assert (got["w2"] == 0).all()


@pytest.mark.parametrize("name", ["fp8", "bf16", "fp8, recompute"])
def test_one_expert_has_all(name: str) -> None:
    problem, recipe = layer(), EVERY_RECIPE[name]
    problem.index.fill_(2)
    got, want = gradients(module(problem, recipe), problem), fake_quant.step(problem, recipe)
    for what in want:
        assert worst_row(got[what], want[what]) <= 0.02, what


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shift", [0.0, -50.0, -200.0])
def test_the_routers_weights_are_those_of_topk(score: Score, shift: float) -> None:
    """Also of logits so low that the sigmoids are next to nothing, and 0 in float32."""
    layer, logits = MoE(16, 16, 16, 3, score=score), torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    layer.router.weight.data = torch.eye(16)
    _, ids, weights = layer.route(logits + shift)
    wanted = topk(logits + shift, Router(3, score))
    torch.testing.assert_close(weights, wanted.weights)
    assert torch.equal(ids, wanted.ids) or (score, shift) == ("sigmoid", -200.0), "where all scores are 0, any three"


@pytest.mark.parametrize("name", SOME)
def test_ids_of_no_expert_take_part_in_nothing(name: str) -> None:
    problem = layer()
    problem.index.fill_(-1)
    problem.index[:, 1] = 5
    got = gradients(module(problem, EVERY_RECIPE[name]), problem)
    assert torch.equal(got["out"], problem.shared)
    for what in ("x", "prob", "w13", "w2"):
        assert (got[what] == 0).all(), what


@pytest.mark.parametrize("name", SOME)
def test_nan_of_a_token_without_experts_harms_nobody(name: str) -> None:
    """Its rows lie behind the last group, in one block with nobody."""
    problem = layer()
    problem.index[7] = -3
    clean = gradients(module(problem, EVERY_RECIPE[name]), problem)
    problem.x[7], problem.prob[7] = float("nan"), float("inf")
    got = gradients(module(problem, EVERY_RECIPE[name]), problem)
    for what in got:
        assert torch.equal(got[what], clean[what]), what


def test_a_layer_of_bfloat16() -> None:
    """Parameters, inputs and gradients in bfloat16."""
    problem = layer()
    got = gradients(module(problem, "fp8", dtype=torch.bfloat16), problem, torch.bfloat16)
    for what, want in truth(problem).items():
        assert got[what].dtype == torch.bfloat16
        assert what == "shared" or sqnr(got[what], want) >= 20.0, what


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("frozen", ["x", "prob", "w13", "w2", "shared"])
def test_what_needs_no_gradient_gets_none(frozen: str, name: str) -> None:
    """And the others get the bits that they have anyway."""
    problem, recipe = layer(tokens=40), EVERY_RECIPE[name]
    want = gradients(module(problem, recipe), problem)
    made = module(problem, recipe)
    p = problem.leaves(torch.float32) | {"w13": made.w13, "w2": made.w2}
    p[frozen].requires_grad_(False)
    out = made(p["x"], problem.index, p["prob"], p["shared"])
    out.backward(problem.dout)
    assert torch.equal(out, want["out"])
    for what, t in p.items():
        assert t.grad is None if what == frozen else torch.equal(t.grad, want[what]), what


@pytest.mark.parametrize(("frozen", "features"), [("", {160, 288, 144}), ("w13", {160, 144}), ("w2", {160, 288})])
def test_columns_are_made_for_weights_that_need_them(
    frozen: str, features: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H 160 of dout or of x, 2 I of dZ, I of H: where columns are made by themselves."""
    made, right = set(), linear_function.rows_and_columns

    def seen(x: torch.Tensor, *rest: Any) -> Any:
        made.add(x.shape[1])
        return right(x, *rest)

    monkeypatch.setattr(linear_function, "rows_and_columns", seen)
    problem = layer(tokens=40)
    experts = module(problem, EVERY_RECIPE["bf16 dgrad"])
    for name in ("w13", "w2"):
        getattr(experts, name).requires_grad_(name != frozen)
    experts(problem.x.requires_grad_(), problem.index, problem.prob).sum().backward()
    assert made == features


@pytest.mark.parametrize("name", SOME)
def test_without_gradients_the_output_is_the_same(name: str) -> None:
    problem, recipe = layer(tokens=40), EVERY_RECIPE[name]
    made = module(problem, recipe)
    with torch.no_grad():
        out = made(problem.x, problem.index, problem.prob, problem.shared)
    assert not out.requires_grad
    assert torch.equal(out, gradients(made, problem)["out"])


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("cotangent", [torch.sum, lambda out: out.square().sum()], ids=["fixed", "differentiable"])
def test_the_second_derivative_is_refused(recipe: str, cotangent: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whether or not the gradient that comes in requires grad."""
    problem = layer(tokens=8)
    p = problem.leaves(torch.float32)
    linear, offs = GroupedLinear(2, 160, 32, recipe=recipe), torch.tensor([3, 8], dtype=torch.int32)
    for out in (module(problem, recipe)(p["x"], problem.index, p["prob"]), linear(p["x"], offs)):
        with pytest.raises(RuntimeError, match=r"create_graph is True .* can be differentiated once"):
            torch.autograd.grad(cotangent(out), p["x"], create_graph=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(8, 144), "shared": torch.zeros(8, 144)}, r"x must be \(T, 160\)"),
        ({"x": torch.zeros(8, 160, dtype=torch.float64)}, "x must be"),
        ({"index": torch.zeros(8, 3)}, "top_k_index must be"),
        ({"prob": torch.zeros(8, 2)}, "top_k_weights must be"),
        ({"shared": torch.zeros(7, 160)}, "shared must be"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    problem = layer(tokens=8)
    given = {name: changed.get(name, getattr(problem, name)) for name in ("x", "index", "prob", "shared")}
    with pytest.raises(ValueError, match=message):
        module(problem, "fp8")(*given.values())


def test_bad_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe is 'fp9'; allowed: a padless\.nn\.Recipe or 'fp8'"):
        Experts(32, 32, 2, recipe="fp9")
    with pytest.raises(ValueError, match="wgrad_mode is '2d2d'"):
        Recipe(wgrad_mode="2d2d")
    with pytest.raises(ValueError, match="save is 'all'"):
        Recipe(save="all")
    with pytest.raises(ValueError, match=r"dgrad is torch\.float16"):
        Recipe(dgrad=torch.float16)
    with pytest.raises(ValueError, match="multiples of 16"):
        Experts(40, 24, 2)
    with pytest.raises(ValueError, match="gate_up is 'alternating'"):
        Experts(32, 32, 2, gate_up="alternating")
