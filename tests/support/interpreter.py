"""Triton's interpreter with a NumPy that is newer than it: numbers of one element as bounds of a kernel's loops."""

from __future__ import annotations

from typing import Any


def accept_one_element() -> None:
    """Lets values of shape (1,), such as `tl.program_id`, be bounds of `range` in kernels interpreted from here on.

    The interpreter of Triton 3.6 converts the array as a whole, which NumPy 2.5 refuses; that of 3.7 drops the axis.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "accepts_one_element", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.accepts_one_element = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
