"""Every bf16 weight-gradient kernel compiles for sm_90a, without spills and into the right instructions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from padless.kernels.sm90_bf16_wgrad.config import BLOCKS_T, Bf16WgradConfig, Bf16WgradProblem, select_config, tiles_of
from padless.kernels.sm90_bf16_wgrad.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, edit_sources, hopper_complaints, instructions, products

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

CONFIGS = [
    Bf16WgradConfig(block_n, block_t, 0, slabs, max_groups=groups, out_dtype=dtype, accumulate=accumulate)
    for (block_n, slabs), (dtype, accumulate), block_t, groups in itertools.product(
        ((256, 2), (256, 1), (128, 2), (128, 1)),
        ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)),
        BLOCKS_T,
        (256, 1024),
    )
    if (block_n, slabs, dtype) != (128, 2, torch.bfloat16)
]


def name_of(config: Bf16WgradConfig) -> str:
    slabs = config.piece_slabs
    output = str(config.out_dtype)[6:] + " +=" * config.accumulate
    return f"{config.block_n}-{config.block_t}-{slabs}-{output}-{config.max_groups}"


def code_complaints(sass: list[str], config: Bf16WgradConfig, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = hopper_complaints(sass, kernel)
    shape = f"HGMMA.64x{config.block_n}x16.F32.BF16"
    made = products(sass)
    # A whole stage's, of which only the last ends a group: they run back to back; and one by one a group's last stage's.
    steps = config.block_t // 16
    if len(made) != 2 * steps or any(not line.startswith(shape) for line in made):
        found.append(f"{len(made)} products, not {2 * steps} {shape}")
    if any(".tnspA.tnspB" not in line for line in made):
        found.append("an operand is not read MN-major")
    if sum("gsb0" not in line for line in made) != steps - 1:
        found.append("products that wait for each other")
    is_f32 = config.out_dtype == torch.float32
    wanted = {
        "UTMALDG.2D": True,
        "UTMALDG.4D": True,  # a group's last rows
        "UTMASTG.3D": True,
        "UTMALDG.3D": config.accumulate,  # of what is added to
    }
    found += [f"{o}: {o in opcodes}" for o, there in wanted.items() if (o in opcodes) != there]
    if any(o.startswith("STSM") for o in opcodes) == is_f32:
        found.append("stmatrix is for 16-bit output")
    return found


def problem(**fields: object) -> Bf16WgradProblem:
    given = {"n": 4096, "k": 7168, "tokens": 32768, "num_groups": 32, "out_dtype": torch.bfloat16}
    return Bf16WgradProblem(**{**given, **fields})  # type: ignore[arg-type]


OUTPUTS = ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))
SIZES = (64, 160, 256, 512, 1024, 4096)  # tokens of a group
PICKED = {
    select_config(problem(n=n, k=k, tokens=groups * size, num_groups=groups, out_dtype=dtype, accumulate=adds))
    for n, k, groups in ((4096, 7168, 32), (1024, 1024, 2), (1024, 2048, 512))
    for size in SIZES
    for dtype, adds in OUTPUTS
}
# Whatever the bands of the order, which are no more than a number in the code.
EVERY_TIME = {replace(config, raster_m=8) for config in PICKED if config.max_groups == 256}


def test_what_is_picked_is_compiled_every_time() -> None:
    assert {replace(config, raster_m=8, max_groups=256) for config in PICKED} == EVERY_TIME
    assert set(CONFIGS) > EVERY_TIME


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=name_of(c), marks=() if c in EVERY_TIME else pytest.mark.slow) for c in CONFIGS]
)
def test_a_kernel_compiles_into_what_it_should(config: Bf16WgradConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a")
    assert kernel.entry == "padless_sm90_bf16_wgrad"
    assert complaints(kernel) == []
    assert kernel.num_threads == 384
    assert kernel.num_stages >= (3 if config.block_t == 64 else 6)
    assert code_complaints(instructions(kernel, tmp_path), config, kernel) == []


def test_a_fence_left_out_is_put_in_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    edit_sources(monkeypatch, "device/sm90/bf16_multiply.cuh", r"if \(!WHOLE\) wgmma_fence\(\);", "")
    kernel = jit.compile_kernel(KERNEL, "// planted\n" + CONFIGS[0].prelude(), "sm_90a")
    assert any("C7519" in line for line in complaints(kernel))


# --- the choice --------------------------------------------------------------------------------------------


def test_the_larger_tile_where_there_is_work_for_it() -> None:
    assert select_config(problem()) == Bf16WgradConfig(piece_slabs=2)
    assert select_config(problem(num_groups=1024)).max_groups == 1024
    few = problem(n=1024, k=1024, num_groups=2)  # 64 tiles of 256 columns, 128 of 128
    assert tiles_of(few, 256) == 64
    assert select_config(few) == Bf16WgradConfig(block_n=128)


def test_tiles_and_pieces_of_float32_by_tokens_of_a_group() -> None:
    def chosen(**fields: object) -> list[tuple[int, int]]:
        given = (problem(tokens=32 * size, out_dtype=torch.float32, **fields) for size in SIZES)
        return [(config.block_n, config.piece_slabs) for config in map(select_config, given)]

    assert chosen() == [(128, 2), (128, 2), (256, 1), (256, 1), (256, 2), (256, 2)]
    assert chosen(accumulate=True) == [(128, 2)] * 4 + [(256, 2)] * 2


def test_low_bands_where_the_rows_of_x_stay_in_l2() -> None:
    assert [select_config(problem(tokens=32 * size)).raster_m for size in SIZES] == [2, 2, 2, 2, 8, 8]
    assert [select_config(problem(tokens=32 * size, k=2048)).raster_m for size in SIZES] == [2, 2, 2, 2, 2, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_n": 64}, r"Bf16WgradConfig.block_n is 64; allowed: 128 or 256"),
        ({"block_t": 128}, r"block_t is 128; allowed: 32 or 64"),
        ({"piece_slabs": 3}, r"piece_slabs is 3; allowed: 1, or 2 unless"),
        ({"piece_slabs": 2, "block_n": 128}, r"piece_slabs is 2; allowed: 1, or 2 unless block_n is 128"),
        ({"out_dtype": torch.float16}, r"out_dtype is torch.float16; allowed: torch.bfloat16 or"),
        ({"num_stages": 1}, r"num_stages is 1; allowed: 0 \(as many as fit\) or 2 to 12"),
    ],
)
def test_a_config_that_is_not_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bf16WgradConfig(**fields)  # type: ignore[arg-type]
