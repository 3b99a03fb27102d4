"""The check of SwiGLUs with a rule of `padless verify`, as far as a CPU runs it, and what it notices."""

from __future__ import annotations

import pytest
import torch

from padless.epilogue import GateRule
from padless.reference import activation as reference
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify import moe_gates
from padless.verify.checks import Check

GATES = Check(moe_gates.check_gates)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_on_the_cpu(arch: str) -> None:
    assert "elements" in GATES.on("reference", arch)


def test_a_rule_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of another limit."""
    original = reference.limited

    def wrong(gate: torch.Tensor, up: torch.Tensor, rule: GateRule) -> tuple[torch.Tensor, torch.Tensor]:
        return original(gate, up, GateRule(rule.alpha, 1.5, rule.up_offset))

    run = moe_gates.grouped_gemm_epilogue

    def with_wrong(*arguments: object, **options: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "limited", wrong)
            return run(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(moe_gates, "grouped_gemm_epilogue", with_wrong)
    with pytest.raises(AssertionError, match="values of group"):
        GATES.on("reference", "sm_90a")


def test_what_the_rehearsal_lists() -> None:
    kernels, problems = kernels_of(GATES.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert problems == []
    assert len(kernels) >= 12


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    assert GATES()
