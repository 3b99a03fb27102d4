"""`padless emulate`: run one entry of a PTX file from a small launch description."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import typer.core

from padless.emulator.annotation import annotation
from padless.emulator.emulator import ARITHMETICS, MOST_MEMORY, Emulator, LaunchResult
from padless.emulator.errors import LaunchError
from padless.emulator.launch_file import (
    LAUNCH_KEYS,
    buffer_bytes,
    check_keys,
    make_argument,
    make_buffer,
    part_of,
    read_description,
)
from padless.emulator.mutation import Survey, table
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.timing import CHIPS, Chip, chip_of, timed
from padless.emulator.timing.kernel import kernel_time
from padless.emulator.timing.picture import draw
from padless.emulator.timing.report import lines_of
from padless.emulator.timing.trace import write_trace
from padless.options import check_alone, check_file, check_picture

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Run a kernel's PTX on the CPU and look for races. The launch description is JSON or TOML: ptx, grid, block, "
        "cluster, shared_bytes, programmatic, buffers (name -> dtype, shape, fill, save) and args (numbers, buffer "
        "names, {f32 = 1.5}, {tensor_map = {...}}, {hex = '...'}); docs/emulator.md has an example."
    ),
)


class _Command(typer.core.TyperCommand):
    """What follows `--program FILE` is the program's, options too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        end = args.index("--program") + 2 if "--program" in args else len(args)
        ctx.obj = args[end:]
        return super().parse_args(ctx, args[:end])


@app.command(cls=_Command)
def emulate(
    context: typer.Context,
    kernel: Annotated[Path | None, typer.Argument(help="PTX file.")] = None,
    launch: Annotated[Path | None, typer.Option("--launch", help="Launch description, .json or .toml.")] = None,
    entry: Annotated[str | None, typer.Option("--entry", help="Entry to run; the only one if there is one.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="First seed of the schedule.")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds to run, one after the other.")] = 1,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Look for races and misuse.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Print every warp-instruction.")] = False,
    ignore: Annotated[list[str] | None, typer.Option("--ignore", help="A kind of report to leave out.")] = None,
    arithmetic: Annotated[
        str, typer.Option("--arithmetic", help=f"Of the tensor cores: {', '.join(ARITHMETICS)}.")
    ] = "truncate",
    strict: Annotated[
        bool, typer.Option("--strict", help="Count what the ISA forbids and today's chips are known to let pass.")
    ] = False,
    max_memory: Annotated[
        int, typer.Option("--max-memory", help="MiB that a launch may take, its buffers included.")
    ] = MOST_MEMORY >> 20,
    mutate: Annotated[
        int | None,
        typer.Option(
            "--mutate",
            help="Run so many mutants, kernels with one synchronisation deleted or weakened, drawn with --seed; 0: all.",
        ),
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print reports as GitHub's annotations of the lines of source, too.")
    ] = False,
    time: Annotated[
        bool, typer.Option("--time", help="Print cycles by role and phase; computes no products, checks nothing.")
    ] = False,
    chip: Annotated[
        str | None,
        typer.Option("--chip", help=f"With --time or --program: {', '.join(CHIPS)}; default by the PTX, H200."),
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option("--sms", min=1, help="With --program: multiprocessors that the device has. Default: 4."),
    ] = None,
    reports: Annotated[
        int | None,
        typer.Option("--reports", min=0, help="With --program: how many of a kind are printed in full. Default: 3."),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program", help="Instead: run a Python program and its kernels; the rest of the line is its own."
        ),
    ] = None,
    time_trace: Annotated[
        Path | None, typer.Option("--time-trace", help="With --time: a JSON trace for Perfetto.")
    ] = None,
    time_picture: Annotated[
        Path | None, typer.Option("--time-picture", help="With --time: a picture; needs matplotlib.")
    ] = None,
) -> None:
    """Run the kernel and print what was found; exit code 1 if anything was."""
    options: dict[str, Any] = {"arithmetic": arithmetic, "checks": check, "ignore": ignore or (), "strict": strict,
                               "max_memory": max_memory << 20}  # fmt: skip
    check_options(
        {"a PTX file": kernel, "--launch": launch, "--entry": entry, "--trace": trace, "--mutate": mutate},
        program=program, of_programs={"--sms": sms, "--reports": reports}, time=time, chip=chip, seeds=seeds,
        time_trace=time_trace, time_picture=time_picture,
    )  # fmt: skip
    if program is not None:
        from padless.emulator.program.run import run_program

        options |= {"chip": chip or "H200", "seed": seed, "github": github}
        options |= {"num_sms": 4 if sms is None else sms, "reports": 3 if reports is None else reports}
        raise typer.Exit(run_program(program, context.obj, **options))
    if launch is None:
        raise LaunchError("a PTX file and --launch FILE are needed, or --program FILE")
    description = read_description(launch)
    kernel = kernel or ptx_of(description, launch)
    try:
        text = kernel.read_text()
    except OSError as error:
        raise LaunchError(f"{kernel}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{kernel} is no text: PTX is needed, not a cubin") from None
    emulator = Emulator(text, trace=typer.echo if trace else None, name=str(kernel), **options)
    entries = emulator.module.entries()
    name = entry or description.get("entry") or (entries[0] if len(entries) == 1 else None)
    if name is None:
        raise LaunchError(f"--entry is needed, {kernel} has {', '.join(entries) or 'no entry'}")
    if time:
        on_chip = named_chip(chip, emulator.module.target)
        emulator.machine = timed(on_chip)
        device, arguments, options, arrays = arranged(emulator, description, launch.parent)
        whole = kernel_time(device, name, arguments=arguments, chip=on_chip, **options)
        result = device.launch(name, args=arguments, seed=seed, **options)
        hand_out(description, arrays, launch.parent)
        for report in result.reports:
            typer.echo(str(report))
        typer.echo("\n".join([*lines_of(result.timeline), str(whole)]))
        if time_trace is not None:
            write_trace(result.timeline, time_trace)
        if time_picture is not None:
            draw(result.timeline, time_picture)
        raise typer.Exit(1 if result.reports else 0)
    if mutate is not None:
        survivors = run_mutants(emulator, name, description, range(seed, seed + seeds), mutate, launch.parent)
        raise typer.Exit(1 if survivors else 0)
    found = 0
    for each in range(seed, seed + seeds):
        found += run_once(emulator, name, description, each, launch.parent, github)
    if found:
        raise typer.Exit(1)


def check_options(
    of_launches: dict[str, object],
    *,
    program: Path | None,
    of_programs: dict[str, object],
    time: bool,
    chip: str | None,
    seeds: int,
    time_trace: Path | None,
    time_picture: Path | None,
) -> None:
    """Raises ValueError for options that exclude each other or would be of no use, and files that cannot be written.

    of_launches, of_programs: values of those that --program does not read, and of those that it alone does, by name.
    """
    more_seeds = seeds if seeds > 1 else None
    check_alone("--program", program is not None, of_launches | {"--seeds": more_seeds, "--time": time})
    check_alone("--time", time, {"--mutate": of_launches["--mutate"], "--seeds": more_seeds})
    for name, file, check in (
        ("--time-trace", time_trace, check_file), ("--time-picture", time_picture, check_picture)
    ):  # fmt: skip
        if file is not None:
            if not time:
                raise LaunchError(f"{name} is of a timed run; add --time")
            check(name, file)
    if time_picture is not None and find_spec("matplotlib") is None:
        raise LaunchError("--time-picture needs matplotlib, which is not installed; pip install matplotlib")
    if chip is not None and not time and program is None:
        raise LaunchError("--chip is of a timed run or of a program; add --time or --program FILE")
    for name, value in of_programs.items():
        if value is not None and program is None:
            raise LaunchError(f"{name} is of a program; add --program FILE")


def ptx_of(description: dict[str, Any], launch: Path) -> Path:
    """The PTX file that a launch description names, next to it. LaunchError where it names none."""
    name = description.get("ptx")
    if not isinstance(name, str):
        raise LaunchError(f'a PTX file is needed, before --launch or as ptx = "kernel.ptx" in {launch}')
    return launch.parent / name


def run_mutants(
    emulator: Emulator, entry: str, description: dict[str, Any], seeds: range, count: int, folder: Path
) -> int:
    """Judge mutants of the kernel and print the table; returns the number of survivors."""
    if count < 0 or not emulator.checks:
        raise LaunchError("--mutate takes a number of mutants, 0 for all of them, and needs the checks")

    def run(emulator: Emulator, seed: int) -> tuple[LaunchResult, dict[str, Any]]:
        return launch_on_buffers(emulator, entry, description, seed, folder)

    survey = Survey(emulator, entry, run, seeds)
    mutants = survey.sample(count, seeds.start)
    with typer.progressbar(mutants, label=f"{len(mutants)} of {len(survey.mutants)} mutants", file=sys.stderr) as bar:
        verdicts = [survey.judge(mutant) for mutant in bar]
    typer.echo("\n".join(table(verdicts)))
    return sum(not verdict.killed_by for verdict in verdicts)


def named_chip(name: str | None, target: str) -> Chip:
    """The chip of that name, or the one that PTX for ``target`` runs on. LaunchError where there is none."""
    if name is None:
        try:
            return chip_of(target)
        except ValueError:
            raise LaunchError(
                f"the PTX is for {target}; --chip has to say which of {', '.join(CHIPS)} runs it"
            ) from None
    if name not in CHIPS:
        raise LaunchError(f"--chip is {name!r}, allowed are {', '.join(CHIPS)}")
    return CHIPS[name]


def run_once(
    emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path, github: bool = False
) -> int:
    """One launch on fresh buffers, and what it found; returns the number of reports that are not tolerated."""
    result = launch_once(emulator, entry, description, seed, folder)
    for report in result.reports:
        typer.echo(str(report))
        if github:
            typer.echo(annotation(report, emulator.module.name))
    s = result.statistics
    typer.echo(
        f"seed {seed}: {len(result.reports)} reports, {s.ctas} CTAs, {s.warp_instructions} warp-instructions "
        f"({s.warp_instructions_per_second:,.0f} a second), {s.async_operations} asynchronous operations, "
        f"{s.bank_conflicts} extra passes for bank conflicts in {s.shared_accesses} shared accesses"
    )
    return len(result.errors)


def launch_once(emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path) -> LaunchResult:
    """One launch on fresh buffers, which are saved and printed as described."""
    result, arrays = launch_on_buffers(emulator, entry, description, seed, folder)
    hand_out(description, arrays, folder)
    return result


def saved_file(spec: dict[str, Any], folder: Path) -> Path:
    """Where a buffer is saved: numpy ends a name with .npy."""
    return folder / f"{str(spec['save']).removesuffix('.npy')}.npy"


def hand_out(description: dict[str, Any], arrays: dict[str, Any], folder: Path) -> None:
    """Saves and prints the buffers as described."""
    for name, spec in description.get("buffers", {}).items():
        if "save" in spec:
            file = saved_file(spec, folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, arrays[name])
        if spec.get("print"):
            typer.echo(f"{name} = {np.array2string(arrays[name], threshold=64)}")


def launch_on_buffers(
    emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path
) -> tuple[LaunchResult, dict[str, Any]]:
    """One launch, and its buffers as it left them."""
    device, arguments, options, arrays = arranged(emulator, description, folder)
    result = device.launch(entry, args=arguments, seed=seed, **options)
    return result, arrays


def arranged(
    emulator: Emulator, description: dict[str, Any], folder: Path
) -> tuple[Emulator, list[Any], dict[str, Any], dict[str, Any]]:
    """The device with fresh buffers as described, arguments, grid, block and the like, and the buffers."""
    check_keys("the launch description", description, LAUNCH_KEYS)
    device = emulator.with_memory(DeviceMemory())
    buffers = part_of(description, "buffers", dict)
    sizes = [buffer_bytes(name, spec) for name, spec in buffers.items()]
    device.check_memory(sum(sizes), "the buffers")
    for name, spec in buffers.items():
        if "save" in spec:
            check_file(f"save of buffer {name}", saved_file(spec, folder))
    arrays = {name: make_buffer(name, spec, folder) for name, spec in buffers.items()}
    addresses = {name: device.memory.register(array, name=name) for name, array in arrays.items()}
    programmatic = description.get("programmatic", False)
    if not isinstance(programmatic, bool):
        raise LaunchError(f"programmatic is {programmatic!r}, allowed are true and false")
    arguments = [make_argument(a, addresses, arrays) for a in part_of(description, "args", list)]
    options = {"grid": description.get("grid", 1), "block": description.get("block", 128),
               "cluster": description.get("cluster", 1), "shared_bytes": description.get("shared_bytes", 0),
               "programmatic": programmatic}  # fmt: skip
    return device, arguments, options, arrays


def main(name: str) -> None:
    """The command under this name. What cannot be done is one sentence and exit code 2."""
    try:
        app(prog_name=name)
    except (ValueError, OSError) as error:
        typer.echo(f"{name}: {error}", err=True)
        sys.exit(2)
