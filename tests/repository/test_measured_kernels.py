"""Kernels that have changed since a record was made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import measured_kernels as tool
from padless.runtime import jit, triton_sources

PACKAGE = jit.KERNELS.parent
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


# Of Triton: `scale` uses a constant, one that another module gives, and a helper, which uses another; `copy` none of it.
MODULES = {
    "a/rules.py": "import torch\nSIZES = 64\nBLOCK, OTHER = SIZES * 2, torch.float32\n\ndef rule(x):\n    return x\n",
    "b/triton/casts.py": '''"""Casts."""
import triton
import triton.language as tl
_BITS = 3
_TEXT = tl.constexpr(f"{_BITS} bits")
ALONE = 5

def _host(x):
    """Before."""
    return x

@triton.jit
def rounded(x):
    return x + larger(x, _TEXT)  # why

@triton.jit
def larger(x, y):
    """The larger of both."""
    return tl.maximum(x, y)

@triton.jit
def unused(x):
    return x * 7
''',
    "c/triton/scale.py": """import triton
import triton.language as tl
from padless.a import rules as r
from padless.b.triton import casts
_BLOCK = tl.constexpr(r.BLOCK)

def launch(x):
    scale[(1,)](x, num_warps=4)

@triton.jit(do_not_specialize=["M"])
def scale(x_ptr, M, ALONE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, _BLOCK))
    launch = casts.rounded(x)
    tl.store(x_ptr, launch)
""",
    "c/triton/copy.py": "import triton\n\n@triton.jit\ndef copy(x):\n    return x * 9\n",
}
CASTS, SCALE, COPY = "b/casts", "c/scale", "c/copy"


@pytest.mark.parametrize(
    ("path", "old", "new", "changed"),
    [
        ("c/triton/copy.py", "x * 9", "x * 8", {COPY}),
        ("c/triton/scale.py", "tl.load(x_ptr +", "tl.load(x_ptr -", {SCALE}),
        ("c/triton/scale.py", '["M"]', '["x_ptr"]', {SCALE}),
        ("c/triton/scale.py", ", ALONE: tl.constexpr", ", ALONE", {SCALE}),
        ("b/triton/casts.py", "x + larger", "x - larger", {CASTS, SCALE}),
        ("b/triton/casts.py", "tl.maximum", "tl.minimum", {CASTS, SCALE}),  # of a helper's helper
        ("b/triton/casts.py", "_BITS = 3", "_BITS = 4", {CASTS, SCALE}),  # of a constant's constant
        ("b/triton/casts.py", "import triton.language as tl", "import triton.other as tl", {CASTS, SCALE}),
        ("b/triton/casts.py", "x * 7", "x * 8", {CASTS}),
        ("a/rules.py", "SIZES = 64", "SIZES = 32", {SCALE}),
        ("a/rules.py", "return x", "return -x", set()),
        ("b/triton/casts.py", "ALONE = 5", "ALONE = 6", set()),
        ("b/triton/casts.py", "    return x\n\n", "    return -x\n\n", set()),
        ("b/triton/casts.py", "# why", "# since", set()),
        ("b/triton/casts.py", "larger of both", "smaller of both", set()),
        ("b/triton/casts.py", "tl.maximum(x, y)", "tl.maximum(\n        x,\n        (y),\n    )", set()),
        ("c/triton/scale.py", "num_warps=4", "num_warps=8", set()),
    ],
)
def test_a_hash_of_triton_is_of_what_its_functions_use(path: str, old: str, new: str, changed: set[str]) -> None:
    before = jit.source_digests(MODULES)
    assert before.keys() == {CASTS, SCALE, COPY}
    assert MODULES[path].count(old) == 1
    after = jit.source_digests(MODULES | {path: MODULES[path].replace(old, new)})
    assert {name for name in before if after[name] != before[name]} == changed


def test_hashes_of_triton_are_made_as_those_in_records() -> None:
    """Made in another way, also by another version of Python, they would call every record older."""
    assert jit.source_digests(MODULES) == {CASTS: "0fbdf8a35257", SCALE: "75fa6ad1f42c", COPY: "ed3ffb9f0882"}


def test_hashes_of_triton_import_neither_it_nor_torch() -> None:
    """In a process of its own, of the file alone: `padless` itself imports torch."""
    code = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("found", {triton_sources.__file__!r})
found = sys.modules["found"] = module_from_spec(spec)
spec.loader.exec_module(found)
print(len(found.own_digests()), *sorted({{"triton", "torch", "padless"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(triton_sources.own_digests()))]


# Measured by no record, each for a reason.
UNMEASURED = {
    "nn/dequantize": "Hopper multiplies the codes of all weights that records have",
    **dict.fromkeys(
        ("sm100_mxfp8_gemm", "sm100_grouped_gemm", "sm100_mxfp8_wgrad", "sm100_nvfp4_wgrad"), "Blackwell's"
    ),
    **dict.fromkeys(("unit_probe", "wgmma_probe"), "what instructions do, not how fast"),
}


def test_every_kernel_is_hashed_and_measured_and_every_measured_one_is_known() -> None:
    now = jit.source_digests()
    at_line = re.compile(r"^\s*@triton\.jit", re.MULTILINE)
    modules = [path for path in PACKAGE.rglob("*.py") if at_line.search(path.read_text("utf-8"))]
    assert {name for name in now if "/" in name} == {
        str(path.relative_to(PACKAGE).with_suffix("")).replace("/triton/", "/") for path in modules
    }
    assert {name.split(", ")[0] for name in now if "/" not in name} == {path.stem for path in jit.KERNELS.rglob("*.cu")}
    folders = {name.rpartition("/")[0] for name in now}
    assert {name for kernels in tool.KERNELS.values() for name in kernels} <= now.keys() | folders
    run = tool.Run("", {}, 1, is_alone=False)
    assert now.keys() - {name for kind in tool.KERNELS for name in run.measured(kind, now)} == UNMEASURED.keys()


@pytest.mark.parametrize("kind", ["wgrad.jsonl", "verify.json", "layer.jsonl"])
def test_a_kernel_that_changed_or_was_not_there_yet_is_named(tmp_path: Path, kind: str) -> None:
    now = jit.source_digests()
    other, absent = ("moe/combine", "moe/route") if kind == "layer.jsonl" else ("sm90_fp8_wgrad", "sm90_bf16_wgrad")
    then = {name: hash for name, hash in now.items() if name != absent} | {other: "0"}
    record = tmp_path / f"2031-02-03-h200-{kind}"
    inside = (
        {"kernels": then, "checks": []} if kind == "verify.json" else {"kind": "session", "machine": {"kernels": then}}
    )
    record.write_text(json.dumps(inside) + "\n")
    assert set(tool.changed_since(tmp_path)[record.name].kernels) == {other, absent}
    text = "\n".join(tool.kernels_section(tmp_path))
    assert f"| [{record.name}]({tool.FOLDER}/{record.name}) | all | " in text

    record.write_text(json.dumps({"checks": [], "machine": {}}) + "\n")
    measured = tool.Run("", {}, 1, is_alone=False).measured(kind, now)
    assert tool.changed_since(tmp_path)[record.name].kernels == measured, "nothing is known of it"
    (tmp_path / tool.OF_COMMITS).write_text(json.dumps({record.name: now}))
    assert tool.changed_since(tmp_path)[record.name].kernels == []
    assert "All kernels are still those of" in tool.kernels_section(tmp_path)[0]


def test_a_run_without_hashes_has_those_of_its_commit_and_its_own_win(tmp_path: Path) -> None:
    """A commit's hashes are kept by run, so also of one that came from an older record. What neither has is unknown."""
    now = jit.source_digests()
    cuda = {name: hash for name, hash in now.items() if "/" not in name}
    rows = [{"kind": "session", "id": id, "machine": {"kernels": cuda}} for id in ("old", "new")]
    rows += [{"kind": "layer", "session": id} for id in ("old", "new", "new")]
    record = tmp_path / "2031-02-03-h200-layer.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_triton = [name for name in tool.runs_in(record)[0].measured("layer.jsonl", now) if "/" in name]
    assert tool.changed_since(tmp_path)[record.name] == (of_triton, 3, 3)
    of_commits = {"new": now | {"moe/combine": "0", "sm90_fp8_grouped_gemm": "0"}, "old": now}
    (tmp_path / tool.OF_COMMITS).write_text(json.dumps(of_commits))
    assert tool.changed_since(tmp_path)[record.name] == (["moe/combine"], 2, 3)
    rows[1]["machine"] = {"kernels": now}
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tool.changed_since(tmp_path)[record.name] == ([], 0, 3)
    assert "All kernels are still those of" in tool.kernels_section(tmp_path)[0]


def test_a_run_came_with_the_first_commit_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was merged from an older record with that one's; a JSON file, which is one run, with its last commit."""
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    folder, kernel = tmp_path / tool.FOLDER, tmp_path / "src" / "padless" / "c" / "triton" / "copy.py"
    folder.mkdir(parents=True)
    kernel.parent.mkdir(parents=True)
    tool._git("init", "-q")
    first, second, whole = folder / "1-layer.jsonl", folder / "2-layer.jsonl", folder / "1-verify.json"
    trees = []
    for number, rows in enumerate(((first, "old", ""), (second, "old", "new"))):
        path, *ids = rows
        path.write_text("".join(json.dumps({"id": id}) + "\n" for id in ids))
        whole.write_text(json.dumps({"checks": number}))
        kernel.write_text(MODULES["c/triton/copy.py"].replace("9", str(number)))
        tool._git("add", ".")
        tool._git("-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "-m", "records")
        trees.append(jit.source_digests({"c/triton/copy.py": kernel.read_text()}))

    def hashes(path: Path, name: str) -> dict[str, str]:
        return tool.at_commit(tool.commit_of(path, tool.Run(name, {}, 1, is_alone=False)))

    assert trees[0] != trees[1]
    assert hashes(second, "old") == trees[0]
    assert hashes(second, "new") == hashes(whole, whole.name) == trees[1]


def test_points_of_one_gpu_are_not_older_than_the_exchange(tmp_path: Path) -> None:
    now = jit.source_digests()
    then = now | {"distributed/publish": "0"}
    rows = [{"kind": "session", "id": id, "machine": {"kernels": then}} for id in ("one", "four")]
    rows += [{"session": "one", "point": {"ranks": 1}}] * 2 + [{"session": "four", "point": {"ranks": 4}}]
    record = tmp_path / "2031-02-03-h200-pretrain.jsonl"
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tool.changed_since(tmp_path)[record.name] == (["distributed/publish"], 1, 3)


def test_many_kernels_of_a_folder_are_counted() -> None:
    assert tool.shown(["a", "d/e", "b", "c", "d/f"]) == "a, b, c, d/e, d/f"
    assert tool.shown(["a", "d/e", "b", "c", "d"]) == "4 of kernels/, d/e"


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
    changed, *points = tool.changed_since(tmp_path)[record.name]
    assert set(changed) == set(tool.KERNELS["wgrad.jsonl"]), "nothing is known of it"
    assert points == [2, 5]


def test_old_runs_of_the_records_have_hashes_of_their_commits() -> None:
    folder = tool.ROOT / tool.FOLDER
    of_commits = json.loads((folder / tool.OF_COMMITS).read_text())
    old = {run.name for _, runs in tool.newest_runs(folder).values() for run in runs if run.is_old}
    assert of_commits.keys() == old, "run the tool"
