"""What a straight run of PTX costs the warp that executes it: issue slots, and the longest chain of results.

PTX has no issue costs, and the compiler reorders what it makes of it. So a block's time is the larger of two numbers
that no order changes: the slots of all its instructions, and the latency of its longest chain. Arithmetic on what was
known before can be done ahead, so only what follows a load, a shuffle or another slow result adds its latency to a
chain. Moves, which mostly vanish when registers are assigned, count for a third of a slot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from padless.emulator.ptx.ast import Address, Instruction, Not, Pair, Register, Vector
from padless.emulator.state.program import BRANCH, Block
from padless.emulator.timing.rates import Chip

COMPILER_REUSE = 2  # ptxas keeps an operand for the next instruction, every other time
SMALL = 40  # slots of float arithmetic up to which a block leaves room for others
WIDE = ("u64", "s64", "b64", "f64")
UNARY_FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")


@dataclass(frozen=True)
class BlockCost:
    """Cycles of a warp: ``slots`` of the issuing sub-partition, ``chain`` at least; ``shared``, of shared memory's port.

    signal: cycles to the first instruction that others can see (an arrival, an atomic, a clock), or None.
    later: (cycles, bits of registers) of slow results that nothing here reads: they are there so long after the start.
    dense: whether it is mostly independent arithmetic, which takes every slot; else other warps find slots between its
    own.
    """

    slots: float
    chain: float
    shared: float
    signal: float | None
    later: tuple[tuple[float, int], ...]
    dense: bool
    loaded: float  # bytes of global memory, of a warp whose lanes are neighbours
    stored: float
    beside: float  # slots more, if Hopper's products run beside it
    waits: float  # of the cycles, those of a try_wait: they pass while arithmetic before it is issued


def registers_of(operand: Any) -> Iterator[str]:
    """Names of the registers in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Not):
        yield from registers_of(operand.operand)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Address):
        yield from registers_of(operand.base)


def is_signal(ins: Instruction) -> bool:
    """Whether other warps can see when this is executed, or it reads the time."""
    if ins.opcode in ("atom", "red", "griddepcontrol") or (ins.opcode == "mbarrier" and "init" not in ins.modifiers):
        return True
    if ins.opcode in ("ld", "st") and {"acquire", "release", "volatile", "relaxed"} & set(ins.modifiers):
        return True
    return any(
        name.startswith(("%clock", "%globaltimer")) for operand in ins.operands for name in registers_of(operand)
    )


def access_bytes(ins: Instruction) -> int:
    """Bytes that a load or store moves for a full warp."""
    width = next((int(m[1:]) for m in reversed(ins.modifiers) if m[:1] in "bufs" and m[1:].isdigit()), 32)
    count = next((int(m[1]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
    return 4 * width * count


def matrix_bytes(ins: Instruction) -> float:
    """Rows x columns x bytes of K of an mma.sync."""
    shape = next(m for m in ins.modifiers if m[0] == "m" and m[1:2].isdigit())
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    size = {"f16": 2, "bf16": 2, "tf32": 4, "f64": 8, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
    of_a = [t for t in ins.modifiers if t in size or t in ("f32", "s32")][1:2]
    return float(m * n * k * size.get(of_a[0] if of_a else "f16", 2))


class Costs:
    """Costs of the blocks of one program on one chip, worked out when first asked for."""

    def __init__(
        self, chip: Chip, register_names: list[str], uses_tensor: bool, reuse_run: int = COMPILER_REUSE
    ) -> None:
        self.chip = chip
        self.numbers = {name: i for i, name in enumerate(register_names)}
        # A multiply-add reads three operands, of which one is kept over a run of its neighbours.
        self.kept = 1 - 1 / max(reuse_run, 1)
        self.operand, self.operand_alone = (
            (chip["operand_slots"], chip["operand_slots_alone"]) if uses_tensor else (0.0, 0.0)
        )
        self._known: dict[int, BlockCost] = {}

    def of(self, block: Block) -> BlockCost:
        """The cost of a block."""
        found = self._known.get(block.index)
        if found is None:
            found = self._known[block.index] = self._work_out(block)
        return found

    def _work_out(self, block: Block) -> BlockCost:
        ready: dict[str, float] = {}  # registers that slow results lead to
        unread: dict[str, float] = {}
        slots = chain = stalls = shared = floats = loaded = stored = beside = waits = 0.0
        signal = None
        instructions = list(block.instructions)
        if block.terminator is not None and (not instructions or instructions[-1] is not block.terminator):
            instructions.append(block.terminator)
        for ins in instructions:
            cost, latency, stall = self.instruction(ins)
            first = 0 if self._writes_nothing(ins) else 1
            sources = [n for operand in ins.operands[first:] for n in registers_of(operand)]
            if ins.guard is not None:
                sources += registers_of(ins.guard)
            at = max((ready.get(name, 0.0) for name in sources), default=0.0)
            for name in sources:
                unread.pop(name, None)
            slots += cost
            if "f32" in ins.modifiers:
                floats += cost
            if ins.opcode in ("fma", "mad") and "f32" in ins.modifiers:
                beside += max((3 - self.kept) * self.operand - cost, 0.0)
            if ins.opcode == "mbarrier" and "try_wait" in ins.modifiers:
                waits += stall - cost
            stalls += max(stall - cost, 0.0)
            if is_signal(ins) and signal is None:
                signal = max(slots, at) + stalls
            if at:
                chain = max(chain, at + cost)
            if self._touches_shared(ins):
                shared += max(self._shared_bytes(ins) / self.chip["shared_bytes_per_clk"], 1.0)
            if self._is_global_load(ins):
                loaded += access_bytes(ins)
            elif ins.opcode == "st" and not any(m.startswith(("shared", "local", "param")) for m in ins.modifiers):
                stored += access_bytes(ins)
            slow = at > 0 or latency > 2 * self.chip["alu_latency"]
            for name in (n for operand in ins.operands[:first] for n in registers_of(operand)):
                unread.pop(name, None)
                ready.pop(name, None)
                if slow:
                    ready[name] = unread[name] = at + latency
        if block.kind == BRANCH and 0 <= block.target <= block.index:
            stalls += self.chip["branch"]
        later: dict[float, int] = {}
        for name, time in unread.items():
            if name in self.numbers:
                later[time] = later.get(time, 0) | 1 << self.numbers[name]
        return BlockCost(
            slots, max(chain, slots) + stalls, shared, signal, tuple(later.items()), floats > SMALL, loaded, stored,
            beside, waits,
        )  # fmt: skip

    @staticmethod
    def _writes_nothing(ins: Instruction) -> bool:
        return ins.opcode in (
            "st", "red", "bra", "bar", "barrier", "fence", "membar", "prefetch", "prefetchu", "exit", "ret", "stmatrix",
            "cp", "wgmma", "setmaxnreg", "griddepcontrol", "trap", "nanosleep",
        ) or (ins.opcode == "mbarrier" and bool(ins.operands) and isinstance(ins.operands[0], Address))  # fmt: skip

    @staticmethod
    def _touches_shared(ins: Instruction) -> bool:
        if ins.opcode in ("ldmatrix", "stmatrix"):
            return True
        return ins.opcode in ("ld", "st") and any(m.startswith("shared") for m in ins.modifiers)

    @staticmethod
    def _shared_bytes(ins: Instruction) -> int:
        if ins.opcode in ("ldmatrix", "stmatrix"):
            return 128 * int(next((m[1] for m in ins.modifiers if m in ("x1", "x2", "x4")), "1"))
        return access_bytes(ins)

    @staticmethod
    def _is_global_load(ins: Instruction) -> bool:
        return ins.opcode == "ld" and not any(m.startswith(("shared", "param", "local")) for m in ins.modifiers)

    def instruction(self, ins: Instruction) -> tuple[float, float, float]:
        """(issue slots, cycles until the result can be used, cycles that the warp itself stands) of one instruction."""
        chip, op, mods = self.chip, ins.opcode, set(ins.modifiers)
        alu = chip["alu_latency"]
        wide = any(w in mods for w in WIDE)
        if op == "mov":
            if is_signal(ins):
                return 1, 1, chip["clock_read"]
            return 0.34, 0.34, 0
        if op in ("fma", "mad") and "f32" in mods:
            return max(1.0, (3 - self.kept) * self.operand_alone), alu, 0
        if op in ("ld", "ldu"):
            if self._is_global_load(ins):
                return 1, chip["global_latency"], 0
            return (1, chip["shared_latency"], 0) if any(m.startswith("shared") for m in mods) else (0.5, 8, 0)
        if op == "ldmatrix":
            return 1, chip["shared_latency"], 0
        if op == "atom":
            return 2, 2 * chip["global_latency"], 0
        if op == "cvt":
            packs = any(m.startswith(("e4m3x2", "e5m2x2", "e2m1x2", "ue8m0x2")) for m in mods)
            return (4 if packs else 2 if "f32" in mods or "bf16x2" in mods else 1), alu, 0
        if op in UNARY_FUNCTIONS:
            return 8, 20, 0
        if op in ("div", "rem"):
            return (40, 2.4 * chip["divide_latency"], 0) if wide else (20, chip["divide_latency"], 0)
        if op == "shfl":
            return 2, chip["shuffle_latency"], 0
        if op in ("vote", "match", "elect", "activemask", "redux"):
            return 2, 12, 0
        if op == "mbarrier":
            if "try_wait" in mods or "test_wait" in mods:
                return 2, 0, chip["mbarrier_wait"]
            return (1, 1, 0) if "init" in mods else (1, 1, chip["mbarrier_arrive"])
        if op == "fence" and any(m.startswith("proxy") for m in mods):
            return 1, 0, chip["proxy_fence"]
        if op in ("fence", "membar"):
            return 1, 0, 10
        if op == "mma":
            share = self.chip["tensor_bytes_per_clk"] / 4 * self.chip["mma_sync_share"]
            cycles = matrix_bytes(ins) / share
            return cycles, cycles + 16, 0
        if op == "wgmma":
            return (1, 0, chip["wgmma_issue"]) if "mma_async" in mods else (1, 0, 2)
        if op == "tcgen05":
            if "alloc" in mods:
                return 1, 0, chip["tmem_alloc"]
            return (1, 0, chip["mma_issue"]) if "mma" in mods or "commit" in mods or "cp" in mods else (1, 0, 4)
        if op == "cp":
            waits = "wait_group" in mods or "commit_group" in mods or "wait_all" in mods
            return (1, 0, 2) if waits or "bulk" not in mods else (1, 0, chip["tma_issue"])
        if op == "setmaxnreg":
            return 1, 0, 30
        if op in ("bar", "barrier"):
            return 1, 0, 4
        if op in ("mul", "mad") and wide:
            return 4, 2 * alu, 0
        return (2, 2 * alu, 0) if wide else (1, alu, 0)
