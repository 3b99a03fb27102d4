"""Loads from shared memory that a thread may leave unread while it gives the memory back: which, and their first uses.

A load is over for its thread when an instruction needs the value. An arrival on an mbarrier needs none, so a copy that
waits for the arrival may overtake the load.
"""

from __future__ import annotations

from typing import Any

from padless.emulator.prepare.control_flow import successors
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.state.program import Block

FENCE = {"proxy", "async"}  # orders reads in front of it before copies
ARRIVALS = {"arrive", "arrive_drop"}
ELSEWHERE = {"global", "local", "param", "const"}  # loads that are not of shared memory


def mark_uses(blocks: list[Block], emitted: dict[int, Emitter]) -> frozenset[int]:
    """The numbers of the loads behind which an arrival may come before every use. What first uses their values, and what
    overwrites the last of these unused, is made to say so."""
    found, said = set(), dict[tuple[int, str], list[int]]()
    for block in blocks:
        for at, ins in enumerate(block.instructions):
            if ins.opcode == "ldmatrix" or (ins.opcode == "ld" and not ELSEWHERE & set(ins.modifiers)):
                crosses, ends = _ends(blocks, emitted, block.index, at + 1, frozenset(emitted[ins.index].writes))
                if crosses:
                    found.add(ins.index)
                    for end in ends:
                        said.setdefault(end, []).append(ins.index)
    for (index, what), loads in said.items():
        _say(emitted[index], what, loads)
    return frozenset(found)


def _ends(
    blocks: list[Block], emitted: dict[int, Emitter], index: int, at: int, values: frozenset[str]
) -> tuple[bool, set[tuple[int, str]]]:
    """Whether an arrival is reached before a use of `values`, and where a thread first uses them ("use") or has
    overwritten the last of them unused ("drop"). A mov is no use, for its result
    has the value as well; a proxy fence is one."""
    crosses, ends, seen = False, set(), dict[int, frozenset[str]]()
    ways = [(index, at, values)]
    while ways:
        index, at, held = ways.pop()
        for ins in blocks[index].instructions[at:]:
            emitter = emitted[ins.index]
            uses = not held.isdisjoint([*emitter.reads, *emitter.own])
            if (uses and ins.opcode != "mov") or (ins.opcode == "fence" and set(ins.modifiers) >= FENCE):
                ends.add((ins.index, "use"))
                break
            if uses:
                held |= set(emitter.writes)
            elif ins.guard is None:
                held -= set(emitter.writes)
                if not held:
                    ends.add((ins.index, "drop"))
                    break
            if ins.opcode == "mbarrier" and ARRIVALS & set(ins.modifiers):
                crosses = True
        else:
            for following in successors(blocks[index]):
                if following >= 0 and not held <= seen.get(following, frozenset()):
                    seen[following] = held | seen.get(following, frozenset())
                    ways.append((following, 0, seen[following]))
    return crosses, ends


def _say(emitter: Emitter, what: str, loads: list[int]) -> None:
    """Have an instruction call this method of its warp, before it is executed."""
    synchronise = emitter.sync
    if synchronise is not None:

        def said(f: Any, m: Any) -> Any:
            getattr(f.warp, what)(loads)
            return synchronise(f, m)

        emitter.sync = said
    else:
        emitter.lines.insert(0, f"w.{what}({emitter.name(loads, 'loads')})")
        emitter.batch = None
