"""Host side common to all kernels: a loaded kernel for a configuration, and its tile counters."""

from __future__ import annotations

from dataclasses import Field
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

from padless.formats import ceil_div
from padless.kernels.remembered import Prepared as Prepared
from padless.runtime.driver import ByAddress, Driver
from padless.runtime.jit import CompiledKernel, CompileError, compile_kernel
from padless.runtime.locks import ProcessLock


class KernelConfig(Protocol):
    """A frozen dataclass that describes one compiled kernel."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __hash__(self) -> int: ...

    def prelude(self) -> str:
        """The constants that the kernel source is compiled behind."""
        ...


# What a caller may choose a kernel by: a configuration, or the class of one, which leaves the tile to the kernel.
KernelChoice = KernelConfig | type[KernelConfig]


def tile_of(choice: KernelChoice | None) -> KernelConfig | None:
    """The configuration that a caller gave, None where the kernel is to pick its own."""
    return None if isinstance(choice, type) else choice


@lru_cache(maxsize=1024)
def load_kernel(driver: Driver, source: str, config: KernelConfig, device: int) -> tuple[CompiledKernel, Any]:
    """The kernel of ``kernels/<source>`` for ``config``, compiled, and its function on ``device``.

    Raises ValueError when the configuration does not fit in shared memory.
    """
    try:
        kernel = compile_kernel(source, config.prelude(), driver.arch, driver.kind)
    except CompileError as error:
        if "does not fit in shared memory" not in str(error):
            raise
        raise ValueError(
            f"config does not fit in shared memory: {config}; lower num_stages (0 takes as many as fit) or the tile"
        ) from None
    return kernel, driver.load(kernel, device)


def most_tiles(m: int, n: int, num_groups: int, tile_m: int, tile_n: int) -> int:
    """Tiles that ``m`` rows can need at most, however they are split into groups: each group may end inside one, and a
    tile has a row."""
    return min(m, ceil_div(m, tile_m) + num_groups) * ceil_div(n, tile_n)


def persistent_grid(num_sms: int, most_tiles: int, cluster: int = 1) -> int:
    """CTAs of a kernel whose clusters take tile after tile: one for each multiprocessor, but no more than tiles.

    A tile costs far more than finding the next one. 0 where the device is too small for one cluster.
    """
    return min(num_sms // cluster, most_tiles) * cluster


_NUM_COUNTERS = 1 << 15  # the same number as in kernels/device/tile_queue.cuh
_COUNTERS: dict[tuple[KernelConfig, int], dict[int, int]] = {}
_COUNTERS_GUARD = ProcessLock()


def tile_counter(config: KernelConfig, device: int, out_address: int) -> ByAddress:
    """The kernel's tile counter for launches that write to ``out_address``, or -1 when all are taken.

    Launches that run at the same time need different counters. Those that write to one address cannot run at the same
    time (the caller would lose one of the results), so the address decides. Once taken a counter is never given to
    another address, since a CUDA graph may replay an old launch at any time.
    """
    with _COUNTERS_GUARD.lock:
        taken = _COUNTERS.setdefault((config, device), {})
    return ByAddress(_counter(taken, out_address), out_address, partial(_counter, taken))


def _counter(taken: dict[int, int], out_address: int) -> int:
    known = taken.get(out_address)
    if known is not None:
        return known
    with _COUNTERS_GUARD.lock:
        if out_address not in taken and len(taken) == _NUM_COUNTERS:
            return -1
        return taken.setdefault(out_address, len(taken))
