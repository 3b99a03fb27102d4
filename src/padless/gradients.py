"""Refusal of derivatives that are not computed: of calls without a backward pass, and of gradients themselves.

Autograd would make either up from the parts that it can follow. `padless.autograd` and `padless.nn` are what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from padless.arguments import check_tensor_type, refuse_kinds

_PARTS = ("data", "scale", "global_scale")


def refuse_gradients(**arguments: object) -> None:
    """Raises ValueError for what `padless.arguments.refuse_kinds` refuses, and, unless grad mode is off, for an argument
    that requires grad.

    arguments: by the names that the caller knows them by: tensors, `padless.BlockScaledTensor`s, sequences of either.
        Anything else is passed over.
    """
    refuse_kinds(**arguments)
    if torch.is_grad_enabled():
        for name, value in arguments.items():
            _refuse(name, value)


def detached(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; where it requires grad, cut off from its graph with grad mode off, and a ValueError with it on.

    Raises ValueError for what is no tensor, too.
    """
    check_tensor_type(name, tensor)
    if not tensor.requires_grad:
        return tensor
    refuse_gradients(**{name: tensor})
    return tensor.detach()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward(ctx, *gradients)`` of an autograd function, which raises RuntimeError where it is to be differentiated.

    torch.autograd.function.once_differentiable looks at the gradients that come in alone: after ``.sum()``, or with any
    fixed cotangent, they do not require grad, and a graph of the gradient would lack this function's own terms.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiled program refuses by itself
            raise RuntimeError(
                "create_graph is True in a backward pass through a layer of padless, which can be differentiated once; "
                "pass create_graph=False, or use a layer of torch where second derivatives are needed"
            )
        with torch.no_grad():
            return backward(ctx, *gradients)

    return checked


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
