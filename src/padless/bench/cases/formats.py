"""Every pair of formats that a GPU has a kernel for, against torch's bf16 grouped product, in one run.

Prefill and decode sizes, and the four shapes of GPU MODE's NVFP4 grouped GEMM competition with its tolerance. What a
contender must move at least is its own quantised operands and the bf16 result: a floor for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from padless.bench.group_sizes import DecodePoint, Point, decode_sizes, group_sizes
from padless.bench.measure import gpu_times
from padless.bench.peers import Contender
from padless.bench.report.table import Records, Sessions, Table, labels, time_tables
from padless.bench.results import Record, ratios, time_us
from padless.bench.session import Session
from padless.formats import BlockScaledTensor
from padless.kernels.table import PLAIN_ROUTES, ROUTES, Route, kernels_arch
from padless.runtime.driver import cuda_driver
from padless.testing.judge import SampledReference, check, describe, float64_rows, outside
from padless.testing.operands import BF16, Operands, make_operands
from padless.testing.timing import Timer, geomean

# What is compared where there is a kernel for it; a pair without one is listed as missing.
WANTED = (
    ("FP8_BLOCK", "FP8_BLOCK"),
    ("MXFP8", "MXFP8"),
    ("NVFP4", "NVFP4"),
    ("MXFP4", "MXFP4"),
    (BF16, "NVFP4"),
    (BF16, "MXFP4"),
    (BF16, "FP8_BLOCK"),
    ("FP8_BLOCK", "NVFP4"),
    ("FP8_BLOCK", "MXFP4"),
)
TORCH = "torch_bf16"
PLAIN = f"{BF16} x {BF16}"
MX = "MXFP8 x MXFP8"
DEQUANTIZE = "dequantize MXFP8, torch_bf16"
_ROW_LIMIT = 0.01  # rounding to bf16 costs at most 2^-9 of an element, FP8 tensor cores about as much again

# GPU MODE's NVFP4 grouped GEMM shapes: rows of each group, N, K; float16 results within 1e-3 + 1e-3 |expected|.
COMPETITION: dict[str, tuple[tuple[int, ...], int, int]] = {
    "A": ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168),
    "B": ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048),
    "C": ((192, 320), 3072, 4096),
    "D": ((128, 384), 4096, 1536),
}
_COMPETITION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class FormatsPoint:
    """case: "prefill", "decode" (1 to ``rows`` rows a group) or a competition shape, "A" to "D"."""

    case: str
    M: int
    N: int
    K: int
    groups: int
    rows: int = 0


def prefill(m: int, n: int, k: int, groups: int) -> FormatsPoint:
    """Group sizes as in the paper's grid."""
    return FormatsPoint("prefill", m, n, k, groups)


def decode(groups: int, rows: int, n: int, k: int, seed: int = 0) -> FormatsPoint:
    """Groups of 1 to ``rows`` rows."""
    m = sum(decode_sizes(DecodePoint(groups, rows, n, k), seed))
    return FormatsPoint("decode", m, n, k, groups, rows)


def competition(shape: str) -> FormatsPoint:
    """One of COMPETITION."""
    sizes, n, k = COMPETITION[shape]
    return FormatsPoint(shape, sum(sizes), n, k, len(sizes))


def grid(name: str, seed: int = 0) -> list[FormatsPoint]:
    """Prefill, decode, competition: 18 + 24 + 4 points ("full"), or 4 + 6 + 4."""
    shapes = ((4096, 7168), (7168, 4096), (3072, 8192))
    if name == "full":
        points = [prefill(m, n, k, g) for m in (8192, 16384, 32768) for g in (8, 32) for n, k in shapes]
        points += [decode(g, r, n, k, seed) for g in (8, 32) for r in (1, 4, 16, 64) for n, k in shapes]
    else:
        points = [prefill(m, *shapes[i], g) for i, (m, g) in enumerate(((8192, 8), (8192, 32)))]
        points += [prefill(32768, *shapes[i], g) for i, g in enumerate((8, 32))]
        points += [decode(g, r, *shapes[0], seed) for g in (8, 32) for r in (1, 16, 64)]
    return points + [competition(shape) for shape in COMPETITION]


def sizes_of(point: FormatsPoint, seed: int) -> list[int]:
    """Rows of each group of a point."""
    if point.case in COMPETITION:
        return list(COMPETITION[point.case][0])
    if point.case == "decode":
        return decode_sizes(DecodePoint(point.groups, point.rows, point.N, point.K), seed)
    if point.case != "prefill":
        raise ValueError(f"case is {point.case!r}; allowed: 'prefill', 'decode', {', '.join(COMPETITION)}")
    return group_sizes(Point(point.M, point.N, point.K, point.groups), seed)


# --------------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Entry:
    """A contender with what it multiplies."""

    contender: Contender
    operands: Operands
    bytes: int  # of operands and result


def offered(arch: str) -> tuple[dict[str, Route], list[str]]:
    """Contenders' names with their routes on ``arch``, and the wanted pairs that have none.

    A pair that several kernels take has a contender for each, named after the kernel but for the default.
    """
    found: dict[str, Route] = {}
    missing = []
    arch = kernels_arch(arch)
    for a, b in WANTED:
        routes = [p for p in ROUTES if (p.operation, p.arch, p.a, p.b) == ("grouped_gemm", arch, a, b)]
        for i, route in enumerate(routes):
            found[f"{a} x {b}" if i == 0 else f"{a} x {b}, {route.name}"] = route
        if not routes:
            missing.append(f"{a} x {b}")
    return found, missing


def plain_names(arch: str) -> list[str]:
    """Names of the products of plain tensors on ``arch``."""
    here = ("grouped_gemm", kernels_arch(arch))
    return [f"{p.a} x {p.b}" for p in PLAIN_ROUTES if (p.operation, p.arch) == here]


def own_entries(
    names: dict[str, Route], sizes: list[int], point: FormatsPoint, seed: int, device: str
) -> dict[str, Entry]:
    """padless with every pair of formats. On the CPU the reference stands in for the kernels."""
    from padless.ops.grouped_gemm import grouped_gemm

    dtype = torch.float16 if point.case in COMPETITION else torch.bfloat16
    entries: dict[str, Entry] = {}
    made: dict[tuple[str, str], Operands] = {}
    for name, route in names.items():
        pair = (route.a, route.b)
        if pair not in made:
            made[pair] = make_operands(*pair, sizes, point.N, point.K, seed=seed, device=device)
        operands = made[pair]
        out = torch.full((sum(sizes), point.N), float("nan"), dtype=dtype, device=device)
        # A kernel that is not the default is chosen by its class, so that it too picks its tile.
        choice = None if "," not in name else route.config_class
        call = partial(grouped_gemm, operands.a, operands.b, operands.offs, out=out, config=choice)
        contender = Contender(name, call, lambda out=out: out, _ROW_LIMIT)  # type: ignore[misc]
        entries[name] = Entry(contender, operands, operands.bytes + out.nbytes)
    return entries


def bf16_entries(
    source: Operands, mx: Operands | None, point: FormatsPoint, plain_routes: Sequence[str]
) -> dict[str, Entry]:
    """torch's bf16 grouped product of the dequantised source, the same dequantising MXFP8 at every call before it, and
    padless's product of the source's tensors where ``plain_routes``, of "BF16 x BF16", has it.
    """
    from padless.ops.grouped_gemm import grouped_gemm
    from padless.quantization.quantize import dequantize

    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def values(t: BlockScaledTensor | torch.Tensor) -> torch.Tensor:
        return t if isinstance(t, torch.Tensor) else dequantize(t, torch.bfloat16)

    x, w = values(source.a), torch.cat([values(source.b[g : g + 1]) for g in range(point.groups)])
    results: dict[str, torch.Tensor] = {}

    def product() -> None:
        results[TORCH] = grouped_mm(x, w.transpose(-2, -1), offs=source.offs)

    bytes_ = x.nbytes + w.nbytes + 2 * point.M * point.N
    plain = Operands(x, source.b, source.offs)
    # bf16 rounds what it dequantises, so it may be a little further from the codes' product than the kernels are.
    entries = {TORCH: Entry(Contender(TORCH, product, lambda: results[TORCH], 0.02), plain, bytes_)}
    if PLAIN in plain_routes:
        out = torch.full((point.M, point.N), float("nan"), dtype=torch.bfloat16, device=x.device)
        call = partial(grouped_gemm, x, w, source.offs, out=out)
        entries[PLAIN] = Entry(Contender(PLAIN, call, lambda: out, 0.02), plain, bytes_)
    if mx is not None:

        def both() -> None:
            results[DEQUANTIZE] = grouped_mm(values(mx.a), values(mx.b).transpose(-2, -1), offs=mx.offs)

        contender = Contender(DEQUANTIZE, both, lambda: results[DEQUANTIZE], 0.02)
        entries[DEQUANTIZE] = Entry(contender, mx, mx.bytes + 2 * point.M * point.N)
    return entries


# ------------------------------------------------------------------------------------------------- checks


def check_entries(
    entries: dict[str, Entry], sizes: Sequence[int], case: str, errors: dict[str, str]
) -> tuple[list[Contender], Record]:
    """Those that ran and are right, and the fields row_error, wrong and errors: rows of the largest group; at the
    competition's shapes every row, and NVFP4's every element.
    """
    known: dict[int, SampledReference] = {}
    largest = max(range(len(sizes)), key=lambda g: sizes[g])

    def reference(name: str) -> SampledReference:
        operands = entries[name].operands
        if id(operands) not in known:
            every = {"groups": None, "rows": None} if case in COMPETITION else {"groups": (largest,)}
            known[id(operands)] = float64_rows(operands.a, operands.b, sizes, **every)  # type: ignore[arg-type]
        return known[id(operands)]

    contenders = [entry.contender for entry in entries.values()]
    right, record = check(contenders, reference, errors, compare_all=False)
    for contender in list(right) if case in COMPETITION else ():
        if contender.name.startswith("NVFP4 x NVFP4"):
            expected, limit = reference(contender.name), _COMPETITION_TOLERANCE
            count = outside(contender.output()[expected.rows], expected.values, limit)
            if count:
                right.remove(contender)
                record["wrong"][contender.name] = (
                    f"is wrong: {count} elements are off by more than {limit} + {limit} |expected|"
                )
    return right, record


def measure_formats(
    point: FormatsPoint, seed: int, timer: Timer, copy_bytes_per_s: float, arch: str, device: str = "cuda"
) -> Record:
    """Record of one point: checks, GPU times and floors of every contender, and what there is no kernel for."""
    sizes = sizes_of(point, seed)
    names, missing = offered(arch)
    entries = own_entries(names, sizes, point, seed, device)
    errors: dict[str, str] = {}
    try:
        if not entries:
            raise ValueError("there is no kernel for any pair of formats on this GPU")
        # On the dequantised operands of the pair whose weights are smallest, as an FP4 checkpoint would be run.
        of = {name: entry.operands for name, entry in entries.items()}
        source = next(name for name in ("NVFP4 x NVFP4", "BF16 x NVFP4", MX, *of) if name in of)
        entries |= bf16_entries(of[source], of.get(MX), point, plain_names(arch))
    except Exception as error:
        errors[TORCH] = describe(error)
    right, record = check_entries(entries, sizes, point.case, errors)
    times = gpu_times({contender.name: contender.call for contender in right}, timer)
    return record | {
        "sizes": sizes,
        "flops": 2 * point.M * point.N * point.K,
        "bytes": {name: entry.bytes for name, entry in entries.items()},
        "floors_us": {name: 1e6 * entry.bytes / copy_bytes_per_s for name, entry in entries.items()},
        "missing": missing,
        **times,
    }


def measure_at(session: Session, point: FormatsPoint) -> Record:
    """Every pair of formats at a point."""
    copy = session.ceilings.copy_bytes_per_s
    return measure_formats(point, session.settings.seed, session.timer, copy, cuda_driver().arch)


# ------------------------------------------------------------------------------------------------- report

_AXES = ("case", "M", "N", "K", "groups", "rows")
# Characters that these columns take, and the widest heading of a contender's.
_AXES_WIDTH = 44
_NAME_WIDTH = 11


def contenders_of(records: Sequence[Record]) -> list[str]:
    """Names of everything that was timed, in the order of first appearance, torch last."""
    names = list(dict.fromkeys(name for record in records for name in record["gpu"]))
    return [name for name in names if TORCH not in name] + [name for name in names if TORCH in name]


def speedups(records: Sequence[Record], name: str) -> list[float]:
    """t(torch's bf16 product) / t(name) of every record that has both."""
    return ratios(records, "gpu", TORCH, name)


def floor_shares(records: Sequence[Record], name: str) -> list[float]:
    """Time that the contender's own bytes take at the rate of a copy, over its time."""
    pairs = ((r["floors_us"].get(name), time_us(r, "gpu", name)) for r in records)
    return [floor / own for floor, own in pairs if floor is not None and own]


def tables(records: Records, sessions: Sessions, width: int) -> Sequence[Table | str]:
    """Times of every point, as many contenders a table as the width allows; a summary for each case; what is missing."""
    names = contenders_of(records)
    per_table = max(2, (width - _AXES_WIDTH) // (_NAME_WIDTH + 2))
    shown = [*time_tables(records, names, _AXES, per_table, _heading, 2, _NAME_WIDTH), _summary(records, names)]
    missing = list(dict.fromkeys(name for record in records for name in record["missing"]))
    return [*shown, f"no kernel on this GPU for: {', '.join(missing)}"] if missing else shown


def _heading(name: str) -> str:
    """A name whose every word fits into a column."""
    return " ".join(word if len(word) <= _NAME_WIDTH else word.replace("_", " ") for word in name.split())


def by_case(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of prefill, of decode, and of the competition's shapes together."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        case = record["point"]["case"]
        cases.setdefault(case if case in ("prefill", "decode") else "competition", []).append(record)
    return cases


def _summary(records: Records, names: Sequence[str]) -> Table:
    rows = []
    for case, part in by_case(records).items():
        for name in names:
            gains, shares = speedups(part, name), floor_shares(part, name)
            if gains and name != TORCH:
                cells = (geomean(gains), min(gains), max(gains), geomean(shares))
                rows.append([case, name, str(len(gains)), *(f"{value:.2f}" for value in cells)])
    columns = labels("case", "contender", left=True)
    columns += labels("points", "faster, geomean", "smallest", "largest", "of its floor", left=False)
    title = "Times faster than torch's bf16 product; and share of the copy rate that its bytes reach"
    return Table(title, columns, rows, between=2)


def draw(records: Records, path: Path) -> Path | None:
    """For each case and contender, times faster than torch's bf16 product; None where nothing can be compared."""
    from padless.bench.report.figures import draw_bars

    names = [name for name in contenders_of(records) if name != TORCH]
    gains = {
        f"{case}, {len(part)} points": {name: speedups(part, name) for name in names}
        for case, part in by_case(records).items()
    }
    if not any(values for of_case in gains.values() for values in of_case.values()):
        return None
    return draw_bars(gains, "times faster than torch's bf16 grouped product", path)
