"""Weight gradients of grouped layers: FP8 with block scales against torch's bf16 product and DeepGEMM's, on one GPU.

Contenders of a point, of which every one multiplies the same values:

    padless 1d2d bfloat16              stored; X's scales per 128 features and 128 tokens
    padless 1d2d float32               stored
    padless 1d2d float32 +=            added to what is there, in the same launch
    padless 1d1d ...                   X's scales per feature and 128 tokens
    ..., tile 128                      the same with the tile that is not picked
    torch_bf16                         torch._grouped_mm of bf16 rows, bf16 stored
    deepgemm_k_grouped                 its kernel alone, on groups padded to 128 tokens before, added in float32

Before they are timed every output is poisoned, or cleared where it is added to, and some of its rows are compared with
float64; what is stored is compared once more after the last timed call.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from padless.bench.group_sizes import draw_group_sizes
from padless.bench.paper import BenchResult
from padless.bench.peers import look_in, try_to_load
from padless.bench.results import Record, finite
from padless.bench.session import DEFAULT_OUT_DIR, DEFAULT_SETTINGS, RunSettings, open_session, run_points
from padless.bench.wgrad_report import print_wgrad
from padless.formats import ceil_div, round_up
from padless.grouped_columns import GroupedColumns, num_scale_rows, padded_tokens, scale_columns
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig, WgradProblem, blocks_m, select_config
from padless.testing import machine
from padless.testing.timing import Timer

TORCH, DEEPGEMM = "torch_bf16", "deepgemm_k_grouped"
_TOLERANCE = (
    0.01  # relative error of a row; rounding to bf16 takes 2^-9 of an element, FP8 tensor cores as much
)
_BF16_TOLERANCE = 0.02  # operands rounded to bf16 too
_CHECKED_ROWS = 16
_NUM_SMS = 132


@dataclass(frozen=True)
class WgradPoint:
    """sizes: "equal", or "drawn" as in the paper's Appendix C.1. alignment: of the groups in the transposed copies."""

    sizes: str
    M: int
    N: int
    K: int
    groups: int
    alignment: int = 128


def equal(groups: int, tokens: int, n: int, k: int) -> WgradPoint:
    """Groups of as many tokens each."""
    return WgradPoint("equal", groups * tokens, n, k, groups)


DRAWN = (
    WgradPoint("drawn", 8192, 4096, 7168, 8),
    WgradPoint("drawn", 16384, 4096, 7168, 32),
    WgradPoint("drawn", 32768, 4096, 7168, 32),
    WgradPoint("drawn", 32768, 2048, 2048, 64),
    WgradPoint("drawn", 65536, 7168, 2048, 32),
)
EQUAL = (
    equal(8, 1024, 4096, 7168),
    equal(8, 4096, 4096, 7168),
    equal(32, 256, 4096, 7168),
    equal(32, 512, 4096, 7168),
    equal(32, 1024, 4096, 7168),
    equal(64, 512, 2048, 2048),
    equal(64, 1024, 2816, 2048),
    equal(32, 2048, 7168, 2048),
    equal(128, 512, 1536, 2048),
)


def grid(*, full: bool) -> list[WgradPoint]:
    """14 points; full, with the drawn ones in copies of the closer alignment too, 19."""
    closer = [replace(point, alignment=32) for point in DRAWN] if full else []
    return [*DRAWN, *EQUAL, *closer]


def sizes_of(point: WgradPoint, seed: int) -> list[int]:
    """Tokens of each group; the same for both alignments."""
    if point.sizes == "equal":
        return [point.M // point.groups] * point.groups
    if point.sizes != "drawn":
        raise ValueError(f"sizes is {point.sizes!r}; allowed: 'equal', 'drawn'")
    rng = random.Random(f"{seed}:{point.M}:{point.N}:{point.K}:{point.groups}")
    return draw_group_sizes(point.groups, point.M, rng)


# ----------------------------------------------------------------------------------------------- operands


def make_columns(
    sizes: Sequence[int], features: int, block: tuple[int, int], alignment: int, seed: int, device: str
) -> GroupedColumns:
    """A transposed copy made where it is used: normal codes, scales within a factor of two of one."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, groups = sum(sizes), len(sizes)
    tokens = padded_tokens(rows, groups, alignment)
    values = torch.randn((features, tokens), generator=generator, device=device).mul_(112).clamp_(-448, 448)
    starts = [0, *itertools.accumulate(round_up(size, alignment) for size in sizes)]
    own = torch.zeros(tokens, dtype=torch.bool)
    for start, size in zip(starts, sizes, strict=False):
        own[start : start + size] = True
    data = (values * own.to(device)).to(torch.float8_e4m3fn)
    del values
    scale_shape = (num_scale_rows(rows, groups), scale_columns(features, block))
    scale = torch.exp2(torch.rand(scale_shape, generator=generator, device=device) * 2 - 1) / 112
    blocks = [0, *itertools.accumulate(ceil_div(size, 128) for size in sizes)]
    integers = (list(itertools.accumulate(sizes)), starts[:groups], blocks[:groups])
    offs, first, first_block = (torch.tensor(v, dtype=torch.int32, device=device) for v in integers)
    return GroupedColumns(data, scale, offs, first, first_block, block, alignment)


def values_of(operand: GroupedColumns, group: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """(features, size) values of a group's tokens."""
    start, block = int(operand.starts[group]), int(operand.block_starts[group])
    scale = operand.scale[block : block + ceil_div(size, 128)].to(dtype)
    scale = scale.repeat_interleave(128, 0)[:size].repeat_interleave(operand.block[0], 1)
    return operand.data[:, start : start + size].to(dtype) * scale[:, : operand.features].t()


def rows_of(operand: GroupedColumns, sizes: Sequence[int]) -> torch.Tensor:
    """(M, features) bf16, as they were before the copy: what a bf16 product reads."""
    return torch.cat([values_of(operand, g, s, torch.float32).t().bfloat16() for g, s in enumerate(sizes)])


@dataclass(frozen=True)
class WgradOperands:
    """What is multiplied: dY, and X in both modes with the same codes; sizes on the host."""

    dy: GroupedColumns
    x: dict[str, GroupedColumns]
    sizes: list[int]


def make_operands(point: WgradPoint, seed: int, device: str) -> WgradOperands:
    """Operands of a point. X's scales per feature are those of its blocks, so that all contenders multiply one thing."""
    sizes = sizes_of(point, seed)
    dy = make_columns(sizes, point.N, (1, 128), point.alignment, seed, device)
    blocks = make_columns(sizes, point.K, (128, 128), point.alignment, seed + 1, device)
    columns = blocks.scale.repeat_interleave(128, 1)[:, : point.K].contiguous()
    return WgradOperands(dy, {"1d2d": blocks, "1d1d": replace(blocks, scale=columns, block=(1, 128))}, sizes)


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


def own_contenders(
    point: WgradPoint, operands: WgradOperands, *, full: bool, device: str
) -> list[WgradContender]:
    """padless in both modes and all outputs. Outputs of one type share memory: they are big, and looked at in turn."""
    from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad

    shape = (point.groups, point.N, point.K)
    outs = {d: torch.empty(shape, dtype=d, device=device) for d in (torch.bfloat16, torch.float32)}
    found = []
    for mode, (dtype, accumulates) in itertools.product(
        ("1d2d", "1d1d"), ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))
    ):
        x, out = operands.x[mode], outs[dtype]
        problem = WgradProblem(point.N, point.K, x.data.shape[1], point.groups, mode, dtype, _NUM_SMS)
        picked = select_config(problem)
        name = f"padless {mode} {str(dtype)[6:]}" + (" +=" if accumulates else "")
        bytes_ = operands.dy.data.nbytes + x.data.nbytes + operands.dy.scale.nbytes + x.scale.nbytes
        bytes_ += out.nbytes * (2 if accumulates else 1)
        others = [m for m in blocks_m(mode, dtype) if m != picked.block_m and (full or mode == "1d2d")]
        for block_m in (picked.block_m, *others):
            config: WgradConfig | None = (
                None if block_m == picked.block_m else replace(picked, block_m=block_m)
            )

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


def torch_contender(point: WgradPoint, operands: WgradOperands) -> WgradContender:
    """torch's grouped product along the rows of bf16 operands."""
    dy, x = rows_of(operands.dy, operands.sizes), rows_of(operands.x["1d2d"], operands.sizes)
    offs = operands.dy.offs
    results: dict[str, torch.Tensor] = {}

    def product() -> None:
        results[TORCH] = torch._grouped_mm(dy.t(), x, offs=offs)

    bytes_ = dy.nbytes + x.nbytes + 2 * point.groups * point.N * point.K
    return WgradContender(TORCH, product, lambda: results[TORCH], bytes_, tolerance=_BF16_TOLERANCE)


def deepgemm_contender(
    point: WgradPoint, operands: WgradOperands, library: Any, device: str
) -> WgradContender:
    """DeepGEMM's k-grouped kernel with c = d, on operands in its layout: groups of 128 tokens and multiples, one after
    the other, each (features, tokens of the group). Padding and laying out are not timed.
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
    function = library.k_grouped_fp8_gemm_nt_contiguous

    def product() -> None:
        a, b = ((codes, scale.t()) for codes, scale in zip(flat, scales, strict=True))
        function(a, b, out, ks, ks_tensor, out)

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
    for group in {
        max(filled, key=lambda g: operands.sizes[g]),
        min(filled, key=lambda g: operands.sizes[g]),
    }:
        size = operands.sizes[group]
        n = operands.dy.features
        rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS)).round().long().to(operands.dy.data.device)
        a = values_of(operands.dy, group, size, torch.float64)[rows]
        found.append(Expected(group, rows, a @ values_of(operands.x["1d2d"], group, size, torch.float64).t()))
    return found


def row_error(out: torch.Tensor, expected: Sequence[Expected]) -> float:
    """Largest relative error of the rows; NaN counts as infinite."""
    worst = 0.0
    for part in expected:
        got = out[part.group][part.rows].double()
        error = (got - part.product).norm(dim=1) / part.product.norm(dim=1)
        worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
    return worst


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
    point: WgradPoint,
    seed: int,
    timer: Timer,
    library: Any = None,
    *,
    full: bool = False,
    device: str = "cuda",
) -> Record:
    """Record of one point: checks, GPU times, and the bytes of every contender."""
    operands = make_operands(point, seed, device)
    contenders = own_contenders(point, operands, full=full, device=device)
    errors: dict[str, str] = {}
    makers: dict[str, Callable[[], WgradContender]] = {TORCH: lambda: torch_contender(point, operands)}
    if library is not None:
        makers[DEEPGEMM] = lambda: deepgemm_contender(point, operands, library, device)
    for name, make in makers.items():
        try:
            contenders.append(make())
        except Exception as error:  # a peer may fail in any way; the others are measured
            errors[name] = _describe(error)
    expected = expected_rows(operands)
    right, row_errors, wrong = [], {}, {}
    for contender in contenders:
        try:
            off, complaint = is_wrong(contender, expected, fresh=True)
        except Exception as error:
            errors[contender.name] = _describe(error)
            continue
        row_errors[contender.name] = finite(off)
        if complaint:
            wrong[contender.name] = complaint
        else:
            right.append(contender)
    times = timer.gpu({contender.name: contender.call for contender in right})
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


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def find_deepgemm(folder: Path | None) -> tuple[Any, str]:
    """The library with its k-grouped product, or None and why."""
    from padless.bench.peers.deepgemm import DeepGemm

    peer = DeepGemm(folder)

    def load() -> Any:
        look_in(folder, "deepgemm")
        import deep_gemm

        return deep_gemm

    library, answer = try_to_load(peer.obstacle(), load, peer.loading, ("k_grouped_fp8_gemm_nt_contiguous",))
    return (library, "") if answer.usable else (None, answer.reason)


def run_wgrad(
    points: Sequence[WgradPoint],
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
    *,
    full: bool = False,
) -> BenchResult:
    """Measures every contender at every point, prints the tables and writes wgrad.jsonl.

    Raises ValueError without a CUDA GPU.
    """
    from padless.bench.peers import resolve_folder

    session = open_session("wgrad", out_dir, (), settings)
    library, reason = find_deepgemm(resolve_folder(settings.peers_dir))
    session.console.print(f"DeepGEMM: {reason or 'found'}", highlight=False, markup=False)

    def measure(point: WgradPoint) -> Record:
        record = measure_wgrad(point, settings.seed, session.timer, library, full=full)
        flops = record["flops"]
        floors = {name: session.floor_us(flops, bytes_) for name, bytes_ in record["bytes"].items()}
        return record | {"floors_us": floors}

    records = run_points(session, "wgrad", list(points), measure)
    print_wgrad(session.console, records)
    return BenchResult(records, session.file.path)
