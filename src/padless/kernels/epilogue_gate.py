"""Activations of an epilogue: constants for the kernels, and the orders of gate and up that one takes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from padless.epilogue import Epilogue, GateRule

# What N has to be a multiple of, by `Epilogue.order`: 16 bytes of D; gate and up in runs of 32 columns, or in halves of
# 16 bytes. In the FP8 kernel each half has whole blocks of scales. Hopper's kernel of FP4 weights takes gate and up that
# alternate.
MULTIPLES_OF_N = {"none": 8, "interleaved": 64, "concatenated": 16}
FP8_BLOCK_MULTIPLES_OF_N = MULTIPLES_OF_N | {"concatenated": 128}
SM90_BF16_MULTIPLES_OF_N = MULTIPLES_OF_N | {"alternating": 16}


def activation_constants(epilogue: Epilogue) -> list[str]:
    """Lines of C++ behind which kernels/device/activation.cuh compiles the activation; none for the plain SwiGLU."""
    lines = []
    if epilogue.activation not in ("none", "swiglu"):
        lines.append(f"#define ACTIVATION {epilogue.activation}")
        lines += [] if epilogue.is_glu else ["#define ACTIVATES_SUMS 1"]
    lines += gate_constants(epilogue.gate_rule)
    return [*lines, "#define GATE_IN_BF16 1"] if epilogue.gate_in_bf16 else lines


def gate_constants(rule: GateRule | None) -> list[str]:
    """Those of them that a rule makes; none for the plain SwiGLU."""
    if rule is None:
        return []
    limit = float("inf") if rule.limit is None else rule.limit
    named = {"GATE_ALPHA": rule.alpha, "GATE_LIMIT": limit, "UP_OFFSET": rule.up_offset}
    bits = {name: struct.unpack("<I", struct.pack("<f", value))[0] for name, value in named.items()}
    return [f"#define {name} __uint_as_float({value:#010x}u)" for name, value in bits.items()]


def check_gate_up(epilogue: Epilogue, multiples: Mapping[str, int]) -> int:
    """The number that N has to be a multiple of. Raises ValueError for an order that the kernel does not have."""
    if epilogue.order not in multiples:
        allowed = ", ".join(repr(order) for order in multiples if order != "none")
        raise ValueError(f"gate_up is {epilogue.gate_up!r}; this kernel's epilogue allows {allowed}")
    return multiples[epilogue.order]
