"""Planted faults of repeated calls of the layer: the comparison of `support.replayed_calls` sees what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from padless.kernels import replay
from padless.kernels.sm90_moe_decode import host
from padless.moe import moe
from padless.runtime.driver import CudaLaunch
from support.hopper import Gpu
from support.replayed_calls import CHANGES, called, compared, is_replayed, layer_of, with_other_tensors


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


def is_ever_replayed(gpu: Gpu) -> bool:
    """Whether the last of five calls of a layer is."""
    layer = layer_of("fp8")
    for _ in range(4):
        layer.run(moe)
    return is_replayed(gpu, lambda: layer.run(moe))


def test_without_a_fault_calls_are_replayed(gpu: Gpu) -> None:
    assert is_ever_replayed(gpu)


def test_a_launch_of_tritons_own_is_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.quantization.triton import launches

    monkeypatch.setattr(launches.Description, "of", lambda *arguments: None)
    assert not is_ever_replayed(gpu)
    assert gpu.by_triton >= 10


def test_words_that_do_not_follow_an_address_are_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor maps that a driver would encode otherwise."""
    encode = gpu.encode

    def scrambled(me: Any, spec: Any) -> bytes:
        right = encode(me, spec)
        return (int.from_bytes(right[:8], "little") ^ 0x5A5A00).to_bytes(8, "little") + right[8:]

    monkeypatch.setattr(gpu, "encode", scrambled)
    assert not is_ever_replayed(gpu)


def test_a_kernel_that_depends_on_the_address_is_not_replayed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CudaLaunch.kernel.fget  # type: ignore[attr-defined]
    where = property(lambda launch: (*right(launch), launch.words[0] // 4096 % 7))
    monkeypatch.setattr(CudaLaunch, "kernel", where)
    assert not is_ever_replayed(gpu)


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
