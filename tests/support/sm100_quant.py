"""Grouped problems for the quantising epilogue of the Blackwell kernel, and how to run them in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from padless.emulator.fake_driver import EmulatedDriver, emulated_driver
from padless.epilogue import Epilogue
from padless.kernels.sm100_grouped import host as sm100_grouped
from padless.kernels.sm100_grouped import host_quant as sm100_grouped_quant
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from support.quant_cases import Guarded, QuantCase, judge, make_outputs, tensors_of
from support.sm100_grouped import Case, make_case


@dataclass
class Problem(QuantCase):
    """A ragged problem; `past` rows after the last group belong to nobody. `gain` multiplies the sums, as alpha."""

    fmt: str | tuple[str, str]
    sizes: tuple[int, ...]
    n: int
    k: int = 128
    past: int = 3
    seed: int = 0
    gain: float = 1.0
    layouts: tuple[str, str] = ("blocked", "blocked")
    case: Case = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed + 1)
        groups = len(self.sizes)
        options = {}
        if self.fmt == "NVFP4":
            scales = torch.rand(groups, generator=draw) + 0.5
            options["global_scales"] = (scales[:1].clone(), scales)
        self.case = make_case(
            self.fmt, self.sizes, self.n, self.k, m=self.m, seed=self.seed, layouts=self.layouts, **options
        )
        self.draw_epilogue_operands(draw)
        self.alpha *= self.gain

    @property
    def offs(self) -> torch.Tensor:  # type: ignore[override]
        return self.case.offs

    def sums(self, driver: EmulatedDriver) -> torch.Tensor:
        """(M, N) float32 of the plain kernel, NaN in rows of nobody."""
        out = torch.full((self.m, self.n), float("nan"))
        with driver.configured(num_sms=2, checks=False, raise_on_reports=False):
            case = self.case
            sm100_grouped.prepare(driver, case.a, case.b, case.offs, out, Sm100GroupedConfig()).launch(0)
        return out


def check(
    problem: Problem, epilogue: Epilogue, config: Sm100GroupedConfig | None = None, *, seed: int = 0,
    sms: int = 2, tiles: int | None = None, acc: torch.Tensor | None = None,
) -> dict[str, Guarded]:  # fmt: skip
    """The kernel's outputs, which are the reference's to the bit, made without a report; ``acc``: known sums."""
    driver = emulated_driver("sm_100a")
    sms = sms if config is None else max(sms, config.cluster)
    acc = problem.sums(driver) if acc is None else acc
    got = make_outputs(problem, epilogue, tiles)
    case = problem.case
    with driver.configured(seed=seed, num_sms=sms, raise_on_reports=False):
        tensors = tensors_of(problem, epilogue, got, tiles)
        prepared = sm100_grouped_quant.prepare(driver, case.a, case.b, case.offs, tensors, config, epilogue=epilogue)
        prepared.launch(0)
    result = driver.last_result
    assert result is not None
    assert not result.reports, "\n".join(map(str, result.reports[:3]))
    judge(problem, epilogue, acc, got, tiles)
    return got
