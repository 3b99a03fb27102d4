"""Contenders of the training step: padless' recipes, torch's bf16, and the products alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from padless.autograd import experts, weight_operands
from padless.bench.cases.train.problem import TrainProblem
from padless.bench.peers import Peer
from padless.bench.peers.torchao import TorchAo
from padless.nn import RECIPES, Experts, Recipe, graphed
from padless.testing.timing import Call

BF16 = "torch bf16"
KEPT = ", codes kept"
# Recipes by the names of tables.
MEASURED: dict[str, Recipe] = {
    "padless fp8": RECIPES["fp8"],
    "padless fp8 compact": RECIPES["fp8_compact"],
    "padless fp8, recompute": Recipe(save="recompute"),
    "padless fp8 1d1d": RECIPES["fp8_1d1d"],
    "padless fp8, bf16 wgrad": RECIPES["fp8_bf16_wgrad"],
    "padless bf16": RECIPES["bf16"],
}
USUAL = ("padless fp8", "padless fp8 compact", "padless bf16")
_KEPT_CODES = ("padless fp8",)


class Step:
    """Forward and backward of one contender.

    layer: (x, prob) -> output, under autograd. weights: whose gradients a step makes, "w13" and "w2".
    """

    def __init__(
        self,
        name: str,
        problem: TrainProblem,
        layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        weights: dict[str, torch.Tensor],
    ) -> None:
        self.name = name
        self.is_bf16 = name in (BF16, "padless bf16")
        self.is_whole = not name.endswith(KEPT)
        self.problem, self.device = problem, problem.x.device
        self._layer = layer
        self._dout = problem.dout
        self.waits = False
        self.passes: Call | None = None  # both passes without autograd, their inputs in place
        self.graphed: Callable[[], Step] | None = None  # makes the same step out of CUDA graphs
        self._leaves = {
            "x": problem.x.detach().clone().requires_grad_(),
            "prob": problem.prob.detach().clone().requires_grad_(),
            **weights,
        }
        self._out: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """The output, with what the backward pass needs; codes of weights as they are."""
        return self._layer(self._leaves["x"], self._leaves["prob"])

    def forward_alone(self) -> None:
        """The forward pass of a training step."""
        self.forget()
        self.forward()

    def call(self) -> None:
        """A step."""
        self.forget()
        out = self.forward()
        out.backward(self._dout)
        self._out = out.detach()

    def forget(self) -> None:
        """Frees what the last step made."""
        self._out = None
        for leaf in self._leaves.values():
            leaf.grad = None

    def results(self) -> dict[str, torch.Tensor]:
        """The output and the gradients of the last step."""
        found = {"out": self._out, **{name: leaf.grad for name, leaf in self._leaves.items()}}
        return {name: t for name, t in found.items() if t is not None}


def padless_step(problem: TrainProblem, name: str, recipe: Recipe) -> Step:
    """`padless.nn.Experts`; codes of weights are made in every step, or, where the name says so, by the first call."""
    p = problem.point
    if name.endswith(KEPT):
        return _step_of_kept_codes(problem, name, recipe)
    module = Experts(p.hidden, p.intermediate, p.experts, recipe=recipe, device="meta", dtype=torch.bfloat16)
    module.w13, module.w2 = (torch.nn.Parameter(w) for w in (problem.w13, problem.w2))
    weights: dict[str, torch.Tensor] = {"w13": module.w13, "w2": module.w2}
    step = Step(name, problem, lambda x, prob: module(x, problem.ids, prob), weights)
    step.graphed = partial(_graphed_step, problem, name, module, weights)
    return step


def _graphed_step(problem: TrainProblem, name: str, module: Experts, weights: dict[str, torch.Tensor]) -> Step:
    """`padless.nn.graphed`: the forward pass and the backward pass in a CUDA graph each."""
    x, prob = (t.detach().requires_grad_() for t in (problem.x, problem.prob))
    layer = graphed(module, x, problem.ids, prob)
    step = Step(name, problem, lambda x, prob: layer(x, problem.ids, prob), weights)

    def passes() -> None:
        step.forget()
        layer.forward(*layer.inputs)
        layer.backward(layer.dout)

    step.passes = passes
    return step


def _step_of_kept_codes(problem: TrainProblem, name: str, recipe: Recipe) -> Step:
    w13, w2 = (w.detach().requires_grad_() for w in (problem.w13, problem.w2))
    made13, made2 = weight_operands(w13, recipe), weight_operands(w2, recipe)

    def layer(x: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        return experts(x, problem.ids, prob, w13, w2, recipe, operands13=made13, operands2=made2)

    return Step(name, problem, layer, {"w13": w13, "w2": w2})


@dataclass(frozen=True)
class Maker:
    """A contender before there is a problem."""

    name: str
    make: Callable[[TrainProblem], Step]


def makers(*, compiled: bool, every_recipe: bool, peers: Sequence[Peer] = ()) -> list[Maker]:
    """torch's step, compiled or not, torchao's where it is there, and padless' by `MEASURED`, or by its `USUAL` ones."""
    names = [*(MEASURED if every_recipe else USUAL), *(name + KEPT for name in _KEPT_CODES)]
    own = [Maker(name, partial(padless_step, name=name, recipe=MEASURED[name.removesuffix(KEPT)])) for name in names]
    others = [
        Maker(peer.name, partial(torch_step, compiled=compiled, name=peer.name, product=peer.product, waits=True))
        for peer in peers
        if isinstance(peer, TorchAo)
    ]
    return [Maker(BF16, partial(torch_step, compiled=compiled)), *others, *own]


# --- torch -----------------------------------------------------------------------------------------------


def activated(z: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * prob of z (M, 2 I): (M, I) bfloat16, in float32 before."""
    gate, up = z.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * prob[:, None]).to(torch.bfloat16)


def _summed(y: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
    return y[inverse].view(-1, top_k, y.shape[1]).float().sum(dim=1).to(torch.bfloat16)


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _torch_product(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)


class TorchExperts:
    """Gated experts around grouped products under torch's autograd; what is between them is bfloat16.

    compiled: that, by torch.compile, anew for this object. product: of x (M, K), w (G, N, K) and end rows, torch's in
    bfloat16 or another one. The gather of rows and the sum of slots are each other's backward passes, so that neither
    sorts or adds atomically, as torch's backward pass of an index does.
    """

    def __init__(self, num_experts: int, top_k: int, *, compiled: bool, product: Product = _torch_product) -> None:
        self.num_experts, self.top_k, self.product = num_experts, top_k, product
        self.activated: Callable[..., torch.Tensor] = activated
        self.summed: Callable[..., torch.Tensor] = _summed
        if compiled:
            self.activated = torch.compile(activated, dynamic=False)
            self.summed = torch.compile(_summed, dynamic=False)

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, prob: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        """x (T, H), ids and prob (T, k), w13 (E, 2 I, H), w2 (E, H, I): (T, H)."""
        order, inverse, sizes = self.sorted_slots(ids)
        offs = sizes.cumsum(0).to(torch.int32)
        h = self.activated(self.product(self.rows(x, order, inverse), w13, offs), prob.reshape(-1)[order])
        return self.sums(self.product(h, w2, offs), order, inverse)

    def sorted_slots(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots by expert, the place of each slot among them, and the slots of each expert (E,), of ids (T, k)."""
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = torch.histc(flat.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return order, inverse_of(order), sizes

    def rows(self, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """The token (T, H) of each slot in that order."""
        found: torch.Tensor = _Gather.apply(x, order, inverse, self)
        return found

    def sums(self, y: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """(T, H) of rows in that order, each token's added up."""
        out: torch.Tensor = _Sum.apply(y, order, inverse, self)
        return out


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


class _Gather(torch.autograd.Function):
    """Rows of slots sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, by: TorchExperts
    ) -> torch.Tensor:
        ctx.inverse, ctx.by = inverse, by
        return x[order // by.top_k]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.by.summed(dy, ctx.inverse, ctx.by.top_k), None, None, None


class _Sum(torch.autograd.Function):
    """A token's sum over its slots, whose weights are in the rows already."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, by: TorchExperts
    ) -> torch.Tensor:
        ctx.order, ctx.by = order, by
        return by.summed(y, inverse, by.top_k)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return dout[ctx.order // ctx.by.top_k], None, None, None


def torch_step(
    problem: TrainProblem, *, compiled: bool, name: str = BF16, product: Product = _torch_product, waits: bool = False
) -> Step:
    """`TorchExperts` as a step. waits: whether it waits for the GPU, and so cannot be captured."""
    w13, w2 = (w.detach().requires_grad_() for w in (problem.w13, problem.w2))
    torch._dynamo.reset()  # another point is compiled for its own sizes
    experts_of = TorchExperts(problem.point.experts, problem.point.top_k, compiled=compiled, product=product)

    def layer(x: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        return experts_of(x, problem.ids, prob, w13, w2)

    step = Step(name, problem, layer, {"w13": w13, "w2": w2})
    step.waits = waits
    return step


# --- products alone --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductCall:
    """A product of rows and weights. flops: of the rows in groups."""

    call: Call
    flops: int


def products(problem: TrainProblem) -> dict[str, ProductCall]:
    """FP8 products of the forward pass and of the input's gradient, by the weight: the same sums, K and N exchanged."""
    from padless.formats import FP8_BLOCK
    from padless.moe.routing import route
    from padless.ops.grouped_gemm import grouped_gemm
    from padless.quantization.quantize import quantize
    from padless.quantization.weight_both import quantize_weight_both

    p = problem.point
    offs = route(problem.ids, p.experts).offs
    generator = torch.Generator(problem.x.device).manual_seed(p.slots)
    found: dict[str, ProductCall] = {}
    for name, w in (("13", problem.w13), ("2", problem.w2)):
        for kind, weight in zip(("forward", "dgrad"), quantize_weight_both(w), strict=True):
            n, k = weight.shape[1:]
            rows = torch.randn((p.slots, k), generator=generator, device=problem.x.device, dtype=torch.bfloat16)
            a = quantize(rows, FP8_BLOCK)
            out = torch.empty((p.slots, n), dtype=torch.bfloat16, device=problem.x.device)
            call = partial(grouped_gemm, a, weight, offs, out=out)
            found[f"{kind} {name}"] = ProductCall(call, 2 * p.slots * n * k)
    return found
