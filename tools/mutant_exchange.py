"""Launches of expert parallelism whose mutants `tools/mutants.py` judges: a sender's, and a receiver's that waits.

No stream orders launches of two ranks, only the signals do that one releases and the other acquires. So both are one
launch here, of a kernel that is the sender's PTX for CTAs (x, 0) of the grid and the receiver's for CTAs (x, 1). What
else they need has run before, as launches of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK
from padless.emulator import Emulator
from padless.emulator.fake_driver import EmulatedDriver
from padless.runtime.driver import LaunchShape
from padless.runtime.jit import CompiledKernel
from padless.testing import exchange

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support import ep_emulated, ep_virtual  # type: ignore[import-not-found]

# Threads that hold copies of a value store it to one place, which is no error where checks are not strict; LLVM leaves
# a register unset that nothing looks at.
COMPILERS_OWN = ("uninitialised-register",)
POLLS = 1000  # a launch that runs next to the one it waits for
SENDER, RECEIVER = 0, 1  # of a launch's signals rank 1's is that of a thread which took no ticket
Steps = Callable[["Pair"], None]


class Held(Exception):
    """Ends a call at its launch."""


class Pair:
    """Two virtual ranks, whose launches are held back in the blocks of `holding`."""

    def __init__(self, programs: int, few_slots: int, hidden: int, tokens: int, **options: Any) -> None:
        self.problem = exchange.draw([tokens, 3], 4, hidden, 3, 1)
        self.ranks = ep_virtual.make(self.problem, programs=programs, few_slots=few_slots, polls=POLLS, **options)
        self.held: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self._holds = False

    @property
    def backends(self) -> list[Any]:
        return self.ranks.backends

    def given(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        p = self.problem
        return p.tokens[rank], p.ids[rank], p.weights[rank]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The launch that ends this block is held back, in place of running."""
        self._holds = True
        try:
            yield
        except Held:
            self._holds = False

    def kernel(self, function: Any) -> ep_emulated.EmulatedExchange:
        """Stand-in for a kernel of Triton."""
        pair = self

        class Holding(ep_emulated.EmulatedExchange):
            def _run(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any], programmatic: bool) -> None:
                if not pair._holds:
                    super()._run(kernel, grid, arguments, programmatic)
                    return
                pair.held.append((kernel, grid, arguments))
                raise Held

        return Holding(function)


def ids(pair: Pair) -> None:
    sender, receiver = pair.backends
    receiver.publish_ids(*pair.given(RECEIVER)[1:])
    with pair.holding():
        sender.publish_ids(*pair.given(SENDER)[1:])
    with pair.holding():
        receiver.sort()


def rows(pair: Pair) -> None:
    sender, receiver = pair.backends
    _, kept = (b.publish_ids(*pair.given(rank)[1:]) for rank, b in enumerate(pair.backends))
    found = receiver.sort()
    receiver.publish_rows(pair.given(RECEIVER)[0], None)
    with pair.holding():
        sender.publish_rows(pair.given(SENDER)[0], None)
    with pair.holding():
        receiver.fan_out(kept, found, None)


def few(pair: Pair) -> None:
    sender, receiver = pair.backends
    kept = receiver.publish(*pair.given(RECEIVER), None)
    with pair.holding():
        sender.publish(*pair.given(SENDER), None)
    with pair.holding():
        receiver.receive(kept, None)


def gradients(pair: Pair) -> None:
    sender, receiver = pair.backends
    pair.ranks.dispatch(pair.problem)
    receiver.publish_again(pair.given(RECEIVER)[0])
    with pair.holding():
        sender.publish_again(pair.given(SENDER)[0])
    with pair.holding():
        receiver.receive_again(pair.given(RECEIVER)[0], pair.ranks.plans[RECEIVER])


def send_back(pair: Pair, rank: int) -> None:
    plan = pair.ranks.plans[rank]
    made = ep_virtual.expert_outputs(pair.problem, pair.ranks, rank)[rank]
    generator = torch.Generator().manual_seed(rank)
    pair.backends[rank].send_back(made, plan, plan.prob, torch.randn(plan.prob.shape, generator=generator))


def finish(pair: Pair, rank: int) -> None:
    pair.backends[rank].finish(pair.ranks.plans[rank], with_slots=True, weighted=True)


def sums(pair: Pair) -> None:
    pair.ranks.dispatch(pair.problem)
    send_back(pair, RECEIVER)
    with pair.holding():
        send_back(pair, SENDER)
    with pair.holding():
        finish(pair, RECEIVER)


def next_sums(pair: Pair) -> None:
    """A rank stores over what another has read: with many slots, of whose sums there is one half."""
    pair.ranks.dispatch(pair.problem)
    for rank in range(2):
        send_back(pair, rank)
    finish(pair, RECEIVER)
    with pair.holding():
        finish(pair, SENDER)
    with pair.holding():
        send_back(pair, RECEIVER)


def exchanging(
    steps: Steps, few_slots: int, hidden: int = 256, tokens: int = 4, **options: Any
) -> Callable[[EmulatedDriver], object]:
    """The two launches that `steps` holds back, of as many programs each as on a device.

    tokens: of the sender; by default two for a program.
    """

    def call(device: EmulatedDriver) -> object:
        # 2 and 8 for the two problems: `publish` has one program, whose loops repeat, and three, which take tickets.
        pair = Pair(device.num_sms(0) ** 2 // 2, few_slots, hidden, tokens, **options)
        states = pair.ranks.states
        with pytest.MonkeyPatch.context() as patch:
            ep_emulated.emulate(patch, [s.buffer for s in states], pair.kernel)
            steps(pair)
        (sender, (sends, *_), sent), (receiver, (receives, *_), received) = pair.held
        text = together(sender.asm["ptx"], receiver.asm["ptx"])
        emulator = Emulator(text, name="pair.ptx", strict=False, ignore=COMPILERS_OWN)
        values = [sends, *values_of(sender, sent), receives, *values_of(receiver, received)]
        tensors = [x for x in (*sent, *received) if isinstance(x, torch.Tensor)] + [s.buffer for s in states]
        shared = max(sender.metadata.shared, receiver.metadata.shared)
        threads = 32 * receiver.metadata.num_warps
        compiler = f"Triton {receiver.metadata.triton_version}"
        kernel = CompiledKernel(text.encode(), "ptx", "pair", shared, threads, 0, 0, 0, 0, compiler)
        shape = LaunchShape((max(sends, receives), 2), threads, 1)  # type: ignore[arg-type]
        return device.prepare(emulator, kernel, shape, [(value, 8) for value in values], tensors)()

    return call


def values_of(kernel: Any, arguments: list[Any]) -> list[Any]:
    """One for every parameter: addresses and numbers, and 0 for the scratch memory that no kernel here uses."""
    values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    return values + [0] * (len(parts_of(kernel.asm["ptx"])[0]) - len(values))


def parts_of(ptx: str) -> tuple[list[str], str, str]:
    """(parameters, threads, body with its braces) of a module of one entry, as Triton writes it."""
    found = re.search(r"\.entry \w+\((.*?)\)\s*(\.reqntid [\d, ]+)\n(\{.*?\n\})\s*\n\s*(?:\.file|\Z)", ptx, re.DOTALL)
    assert found is not None
    return [line.strip() for line in found[1].split(",")], found[2].strip(), found[3]


def together(first: str, second: str) -> str:
    """PTX of the entry `pair`, which is the first module's entry where %ctaid.y is 0, else the second's; it takes the
    parameters of both, each after how many CTAs it has along x, 64 bits. The two are of as many threads."""
    files = [re.findall(r'^\s*\.file\s+\d+ ".*"$', text, re.MULTILINE) for text in (first, second)]
    second, *files[1] = (
        re.sub(r"(\.(?:file|loc)\s+)(\d+)", lambda m: f"{m[1]}{int(m[2]) + len(files[0])}", text)
        for text in (second, *files[1])
    )
    (takes, threads, sender), (also_takes, same_threads, receiver) = parts_of(first), parts_of(second)
    assert threads == same_threads
    head = re.findall(r"^\.(?:version|target|address_size|extern).*$", first, re.MULTILINE)
    sends, sender, receives, receiver = (
        re.sub(r"\w+_param_(?=\d)", f"{role}_param_", text).replace("%nctaid.x", "%programs")
        for role, texts in (("send", (",\n".join(takes), sender)), ("receive", (",\n".join(also_takes), receiver)))
        for text in texts
    )
    return "\n".join([
        *head, f".visible .entry pair(\n.param .u64 senders,\n{sends},\n.param .u64 receivers,\n{receives}\n)",
        threads, "{", ".reg .pred %receives, %idle;", ".reg .b32 %role, %place, %programs;",
        "mov.u32 %role, %ctaid.y;", "setp.ne.u32 %receives, %role, 0;", "mov.u32 %place, %ctaid.x;",
        "ld.param.u32 %programs, [senders];", "@%receives ld.param.u32 %programs, [receivers];",
        "setp.ge.u32 %idle, %place, %programs;", "@%idle ret;", "@%receives bra $RECEIVE;",
        sender, "$RECEIVE:", receiver, "}", *files[0], *files[1], "",
    ])  # fmt: skip


# sender, receiver -> architecture, the call
EXCHANGES: dict[str, tuple[str, Callable[[EmulatedDriver], object]]] = {
    "publish_ids, localize": ("sm_90a", exchanging(ids, 0, tokens=400)),  # two pieces of ids for a program
    "publish, fan_out": ("sm_90a", exchanging(rows, 0, 2304)),  # scales for two pieces of a program
    "publish, receive_few": ("sm_90a", exchanging(few, 1024)),
    "publish, fan_out_gradients": (
        "sm_90a", exchanging(gradients, 1024, fmt=torch.bfloat16, gradient_format=FP8_BLOCK),
    ),
    "fan_in, finish": ("sm_90a", exchanging(sums, 1024)),
    "finish, fan_in": ("sm_90a", exchanging(next_sums, 0)),  # of few slots none waits for the other
}  # fmt: skip
