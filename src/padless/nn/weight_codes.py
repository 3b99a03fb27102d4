"""Quantized copies of a weight, made again when the weight changed.

A change is seen by the parameter's version, which torch counts up at every write it knows of; by its address, type and
shape; by a step of any torch.optim.Optimizer, since some write where no version counts (``.data``, and FSDP2, which
gathers new values into the same parameter without counting); and by `forget`, which a module calls when a parameter is
replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from padless.formats import BlockScaledTensor
from padless.nn.calls import is_traced
from padless.nn.quantizers import quantized, weight_and_transpose
from padless.nn.recipe import Recipe

# Steps of optimizers so far.
_steps = [0]


def _count_step(*arguments: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


class WeightOperands(NamedTuple):
    """What the two products that read a weight (G, N, K) take.

    forward: FP8_BLOCK (G, N, K), or the weight in bfloat16. dgrad: FP8_BLOCK (G, K, N), or the same bfloat16 weight
        (G, N, K). Where one is plain it is in a type that products are computed in.
    """

    forward: BlockScaledTensor | torch.Tensor
    dgrad: BlockScaledTensor | torch.Tensor


def weight_operands(weight: torch.Tensor, recipe: Recipe) -> WeightOperands:
    """Operands of a weight (G, N, K) for a recipe, made now. Their values are not followed by autograd."""
    weight = weight.detach()
    fp8 = weight_and_transpose(weight) if recipe.fp8_forward or recipe.fp8_dgrad else None
    plain = weight
    if not (recipe.fp8_forward and recipe.fp8_dgrad) and weight.dtype != torch.float64:
        plain = weight.to(torch.bfloat16)
    return WeightOperands(
        fp8[0] if fp8 is not None and recipe.fp8_forward else plain,
        fp8[1] if fp8 is not None and recipe.fp8_dgrad else plain,
    )


class WeightCodes:
    """The last operands made of one weight.

    A copy, also of the module that holds it, starts without any.
    """

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] | None = None
        self._operands: WeightOperands | None = None

    def of(self, weight: torch.Tensor, recipe: Recipe) -> WeightOperands:
        """Operands of the weight as it is now: those of the last call where nothing changed.

        While torch.compile traces, and while a CUDA graph is captured, they are made every time: the graph is to
        quantize when it runs.
        """
        if is_traced(weight) or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return weight_operands(weight, recipe)
        facts = _facts_of(weight, recipe)
        if facts is None or facts != self._facts:
            self._operands = None  # its memory is free for the new one
            self._operands = weight_operands(weight, recipe)
            self._facts = facts
        assert self._operands is not None
        return self._operands

    def forget(self) -> None:
        """Leaves the operands that were made: the next call makes new ones."""
        self._facts = self._operands = None

    def __deepcopy__(self, memo: Any) -> WeightCodes:
        return WeightCodes()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCodes, ()


def _facts_of(weight: torch.Tensor, recipe: Recipe) -> tuple[Any, ...] | None:
    """Everything that operands depend on; None where torch counts no writes."""
    if weight.is_inference():
        return None
    return (
        weight._version,
        _steps[0],
        weight.data_ptr(),
        weight.dtype,
        weight.shape,
        weight.stride(),
        weight.device,
        recipe,
    )


def flat_operands(operands: WeightOperands) -> tuple[torch.Tensor | None, ...]:
    """Four tensors that a function under autograd can take; the last two are None where both operands are one."""
    of_dgrad = (None, None) if operands.dgrad is operands.forward else flat(operands.dgrad)
    return (*flat(operands.forward), *of_dgrad)


def joined_operands(
    data: torch.Tensor, scale: torch.Tensor | None, dgrad_data: torch.Tensor | None, dgrad_scale: torch.Tensor | None
) -> WeightOperands:
    """The inverse of `flat_operands`."""
    forward = joined(data, scale)
    return WeightOperands(forward, forward if dgrad_data is None else joined(dgrad_data, dgrad_scale))


def flat(t: BlockScaledTensor | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scale) or (values, None): what autograd can save."""
    return (t.data, t.scale) if isinstance(t, BlockScaledTensor) else (t, None)


def joined(data: torch.Tensor, scale: torch.Tensor | None) -> BlockScaledTensor | torch.Tensor:
    """The inverse of `flat`."""
    return data if scale is None else quantized(data, scale)
