"""topk against loops in float64, its kernel against its twin, its gradient, and layers that are given logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK
from padless.moe import Router, TopK, choosing, moe, topk, twins
from support import topk_cases
from support.interpreter import interpreted
from support.moe_layer_problem import draw_layer
from support.topk_cases import RULES, draw_bias, draw_logits, draw_rule

ULP = 2.0**-23


# --- the definition, in Python's numbers -----------------------------------------------------------------


def scores_of(row: list[float], rule: Router) -> list[float]:
    if rule.scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in row]
    powers = [math.exp(v - max(row)) for v in row]
    return [p / math.fsum(powers) for p in powers]


def choices_of(row: list[float], bias: list[float] | None, rule: Router) -> list[float]:
    """What experts are chosen by; -inf for those of groups that are left out."""
    if bias is None and rule.top_groups == rule.num_expert_groups:
        return row
    choice = scores_of(row, rule)
    if bias is not None:
        choice = [s + b for s, b in zip(choice, bias, strict=True)]
    size = len(row) // rule.num_expert_groups
    groups = [choice[i : i + size] for i in range(0, len(row), size)]
    if len(groups) == rule.top_groups:
        return choice
    sums = [sum(sorted(group)[-2:]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-sums[g], g))[: rule.top_groups]
    return [c if i // size in kept else -math.inf for i, c in enumerate(choice)]


def weights_of(row: list[float], ids: list[int], rule: Router) -> list[float]:
    scores = scores_of(row, rule)
    total = 1.0
    if rule.renormalize:
        total = math.fsum(scores[i] for i in ids) + (1e-20 if rule.scoring == "sigmoid" else 0.0)
    return [scores[i] / total * rule.scaling_factor for i in ids]


def check(found: TopK, logits: torch.Tensor, bias: torch.Tensor | None, rule: Router) -> None:
    """Ids by the definition, exactly by logits and up to float32's rounding by scores; weights to some ulps."""
    weights, ids = found
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (logits.shape[0], rule.k)
    biases = None if bias is None else bias.double().tolist()
    for token, row in enumerate(logits.double().tolist()):
        got = ids[token].tolist()
        choice = choices_of(row, biases, rule)
        want = sorted(range(len(row)), key=lambda i: (-choice[i], i))[: rule.k]
        assert len({*got}) == rule.k, f"an expert twice in token {token}: {got}"
        if choice is row:
            assert got == want, f"ids of token {token}"
        else:
            off = max(abs(choice[a] - choice[b]) for a, b in zip(got, want, strict=True))
            assert off < 8 * ULP * max(1.0, *map(abs, row)), f"ids of token {token}: {got} and not {want}"
        for one, other in zip(weights[token].tolist(), weights_of(row, got, rule), strict=True):
            bound = max(6, 3 * max(map(abs, row)) if rule.scoring == "softmax" else 0) * ULP
            assert abs(one - other) <= bound * abs(other) + 1e-37, f"weights of token {token}: {one} and not {other}"


def tamed(logits: torch.Tensor, bias: torch.Tensor | None, rule: Router) -> torch.Tensor:
    """Logits whose scores float32 tells apart where experts are chosen by scores, and whose powers are in its range."""
    by_logit = bias is None and rule.top_groups == rule.num_expert_groups
    return logits.clamp(-80, 80) if by_logit else logits.clamp(-20, 8)


def drawn(name: str, tokens: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor | None, Router]:
    rule, experts, biased = RULES[name]
    bias = draw_bias(experts, seed) if biased else None
    return tamed(draw_logits(tokens, experts, topk_cases.DTYPES[seed % 3], seed), bias, rule), bias, rule


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, seed: int) -> None:
    logits, bias, rule = drawn(name, seed=seed)
    check(topk(logits, rule, bias), logits, bias, rule)


def test_random_rules() -> None:
    for seed in range(100):
        rule, experts, biased = draw_rule(seed, 300)
        bias = draw_bias(experts, seed) if biased else None
        logits = draw_logits(3, experts, topk_cases.DTYPES[seed % 3], seed, ties=seed % 7 == 0)
        logits = tamed(logits, bias, rule)
        check(topk(logits, rule, bias), logits, bias, rule)


def test_ties_and_order() -> None:
    logits = torch.tensor([[0.0, -0.0, 2.0, 1.0, 2.0, 0.0]])
    assert topk(logits, Router(5)).ids.tolist() == [[2, 4, 3, 0, 1]]
    assert topk(logits.sub(torch.tensor(0.0)), Router(2)).weights.tolist() == [[0.5, 0.5]]
    flat = torch.zeros(1, 12)
    assert topk(flat, Router(4, "sigmoid", num_expert_groups=4, top_groups=2)).ids.tolist() == [[0, 1, 2, 3]]
    # Logits that differ have sigmoids that do not, and are told apart where nothing else is to be ranked.
    assert topk(torch.tensor([[30.0, 31.0, 32.0]]), Router(1, "sigmoid")).ids.tolist() == [[2]]


def test_the_example_of_the_docstring() -> None:
    weights, ids = topk(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), Router(2))
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_special_logits() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, nan, 3.0], [1.0, inf, 2.0], [-inf, 0.0, -inf], [-inf, -inf, -inf]])
    for renormalize in (True, False):
        weights, ids = topk(logits, Router(2, renormalize=renormalize))
        assert ids.tolist() == [[1, 2], [1, 2], [1, 0], [0, 1]]
        assert weights[[0, 1, 3]].isnan().all()
        assert weights[2].tolist() == [1.0, 0.0]
    weights, ids = topk(logits, Router(2, "sigmoid", renormalize=False))
    assert weights[0].isnan().tolist() == [True, False]
    assert weights[1, 0] == 1.0
    assert topk(logits, Router(2, "sigmoid")).weights[0].isnan().all()
    bias = torch.tensor([0.0, 0.0, nan])
    weights, ids = topk(torch.randn(4, 3), Router(2, "sigmoid"), bias)
    assert (ids[:, 0] == 2).all()
    assert weights.isnan().tolist() == [[True, False]] * 4


def test_a_token_depends_on_its_own_logits() -> None:
    logits, bias, rule = drawn("DeepSeek-V3", tokens=9)
    whole = topk(logits, rule, bias)
    others = logits.clone()
    others[[0, 1, 2, 4, 5, 6, 7, 8]] = float("nan")
    for found in (topk(logits[3:4], rule, bias), [t[3:4] for t in topk(others, rule, bias)]):
        assert torch.equal(found[0], whole.weights[3:4])
        assert torch.equal(found[1], whole.ids[3:4])


def test_no_tokens_and_strides() -> None:
    found = topk(torch.empty(0, 40), Router(3))
    assert [t.shape for t in found] == [(0, 3)] * 2
    logits = draw_logits(40, 30, torch.bfloat16, 3).t()
    want = topk(logits.contiguous(), Router(3))
    assert all(torch.equal(a, b) for a, b in zip(topk(logits, Router(3)), want, strict=True))


# --- that the checks notice ------------------------------------------------------------------------------


def larger_id_first(logits: torch.Tensor, bias: Any, rule: Router) -> TopK:
    weights, ids = twins.topk(logits.flip(1), bias, rule)
    return TopK(weights, logits.shape[1] - 1 - ids)


def bias_weighs(logits: torch.Tensor, bias: torch.Tensor, rule: Router) -> TopK:
    weights, ids = twins.topk(logits, bias, rule)
    return TopK(weights + bias[ids], ids)


def bias_does_not_choose(logits: torch.Tensor, bias: Any, rule: Router) -> TopK:
    return TopK(*twins.topk(logits, None, rule))


def groups_by_their_best(logits: torch.Tensor, bias: torch.Tensor, rule: Router) -> TopK:
    choice = (logits.float().sigmoid() + bias).unflatten(1, (rule.num_expert_groups, -1))
    kept = choice.amax(2).topk(rule.top_groups).indices
    left_out = torch.ones(choice.shape[:2], dtype=torch.bool).scatter(1, kept, False)
    ids = choice.masked_fill(left_out[..., None], -9).flatten(1).topk(rule.k).indices
    return TopK(twins.topk(logits, bias, rule)[0], ids)


def not_scaled(logits: torch.Tensor, bias: Any, rule: Router) -> TopK:
    weights, ids = twins.topk(logits, bias, rule)
    return TopK(weights / rule.scaling_factor, ids)


def worst_first(logits: torch.Tensor, bias: Any, rule: Router) -> TopK:
    return TopK(*(t.flip(1) for t in twins.topk(logits, bias, rule)))


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        (larger_id_first, "Qwen3-MoE"),
        (bias_weighs, "Kimi-K2"),
        (bias_does_not_choose, "softmax with a bias"),
        (groups_by_their_best, "DeepSeek-V3"),
        (not_scaled, "DeepSeek-V3"),
        (worst_first, "Mixtral"),
    ],
)
def test_a_wrong_choice_is_noticed(planted: Callable[..., TopK], name: str) -> None:
    logits, bias, rule = drawn(name, tokens=20)
    if planted is larger_id_first:
        logits = draw_logits(20, logits.shape[1], torch.float32, 1, ties=True)
    check(TopK(*twins.topk(logits, bias, rule)), logits, bias, rule)
    with pytest.raises(AssertionError):
        check(planted(logits, bias, rule), logits, bias, rule)


# --- the kernel ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every case in Triton's interpreter, from one process of its own."""
    pytest.importorskip("triton")
    return interpreted("topk_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", topk_cases.CASES)
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", topk_cases.CASES)
def test_on_the_gpu(name: str) -> None:
    topk_cases.CASES[name]("cuda")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel replaced by its machine code for Hopper, in the emulator."""
    pytest.importorskip("triton")
    from padless.moe.triton import topk as kernel
    from support.emulated_triton import EmulatedKernel

    monkeypatch.setattr(kernel.casts, "casts_in_hardware", lambda device: True)
    made = EmulatedKernel(kernel._topk)
    monkeypatch.setattr(kernel, "_topk", made)
    return made


def ptx_of(kernel: Any) -> str:
    return "\n".join(c.asm["ptx"] for c in kernel._compiled.values())


@pytest.mark.parametrize("name", RULES)
def test_machine_code(name: str, emulated: Any) -> None:
    logits, bias, rule = drawn(name, tokens=2)
    topk_cases.compare(logits, bias, rule, "cpu")
    assert emulated.launches == 1


def test_machine_code_of_special_logits(emulated: Any) -> None:
    """Where a GPU's maximum and minimum of a NaN and a number are the number."""
    for rule in (Router(4, renormalize=False), Router(3, "sigmoid", num_expert_groups=2)):
        logits = topk_cases.special_logits()
        topk_cases.compare(logits, None, rule, "cpu")
        topk_cases.compare(logits, draw_bias(logits.shape[1], 1), rule, "cpu")


def test_machine_code_of_many_experts(emulated: Any) -> None:
    """Several warps."""
    topk_cases.compare(draw_logits(1, 2500, torch.bfloat16, 1), None, Router(3, renormalize=False), "cpu")


def test_one_warp_passes_no_barrier(emulated: Any) -> None:
    logits, bias, rule = drawn("DeepSeek-V3", tokens=1)
    topk_cases.compare(logits, bias, rule, "cpu")
    assert "bar.sync" not in ptx_of(emulated)


def test_another_order_of_a_sum_would_show(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of bits fails where the twin adds one number after the other."""
    logits = torch.randn((10, 64), generator=torch.Generator().manual_seed(1)) * 2
    topk_cases.compare(logits, None, Router(64, renormalize=False), "cpu")
    monkeypatch.setattr(twins, "_sum_of_pairs", lambda x: x.cumsum(1)[:, -1:])
    with pytest.raises(AssertionError, match="values differ"):
        topk_cases.compare(logits, None, Router(64, renormalize=False), "cpu")


@pytest.mark.parametrize("waits", [True, False])
def test_a_programmatic_launch_waits_first(waits: bool, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.moe.triton import topk as kernel

    options = {"PROGRAMMATIC": 2 if waits else 0, "launch_pdl": True}
    monkeypatch.setattr(kernel, "programmatic", lambda device: options)
    logits, bias, rule = drawn("Kimi-K2", tokens=2)
    if waits:
        topk_cases.compare(logits, bias, rule, "cpu")
        return
    with pytest.raises(AssertionError, match="grid-dependency"):
        topk_cases.compare(logits, bias, rule, "cpu")


# --- gradients -------------------------------------------------------------------------------------------


def weights_in_float64(logits: torch.Tensor, ids: torch.Tensor, rule: Router) -> torch.Tensor:
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(1)
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * rule.scaling_factor


@pytest.mark.parametrize("name", RULES)
def test_gradient(name: str) -> None:
    rule, experts, biased = RULES[name]
    logits = torch.randn(6, experts, generator=torch.Generator().manual_seed(3)).requires_grad_()
    bias = draw_bias(experts, 3) if biased else None
    weights, ids = topk(logits, rule, bias)
    assert not ids.requires_grad
    cotangent = torch.randn(weights.shape, generator=torch.Generator().manual_seed(4))
    weights.backward(cotangent)
    exact = logits.detach().double().requires_grad_()
    weights_in_float64(exact, ids, rule).backward(cotangent.double())
    scale = torch.maximum(exact.grad.abs().amax(1), 0.1 * rule.scaling_factor * cotangent.abs().amax(1))
    error = (logits.grad - exact.grad).abs().amax(1) / scale
    assert error.max() < 2e-6, error
    # Another rule's gradient is another.
    other = Router(rule.k, rule.scoring, not rule.renormalize, rule.scaling_factor)
    wrong = choosing.gradient(cotangent, logits.detach(), ids, other)
    assert ((wrong - exact.grad).abs().amax(1) / scale).max() > 1e-3 or rule.k == experts


def test_gradient_of_bfloat16_logits() -> None:
    logits = torch.randn(5, 16).bfloat16().requires_grad_()
    topk(logits, Router(2)).weights.square().sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad.abs().sum() > 0


def test_second_derivatives_are_refused() -> None:
    logits = torch.randn(5, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph is True"):
        torch.autograd.grad(topk(logits, Router(2)).weights.square().sum(), logits, create_graph=True)


# --- the operator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2-MoE", "DeepSeek-V3"])
def test_opcheck(name: str) -> None:
    logits, bias, rule = drawn(name)
    for given in (logits.float(), logits.float().requires_grad_()):
        torch.library.opcheck(torch.ops.padless.topk.default, (given, bias, *choosing._packed(rule)))


def test_compiled() -> None:
    logits, bias, rule = drawn("DeepSeek-V3")

    def run(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = padless.moe.topk(logits * 2, rule, bias)
        return weights + 1, ids

    torch._dynamo.reset()
    given = logits.float().requires_grad_()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(given, bias), run(given, bias), strict=True):
        assert torch.equal(got, want)
        assert got.requires_grad == want.requires_grad
    (grad,) = torch.autograd.grad(compiled(given, bias)[0].square().sum(), given)
    assert torch.equal(grad, torch.autograd.grad(run(given, bias)[0].square().sum(), given)[0])


# --- layers that are given logits ------------------------------------------------------------------------

RULE = Router(3, "sigmoid", scaling_factor=1.5)


def test_a_layer_given_logits() -> None:
    layer = draw_layer((FP8_BLOCK, None))
    logits, bias = torch.randn(layer.x.shape[0], 5), draw_bias(5, 1)
    weights, ids = topk(logits, RULE, bias)
    want = moe(layer.x, ids, weights, layer.w13, layer.w2)

    def run(logits: torch.Tensor) -> torch.Tensor:
        return moe(layer.x, None, None, layer.w13, layer.w2, router_logits=logits, router=RULE, correction_bias=bias)

    assert torch.equal(run(logits), want)
    assert not torch.equal(run(logits.flip(1)), want)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(logits), want)


def test_the_gradient_of_a_layers_logits() -> None:
    layer = draw_layer((FP8_BLOCK, None), h=256)
    logits = torch.randn(layer.x.shape[0], 5, requires_grad=True)
    moe(layer.x, None, None, layer.w13, layer.w2, router_logits=logits, router=RULE).float().square().sum().backward()
    again = logits.detach().requires_grad_()
    weights, ids = topk(again, RULE)
    moe(layer.x, ids, weights, layer.w13, layer.w2).float().square().sum().backward()
    assert torch.equal(logits.grad, again.grad)
    assert logits.grad.abs().amax(1).min() > 0


def layer_with(**arguments: Any) -> Callable[[], object]:
    layer = draw_layer((FP8_BLOCK, None), tokens=4)
    ids = arguments.pop("ids", None)
    return lambda: moe(layer.x, ids, None, layer.w13, layer.w2, **arguments)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: topk(torch.zeros(3), Router(1)), "logits must be"),
        (lambda: topk(torch.zeros(3, 4, dtype=torch.int64), Router(1)), "logits must be"),
        (lambda: topk([[1.0]], Router(1)), "logits must be"),
        (lambda: topk(torch.zeros(3, 0), Router(1)), "E from 1 to 4096"),
        (lambda: topk(torch.zeros(1, 4097), Router(1)), "E from 1 to 4096"),
        (lambda: topk(torch.zeros(3, 4), 2), "router must be a padless.moe.Router"),
        (lambda: topk(torch.zeros(3, 4), Router(5)), "k is 5 and a token chooses among 4"),
        (lambda: topk(torch.zeros(3, 8), Router(5, num_expert_groups=2)), "among 4 experts"),
        (lambda: topk(torch.zeros(3, 9), Router(1, num_expert_groups=2)), "num_expert_groups is 2"),
        (lambda: topk(torch.zeros(3, 4), Router(1, num_expert_groups=4)), "two at least"),
        (lambda: topk(torch.zeros(3, 4), Router(1), torch.zeros(3)), r"correction_bias must be \(4,\)"),
        (lambda: topk(torch.zeros(3, 4), Router(1), 0.5), "correction_bias"),
        (lambda: topk(torch.zeros(3, 4), Router(1), torch.zeros(4, device="meta")), "on cpu"),
        (lambda: Router(0), "k is 0"),
        (lambda: Router(65), "from 1 to 64"),
        (lambda: Router(2, "relu"), "scoring is 'relu'"),
        (lambda: Router(2, renormalize=1), "renormalize is 1"),
        (lambda: Router(2, scaling_factor=float("nan")), "scaling_factor is nan"),
        (lambda: Router(2, num_expert_groups=2, top_groups=3), "top_groups is 3"),
        (layer_with(router_logits=torch.zeros(4, 5)), "both must be given, or neither"),
        (layer_with(router=Router(2)), "both must be given, or neither"),
        (layer_with(ids=torch.zeros(4, 2), router_logits=torch.zeros(4, 5), router=Router(2)), "both must be None"),
        (layer_with(router_logits=torch.zeros(4, 6), router=Router(2)), r"router_logits must be \(T, E\) with E = 5"),
        (layer_with(router_logits=torch.zeros(3, 5), router=Router(2)), "router_logits must be .* T = 4 on cpu"),
        (layer_with(), "top_k_index must be"),
    ],
)
def test_errors(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def test_a_layer_takes_no_more_than_it_can() -> None:
    layer = draw_layer((FP8_BLOCK, None), tokens=4, experts=20)
    with pytest.raises(ValueError, match="k = 17"):
        moe(layer.x, None, None, layer.w13, layer.w2, router_logits=torch.randn(4, 20), router=Router(17))
