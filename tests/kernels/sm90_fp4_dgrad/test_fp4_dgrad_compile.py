"""Every kernel of gradients through FP4 weights compiles for sm_90a, without spills and into the right instructions."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from padless.kernels.sm90_fp4_dgrad.config import BLOCKS_M, Fp4DgradConfig, select_config
from padless.kernels.sm90_fp4_dgrad.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, hopper_complaints, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

CONFIGS = [
    Fp4DgradConfig(format, block_m=block_m, blocked=blocked, max_groups=groups)
    for format, block_m, blocked, groups in itertools.product(
        ("MXFP4", "NVFP4"), BLOCKS_M, (False, True), (256, 1024, 4096)
    )
]


def name_of(config: Fp4DgradConfig) -> str:
    layout = "blocked" if config.blocked else "plain"
    return f"{config.format}-{config.block_m}-{layout}-{config.max_groups}"


def is_quick(config: Fp4DgradConfig) -> bool:
    return config.block_m == 128 and not config.blocked and config.max_groups == 256


def code_complaints(sass: list[str], config: Fp4DgradConfig, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = hopper_complaints(sass, kernel, 224, 56)
    products = [line for line in sass if re.match(r"(QGMMA|HGMMA|IGMMA|HMMA)", line)]
    # Of a stage, for tiles of up to 64 rows and of more: two rounds of four that run back to back.
    shapes = sorted({min(config.block_m, 64), config.block_m})
    for rows in shapes:
        of_shape = [line for line in products if line.startswith(f"HGMMA.64x{rows}x16.F32.BF16 R")]
        if len(of_shape) != 8 or sum("gsb0" in line for line in of_shape) != 2:
            found.append(f"{len(of_shape)} products of {rows} rows, not 8 in two rounds")
    if len(products) != 8 * len(shapes):
        found.append(f"{len(products)} products")
    if any("tnsp" in line for line in products):
        found.append("an operand is read in the wrong order")
    wanted = {"UTMALDG.2D", "UTMALDG.3D", "UTMASTG.4D", "LDSM.16.MT88.4"}
    found += [f"no {o}" for o in wanted - opcodes]
    return found


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=name_of(c), marks=() if is_quick(c) else pytest.mark.slow) for c in CONFIGS]
)
def test_a_kernel_compiles_into_what_it_should(config: Fp4DgradConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a")
    assert kernel.entry == "padless_sm90_fp4_dgrad"
    assert complaints(kernel) == []
    assert kernel.num_threads == 384
    assert kernel.num_stages >= (3 if config.max_groups == 4096 else 4)  # the table takes the place of a stage
    assert code_complaints(instructions(kernel, tmp_path), config, kernel) == []


def test_a_tile_has_as_many_rows_as_a_group_may_have() -> None:
    found = {m: select_config("MXFP4", m, 128).block_m for m in (1, 128, 2048, 2049, 4096, 4097, 32768)}
    assert found == {1: 32, 128: 32, 2048: 32, 2049: 64, 4096: 64, 4097: 128, 32768: 128}
    for groups, blocked in itertools.product((8, 1000, 4000), (False, True)):
        assert select_config("NVFP4", 8192, groups, blocked=blocked) in CONFIGS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "MXFP8"}, "Fp4DgradConfig.format is 'MXFP8'; allowed: MXFP4 or NVFP4"),
        ({"block_m": 256}, "block_m is 256; allowed: 32, 64 or 128"),
        ({"num_stages": 1}, r"num_stages is 1; allowed: 0 \(as many as fit\) or 2 to 12"),
    ],
)
def test_a_config_that_is_not_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp4DgradConfig(**{"format": "MXFP4", **fields})  # type: ignore[arg-type]
