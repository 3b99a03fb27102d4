"""One place per PTX instruction. Each module registers emitters; an emitter turns one instruction into Python lines."""

from __future__ import annotations

from importlib import import_module

for _name in (
    "integer", "bits", "comparison", "floating", "floating_values", "conversion", "data", "warp_wide", "barriers",
    "mbarrier", "bulk", "warp_matrix", "matrix", "tcgen05", "tensormap", "launch_control", "async_store",
    "registers",
):  # fmt: skip
    import_module(f"{__name__}.{_name}")
