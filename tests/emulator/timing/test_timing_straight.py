"""The clock on kernels without a loop and without a product: a block that ends the kernel takes its time too."""

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import Emulator
from padless.emulator.timing import B200, H200, Chip, timed
from padless.emulator.timing.report import lines_of, phases
from padless.emulator.timing.timeline import Timeline

HEAD = """.version 8.8
.target {}
.address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y) .reqntid 256 {{
.reg .b64 %rd<9>; .reg .b32 %r<4>; .reg .f32 %f<64>; .reg .pred %p;
ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 4; mov.u32 %r2, %ctaid.x; mul.lo.u32 %r2, %r2, BYTES; add.s32 %r1, %r1, %r2;
cvt.u64.u32 %rd3, %r1; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
"""


def body(count: int, guard: str = "") -> str:
    """`count` loads of 16 bytes a thread, 4 KiB apart, then as many stores."""
    values = ["{" + ", ".join(f"%f{4 * i + j}" for j in range(4)) + "}" for i in range(count)]
    loads = [f"ld.global.v4.f32 {v}, [%rd1+{4096 * i}];" for i, v in enumerate(values)]
    return "\n".join([*loads, guard, *(f"st.global.v4.f32 [%rd2+{4096 * i}], {v};" for i, v in enumerate(values))])


def run(chip: Chip, count: int, grid: int = 16, guard: str = "", **options: object) -> Timeline:
    target = "sm_90a" if chip is H200 else "sm_100a"
    x = np.random.default_rng(0).standard_normal(grid * count * 1024).astype(np.float32)
    y = np.full_like(x, np.nan)
    text = HEAD.replace("BYTES", str(4096 * count)).format(target) + body(count, guard) + "\nret;\n}"
    emulator = Emulator(text, machine=timed(chip, **options))
    result = emulator.launch("copy", grid, 256, [emulator.memory.register(x), emulator.memory.register(y)])
    assert not result.reports
    assert np.array_equal(x, y)
    return result.timeline


@pytest.mark.parametrize("chip", [H200, B200], ids=lambda chip: chip.name)
def test_a_straight_copy_takes_a_loads_latency_and_its_bytes(chip: Chip) -> None:
    """From the rates: bytes in at the rate of the loads' feed and out at the stores', no less than one latency."""
    cycles = {count: run(chip, count).cycles for count in (1, 4, 16)}
    for count, found in cycles.items():
        stored = count * 4096 / chip["store_bytes_per_clk"]
        assert found >= max(chip["global_latency"], stored, count * 4096 / chip["l2_feed"])
        assert found <= chip["global_latency"] + stored + count * 4096 / chip["l2_feed"] + 200
    assert cycles[1] < cycles[4] < cycles[16]


@pytest.mark.parametrize("chip", [H200, B200], ids=lambda chip: chip.name)
def test_a_branch_before_the_stores_adds_a_latency_at_most(chip: Chip) -> None:
    """The same work in two blocks: bytes of a block's stores are taken to move from its start on."""
    guard = "setp.gt.f32 %p, %f0, 0f7F000000;\n@%p bra END;\nEND:"
    one, two = run(chip, 4).cycles, run(chip, 4, guard=guard).cycles
    assert one <= two <= one + chip["global_latency"] + 100


def test_ctas_that_come_later_begin_when_the_earlier_have_ended() -> None:
    alone = run(H200, 4, grid=1, sms=1).cycles
    assert abs(run(H200, 4, grid=5, sms=1).cycles / (5 * alone) - 1) < 0.05


def test_phases_of_a_kernel_without_products_do_not_speak_of_them() -> None:
    timeline = run(H200, 4)
    text = "\n".join(lines_of(timeline)[:8])
    assert "products" not in text
    assert "first product" not in text
    assert [name for name, _ in phases(timeline)] == ["all of it, without a product"]
    assert sum(cycles for _, cycles in phases(timeline)) == timeline.cycles
