"""Every weight-gradient kernel compiles for sm_90a, without spills and into the right instructions."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from padless.kernels.sm90_fp8_wgrad.config import MODES, WgradConfig, WgradProblem, blocks_m, select_config, tiles_of
from padless.kernels.sm90_fp8_wgrad.host import KERNEL
from padless.kernels.wgrad import GRADIENT_DTYPES
from padless.runtime import jit
from support.machine_code import complaints, edit_sources, hopper_complaints, instructions, products

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

CONFIGS = [
    WgradConfig(
        block_m=block_m,
        mode=mode,
        out_dtype=dtype,
        max_groups=groups,
        cluster_n=cluster,
        accumulate=accumulate,
        reduced_pieces=reduced,
    )
    for mode, dtype, groups in itertools.product(MODES, GRADIENT_DTYPES, (256, 1024))
    for accumulate in ((False, True) if dtype == torch.float32 else (False,))
    for block_m in blocks_m(mode, dtype, accumulate)
    for cluster in ((1, 2) if block_m == 256 else (1,))
    for reduced in (range(1 + block_m // 128) if accumulate else (0,))
]


def name_of(config: WgradConfig) -> str:
    adds = f" +={config.reduced_pieces}" if config.accumulate else ""
    return f"{config.mode}-{config.block_m}x{config.cluster_n}-{str(config.out_dtype)[6:]}{adds}-{config.max_groups}"


def code_complaints(sass: list[str], config: WgradConfig, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = hopper_complaints(sass, kernel)
    shape = "QGMMA.64x128x32.F32.E4M3.E4M3"
    made = products(sass)
    if len(made) < 4 or any(not line.startswith(shape) for line in made):
        found.append(f"{len(made)} products, not all {shape}")
    is_f32, is_blocks = config.out_dtype == torch.float32, config.mode == "1d2d"
    wanted = {
        "UTMALDG.2D": True,
        "UTMASTG.3D": True,
        "UTMALDG.3D": config.accumulate,  # of what is added to
        "UTMAREDG.3D.ADD": config.reduced_pieces > 0,
        "UTMALDG.2D.MULTICAST": config.cluster_n == 2,
        "LDGSTS.E": is_blocks,  # X's scales, too few for the copy engine
    }
    found += [f"{o}: {o in opcodes}" for o, there in wanted.items() if (o in opcodes) != there]
    if any(o.startswith("STSM") for o in opcodes) == is_f32:
        found.append("stmatrix is for 16-bit output")
    return found


def scales_of_columns(sass: list[str]) -> tuple[int, list[str]]:
    """(loads of two columns' scales between a wait for products and the arrival that gives their stage back, those whose
    values no instruction in front of the arrival needs).
    """
    count, late = 0, []
    loads: dict[int, str] | None = None  # by first register, since the wait
    for line in sass:
        opcode, _, operands = line.partition(" ")
        if opcode.startswith("WARPGROUP.DEPBAR"):
            loads = {}
        elif "GMMA" in opcode:
            loads = None
        elif loads is not None and opcode.startswith("SYNCS.ARRIVE"):
            late += loads.values()
            loads = None
        elif loads is not None:
            target, _, sources = operands.partition(",")
            for register in re.findall(r"\bR(\d+)", sources):
                loads.pop(int(register), None)
                loads.pop(int(register) - 1, None)
            if opcode == "LDS.64":
                loads[int(target[1:])] = line
                count += 1
    return count, late


COLUMN_SCALES = [c for c in CONFIGS if c.mode == "1d1d" and c.max_groups == 256]
COLUMN_SCALES += [replace(c, cluster_n=2) for c in COLUMN_SCALES if c.block_m == 128]


@pytest.mark.parametrize("config", COLUMN_SCALES, ids=name_of)
def test_an_arrival_is_behind_a_use_of_every_load_of_its_stage(config: WgradConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a")
    assert complaints(kernel) == []
    count, late = scales_of_columns(instructions(kernel, tmp_path))
    assert count >= 3 * 16
    assert late == []


def test_an_arrival_that_waits_for_no_load_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edit_sources(monkeypatch, "sm90_fp8_wgrad/multiply.cuh", r"arrives = needed\(arrives, of_column.*;", "")
    kernel = jit.compile_kernel(KERNEL, "// planted\n" + COLUMN_SCALES[0].prelude(), "sm_90a")
    assert scales_of_columns(instructions(kernel, tmp_path))[1]


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=name_of(c), marks=pytest.mark.slow if c.max_groups == 1024 else ()) for c in CONFIGS]
)
def test_a_kernel_compiles_into_what_it_should(config: WgradConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a")
    assert kernel.entry == "padless_sm90_fp8_wgrad"
    assert complaints(kernel) == []
    assert kernel.num_threads == 384
    assert kernel.num_stages >= 3
    assert code_complaints(instructions(kernel, tmp_path), config, kernel) == []


def test_a_tile_too_large_for_the_registers_is_seen(tmp_path: Path) -> None:
    """256 rows, a scale for every column and float32 output: WgradConfig refuses that for this reason."""
    config = WgradConfig(block_m=128, mode="1d1d", out_dtype=torch.float32)
    prelude = config.prelude().replace("BLOCK_M = 128", "BLOCK_M = 256")
    kernel = jit.compile_kernel(KERNEL, prelude, "sm_90a")
    assert any("spilled" in line for line in complaints(kernel))
    assert any("LDL" in line for line in code_complaints(instructions(kernel, tmp_path), config, kernel))


def test_a_fence_left_out_is_put_in_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    edit_sources(monkeypatch, "sm90_fp8_wgrad/multiply.cuh", r"if \(!WHOLE\) wgmma_fence\(\);", "")
    kernel = jit.compile_kernel(KERNEL, "// planted\n" + CONFIGS[0].prelude(), "sm_90a")
    assert any("C7519" in line for line in complaints(kernel))


# --- the choice --------------------------------------------------------------------------------------------


def problem(**fields: object) -> WgradProblem:
    given = {"n": 4096, "k": 7168, "tokens": 32768, "num_groups": 32, "mode": "1d2d", "out_dtype": torch.bfloat16}
    return WgradProblem(**{**given, **fields})  # type: ignore[arg-type]


def test_the_choice_is_compiled_above() -> None:
    allowed = set(CONFIGS)

    def chosen(given: WgradProblem) -> WgradConfig:
        return replace(select_config(given), raster_m=8)  # the bands of the order are no more than a number in the code

    for mode, dtype, groups in itertools.product(MODES, GRADIENT_DTYPES, (1, 8, 256, 257, 1024)):
        for n, k, tokens in ((16, 16, 128), (4096, 7168, 8192), (7168, 2048, 65536), (768, 2048, 10**6)):
            given = problem(n=n, k=k, tokens=tokens, num_groups=groups, mode=mode, out_dtype=dtype)
            assert chosen(given) in allowed
            if dtype == torch.float32:
                assert chosen(replace(given, accumulate=True)) in allowed


def test_low_bands_where_the_codes_of_x_stay_in_l2() -> None:
    sizes = (64, 1024, 2048, 4096)  # tokens of a group
    assert [select_config(problem(tokens=32 * size)).raster_m for size in sizes] == [2, 2, 8, 8]
    assert [select_config(problem(tokens=32 * size, k=2048)).raster_m for size in sizes] == [2, 2, 2, 8]
    adds = problem(out_dtype=torch.float32, accumulate=True)
    assert [select_config(replace(adds, tokens=32 * size)).raster_m for size in sizes] == [2, 2, 8, 8]


def test_the_larger_tile_where_there_is_work_for_it() -> None:
    assert select_config(problem()).block_m == 256
    few = problem(n=1024, k=1024, num_groups=4)  # 128 tiles of 256 x 128, one round either way at most
    assert tiles_of(few, 256) == 128
    assert select_config(problem(n=128, num_groups=1)).block_m == 128
    adds = problem(out_dtype=torch.float32, accumulate=True)
    assert [select_config(replace(adds, tokens=32 * size)).block_m for size in (256, 1024, 4096)] == [128, 256, 256]


def test_clusters_and_sums_by_tma_where_groups_are_long() -> None:
    """A cluster has two tiles along K; where bytes bind, it does not pay."""

    def chosen(**fields: object) -> tuple[int, int]:
        config = select_config(problem(**fields))
        return config.cluster_n, config.reduced_pieces

    assert [chosen(tokens=32 * size) for size in (512, 1024, 4096)] == [(1, 0), (2, 0), (2, 0)]
    assert chosen(k=7168 - 128) == chosen(num_sms=1) == (1, 0)
    adds = {"out_dtype": torch.float32, "accumulate": True}
    assert [chosen(tokens=32 * size, **adds) for size in (512, 1024, 2048)] == [(1, 1), (2, 1), (2, 2)]
    stores = problem(out_dtype=torch.float32)  # 256 tokens a group in copies of 384
    assert [select_config(replace(stores, tokens=32 * size)).block_m for size in (384, 512)] == [128, 256]
    assert [chosen(tokens=32 * size, mode="1d1d", **adds) for size in (512, 1024)] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_m": 64}, r"WgradConfig.block_m is 64; allowed: 128, or 256"),
        ({"mode": "1d1d", "out_dtype": torch.float32}, r"block_m is 256; allowed: 128, or 256 unless mode is '1d1d'"),
        ({"mode": "2d2d"}, r"mode is '2d2d'; allowed: 1d2d or 1d1d"),
        ({"out_dtype": torch.float16}, r"out_dtype is torch.float16; allowed: torch.bfloat16 or torch.float32"),
        ({"num_stages": 1}, r"num_stages is 1; allowed: 0 \(as many as fit\) or 2 to 12"),
        ({"accumulate": True}, r"accumulate is True; allowed: False unless out_dtype is float32"),
        ({"raster_m": 0}, r"raster_m is 0; allowed: 1 or more"),
    ],
)
def test_a_config_that_is_not_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WgradConfig(**fields)  # type: ignore[arg-type]
