"""Refusal of tensors that require grad by calls without a backward pass, which autograd would make up from their parts.

`padless.autograd` and `padless.nn` are what trains.
"""

from __future__ import annotations

from collections.abc import Sequence

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
