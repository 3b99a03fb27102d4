"""The MXFP8 kernel of Hopper compiles for sm_90a without spills, and into the instructions it is designed around."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from padless.formats import OUT_DTYPES
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm90_mxfp8.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, cuobjdump, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

ARCH = "sm_90a"
QUICK = [
    *(Sm90Mxfp8Config(block_m=m, block_n=n) for m, n in itertools.product((64, 128), repeat=2)),
    Sm90Mxfp8Config(a_e5m2=True, b_e5m2=True, out_dtype=torch.float32, max_groups=1024),
    Sm90Mxfp8Config(b_e5m2=True, out_dtype=torch.float16),
]
EVERY = [
    Sm90Mxfp8Config(m, n, a_e5m2=a, b_e5m2=b, max_groups=groups, out_dtype=dtype)
    for m, n, a, b, groups, dtype in itertools.product(
        (64, 128), (64, 128), (False, True), (False, True), (256, 1024), OUT_DTYPES
    )
]
STAGE_OVERHEAD = 130  # instructions of a stage that are no multiply-adds: 124 with NVRTC 13.0


def name_of(config: Sm90Mxfp8Config) -> str:
    codes = "-".join("e5m2" if e5m2 else "e4m3" for e5m2 in (config.a_e5m2, config.b_e5m2))
    return f"{config.block_m}x{config.block_n}-{codes}-{str(config.out_dtype)[6:]}-{config.max_groups}_groups"


@pytest.mark.parametrize("config", QUICK, ids=name_of)
def test_a_kernel_compiles_without_spills_and_warnings(config: Sm90Mxfp8Config) -> None:
    """Among the warnings are those of serialised products (C7510, C7514)."""
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    assert complaints(kernel) == []
    assert "ptxas info" in kernel.log, "the compiler's log is what tells of spills"
    assert kernel.num_threads == 128 * (1 + config.block_m // 64)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in EVERY if c not in QUICK], ids=name_of)
def test_every_other_kernel_compiles_too(config: Sm90Mxfp8Config) -> None:
    assert complaints(jit.compile_kernel(KERNEL, config.prelude(), ARCH)) == []


# --- the machine code --------------------------------------------------------------------------------------


def main_loop(sass: list[str]) -> list[str]:
    """The instructions of a stage that is not the last: between two waits for everything, with 8 products of values."""
    waits = [i for i, line in enumerate(sass) if line.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0")]
    bodies = [sass[i:j] for i, j in itertools.pairwise(waits)]
    (body,) = [b for b in bodies if sum(line.startswith("QGMMA") for line in b) == 8]
    return body


def registers(text: str) -> list[int]:
    return [int(r) for r in re.findall(r"\bR(\d+)\b", text)]


def touched_in_flight(loop: list[str]) -> list[str]:
    """Instructions of the loop, walked twice, that touch accumulators or overwrite operands of products under way.

    A group ends with the product that names a scoreboard, and a wait leaves the newest few groups.
    """
    flight: list[tuple[set[int], set[int]]] = []  # accumulators and operands of a group
    begun: tuple[set[int], set[int]] = (set(), set())
    found = []
    for line in [*loop, *loop]:
        if line.startswith("WARPGROUP.DEPBAR"):
            left = int(line.split(",")[1], 16)
            flight = flight[-left:] if left else []
        elif "GMMA" in line:
            first, *operand = registers(line)
            accumulators = set(range(first, first + int(line.split("x")[1]) // 2))
            begun = (begun[0] | accumulators, begun[1] | {r + i for r in operand[:1] for i in range(4)})
            if "gsb0" in line:
                flight.append(begun)
                begun = (set(), set())
        elif used := registers(line):
            written = {used[0], used[0] + line.startswith("CS2R")}
            if any(accumulators & set(used) or a & written for accumulators, a in [*flight, begun]):
                found.append(line)
    return found


@pytest.fixture(scope="module")
def sass(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cuobjdump()
    kernel = jit.compile_kernel(KERNEL, Sm90Mxfp8Config(b_e5m2=True).prelude(), ARCH)
    return instructions(kernel, tmp_path_factory.mktemp("sass"))


def test_the_products_are_those_of_the_design(sass: list[str]) -> None:
    opcodes = {line.split()[0] for line in sass}
    assert not [o for o in opcodes if re.match(r"(LDL|STL|HMMA|IMMA|IGMMA)\b", o)]
    assert {o for o in opcodes if "GMMA" in o} == {"QGMMA.64x64x32.F32.E4M3.E5M2", "HGMMA.64x64x16.F32.BF16"}
    assert {o for o in opcodes if re.match("UTMA(LDG|STG)", o)} == {"UTMALDG.2D", "UTMALDG.3D", "UTMASTG.4D"}


def test_the_main_loop_issues_little_but_multiply_adds(sass: list[str]) -> None:
    loop = main_loop(sass)
    fmas = [line for line in loop if line.startswith("FFMA")]
    assert len(fmas) == 4 * 64
    assert sum(line.startswith("HGMMA") for line in loop) == 8
    assert not [line for line in loop if re.match(r"(FMUL|LDG|SHFL|BAR|R2UR)\b", line)]
    assert len(loop) - len(fmas) <= STAGE_OVERHEAD
    # Registers come in two banks, even and odd: three operands of one parity would take two cycles.
    assert not [f for f in fmas if len({r % 2 for r in registers(f)[1:]}) == 1]


def test_nothing_touches_the_registers_of_a_product_under_way(sass: list[str]) -> None:
    loop = main_loop(sass)
    assert touched_in_flight(loop) == []
    without_waits = [line for line in loop if not line.startswith("WARPGROUP.DEPBAR")]
    assert touched_in_flight(without_waits), "the check must see a missing wait"
