"""Float32 arithmetic that gives the same bits in torch, on a GPU and in Triton's interpreter.

Every operation is rounded once. Kernels that use these functions are launched with enable_fp_fusion=False, so that a
product and a sum stay two operations. The torch twins are in `padless.moe.activation`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.moe.activation import GELU_CUBIC, GELU_SLOPE
from padless.quantization.triton import casts, swiglu_arithmetic

_GELU_CUBIC = tl.constexpr(GELU_CUBIC)
_GELU_SLOPE = tl.constexpr(GELU_SLOPE)
_F16_PER_E4M3 = tl.constexpr(256.0)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x as DTYPE, to nearest even. bf16 is made in integers: the interpreter's conversion truncates."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300 (which of them is a constant, ruff takes from the case of its letters)
        bits = x.to(tl.int32, bitcast=True)
        half = ((bits >> 16) & 1) + 0x7FFF
        top = ((bits + half) >> 16) & 0xFFFF
        top = tl.where((bits & 0x7FFFFFFF) > casts.INF_BITS, 0x7FC0, top)
        return top.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def from_e4m3(codes, HARDWARE_CAST: tl.constexpr):
    """float32 values of e4m3 codes (uint8), NaN for NaN: by the GPU's conversion, or in integers."""
    if HARDWARE_CAST:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # An e4m3 number is 256 times the float16 with its sign, exponent and mantissa, subnormals included.
    bits = codes.to(tl.int32)
    magnitude = bits & 0x7F
    half = ((bits & 0x80) << 8) | (magnitude << 7)
    value = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * _F16_PER_E4M3
    nan = tl.full(codes.shape, casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, nan, value)


@triton.jit
def sigmoid(x, HARDWARE: tl.constexpr):
    """1 / (1 + e^-x): that of SwiGLU's backward, for an x of at least its bound."""
    return swiglu_arithmetic.sigmoid(swiglu_arithmetic.bounded(x), HARDWARE)


@triton.jit
def gelu(x, HARDWARE: tl.constexpr):
    """x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form."""
    cubic = (x * x) * x
    return x * sigmoid((x + cubic * _GELU_CUBIC) * _GELU_SLOPE, HARDWARE)


@triton.jit
def gate_up_columns(column, width, ARRANGEMENT: tl.constexpr):
    """(of gate, of up) for columns of width: concatenated (0), or interleaved by 32 (1)."""
    if ARRANGEMENT == 0:
        return column, width + column
    of_gate = column // 32 * 64 + column % 32
    return of_gate, of_gate + 32


@triton.jit
def activated(gate, up, KIND: tl.constexpr, alpha, up_offset, limit, HAS_LIMIT: tl.constexpr, HARDWARE: tl.constexpr):
    """The activation of float32 gate and up, as `padless.moe.activation.activate` defines it; up is unused without."""
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if KIND == "swiglu":
        h = (gate * sigmoid(gate * alpha, HARDWARE)) * (up + up_offset)
    elif KIND == "geglu":
        h = gelu(gate, HARDWARE) * (up + up_offset)
    elif KIND == "gelu":
        h = gelu(gate, HARDWARE)
    elif KIND == "silu":
        h = gate * sigmoid(gate, HARDWARE)
    else:
        tl.static_assert(KIND == "relu2")
        positive = tl.where(gate < 0.0, 0.0, gate)
        h = positive * positive
    return h
