"""Table of what leaves, and the warning of it: a name, an argument or a value that still does what it did.

One table for all of them, which docs/stability.md shows. Whatever takes the old way calls `warn_of` with its key.
"""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple


class Leaving(NamedTuple):
    """The new way to write it, and the version of padless that no longer takes the old one."""

    new: str
    version: str


LEAVING: dict[str, Leaving] = {
    "padless.Bf16GemmConfig": Leaving("padless.Sm90Bf16Config", "0.2"),
    "padless.GemmConfig": Leaving("padless.Sm90Fp8Config", "0.2"),
    "padless.Mxfp8GemmConfig": Leaving("padless.Sm100DenseConfig", "0.2"),
    **{
        f'Epilogue(activation="swiglu_{order}")': Leaving(f'Epilogue(activation="swiglu", gate_up="{order}")', "0.2")
        for order in ("interleaved", "concatenated", "alternating")
    },
}
# Modules whose lines are not the user's: a name is asked for by the import system, dataclasses.replace calls a class.
_BETWEEN = ("padless", "dataclasses", "importlib")


def warn_of(old: str) -> None:
    """A DeprecationWarning that names the user's line. old: a key of LEAVING."""
    frame = sys._getframe(1)
    # By module: the code of a dataclass' __init__ has no file.
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    new, version = LEAVING[old]
    warnings.warn_explicit(
        f"{old} leaves in padless {version}; write {new}",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        str(frame.f_globals.get("__name__")),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
