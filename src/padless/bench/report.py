"""Tables and figures again from result files, of any benchmark and any age; needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from padless.bench import tables
from padless.bench.blackwell import print_blackwell
from padless.bench.chain_report import print_chain
from padless.bench.epilogue import print_epilogue
from padless.bench.formats_report import draw_formats, print_formats
from padless.bench.layer import print_layer
from padless.bench.paper import BenchResult, report_figure
from padless.bench.results import Record, read_records, sessions_of
from padless.bench.session import wide_console
from padless.bench.tiles_report import print_tiles
from padless.bench.wgrad_report import print_wgrad

Records = Sequence[Record]


@dataclass(frozen=True)
class Kind:
    """How records of one kind are shown: show(console, records, sessions by id) and draw(records, path, console)."""

    show: Callable[[Console, Records, Mapping[str, Record]], None]
    draw: Callable[[Records, Path, Console], Path | None] | None = None


KINDS = {
    "paper": Kind(tables.print_grouped, report_figure),
    "decode": Kind(tables.print_decode),
    "dense": Kind(tables.print_dense),
    "chain": Kind(print_chain),
    "quantize": Kind(lambda console, records, _: tables.print_bandwidth(console, records)),
    "formats": Kind(lambda console, records, _: print_formats(console, records), draw_formats),
    "epilogue": Kind(lambda console, records, _: print_epilogue(console, records)),
    "layer": Kind(lambda console, records, _: print_layer(console, records)),
    "blackwell": Kind(lambda console, records, _: print_blackwell(console, records)),
    "wgrad": Kind(lambda console, records, _: print_wgrad(console, records)),
    "tiles": Kind(lambda console, records, _: print_tiles(console, records)),
}


def report_file(
    file: str | Path, figure: str | Path | None = None, console: Console | None = None
) -> BenchResult:
    """Prints the tables of a result file, those that its records' `kind` asks for.

    figure: where to draw the figure, of the paper's grid or of formats; None draws none.

    Raises ValueError for a file that is not there, that holds other records, or that has no figure to draw.
    """
    console = wide_console() if console is None else console
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file must be a result file of padless bench, got {str(path)!r}, which is no file")
    records = read_records(path)
    sessions = sessions_of(records)
    parts: dict[str, list[Record]] = {}
    for record in records:
        if record.get("kind") != "session":
            parts.setdefault(str(record.get("kind")), []).append(record)
    _check(path, parts, wants_figure=figure is not None)
    if not parts:
        console.print("nothing measured")
    drawn = None
    for name, part in parts.items():
        KINDS[name].show(console, part, sessions)
        draw = KINDS[name].draw
        if figure is not None and draw is not None:
            drawn = draw(part, Path(figure), console)
    return BenchResult([record for part in parts.values() for record in part], path, drawn)


def _check(path: Path, kinds: Sequence[str] | Mapping[str, object], *, wants_figure: bool) -> None:
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"{path} holds records of kind {unknown}; those that can be shown: {sorted(KINDS)}")
    with_figure = [name for name, kind in KINDS.items() if kind.draw is not None]
    if wants_figure and sum(name in with_figure for name in kinds) != 1:
        raise ValueError(
            f"figure can be drawn of one kind of records, {' or '.join(with_figure)}; {path} holds {sorted(kinds)}"
        )
