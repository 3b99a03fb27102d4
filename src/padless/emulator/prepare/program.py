"""Prepares a parsed kernel for execution: calls inlined, registers numbered, basic blocks found, each block turned
into one generated Python function over 32 lanes (see emitter.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from padless.emulator.errors import EmulatorError, UnsupportedInstruction, refusal, refusing
from padless.emulator.prepare.control_flow import find_blocks, find_joins
from padless.emulator.prepare.emitter import Emitter, Preparation, immediate_bits
from padless.emulator.prepare.registry import HELPERS, emit
from padless.emulator.prepare.unread import mark_uses
from padless.emulator.ptx.ast import Call, Function, Instruction, Label, Module, Register, Symbol, Variable
from padless.emulator.state.program import BRANCH, EXIT, GENERATED, INDEXED, SYNC, TERMINATORS, Block, Program

MOST_INSTRUCTIONS = 1 << 20  # of a kernel with its calls inlined
MOST_CALLS = 20  # one within another


def prepare(module: Module, entry: str) -> Program:
    """Build the Program of one entry. Raises UnsupportedInstruction for the first instruction that is not modelled."""
    function = module.functions.get(entry)
    if function is None or not function.is_entry:
        raise EmulatorError(f"{module.name}: no entry {entry!r}; it has {', '.join(module.entries()) or 'none'}")
    function = _inline(module, function)
    preparation = Preparation(module, function)
    emitted: dict[int, Emitter] = {}
    ordered: list[Instruction] = []
    for statement in function.body:
        if isinstance(statement, Instruction):
            statement.index = len(ordered)
            ordered.append(statement)
            if statement.opcode not in TERMINATORS:
                emitted[statement.index] = emit(preparation, statement)
    blocks = find_blocks(function, emitted, module)
    for block in blocks:
        if block.terminator is None:
            continue
        with refusing(module, block.terminator):
            emitter = Emitter(preparation, block.terminator)
            if block.terminator.guard is not None:
                block.guard = emitter.source_slot(block.terminator.guard, "pred")
                block.guard_negated = block.terminator.guard_negated
            if block.kind == INDEXED:
                block.target = emitter.source_slot(block.terminator.operands[0], "u32")
    find_joins(blocks)
    late = mark_uses(blocks, emitted)
    whose = _compile(blocks, emitted, preparation)
    return _program(entry, module, function, blocks, ordered, preparation, whose, late)


def _layout(variables: Iterable[Variable], at: int = 0, least: int = 1) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, size) of each variable, one behind the other, and where they end; a size of -1 takes no room."""
    places = {}
    for variable in variables:
        alignment = max(variable.alignment, least)
        at = -(-at // alignment) * alignment
        places[variable.name] = (at, variable.size)
        at += max(variable.size, 0)
    return places, at


def _program(
    entry: str,
    module: Module,
    function: Function,
    blocks: list[Block],
    ordered: list[Instruction],
    p: Preparation,
    whose: list[Instruction],
    late: frozenset[int],
) -> Program:
    parameters, parameter_bytes = _layout(function.parameters)
    mentioned = {name for _, name, _ in p.symbol_rows}
    of_module = [v for v in module.variables.values() if v.size < 0 or v.name in mentioned]
    variables = [v for v in [*of_module, *function.variables] if v.space == "shared"]
    static, end = _layout(v for v in variables if v.size >= 0)
    # those of no size share an address, the one that suits all
    unsized = sorted((v for v in variables if v.size < 0), key=lambda v: -v.alignment)
    dynamic, end = _layout(unsized, end)
    local, local_bytes = _layout((v for v in function.variables if v.space in ("local", "param")), least=8)
    names = list(p.number_of)
    return Program(
        entry, module, function, blocks, ordered, p.rows, p.slots, p.constants, p.specials,
        [(cls, row, name, off) for (cls, name, off), row in p.symbol_rows.items()],
        names, [p.row_of[n] for n in names], parameters, parameter_bytes, local, local_bytes, static | dynamic, end,
        max([16, *(v.alignment for v in variables)]), p.granule, p.global_granule, whose, p.uses, late,
    )  # fmt: skip


def _inline(module: Module, function: Function) -> Function:
    """An entry with every direct call replaced by the callee's body, registers and labels renamed."""
    if _inlined_size(module, function, 0, {}) > MOST_INSTRUCTIONS:
        raise UnsupportedInstruction(
            f"{module.name}:{function.line}: with its calls inlined {function.name} has more than {MOST_INSTRUCTIONS} "
            "instructions, which is the most the emulator prepares"
        )
    whole = dataclasses.replace(
        function, body=[], registers=dict(function.registers), variables=list(function.variables),
        branch_targets=dict(function.branch_targets),
    )  # fmt: skip
    count = 0

    def renamed(operand: Any, names: dict[str, str], suffix: str, own: Function) -> Any:
        if not suffix:  # the entry's own
            return operand
        if isinstance(operand, Register):
            return Register(operand.name + suffix) if operand.name in own.registers else operand
        if isinstance(operand, Symbol):
            return Symbol(names.get(operand.name, operand.name), operand.offset)
        if isinstance(operand, tuple):
            return tuple(renamed(x, names, suffix, own) for x in operand)
        if dataclasses.is_dataclass(operand) and not isinstance(operand, type):
            parts = (getattr(operand, f.name) for f in dataclasses.fields(operand))
            return type(operand)(*renamed(tuple(parts), names, suffix, own))
        return operand

    def expand(own: Function, names: dict[str, str], suffix: str, depth: int, end: str) -> None:
        for statement in own.body:
            if isinstance(statement, Label):
                whole.body.append(Label(names.get(statement.name, statement.name), statement.line))
            elif isinstance(statement, Call):
                call(statement, names, suffix, depth)
            else:
                operands, guard = renamed((statement.operands, statement.guard), names, suffix, own)
                new = dataclasses.replace(statement, operands=operands, guard=guard)
                if new.opcode == "ret" and end:
                    new = dataclasses.replace(new, opcode="bra", modifiers=(), operands=(Symbol(end),))
                whole.body.append(new)

    def call(call: Call, names: dict[str, str], suffix: str, depth: int) -> None:
        nonlocal count
        callee = module.functions.get(call.target)
        if callee is None or not callee.body:
            arguments = [Register(a + suffix) if a[0] == "%" else Symbol(names.get(a, a)) for a in call.arguments]
            operands = (Symbol(call.target), *arguments)
            whole.body.append(dataclasses.replace(call.instruction, opcode="call.external", operands=operands))
            return
        if depth > MOST_CALLS:
            where = f"{module.name}:{call.instruction.line}"
            raise UnsupportedInstruction(f"{where}: recursive call of {call.target} is not supported")
        count += 1
        inner_suffix = f"~{count}"
        inner = {p.name: names.get(a, a) for p, a in zip(callee.parameters, call.arguments, strict=False)}
        inner |= {p.name: names.get(a, a) for p, a in zip(callee.results, call.results, strict=False)}
        labels = [item.name for item in callee.body if isinstance(item, Label)]
        own = [v.name for v in callee.variables if v.space != "shared"]
        inner |= {name: name + inner_suffix for name in (*labels, *callee.branch_targets, *own)}
        for name, targets in callee.branch_targets.items():
            whole.branch_targets[name + inner_suffix] = tuple(t + inner_suffix for t in targets)
        for variable in callee.variables:
            if variable.space != "shared":
                whole.variables.append(dataclasses.replace(variable, name=variable.name + inner_suffix))
            elif variable not in whole.variables:
                whole.variables.append(variable)
        whole.registers.update({name + inner_suffix: kind for name, kind in callee.registers.items()})
        done = f"$return{inner_suffix}"
        expand(callee, inner, inner_suffix, depth + 1, done)
        whole.body.append(Label(done, call.instruction.line))

    expand(function, {}, "", 0, "")
    return whole


def _inlined_size(module: Module, function: Function, depth: int, known: dict[str, int]) -> int:
    """Statements of a body with its calls replaced, down to the depth at which calls are refused."""
    if function.name not in known:
        known[function.name] = len(function.body)
        for statement in function.body:
            if isinstance(statement, Call) and depth <= MOST_CALLS:
                callee = module.functions.get(statement.target)
                if callee is not None:
                    known[function.name] += _inlined_size(module, callee, depth + 1, known)
    return known[function.name]


SHORTEST_BATCH = 3


def _lines(emitters: list[Emitter], preparation: Preparation) -> list[tuple[str, Instruction]]:
    """The code of a block, with runs of independent instructions of one kind merged into one array operation; each line
    with its instruction, or the first of its run."""
    lines: list[tuple[str, Instruction]] = []
    at = 0
    while at < len(emitters):
        first = emitters[at].batch
        run: list[tuple[str, Register, tuple[Any, ...]]] = []
        written: set[str] = set()
        while first is not None and at + len(run) < len(emitters):
            item = emitters[at + len(run)].batch
            if item is None or item[0] != first[0] or item[1].name in written:
                break
            if any(isinstance(o, Register) and o.name in written for o in item[2]):
                break
            written.add(item[1].name)
            run.append(item)
        if first is None or len(run) < SHORTEST_BATCH:
            lines += [(line, emitters[at].instruction) for line in emitters[at].lines]
            at += 1
            continue
        rows = [_rows_of(preparation, [item[1] for item in run])]
        rows += [_rows_of(preparation, [item[2][k] for item in run]) for k in range(len(first[2]))]
        names = [emitters[at].name(array, "rows") for array in rows]
        lines.append((f"batch(w, m, {first[0]}, {', '.join(names)})", emitters[at].instruction))
        at += len(run)
    return lines


def _rows_of(preparation: Preparation, operands: list[Any]) -> Any:
    def row(operand: Any) -> int:
        if isinstance(operand, Register):
            return preparation.row(operand.name)[1]
        slot = preparation.constant(immediate_bits(operand, "f32" if operand.bits else "u32"), "u32")
        return preparation.slots[slot][1]

    return np.array([row(operand) for operand in operands])


def _compile(blocks: list[Block], emitted: dict[int, Emitter], preparation: Preparation) -> list[Instruction]:
    """Make the blocks' functions. Returns whose code each line of theirs is."""
    text: list[str] = []
    whose: list[Instruction] = []
    for block in blocks:
        block.count = len(block.instructions) + (block.kind in (BRANCH, EXIT, INDEXED))
        written = 0
        under: dict[tuple[str, bool] | None, int] = {}  # guard -> what is written wherever it holds
        for instruction in block.instructions:
            emitter = emitted[instruction.index]
            guard = (instruction.guard.name, instruction.guard_negated) if instruction.guard else None
            for name in emitter.reads:
                bit = 1 << preparation.number_of[name]
                if not (written | under.get(guard, 0)) & bit and name in preparation.register_types:
                    block.reads |= bit
                block.touches |= bit
            for name in emitter.writes:
                bit = 1 << preparation.number_of[name]
                block.writes |= bit
                block.touches |= bit
                under[guard] = under.get(guard, 0) | bit
                under.pop((name, False), None)
                under.pop((name, True), None)
            written |= under.get(None, 0)
        end = block.terminator
        if end is not None and end.guard is not None and block.kind != SYNC:
            preparation.row(end.guard.name)
            bit = 1 << preparation.number_of[end.guard.name]
            block.touches |= bit
            if not written & bit:
                block.reads |= bit
        if block.kind == SYNC:
            block.sync = emitted[block.instructions[0].index].sync
            continue
        lines = _lines([emitted[i.index] for i in block.instructions], preparation)
        if lines:
            text.append(f"def block{block.index}(w, v, m):")
            text.extend("    " + line for line, _ in lines)
            whose += [lines[0][1], *(instruction for _, instruction in lines)]
    preparation.names.update(HELPERS)
    try:
        code = compile("\n".join(text), GENERATED, "exec")
    except SyntaxError as error:
        raise refusal(preparation.module, whose[(error.lineno or 1) - 1], error) from error
    exec(code, preparation.names)
    for block in blocks:
        block.run = preparation.names.get(f"block{block.index}")
    return whose
