"""Experts of transformers as layers: trained by "padless_train", and quantized. Imported where it is installed."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from padless.formats import FORMAT_BY_NAME
from padless.integrations.transformers import experts_forward, quantize_experts, set_activations, train_forward
from padless.nn.recipe import Recipe, as_recipe
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.states.layers import FRESH, rows_of
from padless.verify.fuzz.states.sequence import Operation, table


class HubExperts(nn.Module):
    """Experts as modules of transformers have them, with the names that operations on padless' own layers use."""

    has_gate, has_bias, is_transposed = True, False, False  # what transformers' decorator says of a class

    def __init__(self, o: Options, trains: bool, **factory: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(o["groups"], 2 * o["n"], o["k"], **factory))
        self.down_proj = nn.Parameter(torch.empty(o["groups"], o["k"], o["n"], **factory))
        self.trains, self.padless_activation = trains, dict[str, Any]()
        self._codes = {"gate_up_proj": None, "down_proj": None}
        self.keep_codes, self.delayed_wgrad = False, None

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    @property
    def recipe(self) -> Recipe:
        """The recipe that `padless.integrations.transformers.set_recipe` sets."""
        return as_recipe(getattr(self, "padless_recipe", "fp8"))

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        self.padless_recipe = as_recipe(recipe)

    def forget_codes(self) -> None:
        """No codes are kept."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The forward of the implementation "padless_train", or of "padless"."""
        return (train_forward if self.trains else experts_forward)(self, hidden_states, top_k_index, top_k_weights)


def hub_experts(o: Options, *, recipe: Recipe, keep_codes: bool, trains: bool = True, **factory: Any) -> nn.Module:
    """The experts of a problem's options."""
    del keep_codes
    module = HubExperts(o, trains, **factory)
    module.recipe = recipe
    return module


# --- quantized experts -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Quantized:
    """Quantized experts, whose parameters are codes and scales."""

    o: Options
    place: Place
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows, self._calls, self.device = self.o["rows"], self.o["seed"], self.place.device
        self.module = self.made(self.o["seed"])

    def made(self, seed: int) -> Any:
        """A module of weights that are drawn and quantized."""
        module = HubExperts(self.o, False, dtype=torch.bfloat16, device=self.device)
        generator = self.place.generator(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, device=self.device, generator=generator) / 8)
        return quantize_experts(module, FORMAT_BY_NAME[self.o["format"]])

    def close(self) -> None:
        """Nothing outlives it."""

    def check(self, when: str, module: Any = None) -> None:
        """The output against that of a module that was never called, with copies of the parameters."""
        module = self.module if module is None else module
        self._calls += 1
        generator, shape = self.place.generator(self._calls), (self.rows, self.o["top_k"])
        x = torch.randn((self.rows, self.o["k"]), device=self.device, generator=generator).bfloat16()
        ids = torch.randint(0, self.o["groups"] + 1, shape, device=self.device, generator=generator)
        weights = torch.rand(shape, device=self.device, generator=generator)
        fresh = self.made(0)
        for name, parameter in module.named_parameters():
            setattr(fresh, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        if hasattr(module, "padless_activations"):
            fresh.padless_activations = module.padless_activations
        with torch.no_grad():
            self.place.judge.same(f"{FRESH}: output {when}", module(x, ids, weights), fresh(x, ids, weights))


def again(state: Quantized, r: random.Random) -> None:
    """A call as it is."""
    state.check("again")


def rows(state: Quantized, r: random.Random) -> None:
    """Another number of tokens."""
    state.rows = rows_of(r)


def written(state: Quantized, r: random.Random) -> None:
    """Other codes and scales into the parameters."""
    other = state.made(r.randrange(1000))
    with torch.no_grad():
        for name, parameter in state.module.named_parameters():
            parameter.copy_(getattr(other, name))


def loaded(state: Quantized, r: random.Random) -> None:
    """A state of other codes and scales, copied or assigned."""
    state.module.load_state_dict(state.made(r.randrange(1000)).state_dict(), assign=r.random() < 0.5)


def replaced(state: Quantized, r: random.Random) -> None:
    """Other parameters in the old ones' place, once or twice: the second may have the memory of the first."""
    for _ in range(r.randint(1, 2)):
        other = state.made(r.randrange(1000))
        for name, parameter in other.named_parameters():
            setattr(state.module, name, parameter)


def copied(state: Quantized, r: random.Random) -> None:
    """A copy, of which either is written and both are called."""
    other = copy.deepcopy(state.module)
    state.check("of a copy", other)
    state.module, other = r.sample((state.module, other), 2)
    written(state, r)
    state.check("of a copy, after a write to the other", other)


def renewed(state: Quantized, r: random.Random) -> None:
    """Another module in the old one's place."""
    for _ in range(2):
        del state.module
        state.module = state.made(r.randrange(1000))
        state.check("of a new module")


def chosen(state: Quantized, r: random.Random) -> None:
    """Other formats of activations, where they are allowed."""
    from padless.kernels.table import ROUTES

    arch, weights = state.place.arch, state.o["format"]
    routes = [t for t in ROUTES if t.operation == "grouped_gemm" and t.b == weights and (not arch or t.arch == arch)]
    name = r.choice(sorted({t.a for t in routes}))
    set_activations(state.module, torch.bfloat16 if name == "BF16" else FORMAT_BY_NAME[name])


QUANTIZED: dict[str, Operation] = {
    **table(again, rows, written, loaded, replaced, chosen),
    **table(copied, renewed, share=0.5),
}
