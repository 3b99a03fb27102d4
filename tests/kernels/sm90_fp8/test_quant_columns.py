"""Column outputs where a warpgroup has other rows from tile to tile, run by the emulator and judged byte for byte.

Tiles of one m64 to four follow each other in a cluster: a warpgroup's rows, what it stages where and whether
it hands column maxima over change with every one of them.
"""

from __future__ import annotations

import ast
import dataclasses

import pytest
import torch

from padless.emulator import KINDS
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8
from padless.kernels.schedule import tiles_to_cut
from padless.kernels.sm90_fp8 import host_quant as sm90_fp8_quant
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from support.quant_cases import plant, slow_but
from support.sm90_quant_cases import DRIVER, EPILOGUES, Case, PairCase, check

SLOW = pytest.mark.slow
WIDE = Sm90Fp8Config(block_m=256, cluster_n=2)
SIZES = (250, 100, 40, 180, 70, 333, 1, 128)  # m64s: 4, 2, 1, 3, 2, 4 and 2, 1, 2
UP_TO_TWO_M64S = (70, 5, 0, 120, 128, 3, 1)
# M64s: 4 and 2, from which a worker goes on to the 4 of the next columns; 4, 2, 1, 4, 2. Some end soon after an m64.
PLANTED_SIZES = (340, 195, 100, 40, 193, 70)

BOTH = Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK)
GLU = dataclasses.replace(BOTH, activation="swiglu", gate_up="interleaved", d_dtype=torch.float32)
RUNS_OF_32 = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_tiles_of_256_rows(seed: int) -> None:
    epilogue = dataclasses.replace(BOTH, amax=True, bias=True)
    check(sm90_fp8_quant, Case(SIZES, 144, seed=seed), epilogue, WIDE, seed=seed)


@pytest.mark.parametrize("epilogue", [BOTH, pytest.param(RUNS_OF_32, marks=SLOW)], ids=["128", "32"])
def test_a_last_round_in_halves(epilogue: Epilogue) -> None:
    """Three workers: the first half of a tile ends where a run of rows does, and the second is a tile of its own."""
    sizes = (600, 250)
    assert tiles_to_cut(2 * sum(-(-size // 256) for size in sizes), 3) == 1  # one of the 250 rows
    check(sm90_fp8_quant, Case(sizes, 512, seed=7), epilogue, WIDE, seed=7, sms=6)


@pytest.mark.parametrize(("epilogue", "n"), [(RUNS_OF_32, 160), pytest.param(GLU, 256, marks=SLOW)])
def test_other_runs_and_values(epilogue: Epilogue, n: int) -> None:
    check(sm90_fp8_quant, Case(SIZES, n, seed=3), epilogue, WIDE, seed=4)


def test_a_nan_in_the_second_m64_of_a_run_stays_in_the_run() -> None:
    """Row 70 is in the second m64 of a warpgroup, row 330 in the m64 of the second warpgroup."""
    case = Case((250, 100), 144, seed=5)
    codes = case.a.data.view(torch.uint8)
    codes[70, 17] = codes[330, 3] = 0x7F
    got = check(sm90_fp8_quant, case, BOTH, WIDE)
    broken = got["column_scale"].inside.isnan()
    assert broken.all(1).tolist()[:3] == [True, False, True]
    assert not broken[1].any()


@SLOW
def test_tiles_of_128_rows() -> None:
    check(sm90_fp8_quant, Case(UP_TO_TWO_M64S, 256, seed=3), BOTH, Sm90Fp8Config(), seed=4, sms=1)


def test_tiles_of_128_rows_of_the_mxfp8_kernel() -> None:
    epilogue = EPILOGUES["FP8_BLOCK rows and columns, bf16, everything"]
    case = PairCase(UP_TO_TWO_M64S, 160, seed=3, plain=sm90_mxfp8)
    check(sm90_mxfp8_quant, case, epilogue, seed=4, sms=1)


STORE, STORAGE, MULTIPLY = ("device/sm90/quant_store.cuh", "device/sm90/quant_storage.cuh", "sm90_fp8/multiply.cuh")
FRAGMENT = "device/sm90/wgmma_fragment.cuh"
SPANS = "NUM_WAVES == 1 && m64s_of(tile.rows) == 2"


@dataclasses.dataclass(frozen=True)
class Bug:
    """A text of the sources and what takes its place."""

    file: str
    old: str
    new: str
    found_by: set[str]  # kinds of reports, or the outputs that are wrong


COLUMNS = {"column_codes", "column_scale"}
BUGS = {
    "copied out from where the m64 would be": Bug(
        STORE, "shared.d[slot_of(warpgroup, w)]", "shared.d[first + w]", {"uninitialised-shared"}
    ),
    "the other warpgroup's multipliers are read": Bug(
        STORE,
        "shared.quant.columns[warpgroup].multiplier",
        "shared.quant.columns[is_second ? 0 : warpgroup].multiplier",
        {"race"},
    ),
    "no barrier before the multipliers are read": Bug(STORE, "        bar_sync(barrier, threads);\n", "", {"race"}),
    "the other warpgroup's maxima are not waited for": Bug(
        STORE, "bar_sync(barrier, threads);  ", "bar_sync(1 + warpgroup, 128);", {"race"}
    ),
    "every tile is handed over": Bug(STORE, SPANS, "NUM_WAVES == 1", {"deadlock"}),
    "no tile is handed over": Bug(STORE, SPANS, "false", {"race"}),  # both warpgroups store its scales
    "the last m64 ends where the first does": Bug(STORE, "first + NUM_WAVES - 1", "first", COLUMNS),
    "rows past the edge in the second m64's maxima": Bug(FRAGMENT, "if (rows > 8) m[c]", "m[c]", COLUMNS),
    "maxima are left where the last store may still read": Bug(
        STORE,
        "        bar_sync(1 + warpgroup, 128);  // the slabs are free\n        const Extent last",
        "        const Extent last",
        {"race"},
    ),
    "maxima of another quad": Bug(
        STORE, "maximum_of_quad<OUT_COLUMNS>(i % 8", "maximum_of_quad<OUT_COLUMNS>(i % 7", COLUMNS
    ),
    "maxima are left among the row codes": Bug(
        STORE, "+ PLAIN_BYTES + ROW_CODE_BYTES +\n", "+ PLAIN_BYTES +\n", {"race"}
    ),
    "amax of rows past the edge of the second m64": Bug(STORE, "u * M64_STEP * WGMMA_M + 8 * h", "8 * h", {"amax"}),
    "neighbours in a tile of two m64s": Bug(
        STORAGE, "m64s_of(rows) > NUM_MMA_WARPGROUPS", "m64s_of(rows) > 1", {"uninitialised-shared"}
    ),
    "the products are of m64s that are no neighbours": Bug(
        MULTIPLY,
        "shared.a[0] + first * M64_BYTES",
        "shared.a[0] + (first + 1) / 2 * M64_BYTES",
        {"amax", "row_codes", "row_scale", *COLUMNS},
    ),
}


def found_by(message: str) -> set[str]:
    """Kinds of the emulator's reports in its message, or the outputs in the judge's."""
    if message.startswith("wrong bytes: "):
        return set(ast.literal_eval(message.splitlines()[0].removeprefix("wrong bytes: ")))
    return {line.split(":")[0] for line in message.splitlines()} & set(KINDS)


def check_all_seeds() -> None:
    epilogue = dataclasses.replace(BOTH, amax=True)
    for seed in range(4):
        check(sm90_fp8_quant, Case(PLANTED_SIZES, 144, seed=seed), epilogue, WIDE, seed=seed)


@pytest.mark.parametrize("name", slow_but({"copied out from where the m64 would be"}, BUGS))
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Case((70, 5), 144).sums(DRIVER)  # compiled before anything is planted
    bug = BUGS[name]
    plant(monkeypatch, sm90_fp8_quant, bug.file, bug.old, bug.new)
    with pytest.raises((AssertionError, ValueError)) as caught:
        check_all_seeds()
    assert bug.found_by <= found_by(str(caught.value)) <= bug.found_by | set(KINDS), caught.value
