"""The epilogue's definition: `Epilogue` and its reference, against scalar loops that are written from the text.

What would convince a sceptic: D element by element in the stated order of rounded operations; every scale and code by
a search over all codes; nothing written that belongs to nobody; and for each of these a planted mistake that the check
notices. What goes along columns is in test_epilogue_columns.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, group_offsets, layouts, quantize
from padless.epilogue import GATE_UP, SCALE_RULES, Epilogue, GateRule
from padless.kernels.epilogue_launch import prelude_of
from padless.reference import activation as reference_activation
from padless.reference import epilogue as reference_epilogue
from padless.reference.epilogue import epilogue_reference
from support.epilogue_cases import POISON_BYTE, numbers_for, poisoned, sums

F32 = np.float32


# --- D ---------------------------------------------------------------------------------------------------


def scalar_fma(x, y, z):  # type: ignore[no-untyped-def]
    """The float32 number nearest to x * y + z, by fractions."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = F32(float(exact))
    candidates = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) % 2))


def scalar_d(acc, alpha, bias, prob, rule: str, up=None, up_bias=None):  # type: ignore[no-untyped-def]
    """One element of D from numpy float32 scalars, an operation a line."""
    if rule == "gated_bias":
        return scalar_fma(acc, alpha, F32(bias * prob))
    x = scalar_fma(acc, alpha, bias)
    if up is not None:
        u = scalar_fma(up, alpha, up_bias)
        with np.errstate(over="ignore"):
            power = F32(math.exp(-float(x)))
        s = F32(F32(1) / F32(F32(1) + power))
        x = F32(F32(x * s) * u)
    return F32(x * prob)


@pytest.mark.parametrize(
    ("rule", "activation", "order"),
    [
        ("gated_sum", "none", "concatenated"),
        ("gated_bias", "none", "concatenated"),
        ("gated_sum", "swiglu", "concatenated"),
        ("gated_sum", "swiglu", "interleaved"),
    ],
)
def test_d_is_the_stated_operations_in_the_stated_order(rule: str, activation: str, order: str) -> None:
    m, n, sizes = 9, 128, [4, 0, 5]
    epilogue = Epilogue(True, True, True, rule, activation, gate_up=order, d_dtype=torch.float32)
    acc, numbers = torch.randn(m, n), numbers_for(m, n, 3)
    t = poisoned(epilogue, m, n, 3, **numbers)
    epilogue_reference(acc, group_offsets(sizes), epilogue, t)
    a, al, bi, pr = (x.numpy() for x in (acc, *numbers.values()))
    for row, column in itertools.product(range(m), range(epilogue.out_columns(n))):
        g = 0 if row < 4 else 2
        if activation == "none":
            wanted = scalar_d(a[row, column], al[g], bi[g, column], pr[row], rule)
        else:
            gate = column if order == "concatenated" else column // 32 * 64 + column % 32
            up = gate + (n // 2 if order == "concatenated" else 32)
            wanted = scalar_d(a[row, gate], al[g], bi[g, gate], pr[row], rule, a[row, up], bi[g, up])
        got = t.d[row, column].numpy()
        assert got.tobytes() == wanted.tobytes(), (row, column, got, wanted)


def test_the_two_bias_rules_differ_and_agree_without_prob() -> None:
    acc, numbers = torch.randn(5, 16), numbers_for(5, 16, 1)
    results = {}
    for rule, prob in itertools.product(("gated_sum", "gated_bias"), (False, True)):
        e = Epilogue(alpha=True, bias=True, prob=prob, bias_rule=rule, d_dtype=torch.float32)
        t = poisoned(e, 5, 16, 1, **numbers)
        epilogue_reference(acc, group_offsets([5]), e, t)
        results[rule, prob] = t.d
    assert torch.equal(results["gated_sum", False], results["gated_bias", False])
    assert not torch.allclose(results["gated_sum", True], results["gated_bias", True], atol=0.05)


def test_silu_of_large_gates() -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 1e4])
    silu = gate * reference_activation.sigmoid(gate)
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    assert (silu.double() - exact).abs().max() < 1e-5 * gate.abs().max()
    assert silu[0] == 0
    assert silu[-1] == 1e4


# --- codes and scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, MXFP8_E5M2, MXFP4, NVFP4], ids=lambda f: f.name)
def test_rows_without_norm_const_are_quantize_of_d_to_the_bit(format) -> None:  # type: ignore[no-untyped-def]
    acc = sums(40, 160)
    acc[3, 5], acc[4, 40], acc[5], acc[6] = float("nan"), float("inf"), 0.0, 1e-40
    for rule in SCALE_RULES[format]:
        if rule.startswith("cudnn"):
            continue
        epilogue = Epilogue(row_format=format, scale_rule=rule)
        t = poisoned(epilogue, 40, 160, 2, global_scale=torch.tensor([0.01]))
        epilogue_reference(acc, group_offsets([33, 7]), epilogue, t)
        keywords = {"global_scale": 0.01} if format == NVFP4 else {}
        major = {"scale_major": "k"} if format == FP8_BLOCK else {}
        q = quantize(acc, format, scale_rule=rule or None, **keywords, **major)
        assert torch.equal(t.row_codes.view(torch.uint8), q.data.view(torch.uint8)), rule
        assert torch.equal(t.row_scale.view(torch.uint8), q.scale.view(torch.uint8)), rule


def scalar_cudnn(values: np.ndarray, q: float, norm: np.float32, norm_first: bool):  # type: ignore[no-untyped-def]
    """(byte, multiplier) of one block, in scalars: the smallest byte whose power of two is not below t."""
    largest, inverse = F32(np.abs(values).max()), F32(F32(1) / F32(q))
    t = F32(F32(largest * norm) * inverse) if norm_first else F32(F32(largest * inverse) * norm)
    byte = next(b for b in range(255) if math.ldexp(1.0, b - 127) >= float(t))
    multiplier = float(norm) * math.ldexp(1.0, 127 - byte)
    return byte, F32(min(multiplier, float(np.finfo(np.float32).max)))


Q = {
    ("cudnn", MXFP8.name): 448,
    ("cudnn", MXFP8_E5M2.name): 128,
    ("cudnn", MXFP4.name): 6,
    ("cudnn_documented", MXFP8.name): 448,
    ("cudnn_documented", MXFP8_E5M2.name): 57344,
    ("cudnn_documented", MXFP4.name): 6,
}


def check_cudnn_rows(format, rule: str, norm_const: float) -> None:  # type: ignore[no-untyped-def]
    m, n = 6, 96
    acc = sums(m, n, seed=3)
    acc[2] = 0.0
    acc[3] = torch.ldexp(torch.ones(n), torch.randint(-3, 3, (n,)))  # powers of two: scales on a boundary
    epilogue = Epilogue(row_format=format, scale_rule=rule)
    t = poisoned(epilogue, m, n, 1, norm_const=torch.tensor([norm_const]))
    epilogue_reference(acc, group_offsets([m]), epilogue, t)
    codes = layouts.unpack_fp4(t.row_codes) if format == MXFP4 else t.row_codes.view(torch.uint8)
    if format == MXFP4:
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).numpy()
    else:
        table = torch.arange(128, dtype=torch.uint8).view(format.data_dtype).float().numpy()
        table = table[np.isfinite(table)]
    for row, block in itertools.product(range(m), range(n // 32)):
        values = acc[row, 32 * block : 32 * block + 32].numpy()
        byte, multiplier = scalar_cudnn(values, Q[rule, format.name], F32(norm_const), rule != "cudnn")
        assert t.row_scale.view(torch.uint8)[row, block] == byte, (row, block)
        for column, value in enumerate(values):
            scaled = F32(value * multiplier)
            distance = np.abs(table.astype(np.float64) - abs(float(scaled)))
            nearest = np.flatnonzero(distance == distance.min())
            code = int(nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1])
            sign = (8 if format == MXFP4 else 128) if np.signbit(value) else 0
            assert codes[row, 32 * block + column] == code + sign, (row, block, column, value)


@pytest.mark.parametrize("norm_const", [1.0, 0.01, 3.0])
@pytest.mark.parametrize("rule", ["cudnn", "cudnn_documented"])
@pytest.mark.parametrize("format", [MXFP8, MXFP8_E5M2, MXFP4], ids=lambda f: f.name)
def test_cudnn_scales_by_search(format, rule: str, norm_const: float) -> None:  # type: ignore[no-untyped-def]
    check_cudnn_rows(format, rule, norm_const)


def test_cudnn_scales_notice_a_wrong_largest_value(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dict(reference_epilogue.SCALED_MAX)
    wrong["cudnn", MXFP8_E5M2] = 57344.0
    monkeypatch.setattr(reference_epilogue, "SCALED_MAX", wrong)
    with pytest.raises(AssertionError):
        check_cudnn_rows(MXFP8_E5M2, "cudnn", 1.0)


def test_cudnn_scales_notice_codes_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference_epilogue.nearest_code
    monkeypatch.setattr(reference_epilogue, "nearest_code", lambda x, f: right(x * 0.97, f))
    with pytest.raises(AssertionError):
        check_cudnn_rows(MXFP8, "cudnn", 1.0)


def test_norm_const_divides_out() -> None:
    """D ~ code * 2^(byte - 127) / norm_const, within half a code's spacing, and e5m2 leaves 128 .. 57344 unused."""
    acc = torch.randn(64, 64)
    for format, largest in ((MXFP8, 448), (MXFP8_E5M2, 128)):
        epilogue = Epilogue(row_format=format, scale_rule="cudnn")
        t = poisoned(epilogue, 64, 64, 1, norm_const=torch.tensor([0.01]))
        epilogue_reference(acc, group_offsets([64]), epilogue, t)
        scale = torch.exp2(t.row_scale.view(torch.uint8).float() - 127).repeat_interleave(32, dim=1)
        codes = t.row_codes.float()
        assert codes.abs().max() <= largest
        assert codes.abs().max() > largest / 2.1
        error = (codes * scale / 0.01 - acc).abs()
        half_spacing = 2.0**-4 if format == MXFP8 else 2.0**-3
        assert (error <= half_spacing * acc.abs() * 1.001 + 2.0**-7 * scale / 0.01).all()


def test_broken_blocks_decode_to_nan_and_no_other_block_notices() -> None:
    acc = torch.randn(32, 64)
    clean = acc.clone()
    acc[0, 0], acc[1, 33] = float("nan"), float("-inf")
    epilogue = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="cudnn")
    results = []
    for x in (acc, clean):
        t = poisoned(epilogue, 32, 64, 1, norm_const=torch.tensor([2.0]))
        epilogue_reference(x, group_offsets([32]), epilogue, t)
        results.append(t)
    bad, good = results
    broken_row = torch.zeros(32, 64, dtype=torch.bool)
    broken_row[0, :32], broken_row[1, 32:] = True, True
    broken_column = torch.zeros(32, 64, dtype=torch.bool)
    broken_column[:, 0], broken_column[:, 33] = True, True
    for name, broken in (("row_codes", broken_row), ("column_codes", broken_column)):
        codes, other = (getattr(t, name).view(torch.uint8) for t in (bad, good))
        assert (codes[broken] == 0x7F).all()
        assert torch.equal(codes[~broken], other[~broken])
    assert bad.row_scale.view(torch.uint8)[0, 0] == bad.row_scale.view(torch.uint8)[1, 1] == 255


# --- what is written, and what is not --------------------------------------------------------------------


@pytest.mark.parametrize("row_layout", ["plain", "blocked", "blocked_groups"])
def test_row_layouts_hold_the_same_scales_and_nothing_else_is_written(row_layout: str) -> None:
    m, n, sizes = 300, 160, [130, 0, 41]
    acc, offs, valid = sums(m, n), group_offsets(sizes), 171
    epilogue = Epilogue(d_dtype=torch.bfloat16, row_format=MXFP8, row_layout=row_layout, scale_rule="rceil")
    t = poisoned(epilogue, m, n, 3)
    epilogue_reference(acc, offs, epilogue, t)
    wanted = quantize(acc, MXFP8, scale_rule="rceil").scale[:valid]
    if row_layout == "plain":
        got = t.row_scale
    elif row_layout == "blocked":
        got = layouts.from_blocked(t.row_scale, m, 5)
    else:
        got = layouts.from_blocked_groups(t.row_scale, offs, m, 5)
    assert torch.equal(got[:valid].view(torch.uint8), wanted.view(torch.uint8))
    assert (t.row_scale.view(torch.uint8) != POISON_BYTE).sum() <= valid * 5
    assert torch.equal(t.d[:valid], acc[:valid].to(torch.bfloat16))
    for t_out in (t.d, t.row_codes):
        assert (t_out[valid:].contiguous().view(torch.uint8) == POISON_BYTE).all()


def test_amax_of_empty_zero_and_nan_groups() -> None:
    acc = torch.randn(12, 8)
    acc[4:6], acc[7, 3], acc[9:] = 0.0, float("nan"), 1e9
    epilogue = Epilogue(alpha=True, amax=True)
    t = poisoned(epilogue, 12, 8, 4, alpha=torch.tensor([-2.0, 1.0, 1.0, 1.0]))
    epilogue_reference(acc, group_offsets([4, 0, 2, 3]), epilogue, t)
    assert t.amax[0] == (acc[:4] * -2).abs().max()
    assert t.amax[1] == -math.inf
    assert t.amax[2] == 0
    assert t.amax[3].isnan()


@pytest.mark.parametrize("nan", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], ids=hex)
def test_amax_has_one_nan(nan: int) -> None:
    """Whatever NaN a sum is, alone or among many, and over what the buffer held; what held a sign bit does not count."""
    number = torch.tensor(nan, dtype=torch.int32).view(torch.float32)
    epilogue = Epilogue(amax=True)
    for shape in ((1, 8), (40, 160)):
        acc = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        clean = acc.clone()
        acc.view(torch.int32)[-1, 5] = nan
        for held in (-math.inf, -3.0, 1e30):
            t = poisoned(epilogue, *shape, 1)
            assert t.amax is not None
            t.amax.fill_(held)
            epilogue_reference(acc, group_offsets([shape[0]]), epilogue, t)
            assert t.amax.view(torch.int32).item() == 0x7FC00000, (shape, held)
    t.amax[0] = number
    epilogue_reference(clean, group_offsets([40]), epilogue, t)
    if number.signbit():
        assert t.amax[0] == clean.abs().max()
    else:
        assert t.amax.isnan().all()


@pytest.mark.parametrize("nan", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F800001], ids=hex)
def test_scales_and_codes_do_not_show_which_nan_a_sum_was(nan: int) -> None:
    """Rows and columns of every format and rule, the bytes of 0x7FC00000."""
    for format, rules in SCALE_RULES.items():
        for rule in rules:
            columns = format if format.codes_per_byte == 1 else None
            epilogue = Epilogue(row_format=format, column_format=columns, scale_rule=rule, amax=True)
            found = []
            for bits in (nan, 0x7FC00000):
                acc = sums(40, 160)
                acc.view(torch.int32)[3, 5] = bits
                t = poisoned(epilogue, 40, 160, 1, global_scale=torch.tensor([0.01]), norm_const=torch.tensor([2.0]))
                epilogue_reference(acc, group_offsets([40]), epilogue, t)
                found.append(t)
            for name in ("row_codes", "row_scale", "column_codes", "column_scale", "amax"):
                one, other = (getattr(t, name) for t in found)
                if one is not None:
                    same = one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
                    assert same.all(), (format.name, rule, name)


def test_amax_is_of_what_was_not_rounded_yet() -> None:
    acc = torch.full((1, 8), 1.0 + 2.0**-20)
    epilogue = Epilogue(amax=True, d_dtype=torch.bfloat16)
    t = poisoned(epilogue, 1, 8, 1)
    epilogue_reference(acc, group_offsets([1]), epilogue, t)
    assert t.amax[0] == 1.0 + 2.0**-20
    assert (t.d == 1.0).all()


# --- the dataclass ---------------------------------------------------------------------------------------

GOOD = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("activation", {"activation": "gelu"}),
        ("gate_up", {"gate_up": "halves"}),
        ("bias_rule", {"bias_rule": "both"}),
        ("bias_rule", {"bias_rule": "gated_bias", "activation": "swiglu", "gate_up": "concatenated"}),
        ("d_dtype", {"d_dtype": torch.float8_e4m3fn}),
        ("row_format", {"row_format": "MXFP8"}),
        ("column_format", {"column_format": MXFP4, "row_format": MXFP4}),
        ("column_format", {"column_format": MXFP8_E5M2}),
        ("scale_rule", {"scale_rule": "te"}),
        ("scale_rule", {"scale_rule": ""}),
        ("row_layout", {"row_layout": "plain_mn"}),
        ("row_layout", {"row_layout": "tiled"}),
        ("column_layout", {"column_layout": "plain_mn"}),
        (
            "column_layout",
            {"row_format": FP8_BLOCK, "column_format": FP8_BLOCK, "scale_rule": "", "column_layout": "blocked"},
        ),
        ("row_layout", {"row_format": FP8_BLOCK, "column_format": None, "scale_rule": "", "row_layout": "blocked"}),
        ("d_dtype", {"row_format": None, "column_format": None, "scale_rule": ""}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(field: str, change: dict) -> None:
    with pytest.raises(ValueError, match=rf"Epilogue\.{field} is .*; allowed: "):
        replace(GOOD, **change)


def test_every_field_reaches_the_prelude() -> None:
    """Two epilogues that differ in anything are compiled from different text, but for layouts told by their strides."""
    base = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="cudnn", bias=True, prob=True)
    changes = {
        "alpha": True,
        "bias": False,
        "prob": False,
        "bias_rule": "gated_bias",
        "activation": "swiglu",
        "amax": True,
        "d_dtype": torch.float16,
        "row_format": None,
        "row_layout": "blocked",
        "column_format": None,
        "column_layout": "blocked_groups",
        "scale_rule": "cudnn_documented",
    }
    gated = replace(base, activation="swiglu", gate_up="interleaved")
    rules = (None, GateRule(), GateRule(alpha=2.0), GateRule(limit=2.0), GateRule(up_offset=2.0))
    assert len({prelude_of(replace(gated, gate_rule=rule)) for rule in rules}) == len(rules)
    assert prelude_of(replace(gated, gate_in_bf16=True)) != prelude_of(gated)
    assert len({prelude_of(replace(gated, gate_up=order)) for order in GATE_UP}) == len(GATE_UP)
    assert {*changes, "gate_rule", "gate_in_bf16", "gate_up"} == {field.name for field in fields(Epilogue)}
    for field, value in changes.items():
        assert prelude_of(replace(base, **{field: value})) != prelude_of(base), field


def test_the_layout_of_an_output_that_is_not_wanted_changes_no_kernel() -> None:
    only_columns = Epilogue(column_format=MXFP8, scale_rule="rceil", d_dtype=torch.bfloat16)
    only_rows = Epilogue(row_format=MXFP8, scale_rule="rceil", d_dtype=torch.bfloat16)
    for layout in ("blocked", "blocked_groups"):
        assert prelude_of(replace(only_columns, row_layout=layout)) == prelude_of(only_columns)
        assert prelude_of(replace(only_rows, column_layout=layout)) == prelude_of(only_rows)
        assert prelude_of(replace(only_rows, row_layout=layout)) != prelude_of(only_rows)
