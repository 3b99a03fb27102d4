"""`padless.nn.experts_of_rows`: rows that a trainer sorted itself, with weights that multiply inside the activation.

What would convince: gradients against float64 in every recipe, with rows of no expert full of NaN; without weights the
bits of `padless.nn.Experts` before its sum, and all gradients of the weights; with weights the bits of a definition
written from public calls, in sizes that the epilogue activates and in sizes that a separate pass does; the same with
weights the other way round; each check fails where the weight is applied in the wrong place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, grouped_gemm, moe, quantize
from padless.autograd import weight_operands
from padless.moe import twins
from padless.nn import DelayedWgrad, Recipe, experts_function, experts_of_rows
from support.training_layer import BF16, EVERY_RECIPE, Layer, gradients, layer, least_db, module, split, sqnr

FUSED, APART = 192, 160  # intermediate sizes whose activation the epilogue computes, and a separate pass


class Rows:
    """A layer's rows sorted by expert, those of no expert full of NaN, and the gradient of each row."""

    def __init__(self, problem: Layer) -> None:
        self.offs, tokens, self.inverse = moe.route(problem.index, len(problem.w13))
        self.end, tokens = int(self.offs[-1]), tokens.long()
        prob = problem.prob.new_empty(tokens.shape[0])
        inverse = self.inverse.reshape(-1)
        prob[torch.where(inverse < 0, -1 - inverse, inverse).long()] = problem.prob.reshape(-1)
        self.x, self.prob, self.dout = problem.x[tokens], prob, problem.dout[tokens]
        for t in (self.x, self.prob, self.dout):
            t[self.end :] = float("nan")
        self.tokens, self.w13, self.w2 = tokens, problem.w13, problem.w2

    def step(
        self, recipe: Any, weighted: bool = True, dtype: torch.dtype = torch.float32, *, input_major: bool = False,
        **options: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The output and the gradients of one step; those of the weights always (E, N, K)."""
        p = {name: getattr(self, name).detach().to(dtype) for name in ("x", "w13", "w2")}
        if input_major:
            p |= {name: p[name].mT.contiguous() for name in ("w13", "w2")}
        prob = self.prob.clone().requires_grad_() if weighted else None
        for t in p.values():
            t.requires_grad_()
        given = p["x"], self.offs, p["w13"], p["w2"], prob, recipe
        out = experts_of_rows(*given, input_major=input_major, **options)
        out.backward(self.dout.to(dtype))
        found = {"out": out.detach()} | {name: t.grad for name, t in p.items()}
        if input_major:
            assert all(found[name].is_contiguous() for name in ("w13", "w2"))
            found |= {name: found[name].mT for name in ("w13", "w2")}
        return found if prob is None else found | {"prob": prob.grad}

    def truth(self, gate_up: str = "concatenated") -> dict[str, torch.Tensor]:
        """The same in float64 by torch's autograd, nothing quantized."""
        p = {name: getattr(self, name).detach().double().requires_grad_() for name in ("x", "w13", "w2", "prob")}
        parts, start = [], 0
        for e, end in enumerate(self.offs.tolist()):
            gate, up = split(p["x"][start:end] @ p["w13"][e].T, gate_up)
            hidden = torch.nn.functional.silu(gate) * up * p["prob"][start:end, None]
            parts.append(hidden @ p["w2"][e].T)
            start = end
        out = torch.cat([*parts, torch.zeros(len(self.x) - start, self.x.shape[1], dtype=torch.float64)])
        out[:start].backward(self.dout[:start].double())
        return {"out": out.detach()} | {name: t.grad for name, t in p.items()}


@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("input_major", [False, True])
def test_gradients_against_float64(name: str, input_major: bool) -> None:
    """Groups of 129, 1, 127 and 0 rows; NaN behind the last one is in nothing, and zeros come out there."""
    rows, recipe = Rows(layer(intermediate=APART)), EVERY_RECIPE[name]
    sizes = rows.offs.diff(prepend=rows.offs.new_zeros(1)).tolist()
    assert {0, 1, 127, 129} <= set(sizes)
    assert rows.end < len(rows.x)
    got = rows.step(recipe, input_major=input_major)
    assert got["prob"].dtype == torch.float32
    for what in ("out", "x", "prob"):
        assert (got[what][rows.end :] == 0).all(), what
    want = rows.truth()
    for found in (got, want):  # the bounds are for a token's gradient, the sum of its rows'
        found["x"] = torch.zeros(100, 160).double().index_add(0, rows.tokens, found["x"].double())
    for what in want:
        assert sqnr(got[what], want[what]) >= least_db(recipe), (what, sqnr(got[what], want[what]))
    for what in ("w13", "w2"):
        assert (got[what][3] == 0).all(), "the expert without rows"


@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("intermediate", [APART, FUSED])
def test_bits_are_those_of_experts(name: str, intermediate: int) -> None:
    """Rows before the sum, and, with each token's gradient and routing weight, every gradient of a weight."""
    problem, recipe = layer(intermediate=intermediate, seed=intermediate), EVERY_RECIPE[name]
    rows = Rows(problem)
    want = gradients(module(problem, recipe), problem)
    plain, weighted = rows.step(recipe, weighted=False), rows.step(recipe)
    y = plain["out"].bfloat16()
    assert torch.equal(moe.combine(y, rows.inverse, problem.prob, problem.shared, out_dtype=torch.float32), want["out"])
    for what in ("w13", "w2"):
        assert torch.equal(weighted[what], want[what]), what
        assert not torch.equal(plain[what], want[what]), "weights are left out"
    dprob = torch.where(rows.inverse >= 0, weighted["prob"][rows.inverse.clamp(min=0).long()], 0.0)
    assert torch.equal(dprob, want["prob"])
    dx = moe.gather_backward(weighted["x"].bfloat16(), rows.inverse, out_dtype=torch.float32)
    assert torch.equal(dx, want["x"])


@pytest.mark.parametrize("intermediate", [APART, FUSED])
@pytest.mark.parametrize("name", ["fp8", "fp8, recompute", "mxfp8", "mxfp8, fp8 wgrad, recompute", "bf16"])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_weights_multiply_before_anything_is_rounded(name: str, intermediate: int, gate_up: Any) -> None:
    """The second operand is quantize(fl(silu(gate) up) row_weight): from public calls, expert by expert."""
    rows, recipe = Rows(layer(intermediate=intermediate, seed=7)), EVERY_RECIPE[name]
    prob = rows.prob[: rows.end, None]
    got = rows.step(recipe, gate_up=gate_up, dtype=BF16)["out"][: rows.end]
    z = multiplied(rows.x[: rows.end].bfloat16(), rows.w13, rows.offs, recipe)
    hidden = twins.activated(z, moe.Activation(gate_up=gate_up), in_bfloat16=False)
    assert torch.equal(got, multiplied(hidden * prob, rows.w2, rows.offs, recipe))
    behind = (multiplied(hidden, rows.w2, rows.offs, recipe) * prob).bfloat16()
    assert (got != behind).float().mean() > 0.05, "weights behind the second product"


def multiplied(a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """A product in the recipe's format, from public calls and torch's; bfloat16."""
    w = w.bfloat16()
    if recipe.forward != BF16:
        return grouped_gemm(quantize(a, recipe.forward), quantize(w, recipe.forward, kind="weight"), offs)
    ends, a = offs.tolist(), a.bfloat16().float()
    parts = [a[s:e] @ of_e.float().T for s, e, of_e in zip([0, *ends], ends, w, strict=False)]
    return torch.cat(parts).bfloat16()


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_weights_the_other_way_round(name: str) -> None:
    """Bits of everything where operands are codes; where sums are float32 of a BLAS, its order is another one."""
    rows, recipe = Rows(layer(intermediate=APART)), EVERY_RECIPE[name]
    got, want = rows.step(recipe, input_major=True), rows.step(recipe)
    for what in want:
        if what in ("w13", "w2") and recipe.wgrad != FP8_BLOCK:
            assert sqnr(got[what], want[what]) > 100, what
        else:
            assert torch.equal(got[what], want[what]), what


@pytest.mark.parametrize("name", ["fp8", "fp8_1d1d", "bf16"])
def test_main_grad_lies_as_the_weight_does(name: str) -> None:
    """Added to in float32, also by a queue, and overwritten where that is asked for."""
    rows, queue = Rows(layer()), DelayedWgrad()
    want = rows.step(name)
    p = [getattr(rows, n).mT.contiguous().requires_grad_() for n in ("w13", "w2")]
    for weight in p:
        weight.main_grad = torch.full(weight.shape, float("nan"))
        weight.overwrite_main_grad = True
    for delayed in (None, queue):
        out = experts_of_rows(rows.x, rows.offs, *p, rows.prob, name, input_major=True, delayed_wgrad=delayed)
        out.backward(rows.dout)
        for weight in p:
            weight.overwrite_main_grad = False
    queue.flush()
    for weight, what in zip(p, ("w13", "w2"), strict=True):
        assert weight.grad is None
        assert sqnr(weight.main_grad.mT, 2 * want[what]) > 100
        if name != "bf16":
            assert torch.equal(weight.main_grad.mT, want[what] + want[what])


def test_nothing_transposed_is_kept() -> None:
    """Of FP8_BLOCK weights (E, K, N) the codes of both products are made, and of plain ones no copy at all."""
    weight = torch.randn(3, 160, 288).bfloat16()
    made = weight_operands(weight, EVERY_RECIPE["bf16"], input_major=True)
    assert made.forward.data_ptr() == made.dgrad.data_ptr() == weight.data_ptr()
    for recipe in ("fp8", "mxfp8", "nvfp4"):
        got = weight_operands(weight, EVERY_RECIPE[recipe], input_major=True)
        want = weight_operands(weight.mT.contiguous(), EVERY_RECIPE[recipe])
        for one, other in zip(got, want, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)
            else:
                assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
                assert torch.equal(one.scale, other.scale)
                assert one.data.is_contiguous()


@pytest.mark.parametrize("name", ["fp8", "fp8, recompute", "bf16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_compiled(name: str, weighted: bool) -> None:
    rows, recipe = Rows(layer(tokens=40, intermediate=FUSED)), EVERY_RECIPE[name]
    want = rows.step(recipe, weighted)
    torch._dynamo.reset()
    whole = torch.compile(experts_of_rows, fullgraph=True, backend="aot_eager")
    p = [getattr(rows, n).clone().requires_grad_() for n in ("x", "w13", "w2", "prob")]
    out = whole(p[0], rows.offs, p[1], p[2], p[3] if weighted else None, recipe)
    out.backward(rows.dout)
    assert torch.equal(out, want["out"])
    for what, t in zip(("x", "w13", "w2", "prob"), p, strict=True):
        assert what not in want or torch.equal(t.grad, want[what]), what


@pytest.mark.parametrize("frozen", ["x", "w13", "w2", "prob"])
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_what_needs_no_gradient_gets_none(frozen: str, name: str) -> None:
    rows = Rows(layer(tokens=40, intermediate=APART))
    want = rows.step(name)
    p = {n: getattr(rows, n).clone().requires_grad_(n != frozen) for n in ("x", "w13", "w2", "prob")}
    out = experts_of_rows(p["x"], rows.offs, p["w13"], p["w2"], p["prob"], name)
    out.backward(rows.dout)
    for what, t in p.items():
        assert t.grad is None if what == frozen else torch.equal(t.grad, want[what]), what


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "bf16"])
def test_without_rows(name: str) -> None:
    """No row at all, and no row of any expert."""
    rows = Rows(layer(tokens=40, intermediate=APART))
    nothing = torch.zeros(5, dtype=torch.int32)
    for x, prob in ((rows.x[:0], rows.prob[:0]), (rows.x * float("nan"), rows.prob)):
        p = [t.clone().requires_grad_() for t in (x, rows.w13, rows.w2, prob)]
        out = experts_of_rows(p[0], nothing, p[1], p[2], p[3], name)
        out.sum().backward()
        for t in (out, *(t.grad for t in p)):
            assert (t == 0).all()


def test_weights_of_a_layer_may_be_bfloat16() -> None:
    """x, weights and row weights in bfloat16; operands that were made before; the same bits in evaluation."""
    rows = Rows(layer())
    rows.prob = rows.prob.bfloat16().float()
    want = rows.step("fp8", dtype=BF16)
    x, w13, w2 = (getattr(rows, n).to(BF16) for n in ("x", "w13", "w2"))
    given = {
        "operands13": weight_operands(w13, EVERY_RECIPE["fp8"]),
        "operands2": weight_operands(w2, EVERY_RECIPE["fp8"]),
    }
    prob = rows.prob.bfloat16().requires_grad_()
    out = experts_of_rows(x, rows.offs, w13, w2, prob, **given)
    assert out.dtype == BF16
    assert torch.equal(out, want["out"])
    out.backward(rows.dout.to(BF16))
    assert torch.equal(prob.grad, want["prob"].bfloat16())
    with torch.no_grad():
        assert torch.equal(experts_of_rows(x, rows.offs, w13, w2, prob), want["out"])


def test_a_weight_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward pass alone: the output no longer is that of float64."""
    rows, right = Rows(layer()), experts_function._hidden
    monkeypatch.setattr(experts_function, "_hidden", lambda *given: right(*given[:-1], None))
    assert sqnr(rows.step("fp8")["out"], rows.truth()["out"]) < 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(8, 144)}, r"w13 must be \(num_groups, N, K\) with K = 144"),
        ({"x": torch.zeros(8, 160, dtype=torch.float64)}, "x must be"),
        ({"offs": torch.zeros(4, dtype=torch.int32)}, "offs has 4 groups and w13 5 experts"),
        ({"offs": torch.zeros(5)}, "offs must be"),
        ({"row_weights": torch.zeros(7)}, r"row_weights must be \(8,\)"),
        ({"row_weights": torch.zeros(8, 1)}, r"row_weights must be \(8,\)"),
        ({"w2": torch.zeros(5, 176, 144)}, "they must be"),
        ({"w13": torch.zeros(5, 160)}, "w13 must be a tensor of three dimensions"),
        ({"input_major": True}, "K = 160"),
        ({"input_major": 1}, "input_major is 1"),
        ({"gate_up": "alternating"}, "gate_up is"),
        ({"recipe": "fp9"}, "recipe is 'fp9'"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    problem = layer(tokens=8)
    offs = torch.tensor([3, 3, 4, 8, 8], dtype=torch.int32)
    given = {"x": problem.x, "offs": offs, "w13": problem.w13, "w2": problem.w2, "row_weights": torch.rand(8)}
    with pytest.raises(ValueError, match=message):
        experts_of_rows(**(given | changed))


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("intermediate", [APART, FUSED])
@pytest.mark.parametrize("input_major", [False, True])
def test_on_a_gpu(name: str, intermediate: int, input_major: bool) -> None:
    """Bits of `padless.nn.Experts`, and gradients against float64."""
    problem, recipe = layer(tokens=1000, intermediate=intermediate, hidden=512), EVERY_RECIPE[name]
    want = Rows(problem).truth()
    for what, value in vars(problem).items():
        setattr(problem, what, value.cuda())
    rows = Rows(problem)
    of_experts = gradients(module(problem, recipe).cuda(), problem)
    plain, weighted = (rows.step(recipe, weighted, input_major=input_major) for weighted in (False, True))
    y = plain["out"].bfloat16()
    out = moe.combine(y, rows.inverse, problem.prob, problem.shared, out_dtype=torch.float32)
    assert torch.equal(out, of_experts["out"])
    for what in ("w13", "w2"):
        same = torch.equal(weighted[what], of_experts[what])
        assert same or (input_major and recipe.wgrad != FP8_BLOCK and sqnr(weighted[what], of_experts[what]) > 60), what
    for what in want:
        assert sqnr(weighted[what].cpu(), want[what]) >= least_db(recipe) - 1, what
