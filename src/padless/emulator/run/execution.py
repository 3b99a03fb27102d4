"""Runs a fragment of a warp, block by block, until it waits, parks, ends or has had its turn."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import numpy as np

from padless.emulator.checks.registers import check_busy, check_written
from padless.emulator.errors import EmulatorError, refusal
from padless.emulator.state.barriers import threads_ended
from padless.emulator.state.launch import Launch
from padless.emulator.state.program import BRANCH, EXIT, FALL, GENERATED, INDEXED, SYNC, TRAP, Block
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Token
from padless.emulator.units.number_formats import Array

QUANTUM = 400  # warp-instructions before a loop gives way, at most


Observer = Callable[[Fragment, Block], bool]  # called before a block runs; True: not yet, give the turn away


def execute(launch: Launch, f: Fragment, observe: Observer | None) -> None:
    """Run a fragment until it waits, parks, ends or has had its turn."""
    w, blocks = f.warp, launch.blocks
    v = w.v
    checks = launch.checks
    budget = launch.random.randrange(1, QUANTUM)
    m: Any = f.active
    executed = 0
    while True:
        b = blocks[f.block]
        if observe is not None and observe(f, b):
            break
        executed += b.count
        kind = b.kind
        if checks:
            if w.busy & b.touches:
                check_busy(w, b)
            if b.reads & ~w.written:
                check_written(w, b)
            w.written |= b.writes
            w.dirty |= b.touches
        if kind == SYNC:
            active = m
            if b.guard >= 0:
                active = guarded(f, b)
                active = True if active.all() else active
            if active is True or active.any():
                assert b.sync is not None
                try:
                    f.wait = b.sync(f, active)
                except EmulatorError:
                    raise
                except Exception as error:
                    raise unforeseen(launch, b, error) from error
                if f.wait is not None:
                    break
            f.block = b.next
            if not w.arrive(f):
                break
            m = f.active
            if f.yielded or launch.random.random() < launch.schedule.preempt:
                f.yielded = False
                break
            budget -= 1
            continue
        if b.run is not None:
            try:
                b.run(w, v, m)
            except EmulatorError:
                raise
            except Exception as error:
                raise unforeseen(launch, b, error) from error
        if kind == FALL:
            f.block = b.next
        elif kind == BRANCH:
            if b.guard < 0:
                f.block = b.target
            else:
                taken = guarded(f, b)
                count = np.count_nonzero(taken)
                if count == 0:
                    f.block = b.next
                elif count == np.count_nonzero(f.mask):
                    f.block = b.target
                else:
                    split(f, b, [(b.target, taken), (b.next, f.mask & ~taken)])
                    break
            if f.block <= b.index:
                budget -= b.count + 1
                if budget <= 0:
                    w.arrive(f)
                    break
        elif kind in (EXIT, TRAP):
            if not leave(launch, f, b):
                break
            m = f.active
        elif kind == INDEXED:
            index = v[b.target]
            values = np.unique(index[f.mask])
            if len(values) == 1:
                f.block = b.targets[int(values[0])]
            else:
                split(f, b, [(b.targets[int(x)], f.mask & (index == x)) for x in values])
                break
        if f.tokens:
            if not w.arrive(f):
                break
            m = f.active
    launch.statistics.warp_instructions += executed


def unforeseen(launch: Launch, b: Block, error: Exception) -> EmulatorError:
    """The refusal of the instruction of a block in which an error that is not the emulator's own was raised."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == GENERATED]
    instruction = launch.program.whose[lines[0] - 1] if lines else b.instructions[0]
    return refusal(launch.program.module, instruction, error)


def guarded(f: Fragment, b: Block) -> Array:
    """The fragment's lanes that the guard of the block's terminator lets execute."""
    found = f.warp.v[b.guard]
    return (~found if b.guard_negated else found) & f.mask


def split(f: Fragment, b: Block, ways: list[tuple[int, Array]]) -> None:
    """Lanes that go different ways become fragments of their own, to meet again where the block says."""
    w = f.warp
    tokens = f.tokens
    if b.join >= 0 and not (tokens and tokens[-1].block == b.join):
        tokens = [*tokens, Token(b.join, f.mask)]
    w.fragments.remove(f)
    for target, mask in ways:
        new = Fragment(w, target, mask, list(tokens))
        w.fragments.append(new)
        w.arrive(new)


def leave(launch: Launch, f: Fragment, b: Block) -> bool:
    """exit, ret or trap; False if no lane is left in the fragment."""
    w = f.warp
    end = b.terminator
    gone = guarded(f, b) if b.guard >= 0 else f.mask.copy()
    if gone.any():
        if b.kind == TRAP and end is not None:
            Site(w, end, int(np.argmax(gone))).fault(end.opcode)
        w.live &= ~gone
        w.end = end
        f.become(f.mask & ~gone)
        launch.progress += 1
        threads_ended(w)
        for token in list(f.tokens):
            w.settle(token)
        for other in list(w.fragments):
            for token in list(other.tokens):
                w.settle(token)
    if not f.mask.any():
        w.fragments.remove(f)
        return False
    f.block = b.next
    return True


def trace_block(launch: Launch, f: Fragment, b: Block) -> bool:
    assert launch.trace is not None
    for instruction in [*b.instructions, *([b.terminator] if b.terminator and b.kind != SYNC else [])]:
        launch.trace(
            f"{f.warp.cta.index} w{f.warp.index} {np.count_nonzero(f.mask):2d} lanes  "
            f"{instruction.line:5d}  {instruction}"
        )
    return False
