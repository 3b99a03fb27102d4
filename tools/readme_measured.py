"""Writes what README.md says was measured, from the records under docs/measured.

    python tools/readme_measured.py          # rewrites the part between the marks in README.md
    python tools/readme_measured.py --check  # exits with 1 and a sentence where README.md differs

The newest record of each kind counts: `<date>-h200-<kind>.jsonl` of `padless bench`, `<date>-h200-verify.json` of
`padless verify`. What no record holds is left out. A figure is typed nowhere: machine, dates, repeats and ranges of
points are read from the records too, and what went wrong in one is said.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from measured_records import FOLDER, Measured, machine, measured, newest
from measured_sections import (
    chain_section,
    checks_section,
    decode_section,
    dense_section,
    epilogue_section,
    formats_section,
    paper_section,
    quantize_section,
)

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- measured:begin -->\n).*?(<!-- measured:end -->)", re.DOTALL)

# By the last part of the file's name, in the README's order.
SECTIONS: dict[str, Callable[[Measured], list[str]]] = {
    "paper-full": paper_section,
    "decode": decode_section,
    "chain": chain_section,
    "dense": dense_section,
    "formats": formats_section,
    "epilogue": epilogue_section,
    "quantize": quantize_section,
}


def measured_block(folder: Path) -> str:
    """The text between the marks, of the records in a folder; links are those of README.md to docs/measured."""
    found = {kind: record for kind in SECTIONS if (record := measured(folder, kind)) is not None}
    parts = [machine(list(found.values()))] if found else []
    for kind, record in found.items():
        parts += SECTIONS[kind](record)
    verify = newest(folder, "verify.json")
    parts += checks_section(verify) if verify is not None else []
    return "\n\n".join(parts) + "\n\n"


def with_block(readme: str, block: str) -> str:
    """README.md with another text between its marks."""
    changed, count = BLOCK.subn(lambda match: match[1] + block + match[2], readme)
    if count != 1:
        raise ValueError(f"readme must have one pair of marks measured:begin and measured:end, found {count}")
    return changed


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where README.md differs"
    )
    options = parser.parse_args(arguments)
    readme = root / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = with_block(before, measured_block(root / FOLDER))
    if options.check and before != after:
        print(f"{readme} differs from its records under {FOLDER}: run make readme", file=sys.stderr)
        return 1
    if before != after:
        readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
