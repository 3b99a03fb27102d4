"""Basic blocks of a prepared kernel, what follows what, and where divergent branches meet again."""

from __future__ import annotations

from padless.emulator.errors import EmulatorError, refusing
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Function, Instruction, Label, Module
from padless.emulator.state.program import BRANCH, EXIT, INDEXED, SYNC, TERMINATORS, TRAP, Block


def find_blocks(function: Function, emitted: dict[int, Emitter], module: Module) -> list[Block]:
    blocks = [Block(0, [])]
    labels: dict[str, int] = {}

    def start() -> Block:
        blocks.append(Block(len(blocks), []))
        return blocks[-1]

    current = blocks[0]
    for statement in function.body:
        if isinstance(statement, Label):
            if current.instructions or current.terminator:
                current = start()
            labels[statement.name] = current.index
            continue
        assert isinstance(statement, Instruction)
        if current.terminator is not None:
            current = start()
        if statement.opcode in TERMINATORS:
            current.terminator, current.kind = statement, TERMINATORS[statement.opcode]
            continue
        if emitted[statement.index].sync is not None:
            if current.instructions:
                current = start()
            current.terminator, current.kind = statement, SYNC
        current.instructions.append(statement)
    if current.terminator is None:
        current.kind = EXIT
    for block in blocks:
        block.next = block.index + 1 if block.index + 1 < len(blocks) else -1
        end = block.terminator
        if end is None or block.kind not in (BRANCH, INDEXED):
            continue
        with refusing(module, end):
            try:
                if block.kind == BRANCH:
                    (symbol,) = end.operands
                    block.target = labels[str(symbol)]
                else:
                    block.targets = tuple(labels[name] for name in function.branch_targets[str(end.operands[1])])
            except KeyError as error:
                raise EmulatorError(f"no label {error}") from None
    return blocks


def successors(block: Block) -> list[int]:
    """Blocks that may follow, -1 standing for the end of the thread."""
    if block.kind == INDEXED:
        return list(block.targets)
    if block.kind not in (BRANCH, EXIT, TRAP):
        return [block.next]
    way = block.target if block.kind == BRANCH else -1
    return [way, block.next] if block.terminator is not None and block.terminator.guard is not None else [way]


def find_joins(blocks: list[Block]) -> None:
    """Immediate post-dominators, where the sides of a divergent branch meet (Cooper, Harvey and Kennedy's iteration)."""
    end = len(blocks)
    following = [[end if s < 0 else s for s in successors(b)] for b in blocks]
    preceding: list[list[int]] = [[] for _ in range(end + 1)]
    for index, targets in enumerate(following):
        for target in targets:
            preceding[target].append(index)
    order: list[int] = []
    seen = {end}
    stack: list[tuple[int, int]] = [(end, 0)]
    while stack:
        node, position = stack.pop()
        if position < len(preceding[node]):
            stack.append((node, position + 1))
            other = preceding[node][position]
            if other not in seen:
                seen.add(other)
                stack.append((other, 0))
        else:
            order.append(node)
    rank = {node: i for i, node in enumerate(order)}  # the end has the highest rank
    parent = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = -1
            for target in following[node]:
                if target not in parent:
                    continue
                if new < 0:
                    new = target
                    continue
                one, two = new, target
                while one != two:
                    while rank[one] < rank[two]:
                        one = parent[one]
                    while rank[two] < rank[one]:
                        two = parent[two]
                new = one
            if new >= 0 and parent.get(node) != new:
                parent[node] = new
                changed = True
    for block in blocks:
        join = parent.get(block.index, end)
        block.join = -1 if join == end else join
