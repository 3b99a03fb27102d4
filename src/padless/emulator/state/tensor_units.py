"""Between the tcgen05 instructions and the pure units that know their layouts and arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from padless.emulator.units import tcgen05, tensor_memory

Array = np.ndarray[Any, Any]
SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")


def mma(
    kind: str, cta_group: int, idesc: int, d: int, a_descriptor: int | None, a_tmem: int | None, b_descriptor: int,
    enable_d: bool, sfa: int | None = None, sfb: int | None = None, *, block: str = "", scale_input: int = 0,
    disabled: tuple[int, ...] = (),
) -> Any:  # fmt: skip
    size = {"": 32 if sfa is not None else 0, "block16": 16, "scale_vec::4X": 16}.get(block, 32)
    return tcgen05.Mma(
        kind=kind, cta_group=cta_group, idesc=idesc, d=d, a_descriptor=a_descriptor, a_tmem=a_tmem,
        b_descriptor=b_descriptor, enable_d=enable_d, sfa=sfa, sfb=sfb, block=size,
        disable_lanes=disabled if any(disabled) else (), scale_d=scale_input,
    )  # fmt: skip


def copy(shape: str, multicast: str, descriptor: int, address: int, source: str) -> Any:
    return tensor_memory.Copy(shape, multicast, descriptor, address, source)


def run_mma(unit: Any, shared: list[Array], tensor: list[Array], mode: str) -> Any:
    return unit.execute(shared, tensor, mode)


def problems(unit: Any) -> list[str]:
    return list(unit.problems())


def flat(ranges: Any) -> list[tuple[int, ...]]:
    """Ranges or rectangles, whether given as a list or by operand name."""
    if isinstance(ranges, dict):
        return [tuple(r) for part in ranges.values() for r in part]
    return [tuple(r) for r in ranges]


def shared_ranges(unit: Any) -> list[tuple[int, ...]]:
    return flat(unit.shared_ranges())


def tmem_reads(unit: Any) -> list[Any]:
    return flat(unit.tmem_reads()) if hasattr(unit, "tmem_reads") else []


def tmem_writes(unit: Any) -> list[Any]:
    return flat(unit.tmem_writes())


@lru_cache(maxsize=256)
def register_map(shape: str, repeat: int, address: int, quarter: int, split: int, packed: bool) -> tuple[Array, Array]:
    """(lanes, columns), each (32, words), of the tensor-memory words that a warp's registers stand for. A packed access
    has two words a register, side by side."""
    lanes, columns = tensor_memory.register_map(shape, repeat, address, quarter, split)
    if packed:
        base = address & 0x1FF
        first = base + 2 * (columns - base)
        columns = np.stack([first, first + 1], axis=2).reshape(32, -1)
        lanes = np.repeat(lanes, 2, axis=1)
    return np.asarray(lanes), np.asarray(columns)
