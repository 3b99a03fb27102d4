"""Runs whole CUDA programs, host code and all, with their kernels in the emulator: what nvcc made of somebody else's
source, unmodified, judged by the program's own check.

    nvcc -gencode arch=compute_90a,code=compute_90a -shared -Xcompiler -fPIC -cudart=none --keep --keep-dir DIR ... \
        program.cu -o DIR/program.so
    python tests/foreign_programs.py DIR [--seed N] [arguments of the program]

DIR holds one .so and the .ptx of the same compilation. Exit code: the program's, or 3 if the emulator found something.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from padless.emulator import Emulator
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.units import tensor_map

SOURCE = Path(__file__).with_name("cuda_runtime.c")


def runtime(cuda: Path) -> ctypes.CDLL:
    """The stand-in for libcudart, compiled now, its symbols visible to programs loaded later."""
    target = Path(tempfile.mkdtemp()) / "libruntime.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{cuda / 'include'}", str(SOURCE), "-o", str(target)], check=True
    )
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


class Device:
    """The callbacks of one program."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        arithmetic: str,
        checks: bool,
        num_sms: int,
        most_launches: int,
        unchecked: str = "",
    ) -> None:
        (ptx,) = (p for p in folder.glob("*.ptx"))
        self.memory = DeviceMemory()
        self.emulator = Emulator(
            ptx.read_text(), seed=seed, arithmetic=arithmetic, checks=checks, memory=self.memory, name=ptx.name
        )
        self.major = int(self.emulator.module.target.removeprefix("sm_").rstrip("af")) // 10
        self.num_sms, self.checks, self.unchecked = num_sms, checks, unchecked
        self.reports: list[Any] = []
        self.failures: list[BaseException] = []
        self.instructions, self.seconds = 0, 0.0
        self.most_launches, self.launches = most_launches, Counter[str]()

    def launch(self, name: bytes, *rest: Any) -> int:
        *numbers, shared_bytes, arguments = rest
        grid, block, cluster = numbers[:3], numbers[3:6], numbers[6:9]
        entry = name.decode()
        self.launches[entry] += 1
        if self.launches[entry] > self.most_launches:  # a loop that measures time
            return 0
        try:
            program = self.emulator.program(entry)
            values = []
            for index, parameter in enumerate(program.function.parameters):
                values.append(ctypes.string_at(arguments[index], parameter.size))
            self.emulator.checks = self.checks and not (self.unchecked and re.search(self.unchecked, entry))
            result = self.emulator.launch(
                entry, grid, block, values, cluster=cluster if cluster[0] else (1, 1, 1), shared_bytes=shared_bytes
            )
        except BaseException as error:
            self.failures.append(error)
            print(f"launch of {entry[:100]} failed: {error}", file=sys.stderr)
            return 1
        statistics = result.statistics
        self.instructions += statistics.warp_instructions
        self.seconds += statistics.seconds
        known = {report.kind for report in self.reports}
        self.reports += result.reports
        for report in result.reports:  # now: the program may end the process
            if report.kind not in known:
                known.add(report.kind)
                print(report, file=sys.stderr, flush=True)
        print(
            f"launch {entry[:90]} grid {grid} block {block} cluster {cluster}: {statistics.warp_instructions:,} "
            f"warp-instructions, {statistics.seconds:.2f} s, {len(result.reports)} reports",
            file=sys.stderr,
        )
        return 0

    def encode(self, where: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        dims, strides, box, steps, interleave, swizzle, promotion, fill = rest
        try:
            raw = tensor_map.encode_tiled(
                kind, address or 0, dims[:rank], strides[: rank - 1], box[:rank], steps[:rank], interleave=interleave,
                swizzle=swizzle, l2_promotion=promotion, oob_fill=fill,
            )  # fmt: skip
        except ValueError as error:
            print(f"cuTensorMapEncodeTiled: {error}", file=sys.stderr)
            return 1
        ctypes.memmove(where, raw, len(raw))
        return 0

    def allocate(self, address: int, size: int) -> None:
        if size:
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self.memory.register(array, address=address)
        else:
            at = self.memory.starts.index(address)
            del self.memory.starts[at], self.memory.allocations[at]

    def callbacks(self) -> tuple[Any, ...]:
        u64 = ctypes.POINTER(ctypes.c_uint64)
        u32 = ctypes.POINTER(ctypes.c_uint32)
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, *[ctypes.c_uint] * 9, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
        )
        encode = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, u64, u64, u32, u32,
            *[ctypes.c_int] * 4,
        )  # fmt: skip
        memory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
        return launch(self.launch), encode(self.encode), memory(self.allocate)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sms", type=int, default=4)
    parser.add_argument("--launches", type=int, default=1 << 30, help="run at most so many launches of one kernel")
    parser.add_argument("--arithmetic", default="truncate")
    parser.add_argument("--unchecked", default="", help="regular expression of kernels to run without checks")
    parser.add_argument("--no-check", action="store_true")
    options, rest = parser.parse_known_args()
    device = Device(
        options.folder, seed=options.seed, arithmetic=options.arithmetic, checks=not options.no_check,
        num_sms=options.sms, most_launches=options.launches, unchecked=options.unchecked,
    )  # fmt: skip
    library = runtime(options.cuda)
    keep = device.callbacks()
    library.padless_callbacks(*keep, device.major, device.num_sms)
    (path,) = options.folder.glob("*.so")
    program = ctypes.CDLL(str(path.resolve()))
    argv = [str(path).encode(), *(a.encode() for a in rest)]
    started = time.perf_counter()
    code = program.main(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None))
    ctypes.CDLL(None).fflush(None)
    kinds = Counter(report.kind for report in device.reports)
    print(
        f"exit code {code}; {device.instructions:,} warp-instructions in {device.seconds:.1f} s "
        f"({time.perf_counter() - started:.1f} s in all); reports: {dict(kinds) or 'none'}",
        file=sys.stderr,
    )
    return code or (3 if kinds else 0) or (4 if device.failures else 0)


if __name__ == "__main__":
    sys.exit(main())
