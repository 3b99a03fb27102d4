"""`padless info`: versions, devices, backends and the kernel cache, for a person or as JSON."""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from padless._version import __version__

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def collect() -> dict[str, Any]:
    """Everything `padless info` shows, of JSON types only."""
    from padless.kernels.cost_model import BUILT_IN, cost_table
    from padless.runtime.devices import backends
    from padless.testing import machine

    return {
        "padless": __version__,
        "python": platform.python_version(),
        "packages": machine.packages(),
        "nvrtc": _nvrtc(),
        "driver": _driver_version(),
        "devices": machine.devices(),
        "backends": {name: {"available": b.available, "reason": b.reason} for name, b in backends().items()},
        "tile_costs": {kernel: cost_table(kernel).source for kernel in BUILT_IN},  # what tiles are chosen by
        "cache": _cache(),
    }


def print_info(console: Console, *, as_json: bool = False) -> None:
    """Print collect() to console as tables or as one JSON object."""
    found = collect()
    if as_json:
        # Not console.print: JSON is for a program, so no colours and no wrapping.
        console.file.write(json.dumps(found, indent=2) + "\n")
        return
    versions = _table("Versions", "", "")
    versions.add_row("padless", found["padless"])
    versions.add_row("Python", found["python"])
    for name, version in found["packages"].items():
        versions.add_row(name, version or "not installed")
    versions.add_row("NVRTC", found["nvrtc"])
    versions.add_row("NVIDIA driver", found["driver"] or "none")

    devices = _table("Devices", "", "name", "capability", "SMs", "memory")
    for device in found["devices"]:
        cells = (str(device[name]) for name in ("index", "name", "capability", "multiprocessors"))
        devices.add_row(*cells, f"{device['memory_bytes'] / 2**30:.0f} GiB")
    if not found["devices"]:
        devices.add_row("-", "no CUDA GPU: the CPU is used", "-", "-", "-")

    backends = _table("Backends", "", "available", "")
    for name, backend in found["backends"].items():
        available = "[green]yes[/]" if backend["available"] else "[yellow]no[/]"
        backends.add_row(name, available, backend["reason"])

    tile_costs = _table("Tile costs", "", "")
    for kernel, source in found["tile_costs"].items():
        tile_costs.add_row(kernel, source)

    cache = found["cache"]
    for table in (versions, devices, backends, tile_costs):
        console.print(table, "")
    console.print(
        f"[bold]Kernel cache[/]: {cache['entries']} kernels, {cache['bytes'] / 1e6:.1f} MB in {cache['directory']}",
        soft_wrap=True,
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    table.show_header = any(headings)
    return table


def _nvrtc() -> str:
    """The compiler's own version, or why it cannot be loaded."""
    from padless.runtime.jit import nvrtc_version

    try:
        return nvrtc_version()
    except Exception as error:  # an absent or broken library raises whatever its loader likes
        return f"not available ({error})"


def _driver_version() -> str | None:
    """Such as "580.95.05". Read from /proc, because asking the driver would initialise it."""
    try:
        text = _DRIVER_VERSION.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def _cache() -> dict[str, Any]:
    """The directory of compiled kernels, how many it holds and their size. It may not exist yet."""
    from padless.runtime.disk_cache import cache_dir

    directory = cache_dir()
    sizes = dict[Path, int]()
    for path in directory.glob("*"):
        with suppress(OSError):  # what another process writes is moved
            if path.is_file():
                sizes[path] = path.stat().st_size
    return {
        "directory": str(directory),
        "entries": sum(path.suffix in (".cubin", ".ptx") for path in sizes),
        "bytes": sum(sizes.values()),
    }
