"""Every kernel that can be asked for compiles for sm_90a, without spills and into the right instructions."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, OUT_DTYPES
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_fp8.config import SCALE_MAJORS, STORES, Problem, Sm90Fp8Config, fit_config, select_config
from padless.kernels.sm90_fp8.host import KERNEL
from padless.runtime import jit
from support.machine_code import SHARED_LIMIT, complaints, edit_sources, instructions, moves_a_product

pytestmark = pytest.mark.usefixtures("own_kernel_cache")
ARCH = "sm_90a"

# NVRTC has to be there: it is a dependency, not an extra, and compiling needs no GPU.


SMS = (78, 132, 144)


def selectable() -> set[Sm90Fp8Config]:
    """Every config select_config gives, on a grid of problems much finer than its choices."""
    columns = (8, 64, 72, 128, 192, 256, 384, 576, 1000, 3072, 4096, 7168, 8192)
    rows = (0, 1, 64, 129, 256, 1000, 4096, 8192, 65536, 10**6)
    return {
        select_config(Problem(m, n, k, groups, dtype, sms))
        for m, n, k in itertools.product(rows, columns, (16, 128, 1000 * 16, 2048, 7168))
        for groups, dtype, sms in itertools.product((1, 8, 32, 256, 257, 1024), OUT_DTYPES, SMS)
    }


def allowed(**fields: object) -> bool:
    try:
        Sm90Fp8Config(**fields)
    except ValueError:
        return False
    return True


def alternatives() -> list[Sm90Fp8Config]:
    """What a caller can ask for with ``config=``, besides."""
    sizes = [
        (m, n) for m, n in itertools.product((64, 128, 192, 256), (64, 128, 192, 256)) if allowed(block_m=m, block_n=n)
    ]
    tiles = [
        Sm90Fp8Config(block_m=m, block_n=n, cluster_n=c, store=s)
        for (m, n), c, s in itertools.product(sizes, (1, 2), STORES)
    ]
    outputs = [
        Sm90Fp8Config(block_n=n, store=s, scales=r, scale_window_k_blocks=8 if r == "k" else 0, out_dtype=d)
        for n, s, r, d in itertools.product((64, 128, 192), STORES, SCALE_MAJORS, OUT_DTYPES)
    ]
    # Every K that fit_config lets through, for the tile where it is tightest.
    windows = [
        fit_config(Sm90Fp8Config(block_m=m, scales="k", store="pool"), Problem(1, 8, 128 * blocks, 257, d))
        for m, blocks, d in itertools.product((64, 128), (8, 56, 128), (torch.bfloat16, torch.float32))
    ]
    others = [
        Sm90Fp8Config(num_stages=2),
        Sm90Fp8Config(num_stages=4, raster_m=1),
        Sm90Fp8Config(block_m=64, block_n=64, num_stages=12),
        Sm90Fp8Config(cluster_n=2, scales="k", scale_window_k_blocks=56, store="pool"),
    ]
    return [*tiles, *outputs, *windows, *others]


def name_of(config: Sm90Fp8Config) -> str:
    window = f"{config.scale_window_k_blocks}" if config.scales == "k" else ""
    stages = f"-{config.num_stages}_stages" if config.num_stages else ""
    dtype = str(config.out_dtype).removeprefix("torch.")
    few = "few_rows-" if config.few_rows else ""
    return (
        f"{few}{config.block_m}x{config.block_n}x{config.cluster_n}-{config.store}-{config.scales}{window}-{dtype}"
        f"-{config.max_groups}_groups-raster{config.raster_m}{stages}"
    )


CASES = sorted(selectable() | set(alternatives()), key=name_of)


# --- the compiler's own words ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CASES, ids=name_of)
def test_a_kernel_compiles_without_spills_and_warnings(config: Sm90Fp8Config) -> None:
    kernel = jit.compile_kernel(config.source, config.prelude(), ARCH)
    assert complaints(kernel) == []
    assert "ptxas info" in kernel.log, "the compiler's log is what tells of spills"
    assert kernel.num_threads % 128 == 0
    assert 256 <= kernel.num_threads <= 1024
    assert config.num_stages in (0, kernel.num_stages)


def test_as_many_stages_as_fit() -> None:
    """With num_stages = 0 one stage more, tiles of A and B with their scales, would not fit."""
    config = Sm90Fp8Config(block_n=192)
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    smaller = jit.compile_kernel(KERNEL, dataclasses.replace(config, num_stages=kernel.num_stages - 1).prelude(), ARCH)
    stage = kernel.shared_bytes - smaller.shared_bytes
    assert stage >= (128 + 192) * 128
    assert kernel.shared_bytes <= SHARED_LIMIT < kernel.shared_bytes + stage
    too_many = dataclasses.replace(config, num_stages=kernel.num_stages + 1)
    with pytest.raises(jit.CompileError, match="does not fit in shared memory"):
        jit.compile_kernel(KERNEL, too_many.prelude(), ARCH)


# --- planted: the same checks on kernels that are wrong ----------------------------------------------------


MULTIPLY = "sm90_fp8/multiply.cuh"


def planted(monkeypatch: pytest.MonkeyPatch, file: str, pattern: str, replacement: str) -> jit.CompiledKernel:
    """The default kernel with one of its files changed."""
    edit_sources(monkeypatch, file, pattern, replacement)
    prelude = f"// planted: {pattern} -> {replacement}\n"  # another text, so that no kept kernel is found
    return jit.compile_kernel(KERNEL, prelude + Sm90Fp8Config().prelude(), ARCH)


def test_a_tile_too_wide_for_the_registers_is_seen() -> None:
    """256 columns are 128 sums and 128 promoted sums to a thread; Sm90Fp8Config refuses them for this reason."""
    prelude = re.sub(r"BLOCK_N = \d+", "BLOCK_N = 256", Sm90Fp8Config().prelude())
    found = complaints(jit.compile_kernel(KERNEL, prelude, ARCH))
    assert any("spilled" in complaint for complaint in found)
    assert any("stack" in complaint for complaint in found)


PLANTED = {
    # The sums are written while products are on their way.
    "serialized": (MULTIPLY, r"(wgmma_m64k32_e4m3<BLOCK_N>\((\w+))", r"\2[0] = problem.sfb[0], \1"),
    "warpgroup.wait is injected": (MULTIPLY, r"(?m)^(?!.*void).*wgmma_wait_group<\d>\(\);", ""),
    "'setmaxnreg' ignored": (KERNEL, r"__launch_bounds__\([^)]*\)", ""),
}


@pytest.mark.parametrize("complaint", PLANTED)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, complaint: str) -> None:
    found = complaints(planted(monkeypatch, *PLANTED[complaint]))
    assert any(complaint in line for line in found), found


# --- the machine code --------------------------------------------------------------------------------------


MOST_MOVES = 0.25  # for a wgmma, of words that change with the tile; 4 where descriptors are in vector registers


def descriptor_complaints(sass: list[str]) -> list[str]:
    moves = moves_a_product(sass)
    return [f"{moves:.2f} moves into uniform registers for a wgmma"] if moves > MOST_MOVES else []


def code_complaints(sass: list[str], config: Sm90Fp8Config, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = [f"{o} (local memory)" for o in opcodes if re.match(r"(LDL|STL)\b", o)]
    found += [f"{o} (not FP8)" for o in opcodes if re.match(r"(HMMA|HGMMA|IGMMA|IMMA)\b", o)]

    shape = f"QGMMA.64x{config.block_n}x32.F32.E4M3.E4M3"
    products = [line for line in sass if line.startswith("QGMMA")]
    if len(products) < 4 or any(not line.startswith(shape) for line in products):
        found.append(f"{len(products)} products, not all {shape}")
    if sum(line.startswith("FFMA") for line in sass) < config.block_n // 2:
        found.append("fewer FFMAs than sums to promote")

    found += descriptor_complaints(sass)

    loads = {"UTMALDG.3D", "UTMALDG.2D.MULTICAST" if config.cluster_n == 2 else "UTMALDG.2D"}
    loads.add("UTMALDG.2D" if config.scales == "mn" else "UTMALDG.1D")
    found += [f"loads {o}" for o in opcodes ^ loads if o.startswith("UTMALDG")]
    stores = {"UTMASTG.2D" if config.store == "pool" else "UTMASTG.4D"}
    found += [f"stores {o}" for o in opcodes ^ stores if o.startswith("UTMASTG")]

    packed = {torch.bfloat16: "F2FP.BF16", torch.float16: "F2FP.F16", torch.float32: None}[config.out_dtype]
    if packed is not None and not any(o.startswith(packed) for o in opcodes):
        found.append(f"no {packed}")
    if (packed is not None) != any(o.startswith("STSM") for o in opcodes):
        found.append("stmatrix is for 16-bit output")

    # Registers that the consumers ask for must have been given up by the others, or they wait for ever.
    asked = {int(line.split(",")[-1], 16) for line in sass if line.startswith("USETMAXREG.TRY_ALLOC")}
    kept = {int(line.split()[-1], 16) for line in sass if line.startswith("USETMAXREG.DEALLOC")}
    if len(asked) != 1 or len(kept) != 1:
        found.append(f"setmaxnreg asks for {asked} and keeps {kept}")
    else:
        consumers = kernel.num_threads - 128
        pool = kernel.registers * kernel.num_threads
        if asked.pop() * consumers + kept.pop() * 128 > pool:
            found.append(f"setmaxnreg asks for more than the {pool} registers of the CTA")
    return found


CODE_CASES = [
    Sm90Fp8Config(),
    Sm90Fp8Config(block_n=192),
    Sm90Fp8Config(block_n=64),
    Sm90Fp8Config(block_m=256),
    Sm90Fp8Config(block_m=256, cluster_n=2),
    Sm90Fp8Config(block_m=64, block_n=64),
    Sm90Fp8Config(block_m=64, block_n=192),
    Sm90Fp8Config(block_m=64, block_n=192, cluster_n=2, store="pool"),
    Sm90Fp8Config(store="pool", out_dtype=torch.float16),
    Sm90Fp8Config(scales="k", scale_window_k_blocks=56),
    Sm90Fp8Config(scales="k", scale_window_k_blocks=56, store="pool", cluster_n=2, out_dtype=torch.float32),
    Sm90Fp8Config(out_dtype=torch.float32, max_groups=1024),
]


@pytest.mark.parametrize("config", CODE_CASES, ids=name_of)
def test_the_machine_code_is_what_it_should_be(config: Sm90Fp8Config, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    sass = instructions(kernel, tmp_path)
    assert len(sass) > 300
    assert code_complaints(sass, config, kernel) == []


def test_every_selectable_tile_is_disassembled() -> None:
    """CODE_CASES covers each tile, store and scale layout of this kernel that select_config can choose."""
    covered = {(c.block_m, c.block_n, c.cluster_n, c.store, c.scales) for c in CODE_CASES}
    assert {(c.block_m, c.block_n, c.cluster_n, c.store, c.scales) for c in selectable() if not c.few_rows} <= covered


def test_spills_show_in_the_machine_code(tmp_path: Path) -> None:
    prelude = re.sub(r"BLOCK_N = \d+", "BLOCK_N = 256", Sm90Fp8Config().prelude())
    kernel = jit.compile_kernel(KERNEL, prelude, ARCH)
    found = code_complaints(instructions(kernel, tmp_path), Sm90Fp8Config(), kernel)
    assert any("LDL" in complaint for complaint in found)
    assert any("STL" in complaint for complaint in found)
    assert any("products" in complaint for complaint in found)  # n256, where n128 was asked for


@pytest.mark.parametrize(
    ("compiled", "expected", "complaint"),
    [
        (Sm90Fp8Config(store="pool"), Sm90Fp8Config(), "stores"),
        (Sm90Fp8Config(cluster_n=2), Sm90Fp8Config(), "loads UTMALDG.2D.MULTICAST"),
        (Sm90Fp8Config(scales="k", scale_window_k_blocks=8), Sm90Fp8Config(), "loads UTMALDG.1D"),
        (Sm90Fp8Config(out_dtype=torch.float16), Sm90Fp8Config(), "no F2FP.BF16"),
    ],
    ids=["store", "cluster", "scales", "dtype"],
)
def test_another_kernels_code_is_seen(
    tmp_path: Path, compiled: Sm90Fp8Config, expected: Sm90Fp8Config, complaint: str
) -> None:
    kernel = jit.compile_kernel(KERNEL, compiled.prelude(), ARCH)
    found = code_complaints(instructions(kernel, tmp_path), expected, kernel)
    assert any(text.startswith(complaint) for text in found), found


GLU = Epilogue(activation="swiglu", gate_up="concatenated", row_format=FP8_BLOCK)
QUANT_CASES = {
    "SwiGLU-256x128x2": QuantConfig(Sm90Fp8Config(block_m=256, cluster_n=2), GLU),
    "SwiGLU-128x128x2": QuantConfig(Sm90Fp8Config(cluster_n=2), GLU),
    "rows-128x128": QuantConfig(Sm90Fp8Config(), Epilogue(row_format=FP8_BLOCK)),
    "columns-256x128": QuantConfig(Sm90Fp8Config(block_m=256), Epilogue(column_format=FP8_BLOCK)),
}


@pytest.mark.parametrize("config", QUANT_CASES.values(), ids=QUANT_CASES)
def test_quantizing_kernels_keep_descriptors_in_uniform_registers(config: QuantConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    assert complaints(kernel) == []
    assert descriptor_complaints(instructions(kernel, tmp_path)) == []


def test_descriptors_in_vector_registers_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = planted(monkeypatch, KERNEL, r"uniform_in_warp\(shared, lane\)", "shared")
    found = descriptor_complaints(instructions(kernel, tmp_path))
    assert any("moves into uniform registers" in text for text in found), found
