"""A whole launch on the clock. A sceptic would ask: is memory as it was, does time follow the bytes and the rounds of
CTAs by the chip's rates, and is a launch that a sample says nothing about refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from padless.emulator import Emulator
from padless.emulator.cli import app
from padless.emulator.timing import B200, H200, Chip, timed
from padless.emulator.timing.kernel import KernelTime, kernel_time, live_registers, resident
from padless.emulator.timing.report import caveats
from support.emulator_kernels import HEADER

COPY = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y, .param .u32 step) .reqntid 256 {
.reg .b64 %rd<9>; .reg .b32 %r<4>; .reg .f32 %f<16>;
ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r3, [step];
mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 4; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, %r3, %r1;
cvt.u64.u32 %rd3, %r1; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
LOADS
STORES
ret; }"""
VALUES = ["{" + ", ".join(f"%f{4 * i + j}" for j in range(4)) + "}" for i in range(4)]
COPY = COPY.replace("LOADS", "\n".join(f"ld.global.v4.f32 {v}, [%rd1+{4096 * i}];" for i, v in enumerate(VALUES)))
COPY = COPY.replace("STORES", "\n".join(f"st.global.v4.f32 [%rd2+{4096 * i}], {v};" for i, v in enumerate(VALUES)))
CTA = 4 * 4096  # bytes that a CTA copies


def copy(chip: Chip, ctas: int, step: int = CTA) -> KernelTime:
    size = (ctas - 1) * step + CTA
    x, y = np.zeros(size, np.uint8), np.zeros(size, np.uint8)  # pages that nothing touches take no memory
    x[:CTA], y[:CTA] = np.random.default_rng(0).integers(0, 255, (2, CTA))
    emulator = Emulator(COPY.replace("sm_90a", chip.arch))
    arguments = [emulator.memory.register(x), emulator.memory.register(y), step]
    kept = y[:CTA].copy()
    found = kernel_time(emulator, "copy", ctas, 256, arguments, chip)
    assert np.array_equal(y[:CTA], kept)
    assert not np.array_equal(y[:CTA], x[:CTA])
    return found


@pytest.mark.parametrize("chip", [H200, B200], ids=lambda chip: chip.name)
def test_a_large_copy_takes_its_bytes_at_the_rate_of_memory(chip: Chip) -> None:
    found = copy(chip, 4096)
    memory = 4096 * CTA * (1 / chip["memory_gb_per_s"] + 1 / chip["memory_write_gb_per_s"])
    assert found.known
    assert found.pace == "memory"
    queue = found.cycles / chip.clocks_ghz[1]  # beside memory: the two join by the chip's exponent
    joined = (memory ** chip["memory_overlap"] + queue ** chip["memory_overlap"]) ** (1 / chip["memory_overlap"])
    assert found.low_ns == pytest.approx(chip["launch_ns"] + joined)
    assert memory < joined < 1.19 * memory
    assert found.memory_bytes == pytest.approx(2 * 4096 * CTA)


def test_a_small_copy_takes_a_launch() -> None:
    found = copy(H200, 16)
    assert found.pace == "launch"
    assert H200["launch_ns"] < found.low_ns < 1.15 * H200["launch_ns"]


def test_bytes_that_are_loaded_again_beyond_l2_have_no_time() -> None:
    found = copy(H200, 56_000, step=1024)
    assert not found.known
    assert found.high_ns > 1.25 * found.low_ns
    assert "cannot tell, between" in str(found)
    assert copy(H200, 14_000, step=1024).known  # what fits in L2 is loaded again from there


LOOP = HEADER.replace("sm_100a", "sm_90a") + """.visible .entry k(.param .u64 x, .param .u32 n) .reqntid 1024 {
.reg .b32 %r<4>; .reg .f32 %f<4>; .reg .pred %p; .reg .b64 %rd;
ld.param.u32 %r1, [n]; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000;
L: fma.rn.f32 %f2, %f2, %f1, %f1; sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra L;
ld.param.u64 %rd, [x]; st.global.f32 [%rd], %f2; ret; }"""  # fmt: skip


def test_rounds_of_ctas_follow_each_other() -> None:
    """2,048 threads a multiprocessor: two of these CTAs, whose issue slots add up."""
    x, times = np.zeros(64, np.float32), {}
    for ctas in (132, 264, 265, 528, 5280):
        emulator = Emulator(LOOP)
        arguments = [emulator.memory.register(x), 100]
        times[ctas] = kernel_time(emulator, "k", ctas, 1024, arguments, H200)
    assert [found.together for found in times.values()] == [1, 2, 2, 2, 2]
    cycles = {ctas: found.cycles for ctas, found in times.items()}
    slots = 100 * 4 * 8 * 0.75  # of a quarter of the multiprocessor: 8 warps, all but a part of their instructions
    assert slots < cycles[132] < 1.6 * slots
    assert cycles[264] > 1.5 * cycles[132]
    assert cycles[265] == cycles[528] == 2 * cycles[264]
    assert cycles[5280] == 20 * cycles[264]


SPIN = HEADER + """.visible .entry k(.param .u64 flag) {
.reg .b64 %rd; .reg .b32 %r<3>; .reg .pred %p;
ld.param.u64 %rd, [flag]; mov.u32 %r1, %ctaid.x; setp.ne.u32 %p, %r1, 0; @%p bra WAIT;
st.release.gpu.global.u32 [%rd], 1; ret;
WAIT: ld.acquire.gpu.global.u32 %r2, [%rd]; setp.eq.u32 %p, %r2, 0; @%p bra WAIT; ret; }"""  # fmt: skip


def test_a_launch_whose_ctas_wait_for_one_that_is_not_in_the_sample_has_no_time() -> None:
    emulator = Emulator(SPIN)
    flag = np.zeros(4, np.uint32)
    found = kernel_time(emulator, "k", 40, 32, [emulator.memory.register(flag)], B200)
    assert not found.known
    assert "cannot tell, clusters of a sample do not end" in str(found)
    assert not flag.any()


def test_what_a_multiprocessor_holds() -> None:
    program = Emulator(COPY).program("copy")
    assert live_registers(Emulator(LOOP).program("k")) == 3  # from block to block: %r1, %f1, %f2
    assert resident(program, 256, 0) == 8  # threads
    assert resident(program, 32, 0) == 32  # CTAs
    assert resident(program, 256, 60 << 10) == 3  # shared memory, a KiB of it the system's
    bounded = Emulator(COPY.replace(".reqntid 256", ".reqntid 256 .maxnreg 96")).program("copy")
    assert resident(bounded, 256, 0) == 2  # registers
    kept = "".join(f"ld.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in range(100))
    used = "".join(f"add.f32 %f0, %f0, %f{i};\n" for i in range(100))
    text = COPY.replace(".f32 %f<16>", ".f32 %f<100>; .reg .pred %p").replace("ret; }", "") + kept
    text += "setp.ne.u32 %p, %r1, 0; @%p bra END;\n" + used + "st.global.f32 [%rd2], %f0;\nEND: ret; }"
    assert 100 <= live_registers(Emulator(text).program("copy")) <= 104


def test_caveats_are_those_of_the_kernel() -> None:
    x = np.zeros(1 << 16, np.float32)
    said = []
    for text in (COPY, LOOP.replace("0 bra L;", "0 bra L; st.shared.f32 [s], %f2;").replace(
        ".reg .b64 %rd;", ".reg .b64 %rd; .shared .f32 s[4];")):  # fmt: skip
        emulator = Emulator(text, machine=timed(H200))
        entry = emulator.module.entries()[0]
        count = len(emulator.program(entry).function.parameters)
        arguments = [emulator.memory.register(x)] * (count - 1) + [3]
        said.append(caveats(emulator.launch(entry, 1, 256, arguments).timeline))
    of_copy, of_loop = ("\n".join(lines) for lines in said)
    assert "4 global loads" in of_copy
    assert "bank conflicts" not in of_copy
    assert "store_bytes_per_clk" in of_copy
    assert "global loads" not in of_loop
    assert "tma" not in of_copy + of_loop


def test_the_command_says_the_time_of_the_whole_launch(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(COPY)
    buffers = {name: {"dtype": "uint8", "shape": [64 * CTA], "fill": "random"} for name in "xy"}
    launch = {"grid": 64, "block": 256, "buffers": buffers, "args": ["x", "y", CTA]}
    (tmp_path / "k.json").write_text(json.dumps(launch))
    arguments = [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.json"), "--time"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "the whole launch: about 5." in result.output
    assert "us, launch (3 of 64 clusters on the clock, 1 CTA a multiprocessor)" in result.output
