"""tcgen05: tensor memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .registry import instruction

if TYPE_CHECKING:
    from ..program import Emitter


@instruction("tcgen05")
def tcgen05(e: Emitter) -> None:
    e.unsupported()


def check_exit(cta: Any) -> None:
    """A CTA must have freed its tensor memory."""
