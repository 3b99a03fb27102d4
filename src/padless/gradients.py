"""Refusal of second derivatives, which autograd would make up from the parts that it can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


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
