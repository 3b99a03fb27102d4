"""Kernels that have changed since a record of docs/measured was made: the page's table, and the hashes behind it.

    python tools/measured_kernels.py    # into kernels.json: hashes for runs that hold none of Triton's kernels

Records hold hashes of kernels' sources, without comments (`padless.runtime.jit.source_digests`). Those that an older run
does not hold are of the tree with which it came into the repository: of the first commit with its id or, of a JSON file,
which is one run, of the last that wrote it. Sources that were not committed yet are taken for those of that commit.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from measured_markdown import listed
from measured_records import FOLDER, newest
from padless.runtime.jit import source_digests

ROOT = Path(__file__).parents[1]
OF_COMMITS = "kernels.json"  # {run: {kernel: hash}} of kernels that the run measured and holds no hash of
MOST_NAMED = 3  # kernels of a folder, in a row of the table
_FP8, _PLAIN = ("sm90_fp8_grouped_gemm", "sm90_fp8_few_grouped_gemm"), ("sm90_bf16_plain_grouped_gemm",)
_WGRAD, _OTHER_FORMATS = ("sm90_fp8_wgrad", "sm90_bf16_wgrad"), ("sm90_bf16_grouped_gemm", "sm90_mxfp8_grouped_gemm")
_TRAINED = (*_FP8, *_PLAIN, *_WGRAD)
_DECODE = (*_FP8, "sm90_bf16_grouped_gemm", "sm90_moe_decode", "sm90_moe_decode_fp4")
_ROWS_COLUMNS = ("sm90_rows_columns", "sm90_swiglu_backward", "quantization/swiglu_backward")
_QUANTIZERS = (*_ROWS_COLUMNS, "quantization/fp8_block", "quantization/weight_both")
_FEW_PASSES = ("moe/quantize_rows", "moe/combine")
_PASSES = (*_FEW_PASSES, "moe/route", "moe/place_scales", "quantization/fp8_block")
_NN = ("nn/rows", "nn/swiglu")
_STEP = (*_TRAINED, *_QUANTIZERS, "quantization/group_tiles", *_PASSES, "moe/slots", *_NN)
_FROZEN = ("sm90_fp8_grouped_gemm, low rank", "sm90_fp4_dgrad", "moe/transpose")
_ADAPTERS = ("nn/activation", "nn/looked_up", "nn/low_rank_kernels")
_EXCHANGE = "distributed"
# The kernels that a kind of record measures, by the end of its file's name: CUDA's, and Triton's by the modules that are
# launched, since a hash is of what they use too. A folder stands for all modules in it.
KERNELS: dict[str, tuple[str, ...]] = {
    "layer.jsonl": (*_FP8, "sm90_bf16_grouped_gemm", *_PASSES, "bench/peers/padded_layer_kernels"),
    "decoding.jsonl": (*_DECODE, *_FEW_PASSES, "moe/topk", "bench/peers/triton_moe_kernels"),
    "model.jsonl": (*_FP8, *_PASSES),
    "train.jsonl": _STEP,
    "pretrain.jsonl": (*_STEP, _EXCHANGE),
    "adapters.jsonl": (*_TRAINED, *_OTHER_FORMATS, *_PASSES, *_FROZEN, *_ADAPTERS),
    "ep.jsonl": (*_STEP, _EXCHANGE, "bench/cases/ep/deepep_kernels"),
    "wgrad.jsonl": _WGRAD,
    "paper-full.jsonl": (*_FP8, "bench/pad_kernels"),
    "decode.jsonl": _FP8,
    "dense.jsonl": _FP8,
    "formats.jsonl": (*_FP8, *_PLAIN, *_OTHER_FORMATS),
    "epilogue.jsonl": (*_FP8, "quantization/fp8_block"),
    "quantize.jsonl": (*_QUANTIZERS, "quantization/row_blocks", "quantization/global_scale", "bench/pad_kernels"),
    "picks.jsonl": (*_TRAINED, *_OTHER_FORMATS),
    "one-launch.json": (*_DECODE, *_FEW_PASSES),
    "verify.json": (*_DECODE, *_STEP, *_OTHER_FORMATS, *_FROZEN, "moe", "quantization"),
    "ranks.json": (*_STEP, *_OTHER_FORMATS, "moe", "quantization", _EXCHANGE),
}


class Run(NamedTuple):
    """One run of a record.

    Attributes:
        name: its id; in a JSON file, which is one run, the file's name.
        hashes: those that it holds.
        points: how many it has.
        is_alone: whether they are of one GPU, in a kind that has points of several.
    """

    name: str
    hashes: dict[str, str]
    points: int
    is_alone: bool

    def measured(self, kind: str, now: dict[str, str]) -> list[str]:
        """The kernels of this run of a kind of record, of those that there are now."""
        given = [name for name in KERNELS[kind] if not (self.is_alone and name == _EXCHANGE)]
        return [name for name in now if name in given or any(name.startswith(f"{folder}/") for folder in given)]

    @property
    def is_old(self) -> bool:
        """Whether it is of a time when records held no hashes of Triton's kernels."""
        return not any("/" in name for name in self.hashes)


class Changed(NamedTuple):
    """Kernels that had other sources when ``points`` of a record's ``of`` points were measured."""

    kernels: list[str]
    points: int
    of: int


def runs_in(path: Path) -> list[Run]:
    """The runs of a record: one for each session that points name, or one in all."""
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
    points = [row for row in rows if "session" in row]
    counts = Counter(row["session"] for row in points)
    alone = {row["session"] for row in points if row.get("point", {}).get("ranks") == 1}
    sessions = {row["id"]: row for row in rows if row.get("id") in counts} or {path.name: rows[0]}
    return [Run(name, _hashes_of(row), counts.get(name, 1), name in alone) for name, row in sessions.items()]


def _hashes_of(row: dict[str, Any]) -> dict[str, str]:
    places = (row.get("kernels"), row.get("machine", {}).get("kernels"))
    return next((found for found in places if isinstance(found, dict)), {})


def newest_runs(folder: Path) -> dict[Path, tuple[str, list[Run]]]:
    """The newest record of each kind in the folder, with the kind and its runs."""
    paths = {kind: newest(folder, kind) for kind in KERNELS}
    return {path: (kind, runs_in(path)) for kind, path in paths.items() if path is not None}


def changed_since(folder: Path) -> dict[str, Changed]:
    """The newest record of each kind in the folder, by its file's name, and the kernels that had other sources then."""
    now, found = source_digests(), {}
    of_commits = json.loads((folder / OF_COMMITS).read_text()) if (folder / OF_COMMITS).exists() else {}
    for path, (kind, runs) in newest_runs(folder).items():
        changed, points = set[str](), 0
        for run in runs:
            then = of_commits.get(run.name, {}) | run.hashes
            others = {name for name in run.measured(kind, now) if then.get(name) != now[name]}
            changed |= others
            points += run.points if others else 0
        found[path.name] = Changed([name for name in now if name in changed], points, sum(run.points for run in runs))
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
        "yet: its figures are of the kernel as it was. Triton's are named by module, and more than "
        f"{MOST_NAMED} of a folder of src/padless are counted. "
        + (f"All kernels are still those of {listed(same)}." if same else "")
    ]
    if old:
        rows = [
            f"| [{name}]({FOLDER}/{name}) | {'all' if points == of else f'{points} of {of}'} | {shown(kernels)} |"
            for name, (kernels, points, of) in old.items()
        ]
        parts.append("\n".join(["| record | points | changed since |", "| --- | --- | --- |", *rows]))
    return parts


def shown(kernels: list[str]) -> str:
    """Their names, or of each folder that has more than `MOST_NAMED` of them how many."""
    folders: dict[str, list[str]] = {}
    for name in kernels:
        folders.setdefault(name.rpartition("/")[0] or "kernels", []).append(name)
    return ", ".join(
        ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} of {folder}/"
        for folder, names in folders.items()
    )


# --- what runs do not hold -------------------------------------------------------------------------------


def main() -> None:
    folder, now, found = ROOT / FOLDER, source_digests(), dict[str, dict[str, str]]()
    for path, (kind, runs) in newest_runs(folder).items():
        for run in runs:
            if run.is_old:
                then = at_commit(commit_of(path, run))
                missing = [name for name in run.measured(kind, now) if name in then and name not in run.hashes]
                found[run.name] = found.get(run.name, {}) | {name: then[name] for name in missing}
    (folder / OF_COMMITS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def commit_of(path: Path, run: Run) -> str:
    """The commit with which a run came into the repository."""
    if run.name == path.name:
        return _git("log", "-1", "--format=%H", "--", str(path)).decode().strip()
    return _git("log", "--format=%H", f"-S{run.name}", "--", FOLDER).decode().split()[-1]


@cache
def at_commit(commit: str) -> dict[str, str]:
    """Hashes of the kernels of a commit's tree."""
    texts = dict[str, str]()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", f"{commit}:src/padless"))) as tree:
        for member in tree:
            if member.name.endswith((".cu", ".cuh", ".py")) and (file := tree.extractfile(member)) is not None:
                is_python = member.name.endswith(".py")
                texts[member.name if is_python else member.name.removeprefix("kernels/")] = file.read().decode()
    return source_digests(texts)


def _git(*command: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
