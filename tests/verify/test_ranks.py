"""`padless verify --ranks` without GPUs: what it refuses, how it judges, and what it runs on gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from padless.testing.ranks import RankError, RankPool, raise_first, run_ranks
from padless.verify.ranks import judge, run_verify_ranks, stress


@pytest.mark.parametrize("ranks", [1, 17, 100_000])
def test_ranks_that_cannot_be_are_refused_first(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 too: a check needs k = R, and the largest k is 16."""
    monkeypatch.setattr(RankPool, "_start", lambda pool: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match=f"ranks is {ranks}; it must be an integer from 2 to 16"):
        run_verify_ranks(ranks)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="checks has 'formats'; allowed with ranks are 'expert parallelism, coll"):
        run_verify_ranks(2, checks=["formats"])


def test_judge() -> None:
    """A rank without a result fails the check, unless it is the one that was to die."""
    assert judge(["fine", "fine"], 0) == ("fine", True)
    assert judge(["fine", RankError("killed")], 0) == ("rank 1: killed", False)
    assert judge(["an error after 3 s", RankError("ended with exit code 0")], 1) == ("an error after 3 s", True)
    assert judge([RankError("no error"), RankError("ended")], 1)[1] is False


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_two_layers_on_gloo(size: int) -> None:
    """What the check calls and compares, on one stream; 16 experts are 15 over three ranks."""
    found = run_ranks(stress.check_two_layers, size, 4, 3, cuda=False, backend="collective", timeout_s=120)
    assert raise_first(found) == ["4 calls of each, 3 tokens"] * size


@pytest.mark.slow
def test_on_gloo(tmp_path: Path) -> None:
    assert run_verify_ranks(2, tmp_path, console=Console(quiet=True)) == 0
    record = json.loads((tmp_path / "verify.json").read_text())
    assert record["machine"]["ranks"] == "2"
    assert [c["passed"] for c in record["checks"]] == [True, True]
