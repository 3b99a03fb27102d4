"""The page about mutants: made of its record, every survivor explained, and the tool that makes the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mutant_exchange
import mutant_page
import mutants
import padless
from mutant_cases import CASES
from mutant_exchange import EXCHANGES
from mutant_reasons import EXCHANGE_REASONS, REASONS, reason_of
from padless.emulator import Emulator


@pytest.fixture
def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mutant_page.SUMMARY.read_text())
    return found


@pytest.fixture
def exchanges() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mutants.EXCHANGE_SUMMARY.read_text())
    return found


def test_the_page_is_that_of_its_record(summary: dict[str, Any], exchanges: dict[str, Any]) -> None:
    assert mutant_page.PAGE.read_text() == mutant_page.page(summary, exchanges)
    assert summary["kernels"].keys() == CASES.keys()
    assert exchanges["kernels"].keys() == EXCHANGES.keys()
    for of_all in (summary, exchanges):
        for name, own in of_all["kernels"].items():
            listed = sum(survivor["kernels"].get(name, 0) for survivor in of_all["survivors"])
            assert listed == own["survivors"]
            assert own["mutants"] >= own["judged"] == own["survivors"] + sum(own["by"].values())
            assert own["tried once"] <= own["survivors"]


def test_every_survivor_has_a_reason_and_every_reason_a_survivor(
    summary: dict[str, Any], exchanges: dict[str, Any]
) -> None:
    assert {reason_of(survivor) for survivor in summary["survivors"]} == set(REASONS)
    assert {reason_of(survivor, EXCHANGE_REASONS) for survivor in exchanges["survivors"]} == set(EXCHANGE_REASONS)
    unknown = {"instruction": "wgmma.commit_group", "change": "deleted", "source": "x.cuh:1", "kernels": {"x": 1}}
    with pytest.raises(ValueError, match="nothing explains"):
        mutant_page.page({**summary, "survivors": [unknown]}, exchanges)


def test_every_weaker_signal_of_a_sender_is_noticed(exchanges: dict[str, Any]) -> None:
    """What is left of signals is those of receivers, which nothing in their pair waits for."""
    left = [s["source"] for s in exchanges["survivors"] if "release.exch" in s["instruction"]]
    assert left
    assert all(source.endswith("cells.py:154, receiver") for source in left)


@pytest.mark.slow
def test_a_rank_stores_over_what_another_has_read() -> None:
    """`finish` releases reads alone, in front of which its launch stores nothing to that array."""
    case = mutants.Case("finish, fan_in")
    found = [m for m in case.survey.mutants if "acq_rel" in m.instruction.modifiers and m.change == ".acq_rel relaxed"]
    assert case.verdict(found[0])["killed_by"] == "race"
    assert "sender" in case.verdict(found[0])["source"]


def scheduler_lines() -> list[str]:
    path = Path(padless.__file__).parent / "kernels" / "device" / "scheduler.cuh"
    return [line.strip() for line in path.read_text().splitlines()]


def verdict(case: str, digest: str, line: int, killed_by: str) -> dict[str, Any]:
    return {"case": case, "digest": digest, "line": line, "change": "deleted", "killed_by": killed_by, "short": True,
             "source": f"{case}.cu:{line}", "instruction": "bar.warp.sync %r1"}  # fmt: skip


def summarised(path: Path, lines: list[dict[str, Any]], before: dict[str, Any]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return mutant_page.summarised(path, before, ["a", "b", "c"])


def test_a_record_of_some_kernels_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """Of a kernel's versions the one that is judged furthest counts, of equals the last; a kernel that is gone goes."""
    all_of = [{"case": name, "digest": digest, "mutants": 2} for name, digest in (("a", "1"), ("b", "1"), ("x", "1"))]
    verdicts = [verdict(name, "1", line, "race" * (line - 1)) for name in "abx" for line in (1, 2)]
    before = summarised(tmp_path / "first", [*all_of, *verdicts], {"kernels": {}, "survivors": []})
    assert {name: own["judged"] for name, own in before["kernels"].items()} == {"a": 2, "b": 2}
    assert [s["kernels"] for s in before["survivors"]] == [{"a": 1}, {"b": 1}]

    again = [
        {"case": "b", "digest": "2", "mutants": 1}, {"case": "b", "digest": "3", "mutants": 3},
        {"case": "c", "digest": "1", "mutants": 1},
        verdict("b", "2", 7, ""), verdict("b", "3", 1, ""), verdict("b", "3", 2, ""), verdict("c", "1", 1, "output"),
    ]  # fmt: skip
    after = summarised(tmp_path / "second", again, before)
    assert after["kernels"]["a"] == before["kernels"]["a"]
    assert after["kernels"]["b"] == {"digest": "2", "mutants": 1, "judged": 1, "second problem": 0, "survivors": 1,
                                     "tried once": 0, "by": {}}  # fmt: skip
    assert after["kernels"]["c"]["by"] == {"output": 1}
    assert [(s["source"], s["kernels"]) for s in after["survivors"]] == [("a.cu:1", {"a": 1}), ("b.cu:7", {"b": 1})]
    assert after == summarised(tmp_path / "second", again, after)
    begun = [{"case": "a", "digest": "2", "mutants": 2}, verdict("a", "2", 1, "race")]
    assert after == summarised(tmp_path / "third", begun, after)


def test_unsettled_are_new_changed_and_unfinished_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "captured", lambda name: name)
    monkeypatch.setattr(mutants, "digest_of", lambda name: "1")
    kernels = {
        "whole": {"digest": "1", "judged": 3, "mutants": 3}, "changed": {"digest": "0", "judged": 3, "mutants": 3},
        "begun": {"digest": "1", "judged": 2, "mutants": 3},
    }  # fmt: skip
    assert mutants.unsettled({"kernels": kernels}, [*kernels, "new"]) == ["changed", "begun", "new"]


SENDER = """.version 8.0
.target sm_90
.address_size 64
.visible .entry send(
	.param .u64 send_param_0
)
.reqntid 1
{
	.reg .b32 %r<2>;
	.reg .b64 %rd<1>;
	ld.param.b64 %rd0, [send_param_0];
	mov.b32 %r0, 7;
	st.global.b32 [%rd0], %r0;
	atom.global.sys.release.exch.b32 %r1, [%rd0 + 4], %r0;
	ret;
}
"""
RECEIVER = """.version 8.0
.target sm_90
.address_size 64
.visible .entry receive(
	.param .u64 receive_param_0
)
.reqntid 1
{
	.reg .b32 %r<2>;
	.reg .b64 %rd<1>;
	ld.param.b64 %rd0, [receive_param_0];
$L__BB0_1:
	atom.global.sys.acquire.add.u32 %r1, [%rd0 + 4], 0;
	ld.global.b32 %r0, [%rd0];
	st.global.b32 [%rd0 + 8], %r0;
	ret;
}
"""


def test_two_ranks_launches_are_ordered_by_their_signals_alone() -> None:
    def found(sender: str, receiver: str) -> tuple[set[str], int]:
        emulator = Emulator(mutant_exchange.together(sender, receiver))
        words = np.zeros(4, np.uint32)
        address = emulator.memory.register(words.view(np.uint8))
        result = emulator.launch("pair", (1, 2), 1, [1, address, 1, address])
        return {report.kind for report in result.reports}, int(words[2])

    assert found(SENDER, RECEIVER) == (set(), 7)
    for word in ("release", "acquire"):
        weak = (text.replace(word, "relaxed") for text in (SENDER, RECEIVER))
        assert found(*weak) == ({"race"}, 7)
    narrow = (text.replace(".sys", ".cta") for text in (SENDER, RECEIVER))
    assert found(*narrow)[0] == {"race"}


@pytest.mark.slow
def test_a_wrong_height_of_a_band_of_tiles_is_noticed_in_each_copy_by_the_second_problem_alone() -> None:
    """device/scheduler.cuh, m_tiles - band * RASTER_M: a shift by 4 for one by 3 is wrong behind the first band. The
    compiler has a copy for a worker's first tile and one for the scheduler."""
    line = 1 + scheduler_lines().index("const int left = m_tiles - band * RASTER_M;")
    noticed = []
    for short in (False, True):
        case = mutants.Case("sm100_grouped", 1, short)
        image = case._launch.kernel.image
        text = (image.decode() if isinstance(image, bytes) else image).rstrip("\0").split("\n")
        places = (
            i for b in case.survey.program.blocks for i in b.instructions if f"scheduler.cuh:{line} " in str(i.source)
        )
        copies = [i for i in places if i.name == "shl.b32" and text[i.line - 1].rstrip().endswith(", 3;")]
        for at in copies:
            changed = [t.replace(", 3;", ", 4;") if n == at.line else t for n, t in enumerate(text, 1)]
            emulator = Emulator("\n".join(changed), name="mutant.ptx")
            result, arrays = case.run(emulator, 0)
            same = all(arrays[name].tobytes() == x.tobytes() for name, x in case.survey.expected[0].items())
            caller = "first tile" if "tile_queue.cuh" in str(at.source) else "scheduler"
            noticed.append((caller, short, bool(result.errors) or not same))
    assert sorted(noticed) == [
        ("first tile", False, False), ("first tile", True, True), ("scheduler", False, False), ("scheduler", True, True),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended_and_asks_a_second_problem(tmp_path: Path) -> None:
    record, name = tmp_path / "record.jsonl", "sm90_bf16_plain"
    mutants.run(record, [name], 1, 45)
    first = mutants.read(record)
    assert 0 < len(first) == len(record.read_text().splitlines()) - 1
    ((kernel, mutants_of_it),) = mutants.totals(record).items()
    assert kernel == (name, first[0]["digest"])
    assert mutants_of_it > len(first)
    assert all(v["killed_by"] or v["short"] for v in first)
    record.write_text(record.read_text() + '{"case": "half a li')
    mutants.run(record, [name], 1, 30)
    second = mutants.read(record)
    assert second[: len(first)] == first
    assert len({mutants.key_of(v) for v in second}) == len(second) > len(first)
