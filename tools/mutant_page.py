"""The page about mutants of this library's kernels: `python tools/mutant_page.py [RECORD]`.

From a record of `tools/mutants.py` (JSON lines) it puts the kernels of the record into docs/measured/mutants.json, in
which like survivors are counted together, and makes docs/mutants.md from that; without one it writes the page alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mutant_reasons import EXCHANGE_REASONS, REASONS, Reason, reason_of
from mutants import EXCHANGE_SUMMARY, SUMMARY, read, totals

PAGE = Path(__file__).parents[1] / "docs" / "mutants.md"
HEAD = """# Mutants of the kernels

How much do the checks of [the emulator](emulator.md) notice? Every kernel in CUDA C++ of both architectures (products,
weight gradients, and the two that quantize without a product), in one configuration or several, was changed in one place
at a time: each synchronisation that a small problem executes (fences, barriers, arrivals, waits, commits) was deleted or
weakened, as `padless emulate --mutate` does. A mutant is killed by a report, or by an output that differs from the
kernel's under the same schedule. The first problem has several stages to a tile; what survives two schedules of it is
tried on a second one, of one stage or two to a tile and more workers. This page is generated (`tools/mutants.py`,
`tools/mutant_page.py`) from `docs/measured/mutants.json`.

{judged} mutants were judged{unknown}.
{killed} of those were killed, {second} of them by the second problem alone. Each of the {left} others is equivalent, for
the reason that stands with it, which was found by reading and not proved{once}.
The reasons rest on two rules of the emulator: a warp issues in order, so what it has read is over when it goes on; and
a CTA's tcgen05 operations run in the order in which they are issued, and its commits signal in that order.

One miss was mended on the way: an atomic of several CTAs whose scope was narrowed to one is a race now.

To go on: `python tools/mutants.py run RECORD --unsettled` judges the kernels whose machine code (PTX, of which the JSON
holds digests) is not that of the table, and those that were not judged whole; RECORD is a file of its own, to which an
interrupted run goes on to add. It prints the survivors. `python tools/mutant_page.py RECORD` puts those kernels into the
JSON, leaves the others as they are and makes the page; it refuses a survivor without a reason, which is to be found by
reading and added to `tools/mutant_reasons.py`, or killed by a better check. Places are those of the judged text: where a
line of a reason has moved, the reason's place moves with it. New kernels are added to `tools/mutant_cases.py`.

| kernel | mutants | judged | killed by a report | by an output | equivalent | of those tried on one problem alone |
|---|---|---|---|---|---|---|
"""

EXCHANGE_HEAD = """
## Expert parallelism

The kernels that exchange rows between ranks are Triton's. Two ranks' launches, of which one waits for the other's
signals, run as one launch (`tools/mutant_exchange.py`), CTA by CTA and three at a time; the numbers are of the PTX of
the version of Triton that `docs/measured/mutants_exchange.json` names. {killed} of {judged} mutants were killed,
{second} of them by the second problem alone. The {left} others are explained below: equivalent, or not observable in
this pair and killed in the pair in which the kernel has the other part. `python tools/mutants.py run RECORD --case
NAME` judges the pairs of `EXCHANGES`, and `python tools/mutant_page.py RECORD` puts them into the JSON as it does the
others.

One blind spot was found. The emulator follows an array from its first ordinary store on, so that a read in front of
all stores was forgotten, and a rank could store over what another still read. Here every array is followed from the
launch's start; five mutants of `finish` and of the `fan_in` behind it that survive otherwise are races then.
Elsewhere the limit [stays](emulator_model.md#what-is-not), since it saves following operands.

| sender, receiver | mutants | judged | killed by a report | by an output | left | of those tried on one problem alone |
|---|---|---|---|---|---|---|
"""


def summarised(record: Path, before: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Counts by kernel, and the survivors: those of one place and change together, each with its kernels' numbers.

    Kernels that the record lacks are as in ``before``, a summary; those not in ``names`` are left out. Of several
    versions of a kernel, that of ``before`` and then the record's, the one that is judged furthest counts, of equals the
    last.
    """
    all_of, verdicts = totals(record), read(record)
    versions = Counter((v["case"], v["digest"]) for v in verdicts)
    share = {version: count / all_of[version] for version, count in versions.items()}
    kept = dict(sorted(share, key=lambda version: share[version]))
    for name, own in before["kernels"].items():
        if name in kept and own["judged"] / own["mutants"] > share[name, kept[name]]:
            del kept[name]
    kernels = {name: own for name, own in before["kernels"].items() if name in names and name not in kept}
    survivors: dict[tuple[str, str, str], Counter[str]] = {}
    for old in before["survivors"]:
        key = old["instruction"], old["change"], old["source"]
        survivors[key] = Counter({name: count for name, count in old["kernels"].items() if name in kernels})
    for v in verdicts:
        name = v["case"]
        if v["digest"] != kept.get(name) or name not in names:
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
        survivors.setdefault(key, Counter())[name] += 1
    listed = [
        {"instruction": key[0], "change": key[1], "source": key[2], "kernels": dict(sorted(counts.items()))}
        for key, counts in sorted(survivors.items())
        if counts
    ]
    return {"kernels": dict(sorted(kernels.items())), "survivors": listed}


def count_of(survivor: Mapping[str, Any]) -> int:
    return sum(survivor["kernels"].values())


def total_of(summary: Mapping[str, Any]) -> dict[str, int]:
    names = ("mutants", "judged", "survivors", "second problem", "tried once")
    return {name: sum(own[name] for own in summary["kernels"].values()) for name in names}


def page(summary: Mapping[str, Any], exchanges: Mapping[str, Any]) -> str:
    """The text of docs/mutants.md, of kernels and of exchanges. ValueError where a survivor has no reason."""
    total, of_exchanges = total_of(summary), total_of(exchanges)
    is_whole = total["judged"] == total["mutants"]
    text = HEAD.format(
        judged=f"All {total['mutants']}" if is_whole else f"{total['judged']} of {total['mutants']}",
        unknown="" if is_whole else ", in the order of the kernels' text until the time was over; the rest is not known",
        killed=total["judged"] - total["survivors"], second=total["second problem"], left=total["survivors"],
        once=f"; {total['tried once']} of them were tried on the first problem alone" if total["tried once"] else "",
    )  # fmt: skip
    text += tables(summary, REASONS, "equivalent mutants")
    text += EXCHANGE_HEAD.format(
        judged=of_exchanges["judged"], killed=of_exchanges["judged"] - of_exchanges["survivors"],
        second=of_exchanges["second problem"], left=of_exchanges["survivors"],
    )  # fmt: skip
    return text + tables(exchanges, EXCHANGE_REASONS, "mutants that are left")


def tables(summary: Mapping[str, Any], rules: tuple[Reason, ...], title: str) -> str:
    """The rows of a table that is begun, and a table of what survived."""
    text = ""
    for name, own in summary["kernels"].items():
        output = own["by"].get("output", 0)
        numbers = own["mutants"], own["judged"], own["judged"] - own["survivors"] - output, output, own["survivors"]
        text += f"| {name} | {' | '.join(map(str, numbers))} | {own['tried once']} |\n"
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for survivor in summary["survivors"]:
        reason = reason_of(survivor, rules)
        if reason is None:
            raise ValueError(f"nothing explains {survivor}; add a rule to tools/mutant_reasons.py, or kill it")
        by_reason.setdefault(reason.text, []).append(survivor)
    text += f"\n| {title} | why | where |\n|---|---|---|\n"
    for why, alike in sorted(by_reason.items(), key=lambda item: -sum(map(count_of, item[1]))):
        what = sorted({f"{s['instruction'].split('.shared')[0]} {s['change']}" for s in alike})
        where = sorted({re.sub(r".*inlined at (.*)\)", r"\1", s["source"]) for s in alike})
        shown = ", ".join(f"`{name}`" for name in what)
        text += f"| {sum(map(count_of, alike))}: {shown} | {why} | {', '.join(where)} |\n"
    return text


def main() -> int:
    summaries = SUMMARY, EXCHANGE_SUMMARY
    if len(sys.argv) > 1:
        from mutant_cases import CASES
        from mutant_exchange import EXCHANGES

        for path, names in zip(summaries, (CASES, EXCHANGES), strict=True):
            before = json.loads(path.read_text()) if path.exists() else {"kernels": {}, "survivors": []}
            path.write_text(json.dumps(summarised(Path(sys.argv[1]), before, names), indent=1) + "\n")
    PAGE.write_text(page(*(json.loads(path.read_text()) for path in summaries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
