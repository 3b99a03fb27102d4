"""tools/first_layer.py names the faults of a run; on a CPU the reference takes the place of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import first_layer as tool


def test_a_process_of_its_own_runs_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADLESS_BACKEND", "reference")
    for name in ("padless", "triton"):
        (tmp_path / name / "some").mkdir(parents=True)
    (tmp_path / "triton" / "some" / "kernel.cubin").touch()
    found = tool.in_process(None, tmp_path, 1, "cpu")
    assert found["tokens"] == 1
    assert found["cached"] == {"padless": 0, "triton": 1}
    assert 0 < found["import_s"] < found["in_all_s"]
    assert len(found["bits"]) == 64


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_device"):
        tool.in_process(tmp_path, tmp_path, 1, "no_such_device")


def test_compiling_and_being_late_with_cubins_nothing_compiled_without_and_other_bits_are_wrong() -> None:
    def one(case: str, **changed: Any) -> dict[str, Any]:
        kernels = 0 if case == tool.WITH else 4
        right = {"case": case, "cached": {"padless": kernels, "triton": kernels}, "tokens": 4, "bits": "x"}
        return right | {"in_all_s": 3.0} | changed

    right = [one(case) for case in tool.CASES]
    assert tool.problems_of(right) == []
    for i, changed, said in (
        (0, {"cached": {"padless": 2, "triton": 0}}, f"{tool.WITH}: compiled kernels in {{'padless': 2, 'triton': 0}}"),
        (0, {"cached": {"padless": 0, "triton": 1}}, f"{tool.WITH}: compiled kernels in {{'padless': 0, 'triton': 1}}"),
        (0, {"in_all_s": 3.1}, f"{tool.WITH}: 3.1 s, and 3.0 are the target"),
        (
            2,
            {"cached": {"padless": 0, "triton": 0}},
            f"{tool.FILLED}: compiled kernels in {{'padless': 0, 'triton': 0}}",
        ),
    ):
        found = list(right)
        found[i] = one(tool.CASES[i], **changed)
        assert tool.problems_of(found) == [f"4 tokens, {said}"]
    assert tool.problems_of([right[0], right[1] | {"bits": "y"}]) == ["4 tokens: 2 different results"]
    assert tool.problems_of([right[1] | {"cached": {"padless": 1, "triton": 0}}]) == []
    assert tool.problems_of([one(case, in_all_s=9.0) for case in tool.CASES[1:]]) == []
