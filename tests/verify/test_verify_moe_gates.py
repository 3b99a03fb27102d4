"""The check of SwiGLUs with a rule of `padless verify`, as far as a CPU runs it, and what it notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.epilogue import GateRule
from padless.reference import activation as reference
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify import epilogue
from padless.verify.epilogue import GATES
from padless.verify.problems.epilogue import FENCE, Outputs, gated_problems


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_on_the_cpu(arch: str) -> None:
    assert int(GATES.on("reference", arch).split()[0]) > 0
    problems = list(gated_problems(arch))
    assert len(problems) == (10 if arch == "sm_90a" else 6)
    assert {p.rule for p in problems} == {GateRule(1.702, 7.0, 1.0), GateRule(limit=0.75)}
    assert any(p.alternating for p in problems) == (arch == "sm_90a")


def test_a_rule_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of another limit."""
    original = reference.limited

    def wrong(gate: torch.Tensor, up: torch.Tensor, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        return original(gate, up, GateRule(rule.alpha, 1.5, rule.up_offset))

    run = epilogue.run_problem

    def with_wrong(*arguments: Any) -> Outputs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "limited", wrong)
            return run(*arguments)

    monkeypatch.setattr(epilogue, "run_problem", with_wrong)
    with pytest.raises(AssertionError, match="values are further off"):
        GATES.on("reference", "sm_90a")


@pytest.mark.parametrize("name", ["d", "row_codes", "row_scale"])
def test_a_byte_of_what_is_stored_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest bit of a number in the first row."""
    run = epilogue.run_problem

    def wrong(problem: Any, *others: Any) -> Outputs:
        made = run(problem, *others)
        if name in made.bytes and problem.options.get("d_dtype") != torch.float32:
            made.bytes[name][FENCE] ^= 1
        return made

    monkeypatch.setattr(epilogue, "run_problem", wrong)
    with pytest.raises(AssertionError, match=f": {name}: 1 of"):
        GATES.on("reference", "sm_90a")


def test_what_the_rehearsal_lists() -> None:
    kernels, problems = kernels_of(GATES.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert problems == []
    assert len(kernels) >= 12


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    assert GATES()
