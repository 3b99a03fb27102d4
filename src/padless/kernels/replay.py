"""Calls of several launches, recorded once and then launched again for other tensors with their facts.

A call like the layer's checks its arguments, chooses kernels, makes a dozen tensors and packs launches, which takes the
host longer than the launches themselves. All of it follows from facts: shapes, strides, dtypes, alignments, options,
and addresses of the weights. What is left is where the other tensors lie. Which words of the launches' arguments say so
is measured: the call is packed again, launching nothing, for tensors elsewhere, and every word that changed must have
changed by as much as one tensor moved. A third packing must then be what is patched. Where it is not, and where a call
does something that is no launch and no empty tensor, it is not replayed.

No tensor is kept, and none is trusted to be what it was: facts are read at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from padless.formats import BlockScaledTensor, round_up
from padless.kernels import remembered
from padless.kernels.remembered import Facts
from padless.runtime import driver
from padless.runtime.devices import is_capturing
from padless.runtime.driver import ByAddress, CudaLaunch

Inputs = tuple[torch.Tensor | None, ...]

ALIGNMENT = 256  # bytes, of tensors that are made
_ALIKE = 16  # bytes: addresses of given tensors that are equal modulo this are alike to kernels and checks
_MOST_BYTES = 1 << 26  # of tensors: the device takes longer for more than the host for anything
_MASK = (1 << 64) - 1
_REPLAYS: dict[Facts, Replay | None] = {}  # None where a call is not replayed
_MOST = 2048  # apart from single launches, so that sizes that come once do not displace them
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


def facts_of(options: Facts, moving: Inputs, pinned: Sequence[BlockScaledTensor | torch.Tensor | None]) -> Facts | None:
    """All that a call depends on but for values and the addresses of ``moving``, whose alignment counts.

    None for what is not remembered (`remembered.facts_of`), and inside of modes and transforms of torch.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _is_watched())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return None
    there, facts = remembered.facts_of((), *moving), remembered.facts_of(options, *pinned)
    if there is None or facts is None:
        return None
    return *facts, *((one[0] % _ALIKE, *one[1:]) if one else None for one in there)


def _is_watched() -> bool:
    """Whether a mode sees calls of functions, and not just says where tensors are made, as torch.set_default_device."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def known(facts: Facts | None) -> Replay | None:
    """The replay of a call with these facts."""
    if facts is None:
        return None
    try:
        return _REPLAYS.get(facts)
    except TypeError:  # an option without a hash, which the call refuses
        return None


def forget(facts: Facts) -> None:
    """Forgets a replay that cannot be made any more, and that its call was seen: it may be of other launches now."""
    if _REPLAYS.pop(facts, None) is not None:
        remembered.remember(facts, None)


def run(facts: Facts | None, call: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    """call(*inputs) of facts that no replay is known of: the second time it is recorded."""
    if facts is None or facts in _REPLAYS:
        return call(*inputs)
    if remembered.known(facts) is None:
        remembered.remember(facts, "seen once")
        return call(*inputs)
    if any(
        t is not None and is_capturing(t.device) for t in inputs
    ):  # what is only packed would take memory of the graph
        return call(*inputs)
    with _Watch() as watch, driver.observed(watch.observe):
        result = call(*inputs)
    replay = None
    # _NotReplayableError, memory that there is not, and what an address was to choose (`_Copy.patch`) but has run out.
    with suppress(RuntimeError, LookupError):
        replay = _replay_of(call, inputs, watch, result)
    remembered.keep(_REPLAYS, _MOST, facts, replay)
    return result


class _NotReplayableError(RuntimeError):
    """A call that has to be made as it was."""


class _Watch(TorchDispatchMode):
    """Records the tensors and launches of a call. places: where empty tensors are to be, then nothing is launched."""

    def __init__(self, places: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.launches: list[CudaLaunch] = []
        self.made: list[torch.Tensor] = []
        self.reason: str | None = None
        self._places = places

    def observe(self, launch: CudaLaunch | None) -> bool:
        if launch is None:
            self._refuse("a launch of Triton's own")
        else:
            self.launches.append(launch)
        return self._places is None

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self._places is not None:
            raise _NotReplayableError(reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _EMPTY:
            if not func.is_view:
                self._refuse(str(func))
            return func(*args, **(kwargs or {}))
        if self._places is None:
            made = func(*args, **(kwargs or {}))
        elif len(self.made) == len(self._places):
            raise _NotReplayableError("more tensors are made the second time")
        else:
            made = self._places[len(self.made)]
            if list(made.shape) != list(args[0]) or made.dtype != (kwargs or {}).get("dtype", torch.float32):
                raise _NotReplayableError("other tensors are made the second time")
        self.made.append(made)
        return made


def _bytes_of(t: torch.Tensor) -> int:
    """From its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def _placed(like: torch.Tensor, memory: torch.Tensor, address: int) -> torch.Tensor:
    """A tensor with the facts of another one, at an address inside of ``memory``."""
    first = address - memory.data_ptr()
    there = memory[first : first + _bytes_of(like)].view(like.dtype)
    return there.as_strided(like.shape, like.stride())


def _elsewhere(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, int]]:
    """Tensors like these, every one moved by another distance; and the tensors' numbers by distance."""
    size = sum(_bytes_of(t) + (2 + len(tensors)) * ALIGNMENT for t in tensors)
    if size > _MOST_BYTES:
        raise _NotReplayableError(f"{size} bytes")
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=tensors[0].device)
    moved: list[torch.Tensor] = []
    distances: dict[int, int] = {}
    end = memory.data_ptr()
    for number, t in enumerate(tensors):
        address = round_up(end, ALIGNMENT) + t.data_ptr() % ALIGNMENT
        while (distance := (address - t.data_ptr()) & _MASK) in distances or distance % (1 << 32) == 0:
            address += ALIGNMENT
        distances[distance] = number
        moved.append(_placed(t, memory, address))
        end = address + _bytes_of(t)
    return moved, distances


@dataclass(frozen=True)
class _Base:
    """The place of a tensor: so many bytes behind the working memory (0), the result (1) or an input (2, ..)."""

    number: int
    behind: int


def _replay_of(call: Callable[..., torch.Tensor], inputs: Inputs, watch: _Watch, result: torch.Tensor) -> Replay:
    """The replay of a call that was made. Raises _NotReplayableError."""
    if watch.reason is not None or not watch.launches:
        raise _NotReplayableError(watch.reason)
    made = watch.made
    wanted = (result.data_ptr(), result.shape, result.dtype)
    is_result = [(t.data_ptr(), t.shape, t.dtype) == wanted and t.numel() > 0 for t in made]
    if sum(is_result) != 1 or not result.is_contiguous():
        raise _NotReplayableError("the result is none of the tensors that were made")
    bases, size = [], 0
    for t, is_it in zip(made, is_result, strict=True):
        bases.append(_Base(1, 0) if is_it else _Base(0, size))
        size += 0 if is_it else round_up(_bytes_of(t), ALIGNMENT)
    bases += [_Base(2 + i, 0) for i, t in enumerate(inputs) if t is not None]
    tensors = [*made, *(t for t in inputs if t is not None)]

    # Every tensor moved by another distance: a word that changed by a distance is an address in that tensor.
    moved, distances = _elsewhere(tensors)

    def base_of(before: int, after: int) -> _Base:
        number = distances.get((after - before) & _MASK)
        if number is None:
            raise _NotReplayableError("a word changed by no distance")
        return _Base(bases[number].number, bases[number].behind + before - tensors[number].data_ptr())

    patches: list[tuple[Place, _Base]] = []
    counters: list[tuple[Place, _Base, ByAddress]] = []
    elsewhere = _packed(call, inputs, moved, watch)
    for number, (one, other) in enumerate(zip(watch.launches, elsewhere, strict=True)):
        for word, counter in one.counters.items():
            counters.append(((number, 8 * word), base_of(counter.address, other.counters[word].address), counter))
        old, new = bytes(one.words), bytes(other.words)
        at = 0
        while at < len(old):  # an address begins where the lower half of one changed
            if old[at : at + 4] == new[at : at + 4] or at // 8 in one.counters:
                at += 4
                continue
            before, after = (int.from_bytes(each[at : at + 8], "little") for each in (old, new))
            patches.append(((number, at), base_of(before, after)))
            at += 8
    replay = Replay(result, size, watch.launches, patches, counters)

    # What is patched must be what is packed.
    memory, out = replay.new()
    start = round_up(memory.data_ptr(), ALIGNMENT)
    there = [
        out if base.number == 1 else _placed(t, memory, start + base.behind)
        for t, base in zip(made, bases[: len(made)], strict=True)
    ]
    given = iter(moved[len(made) :])
    copy = _Copy(replay)
    copy.patch(addresses_of(memory, out, [None if t is None else next(given) for t in inputs]))
    for one, other in zip(copy.launches, _packed(call, inputs, [*there, *moved[len(made) :]], watch), strict=True):
        if list(one.words) != list(other.words):
            raise _NotReplayableError("what is patched is not what is packed")
    return replay


def _packed(
    call: Callable[..., torch.Tensor], inputs: Inputs, tensors: list[torch.Tensor], watch: _Watch
) -> list[CudaLaunch]:
    """The launches that the call would make for tensors elsewhere: those that it makes, then the inputs."""
    num_made = len(watch.made)
    given = iter(tensors[num_made:])
    with _Watch(tensors[:num_made]) as again, driver.observed(again.observe):
        call(*(None if t is None else next(given) for t in inputs))
    if [launch.kernel for launch in watch.launches] != [launch.kernel for launch in again.launches]:
        raise _NotReplayableError("other kernels are launched elsewhere")
    return again.launches


def addresses_of(memory: torch.Tensor, out: torch.Tensor, inputs: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    """Addresses by the number of a base."""
    start = memory.data_ptr()
    return start + -start % ALIGNMENT, out.data_ptr(), *(0 if t is None else t.data_ptr() for t in inputs)


Place = tuple[int, int]  # launch, byte of its arguments


class Replay:
    """Launches of a call, to be made again.

    size: bytes of working memory, in which lies all that the call makes but for its result.
    patches: words that are addresses. counters: arguments that an address chooses, and these addresses.
    """

    def __init__(
        self,
        result: torch.Tensor,
        size: int,
        launches: list[CudaLaunch],
        patches: list[tuple[Place, _Base]],
        counters: list[tuple[Place, _Base, ByAddress]],
    ) -> None:
        self._shape, self._dtype, self._device = result.shape, result.dtype, result.device
        self._index = result.get_device()
        self._size = size + ALIGNMENT
        self.launches, self.patches, self.counters = launches, patches, counters
        self._idle: list[_Copy] = []  # each is used by one call at a time, of whatever thread

    def new(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Working memory, and a result."""
        memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return memory, torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def __call__(self, *inputs: torch.Tensor | None) -> torch.Tensor | None:
        """The result of the call for inputs with its facts, on torch's current stream.

        None where what the result's address is to choose has run out: the call has to be made as it was.
        """
        memory, out = self.new()
        addresses = addresses_of(memory, out, inputs)
        try:
            copy = self._idle.pop()
        except IndexError:
            copy = _Copy(self)
        if copy.addresses != addresses:
            try:
                copy.patch(addresses)
            except LookupError:
                return None
        stream = driver.current_stream(self._index)
        for launch in copy.launches:
            launch(stream)
        self._idle.append(copy)
        return out


class _Copy:
    """Launches with words of their own, for tensors at ``addresses``."""

    def __init__(self, replay: Replay) -> None:
        self.launches = [launch.copy() for launch in replay.launches]
        self.addresses: tuple[int, ...] = ()
        self._patches = [
            (self.launches[number].words_from(at % 8), at // 8, base.number, base.behind)
            for (number, at), base in replay.patches
        ]
        self._counters = [
            (self.launches[number].words, at // 8, base.number, base.behind, counter.elsewhere)
            for (number, at), base, counter in replay.counters
        ]

    def patch(self, addresses: tuple[int, ...]) -> None:
        """Makes the launches those of tensors at ``addresses``. Raises LookupError, and then they are of none."""
        self.addresses = ()
        for words, word, base, behind in self._patches:
            words[word] = addresses[base] + behind
        for words, word, base, behind, elsewhere in self._counters:
            words[word] = elsewhere(addresses[base] + behind)
        self.addresses = addresses
