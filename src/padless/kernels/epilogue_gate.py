"""SwiGLUs of an epilogue that are not plain: constants for the kernels, and the orders of gate and up that one takes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from padless.epilogue import GateRule

# What N has to be a multiple of: 16 bytes of D; gate and up in runs of 32 columns, or in halves of 16 bytes. In the FP8
# kernel each half has whole blocks of scales. Hopper's kernel of FP4 weights takes gate and up that alternate.
MULTIPLES_OF_N = {"none": 8, "swiglu_interleaved": 64, "swiglu_concatenated": 16}
FP8_BLOCK_MULTIPLES_OF_N = MULTIPLES_OF_N | {"swiglu_concatenated": 128}
SM90_BF16_MULTIPLES_OF_N = MULTIPLES_OF_N | {"swiglu_alternating": 16}


def gate_constants(rule: GateRule | None) -> list[str]:
    """Lines of C++ behind which kernels/device/quant_rules.cuh compiles the rule; none for the plain SwiGLU."""
    if rule is None:
        return []
    limit = float("inf") if rule.limit is None else rule.limit
    named = {"GATE_ALPHA": rule.alpha, "GATE_LIMIT": limit, "UP_OFFSET": rule.up_offset}
    bits = {name: struct.unpack("<I", struct.pack("<f", value))[0] for name, value in named.items()}
    return [f"#define {name} __uint_as_float({value:#010x}u)" for name, value in bits.items()]


def check_gate_up(activation: str, multiples: Mapping[str, int]) -> int:
    """The number that N has to be a multiple of. Raises ValueError for an activation that the kernel does not have."""
    if activation not in multiples:
        allowed = ", ".join(map(repr, multiples))
        raise ValueError(f"activation is {activation!r}; this kernel's epilogue allows {allowed}")
    return multiples[activation]
