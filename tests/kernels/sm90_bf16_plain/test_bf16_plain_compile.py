"""Every plain bf16 kernel compiles for sm_90a, without spills and into the right instructions."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig, select_config
from padless.kernels.sm90_bf16_plain.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, hopper_complaints, instructions, products

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

CONFIGS = [
    Bf16PlainConfig(block_n=block_n, n_major=n_major, out_dtype=dtype, max_groups=groups)
    for block_n, n_major, dtype, groups in itertools.product(
        (256, 128), (False, True), (torch.bfloat16, torch.float16, torch.float32), (256, 1024)
    )
]
QUICK = {(256, False, torch.bfloat16, 256), (256, True, torch.float32, 256)}


def name_of(config: Bf16PlainConfig) -> str:
    order = "N" if config.n_major else "K"
    return f"{config.block_n}-{order}-{str(config.out_dtype)[6:]}-{config.max_groups}"


def is_quick(config: Bf16PlainConfig) -> bool:
    return (config.block_n, config.n_major, config.out_dtype, config.max_groups) in QUICK


def code_complaints(sass: list[str], config: Bf16PlainConfig, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = hopper_complaints(sass, kernel)
    shape = f"HGMMA.64x{config.block_n}x16.F32.BF16"
    made = products(sass)
    # A whole stage's, of which only the last ends a group: they run back to back; and one by one the last stage's.
    if len(made) != 8 or any(not line.startswith(shape) for line in made):
        found.append(f"{len(made)} products, not 8 {shape}")
    if any(("tnspB" in line) != config.n_major or "tnspA" in line for line in made):
        found.append("an operand is read in the wrong order")
    if sum("gsb0" not in line for line in made) != 3:
        found.append("products that wait for each other")
    wanted = {"UTMALDG.2D": True, "UTMALDG.3D": True, "UTMASTG.4D": True}
    found += [f"{o}: {o in opcodes}" for o, there in wanted.items() if (o in opcodes) != there]
    return found


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=name_of(c), marks=() if is_quick(c) else pytest.mark.slow) for c in CONFIGS]
)
def test_a_kernel_compiles_into_what_it_should(config: Bf16PlainConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a")
    assert kernel.entry == "padless_sm90_bf16_plain_grouped_gemm"
    assert complaints(kernel) == []
    assert kernel.num_threads == 384
    assert kernel.num_stages >= (3 if config.block_n == 256 else 5)
    assert code_complaints(instructions(kernel, tmp_path), config, kernel) == []


def test_the_smaller_tile_where_the_larger_leaves_multiprocessors_idle() -> None:
    assert select_config(8192, 4096, 7168, 8) == Bf16PlainConfig()
    assert select_config(256, 4096, 7168, 1) == Bf16PlainConfig(block_n=128)
    for groups, n_major, dtype in itertools.product(
        (8, 1000), (False, True), (torch.bfloat16, torch.float16, torch.float32)
    ):
        assert select_config(8192, 4096, 7168, groups, n_major=n_major, out_dtype=dtype) in CONFIGS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_n": 64}, r"Bf16PlainConfig.block_n is 64; allowed: 128 or 256"),
        ({"piece_slabs": 3}, r"piece_slabs is 3; allowed: 1, or 2 unless"),
        ({"piece_slabs": 2, "block_n": 128}, r"piece_slabs is 2; allowed: 1, or 2 unless block_n is 128"),
        ({"out_dtype": torch.float64}, r"out_dtype is torch.float64; allowed: torch.bfloat16, torch.float16 or"),
        ({"num_stages": 1}, r"num_stages is 1; allowed: 0 \(as many as fit\) or 2 to 12"),
    ],
)
def test_a_config_that_is_not_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bf16PlainConfig(**fields)  # type: ignore[arg-type]
