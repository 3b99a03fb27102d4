"""Inputs that a backward pass is asked for, and the refusal of second derivatives, which autograd would make up."""

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


def asked_for(ctx: Any) -> tuple[bool, ...]:
    """``ctx.needs_input_grad`` of an autograd function, of the backward pass under way.

    torch.autograd.grad and backward(inputs=..) ask for some tensors, and autograd drops what is given for others; what
    is written elsewhere, as to ``main_grad``, it cannot drop. Compiled passes are of all inputs.
    """
    if torch.compiler.is_compiling():
        return tuple(ctx.needs_input_grad)
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple(needed and _is_run(next(nodes)) for needed in ctx.needs_input_grad)


def _is_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:  # a leaf's that is asked for, or compiled autograd, which has no engine
        return True
