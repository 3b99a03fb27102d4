"""gpt-oss' SwiGLU and others in the epilogues of Hopper's kernels, emulated and judged; gate and up that alternate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from padless.epilogue import Epilogue, GateRule
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16 import host_quant as sm90_bf16_quant
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8 import host_quant as sm90_fp8_quant
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from padless.reference.activation import limited
from padless.reference.epilogue import group_values
from support.quant_cases import ALL, SIZES, plant, tensors_of
from support.sm90_quant_cases import DRIVER, Case, PairCase, check

SLOW = pytest.mark.slow
GPT_OSS = GateRule(1.702, 7.0, 1.0)
# The sums of these cases are up to 40 or so: every part of a rule cuts, or counts.
RULES = {
    "gpt-oss": GPT_OSS,
    "limit": GateRule(limit=0.75),
    "alpha": GateRule(alpha=0.3),
    "offset": GateRule(up_offset=-2),
}
VALUES = {"d_dtype": torch.float32, "activation": "swiglu", "gate_up": "alternating"}
# By outputs: what gpt-oss' layers store (bf16, or FP8_BLOCK rows), and everything else that a row or column can be.
ALTERNATING = {
    "values": Epilogue(**VALUES),  # type: ignore[arg-type]
    "FP8_BLOCK rows": Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn", bias=True, **VALUES),  # type: ignore[arg-type]
    "MXFP8 rows and columns": Epilogue(
        row_format=MXFP8,
        column_format=MXFP8,
        scale_rule="rceil",
        **ALL,
        **VALUES,  # type: ignore[arg-type]
    ),
    "NVFP4 rows": Epilogue(row_format=NVFP4, scale_rule="te", prob=True, **VALUES),  # type: ignore[arg-type]
    "MXFP4 rows": Epilogue(row_format=MXFP4, scale_rule="rceil", bias=True, **VALUES),  # type: ignore[arg-type]
}
PAIRS = [("BF16", "MXFP4"), ("FP8_BLOCK", "MXFP4"), ("NVFP4", "NVFP4"), ("MXFP8", "MXFP4")]


def columns_of(epilogue: Epilogue) -> int:
    """A tile of 128 columns of the product and a part of the next."""
    return 192 if epilogue.row_format in (MXFP4, NVFP4) else 224


def case(epilogue: Epilogue, pair: tuple[str, str] = ("BF16", "MXFP4"), sizes: tuple[int, ...] = SIZES) -> PairCase:
    return PairCase(sizes, columns_of(epilogue), 160, plain=sm90_bf16, pair=pair)


@pytest.mark.parametrize(
    "name", [name if name == "FP8_BLOCK rows" else pytest.param(name, marks=SLOW) for name in ALTERNATING]
)
@pytest.mark.parametrize("pair", [PAIRS[0], *(pytest.param(p, marks=SLOW) for p in PAIRS[1:])], ids="x".join)
def test_alternating(pair: tuple[str, str], name: str) -> None:
    """With gpt-oss' rule; every byte of every output against the reference."""
    epilogue = dataclasses.replace(ALTERNATING[name], gate_rule=GPT_OSS)
    check(sm90_bf16_quant, case(epilogue, pair), epilogue)


@pytest.mark.parametrize("tile", [pytest.param(tile, marks=SLOW) for tile in ((8, 256, 2), (32, 256, 4), (64, 256, 2))])
def test_alternating_in_tiles(tile: tuple[int, int, int]) -> None:
    """Those of few tokens, as in decoding; one wave of a warpgroup, and two."""
    config = Sm90Bf16Config("BF16", "MXFP4", block_m=tile[0], block_n=tile[1], num_warpgroups=tile[2])
    epilogue = dataclasses.replace(ALTERNATING["FP8_BLOCK rows"], gate_rule=GPT_OSS)
    check(sm90_bf16_quant, case(epilogue, sizes=(1, 0, 9, 1)), epilogue, config)


@pytest.mark.parametrize("rule", [pytest.param(name, marks=SLOW) for name in (*RULES, None)])
def test_rules_of_alternating(rule: str | None) -> None:
    epilogue = dataclasses.replace(ALTERNATING["values"], gate_rule=None if rule is None else RULES[rule])
    check(sm90_bf16_quant, case(epilogue, sizes=(5, 0, 9)), epilogue)


@pytest.mark.parametrize("order", [pytest.param("interleaved", marks=SLOW), "concatenated"])
def test_rules_of_fp8(order: str) -> None:
    """FP8_BLOCK's kernel, and gate and up in runs or halves."""
    epilogue = Epilogue(
        activation=f"swiglu_{order}", gate_rule=GPT_OSS, row_format=FP8_BLOCK, d_dtype=torch.float32, bias=True
    )
    check(sm90_fp8_quant, Case((40, 0, 9), 256), epilogue)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_mxfp8(rule: str, order: str) -> None:
    epilogue = Epilogue(
        activation=f"swiglu_{order}", gate_rule=RULES[rule], row_format=MXFP8, scale_rule="rceil", d_dtype=torch.float32
    )
    check(sm90_mxfp8_quant, PairCase((40, 0, 9), 256, plain=sm90_mxfp8), epilogue)


def test_the_reference_is_the_rule() -> None:
    """Element by element in float64, written apart; NaN and Inf too."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2)) * 6
    x[0, :6] = torch.tensor([float("nan"), 1.0, 2.0, float("nan"), float("inf"), -float("inf")])
    epilogue = Epilogue(gate_rule=GPT_OSS, **VALUES)  # type: ignore[arg-type]
    problem = PairCase((6,), 64, past=0)
    got = group_values(x, 0, 0, epilogue, tensors_of(problem, epilogue, {}, 1)).double()
    gate, up = x[:, 0::2].double(), x[:, 1::2].double()
    gate = torch.where(gate > 7, 7.0, gate)
    up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up))
    want = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    assert torch.equal(got.isnan(), want.isnan())
    assert ((got - want).nan_to_num().abs() <= 1e-6 * want.nan_to_num().abs() + 1e-12).all()
    assert got[0, 0].isnan()
    assert got[0, 1].isnan()
    assert torch.isfinite(got[0, 2])
    assert limited(x, x, None)[0] is x


# What is wrong: text of a header, what takes its place.
BUGS = {
    "halves of the pairs swapped": (
        "device/sm90/transposed_quant.cuh",
        "{low[0], low[2], high[0], high[2]}, up[4] = {low[1], low[3], high[1], high[3]}",
        "{low[1], low[3], high[1], high[3]}, up[4] = {low[0], low[2], high[0], high[2]}",
    ),
    "bias of the first four twice": (
        "device/sm90/transposed_quant.cuh", "of_group, 2 * out + 4, column", "of_group, 2 * out, column"
    ),
    "up below -limit": ("device/activation.cuh", "most < -GATE_LIMIT ? -GATE_LIMIT : most", "most"),
    "gate not limited": ("device/activation.cuh", "gate_sum > GATE_LIMIT ? GATE_LIMIT : gate_sum", "gate_sum"),
    "no alpha": ("device/activation.cuh", "(__fmul_rn(gate, GATE_ALPHA))", "(gate)"),
    "no offset": ("device/activation.cuh", "-GATE_LIMIT : most, UP_OFFSET", "-GATE_LIMIT : most, 0.0f"),
}  # fmt: skip


@pytest.mark.parametrize(
    "bug",
    [bug if bug in ("no offset", "halves of the pairs swapped") else pytest.param(bug, marks=SLOW) for bug in BUGS],
)
def test_a_wrong_kernel_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    epilogue = dataclasses.replace(ALTERNATING["FP8_BLOCK rows"], gate_rule=GPT_OSS)
    small = case(epilogue, sizes=(9,))
    acc = small.sums(DRIVER)
    plant(monkeypatch, sm90_bf16_quant, *BUGS[bug])
    with pytest.raises(AssertionError):
        check(sm90_bf16_quant, small, epilogue, acc=acc)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Epilogue\.gate_rule is GateRule.*allowed: None without a gate"):
        Epilogue(d_dtype=torch.float32, gate_rule=GPT_OSS)
    epilogue = Epilogue(row_format=FP8_BLOCK, **VALUES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gate_up is 'alternating'; this kernel's epilogue allows 'interleaved'"):
        check(sm90_fp8_quant, Case((9,), 256), epilogue)
