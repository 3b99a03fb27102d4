"""Grouped problems with every operand of an epilogue for the Blackwell kernel, outputs between fences, and the judge.

The judge is epilogue_reference, from the float32 sums that the same kernel stores without an epilogue.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from sm100_grouped import Case, make_case

from padless import epilogue as epilogues
from padless.config_sm100_grouped import Sm100GroupedConfig
from padless.emulator.fake_driver import EmulatedDriver, emulated_driver
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import NVFP4
from padless.paths import sm100_grouped, sm100_grouped_quant
from padless.reference_epilogue import epilogue_reference

FENCE = 4096
SCALES = ("row_scale", "column_scale")


@dataclass
class Problem:
    """A ragged problem; `past` rows after the last group belong to nobody. `gain` multiplies the sums, as alpha."""

    fmt: str
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
        self.alpha = torch.randn(groups, generator=draw) * self.gain
        self.bias = torch.randn(groups, self.n, generator=draw) * 3
        self.prob = torch.rand(self.m, generator=draw) * 2 - 0.5
        self.norm_const = torch.rand(1, generator=draw) + 0.01
        self.global_scale = torch.rand(groups, generator=draw) * 0.1 + 0.001

    @property
    def m(self) -> int:
        return sum(self.sizes) + self.past

    @property
    def valid(self) -> int:
        return sum(self.sizes)

    def sums(self, driver: EmulatedDriver) -> torch.Tensor:
        """(M, N) float32 of the plain kernel, NaN in rows of nobody."""
        out = torch.full((self.m, self.n), float("nan"))
        with driver.configured(num_sms=2, checks=False, raise_on_reports=False):
            case = self.case
            sm100_grouped.prepare(driver, case.a, case.b, case.offs, out, Sm100GroupedConfig()).launch(0)
        return out


class Fenced:
    """A tensor of random bytes between two fences of random bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator):
        size = torch.Size(shape).numel() * dtype.itemsize
        self.bytes = torch.randint(1, 256, (2 * FENCE + size,), dtype=torch.uint8, generator=draw)
        self.inside = self.bytes[FENCE : FENCE + size].view(dtype).view(shape)


def make_outputs(problem: Problem, epilogue: Epilogue, tiles: int) -> dict[str, Fenced]:
    """The outputs of an epilogue, the same bytes at every call."""
    draw = torch.Generator().manual_seed(problem.seed + 99)
    m, groups, n_out = problem.m, len(problem.sizes), epilogue.out_columns(problem.n)
    made: dict[str, Fenced] = {}
    if epilogue.d_dtype is not None:
        made["d"] = Fenced((m, n_out), epilogue.d_dtype, draw)
    if epilogue.amax:
        made["amax"] = Fenced((groups,), torch.float32, draw)
        made["amax"].inside.fill_(float("-inf"))
    if (fmt := epilogue.row_format) is not None:
        made["row_codes"] = Fenced((m, n_out // fmt.codes_per_byte), torch.uint8, draw)
        made["row_scale"] = Fenced(epilogues.row_scale_shape(epilogue, m, n_out, groups), torch.uint8, draw)
    if epilogue.column_format is not None:
        made["column_codes"] = Fenced((m, n_out), torch.uint8, draw)
        made["column_scale"] = Fenced(epilogues.column_scale_shape(epilogue, n_out, tiles), torch.uint8, draw)
    return made


def tensors_of(
    problem: Problem, epilogue: Epilogue, outputs: dict[str, Fenced], tiles: int
) -> EpilogueTensors:
    return EpilogueTensors(
        alpha=problem.alpha if epilogue.alpha else None,
        bias=problem.bias if epilogue.bias else None,
        prob=problem.prob if epilogue.prob else None,
        norm_const=problem.norm_const if epilogue.norm_const else None,
        global_scale=problem.global_scale if epilogue.format == NVFP4 else None,
        column_tiles=tiles,
        **{name: fenced.inside for name, fenced in outputs.items()},
    )


def differences(
    got: dict[str, Fenced], wanted: dict[str, Fenced], before: dict[str, Fenced]
) -> dict[str, int]:
    """By output: bytes that differ, fences included. Zeros where the reference leaves padding of scales are allowed."""
    found = {}
    for name in got:
        wrong = got[name].bytes != wanted[name].bytes
        if name in SCALES:
            untouched = wanted[name].bytes == before[name].bytes
            untouched[:FENCE] = untouched[-FENCE:] = False
            wrong &= ~(untouched & (got[name].bytes == 0))
        if wrong.any():
            found[name] = int(wrong.sum())
    return found


def check(
    problem: Problem, epilogue: Epilogue, config: Sm100GroupedConfig | None = None, *, seed: int = 0,
    sms: int = 2, tiles: int | None = None, acc: torch.Tensor | None = None,
) -> dict[str, Fenced]:  # fmt: skip
    """The kernel's outputs, which are the reference's to the bit, made without a report; ``acc``: known sums."""
    driver = emulated_driver("sm_100a")
    acc = problem.sums(driver) if acc is None else acc
    tiles = epilogues.column_tiles(problem.m, len(problem.sizes)) if tiles is None else tiles
    got = make_outputs(problem, epilogue, tiles)
    case = problem.case
    with driver.configured(seed=seed, num_sms=sms, raise_on_reports=False):
        tensors = tensors_of(problem, epilogue, got, tiles)
        prepared = sm100_grouped_quant.prepare(
            driver, case.a, case.b, case.offs, tensors, config, epilogue=epilogue
        )
        prepared.launch(0)
    result = driver.last_result
    assert result is not None
    assert not result.reports, "\n".join(map(str, result.reports[:3]))

    if epilogue.is_glu:
        acc, epilogue, problem = glu_of_own_values(problem, epilogue, acc, got, tiles)
    wanted, before = make_outputs(problem, epilogue, tiles), make_outputs(problem, epilogue, tiles)
    epilogue_reference(acc, case.offs, epilogue, tensors_of(problem, epilogue, wanted, tiles))
    assert differences(got, wanted, before) == {}
    return got


def glu_of_own_values(
    problem: Problem, epilogue: Epilogue, acc: torch.Tensor, got: dict[str, Fenced], tiles: int
) -> tuple[torch.Tensor, Epilogue, Problem]:
    """Judges the float32 values of an epilogue with an exponential; what comes after them is then judged exactly.

    Returns the kernel's own values as sums, and epilogue and problem without what has been done to them.
    """
    assert epilogue.d_dtype == torch.float32, "the judge needs the values"
    wanted = make_outputs(problem, epilogue, tiles)
    epilogue_reference(acc, problem.case.offs, epilogue, tensors_of(problem, epilogue, wanted, tiles))
    exact = wanted["d"].inside[: problem.valid].double()
    values = got["d"].inside[: problem.valid]
    # exp within 2^-21, of which the sigmoid takes at most all; four roundings of 2^-24, and one subnormal.
    bound = exact.abs() * (2.0**-21 + 2.0**-22) + 2.0**-148
    assert (((values.double() - exact).abs() <= bound) | (values.isnan() & exact.isnan())).all()
    assert (values != 0).any()
    sums = torch.full_like(acc[:, : values.shape[1]], float("nan"))
    sums[: problem.valid] = values
    rest = dataclasses.replace(epilogue, alpha=False, bias=False, prob=False, activation="none")
    narrow = dataclasses.replace(problem)  # draws the same; only its n is looked at from here on
    narrow.n //= 2
    return sums, rest, narrow
