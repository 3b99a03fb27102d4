"""Writer of what README.md, docs/tested.md and docs/measured/README.md say was measured, from docs/measured.

    python tools/readme_measured.py          # rewrites the part between the marks in each, and the README's figure
    python tools/readme_measured.py --check  # exits with 1 and a sentence for each that differs

The newest record of each kind counts: `<date>-h200-<kind>.jsonl` of `padless bench`, `<date>-h200-verify.json` of
`padless verify`; `fuzz.jsonl` has all runs of `padless fuzz`. What no record holds is left out. A figure is typed
nowhere: machine, dates, repeats and ranges of points are read from the records too, and what went wrong in one is
said. README.md has the rows and the figure of measured_overview.py, docs/measured/README.md all sections.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from measured_kernels import kernels_section
from measured_layers import decoding_section, ep_section, layer_section, model_section, train_section, wgrad_section
from measured_markdown import paragraph
from measured_overview import FIGURE, draw, figure_differs, overview
from measured_records import FOLDER, Measured, machine, measured, newest
from measured_sections import (
    chain_section,
    checks_section,
    decode_section,
    dense_section,
    epilogue_section,
    formats_section,
    fuzz_section,
    paper_section,
    quantize_section,
)
from measured_tested import tested_block

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- measured:begin -->\n).*?(<!-- measured:end -->)", re.DOTALL)

# By the last part of the file's name, in the README's order.
SECTIONS: dict[str, Callable[[Measured], list[str]]] = {
    "layer": layer_section,
    "decoding": decoding_section,
    "model": model_section,
    "train": train_section,
    "ep": ep_section,
    "wgrad": wgrad_section,
    "paper-full": paper_section,
    "decode": decode_section,
    "chain": chain_section,
    "dense": dense_section,
    "formats": formats_section,
    "epilogue": epilogue_section,
    "quantize": quantize_section,
}
CHECKS = "checks"  # of `padless verify`, after the sections
FUZZ = "fuzz"  # of `padless fuzz`: one file of all runs, last
EVERY_KIND = (*SECTIONS, CHECKS, FUZZ)


def measured_block(folder: Path) -> str:
    """The text between the marks of docs/measured/README.md, of the records in a folder; links are from the root."""
    found = {kind: record for kind in SECTIONS if (record := measured(folder, kind)) is not None}
    parts = [machine(list(found.values())), *kernels_section(folder)] if found else []
    for kind, record in found.items():
        parts += SECTIONS[kind](record)
    verify = newest(folder, "verify.json")
    parts += checks_section(verify) if verify is not None else []
    fuzz = folder / "fuzz.jsonl"
    parts += fuzz_section(fuzz) if fuzz.exists() else []
    return "\n\n".join(parts) + "\n\n"


def readme_block(folder: Path) -> str:
    """The text between the marks of README.md."""
    text = paragraph(
        "Geometric means over the points of each record, on random data, contenders taking turns in one run: how many "
        "times as long as padless each takes.",
        "" if newest(folder, "decoding.jsonl") else "Decoding was measured from 16 tokens and up to 128 experts on.",
        f"[All tables]({FOLDER}/README.md), with machine, driver and commands.",
    )
    return f"{overview(folder)}\n\n{text}\n\n"


def beside_the_records(block: str) -> str:
    """The text with links of docs/measured/README.md in place of those of README.md."""
    return block.replace(f"]({FOLDER}/", "](").replace("](docs/", "](../")


def pages(folder: Path) -> dict[str, str]:
    """The text between the marks of each page, by its path in the repository."""
    return {
        "README.md": readme_block(folder),
        "docs/tested.md": tested_block(folder),
        f"{FOLDER}/README.md": beside_the_records(measured_block(folder)),
    }


def with_block(page: str, block: str) -> str:
    """A page with another text between its marks."""
    changed, count = BLOCK.subn(lambda match: match[1] + block + match[2], page)
    if count != 1:
        raise ValueError(f"page must have one pair of marks measured:begin and measured:end, found {count}")
    return changed


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page differs")
    options = parser.parse_args(arguments)
    differ = []
    for name, block in pages(root / FOLDER).items():
        before = (root / name).read_text(encoding="utf-8")
        after = with_block(before, block)
        if before == after:
            continue
        differ.append(name)
        if not options.check:
            (root / name).write_text(after, encoding="utf-8")
    if figure_differs(root / FOLDER):
        differ.append(f"{FOLDER}/{FIGURE}")
        if not options.check:
            draw(root / FOLDER)
    if options.check and differ:
        print(f"{' and '.join(differ)} differ from the records under {FOLDER}: run make readme", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
