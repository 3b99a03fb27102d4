"""`padless verify --ranks` without GPUs: what it refuses, how it judges, and what it runs on gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from padless.testing.ranks import RankError
from padless.verify.ranks import judge, run_verify_ranks


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="ranks is 1; it must be at least 2"):
        run_verify_ranks(1)
    with pytest.raises(ValueError, match="checks has 'formats'; allowed with ranks are 'expert parallelism, coll"):
        run_verify_ranks(2, checks=["formats"])


def test_judge() -> None:
    """A rank without a result fails the check, unless it is the one that was to die."""
    assert judge(["fine", "fine"], 0) == ("fine", True)
    assert judge(["fine", RankError("killed")], 0) == ("rank 1: killed", False)
    assert judge(["an error after 3 s", RankError("ended with exit code 0")], 1) == ("an error after 3 s", True)
    assert judge([RankError("no error"), RankError("ended")], 1)[1] is False


@pytest.mark.slow
def test_on_gloo(tmp_path: Path) -> None:
    assert run_verify_ranks(2, tmp_path, console=Console(quiet=True)) == 0
    record = json.loads((tmp_path / "verify.json").read_text())
    assert record["machine"]["ranks"] == "2"
    assert [c["passed"] for c in record["checks"]] == [True, True]
