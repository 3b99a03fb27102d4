"""Layers that operations change: the module, its inputs, and the comparison with a fresh module of the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from padless.nn import RECIPES, Experts, GroupedLinear, MoE, Recipe
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

NAMED = RECIPES | {"fp8_recompute": Recipe(save="recompute")}
FRESH = "not a fresh module's"  # what a finding begins with
_SIZES = (16, 32, 48, 64, 128, 144, 272)
_SIZES_OF_KERNELS = (32, 128, 272)  # few, since kernels are compiled for them

Results = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Family:
    """One kind of module. make(options, recipe, keep_codes, dtype, device); inputs(layer, generator): arguments of a
    call, those of floating point being differentiable."""

    make: Callable[..., nn.Module]
    inputs: Callable[[Layer, torch.Generator], tuple[torch.Tensor | None, ...]]


@dataclass(eq=False)
class Layer:
    """A module under test.

    rows: tokens of the next calls. x_needs_grad: whether they require grad. kept: what operations keep alive. closing:
    what is to be done at the end. names: of a fresh module's parameters.
    """

    family: Family
    o: Options
    place: Place
    rows: int = 0
    x_needs_grad: bool = True
    kept: list[Any] = field(default_factory=list)
    closing: list[Callable[[], None]] = field(default_factory=list)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device, self.rows = self.place.device, self.o["rows"]
        self.module = self.made(NAMED[self.o["recipe"]], self.o["keep_codes"], DTYPES[self.o["dtype"]])
        self.drawn_weights(self.o["seed"])
        self._calls = self.o["seed"]
        self.names = [name for name, _ in self.module.named_parameters()]

    def made(self, recipe: Recipe, keep_codes: bool, dtype: torch.dtype) -> nn.Module:
        """A new module of these sizes."""
        return self.family.make(self.o, recipe=recipe, keep_codes=keep_codes, dtype=dtype, device=self.device)

    def drawn_weights(self, seed: int) -> None:
        """Gives the parameters the values of a seed."""
        generator = self.place.generator(seed)
        with torch.no_grad():
            for parameter in self.module.parameters():
                drawn = torch.randn(parameter.shape, device=self.device, generator=generator)
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)

    def close(self) -> None:
        for close in reversed(self.closing):
            close()

    # --- what operations work on -------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        """The module with the quantized weights."""
        return core_of(self.module)

    @property
    def weights(self) -> list[str]:
        """Names of the quantized weights within ``core``."""
        return list(self.core._codes)

    @property
    def is_plain(self) -> bool:
        """Whether all quantized weights are parameters: no hook and no parametrization makes them."""
        return all(name in self.core._parameters for name in self.weights)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def parameter(self, r: random.Random) -> nn.Parameter:
        """A parameter that quantized weights are, or are made of."""
        return r.choice(list(self.core.parameters()))

    def uncounted(self) -> None:
        """Says what ``keep_codes`` asks to be told; without it nothing is to be said."""
        if self.core.keep_codes:
            self.core.forget_codes()

    def values(self, like: torch.Tensor, r: random.Random) -> torch.Tensor:
        """Other values of a weight's shape, dtype and device."""
        generator = self.place.generator(r.randrange(2**31))
        drawn = torch.randn(like.shape, device=like.device, generator=generator)
        return (drawn / like.shape[-1] ** 0.5 if like.dim() else drawn).to(like.dtype)

    def other(self, r: random.Random) -> Options:
        """Other values of all quantized weights, by their names within ``core``."""
        return {name: self.values(getattr(self.core, name).detach(), r) for name in self.weights}

    def recipes(self) -> list[str]:
        """Names of recipes that can have these sizes."""
        return recipes_of([self.o[name] for name in ("n", "k")])

    # --- results -----------------------------------------------------------------------------------------

    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of a call, other ones every time."""
        self._calls += 1
        made = self.family.inputs(self, self.place.generator(self._calls))
        return tuple(
            t.to(self.dtype).requires_grad_(self.x_needs_grad) if t is not None and t.is_floating_point() else t
            for t in made
        )

    def fresh(self, weights: dict[str, torch.Tensor], module: nn.Module | None = None) -> nn.Module:
        """A new module with these values, by names of `names`, and with the settings of ``module``."""
        core = core_of(self.module if module is None else module)
        new = self.made(core.recipe, False, next(iter(weights.values())).dtype)
        for name, value in weights.items():
            parent, _, leaf = name.rpartition(".")
            copied = value.detach().clone(memory_format=torch.contiguous_format)
            new.get_submodule(parent).register_parameter(leaf, nn.Parameter(copied, value.requires_grad))
        return new

    def read(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Weights of a module, also where they are made of others."""
        return {name: attrgetter(name)(module) for name in self.names}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the weights as they are."""
        return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in self.read(self.module).items()}

    def results(
        self, module: nn.Module, inputs: Sequence[torch.Tensor | None], call: Callable[..., torch.Tensor] | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        """(output and gradients by name, the weights that the call read)."""
        with parametrize.cached():
            out = (module if call is None else call)(*inputs)
            weights = self.read(module)  # now: hooks make them in the call
        return self.gradients(out, inputs, weights), weights

    def gradients(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor | None],
        weights: dict[str, torch.Tensor],
        *,
        retain_graph: bool = False,
        by_backward: bool = False,
    ) -> Results:
        """``out``, and its gradients for a random cotangent. by_backward: as ``.grad`` of leaves."""
        found: Results = {"output": out.detach()}
        named = {f"input {i}": t for i, t in enumerate(inputs) if t is not None} | weights
        wanted = {name: t for name, t in named.items() if t.requires_grad}
        if wanted and out.requires_grad:
            generator = self.place.generator(self.o["seed"] + out.shape[0])
            dout = torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)
            if by_backward:
                for t in wanted.values():
                    t.grad = None
                out.backward(dout, retain_graph=retain_graph)
                made = tuple(t.grad for t in wanted.values())
                for t in wanted.values():
                    t.grad = None
            else:
                leaves = list(wanted.values())
                made = torch.autograd.grad(out, leaves, dout, retain_graph=retain_graph, allow_unused=True)
            found |= {f"gradient of {name}": t for name, t in zip(wanted, made, strict=True)}
        return found

    def same(self, got: Results, want: Results, when: str) -> None:
        """Compares results by name, to the bit."""
        judge = self.place.judge
        judge.wrong(f"{FRESH}: gradients of {sorted(got)}, not {sorted(want)}, {when}", got.keys() != want.keys())
        for name, value in want.items():
            mine = got.get(name)
            if mine is not None and value is not None:
                judge.same(f"{FRESH}: {name} {when}", mine, value)
            elif name in got:
                judge.wrong(f"{FRESH}: {name} is there, or not, {when}", (mine is None) != (value is None))

    def check(self, when: str, module: nn.Module | None = None, call: Callable[..., Any] | None = None) -> None:
        """A call of the module, by ``call`` in another way, against a plain call of a fresh one."""
        module, inputs = self.module if module is None else module, self.inputs()
        got, weights = self.results(module, inputs, call)
        want, _ = self.results(self.fresh(weights, module), inputs)
        self.same(got, want, when)


def core_of(module: nn.Module) -> Any:
    """The part with the quantized weights."""
    return next(part for part in module.modules() if hasattr(part, "forget_codes"))


# --- families --------------------------------------------------------------------------------------------


def recipes_of(sizes: Sequence[int]) -> list[str]:
    """Names of recipes for weights of these sizes."""
    in_32s = not any(size % 32 for size in sizes)
    return [name for name in NAMED if in_32s or not name.startswith(("mxfp8", "nvfp4"))]


def constants(draw: Draw) -> Options:
    """Settings and sizes of a layer."""
    sizes = _SIZES_OF_KERNELS if draw.backend == "cuda" else _SIZES
    n, k = draw.one(sizes), draw.one(sizes)
    return {
        "recipe": draw.one(recipes_of((n, k))),
        "keep_codes": draw.maybe(0.5),
        "dtype": draw.one(("bfloat16", "float32", "float32", "float16")),
        "groups": draw.randint(1, 4),
        "n": n,
        "k": k,
    }


def rows_of(draw: random.Random) -> int:
    """Tokens: often none or few."""
    return draw.choice((0, 1, 2, 17, 33, draw.randint(0, 60)))


def _linear(o: Options, **how: Any) -> nn.Module:
    return GroupedLinear(o["groups"], o["k"], o["n"], **how)


def _linear_inputs(layer: Layer, generator: torch.Generator) -> tuple[torch.Tensor | None, ...]:
    """Rows, of which some are of no group."""
    x = torch.randn((layer.rows, layer.o["k"]), device=layer.device, generator=generator)
    ends = torch.randint(0, layer.rows + 1, (layer.o["groups"],), device=layer.device, generator=generator)
    return x, ends.sort().values.to(torch.int32)


def _experts(o: Options, **how: Any) -> nn.Module:
    return Experts(o["k"], o["n"], o["groups"], gate_up="concatenated" if o["n"] % 32 else o["gate_up"], **how)


def experts_inputs(layer: Layer, generator: torch.Generator) -> tuple[torch.Tensor | None, ...]:
    """Tokens with ids that are no expert among theirs."""
    o, device, shape = layer.o, layer.device, (layer.rows, layer.o["top_k"])
    x = torch.randn((layer.rows, o["k"]), device=device, generator=generator)
    ids = torch.randint(-1, o["groups"] + 1, shape, device=device, generator=generator)
    weights = torch.rand(shape, device=device, generator=generator)
    return x, ids, weights, torch.randn(x.shape, device=device, generator=generator) if o["shared"] else None


def _moe(o: Options, **how: Any) -> nn.Module:
    gate_up = "concatenated" if o["n"] % 32 else o["gate_up"]
    how |= {"gate_up": gate_up, "shared_intermediate": 16 if o["shared"] else None}
    return MoE(o["k"], o["n"], o["groups"], min(o["top_k"], o["groups"]), **how)


def _moe_inputs(layer: Layer, generator: torch.Generator) -> tuple[torch.Tensor | None, ...]:
    return (torch.randn((layer.rows, layer.o["k"]), device=layer.device, generator=generator),)


FAMILIES = {
    "linear": Family(_linear, _linear_inputs),
    "experts": Family(_experts, experts_inputs),
    "moe": Family(_moe, _moe_inputs),
}


def experts_constants(draw: Draw) -> Options:
    """The same of experts."""
    more = {"gate_up": draw.one(("concatenated", "interleaved")), "top_k": draw.randint(1, 3)}
    return constants(draw) | more | {"shared": draw.maybe(0.3)}
