"""Problems with every operand a quantising epilogue can ask for, outputs between fences, and the judge of any kernel.

The judge is epilogue_reference, from the float32 sums that the same kernel stores without an epilogue. Whatever the
reference leaves alone the kernel has to leave alone too.
"""

from __future__ import annotations

import copy
import dataclasses
from types import ModuleType
from typing import TypeVar

import pytest
import torch

from padless import epilogue as epilogues
from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import NVFP4, BlockScaledFormat
from padless.kernels.epilogue_launch import QuantConfig
from padless.reference.epilogue import epilogue_reference
from padless.runtime import jit

FENCE = 4096
SCALES = ("row_scale", "column_scale")
# 40 rows do not fill the tile's share of a second warp or warpgroup; no rows; two tiles of 128; one row.
SIZES = (40, 0, 130, 1)
ALL = {"alpha": True, "bias": True, "prob": True, "amax": True}


class QuantCase:
    """A ragged problem and the operands of an epilogue; rows past the last group belong to nobody."""

    sizes: tuple[int, ...]
    n: int
    past: int
    seed: int
    offs: torch.Tensor

    @property
    def m(self) -> int:
        return self.valid + self.past

    @property
    def valid(self) -> int:
        return sum(self.sizes)

    def draw_epilogue_operands(self, draw: torch.Generator) -> None:
        groups = len(self.sizes)
        self.alpha = torch.randn(groups, generator=draw)
        self.bias = torch.randn(groups, self.n, generator=draw) * 3
        self.prob = torch.rand(self.m, generator=draw) * 2 - 0.5
        self.norm_const = torch.rand(1, generator=draw) + 0.01
        self.global_scale = torch.rand(groups, generator=draw) * 0.1 + 0.001


AnyCase = TypeVar("AnyCase", bound=QuantCase)


class Guarded:
    """A tensor of random bytes between two fences of random bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator, mn: bool = False):
        logical = shape
        if mn:  # MN-major scales: the memory is (columns, ld)
            ld = max(-(-shape[0] // 4) * 4, 4)
            shape = (shape[1], ld)
        size = torch.Size(shape).numel() * dtype.itemsize
        self.bytes = torch.randint(1, 256, (2 * FENCE + size,), dtype=torch.uint8, generator=draw)
        inside = self.bytes[FENCE : FENCE + size].view(dtype).view(shape)
        self.inside = inside.t()[: logical[0]] if mn else inside


def make_outputs(case: QuantCase, epilogue: Epilogue, tiles: int | None = None) -> dict[str, Guarded]:
    """The outputs of an epilogue, the same bytes at every call."""
    draw = torch.Generator().manual_seed(case.seed + 99)
    m, groups, n_out = case.m, len(case.sizes), epilogue.out_columns(case.n)
    made: dict[str, Guarded] = {}
    if epilogue.d_dtype is not None:
        made["d"] = Guarded((m, n_out), epilogue.d_dtype, draw)
    if epilogue.amax:
        made["amax"] = Guarded((groups,), torch.float32, draw)
        made["amax"].inside.fill_(float("-inf"))
    if (fmt := epilogue.row_format) is not None:
        made["row_codes"] = Guarded((m, n_out // fmt.codes_per_byte), torch.uint8, draw)
        shape = epilogues.row_scale_shape(epilogue, m, n_out, groups)
        made["row_scale"] = Guarded(shape, _scale_dtype(fmt), draw, mn=epilogue.row_layout == "plain_mn")
    if (fmt := epilogue.column_format) is not None:
        tiles = epilogues.column_tiles(m, groups) if tiles is None else tiles
        made["column_codes"] = Guarded((m, n_out), torch.uint8, draw)
        shape = epilogues.column_scale_shape(epilogue, n_out, tiles)
        made["column_scale"] = Guarded(shape, _scale_dtype(fmt), draw)
    return made


def _scale_dtype(fmt: BlockScaledFormat) -> torch.dtype:
    return torch.float32 if fmt.scale_dtype == torch.float32 else torch.uint8


def tensors_of(case: QuantCase, epilogue: Epilogue, outputs: dict[str, Guarded], tiles: int | None) -> EpilogueTensors:
    if tiles is None:
        tiles = epilogues.column_tiles(case.m, len(case.sizes))
    return EpilogueTensors(
        alpha=case.alpha if epilogue.alpha else None,
        bias=case.bias if epilogue.bias else None,
        prob=case.prob if epilogue.prob else None,
        norm_const=case.norm_const if epilogue.norm_const else None,
        global_scale=case.global_scale if epilogue.format == NVFP4 else None,
        column_tiles=tiles,
        **{name: guarded.inside for name, guarded in outputs.items()},
    )


def reference(case: QuantCase, epilogue: Epilogue, acc: torch.Tensor, tiles: int | None = None) -> dict[str, Guarded]:
    outputs = make_outputs(case, epilogue, tiles)
    epilogue_reference(acc, case.offs, epilogue, tensors_of(case, epilogue, outputs, tiles))
    return outputs


def differences(got: dict[str, Guarded], wanted: dict[str, Guarded], before: dict[str, Guarded]) -> dict[str, int]:
    """By output: bytes that differ, fences included. Allowed: zeros where the reference leaves padding of scales, and
    another NaN in d.
    """
    found = {}
    for name in got:
        wrong = got[name].bytes != wanted[name].bytes
        if name == "d":
            size = got[name].inside.element_size()
            both_nan = (got[name].inside.isnan() & wanted[name].inside.isnan()).flatten()
            written = wanted[name].bytes[FENCE:-FENCE] != before[name].bytes[FENCE:-FENCE]
            wrong[FENCE:-FENCE] &= ~(both_nan & written.view(-1, size).any(1)).repeat_interleave(size)
        if name in SCALES and got[name].inside.dtype == torch.uint8:
            untouched = wanted[name].bytes == before[name].bytes
            untouched[:FENCE] = untouched[-FENCE:] = False
            wrong &= ~(untouched & (got[name].bytes == 0))
        if wrong.any():
            found[name] = int(wrong.sum())
    return found


def judge(
    case: QuantCase, epilogue: Epilogue, acc: torch.Tensor, got: dict[str, Guarded], tiles: int | None = None
) -> None:
    """Every byte of every output, fences included, against the reference for the plain kernel's sums.

    Only the values of an exponential by the function unit have a bound instead.
    """
    if epilogue.activation != "none" and not epilogue.gate_in_bf16:
        acc, epilogue, case = glu_of_own_values(case, epilogue, acc, got, tiles)
    wanted, before = reference(case, epilogue, acc, tiles), make_outputs(case, epilogue, tiles)
    wrong = differences(got, wanted, before)
    assert wrong == {}, f"wrong bytes: {wrong}"


def glu_of_own_values(
    case: AnyCase, epilogue: Epilogue, acc: torch.Tensor, got: dict[str, Guarded], tiles: int | None = None
) -> tuple[torch.Tensor, Epilogue, AnyCase]:
    """Judges the float32 values of an epilogue with an exponential; what comes after them is then judged exactly.

    Returns the kernel's own values as sums, and epilogue and case without what has been done to them.
    """
    assert epilogue.d_dtype == torch.float32, "the judge needs the values"
    exact = reference(case, epilogue, acc, tiles)["d"].inside[: case.valid].double()
    values = got["d"].inside[: case.valid]
    # exp within 2^-21, of which the sigmoid takes at most all; four roundings of 2^-24, and one subnormal.
    bound = exact.abs() * (2.0**-21 + 2.0**-22) + 2.0**-148
    assert (((values.double() - exact).abs() <= bound) | (values.isnan() & exact.isnan())).all()
    assert (values != 0).any()
    sums = torch.full_like(acc[:, : values.shape[1]], float("nan"))
    sums[: case.valid] = values
    rest = dataclasses.replace(epilogue, alpha=False, bias=False, prob=False, activation="none", gate_rule=None)
    narrow = copy.copy(case)
    narrow.n = epilogue.out_columns(narrow.n)
    return sums, rest, narrow


def slow_but(always: set[str], names: object) -> list[object]:
    """``names`` as parameters, those not in ``always`` marked slow."""
    listed = list(names)  # type: ignore[call-overload]
    assert always <= set(listed)
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in listed]


def plant(monkeypatch: pytest.MonkeyPatch, module: ModuleType, file: str, old: str, new: str) -> None:
    """Replaces a text of the kernel's sources in what the module's prepare() compiles."""
    texts = dict(jit.sources())
    assert old in texts[file], f"{file} has nothing like {old!r} any more: plant another bug"
    texts[file] = texts[file].replace(old, new)
    monkeypatch.setattr(jit, "sources", lambda: texts)

    def load_kernel(driver: EmulatedDriver, source: str, config: QuantConfig, _: int) -> object:
        image, log = jit._run_nvrtc(config.prelude() + texts[source], source, driver.arch, driver.kind)
        kernel = jit._describe(image, driver.kind, log, jit.entry_of(source))
        return kernel, driver.load(kernel, 0)

    monkeypatch.setattr(module, "load_kernel", load_kernel)
