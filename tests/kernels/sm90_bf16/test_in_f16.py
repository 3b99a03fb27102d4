"""MXFP4 x MXFP4 on Hopper begins in f16 and changes over to bf16 at a scale beyond f16: with the same bits."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from padless.formats import MXFP4, BlockScaledTensor
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.layouts import to_blocked
from support.machine_code import edit_sources
from support.sm90_bf16_cases import error_bound, exact_result, multiply, random_problem

PAIR = ("MXFP4", "MXFP4")
DTYPE = torch.bfloat16  # two blocks of 64 tokens leave no room for float32
LEAST, MOST = 109, 132  # scales with room in f16: 2^-18 .. 2^5


@dataclasses.dataclass(frozen=True)
class Planted(Sm90Bf16Config):
    """The kernel with one text in place of another."""

    fault: str = ""

    def prelude(self) -> str:
        return f"// {self.fault}\n" + super().prelude()


FAULTS = {
    # Not a fault: all of it in bf16, which is what the results have to be the same as.
    "never in f16": ("BEGINS_IN_F16 = A_FORMAT == FORMAT_MXFP4", "BEGINS_IN_F16 = false && A_FORMAT == FORMAT_MXFP4"),
    # What has no need of bf16 does not notice; what has would never end.
    "nothing is left for bf16": ("if (done < k_stages)", "if (false)"),
    "scales are not looked at": (
        "if (!__any_sync(0xffffffff, scales_beyond_f16<false>",
        "if (true || !__any_sync(0xffffffff, scales_beyond_f16<false>",
    ),
    "sums keep f16's shift": ("d[u][i] *= F16_UNSHIFT", "d[u][i] *= 1.0f"),
}


def planted(config: Sm90Bf16Config, fault: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """``config`` for a kernel with that fault; good for one kernel in a test, since the source stays as it is."""
    text, other = FAULTS[fault]
    assert edit_sources(monkeypatch, "sm90_bf16/", re.escape(text), other) == 1
    return Planted(**dataclasses.asdict(config), fault=fault)


def config_of(block_m: int, stage_blocks: int) -> Sm90Bf16Config:
    warpgroups = 2 if block_m == 128 else 4
    return Sm90Bf16Config(*PAIR, block_m=block_m, block_n=256, num_warpgroups=warpgroups, stage_blocks=stage_blocks)


def with_scales(t: BlockScaledTensor, places: dict[tuple[int, ...], int]) -> BlockScaledTensor:
    scale = t.scale.clone()
    for place, byte in places.items():
        scale.view(torch.uint8)[place] = byte
    return BlockScaledTensor(t.data, scale, MXFP4)


def blocked(t: BlockScaledTensor) -> BlockScaledTensor:
    return BlockScaledTensor(t.data, to_blocked(t.scale), MXFP4, scale_layout="blocked")


# Rows 0 .. 11 of tokens and 8 of weights past an m64; of K 4 blocks and a quarter.
SIZES, N, K = (9, 0, 3), 136, 544
LARGE, SMALL, NAN, ZERO = MOST + 1, LEAST - 1, 255, 0
CHANGES: dict[str, tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]] = {
    "tokens, first block": ({(2, 0): LARGE}, {}),
    "tokens, third block": ({(8, 9): SMALL}, {}),
    "weights, second block": ({}, {(0, 100, 4): LARGE}),
    "weights, the last columns and rows": ({}, {(2, 135, 16): SMALL}),
    "both, at different places": ({(10, 13): 254}, {(0, 3, 6): ZERO, (2, 100, 15): 1}),
    "not a number": ({(11, 5): NAN}, {(0, 130, 11): NAN}),
}


SLOW = pytest.mark.slow
MANY = (70, 0, 3)  # a tile of more than 64 tokens, and one of few
CASES = [
    # stage_blocks 2 takes the first of two blocks in f16 too, or neither.
    *(pytest.param(16, 2, SIZES, "plain", change) for change in CHANGES),
    *(pytest.param(64, 2, SIZES, "blocked", change, marks=() if "columns" in change else SLOW) for change in CHANGES),
    *(pytest.param(128, 1, SIZES, "plain", change, marks=SLOW) for change in CHANGES),
    *(pytest.param(128, 1, MANY, "plain", change, marks=() if "third" in change else SLOW) for change in CHANGES),
    *(pytest.param(8, 2, SIZES, "blocked", change, marks=SLOW) for change in CHANGES),
]


@pytest.mark.parametrize(("block_m", "stage_blocks", "sizes", "layout", "change"), CASES)
def test_the_bits_are_those_of_bf16(
    block_m: int, stage_blocks: int, sizes: tuple[int, ...], layout: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(PAIR, sizes, N, K)
    of_tokens, of_weights = CHANGES[change]
    assert isinstance(problem.a, BlockScaledTensor)
    a, b = with_scales(problem.a, of_tokens), with_scales(problem.b, of_weights)
    problem = dataclasses.replace(problem, a=a, b=blocked(b) if layout == "blocked" else b)
    config = dataclasses.replace(config_of(block_m, stage_blocks), blocked=layout == "blocked")
    out = multiply(problem, config, DTYPE, expect_finite=False, seed=3)
    same = planted(config, "never in f16", monkeypatch)
    expected = multiply(problem, same, DTYPE, expect_finite=False)
    # Values beyond float32 differ in no bit either; NaN are where the scales are, and nowhere else.
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def in_f16() -> tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor]:
    problem = random_problem(PAIR, SIZES, N, K)
    assert isinstance(problem.a, BlockScaledTensor)
    # The ends of what f16 has room for, in codes of all kinds.
    a = with_scales(problem.a, {(1, 3): LEAST, (10, 16): MOST})
    b = with_scales(problem.b, {(0, 5, 3): LEAST, (0, 6, 3): MOST, (2, 131, 16): MOST})
    # What quantisers say of zeros.
    for t, row in ((a, a.data[7]), (b, b.data[2, 70])):
        row.view(torch.uint8)[16 * 6 : 16 * 7] = torch.tensor([0x00, 0x80, 0x08, 0x88]).repeat(4).to(torch.uint8)
        t.scale.view(torch.uint8)[(7, 6) if t is a else (2, 70, 6)] = ZERO
    return a, b, problem.offs


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize(("block_m", "stage_blocks"), [(16, 2), (128, 1)])
def test_no_scale_that_does_not_count_brings_bf16(
    block_m: int, stage_blocks: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel with no loop for bf16 gets by: scales at the window's ends, another group's rows, and what pads."""
    a, b, offs = in_f16()
    a = with_scales(a, {(12 + i, j): byte for i in range(3) for j, byte in enumerate((ZERO, LARGE, NAN))})
    b = with_scales(b, {(1, i, i % 17): LARGE for i in range(N)})  # of the empty group
    problem = dataclasses.replace(random_problem(PAIR, SIZES, N, K), a=a, b=b, offs=offs)
    whole = torch.full((3, 256, 20), NAN, dtype=torch.uint8)
    whole[:, :N, :17] = b.scale.view(torch.uint8)
    if layout == "blocked":
        padded = torch.stack([to_blocked(each) for each in whole]).view(b.scale.dtype)
        b = BlockScaledTensor(b.data, padded, MXFP4, scale_layout="blocked")
        problem = dataclasses.replace(problem, b=b)
    config = dataclasses.replace(config_of(block_m, stage_blocks), blocked=layout == "blocked")
    out = multiply(problem, planted(config, "nothing is left for bf16", monkeypatch))
    plain = dataclasses.replace(
        problem, b=BlockScaledTensor(b.data, whole[:, :N, :17].contiguous().view(torch.float8_e8m0fnu), MXFP4)
    )
    error = (out.double() - exact_result(plain)).abs()
    assert bool((error <= error_bound(plain, torch.float32)).all())


@pytest.mark.parametrize("fault", ["scales are not looked at", "sums keep f16's shift"])
def test_a_planted_fault_changes_the_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(PAIR, SIZES, N, K)
    assert isinstance(problem.a, BlockScaledTensor)
    problem = dataclasses.replace(problem, a=with_scales(problem.a, {(8, 9): LARGE}))
    config = config_of(16, 2)
    out = multiply(problem, planted(config, fault, monkeypatch), expect_finite=False)
    assert not torch.equal(out[:9], exact_result(problem, torch.float32)[:9])
    worst = (out.double() - exact_result(problem)).abs() / error_bound(problem, torch.float32)
    assert not bool((worst[8] <= 1).all())
