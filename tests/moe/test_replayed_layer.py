"""Repeated calls of the layer: the launches that a first call would make, whatever changed between the calls.

Everything up to the launches happens as on a GPU; `support.replayed_calls` says what is compared.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

pytest.importorskip("triton")

from padless import MXFP4, BlockScaledTensor
from padless.kernels import launch, replay
from padless.layouts import plain_scale
from padless.moe import Router, moe
from support import hopper
from support.hopper import Gpu, Launched
from support.moe_layer_problem import Layer, draw_layer
from support.replayed_calls import (
    CHANGES,
    LAYERS,
    called,
    compared,
    counters_of,
    differences,
    from_nothing,
    is_replayed,
    layer_of,
    layer_of_tokens,
    with_other_tensors,
    words,
)

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


def test_modes_that_change_nothing(gpu: Gpu) -> None:
    layer = layer_of("fp8")
    for _ in range(3):
        layer.run(moe)
    for mode in (
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast("cuda", torch.float16),
        torch.device("meta"),  # as torch.set_default_device
    ):
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
    with torch.device("meta"), BaseTorchFunctionMode():
        assert not is_replayed(gpu, lambda: layer.run(moe))
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
