"""The part of the training layer's check that is about `padless.nn.graphed`: replays have the bits of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from padless.nn import Experts, graphed
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place
from padless.verify.training.layer import CHECKED, PROBLEMS, Problem, draw, experts_of, step

NAMES = ("w13", "w2")
Make = Callable[[Experts, Sequence[torch.Tensor]], Callable[..., torch.Tensor]]


def check_graphed_layer(place: Place, make: Make | None = None) -> None:
    """Steps with other tokens, ids, sizes and gradients, then with other weights, then microbatches into main gradients.

    make: makes graphs of a layer and a sample. None: `graphed`, or without a GPU the layer itself.
    """
    make = make or (_graphed if place.device.type == "cuda" else _itself)
    problems = [draw(*PROBLEMS[0], seed).to(str(place.device)) for seed in (3, 0, 1)]
    for name, keep_codes in (("fp8", False), ("fp8", True), ("bf16", False)):
        eager, experts = (experts_of(problems[1], CHECKED[name]) for _ in range(2))
        experts.keep_codes = keep_codes
        graph = make(experts, _sample(problems[0]))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (eager, experts)]
        for what in ("other tokens", "another weight"):
            for problem in problems[1:]:
                where = f"{name}, codes kept, {what}" if keep_codes else f"{name}, {what}"
                _require(place, where, step(problem, experts, graph), step(problem, eager))
            for optimizer in optimizers:
                optimizer.step()
        if not keep_codes:
            _microbatches(place, name, problems, make)


def _graphed(experts: Experts, sample: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    return graphed(experts, *sample)


def _itself(experts: Experts, sample: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    return experts


def _sample(problem: Problem) -> Sequence[torch.Tensor]:
    x, prob, shared = (t.detach().clone().requires_grad_() for t in (problem.x, problem.prob, problem.shared))
    return x, problem.ids, prob, shared


def _microbatches(place: Place, name: str, problems: Sequence[Problem], make: Make) -> None:
    """Two steps of three microbatches; the first of each overwrites."""
    layers = [experts_of(problems[0], CHECKED[name]) for _ in range(2)]
    for experts in layers:
        for weight in (experts.w13, experts.w2):
            weight.main_grad = torch.full(weight.shape, 3.0, device=weight.device)  # type: ignore[attr-defined]
    eager, experts = layers
    graph = make(experts, _sample(problems[0]))
    for _ in range(2):
        for i, problem in enumerate(problems):
            for layer in layers:
                layer.w13.overwrite_main_grad = layer.w2.overwrite_main_grad = i == 0  # type: ignore[attr-defined]
            step(problem, experts, graph)
            step(problem, eager)
        found, want = ({n: getattr(layer, n).main_grad for n in NAMES} for layer in (experts, eager))
        _require(place, f"{name}, main_grad", found, want)


def _require(place: Place, where: str, found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    place.judge.wrong(f"{where}: {sorted(found)} and not {sorted(want)}", found.keys() != want.keys())
    for part, value in want.items():
        place.judge.same(f"{where}: {part} of graphs differs from the layer's", found[part], value)


CHECK = Check(check_graphed_layer)
