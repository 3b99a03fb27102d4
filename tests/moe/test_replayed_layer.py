"""Repeated calls of the layer: the launches that a first call would make, whatever changed between the calls.

Everything up to the launches happens as on a GPU (`support.hopper`). What is compared is every byte that the driver is
given: of a replayed call, and of the same call made from nothing. Where the two differ they must differ as addresses do,
by one distance for each tensor that the call makes, and no two of these tensors may lie on each other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from padless import FP8_BLOCK, MXFP4, MXFP8, BlockScaledTensor
from padless.kernels import launch, remembered, replay
from padless.kernels.sm90_moe_decode import host
from padless.layouts import plain_scale
from padless.moe import Router, moe
from padless.runtime.driver import CudaLaunch
from support import hopper
from support.hopper import Gpu, Launched
from support.moe_layer_problem import Layer, draw_layer

GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
LAYERS: dict[str, dict[str, Any]] = {
    "one token": {"pair": (FP8_BLOCK, None), "tokens": 1, "top_k": 1},
    "fp8": {"pair": (FP8_BLOCK, None), "shared": True},
    "one launch": {"pair": (FP8_BLOCK, None), "tokens": 4, "h": 256, "i": 256},
    "many slots": {"pair": (FP8_BLOCK, None), "tokens": 400, "top_k": 12},
    "mxfp8": {"pair": (MXFP8, None), "top_k": 4},
    "mxfp4": {"pair": (MXFP4, None), "gate_up": "interleaved", "h": 512, "i": 512},
    "gpt-oss": {"pair": (MXFP4, torch.bfloat16), "bias": True, "h": 512, "i": 512, **GPT_OSS},
    "geglu": {"pair": (FP8_BLOCK, None), "activation": "geglu"},
}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with hopper.pretended() as found:
        yield found


def layer_of(name: str, seed: int = 0) -> Layer:
    layer = draw_layer(seed=seed, **LAYERS[name])
    if layer.options.get("bias2") is not None:  # other types are converted at every call, which is not replayed
        layer.options["bias2"] = layer.options["bias2"].float()
    return layer


def with_other_tensors(layer: Layer, seed: int) -> Layer:
    """Other tokens, ids, weights and shared rows, in other memory; the same experts."""
    found = layer_of_tokens(layer, seed)
    shared = layer.options.get("shared")
    options = layer.options if shared is None else layer.options | {"shared": torch.randn(shared.shape).bfloat16()}
    return replace(found, options=options)


def layer_of_tokens(layer: Layer, seed: int) -> Layer:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(layer.x.shape, generator=g).to(layer.x.dtype)
    ids = torch.randint(0, 5, layer.ids.shape, generator=g).to(layer.ids.dtype)
    return replace(layer, x=x, ids=ids, weights=torch.rand(layer.weights.shape, generator=g).to(layer.weights.dtype))


# --- calls, and what they launch -------------------------------------------------------------------------


@dataclass
class Call:
    """What a call launched, and the memory of the tensors that it made, the result's among it."""

    launched: list[Launched]
    made: list[tuple[int, int]]
    result: torch.Tensor


def called(gpu: Gpu, work: Callable[[], torch.Tensor]) -> Call:
    made: list[tuple[int, int]] = []
    kept: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        t = empty(*arguments, **options)
        made.append((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()))
        kept.append(t)
        return t

    gpu.launched = []
    torch.empty = noted  # type: ignore[assignment]
    try:
        result = work()
    finally:
        torch.empty = empty  # type: ignore[assignment]
    return Call(gpu.launched, made, result)


def from_nothing(gpu: Gpu, work: Callable[[], torch.Tensor]) -> Call:
    """The call with nothing remembered but Triton's compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "_KNOWN", {})
        patch.setattr(replay, "_REPLAYS", {})
        return called(gpu, work)


def words(argument: bytes) -> list[int]:
    return [int.from_bytes(argument[i : i + 8], "little") for i in range(0, len(argument), 8)]


def differences(first: Call, again: Call, is_counter: Callable[[Launched, int], bool]) -> list[str]:
    """How ``again`` launches something else than ``first``."""
    found: list[str] = []
    if len(first.launched) != len(again.launched):
        return [f"{len(again.launched)} launches and not {len(first.launched)}"]
    distances: dict[int, int] = {}  # by the tensor that the first call made

    def tensor_at(address: int) -> int | None:
        return next((i for i, (start, end) in enumerate(first.made) if start <= address < end), None)

    for number, (one, other) in enumerate(zip(first.launched, again.launched, strict=True)):
        names = ("kernel", "grid", "block", "shared_bytes", "stream", "attributes")
        found += [f"launch {number} has another {name}" for name in names if getattr(one, name) != getattr(other, name)]
        for at, (old, new) in enumerate(zip(one.arguments, other.arguments, strict=True)):
            if len(old) != len(new):
                return [*found, f"launch {number}: argument {at} has another size"]
            if is_counter(one, at):
                continue
            for word, (a, b) in enumerate(zip(words(old), words(new), strict=True)):
                made = tensor_at(a)
                if made is None and a != b:
                    found.append(f"launch {number}: argument {at}, word {word} is {b:#x} and not {a:#x}")
                elif made is not None and distances.setdefault(made, b - a) != b - a:
                    found.append(f"launch {number}: argument {at}, word {word} is in another place than before")
    there = sorted((first.made[i][0] + d, first.made[i][1] + d, i) for i, d in distances.items())
    for (_, end, one_made), (start, _, other_made) in pairwise(there):
        if start < end:
            found.append(f"tensors {one_made} and {other_made} lie on each other")
    for start, end, i in there:
        if not any(a <= start and end <= b for a, b in again.made):
            found.append(f"tensor {i} lies in no memory of the call")
    result = tensor_at(first.result.data_ptr())
    if result is None or first.result.data_ptr() + distances.get(result, 0) != again.result.data_ptr():
        found.append("the result is another tensor")
    if facts(first.result) != facts(again.result):
        found.append(f"the result is {facts(again.result)} and not {facts(first.result)}")
    return found


def facts(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.requires_grad, t.is_inference()


def counters_of(gpu: Gpu) -> Callable[[Launched, int], bool]:
    return lambda one, at: (one.kernel, at) in gpu.counters


def compared(gpu: Gpu, work: Callable[[], torch.Tensor]) -> list[str]:
    """How the next call of what may be remembered differs from one from nothing; counters are looked at apart."""
    again = called(gpu, work)
    return differences(from_nothing(gpu, work), again, counters_of(gpu))


def is_replayed(gpu: Gpu, work: Callable[[], torch.Tensor]) -> bool:
    """Whether a call makes its result and one more tensor."""
    return len(called(gpu, work).made) == 2


# --- the same launches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_replayed_calls_launch_what_first_calls_do(gpu: Gpu, name: str) -> None:
    layer = layer_of(name)
    for seed in range(2):
        with_other_tensors(layer, seed).run(moe)
    by_triton = gpu.by_triton
    for seed in range(5):
        other = with_other_tensors(layer, seed)
        again = called(gpu, lambda other=other: other.run(moe))
        assert len(again.made) == 2, "it was replayed"
        first = from_nothing(gpu, lambda other=other: other.run(moe))
        assert differences(first, again, counters_of(gpu)) == []
        assert len(first.launched) >= (1 if name == "one launch" else 4)
    assert gpu.by_triton == by_triton


def test_counters_are_those_of_the_written_addresses(gpu: Gpu) -> None:
    """As `tile_counter` has it: of a configuration, a device and an address; in this call's memory."""
    layer = layer_of("fp8")
    for _ in range(2):
        layer.run(moe)
    seen: dict[tuple[int, int], dict[int, int]] = {}
    keep = []
    for _ in range(6):
        again = called(gpu, lambda: layer.run(moe))
        keep.append(torch.empty(again.made[0][1] - again.made[0][0] - 64 * len(keep)))  # the next one lies elsewhere
        for one in again.launched:
            for kernel, at in gpu.counters:
                if kernel == one.kernel:
                    number = int.from_bytes(one.arguments[at], "little", signed=True)
                    seen.setdefault((kernel, at), {})[number] = again.made[0][0]
    assert len(seen) == 2
    for (kernel, _), numbers in seen.items():
        config = next(key for key, handle in hopper.HANDLES.items() if handle == kernel)
        assert config is not None
        assert all(number >= 0 for number in numbers)
        assert len(set(numbers.values())) == len(numbers), "a counter for each address"
        taken = [dict(map(reversed, found.items())) for found in launch._COUNTERS.values()]
        for number, start in numbers.items():
            assert any(start <= found.get(number, -1) < start + (1 << 24) for found in taken)


# --- what changes between calls --------------------------------------------------------------------------


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, so many elements behind a multiple of 256 bytes."""
    memory = torch.empty(t.numel() + 512, dtype=t.dtype)
    start = -memory.data_ptr() % 256 // t.element_size() + elements
    there = memory[start : start + t.numel()].view(t.shape)
    return there.copy_(t)


def wide(t: torch.Tensor) -> torch.Tensor:
    memory = torch.empty((t.shape[0], t.shape[1] + 32), dtype=t.dtype)
    return memory[:, : t.shape[1]].copy_(t)


def moved_weights(w: BlockScaledTensor, part: str) -> BlockScaledTensor:
    return replace(w, **{part: getattr(w, part).view(torch.uint8).clone().view(getattr(w, part).dtype)})


def in_place(layer: Layer) -> Layer:
    """The same objects over other memory."""
    layer.w13.data.set_(layer.w13.data.view(torch.uint8).clone().view(layer.w13.data.dtype))
    return layer


CHANGES: dict[str, Callable[[Layer], Layer]] = {
    "nothing": lambda a: a,
    "other tokens": lambda a: with_other_tensors(a, 9),
    "fewer tokens": lambda a: replace(
        a.only(torch.arange(4)), options=a.options | {"shared": a.options["shared"][:4].clone()}
    ),
    "no token": lambda a: replace(a.only(torch.arange(0)), options=a.options | {"shared": a.options["shared"][:0]}),
    "x between multiples of 16 bytes": lambda a: replace(a, x=shifted(a.x, 4)),
    "x at a multiple of 16 bytes": lambda a: replace(a, x=shifted(a.x, 8)),
    "x with wide rows": lambda a: replace(a, x=wide(a.x)),
    "x in float32": lambda a: replace(a, x=a.x.float()),
    "int32 ids": lambda a: replace(a, ids=a.ids.int()),
    "bfloat16 weights": lambda a: replace(a, weights=a.weights.bfloat16()),
    "weights at an odd address": lambda a: replace(a, weights=shifted(a.weights, 1)),
    "no shared rows": lambda a: replace(a, options=a.options | {"shared": None}),
    "shared rows are x": lambda a: replace(a, options=a.options | {"shared": a.x}),
    "shared rows in float32": lambda a: replace(a, options=a.options | {"shared": a.options["shared"].float()}),
    "weights w13 elsewhere": lambda a: replace(a, w13=moved_weights(a.w13, "data")),
    "scales of w13 elsewhere": lambda a: replace(a, w13=moved_weights(a.w13, "scale")),
    "weights w2 elsewhere": lambda a: replace(a, w2=moved_weights(a.w2, "data")),
    "scales of w2 elsewhere": lambda a: replace(a, w2=moved_weights(a.w2, "scale")),
    "other memory in place": in_place,
    "the first experts alone": lambda a: replace(a, w13=a.w13[:3], w2=a.w2[:3]),
    "an interleaved gate": lambda a: replace(a, options=a.options | {"gate_up": "interleaved"}),
    "a limit": lambda a: replace(a, options=a.options | {"limit": 3.0}),
    "an offset": lambda a: replace(a, options=a.options | {"up_offset": 1.0}),
    "float32 out": lambda a: replace(a, options=a.options | {"out_dtype": torch.float32}),
    "bias": lambda a: replace(a, options=a.options | {"bias2": torch.randn(5, 160)}),
    "number of experts": lambda a: replace(a, options=a.options | {"num_experts": 5}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changed_the_launches_are_those_of_a_first_call(gpu: Gpu, change: str) -> None:
    """A call after replayed ones, twice more so that it is replayed itself, and the old one again."""
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    assert is_replayed(gpu, lambda: layer.run(moe))
    other = CHANGES[change](layer)
    if change == "no token":
        assert other.run(moe).shape == (0, 160)
        return
    for _ in range(4):
        assert compared(gpu, lambda: other.run(moe)) == []
    assert compared(gpu, lambda: layer.run(moe)) == []


def by_logits(layer: Layer, seed: int, k: int = 3) -> Layer:
    """The layer with a router's logits in the place of ids and weights."""
    tokens, experts = layer.x.shape[0], layer.w13.data.shape[0]
    logits, bias = torch.randn(tokens, experts), torch.randn(experts)
    rule = Router(k, "sigmoid", scaling_factor=2.5)
    options = layer.options | {"router_logits": logits, "router": rule, "correction_bias": bias}
    return replace(layer_of_tokens(layer, seed), ids=None, weights=None, options=options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "launches"), [("one launch", 1), ("fp8", 5)])
def test_layers_that_are_given_logits(gpu: Gpu, name: str, launches: int) -> None:
    """They are replayed from logits to output, whichever logits come."""
    plain = layer_of(name)
    layer = by_logits(plain, 1)
    for _ in range(3):
        layer.run(moe)
    assert is_replayed(gpu, lambda: layer.run(moe))
    assert len(called(gpu, lambda: layer.run(moe)).launched) == launches
    for other in (by_logits(plain, 2), by_logits(plain, 3), by_logits(plain, 2, k=2), plain, layer):
        for _ in range(3):
            assert compared(gpu, lambda other=other: other.run(moe)) == []


def test_another_stream(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for stream in (0x5000, 0x5000, 0x5000, 0x9000, 0x5000, 0x9000):
        gpu.stream = stream
        assert compared(gpu, lambda: layer.run(moe)) == []
        assert {one.stream for one in gpu.launched} == {stream}


def test_another_gpu(gpu: Gpu) -> None:
    """The same addresses on a second GPU: kernels that were loaded there, on its stream."""
    layer = layer_of("fp8")
    kernels: dict[int, set[int]] = {}
    for index in (0, 0, 0, 1, 1, 1, 1, 0):
        gpu.index = index
        assert compared(gpu, lambda: layer.run(moe)) == []
        assert {one.stream for one in gpu.launched} == {hopper.STREAM + index}
        kernels.setdefault(index, set()).update(one.kernel for one in gpu.launched)
    assert not kernels[0] & kernels[1]


def test_inference_mode_and_autocast(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cuda", torch.float16)):
        with mode:
            assert is_replayed(gpu, lambda: layer.run(moe))
            assert compared(gpu, lambda: layer.run(moe)) == []


@pytest.mark.parametrize("which", ["x", "weights", "shared"])
def test_what_requires_grad_is_no_repeated_call(gpu: Gpu, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    t = layer.options["shared"] if which == "shared" else getattr(layer, which)
    t.requires_grad_()
    with torch.no_grad():
        assert is_replayed(gpu, lambda: layer.run(moe))
    monkeypatch.setattr(replay, "known", lambda facts: None if facts is None else pytest.fail("looked up"))
    out = layer.run(moe)
    assert out.requires_grad


def test_a_weight_that_requires_grad_is_refused(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    layer.w13.scale.requires_grad_()
    with pytest.raises(ValueError, match=r"w13\.scale requires grad"):
        layer.run(moe)


def test_modes_and_transforms_see_every_call(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    with replay._Watch() as watch:
        layer.run(moe)
    assert len(watch.made) > 2
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda x: layer.run(moe).sum() * x)(torch.ones(2))


def test_what_is_refused_stays_refused(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    wrong: list[tuple[str, Layer]] = [
        ("activation", replace(layer, options=layer.options | {"activation": ["swiglu"]})),
        ("x must", replace(layer, x=None)),  # type: ignore[arg-type]
        ("top_k_index", replace(layer, ids=layer.ids[:3])),
        ("num_experts", replace(layer, options=layer.options | {"num_experts": 4})),
        ("w13", replace(layer, w13=layer.w13.data)),  # type: ignore[arg-type]
    ]
    for message, other in wrong:
        for _ in range(3):
            with pytest.raises(ValueError, match=message):
                other.run(moe)
    assert is_replayed(gpu, lambda: layer.run(moe))


def test_nothing_is_recorded_while_a_graph_is_captured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("fp8")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(4):
        assert not is_replayed(gpu, lambda: layer.run(moe))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer.run(moe)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_replayed(gpu, lambda: layer.run(moe)), "launches are captured as others are"


def with_plain_scales(layer: Any) -> Any:
    """A layer whose FP4 weights have scales that no kernel reads in place."""
    plain = (BlockScaledTensor(w.data, plain_scale(w).contiguous(), w.format) for w in (layer.w13, layer.w2))
    return replace(layer, **dict(zip(("w13", "w2"), plain, strict=True)))


COPIED: dict[str, Callable[[Layer], Layer]] = {
    "x by columns": lambda a: replace(a, x=a.x.t().contiguous().t()),
    "ids by columns": lambda a: replace(a, ids=a.ids.t().contiguous().t()),
    "bfloat16 bias": lambda a: replace(a, options=a.options | {"bias2": torch.randn(5, 160).bfloat16()}),
    "scales that are padded": lambda a: with_plain_scales(draw_layer((MXFP4, torch.bfloat16))),
}


@pytest.mark.parametrize("change", COPIED)
def test_calls_that_copy_are_made_as_they_were(gpu: Gpu, change: str) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    other = COPIED[change](layer)
    for _ in range(4):
        other.run(moe)
        assert not is_replayed(gpu, lambda: other.run(moe))
    assert is_replayed(gpu, lambda: layer.run(moe))


def test_threads_share_it(gpu: Gpu) -> None:
    """Launches of a call are of its own tensors, whoever else calls at the same time."""
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    known = [v for v in replay._REPLAYS.values() if v is not None]
    assert len(known) == 1
    wrong: list[str] = []
    seen: dict[int, list[Launched]] = {}
    gpu.launched_by = lambda one: seen.setdefault(threading.get_ident(), []).append(one)

    def work(seed: int) -> None:
        own = with_other_tensors(layer, seed)
        mine = seen.setdefault(threading.get_ident(), [])
        inputs = (own.x, own.ids, own.weights, own.options["shared"])
        for _ in range(60):
            mine.clear()
            out = own.run(moe)
            given = [word for one in mine for argument in one.arguments for word in words(argument)]
            if len(mine) != 4 or any(t.data_ptr() not in given for t in (*inputs, out)):
                wrong.append(f"thread {seed}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert 1 <= len(known[0]._idle) <= 6


def test_no_tensor_is_kept_alive(gpu: Gpu) -> None:
    import gc
    import weakref

    layer = layer_of("fp8")
    for _ in range(4):
        out = layer.run(moe)
    watched = [weakref.ref(t) for t in (layer.x, layer.ids, layer.weights, layer.w13.data, layer.w2.scale, out)]
    del layer, out
    gc.collect()
    assert [watch() for watch in watched] == [None] * len(watched)


# --- planted: the comparison sees what is wrong ----------------------------------------------------------


def test_a_word_that_is_not_patched_is_seen(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    kept = [layer.run(moe) for _ in range(3)]  # so that results lie elsewhere than those that were recorded
    (known,) = (v for v in replay._REPLAYS.values() if v is not None)
    patches = list(known.patches)
    for i in range(len(patches)):
        known.patches, known._idle = patches[:i] + patches[i + 1 :], []
        other = with_other_tensors(layer, 100 + i)
        kept.append(other.run(moe))
        assert compared(gpu, lambda other=other: other.run(moe)) != [], patches[i]
    known.patches, known._idle = patches, []
    assert compared(gpu, lambda: layer.run(moe)) == []


@pytest.mark.parametrize("fact", ["alignment", "strides", "dtype", "device", "address of weights", "shape", "options"])
def test_a_fact_that_is_forgotten_is_seen(gpu: Gpu, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, place = replay.facts_of, {"alignment": 0, "shape": 1, "strides": 2, "dtype": 3, "device": 4}

    def forgetful(options: Any, moving: Any, pinned: Any) -> Any:
        found = right(() if fact == "options" else options, moving, pinned)
        if found is None or fact == "options":
            return found
        return tuple(
            one
            if not isinstance(one, tuple) or (fact == "address of weights" and i >= len(found) - len(moving))
            else one[1:]
            if fact == "address of weights"
            else one[: place[fact]] + one[place[fact] + 1 :]
            for i, one in enumerate(found)
        )

    monkeypatch.setattr(replay, "facts_of", forgetful)
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    found = []
    for change in ("x between multiples of 16 bytes", "x with wide rows", "int32 ids", "fewer tokens",
                   "weights w2 elsewhere", "float32 out", "an offset"):  # fmt: skip
        other = CHANGES[change](layer)
        found += compared(gpu, lambda other=other: other.run(moe))
    gpu.index = 1
    found += compared(gpu, lambda: layer.run(moe))
    assert found != []


def test_a_launch_of_tritons_own_is_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.quantization.triton import launches

    monkeypatch.setattr(launches.Description, "of", lambda *arguments: None)
    layer = layer_of("fp8")
    for _ in range(4):
        layer.run(moe)
    assert not is_replayed(gpu, lambda: layer.run(moe))
    assert gpu.by_triton >= 10


def test_words_that_do_not_follow_an_address_are_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor maps that a driver would encode otherwise."""
    encode = gpu.encode

    def scrambled(me: Any, spec: Any) -> bytes:
        right = encode(me, spec)
        return (int.from_bytes(right[:8], "little") ^ 0x5A5A00).to_bytes(8, "little") + right[8:]

    monkeypatch.setattr(gpu, "encode", scrambled)
    layer = layer_of("fp8")
    for _ in range(4):
        layer.run(moe)
    assert not is_replayed(gpu, lambda: layer.run(moe))


def test_a_kernel_that_depends_on_the_address_is_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CudaLaunch.kernel.fget  # type: ignore[attr-defined]
    where = property(lambda launch: (*right(launch), launch.words[0] // 4096 % 7))
    monkeypatch.setattr(CudaLaunch, "kernel", where)
    layer = layer_of("fp8")
    for _ in range(4):
        layer.run(moe)
    assert not is_replayed(gpu, lambda: layer.run(moe))


def test_a_layer_in_one_launch_whose_scratch_has_run_out(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay cannot be made for a new result: it is made of several launches then, and recorded as those."""
    layer = layer_of("one launch")
    kept = [layer.run(moe) for _ in range(3)]
    one = called(gpu, lambda: layer.run(moe))
    assert [len(one.launched), len(one.made)] == [1, 2]
    monkeypatch.setattr(host, "_MOST_CHUNKS", 0)
    monkeypatch.setattr(host, "_CHUNKS", {})
    monkeypatch.setattr(host, "_USED", {})
    monkeypatch.setattr(host, "_SCRATCH", {})
    monkeypatch.setattr(host, "_FULL", set())
    kept += [layer.run(moe) for _ in range(4)]
    several = called(gpu, lambda: layer.run(moe))
    assert [len(several.launched), len(several.made)] == [4, 2]
