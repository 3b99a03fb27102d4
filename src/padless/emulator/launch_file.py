"""Launch descriptions: JSON or TOML to the buffers and arguments of a launch."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from padless.emulator.errors import LaunchError
from padless.emulator.units import tensor_map as unit

SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
DATA_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
              "float64": 8, "bfloat16": 9}  # fmt: skip
LAUNCH_KEYS = {"ptx", "entry", "grid", "block", "cluster", "shared_bytes", "programmatic", "buffers", "args"}
_BUFFER_KEYS = {"dtype", "shape", "fill", "seed", "load", "save", "print"}


def read_description(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    try:
        found = tomllib.loads(raw.decode()) if path.suffix == ".toml" else json.loads(raw)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LaunchError(f"{path} is neither JSON nor TOML: {error}") from None
    if not isinstance(found, dict):
        raise LaunchError(f"{path} holds a {type(found).__name__}, a launch description is an object")
    return found


def part_of(description: dict[str, Any], name: str, kind: type) -> Any:
    """An entry of the description, empty if it is not there. LaunchError if it is of another kind."""
    found = description.get(name, kind())
    if not isinstance(found, kind):
        raise LaunchError(f"{name} is a {type(found).__name__}, it has to be a {kind.__name__}")
    return found


def check_keys(where: str, given: dict[str, Any], allowed: set[str]) -> None:
    """LaunchError for an entry that nothing reads, such as a misspelt one, in whose place a default would be taken."""
    if unknown := sorted(set(given) - allowed):
        raise LaunchError(f"{where} has {unknown}, allowed are {', '.join(sorted(allowed))}")


def buffer_bytes(name: str, spec: Any) -> int:
    """What a buffer will take; 0 for one that is loaded. LaunchError where it cannot be made."""
    if not isinstance(spec, dict):
        raise LaunchError(f"buffer {name}: needs dtype and shape, or load, and is a {type(spec).__name__}")
    check_keys(f"buffer {name}", spec, _BUFFER_KEYS)
    if "load" in spec:
        return 0
    dtype, shape = _layout(name, spec)
    return math.prod(shape) * dtype.itemsize


def _layout(name: str, spec: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape of a buffer that is made. LaunchError where they make no array of numbers."""
    try:
        dtype = np.dtype("uint16" if spec["dtype"] == "bfloat16" else spec["dtype"])
        shape = tuple(int(x) for x in spec["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"buffer {name}: needs dtype and shape, or load ({error})") from None
    if min(shape, default=1) < 1 or dtype.kind not in "fiub":
        raise LaunchError(f"buffer {name}: dtype {dtype} and shape {list(shape)} make no array of numbers")
    return dtype, shape


def make_buffer(name: str, spec: dict[str, Any], folder: Path) -> np.ndarray[Any, Any]:
    """A buffer: `load` an .npy file, or `dtype`, `shape` and `fill` ("random", "nan", a number; default zeros)."""
    if "load" in spec:
        try:
            return np.ascontiguousarray(np.load(folder / str(spec["load"])))
        except (OSError, ValueError, EOFError) as error:
            raise LaunchError(f"buffer {name}: cannot load {spec['load']}: {error}") from None
    if spec.get("dtype") == "bfloat16":  # numpy has none: the upper halves of float32
        return (make_buffer(name, spec | {"dtype": "float32"}, folder).view(np.uint32) >> 16).astype(np.uint16)
    dtype, shape = _layout(name, spec)
    fill = spec.get("fill", 0)
    if fill == "nan" and dtype.kind != "f":
        raise LaunchError(f"buffer {name}: fill 'nan' needs a floating-point dtype, got {dtype}")
    try:
        if fill == "random":
            rng = np.random.default_rng(spec.get("seed", 0))
            if dtype.kind == "f":
                return rng.standard_normal(shape).astype(dtype)
            info = np.iinfo(dtype)
            return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        if fill == "index":
            return np.arange(math.prod(shape)).astype(dtype).reshape(shape)
        return np.full(shape, np.nan if fill == "nan" else fill, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise LaunchError(f"buffer {name}: cannot fill {dtype} with {fill!r}: {error}") from None


def make_argument(argument: Any, addresses: dict[str, int], arrays: dict[str, Any]) -> Any:
    """The value of one kernel argument, for Emulator.launch."""
    try:
        return _argument(argument, addresses, arrays)
    except LaunchError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise LaunchError(f"argument {str(argument)[:200]}: {error}") from None


def _argument(argument: Any, addresses: dict[str, int], arrays: dict[str, Any]) -> Any:
    if isinstance(argument, bool | int | float):
        return argument
    if isinstance(argument, str):
        if argument not in addresses:
            raise LaunchError(f"argument {argument!r} names no buffer; there are {', '.join(addresses) or 'none'}")
        return addresses[argument]
    if isinstance(argument, dict) and len(argument) == 1:
        ((kind, value),) = argument.items()
        if kind == "hex":
            return bytes.fromhex(value)
        if kind == "tensor_map":
            return tensor_map(value, addresses, arrays)
        if kind in ("f32", "f64"):
            return np.dtype(f"float{kind[1:]}").type(value)
        if kind in ("s32", "u32", "s64", "u64"):
            return np.dtype(f"{'u' if kind[0] == 'u' else ''}int{kind[1:]}").type(value)
    allowed = "a number, a buffer name, or one of hex, tensor_map, f32, f64, s32, u32, s64, u64"
    raise LaunchError(f"argument {argument!r} is not {allowed}")


def tensor_map(spec: dict[str, Any], addresses: dict[str, int], arrays: dict[str, Any]) -> bytes:
    """A tiled tensor map: buffer, box, swizzle; dims and strides (bytes) follow from the buffer's shape by default."""
    try:
        name, box = spec["buffer"], tuple(spec["box"])
        array = arrays[name]
    except KeyError as error:
        raise LaunchError(f"tensor_map: missing or unknown {error}") from None
    kind = spec.get("dtype", str(array.dtype))
    if kind not in DATA_TYPES:
        raise LaunchError(f"tensor_map: dtype is {kind!r}, allowed are {', '.join(DATA_TYPES)}")
    dims = tuple(spec.get("dims", array.shape[::-1]))
    strides = tuple(spec.get("strides", array.strides[::-1][1:]))
    swizzle = spec.get("swizzle", "none")
    if swizzle not in SWIZZLES:
        raise LaunchError(f"tensor_map: swizzle is {swizzle!r}, allowed are {', '.join(SWIZZLES)}")
    return unit.encode_tiled(DATA_TYPES[kind], addresses[name], dims, strides, box, swizzle=SWIZZLES[swizzle])
