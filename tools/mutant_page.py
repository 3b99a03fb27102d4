"""The page about mutants of this library's kernels: `python tools/mutant_page.py [RECORD]`.

From a record of `tools/mutants.py` (JSON lines) it writes docs/measured/mutants.json, in which like survivors are
counted together, and from that docs/mutants.md; without one it writes the page alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutant_reasons import reason_of
from mutants import read, totals

ROOT = Path(__file__).parents[1]
SUMMARY, PAGE = ROOT / "docs" / "measured" / "mutants.json", ROOT / "docs" / "mutants.md"
HEAD = """# Mutants of the kernels

How much do the checks of [the emulator](emulator.md) notice? Every product kernel and every quantizing kernel of both
architectures was changed in one place at a time: each synchronisation that a small problem executes (fences, barriers,
arrivals, waits, commits) was deleted or weakened, as `padless emulate --mutate` does. A mutant is killed by a report, or
by an output that differs from the kernel's under the same schedule. The first problem has several stages of K to a tile;
what survives two schedules of it is tried on a second one, of one stage to a tile and more workers. This page is
generated (`tools/mutants.py`, `tools/mutant_page.py`) from `docs/measured/mutants.json`.

{judged} of {all} mutants were judged, in the order of the kernels' text until the time was over; the rest is not known.
{killed} of those were killed, {second} of them by the second problem alone. Each of the {left} others is equivalent, for
the reason that stands with it, which was found by reading and not proved; {once} of them were tried on the first problem
alone. The reasons rest on one rule of the emulator: a warp issues in order, so what it has read is over when it goes on.

The record holds digests of the machine code that was judged; later changes of a kernel are not in it. One miss was
mended on the way: an atomic of several CTAs whose scope was narrowed to one is a race now.

| kernel | mutants | judged | killed by a report | by an output | equivalent | of those tried on one problem alone |
|---|---|---|---|---|---|---|
"""


def summarised(record: Path) -> dict[str, Any]:
    """Counts by kernel, and the survivors: those of one place and change together.

    Of a kernel that the record has in several versions, the one with the most verdicts counts.
    """
    all_of, verdicts = totals(record), read(record)
    versions = Counter((v["case"], v["digest"]) for v in verdicts)
    kept = {name: digest for (name, digest), _ in sorted(versions.items(), key=lambda item: item[1])}
    kernels: dict[str, Any] = {}
    survivors: Counter[tuple[str, str, str]] = Counter()
    places: dict[tuple[str, str, str], set[str]] = {}
    for v in verdicts:
        name = v["case"]
        if v["digest"] != kept[name]:
            continue
        blank = {"digest": v["digest"], "mutants": all_of[name, v["digest"]], "judged": 0, "second problem": 0,
                 "survivors": 0, "tried once": 0, "by": {}}  # fmt: skip
        own = kernels.setdefault(name, blank)
        own["judged"] += 1
        if v["killed_by"]:
            own["by"][v["killed_by"]] = own["by"].get(v["killed_by"], 0) + 1
            own["second problem"] += bool(v.get("short"))
            continue
        own["survivors"] += 1
        own["tried once"] += not v.get("short")
        key = v["instruction"].split(" ")[0], v["change"], v["source"]
        survivors[key] += 1
        places.setdefault(key, set()).add(name)
    listed = [
        {"instruction": key[0], "change": key[1], "source": key[2], "count": count, "kernels": sorted(places[key])}
        for key, count in sorted(survivors.items())
    ]
    return {"kernels": dict(sorted(kernels.items())), "survivors": listed}


def page(summary: Mapping[str, Any]) -> str:
    """The text of docs/mutants.md. ValueError where a survivor has no reason."""
    rows = summary["kernels"]
    names = ("mutants", "judged", "survivors", "second problem", "tried once")
    total = {name: sum(own[name] for own in rows.values()) for name in names}
    text = HEAD.format(
        all=total["mutants"], judged=total["judged"], killed=total["judged"] - total["survivors"],
        second=total["second problem"], left=total["survivors"], once=total["tried once"],
    )  # fmt: skip
    for name, own in rows.items():
        output = own["by"].get("output", 0)
        numbers = own["mutants"], own["judged"], own["judged"] - own["survivors"] - output, output, own["survivors"]
        text += f"| {name} | {' | '.join(map(str, numbers))} | {own['tried once']} |\n"
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for survivor in summary["survivors"]:
        reason = reason_of(survivor)
        if reason is None:
            raise ValueError(f"nothing explains {survivor}; add a rule to tools/mutant_reasons.py, or kill it")
        by_reason.setdefault(reason.text, []).append(survivor)
    text += "\n| equivalent mutants | why | where |\n|---|---|---|\n"
    for why, alike in sorted(by_reason.items(), key=lambda item: -sum(s["count"] for s in item[1])):
        what = sorted({f"{s['instruction'].split('.shared')[0]} {s['change']}" for s in alike})
        where = sorted({re.sub(r".*inlined at (.*)\)", r"\1", s["source"]) for s in alike})
        shown = ", ".join(f"`{name}`" for name in what)
        text += f"| {sum(s['count'] for s in alike)}: {shown} | {why} | {', '.join(where)} |\n"
    return text


def main() -> int:
    if len(sys.argv) > 1:
        SUMMARY.write_text(json.dumps(summarised(Path(sys.argv[1])), indent=1) + "\n")
    PAGE.write_text(page(json.loads(SUMMARY.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
