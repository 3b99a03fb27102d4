"""Between the warps' registers and the pure tensor-core units: operand gathering, and what a unit reads and writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from padless.emulator.state.warp import Cta, Warp
from padless.emulator.units import wgmma
from padless.emulator.units.mma_sync import mma

Array = np.ndarray[Any, Any]
WGMMA_TYPES = ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s32", "s8", "u8")
MMA_TYPES = ("f32", "f16", "bf16", "tf32", "e4m3", "e5m2", "s32", "s8", "u8")
ELEMENT_BITS = {"f32": 32, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


@dataclass(frozen=True)
class WgmmaShape:
    """The static part of a wgmma.mma_async instruction."""

    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    sign_a: int
    sign_b: int
    transpose_a: int
    transpose_b: int

    def legal(self) -> bool:
        return (
            self.n % 8 == 0
            and 8 <= self.n <= 256
            and self.a_type in ELEMENT_BITS
            and self.k == 256 // ELEMENT_BITS[self.a_type]
            and not (ELEMENT_BITS[self.a_type] == 8 and (self.transpose_a or self.transpose_b))
        )


@lru_cache(maxsize=4096)
def wgmma_unit(shape: WgmmaShape, a_descriptor: int | None, b_descriptor: int, accumulate: bool) -> Any:
    """The unit of one wgmma with its descriptors, from the cache: kernels use few of them."""
    return wgmma.Wgmma(
        shape.n, shape.d_type, shape.a_type, shape.b_type, a_descriptor, b_descriptor, accumulate, shape.sign_a < 0,
        shape.sign_b < 0, "mn" if shape.transpose_a else "k", "mn" if shape.transpose_b else "k",
    )  # fmt: skip


@lru_cache(maxsize=8192)
def wgmma_ranges(shape: WgmmaShape, a_descriptor: int | None, b_descriptor: int) -> tuple[tuple[int, int], ...]:
    unit = wgmma_unit(shape, a_descriptor, b_descriptor, True)
    return tuple(sorted({tuple(r) for ranges in unit.shared_ranges().values() for r in ranges}))


@lru_cache(maxsize=8192)
def cells_of_ranges(ranges: tuple[tuple[int, int], ...], shift: int) -> Any:
    """Shadow cells of byte ranges: a slice where they are contiguous, else an index array."""
    if len(ranges) == 1:
        return slice(ranges[0][0] >> shift, -(-ranges[0][1] >> shift))
    return np.concatenate([np.arange(a >> shift, -(-b >> shift)) for a, b in ranges])


def run_wgmma(cta: Cta, warps: list[Warp], unit: Any, a_slots: list[int], d_slots: list[int]) -> None:
    """Read the fragments of four warps, multiply, and write the accumulators back."""
    launch = cta.launch
    if launch.arithmetic == "none":  # for a clock, which needs no values
        return
    started = time.perf_counter()
    d = np.concatenate([np.stack([w.v[s] for s in d_slots], axis=1) for w in warps])
    a = np.concatenate([np.stack([w.v[s] for s in a_slots], axis=1) for w in warps]) if a_slots else None
    result = np.asarray(unit.execute(cta.shared.bytes, d.view(np.uint32), a, mode=launch.arithmetic))
    result = result.view(d.dtype)
    for i, w in enumerate(warps):
        part = result[32 * i : 32 * i + 32]
        for j, slot in enumerate(d_slots):
            w.v[slot][:] = part[:, j]
    launch.statistics.tensor_seconds += time.perf_counter() - started


def mma_sync(parts: list[list[Array]], k: int, kinds: list[str], mode: str, target: str) -> list[Array]:
    """One warp's m16n8kK; parts: the fragments of A, B and C as register rows of 32 lanes. Returns D's registers."""
    if mode == "none":  # for a clock, which needs no values
        return parts[2]
    a, b, c = (np.stack([x.view(np.uint32) for x in part], axis=1) for part in parts)
    result = np.asarray(mma(16, 8, k, kinds[0], kinds[1], kinds[2], a, b, c, mode=mode, target=target))
    result = result.view(np.uint32).reshape(32, -1)
    view = {"f32": np.float32, "s32": np.int32}.get(kinds[0], np.uint32)
    return [np.ascontiguousarray(result[:, i]).view(view) for i in range(result.shape[1])]
