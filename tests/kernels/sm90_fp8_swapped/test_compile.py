"""The FP8 kernel with swapped operands compiles without spills, and into the instructions of its design."""

from __future__ import annotations

import re

import pytest
import torch

from padless.kernels.sm90_fp8_swapped.config import Sm90Fp8SwappedConfig
from padless.kernels.sm90_fp8_swapped.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, cuobjdump, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

ARCH = "sm_90a"
WIDE = Sm90Fp8SwappedConfig(block_m=136, num_d=1)
STAGE_OVERHEAD = 95  # instructions of a stage that are no multiply-adds


@pytest.mark.parametrize(
    "config",
    [
        Sm90Fp8SwappedConfig(),
        WIDE,
        pytest.param(Sm90Fp8SwappedConfig(block_m=144, num_d=1), marks=pytest.mark.slow),
        pytest.param(Sm90Fp8SwappedConfig(max_groups=1024, out_dtype=torch.float16), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kernel_compiles_without_spills_and_warnings(config: Sm90Fp8SwappedConfig) -> None:
    """Among the warnings are those of serialised products (C7510, C7514)."""
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    assert complaints(kernel) == []
    assert "ptxas info" in kernel.log, "the compiler's log is what tells of spills"
    assert (kernel.num_threads, kernel.num_stages) == (384, 3)


@pytest.fixture(scope="module")
def sass(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    cuobjdump()
    return instructions(jit.compile_kernel(KERNEL, WIDE.prelude(), ARCH), tmp_path_factory.mktemp("sass"))


def test_the_products_are_those_of_the_design(sass: list[str]) -> None:
    opcodes = {line.split()[0] for line in sass}
    assert not [o for o in opcodes if re.match(r"(LDL|STL|HMMA|HGMMA|IGMMA)\b", o)]
    assert {o for o in opcodes if "GMMA" in o} == {f"QGMMA.64x{n}x32.F32.E4M3.E4M3" for n in range(8, 137, 8)}
    assert {o for o in opcodes if re.match("UTMA(LDG|STG)", o)} == {"UTMALDG.2D", "UTMALDG.3D", "UTMASTG.4D"}
    assert {o for o in opcodes if o.startswith("STSM")} == {"STSM.16.MT88.4", "STSM.16.MT88.2"}


@pytest.mark.parametrize("columns", [64, 136])
def test_the_main_loop_issues_little_but_multiply_adds(sass: list[str], columns: int) -> None:
    places = [i for i, line in enumerate(sass) if line.startswith(f"QGMMA.64x{columns}x32")]
    assert len(places) == 8, "two m64s of four products"
    loop = sass[places[0] : places[-1] + 1]
    last = next(i for i in range(places[-1], len(sass)) if sass[i].startswith("F2FP"))
    loop = sass[places[0] : last]
    fmas = [line for line in loop if line.startswith("FFMA")]
    assert len(fmas) == 2 * columns // 2
    assert not [line for line in loop if re.match(r"(FMUL|LDG|BAR)\b", line)]
    assert sum(line.startswith("LDS.128") for line in loop) <= 2 * ((columns + 15) // 16)
    assert len(loop) - len(fmas) <= STAGE_OVERHEAD
