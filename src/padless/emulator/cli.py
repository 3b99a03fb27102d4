"""`padless emulate`: run one entry of a PTX file from a small launch description."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from padless.emulator.emulator import ARITHMETICS, Emulator, LaunchResult
from padless.emulator.errors import EmulatorError, LaunchError
from padless.emulator.mutation import Survey, table
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.timing import CHIPS, Chip, chip_of, timed
from padless.emulator.timing.picture import draw
from padless.emulator.timing.report import lines_of
from padless.emulator.timing.trace import write_trace

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Run a kernel's PTX on the CPU and look for races. The launch description is JSON or TOML: grid, block, "
        "cluster, shared_bytes, programmatic, buffers (name -> dtype, shape, fill, save) and args (numbers, buffer "
        "names, {f32 = 1.5}, {tensor_map = {...}}, {hex = '...'}); docs/emulator.md has an example."
    ),
)
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
DATA_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
              "float64": 8, "bfloat16": 9}  # fmt: skip


@app.command()
def emulate(
    kernel: Annotated[Path, typer.Argument(help="PTX file.")],
    launch: Annotated[Path, typer.Option("--launch", help="Launch description, .json or .toml.")],
    entry: Annotated[
        str | None, typer.Option("--entry", help="Entry to run; the only one if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="First seed of the schedule.")] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="How many seeds to run, one after the other.")
    ] = 1,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Look for races and misuse.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Print every warp-instruction.")] = False,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="A kind of report to leave out.")
    ] = None,
    arithmetic: Annotated[
        str, typer.Option("--arithmetic", help=f"Of the tensor cores: {', '.join(ARITHMETICS)}.")
    ] = "truncate",
    mutate: Annotated[
        int | None,
        typer.Option(
            "--mutate",
            help="Run so many mutants, kernels with one synchronisation deleted or weakened, drawn with --seed; 0: all.",
        ),
    ] = None,
    time: Annotated[
        bool,
        typer.Option("--time", help="Print cycles by role and phase; computes no products, checks nothing."),
    ] = False,
    chip: Annotated[
        str | None,
        typer.Option("--chip", help=f"With --time: {', '.join(CHIPS)}; default by the PTX's target."),
    ] = None,
    time_trace: Annotated[
        Path | None, typer.Option("--time-trace", help="With --time: a JSON trace for Perfetto.")
    ] = None,
    time_picture: Annotated[
        Path | None, typer.Option("--time-picture", help="With --time: a picture; needs matplotlib.")
    ] = None,
) -> None:
    """Run the kernel and print what was found; exit code 1 if anything was."""
    description = read_description(launch)
    try:
        text = kernel.read_text()
    except OSError as error:
        raise LaunchError(f"{kernel}: {error.strerror}") from None
    emulator = Emulator(
        text,
        arithmetic=arithmetic,
        checks=check,
        trace=typer.echo if trace else None,
        name=str(kernel),
        ignore=ignore or (),
    )
    entries = emulator.module.entries()
    name = entry or description.get("entry") or (entries[0] if len(entries) == 1 else None)
    if name is None:
        raise LaunchError(f"--entry is needed, {kernel} has {', '.join(entries) or 'no entry'}")
    if time:
        emulator.machine = timed(named_chip(chip, emulator.module.target))
        result = launch_once(emulator, name, description, seed, launch.parent)
        for report in result.reports:
            typer.echo(str(report))
        typer.echo("\n".join(lines_of(result.timeline)))
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
        found += run_once(emulator, name, description, each, launch.parent)
    if found:
        raise typer.Exit(1)


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
    with typer.progressbar(
        mutants, label=f"{len(mutants)} of {len(survey.mutants)} mutants", file=sys.stderr
    ) as bar:
        verdicts = [survey.judge(mutant) for mutant in bar]
    typer.echo("\n".join(table(verdicts)))
    return sum(not verdict.killed_by for verdict in verdicts)


def read_description(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    try:
        found = tomllib.loads(raw.decode()) if path.suffix == ".toml" else json.loads(raw)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LaunchError(f"{path} is neither JSON nor TOML: {error}") from None
    if not isinstance(found, dict):
        raise LaunchError(f"{path} holds a {type(found).__name__}, a launch description is an object")
    return found


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


def run_once(emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path) -> int:
    """One launch on fresh buffers, and what it found; returns the number of reports."""
    result = launch_once(emulator, entry, description, seed, folder)
    for report in result.reports:
        typer.echo(str(report))
    s = result.statistics
    typer.echo(
        f"seed {seed}: {len(result.reports)} reports, {s.ctas} CTAs, {s.warp_instructions} warp-instructions "
        f"({s.warp_instructions_per_second:,.0f} a second), {s.async_operations} asynchronous operations, "
        f"{s.bank_conflicts} extra passes for bank conflicts in {s.shared_accesses} shared accesses"
    )
    return len(result.reports)


def launch_once(
    emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path
) -> LaunchResult:
    """One launch on fresh buffers, which are saved and printed as described."""
    result, arrays = launch_on_buffers(emulator, entry, description, seed, folder)
    for name, spec in description.get("buffers", {}).items():
        if "save" in spec:
            np.save(folder / spec["save"], arrays[name])
        if spec.get("print"):
            typer.echo(f"{name} = {np.array2string(arrays[name], threshold=64)}")
    return result


def launch_on_buffers(
    emulator: Emulator, entry: str, description: dict[str, Any], seed: int, folder: Path
) -> tuple[LaunchResult, dict[str, Any]]:
    """One launch, and its buffers as it left them."""
    device = emulator.with_memory(DeviceMemory())
    arrays = {name: make_buffer(name, spec, folder) for name, spec in description.get("buffers", {}).items()}
    addresses = {name: device.memory.register(array, name=name) for name, array in arrays.items()}
    programmatic = description.get("programmatic", False)
    if not isinstance(programmatic, bool):
        raise LaunchError(f"programmatic is {programmatic!r}, allowed are true and false")
    arguments = [make_argument(a, addresses, arrays) for a in description.get("args", [])]
    result = device.launch(
        entry,
        description.get("grid", 1),
        description.get("block", 128),
        arguments,
        cluster=description.get("cluster", 1),
        shared_bytes=description.get("shared_bytes", 0),
        seed=seed,
        programmatic=programmatic,
    )
    return result, arrays


def make_buffer(name: str, spec: dict[str, Any], folder: Path) -> np.ndarray[Any, Any]:
    """A buffer: `load` an .npy file, or `dtype`, `shape` and `fill` ("random", "nan", a number; default zeros)."""
    if "load" in spec:
        return np.ascontiguousarray(np.load(folder / spec["load"]))
    try:
        dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
    except (KeyError, TypeError) as error:
        raise LaunchError(f"buffer {name}: needs dtype and shape, or load ({error})") from None
    fill = spec.get("fill", 0)
    if fill == "random":
        rng = np.random.default_rng(spec.get("seed", 0))
        if dtype.kind == "f":
            return rng.standard_normal(shape).astype(dtype)
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    if fill == "index":
        return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    if fill == "nan" and dtype.kind != "f":
        raise LaunchError(f"buffer {name}: fill 'nan' needs a floating-point dtype, got {dtype}")
    return np.full(shape, np.nan if fill == "nan" else fill, dtype)


def make_argument(argument: Any, addresses: dict[str, int], arrays: dict[str, Any]) -> Any:
    if isinstance(argument, bool | int | float):
        return argument
    if isinstance(argument, str):
        if argument not in addresses:
            raise LaunchError(
                f"argument {argument!r} names no buffer; there are {', '.join(addresses) or 'none'}"
            )
        return addresses[argument]
    if isinstance(argument, dict) and len(argument) == 1:
        ((kind, value),) = argument.items()
        if kind == "hex":
            return bytes.fromhex(value)
        if kind == "tensor_map":
            return tensor_map(value, addresses, arrays)
        if kind in ("f32", "f64"):
            return np.dtype(f"float{kind[1:]}").type(value)
        if kind in ("s32", "u32", "s64", "u64"):
            return np.dtype(f"{'u' if kind[0] == 'u' else ''}int{kind[1:]}").type(value)
    raise LaunchError(
        f"argument {argument!r} is not a number, a buffer name, or one of hex, tensor_map, f32, u64, ..."
    )


def tensor_map(spec: dict[str, Any], addresses: dict[str, int], arrays: dict[str, Any]) -> bytes:
    """A tiled tensor map: buffer, box, swizzle; dims and strides (bytes) follow from the buffer's shape by default."""
    from padless.emulator.units import tensor_map as unit

    try:
        name, box = spec["buffer"], tuple(spec["box"])
        array = arrays[name]
    except KeyError as error:
        raise LaunchError(f"tensor_map: missing or unknown {error}") from None
    kind = spec.get("dtype", str(array.dtype))
    if kind not in DATA_TYPES:
        raise LaunchError(f"tensor_map: dtype is {kind!r}, allowed are {', '.join(DATA_TYPES)}")
    dims = tuple(spec.get("dims", array.shape[::-1]))
    strides = tuple(spec.get("strides", array.strides[::-1][1:]))
    swizzle = spec.get("swizzle", "none")
    if swizzle not in SWIZZLES:
        raise LaunchError(f"tensor_map: swizzle is {swizzle!r}, allowed are {', '.join(SWIZZLES)}")
    return unit.encode_tiled(DATA_TYPES[kind], addresses[name], dims, strides, box, swizzle=SWIZZLES[swizzle])


def main() -> None:
    """Entry point of `python -m padless.emulator.cli`."""
    try:
        app()
    except EmulatorError as error:
        typer.echo(f"padless emulate: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
