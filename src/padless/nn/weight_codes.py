"""Quantized copies of a weight: made by every forward pass, for it and its backward pass, or kept where asked for.

Whether a weight is what it was cannot be known in general: collectives, DLPack, NumPy, ``.data``, other processes and
``torch.func.functional_call`` change it without a trace. So nothing outlives a step unless the layer's owner set
``keep_codes`` and thereby promised to say what torch does not count.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from padless.arguments import check_tensor_type, check_type
from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledTensor
from padless.nn.calls import is_traced
from padless.nn.quantizers import mx_weight, nvfp4_weight, quantized, weight_and_transpose
from padless.nn.recipe import Format, Recipe, as_recipe, format_name, is_block_scaled
from padless.quantization.quantize import quantize
from padless.runtime.devices import is_capturing
from padless.runtime.streams import Kept

PARTS = 3  # of an operand: codes, scales, NVFP4's global scale
# A number that every step of an optimizer changes, never to one that was there before, whichever thread steps.
_steps = [0]
_next_step = count(1)


def _count_step(*arguments: Any) -> None:
    _steps[0] = next(_next_step)


register_optimizer_step_post_hook(_count_step)


class WeightOperands(NamedTuple):
    """Operands of the two products that read a weight (G, N, K).

    forward: FP8_BLOCK, MXFP8 or NVFP4 (G, N, K), or the weight in bfloat16. dgrad: FP8_BLOCK, MXFP8 or NVFP4 (G, K, N),
        or a bfloat16 weight (G, N, K), the forward product's where the formats are equal. Where one is plain it is in a
        type that products are computed in.
    """

    forward: BlockScaledTensor | torch.Tensor
    dgrad: BlockScaledTensor | torch.Tensor


def has_backward(*arguments: object) -> bool:
    """Whether autograd follows a call of these tensors; what is no tensor is refused later."""
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in arguments)


def check_operands(name: str, operands: object, recipe: Recipe, backward: bool) -> None:
    """Raises ValueError for operands of another recipe, and for those of no backward pass where one will follow."""
    check_type(name, operands, WeightOperands)
    if not isinstance(operands, WeightOperands):
        return
    for part, product, format in (
        ("forward", operands.forward, recipe.forward),
        ("dgrad", operands.dgrad, recipe.dgrad),
    ):
        if part == "dgrad" and not backward:
            continue
        found: Format = product.format if isinstance(product, BlockScaledTensor) else torch.bfloat16
        if found != format:
            raise ValueError(
                f"{name}.{part} is {format_name(found)} and the recipe's {format_name(format)}; make operands by "
                "weight_operands with this recipe"
            )
    if backward and is_block_scaled(recipe.dgrad) and operands.dgrad is operands.forward:
        raise ValueError(
            f"{name} was made with backward=False, and a backward pass will follow; make it with backward=True, or call "
            "under torch.no_grad()"
        )


def weight_operands(
    weight: torch.Tensor, recipe: Recipe | str, *, backward: bool = True, input_major: bool = False
) -> WeightOperands:
    """Operands of a weight (G, N, K) for a recipe, made now. Their values are not followed by autograd.

    backward: whether a backward pass will follow; without one no dgrad operand is made, and forward stands for both.
    input_major: the weight is (G, K, N). The operands are those of its transpose, of which no copy is made for
        FP8_BLOCK and plain ones.
    """
    check_tensor_type("weight", weight)
    recipe = as_recipe(recipe)
    given, weight = weight.detach(), weight.detach().mT if input_major else weight.detach()
    made: dict[Format, tuple[BlockScaledTensor | torch.Tensor, ...]] = {}
    for format in {recipe.forward, recipe.dgrad if backward else recipe.forward}:
        if format == FP8_BLOCK:
            if backward:
                both = weight_and_transpose(given)
                made[format] = both[::-1] if input_major else both
            else:
                made[format] = (quantize(weight, FP8_BLOCK, kind="weight"),)
        elif format == MXFP8:
            made[format] = (mx_weight(weight), mx_weight(weight.mT)) if backward else (mx_weight(weight),)
        elif format == NVFP4:
            made[format] = nvfp4_weight(weight, backward)
        else:
            made[format] = (weight if weight.dtype == torch.float64 else weight.to(torch.bfloat16),) * 2
    forward = made[recipe.forward][0]
    return WeightOperands(forward, made[recipe.dgrad][1] if backward else forward)


class _Made(NamedTuple):
    """Operands, and what they were made of: one object, so that other threads find all of it or nothing.

    parameter: not held weakly, since torch swaps no tensor that has weak references.
    """

    parameter: torch.nn.Parameter
    facts: tuple[Any, ...] | None
    operands: WeightOperands
    kept: Kept


class WeightCodes:
    """The operands of one weight of a layer with ``keep_codes``, until something that torch counts changes the weight.

    What is looked at: which parameter it is, its version, address, type and shape; steps of any torch.optim.Optimizer,
    since some write where no version counts (``.data``, and FSDP2, which gathers new values into the same parameter);
    and `forget`, which a layer calls where a parameter is replaced.

    A copy, also of the module that holds it, starts without any. pinned: operands that are the weight's while they are
    here, whatever it is. forgotten: how often operands were left.

    Threads may call at the same time, on different streams.
    """

    def __init__(self) -> None:
        self.pinned: WeightOperands | None = None
        self.forgotten = 0
        self._made: _Made | None = None

    def of(self, parameter: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> WeightOperands:
        """Operands of a weight: those of the last call where nothing that is looked at changed.

        parameter: the layer's attribute; weight: this rank's part of it, or the same tensor. While torch.compile traces,
        and while a CUDA graph is captured, operands are made every time: the graph is to quantize when it runs. So they
        are of a tensor that is no parameter, such as a parametrized weight: every call has another one.
        """
        if not isinstance(parameter, torch.nn.Parameter) or is_traced(weight) or is_capturing(weight.device):
            return weight_operands(weight, recipe)
        facts = facts_of(weight, recipe)
        made = self._made
        if made is None or facts is None or made.parameter is not parameter or facts != made.facts:
            made = self._made = None  # its memory is free for the new one
            with torch.inference_mode(False):  # what is made in inference mode cannot be saved for a backward pass
                operands = weight_operands(weight, recipe)
            made = self._made = _Made(parameter, facts, operands, Kept(flat_operands(operands)))
        made.kept.read()
        return made.operands

    def forget(self) -> None:
        """Leaves the operands that were made: the next call makes new ones."""
        self._made = None
        self.forgotten += 1

    def __deepcopy__(self, memo: Any) -> WeightCodes:
        return WeightCodes()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCodes, ()


def writes_of(weight: torch.Tensor) -> tuple[int, int] | None:
    """Writes to a weight, and the number of the last step of an optimizer; None where torch counts no writes."""
    return None if weight.is_inference() else (weight._version, _steps[0])


def facts_of(weight: torch.Tensor, recipe: Recipe) -> tuple[Any, ...] | None:
    """Everything that operands depend on; None where torch counts no writes."""
    written = writes_of(weight)
    if written is None:
        return None
    return (*written, weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), weight.device, recipe)


def flat_operands(operands: WeightOperands) -> tuple[torch.Tensor | None, ...]:
    """2 * PARTS tensors that a function under autograd can take; the second half is None where both operands are one."""
    of_dgrad = (None,) * PARTS if operands.dgrad is operands.forward else flat(operands.dgrad)
    return (*flat(operands.forward), *of_dgrad)


def joined_operands(recipe: Recipe, *parts: torch.Tensor | None) -> WeightOperands:
    """The inverse of `flat_operands`."""
    forward = joined(*parts[:PARTS], format=recipe.forward)
    return WeightOperands(forward, forward if parts[PARTS] is None else joined(*parts[PARTS:], format=recipe.dgrad))


def flat(t: BlockScaledTensor | torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """(codes, scale, NVFP4's global scale or None) or (values, None, None): what autograd can save."""
    return (t.data, t.scale, t.global_scale) if isinstance(t, BlockScaledTensor) else (t, None, None)


def joined(*parts: torch.Tensor | None, format: Format) -> BlockScaledTensor | torch.Tensor:
    """The inverse of `flat` for an operand of this format."""
    data, scale, global_scale = parts
    assert data is not None
    if scale is None:
        return data
    assert is_block_scaled(format)
    return quantized(data, scale, global_scale, format=format)
