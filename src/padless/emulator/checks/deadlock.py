"""When nothing moves: whom to let go on, and if nobody can, who waits for what."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from padless.emulator.state.warp import Cluster


class Machine(Protocol):
    """What is read of a running launch, as `run.machine.Machine` is."""

    clusters: list[Cluster]
    blocks: Any
    progress: int
    gave_up_at: int

    def report(self, kind: str, message: str, instruction: Any, warp: Any) -> None: ...


def release_parked(machine: Machine) -> bool:
    """Forward progress: siblings need not meet where they would like to if the others cannot come."""
    for cluster in machine.clusters:
        for cta in cluster.ctas:
            for w in cta.warps:
                for f in list(w.fragments):
                    for token in f.tokens:
                        if token.parked:
                            other = token.parked.pop()
                            token.expected &= ~other.mask
                            other.tokens = other.tokens[: other.tokens.index(token)]
                            w.fragments.append(other)
                            w.arrive(other)
                            return True
    return False


def give_up(machine: Machine) -> bool:
    """try_wait returns false after a while: let it, once, before calling it a deadlock."""
    if machine.progress == machine.gave_up_at:
        return False
    any_gave = False
    for cluster in machine.clusters:
        for f in cluster.fragments():
            if f.wait is not None and f.wait.give_up(f):
                f.wait = None
                f.block = machine.blocks[f.block].next
                f.warp.arrive(f)
                any_gave = True
    machine.gave_up_at = machine.progress
    return any_gave


def report_deadlock(machine: Machine, what: str) -> None:
    """Who waits for what, once per distinct place."""
    lines = []
    first = None
    for cluster in machine.clusters:
        for f in cluster.fragments():
            b = machine.blocks[f.block]
            at = b.instructions[0] if b.instructions else b.terminator
            if first is None:
                first = (at, f)
            reason = f.wait.describe() if f.wait is not None else "runs without progress"
            source = f"{at.source} " if at is not None and at.source else ""
            line = f"PTX line {at.line}" if at is not None else "?"
            lanes = int(np.count_nonzero(f.mask))
            lines.append(f"CTA {f.warp.cta.index} warp {f.warp.index} ({lanes} lanes) at {source}({line}): {reason}")
    at, last = first if first is not None else (None, None)
    machine.report(
        "deadlock", f"{what}:\n      " + "\n      ".join(lines[:40]), at, last.warp if last is not None else None
    )
