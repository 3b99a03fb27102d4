"""`padless bench`: a command for each `Case`, made when one of them is asked for."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from padless.cli.calling import DEFAULT_OUT, OutDir, call, path_option
from padless.options import check_picture

COMMANDS = "padless.bench.commands"


def _several(kind: Any, text: str) -> tuple[Any, Any]:
    return list[kind] | None, typer.Option(None, help=f"{text}; may be repeated. Default: all.")


# Type, and text of --help with the default, of every option that a benchmark's command may take.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "full": (bool, typer.Option(False, "--full/--quick", help="The whole grid, or a subset in about two minutes.")),
    "balanced": (bool, typer.Option(False, "--balanced", help="72 points, every value equally often.")),
    "models": _several(str, "Only models whose names begin so"),
    "tokens": _several(int, "Only so many tokens"),
    "part": _several(str, "Only this part of the benchmark"),
    "ranks": (
        int | None,
        typer.Option(None, min=2, help="Over so many GPUs of this host, with layers that fit. Default: one, with 12."),
    ),
    "peers": (
        Path | None,
        typer.Option(None, help="Folder of other libraries to compare with, if importable from there."),
    ),
    "only": _several(str, "One of the other libraries, by name"),
    "out": (OutDir, DEFAULT_OUT),
    "time_limit": (
        float | None,
        typer.Option(None, min=0, help="Seconds after which no new point is begun; the next run goes on."),
    ),
}


def _repeats(default: int) -> tuple[Any, Any]:
    text = f"Timed calls, or replays, of each contender at each point. Default: {default}."
    return int | None, typer.Option(None, min=1, help=text)


def _command(name: str, options: dict[str, tuple[Any, Any]]) -> Callable[..., None]:
    """A function whose signature has these options, as typer reads it."""

    def command(**given: Any) -> None:
        call(COMMANDS, "bench", case=name, **given)

    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in options.items()
        ]
    )
    return command


def _host() -> None:
    """Time that the host adds to a call."""
    call(COMMANDS, "host")


def _units(out: OutDir = DEFAULT_OUT) -> None:
    """For a Hopper GPU: cycles of the tensor cores, TMA and both together, for the emulator's clock."""
    call("padless.bench.units", "units", out=out)


def _report(
    files: Annotated[list[Path], typer.Argument(help="Result files (.jsonl) of any benchmark.")],
    figure: Annotated[
        Path | None,
        path_option("--figure", check_picture, "Draw the figure of the paper's grid, of formats or of decoding there."),
    ] = None,
) -> None:
    """Tables and figure of earlier runs again; needs no GPU."""
    call(COMMANDS, "report", files=files, figure=figure)


def commands() -> Any:
    """All of them, a group of click's commands."""
    from padless.bench.case import CASES

    app = typer.Typer(rich_markup_mode=None)
    for case in CASES.values():
        known = OPTIONS | {"repeats": _repeats(case.repeats)}
        options = {name: known[name] for name in case.options}
        app.command(case.name, help=case.about)(_command(case.name, options))
    app.command("host")(_host)
    app.command("units")(_units)
    app.command("report")(_report)
    return typer.main.get_command(app)
