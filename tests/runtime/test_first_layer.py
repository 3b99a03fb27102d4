"""tools/first_layer.py names the faults of a run; on a CPU the reference takes the place of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import first_layer as tool


def test_a_process_of_its_own_runs_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADLESS_BACKEND", "reference")
    found = tool.in_process(tmp_path, False, tmp_path, 1, "cpu")
    assert found["tokens"] == 1
    assert found["compiled"] == 0
    assert 0 < found["import_s"] < found["in_all_s"]
    assert len(found["bits"]) == 64


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_device"):
        tool.in_process(tmp_path, False, tmp_path, 1, "no_such_device")


def test_compiling_with_cubins_none_without_and_other_bits_are_wrong() -> None:
    right = [{"case": "a", "cubins": True, "compiled": 0, "tokens": 4, "bits": "x"}]
    right += [{"case": "b", "cubins": False, "compiled": 5, "tokens": 4, "bits": "x"}]
    assert tool.problems_of(right) == []
    assert "a: 2 kernels compiled" in tool.problems_of([right[0] | {"compiled": 2}, right[1]])
    assert "b: 0 kernels compiled" in tool.problems_of([right[0], right[1] | {"compiled": 0}])
    assert "4 tokens: 2 different results" in tool.problems_of([right[0], right[1] | {"bits": "y"}])
