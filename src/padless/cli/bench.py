"""`padless bench`: a command for each `Case`, made when one of them is asked for."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from padless.cli.calling import DEFAULT_OUT, OutDir, call, picture_option

COMMANDS = "padless.bench.commands"

# Every option that a benchmark's command may take: type, with the text of --help, and default.
OPTIONS: dict[str, tuple[Any, Any]] = {
    "full": (
        Annotated[bool, typer.Option("--full/--quick", help="The whole grid, or a subset in about two minutes.")],
        False,
    ),
    "balanced": (Annotated[bool, typer.Option("--balanced", help="72 points, every value equally often.")], False),
    "models": (
        Annotated[
            list[str] | None,
            typer.Option("--models", help="Only models whose names begin so; may be repeated. Default: all."),
        ],
        None,
    ),
    "tokens": (
        Annotated[
            list[int] | None, typer.Option("--tokens", help="Only so many tokens; may be repeated. Default: all.")
        ],
        None,
    ),
    "part": (
        Annotated[
            list[str] | None,
            typer.Option("--part", help="Only this part of the benchmark; may be repeated. Default: all."),
        ],
        None,
    ),
    "ranks": (
        Annotated[
            int | None,
            typer.Option(min=2, help="Over so many GPUs of this host, with layers that fit. Default: one, with 12."),
        ],
        None,
    ),
    "peers": (
        Annotated[
            Path | None,
            typer.Option("--peers", help="Folder of other libraries to compare with, if importable from there."),
        ],
        None,
    ),
    "only": (
        Annotated[
            list[str] | None,
            typer.Option("--only", help="One of the other libraries, by name; may be repeated. Default: all."),
        ],
        None,
    ),
    "out": (OutDir, DEFAULT_OUT),
    "time_limit": (
        Annotated[
            float | None,
            typer.Option(
                "--time-limit", min=0, help="Seconds after which no new point is begun; the next run goes on."
            ),
        ],
        None,
    ),
}


def _repeats(default: int) -> tuple[Any, Any]:
    text = f"Timed calls, or replays, of each contender at each point. Default: {default}."
    return Annotated[int | None, typer.Option(min=1, help=text)], None


def _command(name: str, options: dict[str, tuple[Any, Any]]) -> Callable[..., None]:
    """A function whose signature has these options, as typer reads it."""

    def command(**given: Any) -> None:
        call(COMMANDS, "bench", case=name, **given)

    command.__name__ = name
    command.__annotations__ = {option: kind for option, (kind, _) in options.items()}
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
    """For a Hopper GPU: cycles of the tensor cores, the copy engine and both at once, for the emulator's clock."""
    call("padless.bench.units", "units", out=out)


def _report(
    files: Annotated[list[Path], typer.Argument(help="Result files (.jsonl) of any benchmark.")],
    figure: Annotated[
        Path | None, picture_option("--figure", "Draw the figure of the paper's grid, of formats or of decoding there.")
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
