"""Weight gradients of grouped layers: FP8 with block scales against torch's bf16 product and DeepGEMM's, on one GPU.

Contenders of a point, of which every one multiplies the same values:

    padless 1d2d bfloat16              stored; X's scales per 128 features and 128 tokens
    padless 1d2d float32               stored
    padless 1d2d float32 +=            added to what is there, in the same launch
    padless 1d1d ...                   X's scales per feature and 128 tokens
    ..., tile 128                      the same with the tile that is not picked
    padless bf16 ...                   of bf16 rows, the three outputs
    torch_bf16                         torch._grouped_mm of the same rows, bf16 stored
    deepgemm_k_grouped                 its kernel alone, on groups padded to 128 tokens before, added in float32

Before they are timed every output is poisoned, or cleared where it is added to, and some of its rows are compared with
float64; what is stored is compared once more after the last timed call. `fill bfloat16` and `fill float32` write as many
bytes, next to them. In floors a bf16 operation counts as two, as the ceiling is that of FP8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from padless.bench.cases.problems import wgrad as wgrad_problem
from padless.bench.cases.problems.wgrad import WgradOperands, WgradPoint, make_operands, rows_of
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.report import table
from padless.bench.results import Record, finite, tflops
from padless.bench.session import Session
from padless.formats import round_up
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig, WgradProblem, blocks_m, select_config
from padless.layouts import GroupedColumns
from padless.testing import machine
from padless.testing.gradients import values_of
from padless.testing.judge import describe, row_errors, worst
from padless.testing.timing import Timer

TORCH, DEEPGEMM = "torch_bf16", "deepgemm_k_grouped"
FILLS = {torch.bfloat16: "fill bfloat16", torch.float32: "fill float32"}
BF16 = "padless bf16"
_OUTPUTS = ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))  # type, whether it is added to
_TOLERANCE = 0.01  # relative error of a row; rounding to bf16 takes 2^-9 of an element, FP8 tensor cores as much
_BF16_TOLERANCE = 0.02  # operands rounded to bf16 too
_CHECKED_ROWS = 16
_NUM_SMS = 132


# --------------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class WgradContender:
    """call: does the work. out: its result after a call. accumulates: whether ``out`` is added to.

    bytes: that it must move at least, each operand and result once.
    """

    name: str
    call: Callable[[], Any]
    out: Callable[[], torch.Tensor]
    bytes: int
    accumulates: bool = False
    buffer: torch.Tensor | None = None  # what can be poisoned
    tolerance: float = _TOLERANCE


Outputs = dict[torch.dtype, torch.Tensor]


def make_outputs(point: WgradPoint, device: str) -> Outputs:
    """An output of each type, which contenders share: they are big, and checked in turn."""
    shape = (point.groups, point.N, point.K)
    return {d: torch.empty(shape, dtype=d, device=device) for d in (torch.bfloat16, torch.float32)}


def own_contenders(point: WgradPoint, operands: WgradOperands, outs: Outputs) -> list[WgradContender]:
    """padless in both FP8 modes and all outputs."""
    from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad

    found = []
    for mode, (dtype, accumulates) in itertools.product(("1d2d", "1d1d"), _OUTPUTS):
        x, out = operands.x[mode], outs[dtype]
        tokens = x.data.shape[1]
        problem = WgradProblem(point.N, point.K, tokens, point.groups, mode, dtype, _NUM_SMS, accumulates)
        picked = select_config(problem)
        name = f"padless {mode} {str(dtype)[6:]}" + (" +=" if accumulates else "")
        bytes_ = operands.dy.data.nbytes + x.data.nbytes + operands.dy.scale.nbytes + x.scale.nbytes
        bytes_ += out.nbytes * (2 if accumulates else 1)
        others = [m for m in blocks_m(mode, dtype) if m != picked.block_m and (point.every_tile or mode == "1d2d")]
        for block_m in (picked.block_m, *others):
            alone = replace(picked, block_m=block_m, cluster_n=1, reduced_pieces=0)
            config: WgradConfig | None = None if block_m == picked.block_m else alone

            def call(
                x: GroupedColumns = x,
                out: torch.Tensor = out,
                accumulates: bool = accumulates,
                config: WgradConfig | None = config,
            ) -> None:
                grouped_gemm_wgrad(operands.dy, x, out=out, accumulate=accumulates, config=config)

            label = name if config is None else f"{name}, tile {block_m}"
            found.append(
                WgradContender(label, call, lambda out=out: out, bytes_, accumulates, out)  # type: ignore[misc]
            )
    return found


def bf16_contenders(rows: tuple[torch.Tensor, torch.Tensor], offs: torch.Tensor, outs: Outputs) -> list[WgradContender]:
    """padless on bf16 rows of dY and X, all outputs."""
    from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad

    dy, x = rows
    found = []
    for dtype, accumulates in _OUTPUTS:
        out = outs[dtype]

        def call(out: torch.Tensor = out, accumulates: bool = accumulates) -> None:
            grouped_gemm_wgrad(dy, x, offs=offs, out=out, accumulate=accumulates)

        bytes_ = dy.nbytes + x.nbytes + out.nbytes * (2 if accumulates else 1)
        name = f"{BF16} {str(dtype)[6:]}" + (" +=" if accumulates else "")
        result = partial(_itself, out)
        found.append(WgradContender(name, call, result, bytes_, accumulates, out, _BF16_TOLERANCE))
    return found


def _itself(out: torch.Tensor) -> torch.Tensor:
    return out


def torch_contender(rows: tuple[torch.Tensor, torch.Tensor], offs: torch.Tensor) -> WgradContender:
    """torch's grouped product along the rows of bf16 operands."""
    dy, x = rows
    results: dict[str, torch.Tensor] = {}

    def product() -> None:
        results[TORCH] = torch._grouped_mm(dy.t(), x, offs=offs)

    bytes_ = dy.nbytes + x.nbytes + 2 * offs.shape[0] * dy.shape[1] * x.shape[1]
    return WgradContender(TORCH, product, lambda: results[TORCH], bytes_, tolerance=_BF16_TOLERANCE)


def deepgemm_contender(
    point: WgradPoint, operands: WgradOperands, k_grouped: Callable[..., Any], device: str
) -> WgradContender:
    """DeepGEMM's k-grouped kernel with c = d, on operands in its layout: groups of 128 tokens and multiples, one after
    the other, each (features, tokens of the group). Padding and laying out are not timed. k_grouped: its function.
    """
    ks = [round_up(size, 128) for size in operands.sizes]
    flat, scales = [], []
    for operand in (operands.dy, operands.x["1d1d"]):
        codes = operand.data.view(torch.uint8)
        parts = []
        for start, size, k in zip(operand.starts.tolist(), operands.sizes, ks, strict=True):
            part = torch.zeros((operand.features, k), dtype=torch.uint8, device=device)
            part[:, :size] = codes[:, start : start + size]
            parts.append(part.flatten())
        flat.append(torch.cat(parts).view(torch.float8_e4m3fn))
        scales.append(operand.scale[: sum(ks) // 128].contiguous())
    out = torch.zeros((point.groups, point.N, point.K), device=device)
    ks_tensor = torch.tensor(ks, dtype=torch.int32, device=device)

    def product() -> None:
        a, b = ((codes, scale.t()) for codes, scale in zip(flat, scales, strict=True))
        k_grouped(a, b, out, ks, ks_tensor, out)

    bytes_ = sum(t.nbytes for t in (*flat, *scales)) + 2 * out.nbytes
    return WgradContender(DEEPGEMM, product, lambda: out, bytes_, True, out)


# ------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Expected:
    """float64 rows of a group's product. Empty groups are not among them."""

    group: int
    rows: torch.Tensor
    product: torch.Tensor


def expected_rows(operands: WgradOperands) -> list[Expected]:
    """Some rows of the longest group and of the shortest that has tokens."""
    filled = [g for g, size in enumerate(operands.sizes) if size > 0]
    found = []
    for group in {max(filled, key=lambda g: operands.sizes[g]), min(filled, key=lambda g: operands.sizes[g])}:
        n = operands.dy.features
        rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS)).round().long().to(operands.dy.data.device)
        a, b = (values_of(t, operands.sizes, group, torch.float64) for t in (operands.dy, operands.x["1d2d"]))
        found.append(Expected(group, rows, a[rows] @ b.t()))
    return found


def row_error(out: torch.Tensor, expected: Sequence[Expected]) -> float:
    """Largest relative error of the rows; NaN counts as infinite."""
    return max((worst(row_errors(out[part.group][part.rows], part.product)) for part in expected), default=0.0)


def is_wrong(contender: WgradContender, expected: Sequence[Expected], *, fresh: bool) -> tuple[float, str]:
    """(error, what is wrong or ""). fresh: calls it, on a poisoned or cleared output."""
    if fresh:
        if contender.buffer is not None:
            contender.buffer.fill_(0.0 if contender.accumulates else float("nan"))
        contender.call()
    error = row_error(contender.out(), expected)
    if error <= contender.tolerance:
        return error, ""
    return error, f"is wrong: relative error of a row {error:.3g}, allowed {contender.tolerance}"


def measure_wgrad(
    point: WgradPoint, seed: int, timer: Timer, k_grouped: Callable[..., Any] | None = None, device: str = "cuda"
) -> Record:
    """Record of one point: checks, GPU times, and the bytes of every contender. k_grouped: DeepGEMM's or None."""
    operands = make_operands(point, seed, device)
    outs = make_outputs(point, device)
    rows = (rows_of(operands.dy, operands.sizes), rows_of(operands.x["1d2d"], operands.sizes))
    contenders = own_contenders(point, operands, outs) + bf16_contenders(rows, operands.dy.offs, outs)
    errors: dict[str, str] = {}
    makers: dict[str, Callable[[], WgradContender]] = {TORCH: lambda: torch_contender(rows, operands.dy.offs)}
    if k_grouped is not None:
        makers[DEEPGEMM] = partial(deepgemm_contender, point, operands, k_grouped, device)
    for name, make in makers.items():
        try:
            contenders.append(make())
        except Exception as error:  # a peer may fail in any way; the others are measured
            errors[name] = describe(error)
    expected = expected_rows(operands)
    right, row_errors, wrong = [], {}, {}
    for contender in contenders:
        try:
            off, complaint = is_wrong(contender, expected, fresh=True)
        except Exception as error:
            errors[contender.name] = describe(error)
            continue
        row_errors[contender.name] = finite(off)
        if complaint:
            wrong[contender.name] = complaint
        else:
            right.append(contender)
    # As float32: torch fills bfloat16 at 3.4 of 4.7 TB/s.
    fills = {name: partial(outs[dtype].view(torch.float32).fill_, 1.0) for dtype, name in FILLS.items()}
    times = timer.gpu({contender.name: contender.call for contender in right} | fills)
    for contender in right:
        if contender.accumulates:
            continue
        contender.call()  # outputs of one type share memory
        _, complaint = is_wrong(contender, expected, fresh=False)
        if complaint:
            wrong[contender.name] = f"after timing it {complaint}"
    return {
        "sizes": operands.sizes,
        "flops": 2 * point.M * point.N * point.K,
        "bytes": {contender.name: contender.bytes for contender in contenders},
        "row_error": row_errors,
        "wrong": wrong,
        "errors": errors,
        "gpu": {name: timing.as_dict() for name, timing in times.items()},
        "clocks": machine.clocks(),
    }


def grid(name: str, seed: int) -> list[WgradPoint]:
    """21 points ("full") or 16."""
    return wgrad_problem.grid(full=name == "full")


def start(session: Session) -> Callable[[WgradPoint], Record]:
    """Every contender at a point."""
    k_grouped = next((peer.k_grouped for peer in session.peers if isinstance(peer, DeepGemm)), None)

    def measure(point: WgradPoint) -> Record:
        record = measure_wgrad(point, session.settings.seed, session.timer, k_grouped)
        flops = record["flops"]
        floors = {
            name: session.floor_us(flops * (2 if name == TORCH or name.startswith(BF16) else 1), bytes_)
            for name, bytes_ in record["bytes"].items()
        }
        return record | {"floors_us": floors}

    return measure


# ------------------------------------------------------------------------------------------------- tables

_AXES = ("sizes", "M", "groups", "N", "K", "alignment")


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A table a contender: time, TFLOP/s, times as fast as the others, share of the floor."""
    every = dict.fromkeys(name for record in records for name in record["gpu"])
    names = [name for name in every if name not in FILLS.values()]
    return [_table(name, [record for record in records if name in record["gpu"]]) for name in names]


def _table(name: str, records: table.Records) -> table.Table:
    ratios = [
        table.ratio("torch /", TORCH, name, 2),
        table.ratio("DeepGEMM /", DEEPGEMM, name, 2),
        table.Column("floor /", partial(_of_floor, name), 2),
    ]
    stored = next((fill for dtype, fill in FILLS.items() if f" {str(dtype)[6:]}" in name and "+=" not in name), None)
    if stored is not None:
        ratios.insert(0, table.ratio("fill /", stored, name, 2))
    columns = [
        *table.axes(*_AXES),
        table.time(name, "us"),
        table.Column("TF", lambda part: [rate for r in part if (rate := tflops(r, name)) is not None], 0),
        *ratios,
    ]
    shown = table.table_of(f"Weight gradients: {name}", columns, table.by_point(records), 1)
    shown.rows.append(["geomean", *[""] * (len(_AXES) + 1), *(ratio.cell(records) for ratio in ratios)])
    return shown


def _of_floor(name: str, part: table.Records) -> list[float]:
    floors = ((r["floors_us"].get(name), r["gpu"][name]["us"]) for r in part)
    return [floor / us for floor, us in floors if floor is not None]
