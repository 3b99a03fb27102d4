"""Calls of the layer's operators by name, with few looks at the arguments: eager ones go to the function itself."""

from __future__ import annotations

from typing import Any

import torch

from padless.moe import ops

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_traced(t: torch.Tensor) -> bool:
    """Whether a call with t, and with other tensors made as t was, is being compiled, or is one of fake tensors."""
    return torch.compiler.is_compiling() or type(t) not in _PLAIN


def call(name: str, first: torch.Tensor, *others: Any) -> Any:
    """The operator padless::name, or its function directly where nothing is being traced."""
    if is_traced(first):
        return getattr(torch.ops.padless, name)(first, *others)
    return ops._FUNCTIONS[name](first, *others)
