"""Address windows and register storage: the numbers that every other module agrees on."""

from __future__ import annotations

from typing import Any

import numpy as np

SHARED_WINDOW = 1 << 60  # generic address of shared::cluster address 0
LOCAL_WINDOW = 1 << 61
PARAM_WINDOW = 1 << 62
WINDOW_OF = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}
OFFSET_MASK = (1 << 24) - 1  # of a shared::cluster address; the bits above are the CTA's rank

# Register class by width -> numpy type of its storage.
STORAGE: dict[str, Any] = {"p": np.bool_, "b": np.uint8, "h": np.uint16, "w": np.uint32, "d": np.uint64}
CLASS_OF_SIZE = {0: "p", 1: "b", 2: "h", 4: "w", 8: "d", 16: "d"}
VIEWS: dict[str, Any] = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16,
    "u32": np.uint32, "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
VIEW_SIZE = {name: (0 if name == "pred" else np.dtype(t).itemsize) for name, t in VIEWS.items()}
