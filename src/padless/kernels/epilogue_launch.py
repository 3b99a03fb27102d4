"""Host side common to quantizing kernels: what they compile, check and pass to the kernel.

The kernels' side is kernels/device/quant_outputs.cuh.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from padless.epilogue import SCALED_MAX, Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK
from padless.kernels import maps
from padless.kernels.config import MANY_GROUPS, Requirement
from padless.kernels.epilogue_gate import MULTIPLES_OF_N, activation_constants, check_gate_up
from padless.kernels.launch import KernelConfig
from padless.runtime import tensor_map
from padless.runtime.driver import Driver
from padless.runtime.tensor_map import TensorMapSpec

TILE_COLUMNS = 128  # of a tile that is stored by copies of codes
NO_MAPS = bytes(3 * 128)  # where no store is TMA's
_SWIZZLES = {128: tensor_map.SWIZZLE_128B, 64: tensor_map.SWIZZLE_64B, 32: tensor_map.SWIZZLE_32B}


@dataclass(frozen=True)
class QuantConfig:
    """One compiled kernel: a tile and what is done with it."""

    tile: KernelConfig
    epilogue: Epilogue

    def prelude(self) -> str:
        """The constants that the kernel source is compiled behind."""
        return self.tile.prelude() + prelude_of(self.epilogue)


# --- names on the device side ---------------------------------------------------------------------------------

_MX_RULES = {"floor": "FLOOR", "cudnn": "NORM_CONST", "cudnn_documented": "NORM_CONST_FIRST"}  # others: RCEIL
_LAYOUTS = {"plain": "STRIDED", "plain_mn": "STRIDED", "blocked": "BLOCKED", "blocked_groups": "BLOCKED_GROUPS"}


def prelude_of(epilogue: Epilogue) -> str:
    """The C++ constants of kernels/device/quant_outputs.cuh, to compile a kernel behind."""
    constants = {
        "HAS_PLAIN": epilogue.d_dtype is not None,
        "HAS_ALPHA": epilogue.alpha,
        "HAS_BIAS": epilogue.bias,
        "HAS_PROB": epilogue.prob,
        "HAS_AMAX": epilogue.amax,
        "BIAS_IS_GATED": epilogue.bias_rule == "gated_bias",
    }
    lines = ["#define EPILOGUE_IS_QUANT 1"]
    lines += [f"#define {name} {int(value)}" for name, value in constants.items()]
    lines += [
        f"#define GLU GLU_{epilogue.order.upper()}",
        f"#define ROW_QUANT QUANT_{getattr(epilogue.row_format, 'name', 'NONE')}",
        f"#define COLUMN_QUANT QUANT_{getattr(epilogue.column_format, 'name', 'NONE')}",
        f"#define MX_RULE MX_{_MX_RULES.get(epilogue.scale_rule, 'RCEIL')}",
        f"#define ROW_SCALES SCALES_{_LAYOUTS[epilogue.row_layout if epilogue.row_format else 'plain']}",
        f"#define COLUMN_SCALES SCALES_{_LAYOUTS[epilogue.column_layout if epilogue.column_format else 'plain']}",
    ]
    lines += activation_constants(epilogue)
    if epilogue.norm_const and epilogue.format is not None:
        lines.append(f"#define SCALED_MAX {SCALED_MAX[epilogue.scale_rule, epilogue.format]}f")
    return "\n".join(lines) + "\n"


# --- checks ---------------------------------------------------------------------------------------------------


def requirement_of(tile: KernelConfig) -> Requirement:
    """require(ok, field, needed): a ValueError that names the field of ``tile`` and what it was, unless ok."""

    def require(ok: bool, field: str, needed: str) -> None:
        if not ok:
            raise ValueError(f"config.{field} is {getattr(tile, field)!r}; a quantising epilogue needs {needed}")

    return require


def check_outputs(
    n: int,
    tensors: EpilogueTensors,
    epilogue: Epilogue,
    multiples: Mapping[str, int] = MULTIPLES_OF_N,
    alignments: Mapping[str, int] = MappingProxyType({"bias": 8}),
) -> None:
    """Raises ValueError for sizes and addresses that the kernels' stores cannot have; alignments: bytes, of others."""
    multiple = check_gate_up(epilogue, multiples)
    if n % multiple != 0:
        order = f"gate_up {epilogue.gate_up!r}" if epilogue.is_glu else f"activation {epilogue.activation!r}"
        raise ValueError(f"N is {n}; it must be a multiple of {multiple} for {order}")
    for name in ("d", "row_codes", "column_codes"):
        t = getattr(tensors, name)
        if t is None or t.numel() == 0:
            continue
        row_bytes = t.stride(0) * t.element_size()
        in_pieces = t.shape[1] * t.element_size() % 16 == 0 and (t.shape[0] == 1 or row_bytes % 16 == 0)
        if t.stride(1) != 1 or not in_pieces or t.data_ptr() % 16 != 0:
            raise ValueError(
                f"{name} has strides {t.stride()} and shape {tuple(t.shape)} of {t.element_size()} bytes at address "
                f"{t.data_ptr():#x}; rows must be contiguous, start on multiples of 16 bytes and be as long: N_out a "
                "multiple of 16, of 32 for FP4"
            )
    for name, alignment in alignments.items():
        t = getattr(tensors, name)
        if t is not None and t.data_ptr() % alignment != 0:
            raise ValueError(f"{name} is at address {t.data_ptr():#x}; it must be {alignment}-byte aligned; clone() it")


def check_groups(num_groups: int, epilogue: Epilogue) -> None:
    """Raises ValueError for more groups than Hopper's stores of whole tiles leave shared memory for."""
    is_large = epilogue.d_dtype == torch.float32 and not epilogue.is_glu
    if num_groups > MANY_GROUPS and is_large and None not in (epilogue.row_format, epilogue.column_format):
        raise ValueError(
            f"b has {num_groups} groups, whose table leaves no shared memory for float32 d next to codes along rows and "
            f"columns; allowed: at most {MANY_GROUPS} groups, d of 16 bits, or codes along one of the two"
        )


def staged_columns(epilogue: Epilogue) -> int:
    """Weight rows whose sums are staged together: those of a row's block of scales, 64 at least."""
    return 64 if epilogue.row_format != FP8_BLOCK else 256 if epilogue.is_glu else 128


# --- arguments ------------------------------------------------------------------------------------------------


def interleaved_rows(epilogue: Epilogue) -> int:
    """Weight rows that come together: a tile's, or with gate and up apart half of them from either (``maps``)."""
    return TILE_COLUMNS // (2 if epilogue.gate_and_up_apart else 1)


def output_address(tensors: EpilogueTensors) -> int:
    """The address that tells concurrent launches apart (see ``launch.tile_counter``)."""
    written = (tensors.row_codes, tensors.column_codes, tensors.d, tensors.amax)
    return next(t.data_ptr() for t in written if t is not None)


def present(tensors: EpilogueTensors) -> list[torch.Tensor]:
    """The tensors that there are."""
    return [t for t in vars(tensors).values() if isinstance(t, torch.Tensor)]


def outputs_argument(
    driver: Driver, tensors: EpilogueTensors, epilogue: Epilogue, n: int, *, by_copies: bool = True
) -> bytes:
    """struct QuantOutputs as an argument of its own; by_copies: with the maps of TMA's stores."""
    t = tensors
    specs: list[TensorMapSpec | None] = [None, None, None]
    if by_copies:
        if t.d is not None:
            specs[0] = maps.output_ragged(t.d, 64)
        if epilogue.row_format is not None and t.row_codes is not None:
            specs[1] = _codes_map(t.row_codes, epilogue, epilogue.row_format.codes_per_byte)
        if t.column_codes is not None:
            specs[2] = _codes_map(t.column_codes, epilogue, 1)
    encoded = b"".join(bytes(128) if spec is None else driver.encode(spec) for spec in specs)
    packed = outputs_bytes(tensors, epilogue, n, encoded)
    return packed + bytes(-len(packed) % 128)


def direct_outputs(driver: Driver, tensors: EpilogueTensors, epilogue: Epilogue, n: int) -> bytes:
    """struct DirectOutputs of kernels/device/sm90/transposed_quant.cuh."""
    targets = (tensors.d, tensors.row_codes, tensors.column_codes)
    addresses = [0 if t is None else t.data_ptr() for t in targets]
    pitches = [0 if t is None else t.stride(0) * t.element_size() for t in targets]
    packed = outputs_argument(driver, tensors, epilogue, n, by_copies=False)
    packed += struct.pack("<3Q3q", *addresses, *pitches)
    return packed + bytes(-len(packed) % 64)


def outputs_bytes(tensors: EpilogueTensors, epilogue: Epilogue, n: int, maps: bytes = NO_MAPS) -> bytes:
    """struct QuantOutputs of kernels/device/quant_outputs.cuh, unpadded; ``maps``: of plain output and codes."""
    t = tensors
    constant = t.norm_const if epilogue.norm_const else t.global_scale
    pointers = (t.alpha, t.bias, t.prob, t.amax, constant, t.row_scale, t.column_scale)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
    strides = t.row_scale.stride() if t.row_scale is not None and t.row_scale.dim() == 2 else (0, 0)
    constant_stride = 0 if constant is None or constant.numel() == 1 else 1
    numbers = (epilogue.out_columns(n), t.column_tiles, constant_stride)
    return maps + struct.pack("<7Q2q3i", *addresses, *strides, *numbers)


def _codes_map(codes: torch.Tensor, epilogue: Epilogue, codes_per_byte: int) -> TensorMapSpec:
    """The ragged descriptor of a quantised output: a tile's columns wide, 64 rows."""
    width = TILE_COLUMNS // (2 if epilogue.is_glu else 1) // codes_per_byte
    spec = maps.output_ragged(codes.view(torch.uint8), 64)
    return replace(spec, box=(width, *spec.box[1:]), swizzle=_SWIZZLES[width])
