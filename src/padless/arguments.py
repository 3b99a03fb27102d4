"""Checks of what an argument is, before its shape: a plain tensor, a number, True or False, one of some names.

All raise ValueError of one sentence: the argument, what it was, what is allowed. Tensors that require grad are refused
by calls without a backward pass, which autograd would make up from their parts: `padless.autograd` and `padless.nn` are
what trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch.autograd import forward_ad

MOST_ROWS = 2**30
_PARTS = ("data", "scale", "global_scale")  # of a BlockScaledTensor


def shown(value: object) -> str:
    """A value in a message: itself where it is short, shape and dtype of a tensor, else its type."""
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {tuple(value.shape)} {value.dtype}"
    if value is None or isinstance(value, (str, Real, torch.dtype, tuple, list)):
        return f"{value!r:.80}"
    return f"of type {type(value).__name__}"


def check_tensor_type(name: str, value: object) -> None:
    """Raises ValueError unless the value is a tensor that calls can read."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    refuse_kinds(**{name: value})


def check_type(name: str, value: object, wanted: type) -> None:
    """Raises ValueError unless the value is None or of the class."""
    if value is not None and not isinstance(value, wanted):
        raise ValueError(f"{name} must be a {wanted.__name__} or None, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")


def check_integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> None:
    """Raises ValueError unless the value is an integer from ``least`` to ``most``; sizes that are traced pass."""
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        return  # it would become a guard
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        allowed = f"of {least} or more" if most == 2**31 - 1 else f"from {least} to {most}"
        raise ValueError(f"{name} is {shown(value)}; it must be an integer {allowed}")


def check_sizes(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for more rows, along all dimensions but the last, or columns than kernels count in 32 bits."""
    count: Any = t.numel()
    if torch.compiler.is_compiling() or isinstance(count, torch.SymInt) or count < MOST_ROWS:
        return  # of traced sizes it would become a guard
    if math.prod(t.shape[:-1]) >= MOST_ROWS or t.shape[-1] >= MOST_ROWS:
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}; its columns, and its rows along all other dimensions, must be fewer "
            "than 2^30: give a part at a time"
        )


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a finite number; traced ones pass."""
    if torch.compiler.is_compiling() or isinstance(value, torch.SymFloat):
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if (
        not is_number
        or not abs(value) <= torch.finfo(torch.float32).max
        or (isinstance(value, int) and abs(value) >= 2**63)
    ):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number")


def check_device(device: object) -> None:
    """Raises ValueError for what torch knows no device by; None is the current one."""
    if device is None or isinstance(device, torch.device):
        return
    try:
        torch.device(device)  # type: ignore[call-overload]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"device is {shown(device)}; it must be one of torch's, such as 'cuda:0', or None") from None


def is_one_of(value: object, allowed: Collection[object]) -> bool:
    """Whether the value is one of these names, types or formats; a tensor and what has no hash are none."""
    for one in allowed:
        if value is one:
            return True
    return not isinstance(value, torch.Tensor) and any(value == one for one in allowed)


def refuse_kinds(**arguments: object) -> None:
    """Raises ValueError for a sparse, quantized or nested tensor, and for any call inside of torch.func or torch.jit.

    arguments: tensors and sequences of them, by the names that the caller knows them by. Others are passed over.
    """
    if torch.compiler.is_compiling():
        return
    if is_transforming():
        raise ValueError(
            f"{next(iter(arguments))} is inside of a transform of torch.func or of torch.jit.trace, which padless does "
            "not support; use torch.autograd with padless.nn or padless.autograd, torch.compile or torch.export"
        )
    for name, value in arguments.items():
        _refuse_kind(name, value)


def is_transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, ..) or torch.jit.trace is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def _refuse_kind(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
            raise ValueError(
                f"{name} is a {kind} tensor; it must be a plain one: .to_dense(), .dequantize() and .unbind() make some"
            )
        refuse_negated(name, value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, one in enumerate(value):
            _refuse_kind(f"{name}[{i}]", one)


def refuse_negated(name: str, t: torch.Tensor) -> None:
    """Raises ValueError for values of another sign than those in memory, as of the imaginary part of a conjugate."""
    if not torch.compiler.is_compiling() and t.is_neg():
        raise ValueError(f"{name} is a view that negates what is in memory; pass {name}.resolve_neg()")


# --- tensors that require grad ----------------------------------------------------------------------------


def check_readable(**arguments: object) -> None:
    """Raises ValueError for what `refuse_kinds` and `refuse_gradients` refuse."""
    refuse_kinds(**arguments)
    refuse_gradients(**arguments)


def refuse_gradients(**arguments: object) -> None:
    """Raises ValueError for an argument that requires grad, unless grad mode is off, and for one with a tangent.

    arguments: by the names that the caller knows them by: tensors, `padless.BlockScaledTensor`s, sequences of either.
        Anything else is passed over.
    """
    if torch.is_grad_enabled():
        for name, value in arguments.items():
            _refuse(name, value)
    refuse_tangents(**arguments)


def refuse_tangents(**arguments: object) -> None:
    """Raises ValueError for a tensor that has a tangent of forward-mode differentiation, by its name."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                raise ValueError(
                    f"{name} has a tangent of torch.autograd.forward_ad, which this call would lose; padless computes "
                    "no derivatives in forward mode: use torch.autograd with padless.nn or padless.autograd"
                )


def detached(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; where it requires grad, cut off from its graph with grad mode off, and a ValueError with it on.

    Raises ValueError for what is no tensor, too.
    """
    check_tensor_type(name, tensor)
    if not tensor.requires_grad:
        return tensor
    refuse_gradients(**{name: tensor})
    return tensor.detach()


def _refuse(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise ValueError(
                f"{name} requires grad and this call computes no gradients; train with padless.nn or padless.autograd, "
                f"pass {name}.detach() or call under torch.no_grad()"
            )
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, one in enumerate(value):
            _refuse(f"{name}[{i}]", one)
    elif not isinstance(value, (int, float)) and hasattr(value, "scale"):  # Dynamo asks no number for attributes
        for part in _PARTS:
            _refuse(f"{name}.{part}", getattr(value, part, None))
