"""Kernels that have changed since a record was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import measured_kernels as tool
from padless.runtime import jit

SOURCES = {"a/a.cu": '#include "b.cuh"\nint a;', "a/b.cuh": "int b;  // why", "c/c.cu": "int c;"}


def test_a_hash_is_of_code_and_its_headers_not_of_comments() -> None:
    before = jit.source_digests(SOURCES)
    assert before.keys() == {"a", "c"}
    assert jit.source_digests(SOURCES | {"a/b.cuh": "/* because */\nint  b;"}) == before
    changed = jit.source_digests(SOURCES | {"a/b.cuh": "int d;"})
    assert changed["a"] != before["a"]
    assert changed["c"] == before["c"]


def test_a_part_that_a_constant_adds_is_in_a_hash_of_its_own() -> None:
    default = "#ifndef LOW_RANK_STEPS\n#define LOW_RANK_STEPS 0\n#endif\n"
    part = """#if LOW_RANK_STEPS > 0
#include "d.cuh"
#if B
int e;
#endif
#else
int f;
#endif
"""
    before = jit.source_digests({"a/a.cu": "#if B\nint g;\n#endif\nint f;\n"})
    texts = {"a/a.cu": default + "#if B\nint g;\n#endif\n" + part, "a/d.cuh": "int d;"}
    found = jit.source_digests(texts)
    assert found.keys() == {"a", "a, low rank"}
    assert found["a"] == before["a"]
    other = jit.source_digests(texts | {"a/d.cuh": "int h;"})
    assert other["a"] == found["a"]
    assert other["a, low rank"] != found["a, low rank"]


def test_every_kernel_is_hashed_and_every_measured_one_is_known() -> None:
    now = jit.source_digests()
    assert {name.split(", ")[0] for name in now} == {path.stem for path in jit.KERNELS.rglob("*.cu")}
    assert {name for kernels in tool.KERNELS.values() for name in kernels} <= now.keys()
    assert all(len(set(kernels)) == len(kernels) for kernels in tool.KERNELS.values())


@pytest.mark.parametrize("kind", ["wgrad.jsonl", "verify.json"])
def test_a_kernel_that_changed_or_was_not_there_yet_is_named(tmp_path: Path, kind: str) -> None:
    now = jit.source_digests()
    then = {name: hash for name, hash in now.items() if name != "sm90_bf16_wgrad"} | {"sm90_fp8_wgrad": "0"}
    record = tmp_path / f"2031-02-03-h200-{kind}"
    inside = (
        {"kernels": then, "checks": []} if kind == "verify.json" else {"kind": "session", "machine": {"kernels": then}}
    )
    record.write_text(json.dumps(inside) + "\n")
    assert set(tool.changed_since(tmp_path)[record.name].kernels) == {"sm90_fp8_wgrad", "sm90_bf16_wgrad"}
    text = "\n".join(tool.kernels_section(tmp_path))
    assert f"| [{record.name}]({tool.FOLDER}/{record.name}) | all | " in text

    record.write_text(json.dumps({"kind": "session", "machine": {}}) + "\n")
    assert set(tool.changed_since(tmp_path)[record.name].kernels) == set(tool.KERNELS[kind]), "nothing is known of it"
    (tmp_path / tool.OF_COMMITS).write_text(json.dumps({record.name: now}))
    assert tool.changed_since(tmp_path)[record.name].kernels == []
    assert "All kernels are still those of" in tool.kernels_section(tmp_path)[0]


def test_points_of_an_older_run_are_counted(tmp_path: Path) -> None:
    """A record that was begun with other kernels and ended with today's says how many of its points are older."""
    now = jit.source_digests()
    sessions = {"new": now, "old": now | {"sm90_fp8_wgrad": "0"}, "of no point": now | {"sm90_bf16_wgrad": "0"}}
    rows = [{"kind": "session", "id": id, "machine": {"kernels": hashes}} for id, hashes in sessions.items()]
    rows += [{"kind": "wgrad", "session": id} for id in ("new", "old", "new", "new", "old")]
    record = tmp_path / "2031-02-03-h200-wgrad.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tool.changed_since(tmp_path)[record.name] == (["sm90_fp8_wgrad"], 2, 5)
    assert f"{record.name}) | 2 of 5 | sm90_fp8_wgrad |" in tool.kernels_section(tmp_path)[1]
    rows[1]["machine"] = {}
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tool.changed_since(tmp_path)[record.name] == (list(tool.KERNELS["wgrad.jsonl"]), 2, 5), (
        "nothing is known of it"
    )


def test_records_without_hashes_have_those_of_their_commit() -> None:
    folder = tool.ROOT / tool.FOLDER
    of_commits = json.loads((folder / tool.OF_COMMITS).read_text())
    newest = [path for kind in tool.KERNELS if (path := tool.newest(folder, kind)) is not None]
    assert newest
    unknown = {path.name for path in newest if any(run.hashes is None for run in tool.runs_in(path))}
    assert unknown <= of_commits.keys(), "run the tool"
