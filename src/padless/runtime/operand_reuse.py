"""Lets neighbouring multiply-adds of a compiled kernel read the operand that they share once.

The tensor core's sums are in the registers, and it reads and writes them all the time: what the multiply-adds that
promote the sums can have of the register file is what it leaves. ``d = fma(sum, scale, d)`` reads three registers, of
which ``scale`` is that of the instruction before. A bit of an instruction keeps an operand for the next one; ptxas sets
it on every other multiply-add and, on the rest, one that gives the scheduler's turn away. Here it is set on more of
them, in runs. Measured effects, and how long a run pays, are in docs/kernels/sm90_fp8/ladder.md.

No instruction is added, moved or changed in what it computes. The places of the bits were found by the assemblers that
others wrote for these chips (maxas, CuAssembler, DeepGEMM's former interleaving of multiply-adds); that nothing but the
marks changes is tested with NVIDIA's disassembler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from padless.runtime.elf import sections

VERSION = "1"  # of what this module does: part of the name under which a kernel is cached

_INSTRUCTION = 16  # bytes
_FFMA = 0x223  # all operands registers
_ALWAYS = 7  # the predicate of an instruction that is always executed
_KEEP_B = 1 << 59  # in the upper half: operand B stays for the next instruction
_HOLD = 1 << 45  # in the upper half: the scheduler's turn is not given away
_BRANCHES = range(0x940, 0x960)  # opcodes that can name another place to go on
_INDIRECT_BRANCH = 0x949


def keep_shared_operands(cubin: bytes, entry: str, run: int) -> bytes:
    """``cubin`` with operand B of FFMAs kept for the next FFMA that has the same, ``run`` of them in a row at most.

    cubin: machine code for Hopper, as NVRTC makes it. entry: name of the kernel. run: 0 or 1 changes nothing.
    An operand is kept only if both instructions are always executed, one follows the other, nothing branches to the
    second, and the first does not write what is shared. Raises ValueError where the kernel is not in the cubin.
    """
    text = next((section for section in sections(cubin) if section.name == f".text.{entry}"), None)
    if text is None:
        raise ValueError(f"the cubin has no kernel {entry}")
    if run < 2:
        return cubin
    places = range(text.offset, text.offset + text.size, _INSTRUCTION)
    code = [struct.unpack_from("<QQ", cubin, at) for at in places]
    if any(low & 0xFFF == _INDIRECT_BRANCH for low, _ in code):
        return cubin  # could go anywhere
    changed = bytearray(cubin)
    targets = set(_branch_targets(code))
    for first, last in _runs(code, targets):
        for i in range(first, last + 1):
            low, high = code[i]
            ends = i == last or (i - first + 1) % run == 0
            high = high & ~(_KEEP_B | _HOLD) if ends else high | _KEEP_B | _HOLD
            struct.pack_into("<QQ", changed, places[i], low, high)
    return bytes(changed)


def _branch_targets(code: list[tuple[int, int]]) -> Iterator[int]:
    """Indices of instructions that a branch may go on at, and others: its fields are read in both known ways."""
    for i, (low, high) in enumerate(code):
        if low & 0xFFF not in _BRANCHES:
            continue
        upper = low >> 34 | (high & 0x3FFFF) << 30
        upper -= upper >> 47 << 48  # signed
        for distance in (upper, upper << 8 | low >> 16 & 0xFF):  # in words
            yield i + 1 + distance * 4 // _INSTRUCTION


def _runs(code: list[tuple[int, int]], targets: set[int]) -> Iterator[tuple[int, int]]:
    """First and last of neighbouring FFMAs that share operand B, two or more."""
    first = 0
    for i in range(1, len(code) + 1):
        if i < len(code) and i not in targets and _shares_b(code[i - 1], code[i]):
            continue
        if i - 1 > first:
            yield first, i - 1
        first = i


def _shares_b(one: tuple[int, int], next_one: tuple[int, int]) -> bool:
    def register_b(instruction: tuple[int, int]) -> int:
        return instruction[0] >> 32 & 0xFF

    return (
        all(low & 0xFFF == _FFMA and low >> 12 & 0xF == _ALWAYS for low, _ in (one, next_one))
        and register_b(one) == register_b(next_one)
        and one[0] >> 16 & 0xFF != register_b(one)
    )
