"""Kernels that have changed since a record of docs/measured was made: the page's table, and the hashes behind it.

    python tools/measured_kernels.py    # into kernels.json: hashes for records without any, from their commits

Records hold a hash of each kernel's sources, without comments (`padless.runtime.jit.source_digests`). Older ones hold
none, and get those of the tree in which they were committed.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from measured_markdown import listed
from measured_records import FOLDER, newest
from padless.runtime.jit import source_digests

ROOT = Path(__file__).parents[1]
OF_COMMITS = "kernels.json"  # {record: {kernel: hash}} of records that hold none
_PLAIN, _WGRAD = ("sm90_bf16_plain_grouped_gemm",), ("sm90_fp8_wgrad", "sm90_bf16_wgrad")
_FP8 = ("sm90_fp8_grouped_gemm", "sm90_fp8_few_grouped_gemm")
_LOW_RANK = ("sm90_fp8_grouped_gemm, low rank",)
_DECODE = (*_FP8, "sm90_bf16_grouped_gemm", "sm90_moe_decode", "sm90_moe_decode_fp4")
_STEP = (*_FP8, *_PLAIN, *_WGRAD, "sm90_rows_columns", "sm90_swiglu_backward")
_HOPPER = (*_DECODE, "sm90_mxfp8_grouped_gemm", *_STEP[len(_FP8) :], "sm90_fp4_dgrad", *_LOW_RANK)
# The kernels that a kind of record measures, by the end of its file's name; none: Triton's alone.
KERNELS: dict[str, tuple[str, ...]] = {
    "layer.jsonl": (*_FP8, "sm90_bf16_grouped_gemm"),
    "decoding.jsonl": _DECODE,
    "model.jsonl": _FP8,
    "train.jsonl": _STEP,
    "pretrain.jsonl": _STEP,
    "adapters.jsonl": (*_STEP, "sm90_bf16_grouped_gemm", "sm90_mxfp8_grouped_gemm", "sm90_fp4_dgrad", *_LOW_RANK),
    "ep.jsonl": _FP8,
    "wgrad.jsonl": _WGRAD,
    "paper-full.jsonl": _FP8,
    "decode.jsonl": _FP8,
    "dense.jsonl": _FP8,
    "formats.jsonl": ("sm90_mxfp8_grouped_gemm", "sm90_bf16_grouped_gemm", *_FP8),
    "epilogue.jsonl": _FP8,
    "picks.jsonl": (*_FP8, "sm90_bf16_grouped_gemm", "sm90_mxfp8_grouped_gemm", *_PLAIN, *_WGRAD),
    "one-launch.json": ("sm90_moe_decode", "sm90_moe_decode_fp4"),
    "verify.json": _HOPPER,
    "ranks.json": _STEP,
}


class Run(NamedTuple):
    """Hashes of the kernels of one run of a record, which has as many points, as the record holds them."""

    hashes: dict[str, str] | None
    points: int


class Changed(NamedTuple):
    """Kernels that had other sources when ``points`` of a record's ``of`` points were measured."""

    kernels: list[str]
    points: int
    of: int


def runs_in(path: Path) -> list[Run]:
    """The runs of a record: one for each session that points name, or one in all."""
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
    points = Counter(row["session"] for row in rows if "session" in row)
    sessions = [row for row in rows if row.get("id") in points] or rows[:1]
    return [Run(_hashes_of(row), points.get(row.get("id"), 1)) for row in sessions]


def _hashes_of(row: dict[str, Any]) -> dict[str, str] | None:
    places = (row.get("kernels"), row.get("machine", {}).get("kernels"))
    return next((found for found in places if isinstance(found, dict)), None)


def changed_since(folder: Path, now: dict[str, str] | None = None) -> dict[str, Changed]:
    """The newest record of each kind in the folder, by its file's name, and the kernels that had other sources then."""
    now = source_digests() if now is None else now
    of_commits = json.loads((folder / OF_COMMITS).read_text()) if (folder / OF_COMMITS).exists() else {}
    found = {}
    for kind, kernels in KERNELS.items():
        if (path := newest(folder, kind)) is not None:
            runs = [(run, run.hashes or of_commits.get(path.name, {})) for run in runs_in(path)]
            old = [run for run, then in runs if any(then.get(name) != now[name] for name in kernels)]
            changed = [name for name in kernels if any(then.get(name) != now[name] for _, then in runs)]
            found[path.name] = Changed(changed, sum(run.points for run in old), sum(run.points for run, _ in runs))
    return found


def kernels_section(folder: Path) -> list[str]:
    """The table between the marks of docs/measured/README.md."""
    found = changed_since(folder)
    if not found:
        return []
    old = {name: changed for name, changed in found.items() if changed.kernels}
    same = [f"[{name}]({FOLDER}/{name})" for name in found if name not in old]
    parts = [
        "**Kernels that were changed after their record**, by hashes of their sources, or that the record did not have "
        "yet: its figures are of the kernel as it was. "
        + (f"All kernels are still those of {listed(same)}." if same else "")
    ]
    if old:
        rows = [
            f"| [{name}]({FOLDER}/{name}) | {'all' if points == of else f'{points} of {of}'} | {', '.join(kernels)} |"
            for name, (kernels, points, of) in old.items()
        ]
        parts.append("\n".join(["| record | points | changed since |", "| --- | --- | --- |", *rows]))
    return parts


def at_commit(path: Path) -> dict[str, str]:
    """Hashes of the kernels in the last commit that wrote the file."""

    def git(*command: str) -> bytes:
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, check=True).stdout

    commit = git("log", "-1", "--format=%H", "--", str(path)).decode().strip()
    kernels, texts = "src/padless/kernels/", dict[str, str]()
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, kernels))) as tree:
        for member in tree:
            if member.name.endswith((".cu", ".cuh")) and (file := tree.extractfile(member)) is not None:
                texts[member.name.removeprefix(kernels)] = file.read().decode()
    return source_digests(texts)


def main() -> None:
    folder = ROOT / FOLDER
    every = [path for kind in KERNELS if (path := newest(folder, kind)) is not None]
    paths = [path for path in every if any(run.hashes is None for run in runs_in(path))]
    found = {path.name: at_commit(path) for path in sorted(paths)}
    (folder / OF_COMMITS).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
