"""Times launch options of the training quantizers on a GPU and checks each against the kernels that hold float32.

`python tools/tune_columns.py` prints one line for each variant and shape: microseconds, and the share of the rate of a
copy of as many bytes. Processes compile all variants first, so that the rest is short.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch

from padless.ops.grouped_gemm import group_offsets
from padless.quantization.triton import rows_columns, swiglu_backward, tiles, weight_both

SHAPES = ((8192, 8192), (32768, 7168), (8192, 2048))
WARMING_PROCESSES = 8
LAUNCHES = 10


class Variant(NamedTuple):
    """words: 16-bit values are held as loaded. registers: the most a thread may have."""

    call: str
    words: bool
    warps: int
    registers: int

    def __str__(self) -> str:
        held = "words" if self.words else "float32"
        return f"{self.call:16} {held:7} {self.warps:2} warps {self.registers:3} registers"


# The first of each call is what the others are compared with.
VARIANTS = [
    Variant(call, words, warps, registers)
    for call, of_words in (
        ("rows 1x128", ((8, 64), (8, 80), (8, 96), (16, 40), (16, 64), (4, 128))),
        ("rows 128x128", ((8, 64), (8, 80), (16, 40))),
        ("columns 1x128", ((8, 48), (8, 64), (8, 80), (16, 40), (16, 64), (4, 96))),
        ("weights", ((8, 48), (8, 64), (8, 80), (16, 40), (16, 64), (4, 96))),
    )
    for words, warps, registers in ((False, 8, 128), *((True, *o) for o in of_words))
] + [
    Variant("swiglu", False, warps, registers)
    for warps, registers in ((16, 128), (32, 64), (8, 255), (16, 96), (8, 168))
]


@contextmanager
def options_of(variant: Variant) -> Iterator[None]:
    """Every quantizer launched as the variant says."""
    with mock.patch.multiple(swiglu_backward, NUM_WARPS=variant.warps, MAX_REGISTERS=variant.registers):
        registers: dict[str, Any] = dict.fromkeys(("MAX_REGISTERS", "MAX_REGISTERS_OF_FLOAT32"), variant.registers)
        of_columns: dict[str, Any] = {
            "MAX_REGISTERS_OF_COLUMNS": variant.registers,
            "NUM_WARPS_OF_COLUMNS": variant.warps,
        }
        word_type = tiles.word_type if variant.words else lambda x: ""
        with (
            mock.patch.multiple(rows_columns, NUM_WARPS=variant.warps, **registers, **of_columns),
            mock.patch.multiple(weight_both, NUM_WARPS=variant.warps, **registers),
            mock.patch.object(tiles, "word_type", word_type),
        ):
            yield


def call_of(variant: Variant, rows: int, columns: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call on rows of 16 groups, or on one weight; its outputs are codes and scales."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)

    def values(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, device="cuda", dtype=torch.bfloat16)

    sizes = [rows // 16 + (37 if g % 2 else -37) for g in range(16)]
    offs = group_offsets(sizes).cuda()
    if variant.call == "weights":
        w = values(columns)
        return lambda: weight_both.weight_both(w)
    if variant.call == "swiglu":
        dh, z = values(columns // 2), values(columns)
        prob = torch.rand(rows, generator=generator, device="cuda")
        return lambda: swiglu_backward.swiglu_backward(dh, z, offs, prob, "concatenated", (1, 128), 128)
    x = values(columns)
    block = (128, 128) if variant.call == "rows 128x128" else (1, 128)
    with_rows = variant.call != "columns 1x128"
    return lambda: rows_columns.rows_columns(x, offs, block, 128, with_rows)


def bytes_of(variant: Variant, rows: int, columns: int) -> int:
    """Bytes that a call reads and writes, without scales."""
    elements = rows * columns
    if variant.call == "swiglu":
        return elements * 11 // 2
    return elements * (3 if variant.call == "columns 1x128" else 4)


def microseconds(function: Callable[[], object]) -> float:
    """The least of five replays of a graph of LAUNCHES calls, for each."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            function()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(events)) * 1000 / LAUNCHES


def copy_microseconds(num_bytes: int) -> float:
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source))


def warm(part: int) -> None:
    """Compile every WARMING_PROCESSES-th variant, into Triton's cache on the disk."""
    for variant in VARIANTS[part::WARMING_PROCESSES]:
        with options_of(variant):
            try:
                call_of(variant, 2048, 256)()
                torch.cuda.synchronize()
            except Exception as error:  # a variant that does not fit says so when it is timed
                print(f"{variant}: {type(error).__name__}", file=sys.stderr)


def time_shape(rows: int, columns: int) -> int:
    """Print the lines of a shape; how many variants had other bits."""
    wrong, last = 0, ""
    reference: tuple[torch.Tensor, ...] = ()
    copies: dict[int, float] = {}
    for variant in VARIANTS:
        if variant.call != last:
            reference, last = (), variant.call
        moved = bytes_of(variant, rows, columns)
        if moved not in copies:
            copies[moved] = copy_microseconds(moved)
        with options_of(variant):
            function = call_of(variant, rows, columns)
            try:
                found = function()
                time_of = microseconds(function)
            except Exception as error:
                print(f"{variant}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
        reference = reference or found
        same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, reference, strict=True))
        wrong += not same
        share = copies[moved] / time_of
        verdict = "" if same else "  OTHER BITS"
        print(f"({rows}, {columns}) {variant} {time_of:8.1f} us {share:5.0%}{verdict}", flush=True)
    torch.cuda.empty_cache()
    return wrong


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of what is defined: all of it, padding excepted."""
    return t.flatten().view(torch.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm is not None:
        warm(arguments.warm)
        return 0
    if not torch.cuda.is_available():
        print("tune_columns needs a GPU that CUDA sees; there is none")
        return 1
    start = time.monotonic()
    command = [sys.executable, __file__, "--warm"]
    running = [subprocess.Popen([*command, str(part)]) for part in range(WARMING_PROCESSES)]
    for process in running:
        process.wait()
    print(f"{len(VARIANTS)} variants compiled in {time.monotonic() - start:.0f} s", flush=True)
    wrong = sum(time_shape(*shape) for shape in SHAPES)
    print(f"{wrong} with other bits; {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
