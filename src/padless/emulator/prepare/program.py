"""Prepares a parsed kernel for execution: calls inlined, registers numbered, basic blocks found, each block turned
into one generated Python function over 32 lanes (see emitter.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from padless.emulator.errors import EmulatorError, UnsupportedInstruction
from padless.emulator.prepare.control_flow import find_blocks, find_joins
from padless.emulator.prepare.emitter import Emitter, Preparation, immediate_bits
from padless.emulator.prepare.registry import HELPERS, emit
from padless.emulator.ptx.ast import (
    Address,
    Call,
    Function,
    Instruction,
    Label,
    Module,
    Not,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)
from padless.emulator.state.program import BRANCH, EXIT, INDEXED, SYNC, TERMINATORS, Block, Program

MOST_INSTRUCTIONS = 1 << 20  # of a kernel with its calls inlined
MOST_CALLS = 20  # one within another


def prepare(module: Module, entry: str) -> Program:
    """Build the Program of one entry. Raises UnsupportedInstruction for the first instruction that is not modelled."""
    function = module.functions.get(entry)
    if function is None or not function.is_entry:
        raise EmulatorError(f"{module.name}: no entry {entry!r}; it has {', '.join(module.entries()) or 'none'}")
    body, registers, variables, branch_targets = _inline(module, function)
    function = dataclasses.replace(
        function, body=body, registers=registers, variables=variables, branch_targets=branch_targets
    )
    preparation = Preparation(module, function)
    emitted: dict[int, Emitter] = {}
    ordered: list[Instruction] = []
    for statement in body:
        if isinstance(statement, Instruction):
            statement.index = len(ordered)
            ordered.append(statement)
            if statement.opcode not in TERMINATORS:
                emitted[statement.index] = emit(preparation, statement)
    blocks = find_blocks(body, emitted, branch_targets, module)
    for block in blocks:
        if block.terminator is not None and block.terminator.guard is not None:
            cls, row = preparation.row(block.terminator.guard.name)
            block.guard = preparation.slot(cls, row, "pred")
            block.guard_negated = block.terminator.guard_negated
        if block.kind == INDEXED and block.terminator is not None:
            index = block.terminator.operands[0]
            assert isinstance(index, Register)
            block.target = preparation.slot(*preparation.row(index.name), "u32")
    find_joins(blocks)
    _compile(blocks, emitted, preparation)
    return _program(entry, module, function, blocks, ordered, preparation)


def _program(
    entry: str,
    module: Module,
    function: Function,
    blocks: list[Block],
    ordered: list[Instruction],
    preparation: Preparation,
) -> Program:
    parameters, at = {}, 0
    for parameter in function.parameters:
        at = -(-at // parameter.alignment) * parameter.alignment
        parameters[parameter.name] = (at, parameter.size)
        at += parameter.size
    shared, local = {}, {}
    shared_at, local_at, alignment = 0, 0, 16
    dynamic = []
    mentioned = {name for _, name, _ in preparation.symbol_rows}
    of_module = [v for v in module.variables.values() if v.space == "shared" and (v.size < 0 or v.name in mentioned)]
    for variable in [*of_module, *function.variables]:
        if variable.space == "shared":
            alignment = max(alignment, variable.alignment)
            if variable.size < 0:
                dynamic.append(variable)
                continue
            shared_at = -(-shared_at // variable.alignment) * variable.alignment
            shared[variable.name] = (shared_at, variable.size)
            shared_at += variable.size
        elif variable.space in ("local", "param"):
            local_at = -(-local_at // max(variable.alignment, 8)) * max(variable.alignment, 8)
            local[variable.name] = (local_at, variable.size)
            local_at += variable.size
    for variable in dynamic:
        shared_at = -(-shared_at // variable.alignment) * variable.alignment
    for variable in dynamic:
        shared[variable.name] = (shared_at, -1)
    names = list(preparation.number_of)
    return Program(
        entry, module, function, blocks, ordered, preparation.rows, preparation.slots, preparation.constants,
        preparation.specials, [(cls, row, name, off) for (cls, name, off), row in preparation.symbol_rows.items()],
        names, [preparation.row_of[n] for n in names], parameters, at, local, local_at, shared, shared_at, alignment,
        preparation.granule, preparation.uses,
    )  # fmt: skip


def _inline(
    module: Module, function: Function
) -> tuple[list[Any], dict[str, str], list[Variable], dict[str, tuple[str, ...]]]:
    """The body of an entry with every direct call replaced by the callee's body, registers and labels renamed."""
    registers = dict(function.registers)
    variables = list(function.variables)
    branch_targets = dict(function.branch_targets)
    body: list[Any] = []
    count = 0

    def rename(operand: Any, names: dict[str, str], suffix: str, own: Function) -> Any:
        if isinstance(operand, Register):
            return Register(operand.name + suffix) if operand.name in own.registers else operand
        if isinstance(operand, Symbol):
            return Symbol(names.get(operand.name, operand.name), operand.offset)
        if isinstance(operand, Address):
            return Address(
                rename(operand.base, names, suffix, own), operand.offset,
                tuple(rename(c, names, suffix, own) for c in operand.coordinates),
                tuple(rename(c, names, suffix, own) for c in operand.extra),
            )  # fmt: skip
        if isinstance(operand, Vector):
            return Vector(tuple(rename(i, names, suffix, own) for i in operand.items))
        if isinstance(operand, Pair):
            return Pair(rename(operand.first, names, suffix, own), rename(operand.second, names, suffix, own))
        if isinstance(operand, Not):
            return Not(rename(operand.operand, names, suffix, own))
        return operand

    def expand(own: Function, names: dict[str, str], suffix: str, depth: int, end: str) -> None:
        nonlocal count
        for statement in own.body:
            if isinstance(statement, Label):
                body.append(Label(names.get(statement.name, statement.name), statement.line))
            elif isinstance(statement, Call):
                call = statement
                callee = module.functions.get(call.target)
                if callee is None or not callee.body:
                    operands = tuple(
                        Symbol(names.get(a, a)) if not a.startswith("%") else Register(a + suffix)
                        for a in call.arguments
                    )
                    body.append(
                        dataclasses.replace(
                            call.instruction, opcode="call.external", operands=(Symbol(call.target), *operands)
                        )
                    )
                    continue
                if depth > MOST_CALLS:
                    raise UnsupportedInstruction(
                        f"{module.name}:{call.instruction.line}: recursive call of {call.target} is not supported"
                    )
                count += 1
                inner_suffix = f"~{count}"
                inner = {p.name: names.get(a, a) for p, a in zip(callee.parameters, call.arguments, strict=False)}
                inner.update({p.name: names.get(a, a) for p, a in zip(callee.results, call.results, strict=False)})
                for item in callee.body:
                    if isinstance(item, Label):
                        inner[item.name] = item.name + inner_suffix
                for name, targets in callee.branch_targets.items():
                    inner[name] = name + inner_suffix
                    branch_targets[name + inner_suffix] = tuple(t + inner_suffix for t in targets)
                for variable in callee.variables:
                    if variable.space != "shared":
                        inner[variable.name] = variable.name + inner_suffix
                        variables.append(dataclasses.replace(variable, name=variable.name + inner_suffix))
                    elif variable not in variables:
                        variables.append(variable)
                registers.update({name + inner_suffix: kind for name, kind in callee.registers.items()})
                done = f"$return{inner_suffix}"
                expand(callee, inner, inner_suffix, depth + 1, done)
                body.append(Label(done, call.instruction.line))
            else:
                new = dataclasses.replace(
                    statement,
                    operands=tuple(rename(o, names, suffix, own) for o in statement.operands),
                    guard=rename(statement.guard, names, suffix, own) if statement.guard else None,
                )
                if new.opcode == "ret" and end:
                    new = dataclasses.replace(new, opcode="bra", modifiers=(), operands=(Symbol(end),))
                body.append(new)

    if _inlined_size(module, function, 0, {}) > MOST_INSTRUCTIONS:
        raise UnsupportedInstruction(
            f"{module.name}:{function.line}: with its calls inlined {function.name} has more than {MOST_INSTRUCTIONS} "
            "instructions, which is the most the emulator prepares"
        )
    expand(function, {}, "", 0, "")
    return body, registers, variables, branch_targets


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


def _lines(emitters: list[Emitter], preparation: Preparation) -> list[str]:
    """The code of a block, with runs of independent instructions of one kind merged into one array operation."""
    lines: list[str] = []
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
            lines += emitters[at].lines
            at += 1
            continue
        rows = [_rows_of(preparation, [item[1] for item in run])]
        rows += [_rows_of(preparation, [item[2][k] for item in run]) for k in range(len(first[2]))]
        names = []
        for array in rows:
            name = f"rows{len(preparation.names)}"
            preparation.names[name] = array
            names.append(name)
        lines.append(f"batch(w, m, {first[0]}, {', '.join(names)})")
        at += len(run)
    return lines


def _rows_of(preparation: Preparation, operands: list[Any]) -> Any:
    rows = []
    for operand in operands:
        if isinstance(operand, Register):
            rows.append(preparation.row(operand.name)[1])
        else:
            slot = preparation.constant(immediate_bits(operand, "f32" if operand.bits else "u32"), "u32")
            rows.append(preparation.slots[slot][1])
    return np.array(rows)


def _compile(blocks: list[Block], emitted: dict[int, Emitter], preparation: Preparation) -> None:
    text: list[str] = []
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
            text.extend("    " + line for line in lines)
    preparation.names.update(HELPERS)
    exec(compile("\n".join(text), f"<{preparation.module.name}>", "exec"), preparation.names)
    for block in blocks:
        block.run = preparation.names.get(f"block{block.index}")
