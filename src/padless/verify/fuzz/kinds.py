"""Kinds of problems: those with the same constants and of the same kind launch kernels that were compiled once.

Triton compiles again where a number becomes 1 or a multiple of 16, and where a block's size follows from a number.
What is left open, such as few rows or many, is worth another compilation.
"""

from __future__ import annotations

from padless.formats import FORMAT_BY_NAME
from padless.verify.fuzz.problem import Kind, Options


def _number(value: int) -> int:
    """1 for one, 16 for its multiples, 0 for others."""
    return 1 if value == 1 else 16 if value % 16 == 0 else 0


def _power(value: int) -> int:
    """log2 of the power of two that value is rounded up to."""
    return (max(value, 1) - 1).bit_length()


def _columns(k: int, strides: str = "contiguous") -> Kind:
    """Of rows of k values, their strides, and words of two of them."""
    stride = k + 3 if strides == "gap" else k
    return _number(k), _number(stride), k % 2, _number(stride // 2)


def quantize(o: Options) -> Kind:
    block = FORMAT_BY_NAME[o["format"]].block_k
    blocks = _number(-(-o["k"] // block))
    factors = (o["given"], o["grouped"], len(o["sizes"]) > 1, _power(len(o["sizes"]))) if o["format"] == "NVFP4" else ()
    weight = (_number(o["n"]), _number(o["n"] * o["k"]), min(o["matrices"], 2)) if o["kind"] == "weight" else ()
    return *_columns(o["k"], o["strides"]), o["k"] >= 256, blocks, *factors, *weight


def weight_both(o: Options) -> Kind:
    return _number(o["n"]), o["n"] % 4, *_columns(o["k"], o["strides"]), _number(o["n"] * o["k"]), o["n"] % 2


def rows_columns(o: Options) -> Kind:
    return *_columns(o["k"], o["strides"]), _power(len(o["sizes"]))


def random(o: Options) -> Kind:
    return _number(o["rows"]), *_columns(o["k"], o["strides"])


def swiglu_backward(o: Options) -> Kind:
    return *_columns(o["i"], o["strides"]), o["i"] % 128 == 0, _power(len(o["sizes"]))


def route(o: Options) -> Kind:
    slots = o["tokens"] * o["top_k"]
    few = slots <= 4096  # one launch
    return min(slots, 1), few, max(_power(slots), 7) if few else _power(o["experts"] + 2), _number(o["experts"])


def gather(o: Options) -> Kind:
    block = FORMAT_BY_NAME[o["format"]].block_k
    routed = route(o) if o["routed"] else (min(o["tokens"], 1),)
    return *_columns(o["k"]), _number(-(-o["k"] // block)), *routed


def activate(o: Options) -> Kind:
    columns = o["n"] // 2 if o["kind"] in ("swiglu", "geglu") else o["n"]
    blocks = () if o["format"] is None else (_number(-(-columns // FORMAT_BY_NAME[o["format"]].block_k)),)
    return _number(columns), columns >= 256, *blocks


def combine(o: Options) -> Kind:
    return _number(o["n"]), min(_power(o["n"]), 8), min(o["tokens"], 1)
