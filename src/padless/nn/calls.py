"""Calls of the layer's operators by name, with few looks at the arguments: eager ones go to the function itself."""

from __future__ import annotations

from typing import Any

import torch

from padless.moe import ops
from padless.row_groups import is_traced as is_traced


def call(name: str, first: torch.Tensor, *others: Any) -> Any:
    """The operator padless::name, or its function directly where nothing is being traced."""
    if is_traced(first):
        return getattr(torch.ops.padless, name)(first, *others)
    return ops._FUNCTIONS[name](first, *others)
