"""Launches remembered by what they depend on: every fact tells two calls apart, and old ones make room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless import MXFP8, NVFP4, BlockScaledTensor
from padless.kernels import remembered, replay
from padless.kernels.remembered import Prepared, facts_of, known, launch_remembered, remember
from padless.runtime import driver


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tensors in host memory say that they are on a GPU."""
    monkeypatch.setattr(remembered, "_KNOWN", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


def launch(stream: int) -> None:
    """Stands in for a packed launch."""


def remember_launch(facts: Any) -> None:
    assert facts is not None
    remember(facts, launch)


def test_a_launch_is_found_by_the_same_facts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(64)
    a, out = memory[:16].view(4, 4), memory[32:48].view(4, 4)
    remember_launch(facts_of(("call", None), out, a))
    assert known(facts_of(("call", None), memory[32:48].view(4, 4), a)) is launch
    others: list[tuple[Any, ...]] = [
        (("call", 1), out, a),
        (("call", None), a, out),
        (("call", None), out, a.t()),
        (("call", None), out, memory[:16].view(2, 8)),
        (("call", None), out, a.view(torch.int32)),
        (("call", None), out, memory[1:17].view(4, 4)),
        (("call", None), out, a, a),
        (("call", None), out, None),
        (("call", None), out, torch.empty(4, 4, device="meta")),
    ]
    for settings, *tensors in others:
        assert known(facts_of(settings, *tensors)) is None
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 1)
    assert known(facts_of(("call", None), out, a)) is None


def scaled(**changes: Any) -> BlockScaledTensor:
    codes = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return BlockScaledTensor(**{"data": codes, "scale": scale, "format": MXFP8} | changes)


def test_every_part_of_a_scaled_tensor_is_a_fact() -> None:
    t = scaled()
    remember_launch(facts_of((), t))
    assert known(facts_of((), BlockScaledTensor(t.data, t.scale, MXFP8))) is launch
    assert known(facts_of((), replace(t, data=t.data.view(torch.uint8).clone().view(t.data.dtype)))) is None
    assert known(facts_of((), replace(t, scale=t.scale.view(torch.uint8).clone().view(t.scale.dtype)))) is None
    object.__setattr__(t, "scale_layout", "blocked")
    assert known(facts_of((), t)) is None
    codes = torch.zeros(4, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scale = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for shared in (None, torch.ones(1), torch.ones(1)):
        other = BlockScaledTensor(codes, scale, NVFP4, shared)
        assert known(facts_of((), other)) is None
        remember_launch(facts_of((), other))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_remembered() -> None:
    t = torch.zeros(2, 2)
    own = replace(MXFP8, max_value=1.0)  # a format of the same name
    for operand in (
        3, [t], "x", t.to_sparse(), torch.nested.nested_tensor([t, t]), torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(t), scaled(format=own), torch._neg_view(torch.ones(2)),
    ):  # fmt: skip
        assert facts_of((), operand) is None
    with torch.no_grad():
        assert facts_of((), torch.nn.Parameter(t)) is not None
    assert known(None) is None


def test_what_is_on_the_cpu_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert facts_of((), torch.zeros(2)) is None


def test_scales_of_other_groups_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    offs = torch.tensor([1, 4], dtype=torch.int32)
    scale = torch.zeros(2 * 512, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    t = scaled(scale=scale, scale_layout="blocked_groups", offs=offs)
    assert facts_of((), t, offs, offs=offs) is not None
    assert facts_of((), t, offs) is None
    assert facts_of((), t, offs.clone(), offs=offs.clone()) is None
    offs.add_(0)
    assert facts_of((), t, offs, offs=offs) is None
    object.__setattr__(t, "row_groups", None)  # as a compiled program makes it: the groups are still to be looked at
    assert facts_of((), t, offs, offs=offs) is None


def test_what_was_packed_with_copies_is_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "current_stream", lambda index: 5)
    t, streams, packed = torch.zeros(2), [], []

    def prepare(*copies: torch.Tensor) -> Prepared:
        packed.append(copies)
        return Prepared(streams.append, copies)

    for _ in range(3):
        launch_remembered(facts_of(("kept",), t), prepare, t)
    assert (len(packed), streams) == (1, [5] * 3)
    for _ in range(2):
        launch_remembered(facts_of(("copied",), t), lambda: prepare(t), t)
        launch_remembered(None, prepare, t)
        launch_remembered(facts_of(("nothing",), t), lambda: None, t)
    assert (len(packed), streams) == (5, [5] * 7)


def test_old_launches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 2)
    for number in range(3):
        remember((number,), launch)
    assert known((0,)) is None
    assert known((2,)) is launch
    remembered.forget()
    assert known((2,)) is None


@pytest.mark.parametrize("error", [LookupError("all scratch is taken"), RuntimeError("out of memory")], ids=repr)
def test_a_call_that_cannot_be_recorded_is_made_as_it_was(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call with its facts is the one that is recorded; scratch may have come to an end by then."""

    def without_room(*arguments: object) -> None:
        tried.append(arguments)
        raise error

    tried: list[object] = []
    monkeypatch.setattr(replay, "_REPLAYS", {})
    monkeypatch.setattr(replay, "_replay_of", without_room)
    monkeypatch.setattr(replay, "is_capturing", lambda device: False)
    x = torch.randn(3)
    for turn in range(4):
        assert torch.equal(replay.run(("a call", 1), lambda x: x + 1, (x,)), x + 1), turn
    assert len(tried) == 1
    assert replay.known(("a call", 1)) is None
