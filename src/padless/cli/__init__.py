"""The `padless` command. Every sub-command imports what it needs itself, so that --help answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import padless

app = typer.Typer(
    name="padless",
    help="Block-scaled grouped GEMM for Mixture-of-Experts, with no padding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Measure; prints a table, writes JSON lines and pictures.")
app.add_typer(bench, name="bench")

OutDir = Annotated[Path, typer.Option("--out", help="Folder for what is written.")]
Full = Annotated[
    bool, typer.Option("--full/--quick", help="The whole grid, or a subset in about two minutes.")
]
Peers = Annotated[
    Path | None,
    typer.Option("--peers", help="Folder of other libraries to compare with, if importable from there."),
]
DEFAULT_OUT = Path("padless-out")


def main() -> None:
    """Entry point. A ValueError is the user's to mend: one sentence and exit code 2, no traceback."""
    try:
        app()
    except ValueError as error:
        print(f"padless: {error}", file=sys.stderr)
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
    from padless.demo.run import run_demo

    run_demo(synthetic=synthetic, out=out)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    formats: Annotated[bool, typer.Option("--formats", help="Which formats run where, as Markdown.")] = False,
) -> None:
    """Print versions, devices, backends (and why one is missing), tables of tile costs and the kernel cache."""
    from rich.console import Console

    from padless.cli.environment import print_info
    from padless.cli.supported import supported_markdown

    if formats:
        print(supported_markdown(), end="")
    else:
        print_info(Console(), as_json=as_json)


@app.command()
def tune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, store nothing.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Remove what was stored; measure nothing.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each product.")] = 20,
) -> None:
    """Measure on this GPU what tiles cost, so that the choice of tile fits it."""
    _call("padless.tune.costs", "run_tune", dry_run=dry_run, reset=reset, repeats=repeats)


@app.command()
def verify(
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the record of the run.")] = None,
    sanitizer: Annotated[bool, typer.Option(help="Run compute-sanitizer where it is installed.")] = True,
    checks: Annotated[
        list[str] | None, typer.Option("--check", help="Only this check; can be repeated.")
    ] = None,
    against_emulator: Annotated[
        bool,
        typer.Option("--against-emulator", help="Compare random problems with the emulator, bit for bit."),
    ] = False,
) -> None:
    """Run every check that needs a GPU, compute-sanitizer included, and record the result."""
    options = {"sanitizer": sanitizer, "against_emulator": against_emulator, "checks": checks or None}
    _call("padless.verify.run", "run_verify", out=out, **options)


COMMANDS = "padless.bench.commands"
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="One of the other libraries, by name; may be repeated. Default: all."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", help="Seconds after which no new point is begun; the next run goes on."),
]

Repeats = Annotated[
    int | None, typer.Option(min=1, help="Timed calls of each contender at each point. Default: 10.")
]


def _bench_peers(
    name: str,
    peers: Path | None,
    only: list[str] | None,
    out: Path,
    time_limit: float | None,
    repeats: int | None,
    **grid: bool,
) -> None:
    """A benchmark against other libraries, with the options that all of these take."""
    options = {"peers": peers, "only": only, "out": out, "time_limit_s": time_limit, "repeats": repeats}
    _call(COMMANDS, name, **grid, **options)


@bench.command()
def paper(
    full: Full = False,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="72 points, every value equally often.")
    ] = False,
    peers: Peers = None,
    only: Only = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Repeats = None,
) -> None:
    """The paper's grid: against padding plus the same GEMM, time, memory saved and equality of valid rows."""
    _bench_peers("paper", peers, only, out, time_limit, repeats, full=full, balanced=balanced)


@bench.command()
def dense(
    full: Full = False,
    peers: Peers = None,
    only: Only = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Repeats = None,
) -> None:
    """One group: the dense product."""
    _bench_peers("dense", peers, only, out, time_limit, repeats, full=full)


@bench.command()
def decode(
    full: Full = False,
    peers: Peers = None,
    only: Only = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Repeats = None,
) -> None:
    """A few rows per group, as when generating token by token."""
    _bench_peers("decode", peers, only, out, time_limit, repeats, full=full)


@bench.command()
def chain(
    full: Full = False,
    peers: Peers = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed replays of each contender at each point. Default: 5.")
    ] = None,
) -> None:
    """Calls one after the other in a CUDA graph: what it is worth that kernels may overlap."""
    _bench_peers("chain", peers, None, out, time_limit, repeats, full=full)


@bench.command()
def formats(full: Full = False, out: OutDir = DEFAULT_OUT, time_limit: TimeLimit = None) -> None:
    """Every pair of formats against torch's bf16 product, at prefill and decode sizes."""
    _call(COMMANDS, "formats", full=full, out=out, time_limit_s=time_limit)


@bench.command()
def epilogue(full: Full = False, out: OutDir = DEFAULT_OUT, time_limit: TimeLimit = None) -> None:
    """The fused quantising epilogue, against the same GEMM alone and with separate kernels after it."""
    _call(COMMANDS, "epilogue", full=full, out=out, time_limit_s=time_limit)


@bench.command()
def wgrad(
    full: Full = False,
    peers: Peers = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Repeats = None,
) -> None:
    """Weight gradients along the tokens of ragged groups, against torch's bf16 product and DeepGEMM."""
    _bench_peers("wgrad", peers, None, out, time_limit, repeats, full=full)


@bench.command()
def layer(
    full: Full = False,
    peers: Peers = None,
    out: OutDir = DEFAULT_OUT,
    time_limit: TimeLimit = None,
    repeats: Repeats = None,
) -> None:
    """A whole Mixture-of-Experts layer against torch's bf16, and the passes around its products."""
    _bench_peers("layer", peers, None, out, time_limit, repeats, full=full)


@bench.command()
def blackwell(out: OutDir = DEFAULT_OUT, time_limit: TimeLimit = None) -> None:
    """For a B200: dense MXFP8 against torch, and the NVFP4 grouped GEMM competition by its timing rules."""
    _call(COMMANDS, "blackwell", out=out, time_limit_s=time_limit)


@bench.command()
def quantize(full: Full = False, out: OutDir = DEFAULT_OUT) -> None:
    """The quantizers and the padding kernel, against a device copy of the same bytes."""
    _call(COMMANDS, "quantize", full=full, out=out)


@bench.command()
def host() -> None:
    """What the host adds to a call."""
    _call(COMMANDS, "host")


@bench.command()
def units(out: OutDir = DEFAULT_OUT) -> None:
    """For a Hopper GPU: cycles of the tensor cores, the copy engine and both at once, for the emulator's clock."""
    _call("padless.bench.units", "units", out=out)


@bench.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files (.jsonl) of any benchmark.")],
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw the figure of the paper's grid or of formats there.")
    ] = None,
) -> None:
    """Tables and figure of earlier runs again; needs no GPU."""
    _call(COMMANDS, "report", files=files, figure=figure)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def emulate(context: typer.Context) -> None:
    """Run a kernel's PTX on the CPU and look for races (padless emulate --help says more)."""
    command = _load("padless.emulator.cli", "app")
    command(args=context.args, prog_name="padless emulate")


def _load(module: str, name: str) -> Any:
    """module.name, with a missing third-party package as a ValueError that says which."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this command needs {error.name}, which is not installed here") from None


def _call(module: str, name: str, **arguments: Any) -> None:
    """Call module.name; what it returns, if an integer, is the exit code."""
    function: Callable[..., Any] = _load(module, name)
    result = function(**arguments)
    if isinstance(result, int) and result:
        raise typer.Exit(result)
