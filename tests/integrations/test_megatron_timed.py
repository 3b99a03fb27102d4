"""tools/time_megatron.py without a GPU: contenders agree on a small layer of Megatron-Core, and a wrong one shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.bench_records import StandInTimer
from support.megatron_layer import stand_ins

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core on PYTHONPATH")
SIZES = (4, 2, 128, 64)


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    path = Path(__file__).parents[2] / "tools" / "time_megatron.py"
    spec = importlib.util.spec_from_file_location("time_megatron", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    state = importlib.import_module("megatron.core.parallel_state")
    with pytest.MonkeyPatch.context() as patch:
        stand_ins(patch)
        if not hasattr(importlib.import_module("megatron.core.transformer.moe.experts"), "GroupedMLPSubmodules"):
            pytest.skip("needs Megatron-Core 0.19, whose layers the tool times")
        found.start_megatron("gloo")
        try:
            yield found
        finally:
            state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def test_contenders_agree(tool: Any) -> None:
    record = tool.measure(SIZES, 33, StandInTimer(), "cpu")
    assert record["errors"] == record["wrong"] == {}
    clocks = [set(record[clock]) for clock in ("gpu", "end_to_end", "experts")]
    assert clocks == [set(record["off"])] * 3 == [set(tool.LIMITS)] * 3
    assert all(set(off) == {"out", "x", "router", "w13", "w2"} for off in record["off"].values())
    assert set(record["off"][tool.SEQUENTIAL].values()) == {0.0}
    assert record["off"][tool.FP8]["w13"] > 0.01  # it is FP8


def test_a_wrong_contender_is_not_timed(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tool.GroupedMm.forward

    def late(self: Any, x: torch.Tensor, counts: list[int]) -> Any:
        return right(self, x, [counts[0] - 1, counts[1] + 1, *counts[2:]])  # a row goes to the next expert

    monkeypatch.setattr(tool.GroupedMm, "forward", late)
    record = tool.measure(SIZES, 33, StandInTimer(), "cpu")
    assert set(record["wrong"]) == {tool.GROUPED}
    assert set(record["gpu"]) == set(tool.LIMITS) - {tool.GROUPED}
