"""One place per PTX instruction. Each module registers emitters; an emitter turns one instruction into Python lines."""

from __future__ import annotations

from importlib import import_module

from padless.emulator.prepare.registry import EMITTERS, HELPERS, SPECIAL_REGISTERS, TYPES

__all__ = ["EMITTERS", "HELPERS", "SPECIAL_REGISTERS", "TYPES"]

for _name in (
    "integer", "bits", "comparison", "floating", "floating_values", "conversion", "data", "warp_wide", "barriers",
    "synchronisation", "bulk", "matrix", "tcgen05", "tensormap", "launch_control", "async_store",
    "registers",
):  # fmt: skip
    import_module(f"{__name__}.{_name}")
