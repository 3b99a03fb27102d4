"""Destinations of weight gradients: into ``weight.main_grad``, into a queue, or back to autograd."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from padless.arguments import check_type
from padless.nn.products import Columns, wgrad, wgrad_into
from padless.row_groups import version_of

_OUT_DTYPES = (torch.bfloat16, torch.float32)


class _Pending(NamedTuple):
    weight: torch.Tensor
    dy: Columns
    x: Columns
    offs: torch.Tensor
    versions: list[int | None]


class DelayedWgrad:
    """Weight gradients to be computed later, in the order of the backward passes: for zero-bubble pipelines.

    Give it to layers as ``delayed_wgrad``: their backward passes then leave the weight gradients here, with the
    operands that they need, and return none. `flush` computes them: into ``weight.main_grad`` where that attribute
    exists, else into ``weight.grad``, added to what is there. Hooks that wait for a weight's gradient, such as FSDP2's,
    are not called. Copies of a layer have the same queue; a pickled one is empty.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def __len__(self) -> int:
        """Weight gradients not computed yet."""
        return len(self._pending)

    def put(self, weight: torch.Tensor, dy: Columns, x: Columns, offs: torch.Tensor) -> None:
        """Keeps dy.T @ x of each group, the gradient of ``weight``, for later."""
        self._pending.append(_Pending(weight, dy, x, offs, _versions(dy, x, offs)))

    def flush(self, count: int | None = None) -> None:
        """Computes the oldest ``count`` weight gradients; None, all of them. One that raises an error stays."""
        for _ in range(len(self._pending) if count is None else min(count, len(self._pending))):
            oldest = self._pending.popleft()
            try:
                _compute(oldest)
            except BaseException:
                self._pending.appendleft(oldest)
                raise

    def __copy__(self) -> DelayedWgrad:
        return self

    def __deepcopy__(self, memo: Any) -> DelayedWgrad:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return DelayedWgrad, ()


@torch.no_grad()
def _compute(pending: _Pending) -> None:
    weight, dy, x, offs, versions = pending
    if _versions(dy, x, offs) != versions:
        raise RuntimeError(
            "offs, the input or the output's gradient of a layer was written to between its backward pass and flush(), "
            "which reads it; write to another tensor, or flush first"
        )
    found = computed(weight, dy, x, offs)
    if found is not None and getattr(weight, "main_grad", None) is None:
        if weight.grad is None:
            weight.grad = found
        else:
            weight.grad += found  # where it lies, as autograd does: it may be a part of a buffer of gradients


def _versions(*operands: Columns) -> list[int | None]:
    """The number of writes by torch to each that is a tensor; quantized copies are the layer's."""
    return [version_of(t) for t in operands if isinstance(t, torch.Tensor)]


def check_delayed(queue: object, **weights: torch.Tensor) -> None:
    """Raises ValueError for what is no queue, and for weights whose gradients one would lose.

    `DelayedWgrad.flush` writes to a weight; autograd does not take a gradient from there to what the weight was made of.
    """
    check_type("delayed_wgrad", queue, DelayedWgrad)
    if queue is None or not torch.is_grad_enabled():
        return
    for name, weight in weights.items():
        if weight.requires_grad and not weight.is_leaf and getattr(weight, "main_grad", None) is None:
            raise ValueError(
                f"delayed_wgrad is given and {name} is computed from other tensors, which its gradient would not reach; "
                f"give None, or a {name} that is a parameter itself"
            )


def deliver(
    weight: torch.Tensor, queue: DelayedWgrad | None, dy: Columns, x: Columns, offs: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of ``weight`` for autograd: None where it went into ``weight.main_grad`` or into the queue."""
    if queue is None:
        return computed(weight, dy, x, offs)
    queue.put(weight, dy, x, offs)
    return None


def computed(weight: torch.Tensor, dy: Columns, x: Columns, offs: torch.Tensor) -> torch.Tensor | None:
    """The gradient of ``weight`` in its dtype; or, where it has a ``main_grad``, that after adding to it.

    The protocol is Megatron-LM's and TransformerEngine's: ``main_grad`` (G, N, K), float32 or bfloat16, is added to,
    and overwritten where ``weight.overwrite_main_grad`` is true (the first microbatch, which then needs no zeros).
    Where ``weight`` has the attribute ``grad_added_to_main_grad`` it is set to True and a tensor of the weight's shape
    is returned that nobody is to read, since hooks of data parallelism wait for one: uninitialized, or zeros where
    ``weight.zero_out_wgrad`` is true. Raises ValueError for a ``main_grad`` of another shape.
    """
    main = getattr(weight, "main_grad", None)
    if main is None:
        exact = weight.dtype in _OUT_DTYPES or weight.dtype == torch.float64
        found = wgrad(dy, x, offs, weight.dtype if exact else torch.float32)
        return found if exact else found.to(weight.dtype)
    if main.shape != weight.shape:
        raise ValueError(f"main_grad is {tuple(main.shape)} and its weight {tuple(weight.shape)}; give one like it")
    accumulate = not getattr(weight, "overwrite_main_grad", False)
    if accumulate and main.dtype != torch.float32:
        main += wgrad(dy, x, offs, torch.float32).to(main.dtype)
    else:
        wgrad_into(main, dy, x, offs, accumulate=accumulate)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight, requires_grad=False)
    return torch.empty_like(weight, requires_grad=False)
