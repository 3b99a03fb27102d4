"""The quantising call in padless's own words: what it computes, where it writes, and what it refuses."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import padless
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.layouts import empty_mn_major
from padless.ops import epilogue_checks, epilogue_run
from padless.ops.epilogue_run import row_tensor, with_outputs
from padless.reference.epilogue import epilogue_reference

MODULE: Any = importlib.import_module("padless.ops.grouped_gemm_epilogue")  # the function has its module's name

SIZES, M, N, K = (127, 0, 1, 129), 260, 96, 160  # three rows past the last group
GROUPS = len(SIZES)
END = sum(SIZES)
BACKEND = "reference"


def operands(format: BlockScaledFormat, n: int = N) -> tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, w = torch.randn(M, K, generator=generator), torch.randn(GROUPS, n, K, generator=generator)
    a, b = padless.quantize(x, format), padless.quantize(w, format, kind="weight")
    return a, b, padless.group_offsets(SIZES)


def numbers(n: int = N) -> EpilogueTensors:
    generator = torch.Generator().manual_seed(3)
    return EpilogueTensors(
        alpha=torch.randn(GROUPS, generator=generator),
        bias=torch.randn(GROUPS, n, generator=generator),
        prob=torch.rand(M, generator=generator) + 0.1,
    )


EVERYTHING = Epilogue(
    alpha=True,
    bias=True,
    prob=True,
    amax=True,
    d_dtype=torch.float32,
    row_format=MXFP8,
    row_layout="blocked_groups",
    column_format=MXFP8,
    column_layout="blocked",
    scale_rule="rceil",
)


def guarded(epilogue: Epilogue, tensors: EpilogueTensors, n: int = N) -> tuple[EpilogueTensors, Callable[[], None]]:
    """Outputs full of NaN or of a byte pattern between guards, and a check that the guards are as they were."""
    like = with_outputs(epilogue, tensors, M, n, GROUPS, torch.device("cpu"))
    made, guards = {}, []
    for name, t in vars(like).items():
        if not isinstance(t, torch.Tensor) or getattr(tensors, name) is not None:
            continue
        size = t.untyped_storage().nbytes()
        whole = torch.full((size + 512,), 0xFF, dtype=torch.uint8)
        made[name] = whole[256 : 256 + size].view(t.dtype).as_strided(t.shape, t.stride())
        if name == "amax":
            made[name].fill_(-math.inf)
        guards.append((name, whole))

    def check() -> None:
        for name, whole in guards:
            assert bool((whole[:256] == 0xFF).all()), name
            assert bool((whole[-256:] == 0xFF).all()), name

    return replace(like, **made), check


def float64_values(a: BlockScaledTensor, b: BlockScaledTensor, t: EpilogueTensors) -> torch.Tensor:
    """D of alpha, bias and prob in float64, (END, N)."""
    x, w = padless.dequantize(a).double(), padless.dequantize(b).double()
    ends = [0, *itertools.accumulate(SIZES)]
    rows = []
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        sums = x[start:end] @ w[g].T
        rows.append((sums * t.alpha[g].double() + t.bias[g].double()) * t.prob[start:end, None].double())
    return torch.cat(rows)


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8], ids=lambda f: f.name)
def test_it_is_right_row_by_row_and_writes_nothing_past_the_groups(format: BlockScaledFormat) -> None:
    a, b, offs = operands(format)
    given, check_guards = guarded(EVERYTHING, numbers())
    done = padless.grouped_gemm_epilogue(a, b, offs, EVERYTHING, given, backend=BACKEND)
    check_guards()
    assert all(getattr(done, name) is t for name, t in vars(given).items()), "it computes into what it was given"
    wanted = float64_values(a, b, given)
    error = (done.d[:END].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 1e-5
    for g, (start, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(SIZES)])):
        largest = done.d[start:end].abs().max() if end > start else torch.tensor(-math.inf)
        assert done.amax[g] == largest, g
    assert done.d[END:].isnan().all()
    assert bool((done.row_codes.view(torch.uint8)[END:] == 0xFF).all())
    row = row_tensor(EVERYTHING, done, offs)
    near = padless.dequantize(row, offs=offs)[:END]
    assert bool(((near - done.d[:END]).abs() <= done.d[:END].abs() / 16 + done.amax.max() / 448).all())


@pytest.mark.parametrize("gate_up", [None, "interleaved", "concatenated"])
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda f: f.name)
def test_cudnns_call_is_this_one(gate_up: str | None, format: BlockScaledFormat) -> None:
    """Bit for bit, outputs allocated by either."""
    n = 128
    a, b, offs = operands(MXFP8, n)
    t = numbers(n)
    scale = torch.tensor([0.05]) if format == NVFP4 else None
    arguments: dict[str, Any] = {
        "a_tensor": a,
        "b_tensor": b,
        "padded_offsets": offs,
        "alpha_tensor": t.alpha,
        "bias_tensor": t.bias,
        "prob_tensor": t.prob,
        "d_format": format,
        "global_scale_tensor": scale,
        "return_amax": True,
        "semantics": "documented",
        "backend": BACKEND,
    }
    if gate_up is None:
        theirs = padless.grouped_gemm_quant(**arguments)
    else:
        theirs = padless.grouped_gemm_swiglu_quant(gate_up=gate_up, **arguments)
    columns = format != NVFP4
    epilogue = Epilogue(
        alpha=True,
        bias=True,
        prob=True,
        activation="swiglu" if gate_up else "none",
        gate_up=gate_up or "concatenated",
        amax=True,
        row_format=format,
        row_layout="plain_mn" if format == FP8_BLOCK else "blocked",
        column_format=format if columns else None,
        column_layout="blocked" if format == MXFP8 else "plain",
        scale_rule={FP8_BLOCK: "", MXFP8: "rceil", NVFP4: "te"}[format],
    )
    ours = padless.grouped_gemm_epilogue(a, b, offs, epilogue, replace(t, global_scale=scale), backend=BACKEND)

    def same(x: torch.Tensor, y: torch.Tensor) -> bool:
        x, y = (s.flatten().clone().view(torch.uint8) for s in (x, y))
        return torch.equal(x, y)

    assert same(ours.amax, theirs["amax_tensor"][:, 0])
    assert same(ours.row_codes[:END], theirs.row.data[:END])
    rows = END if theirs.row.scale.dim() == 2 else None
    assert same(ours.row_scale[:rows], theirs.row.scale[:rows])
    if columns:
        assert same(ours.column_codes[:END], theirs["d_col_tensor"][:END])
        assert ours.column_tiles == theirs.column_tiles


def test_the_kernel_quantizes_the_values_that_it_stores() -> None:
    """On the emulator, two groups of few rows: one launch, whose codes are the reference's of its own values."""
    generator = torch.Generator().manual_seed(5)
    a = padless.quantize(torch.randn(9, 128, generator=generator), MXFP8)
    b = padless.quantize(torch.randn(2, 64, 128, generator=generator), MXFP8, kind="weight")
    offs = padless.group_offsets([1, 7])
    rows = Epilogue(amax=True, row_format=MXFP8, row_layout="blocked", scale_rule="rceil")
    epilogue = replace(rows, alpha=True, d_dtype=torch.float32)
    given = EpilogueTensors(alpha=torch.tensor([0.5, -3.0]))
    done = padless.grouped_gemm_epilogue(a, b, offs, epilogue, given, backend="emulator")
    wanted = with_outputs(rows, EpilogueTensors(), 9, 64, 2, torch.device("cpu"))
    epilogue_reference(done.d, offs, rows, wanted)
    assert torch.equal(done.amax, wanted.amax)
    assert torch.equal(done.row_codes[:8].view(torch.uint8), wanted.row_codes[:8].view(torch.uint8))
    assert torch.equal(done.row_scale.view(torch.uint8), wanted.row_scale.view(torch.uint8))
    x, w = padless.dequantize(a).double(), padless.dequantize(b).double()
    for row, group, alpha in ((0, 0, 0.5), (1, 1, -3.0), (7, 1, -3.0)):
        near = alpha * (w[group] @ x[row])
        assert (done.d[row] - near).norm() < 1e-3 * near.norm(), row


def test_given_and_new_outputs_go_together() -> None:
    a, b, offs = operands(MXFP8)
    d = torch.full((M, N), math.nan)
    done = padless.grouped_gemm_epilogue(a, b, offs, EVERYTHING, replace(numbers(), d=d), backend=BACKEND, m_aligned=1)
    assert done.d is d
    assert done.column_tiles == 6  # 260 rows in four groups that end anywhere: (260 + 4 * 127) // 128
    assert done.column_scale.numel() == 512 * 6
    assert not d[:END].isnan().any()


def test_rows_of_nothing() -> None:
    _, b, _ = operands(MXFP8)
    empty = padless.quantize(torch.empty(0, K), MXFP8)
    epilogue = Epilogue(d_dtype=torch.float32, amax=True)
    ends = torch.zeros(GROUPS, dtype=torch.int32)
    for backend in (BACKEND, "emulator"):
        done = padless.grouped_gemm_epilogue(empty, b, ends, epilogue, backend=backend)
        assert done.d.shape == (0, N)
        assert done.amax.tolist() == [-math.inf] * GROUPS


def test_offsets_are_looked_at_when_that_is_asked_for() -> None:
    a, b, offs = operands(MXFP8)
    epilogue = Epilogue(d_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"offs\[0\] is 127, which is no multiple of m_aligned = 128; use 1"):
        padless.grouped_gemm_epilogue(a, b, offs, epilogue, m_aligned=128, check_offs=True, backend=BACKEND)
    wrong = torch.tensor([5, 4, 6, 7], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"offs\[1\] is 4; offs must not be negative nor decrease"):
        padless.grouped_gemm_epilogue(a, b, wrong, epilogue, check_offs=True, backend=BACKEND)


NVFP4_ROWS = Epilogue(row_format=NVFP4, scale_rule="te")
FP8_ROWS = Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn")
COLUMNS = Epilogue(column_format=MXFP8, column_layout="plain", scale_rule="rceil")
VALUES = Epilogue(d_dtype=torch.bfloat16)
MX_CONSTANT = Epilogue(row_format=MXFP8, scale_rule="cudnn")
BAD: list[tuple[str, Epilogue, dict[str, Any]]] = [
    (r"tensors\.alpha is None; this epilogue needs it", Epilogue(alpha=True, amax=True), {}),
    (r"tensors\.global_scale is None; this epilogue needs it", NVFP4_ROWS, {}),
    (r"tensors\.norm_const is None", MX_CONSTANT, {}),
    (r"tensors\.prob is \(260,\) torch\.float32 .*has no use for it", VALUES, {"prob": torch.ones(M)}),
    (r"tensors\.amax is .*no use for it", VALUES, {"amax": torch.zeros(GROUPS)}),
    (r"tensors\.row_codes is .*no use for it", VALUES, {"row_codes": torch.zeros(M, N)}),
    (
        r"tensors\.alpha must be \(4,\) torch\.float32 on cpu, got \(3,\) torch\.float32 on cpu",
        Epilogue(alpha=True, amax=True),
        {"alpha": torch.ones(3)},
    ),
    (
        r"tensors\.bias must be \(4, 96\) torch\.float32 on cpu, got \(4, 96\) torch\.bfloat16",
        Epilogue(bias=True, amax=True),
        {"bias": torch.ones(GROUPS, N, dtype=torch.bfloat16)},
    ),
    (
        r"tensors\.bias has strides \(1, 4\); it must be contiguous",
        Epilogue(bias=True, amax=True),
        {"bias": torch.ones(N, GROUPS).t()},
    ),
    (r"tensors\.global_scale must be \(4,\)", NVFP4_ROWS, {"global_scale": torch.ones(3)}),
    (r"tensors\.d must be \(260, 96\) torch\.bfloat16", VALUES, {"d": torch.ones(M, N)}),
    (
        r"tensors\.d has strides",
        VALUES,
        {"d": torch.ones(N, M, dtype=torch.bfloat16).t()},
    ),
    (
        r"tensors\.row_codes must be \(260, 48\) torch\.float4_e2m1fn_x2",
        NVFP4_ROWS,
        {"global_scale": torch.ones(1), "row_codes": torch.zeros(M, N, dtype=torch.uint8)},
    ),
    (
        r"tensors\.row_scale must be \(260, 1\) torch\.float32",
        FP8_ROWS,
        {"row_scale": torch.zeros(M, 2)},
    ),
    (
        r"tensors\.row_scale has strides \(1, 264\); layout 'plain_mn' has \(1, M rounded up to 4\)",
        FP8_ROWS,
        {"row_scale": empty_mn_major(M + 4, 1, torch.device("cpu"))[:M]},
    ),
    (
        r"tensors\.column_tiles is 5; groups that end anywhere can need 6",
        COLUMNS,
        {"column_scale": torch.zeros(20, N).to(torch.float8_e8m0fnu), "column_tiles": 5},
    ),
    (
        r"tensors\.column_scale must be \(24, 96\) torch\.float8_e8m0fnu",
        COLUMNS,
        {"column_scale": torch.zeros(20, N).to(torch.float8_e8m0fnu), "column_tiles": 6},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "epilogue", "given"), BAD, ids=[bad[0] for bad in BAD])
def test_wrong_tensors_are_refused_in_words(message: str, epilogue: Epilogue, given: dict[str, Any]) -> None:
    a, b, offs = operands(MXFP8)
    with pytest.raises(ValueError, match=message):
        padless.grouped_gemm_epilogue(a, b, offs, epilogue, EpilogueTensors(**given), backend=BACKEND)


@pytest.mark.parametrize(
    ("n", "activation", "message"),
    [
        (96, "swiglu", "b has N = 96; gate_up='interleaved' takes 32 columns of gate"),
        (72, "none", "N of the output is 72; it must be a multiple of 16 for MXFP8"),
    ],
)
def test_an_n_that_no_output_can_have_is_refused(n: int, activation: str, message: str) -> None:
    a, b, offs = operands(MXFP8, n)
    epilogue = Epilogue(activation=activation, gate_up="interleaved", row_format=MXFP8, scale_rule="rceil")
    with pytest.raises(ValueError, match=message):
        padless.grouped_gemm_epilogue(a, b, offs, epilogue, backend=BACKEND)


@pytest.mark.parametrize("m_aligned", [0, -1, 2.0, None])
def test_nothing_is_a_multiple_of_it(m_aligned: Any) -> None:
    a, b, offs = operands(MXFP8)
    with pytest.raises(ValueError, match=r"m_aligned is .*; it must be an integer of 1 or more"):
        padless.grouped_gemm_epilogue(a, b, offs, Epilogue(amax=True), m_aligned=m_aligned, backend=BACKEND)


def test_the_tests_above_see_a_wrong_number_and_a_write_past_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(sums: torch.Tensor, offs: torch.Tensor, epilogue: Epilogue, t: EpilogueTensors) -> None:
        epilogue_reference(sums, offs, replace(epilogue, alpha=False), t)

    def past(sums: torch.Tensor, offs: torch.Tensor, epilogue: Epilogue, t: EpilogueTensors) -> None:
        epilogue_reference(sums, offs, epilogue, t)
        t.d[END] = 0

    for planted in (wrong, past):
        monkeypatch.setattr(epilogue_run, "epilogue_reference", planted)
        with pytest.raises(AssertionError):
            test_it_is_right_row_by_row_and_writes_nothing_past_the_groups(MXFP8)


def test_the_checks_are_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the wrong sizes of some tensors would go unseen, or would be seen in torch's words."""
    monkeypatch.setattr(MODULE, "check_tensors", lambda *args: None)
    a, b, offs = operands(MXFP8)
    tensors = EpilogueTensors(prob=torch.ones(M))
    padless.grouped_gemm_epilogue(a, b, offs, VALUES, tensors, backend=BACKEND)
    with pytest.raises(ValueError, match="no use for it"):
        epilogue_checks.check_tensors(VALUES, tensors, M, N, GROUPS, torch.device("cpu"), 1)
