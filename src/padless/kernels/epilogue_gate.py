"""SwiGLUs of an epilogue that are not plain: constants for the kernels, and the orders of gate and up that one takes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from padless.epilogue import GateRule


def gate_constants(rule: GateRule | None) -> list[str]:
    """Lines of C++ behind which kernels/device/quant_rules.cuh compiles the rule; none for the plain SwiGLU."""
    if rule is None:
        return []
    limit = float("inf") if rule.limit is None else rule.limit
    named = {"GATE_ALPHA": rule.alpha, "GATE_LIMIT": limit, "UP_OFFSET": rule.up_offset}
    bits = {name: struct.unpack("<I", struct.pack("<f", value))[0] for name, value in named.items()}
    return [f"#define {name} __uint_as_float({value:#010x}u)" for name, value in bits.items()]


def check_gate_up(activation: str, multiples: Mapping[str, int]) -> int:
    """What N has to be a multiple of, out of a kernel's. Raises ValueError for an activation that it does not have."""
    if activation not in multiples:
        allowed = ", ".join(map(repr, multiples))
        raise ValueError(f"activation is {activation!r}; this kernel's epilogue allows {allowed}")
    return multiples[activation]
