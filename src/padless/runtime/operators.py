"""Registers functions as operators of torch, so that a compiled graph passes over them unbroken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.gradients import once_differentiable

NAMESPACE = "padless"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator ``padless::<schema>``: ``run`` computes on any device, ``fake`` makes empty outputs of its shapes.

    Codes are bytes (uint8) in schemas: torch's checks of operators cannot compare float8.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Gives ``padless::name`` a derivative, as torch.library.register_autograd does, which has none itself."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", once_differentiable(backward), setup_context=setup_context, lib=_LIBRARY
    )
