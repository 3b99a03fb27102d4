"""Operations on a whole module: conversions, copies, parametrizations, settings, and new modules in its place."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from padless.verify.fuzz.problem import DTYPES
from padless.verify.fuzz.states.layers import NAMED, Layer, core_of, rows_of
from padless.verify.fuzz.states.sequence import Operation, table

# --- conversions -----------------------------------------------------------------------------------------


def to_dtype(layer: Layer, r: random.Random) -> None:
    """To another type, or there and back."""
    before, dtype = layer.dtype, r.choice(list(DTYPES.values()))
    layer.module.to(dtype)
    if r.random() < 0.7:
        layer.module.to(before)
    layer.uncounted()


def half_and_back(layer: Layer, r: random.Random) -> None:
    """By the methods for it."""
    (layer.module.half() if r.random() < 0.5 else layer.module.bfloat16()).float()
    layer.uncounted()


def applied(layer: Layer, r: random.Random) -> None:
    """By _apply, of which .to and .cuda are made, once or twice."""
    factor = r.choice((-1.0, 0.5, 1.5))
    for _ in range(r.randint(1, 2)):
        layer.module._apply(lambda t: t * factor if t.is_floating_point() else t)
    layer.uncounted()


def converted_by_swapping(layer: Layer, r: random.Random) -> None:
    """The same in the mode in which torch swaps the tensors of a parameter, which has to be the same object after."""
    if not layer.is_plain:
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if r.random() < 0.5:
            layer.module._apply(lambda t: t * -1)
        else:
            state = {name: layer.values(t, r) for name, t in layer.module.state_dict().items()}
            layer.module.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    layer.uncounted()


def emptied_and_loaded(layer: Layer, r: random.Random) -> None:
    """New memory without values, and a state into it."""
    if not layer.is_plain:
        return
    state = {name: layer.values(t, r) for name, t in layer.module.state_dict().items()}
    layer.module.to_empty(device=layer.device)
    layer.uncounted()
    layer.module.load_state_dict(state)


def device_and_back(layer: Layer, r: random.Random) -> None:
    """To the host, where it is called, and back to the GPU."""
    layer.module.cpu()
    layer.uncounted()
    with torch.no_grad():
        layer.parameter(r).mul_(-1)
    inputs = [t.detach().cpu() if t is not None else None for t in layer.inputs()]
    layer.module(*inputs)
    layer.module.to(layer.device)
    layer.uncounted()


# --- copies ----------------------------------------------------------------------------------------------


def copied(layer: Layer, r: random.Random) -> None:
    """A copy by copy, pickle or torch.save; either is written and both are called; either goes on."""
    if not layer.is_plain:
        return
    module, how = layer.module, r.randrange(4)
    if how == 0 or layer.core._load_state_dict_pre_hooks:  # torch's weight_norm leaves one, which cannot be pickled
        other = copy.deepcopy(module)
    elif how == 1:
        other = pickle.loads(pickle.dumps(module))
    elif how == 2:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.copy(module)  # of the same parameters
    layer.check("of a copy", other)
    with torch.no_grad():
        getattr(core_of(r.choice((module, other))), r.choice(layer.weights)).mul_(-1.25)
    layer.check("of a copy, after a write to one of both", other)
    layer.check("after a write to one of both")
    if r.random() < 0.5:
        layer.module = other


def new_module(layer: Layer, r: random.Random) -> None:
    """The module is deleted and others take its place, its memory and its id."""
    core = layer.core
    recipe, keep_codes, dtype = core.recipe, core.keep_codes, layer.dtype
    del core
    layer.optimizers.clear()
    for _ in range(r.randint(1, 3)):
        del layer.module
        if r.random() < 0.2:
            gc.collect(0)  # a module is new: a whole collection would take longer than the sequence
        layer.module = layer.made(recipe, keep_codes, dtype)
        layer.drawn_weights(r.randrange(1000))
        layer.check("of a new module")


# --- weights that are made of others ---------------------------------------------------------------------


class Scaled(nn.Module):
    """A parametrization with a parameter."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """weight, scaled."""
        return weight * self.by


def parametrized(layer: Layer, r: random.Random) -> None:
    """A parametrization is registered, of torch's or another."""
    name, how = r.choice(layer.weights), r.randrange(4)
    if not layer.is_plain and (how > 0 or not parametrize.is_parametrized(layer.core)):
        return
    if how == 1:
        parametrizations.weight_norm(layer.core, name, dim=r.choice((0, 2)))
    elif how == 2 and layer.dtype == torch.float32:
        parametrizations.spectral_norm(layer.core, name)
    else:
        parametrize.register_parametrization(layer.core, name, Scaled(layer.device, layer.dtype))


def parametrization_changed(layer: Layer, r: random.Random) -> None:
    """Its parameters are written, more than once, so that a weight may lie where another did."""
    for _ in range(r.randint(1, 3)):
        for name, parameter in layer.core.named_parameters():
            if "parametrizations" in name or name.endswith(("_g", "_orig")):
                with torch.no_grad():
                    parameter.mul_(r.choice((0.5, -1.25)))
        layer.check("within parametrization_changed")


def unparametrized(layer: Layer, r: random.Random) -> None:
    """Parametrizations and hooks are removed."""
    for name in layer.weights:
        if parametrize.is_parametrized(layer.core, name):
            parametrize.remove_parametrizations(layer.core, name, leave_parametrized=True)
        elif hasattr(layer.core, f"{name}_orig"):
            prune.remove(layer.core, name)
        elif hasattr(layer.core, f"{name}_g"):
            nn.utils.remove_weight_norm(layer.core, name)
    layer.uncounted()


def hooked(layer: Layer, r: random.Random) -> None:
    """A hook makes the weight in every call: pruning, and the weight normalization of old."""
    if not layer.is_plain:
        return
    name = r.choice(layer.weights)
    if not getattr(layer.core, name).is_contiguous():  # for .view
        return
    if r.random() < 0.5:
        prune.random_unstructured(layer.core, name, amount=0.3)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(layer.core, name)


# --- settings --------------------------------------------------------------------------------------------


def recipe(layer: Layer, r: random.Random) -> None:
    """Another recipe, perhaps for one call alone."""
    before = layer.core.recipe
    layer.core.recipe = NAMED[r.choice(layer.recipes())]
    if r.random() < 0.4:
        layer.check("with another recipe")
        layer.core.recipe = before


def keep_codes(layer: Layer, r: random.Random) -> None:
    """Codes are kept from now on, or no longer."""
    if r.random() < 0.3:
        layer.core.keep_codes = not layer.core.keep_codes
        layer.check("within keep_codes")
        for name in layer.weights:
            getattr(layer.core, name).data.mul_(-1)
    layer.core.keep_codes = r.random() < 0.6


def forget_codes(layer: Layer, r: random.Random) -> None:
    """A call that is not needed."""
    layer.core.forget_codes()


def needs_grad(layer: Layer, r: random.Random) -> None:
    """Some parameters are frozen, and inputs."""
    for parameter in layer.module.parameters():
        parameter.requires_grad_(r.random() < 0.7)
    layer.x_needs_grad = r.random() < 0.8


def mode(layer: Layer, r: random.Random) -> None:
    """train or eval."""
    layer.module.train(r.random() < 0.5)


def rows(layer: Layer, r: random.Random) -> None:
    """Another number of tokens."""
    layer.rows = rows_of(r)


def refused(layer: Layer, r: random.Random) -> None:
    """A call that raises must leave nothing behind."""
    x, *others = layer.inputs()
    assert x is not None
    try:
        layer.module(r.choice((x[:, :-1], x.to(torch.int32))), *others)
    except (ValueError, RuntimeError, TypeError):
        pass
    else:
        layer.place.judge.wrong("a wrong call was not refused", True)
    try:
        layer.core.recipe = "fp7"
    except ValueError:
        return
    layer.place.judge.wrong("a wrong recipe was not refused", True)


MODULES: dict[str, Operation] = {
    **table(to_dtype, half_and_back, applied, emptied_and_loaded),
    **table(device_and_back, share=1.5, where="cuda"),
    **table(converted_by_swapping, share=0.4),
    **table(copied, new_module, share=1.2),
    **table(parametrized, parametrization_changed, share=1.5),
    **table(unparametrized, recipe, keep_codes, needs_grad, rows),
    **table(hooked, forget_codes, mode, refused, share=0.4),
}
