"""padless bench formats on the CPU with the reference in the kernels' place: grid, checks, record, table, picture."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench import run_formats
from padless.bench.case import CASES
from padless.bench.cases import formats
from padless.bench.cases.formats import COMPETITION, TORCH, FormatsPoint, grid, measure_formats, offered, sizes_of
from padless.bench.run import draw, show_records
from padless.kernels.table import ROUTES
from padless.quantization.quantize import dequantize
from padless.testing.operands import make_operands
from support.bench_records import StandInTimer

POINT = FormatsPoint("prefill", 70, 64, 256, 3)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return measure_formats(POINT, 5, StandInTimer(), 4e12, "sm_90a", "cpu")


def test_a_record_has_every_pair_that_has_a_kernel(record: dict[str, Any]) -> None:
    names, missing = offered("sm_90a")
    assert set(names) <= set(record["gpu"])
    assert {TORCH, "BF16 x BF16"} <= set(record["gpu"])
    assert record["missing"] == missing
    assert record["errors"] == {}
    assert record["wrong"] == {}
    assert all(0 < error < 0.01 for error in record["row_error"].values())
    assert record["flops"] == 2 * 70 * 64 * 256
    assert sum(record["sizes"]) == 70
    json.dumps(record, allow_nan=False)


def test_wanted_pairs_are_offered_or_missing() -> None:
    for arch in ("sm_90a", "sm_100a"):
        names, missing = offered(arch)
        assert {name.split(",")[0] for name in names} | set(missing) == {f"{a} x {b}" for a, b in formats.WANTED}
        for name, path in names.items():
            assert name.startswith(f"{path.a} x {path.b}")
            assert path in ROUTES
    assert offered("sm_75") == ({}, [f"{a} x {b}" for a, b in formats.WANTED])


def test_a_second_kernel_for_a_pair_is_a_contender_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(p for p in ROUTES if (p.operation, p.arch) == ("grouped_gemm", "sm_90a"))
    other = type(first)("grouped_gemm", "sm_90a", first.a, first.b, "nothing", "other_kernel.cu", "by hand")
    monkeypatch.setattr(formats, "ROUTES", (*ROUTES, other))
    names, _ = offered("sm_90a")
    assert names[f"{first.a} x {first.b}"].kernel == first.kernel
    assert names[f"{first.a} x {first.b}, other_kernel"] is other


def test_bytes_are_those_of_codes_scales_and_result(record: dict[str, Any]) -> None:
    m, n, k, g = 70, 64, 256, 3
    fp8 = record["bytes"]["FP8_BLOCK x FP8_BLOCK"]
    assert fp8 == m * (k + 2 * 4) + g * (n * k + 2 * 4) + 2 * m * n
    assert record["bytes"][TORCH] == 2 * (m * k + g * n * k + m * n)
    for name, wanted in {
        "NVFP4 x NVFP4": (m + g * n) * (k // 2 + k // 16) + 4 * 1 + 4 * g + 2 * m * n,
        "BF16 x MXFP4": 2 * m * k + g * (n * k // 2 + 128 * k // 32) + 2 * m * n,  # 128 x 4 tiles
    }.items():
        if name in record["bytes"]:
            assert record["bytes"][name] == wanted
    for name, count in record["bytes"].items():
        assert record["floors_us"][name] == pytest.approx(count / 4e6)


def test_torch_multiplies_the_dequantized_operands() -> None:
    operands = make_operands("NVFP4", "NVFP4", [3, 0, 9], 32, 64, seed=1, device="cpu")
    point = FormatsPoint("prefill", 12, 32, 64, 3)
    entries = formats.bf16_entries(operands, None, point, formats.plain_names("sm_90a"))
    assert set(entries) == {TORCH, "BF16 x BF16"}
    assert entries[TORCH].bytes == entries["BF16 x BF16"].bytes
    x, w = dequantize(operands.a).bfloat16().double(), dequantize(operands.b).bfloat16().double()
    expected = torch.cat([x[:3] @ w[0].t(), x[3:] @ w[2].t()])
    for entry in entries.values():
        entry.contender.call()
        assert entry.contender.output is not None
        out = entry.contender.output().double()
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=1e-2)


def test_plain_tensors_are_multiplied_where_there_is_a_kernel_for_them() -> None:
    assert formats.plain_names("sm_90a") == ["BF16 x BF16"]
    assert formats.plain_names("sm_100a") == []


def test_all_formats_have_the_same_values() -> None:
    """What differs between contenders is the format and nothing else."""
    plain = make_operands("BF16", "MXFP8", [5, 4], 32, 128, seed=3, device="cpu")
    for name, limit in (("FP8_BLOCK", 0.05), ("MXFP8", 0.05), ("NVFP4", 0.2), ("MXFP4", 0.25)):
        other = make_operands(name, name, [5, 4], 32, 128, seed=3, device="cpu")
        assert isinstance(plain.a, torch.Tensor)
        assert not isinstance(other.a, torch.Tensor)
        for got, wanted in ((dequantize(other.a), plain.a.float()), (dequantize(other.b), dequantize(plain.b))):
            assert float((got - wanted).norm() / wanted.norm()) < limit
    with pytest.raises(ValueError, match="format is 'FP3'"):
        make_operands("FP3", "MXFP8", [5], 32, 128, seed=3, device="cpu")


@pytest.mark.parametrize("damage", ["a row", "NaN", "one element", "raises"])
def test_what_is_wrong_is_named_and_not_timed(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPETITION, "C", ((9, 5), 32, 64))
    point = formats.competition("C")
    name = "NVFP4 x NVFP4"
    right = formats.own_entries

    def damaged(*arguments: Any) -> dict[str, formats.Entry]:
        entries = right(*arguments)
        contender, operands = entries[name].contender, entries[name].operands

        def call() -> None:
            if damage == "raises":
                raise RuntimeError("boom")
            contender.call()
            assert contender.output is not None
            out = contender.output()
            if damage == "a row":
                out[7] = out[6]
            elif damage == "NaN":
                out[11, 3] = float("nan")
            else:
                worst = out[8].abs().argmin()  # a few thousandths: no norm of a row would show it
                out[8, worst] += 0.004 + 0.002 * out[8, worst].abs()

        changed = formats.Contender(name, call, contender.output, contender.tolerance)
        return entries | {name: formats.Entry(changed, operands, 1)}

    names, _ = offered("sm_90a")
    monkeypatch.setattr(formats, "own_entries", damaged)
    record = measure_formats(point, 5, StandInTimer(), 4e12, "sm_90a", "cpu")
    assert name not in record["gpu"]
    if damage == "raises":
        assert record["errors"][name] == "RuntimeError: boom"
    else:
        assert "is wrong" in record["wrong"][name]
        assert ("elements are off" in record["wrong"][name]) == (damage == "one element")
    assert record["gpu"].keys() >= {other for other in names if other != name}


def test_the_competitions_shapes_run_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPETITION, "D", ((17, 3), 32, 96))
    record = measure_formats(formats.competition("D"), 5, StandInTimer(), 4e12, "sm_90a", "cpu")
    assert record["wrong"] == {}
    assert record["sizes"] == [17, 3]
    # Twenty elements rounded to bf16 instead of float16 would not all pass.
    assert record["row_error"]["NVFP4 x NVFP4"] < 2**-11


def test_the_competitions_shapes_are_as_published() -> None:
    assert COMPETITION["A"] == ((80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168)
    assert COMPETITION["B"] == ((40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048)
    assert COMPETITION["C"] == ((192, 320), 3072, 4096)
    assert COMPETITION["D"] == ((128, 384), 4096, 1536)


@pytest.mark.parametrize("full", [False, True])
def test_the_grid(full: bool) -> None:
    points = grid("full" if full else "quick")
    assert len(set(points)) == len(points) == (46 if full else 14)
    assert {p.case for p in points} == {"prefill", "decode", "A", "B", "C", "D"}
    for point in points:
        sizes = sizes_of(point, 0)
        assert (len(sizes), sum(sizes)) == (point.groups, point.M)
        if point.case == "decode":
            assert max(sizes) == point.rows <= 64
            assert min(sizes) >= 1
        if point.case == "prefill":
            assert point.M in (8192, 16384, 32768)
            assert point.groups in (8, 32)
    with pytest.raises(ValueError, match="case is 'train'"):
        sizes_of(FormatsPoint("train", 1, 1, 1, 1), 0)


# --- report ----------------------------------------------------------------------------------------------


def made_up(case: str, times: dict[str, float], **changes: Any) -> dict[str, Any]:
    return {
        "point": {"case": case, "M": 1, "N": 2, "K": 3, "groups": 4, "rows": 0},
        "gpu": {name: {"us": us} for name, us in times.items()},
        "floors_us": {name: us / 2 for name, us in times.items()},
        "missing": ["MXFP4 x MXFP4"],
        "wrong": {},
        "errors": {},
    } | changes


def test_tables_say_how_much_faster_and_what_is_missing() -> None:
    records = [
        made_up("prefill", {"X": 50.0, TORCH: 100.0}),
        made_up("prefill", {"X": 25.0, TORCH: 200.0}),
        made_up("A", {"X": 7.0, TORCH: 21.0}, errors={"Y": "RuntimeError: boom"}),
    ]
    buffer = io.StringIO()
    show_records(CASES["formats"], records, {}, Console(file=buffer, width=200))
    text = buffer.getvalue()
    (line,) = [x for x in text.splitlines() if "prefill" in x and "4.00" in x]
    assert line.split() == ["prefill", "X", "2", "4.00", "2.00", "8.00", "0.50"]
    assert any("competition" in x and "3.00" in x for x in text.splitlines())
    assert "no kernel on this GPU for: MXFP4 x MXFP4" in text
    assert "Y failed: RuntimeError: boom" in text


def test_the_picture_is_drawn_when_there_is_something_to_draw(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    assert draw(CASES["formats"], [], tmp_path / "a.png", console) is None
    without = [made_up("prefill", {"X": 50.0})]
    assert draw(CASES["formats"], without, tmp_path / "a.png", console) is None
    records = [made_up("prefill", {"X": 50.0, TORCH: 100.0}), made_up("decode", {"X": 5.0, TORCH: 9.0})]
    path = draw(CASES["formats"], records, tmp_path / "b" / "c.png", console)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="padless bench formats needs a CUDA GPU"):
        run_formats([], tmp_path)
