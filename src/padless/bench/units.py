"""Rates of a Hopper multiprocessor's units, in cycles, for the emulator's clock.

Small kernels (unit_probe.cu) time themselves with clock64, so the GPU's clock frequency is not in the numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from padless.runtime import tensor_map
from padless.runtime.architecture import HOPPER
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.jit import compile_kernel

KERNEL = "unit_probe/unit_probe.cu"
OUT_WORDS, OUT_LOADS, OUT_STAMPS, SLOTS = 256, 2, 4, 5  # as in the kernel
RECORD = "units.jsonl"


@dataclass(frozen=True)
class Probe:
    """One run. name: of what it measures. block_n, warpgroups, products, a_in_registers, coupled, stamps: constants of
    the kernel; batches, loads, in_flight, box_rows, ctas: of the launch. own_rows: whether every CTA reads rows
    of its own; streams: of how many places they begin to read, 0: one, or their own. buffer_rows: rows of 128 bytes that
    are read over and over."""

    name: str
    block_n: int = 128
    warpgroups: int = 1
    products: int = 4
    a_in_registers: bool = False
    coupled: bool = False
    stamps: bool = False
    batches: int = 0
    loads: int = 0
    in_flight: int = 1
    box_rows: int = 128
    ctas: int = 1
    own_rows: bool = False
    buffer_rows: int = 8192
    streams: int = 0

    def prelude(self) -> str:
        """The constants that the kernel is compiled behind."""
        return (
            f"constexpr int BLOCK_N = {self.block_n}, WARPGROUPS = {self.warpgroups}, PRODUCTS = {self.products};\n"
            f"constexpr bool COUPLED = {str(self.coupled).lower()}, STAMPS = {str(self.stamps).lower()};\n"
            f"#define A_IN_REGISTERS {int(self.a_in_registers)}\n"
        )


def probes(num_sms: int) -> Iterator[Probe]:
    """All runs of `padless bench units`. Two lengths of everything: their difference is free of start and end."""
    for n in (64, 128, 192, 256):
        for warpgroups in (1, 2):
            for products in (4, 16):
                yield Probe("wgmma", n, warpgroups, products, batches=32)
    for products in (4, 16):
        yield Probe("wgmma", 64, 1, products, a_in_registers=True, batches=32)
    for rows in (8, 16, 32, 64, 128, 256):
        for in_flight in (1, 2, 3, 5):
            for loads in (48, 144):
                yield Probe("load", loads=loads, in_flight=in_flight, box_rows=rows)
    for ctas in sorted({1, 2, 8, 33, 66, num_sms}):
        for own in (False, True):
            for loads in (96, 288):
                yield Probe("feed", loads=loads, in_flight=5, ctas=ctas, own_rows=own, buffer_rows=num_sms * 1024)
    for loads in (96, 288):  # 1.1 GB: from memory
        yield Probe("memory", loads=loads, in_flight=5, ctas=num_sms, own_rows=True, buffer_rows=num_sms * 65536)
    for loads in (0, 256):
        for batches in (32, 96):
            yield Probe("overlap", 256, 1, 16, batches=batches, loads=loads, in_flight=5)
    for stages in (2, 3, 4, 5):
        for warpgroups, n in ((1, 128), (2, 64), (2, 128)):
            rows = 64 * warpgroups + n
            for batches in (24, 72):
                yield Probe(
                    "ring", n, warpgroups, 4, coupled=True, batches=batches, loads=batches, in_flight=stages,
                    box_rows=rows, ctas=1,
                )  # fmt: skip
            yield Probe(
                "stamped ring", n, warpgroups, 4, coupled=True, stamps=True, batches=24, loads=24, in_flight=stages,
                box_rows=rows, ctas=1,
            )  # fmt: skip


def run_probe(driver: Driver, probe: Probe, device: torch.device, buffers: dict[int, torch.Tensor]) -> dict[str, Any]:
    """One run: the probe's fields, cycles of products and of loads (the slowest CTA's, 0 where there are none), and the
    stamps of a ring. The second of three launches on a GPU, whose first brings code and data."""
    kernel = compile_kernel(KERNEL, probe.prelude(), driver.arch, driver.kind)
    function = driver.load(kernel, device.index or 0)
    if probe.buffer_rows not in buffers:
        generator = torch.Generator(device).manual_seed(0)
        size = (probe.buffer_rows, 128)
        codes = torch.randint(0x28, 0x40, size, generator=generator, device=device, dtype=torch.uint8)
        buffers[probe.buffer_rows] = codes
    source = buffers[probe.buffer_rows]
    out = torch.zeros((probe.ctas, OUT_WORDS), dtype=torch.int64, device=device)
    arguments: list[Argument] = [driver.encode(tensor_map.operand(source, probe.box_rows)), (out.data_ptr(), 8)]
    streams = probe.streams or (probe.ctas if probe.own_rows else 0)
    cta_rows = probe.buffer_rows // streams // 256 * 256 if streams else 0
    values = (probe.batches, probe.loads, probe.in_flight, probe.box_rows, probe.buffer_rows, cta_rows)
    arguments += [(value, 4) for value in values]
    shape = LaunchShape(probe.ctas, kernel.num_threads, 1)
    launch = driver.prepare(function, kernel, shape, arguments, [source, out])
    runs = []
    for _ in range(3 if device.type == "cuda" else 1):
        launch(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        runs.append(out.cpu().clone())
    words = runs[len(runs) // 2]
    record: dict[str, Any] = {"kind": "unit", **asdict(probe)}
    record["products_cycles"] = int(words[:, : probe.warpgroups].max())
    record["loads_cycles"] = int(words[:, OUT_LOADS].max())
    record["loads_cycles_median"] = statistics.median(words[:, OUT_LOADS].tolist())
    if probe.stamps:
        stamps = words[0, OUT_STAMPS : OUT_STAMPS + 2 * probe.batches].view(-1, 2)
        record["full"], record["done"] = stamps[:, 0].tolist(), stamps[:, 1].tolist()
    return record


def units(out: Path) -> int:
    """`padless bench units`: run all probes on the current GPU and write the record. Returns the exit code."""
    import json

    from padless.runtime.driver import cuda_driver
    from padless.testing import machine

    machine.require_gpu("padless bench units")
    driver, device = cuda_driver(), torch.device("cuda", torch.cuda.current_device())
    if driver.arch != HOPPER.name:
        raise ValueError(f"bench units measures Hopper's units, and this GPU is {driver.arch}")
    out.mkdir(parents=True, exist_ok=True)
    buffers: dict[int, torch.Tensor] = {}
    with (out / RECORD).open("w") as file:
        file.write(json.dumps({"kind": "session", "what": "units", "machine": machine.describe()}) + "\n")
        for probe in probes(driver.num_sms(device.index or 0)):
            record = run_probe(driver, probe, device, buffers)
            file.write(json.dumps(record) + "\n")
            print(
                f"{probe.name:8s} n {probe.block_n:3d} x{probe.warpgroups} {probe.products:2d} products, "
                f"{probe.box_rows:3d} rows, {probe.in_flight} in flight, {probe.ctas:3d} CTAs: products "
                f"{record['products_cycles']:8d}, loads {record['loads_cycles']:8d}"
            )
    print(f"written to {out / RECORD}")
    return 0
