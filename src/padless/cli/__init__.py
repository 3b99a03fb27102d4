"""The `padless` command. Every sub-command imports what it needs itself, so that --help answers immediately."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import padless
from padless.cli.calling import DEFAULT_OUT, OutDir, call, load, path_option
from padless.options import check_alone, check_file, check_folder


class Group(TyperGroup):
    """Lists commands with whole sentences, which click cuts to a line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, made.get_short_help_str(limit=200)) for name, made in commands.items() if made])


app = typer.Typer(
    name="padless",
    cls=Group,
    help="Block-scaled grouped GEMM for Mixture-of-Experts, with no padding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, which a narrow terminal does not cut names from
)


class BenchGroup(Group):
    """Makes its commands when it is asked for them, so that `padless --help` imports none."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._made().commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._made().commands.get(cmd_name)

    @staticmethod
    def _made() -> Any:
        from padless.cli.bench import commands

        return commands()


app.add_typer(
    typer.Typer(
        cls=BenchGroup,
        no_args_is_help=True,
        help="Measure; prints a table, writes JSON lines and pictures.",
        rich_markup_mode=None,
    ),
    name="bench",
)


def main() -> None:
    """Entry point. A ValueError and a missing package are the user's to mend: a sentence, exit code 2, no traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"padless: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        print(f"padless: this command needs {error.name}, which is not installed here", file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(padless.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Random data; needs no model.")] = False,
    out: OutDir = DEFAULT_OUT,
) -> None:
    """Route a real text through a real encoder's experts and show what padding would have cost."""
    call("padless.demo.run", "run_demo", synthetic=synthetic, out=out)


@app.command()
def train_demo(
    recipes: Annotated[
        list[str] | None, typer.Option("--recipe", help="Train under this one; can be repeated. bf16 and fp8.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. 150 on a CPU, 600 on a GPU.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs with other weights and batches. Default: 1.")] = None,
    ranks: Annotated[
        int, typer.Option(help="From 2 on: spread the experts over so many processes, next to one that has all.")
    ] = 1,
    out: OutDir = DEFAULT_OUT,
) -> None:
    """Train a small Mixture-of-Experts language model in bf16 and in FP8 side by side and draw the losses."""
    check_alone("--ranks", ranks != 1, {"--seeds": seeds})
    options = {
        "recipes": recipes or (),
        "steps": steps,
        "seeds": 1 if seeds is None else seeds,
        "ranks": ranks,
        "out": out,
    }
    call("padless.demo.train.run", "run_train_demo", **options)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    formats: Annotated[bool, typer.Option("--formats", help="Which formats run where, as Markdown.")] = False,
) -> None:
    """Print versions, devices, backends (and why one is missing), tables of tile costs and the kernel cache."""
    from rich.console import Console

    from padless.cli.environment import print_info
    from padless.cli.supported import supported_markdown

    check_alone("--formats", formats, {"--json": as_json})
    if formats:
        print(supported_markdown(), end="")
    else:
        print_info(Console(), as_json=as_json)


@app.command()
def tune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, store nothing.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Remove what was stored; measure nothing.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed calls of each product. Default: 20.")] = None,
) -> None:
    """Measure on this GPU what tiles cost, so that the choice of tile fits it."""
    check_alone("--reset", reset, {"--dry-run": dry_run, "--repeats": repeats})
    call("padless.bench.tune.costs", "run_tune", dry_run=dry_run, reset=reset, repeats=repeats or 20)


@app.command()
def verify(
    out: Annotated[Path | None, path_option("--out", check_folder, "Folder for the record of the run.")] = None,
    sanitizer: Annotated[bool, typer.Option(help="Run compute-sanitizer where it is installed.")] = True,
    checks: Annotated[list[str] | None, typer.Option("--check", help="Only this check; can be repeated.")] = None,
    against_emulator: Annotated[
        bool, typer.Option("--against-emulator", help="Compare random problems with the emulator, bit for bit.")
    ] = False,
    against_cudnn: Annotated[
        bool, typer.Option("--against-cudnn", help="Instead: cuDNN's kernel and ours in the emulator, byte for byte.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Checks at a time. One for every two cores, at most eight.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help="Instead: expert parallelism, on so many GPUs or CPU processes, 2 to 16."),
    ] = None,
) -> None:
    """Run every check that needs a GPU, compute-sanitizer included, and record the result."""
    unused: dict[str, object] = {"--against-emulator": against_emulator, "--no-sanitizer": not sanitizer}
    check_alone("--against-cudnn", against_cudnn, unused)
    check_alone("--ranks", ranks is not None, {"--against-cudnn": against_cudnn, "--workers": workers, **unused})
    options: dict[str, Any] = {"out": out, "checks": checks or None}
    if ranks is not None:
        call("padless.verify.ranks", "run_verify_ranks", ranks=ranks, **options)
    elif against_cudnn:
        call("padless.verify.cudnn.run", "run_verify_cudnn", workers=workers, **options)
    else:
        options |= {"sanitizer": sanitizer, "against_emulator": against_emulator}
        call("padless.verify.run", "run_verify", workers=workers, **options)


@app.command()
def fuzz(
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; compiling counts.")] = None,
    problems: Annotated[int | None, typer.Option(help="Stop after so many problems.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the problems; drawn where it is not given.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="cuda, emulator, emulator:sm_100a or reference; the GPU if there is one.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one for each core, fewer on a small GPU.")] = None,
    out: Annotated[Path | None, path_option("--out", check_file, "File that a record of the run is added to.")] = None,
    calls: Annotated[list[str] | None, typer.Option("--call", help="Only this call; can be repeated.")] = None,
    repeat: Annotated[str | None, typer.Option(help="Check this one problem, as a failure prints it.")] = None,
    other_gpu: Annotated[
        bool, typer.Option("--other-gpu", help="Tensors on a second GPU while the first is current.")
    ] = False,
    states: Annotated[
        bool,
        typer.Option("--states", help="Instead: sequences of operations on modules and calls, against fresh ones."),
    ] = False,
) -> None:
    """Make random calls of every public function and check results, equal bits, and memory that must not change."""
    unused = {"--minutes": minutes, "--problems": problems, "--seed": seed, "--workers": workers, "--out": out}
    check_alone("--repeat", repeat is not None, unused | {"--call": calls})
    options = {"minutes": minutes, "problems": problems, "seed": seed, "backend": backend, "workers": workers}
    options |= {"other_gpu": other_gpu, "states": states}
    call("padless.verify.fuzz.run", "run_fuzz", out=out, repeat=repeat, calls=calls or None, **options)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def emulate(context: typer.Context) -> None:
    """Run a kernel's PTX on the CPU and look for races (padless emulate --help says more)."""
    command = load("padless.emulator.cli", "app")
    command(args=context.args, prog_name="padless emulate")
