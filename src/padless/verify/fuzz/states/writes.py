"""Ways to write a weight: those that ``keep_codes`` follows by itself, and those that it asks to be told of."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from padless.runtime.devices import on_device_of
from padless.verify.fuzz.states.layers import Layer, core_of
from padless.verify.fuzz.states.sequence import Operation, table

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, eps=1e-4),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, eps=1e-4),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, eps=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-4),
    "of .data": lambda p: _OfData(p, {}),
}


class _OfData(torch.optim.Optimizer):
    """An optimizer whose step torch's versions do not count."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)


# --- counted ---------------------------------------------------------------------------------------------


def optimizer_step(layer: Layer, r: random.Random) -> None:
    """A step, of an optimizer that was there before where the parameters are still its own."""
    parameters = [p for p in layer.module.parameters() if p.requires_grad]
    if not parameters:
        return
    name = r.choice(list(_OPTIMIZERS))
    # What it keeps has the parameters' type and strides; the fused kernels of torch refuse any other.
    kind = f"{name} {parameters[0].dtype} {parameters[0].device} {[p.stride() for p in parameters]}"
    optimizer = layer.optimizers.get(kind)
    if optimizer is None or [id(p) for p in optimizer.param_groups[0]["params"]] != [id(p) for p in parameters]:
        optimizer = layer.optimizers[kind] = _OPTIMIZERS[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).copy_(layer.values(parameter.detach(), r))
    optimizer.step()
    optimizer.zero_grad(set_to_none=r.random() < 0.5)


def step_in_backward(layer: Layer, r: random.Random) -> None:
    """Each parameter is stepped as soon as its gradient is there, while others are still to come."""
    leaves = [p for p in layer.module.parameters() if p.requires_grad and p.is_leaf]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in leaves}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in leaves]
    out = layer.module(*layer.inputs())
    if out.requires_grad:
        out.float().square().sum().backward()
    for hook in hooks:
        hook.remove()


_IN_PLACE: list[Callable[[Any, torch.Tensor], object]] = [
    lambda w, v: w.copy_(v),
    lambda w, v: w.mul_(-0.75),
    lambda w, v: w.add_(v, alpha=0.5),
    lambda w, v: w.lerp_(v, 0.5),
    lambda w, v: w[0].neg_() if w.dim() else w.neg_(),
    lambda w, v: w.__setitem__(-1, v[-1]) if w.dim() else w.copy_(v),
    lambda w, v: w.view(-1)[::3].zero_() if w.is_contiguous() else w.neg_(),
    lambda w, v: w.masked_fill_(v > 0, 0.01),
    lambda w, v: w.index_copy_(0, torch.zeros(1, dtype=torch.int64, device=w.device), v[:1]) if w.dim() else w.neg_(),
    lambda w, v: w.clamp_(-0.05, 0.05),
    lambda w, v: torch.add(w.detach(), v, out=w),
    lambda w, v: torch._foreach_mul_([w], -1.25),
    lambda w, v: torch._foreach_copy_([w], [v]),
    lambda w, v: nn.init.uniform_(w, -0.1, 0.1),
    lambda w, v: w.set_(v),
    lambda w, v: w.set_(v.mT.contiguous().mT) if w.dim() > 1 else w.neg_(),
    lambda w, v: w.swapaxes_(0, 0).neg_(),
]


@torch.no_grad()
def in_place(layer: Layer, r: random.Random) -> None:
    """An operation of torch on a parameter."""
    parameter = layer.parameter(r)
    r.choice(_IN_PLACE)(parameter, layer.values(parameter.detach(), r))


def in_place_without_grad(layer: Layer, r: random.Random) -> None:
    """The same of a parameter that does not require grad, with grad mode on."""
    parameter = layer.parameter(r)
    needed = parameter.requires_grad
    parameter.requires_grad_(False).mul_(-1.5)
    parameter.requires_grad_(needed)


def load_state(layer: Layer, r: random.Random) -> None:
    """A state of other values, copied or assigned."""
    state = layer.module.state_dict()
    made = {name: layer.values(t, r) if t.is_floating_point() else t.clone() for name, t in state.items()}
    layer.module.load_state_dict(made, assign=r.random() < 0.5)


def other_parameter(layer: Layer, r: random.Random) -> None:
    """Another parameter in the place of the old one, whose memory and id are free then."""
    if layer.is_plain:
        for _ in range(r.randint(1, 2)):
            for name, value in layer.other(r).items():
                needed = getattr(layer.core, name).requires_grad
                setattr(layer.core, name, nn.Parameter(value, needed))


def tied(layer: Layer, r: random.Random) -> None:
    """Another module with the same parameters writes them, after a call of its own."""
    if not layer.is_plain:
        return
    other = layer.fresh(layer.snapshot())
    for name in layer.weights:
        setattr(core_of(other), name, getattr(layer.core, name))
    layer.check("of a module that shares the weights", other)
    with torch.no_grad():
        getattr(core_of(other), r.choice(layer.weights)).mul_(-1)
    layer.check("of a module that shares the weights, after it wrote them", other)


# --- not counted -----------------------------------------------------------------------------------------


def data_in_place(layer: Layer, r: random.Random) -> None:
    """An operation on ``.data``."""
    parameter = layer.parameter(r)
    r.choice(_IN_PLACE[:13])(parameter.data, layer.values(parameter.detach(), r))
    layer.uncounted()


def data_assigned(layer: Layer, r: random.Random) -> None:
    """Other memory once or twice: the second often lies where the first did."""
    parameter = layer.parameter(r)
    for _ in range(r.randint(1, 3)):
        parameter.data = layer.values(parameter.detach(), r)
    layer.uncounted()


def data_strided(layer: Layer, r: random.Random) -> None:
    """The same values in other strides, or other values by other strides of the same memory."""
    parameter = layer.parameter(r)
    if parameter.dim() > 1:
        square = parameter.shape[-1] == parameter.shape[-2]
        parameter.data = parameter.data.mT if square and r.random() < 0.7 else parameter.data.mT.contiguous().mT
    layer.uncounted()


def data_offset(layer: Layer, r: random.Random) -> None:
    """A part of larger memory, at another address of it every time."""
    parameter, size = layer.parameter(r), 0
    size = parameter.numel()
    whole = torch.empty(3 * size + 64, dtype=parameter.dtype, device=parameter.device)
    for start in r.sample((0, size, 2 * size + 8), 2):
        part = whole[start : start + size].view(parameter.shape)
        parameter.data = part.copy_(layer.values(parameter.detach(), r))
    layer.uncounted()


def storage_freed(layer: Layer, r: random.Random) -> None:
    """As FSDP does it: memory given back between steps, and filled anew."""
    parameter = layer.parameter(r)
    storage, values = parameter.untyped_storage(), layer.values(parameter.detach(), r)
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return  # torch ends the process that resizes what was once shared with others
    size = storage.size()
    storage.resize_(0)
    if r.random() < 0.5:
        layer.kept.append(torch.empty(size, dtype=torch.uint8, device=parameter.device))  # another may take the memory
    storage.resize_(size)
    parameter.data.copy_(values)
    layer.uncounted()


def numpy_write(layer: Layer, r: random.Random) -> None:
    """By NumPy, which shares the memory."""
    _flip_signs(_as_integers(layer.parameter(r)))
    layer.uncounted()


def _as_integers(parameter: torch.Tensor) -> Any:
    """A parameter's memory in NumPy."""
    return parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32).numpy()


def _flip_signs(bits: Any) -> None:
    np.bitwise_xor(bits, np.array(1 << (8 * bits.itemsize - 1)).astype(bits.dtype), out=bits)


def dlpack_write(layer: Layer, r: random.Random) -> None:
    """By another tensor of the memory, as a library that takes DLPack has it."""
    values = layer.parameter(r).detach()
    with on_device_of(values):  # torch exports what is on the current GPU alone
        torch.from_dlpack(values).mul_(-1)
    layer.uncounted()


def storage_write(layer: Layer, r: random.Random) -> None:
    """By the storage's own copy."""
    parameter = layer.parameter(r).detach()
    if parameter.untyped_storage().size() == parameter.nbytes:
        other = (-parameter).as_strided(parameter.shape, parameter.stride()) if not parameter.dim() else -parameter
        if other.stride() == parameter.stride():
            parameter.untyped_storage().copy_(other.untyped_storage())
    layer.uncounted()


def flat_vector(layer: Layer, r: random.Random) -> None:
    """Parameters become parts of one vector, which is then written."""
    parameters = list(layer.module.parameters())
    if not all(p.is_contiguous() for p in parameters):  # for .view
        return
    flat = parameters_to_vector(parameters).detach().clone()
    vector_to_parameters(flat, parameters)
    layer.uncounted()
    layer.check("within flat_vector")
    flat.mul_(-1)
    layer.kept = [*layer.kept[-4:], flat]
    layer.uncounted()


@torch.no_grad()
def written_by_what_is_kept(layer: Layer, r: random.Random) -> None:
    """By a vector or an alias that an earlier operation kept."""
    for kept in layer.kept:
        if isinstance(kept, torch.Tensor) and kept.is_floating_point():
            kept.mul_(-1)
    layer.uncounted()


def alias(layer: Layer, r: random.Random) -> None:
    """Aliases of weights, for later."""
    kept = [p.detach() if r.random() < 0.5 else p.data for p in layer.core.parameters()]
    layer.kept = [*layer.kept[-4:], *kept]


def average_swapped(layer: Layer, r: random.Random) -> None:
    """A moving average takes the weights' place, for an evaluation, and they come back."""
    parameters = list(layer.core.parameters())
    raw = [p.data for p in parameters]
    averages = [layer.values(t, r) for t in raw]
    for values in (averages, raw, averages):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        layer.uncounted()
        layer.check("within average_swapped")
        for average in averages:
            average.mul_(-0.75)
        layer.uncounted()
    if r.random() < 0.5:
        for parameter, value in zip(parameters, raw, strict=True):
            parameter.data = value
        layer.uncounted()


def averaged_model(layer: Layer, r: random.Random) -> None:
    """torch's average of models, updated from the layer."""
    if not layer.is_plain:
        return
    averaged = torch.optim.swa_utils.AveragedModel(layer.module, use_buffers=r.random() < 0.5)
    for _ in range(2):
        layer.check("of an average of models", averaged.module)
        with torch.no_grad():
            layer.parameter(r).mul_(-0.75)
        averaged.update_parameters(layer.module)
        if layer.core.keep_codes:
            core_of(averaged.module).forget_codes()
    layer.check("of an average of models", averaged.module)


def swapped_tensors(layer: Layer, r: random.Random) -> None:
    """torch.utils.swap_tensors, for which nothing may refer to a parameter weakly, and no graph as a hook has."""
    if not layer.is_plain:
        return
    parameter = layer.parameter(r)
    torch.utils.swap_tensors(parameter, nn.Parameter(layer.values(parameter.detach(), r), parameter.requires_grad))
    layer.uncounted()


def other_process(layer: Layer, r: random.Random) -> None:
    """A process that shares the memory writes it."""
    layer.module.share_memory()
    if not layer.is_plain:
        return
    bits = _as_integers(layer.parameter(r))
    layer.uncounted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads around: the child runs no torch
        child = os.fork()
    if child == 0:
        try:
            _flip_signs(bits)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    layer.uncounted()


WRITES: dict[str, Operation] = {
    **table(optimizer_step, in_place, share=4.0),
    **table(data_in_place, data_assigned, data_offset, share=2.0),
    **table(load_state, other_parameter, in_place_without_grad, step_in_backward, tied),
    **table(data_strided, storage_freed, flat_vector, alias, written_by_what_is_kept, average_swapped, share=1.0),
    **table(dlpack_write, storage_write, swapped_tensors, share=0.7),
    **table(numpy_write, share=0.7, where="cpu"),
    **table(other_process, averaged_model, share=0.2),
}
WRITES["other_process"] = Operation(other_process, 0.1, "cpu")
