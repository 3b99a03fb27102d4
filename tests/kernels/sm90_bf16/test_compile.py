"""The bf16 kernel of Hopper compiles for sm_90a without spills, and into the instructions that it is designed around."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from padless.kernels.sm90_bf16.config import PAIRS, Sm90Bf16Config, select_config
from padless.kernels.sm90_bf16.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, edit_sources, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

ARCH = "sm_90a"
FEW_TILES, MANY_TILES = 256, 1 << 17  # N of problems with fewer tiles than multiprocessors, and with more


def selectable() -> list[Sm90Bf16Config]:
    """Every config that select_config can give, but for fp16, which differs in one conversion, and for many groups."""
    rows = (1, 16, 32, 64, 128)
    every = itertools.product(PAIRS, rows, (FEW_TILES, MANY_TILES), (False, True), (torch.bfloat16, torch.float32))
    return list(
        dict.fromkeys(
            select_config(*pair, m, n, 1, blocked=blocked, out_dtype=dtype) for pair, m, n, blocked, dtype in every
        )
    )


def name_of(config: Sm90Bf16Config) -> str:
    layout = "blocked" if config.blocked else "plain"
    dtype = str(config.out_dtype).removeprefix("torch.")
    return (
        f"{config.a_format}-{config.b_format}-{config.block_m}x{config.block_n}-{config.num_warpgroups}_warpgroups-{layout}"
        f"-{dtype}-{config.max_groups}_groups"
    )


# The tightest tiles of every pair, one decoding tile for every format of weights, and the other layouts and outputs.
QUICK = list(
    dict.fromkeys(
        [
            *(select_config(*pair, 128, MANY_TILES, 1) for pair in PAIRS),
            *(
                select_config(pair[0], pair[1], 64, MANY_TILES, 1, blocked=True)
                for pair in PAIRS
                if pair[0] == "FP8_BLOCK"
            ),
            select_config("MXFP8", "MXFP8", 128, MANY_TILES, 1, blocked=True),
            select_config("NVFP4", "NVFP4", 128, MANY_TILES, 1, blocked=True),
            select_config("BF16", "MXFP4", 128, MANY_TILES, 1, blocked=True),
            select_config("MXFP8", "MXFP8", 64, MANY_TILES, 1, out_dtype=torch.float32),
            select_config("MXFP8", "MXFP8_E5M2", 8, MANY_TILES, 1, blocked=True),
            select_config("BF16", "MXFP4", 1, MANY_TILES, 1, out_dtype=torch.float32, blocked=True),
            select_config("NVFP4", "NVFP4", 32 * 257, MANY_TILES, 257, out_dtype=torch.float16),
            select_config("FP8_BLOCK", "NVFP4", 32, MANY_TILES, 1),
            select_config("NVFP4", "NVFP4", 64, MANY_TILES, 1, blocked=True),
            select_config("MXFP4", "MXFP4", 64, MANY_TILES, 1, blocked=True),
            Sm90Bf16Config("NVFP4", "NVFP4", block_m=16, block_n=256),
            Sm90Bf16Config("MXFP8", "MXFP8", block_m=32, block_n=256, num_warpgroups=4),
            Sm90Bf16Config("NVFP4", "NVFP4", block_m=16, block_n=128),
        ]
    )
)


def helpers(config: Sm90Bf16Config) -> int:
    """Warpgroups beside the consumers: converters and producer, or both in one."""
    return 1 if config.num_warpgroups == 4 and config.block_m <= 32 else 2


def check_compiles(config: Sm90Bf16Config) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    assert complaints(kernel) == []
    assert "ptxas info" in kernel.log, "the compiler's log is what tells of spills"
    assert kernel.num_threads == 128 * (config.num_warpgroups + helpers(config))


@pytest.mark.parametrize("config", QUICK, ids=name_of)
def test_a_kernel_compiles_without_spills_and_warnings(config: Sm90Bf16Config) -> None:
    check_compiles(config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in selectable() if c not in QUICK], ids=name_of)
def test_every_selectable_kernel_compiles(config: Sm90Bf16Config) -> None:
    check_compiles(config)


def code_complaints(sass: list[str], config: Sm90Bf16Config, kernel: jit.CompiledKernel) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = {line.split()[0] for line in sass}
    found = [f"{o} (local memory)" for o in opcodes if re.match(r"(LDL|STL)\b", o)]

    expected = 8 * config.blocks_of_stage * (config.block_n // 64 // config.num_warpgroups)
    is_f16 = config.b_format == "NVFP4" and config.a_format != "BF16"
    suffix = "" if is_f16 else ".BF16"
    products = [line for line in sass if "GMMA" in line.split()[0]]
    # Of tiles with more tokens than a copy has, and of those with no more.
    shapes = {f"HGMMA.64x{rows}x16.F32{suffix}" for rows in (config.box_rows, config.block_m)}
    made = Counter(line.split()[0] for line in products)
    if made != dict.fromkeys(shapes, expected):
        found.append(f"products {dict(made)}, not {expected} of each of {sorted(shapes)}")
    # A from registers: accumulator, fragment and the one descriptor of the tokens.
    from_memory = [line for line in products if not re.match(r"\S+ R\d+, R\d+, gdesc\[", line)]
    if from_memory:
        found.append(f"A is not in registers: {from_memory[0]}")

    stores = "STSM.16.MT88" if config.out_dtype != torch.float32 else None
    if stores is not None and not any(o.startswith(stores) for o in opcodes):
        found.append("no transposing stmatrix")
    if "UTMASTG.4D" not in opcodes:
        found.append("no ragged store")

    asked = [int(line.split(",")[-1], 16) for line in sass if line.startswith("USETMAXREG.TRY_ALLOC")]
    kept = [int(line.split()[-1], 16) for line in sass if line.startswith("USETMAXREG.DEALLOC")]
    # Consumers are num_warpgroups warpgroups and the most demanding; the others are one each.
    roles = sorted(asked + kept)
    if len(roles) != 1 + helpers(config):
        found.append(f"setmaxnreg asks for {asked} and keeps {kept}")
    elif sum(roles[:-1]) + roles[-1] * config.num_warpgroups > kernel.registers * kernel.num_threads // 128:
        found.append(f"setmaxnreg asks for {roles}, more than the registers of the CTA")
    return found


CODE_CASES = [
    select_config("NVFP4", "NVFP4", 128, MANY_TILES, 1),
    select_config("MXFP8", "MXFP8", 128, MANY_TILES, 1, out_dtype=torch.float32),
    select_config("FP8_BLOCK", "MXFP4", 64, MANY_TILES, 1, blocked=True),
    select_config("BF16", "NVFP4", 8, MANY_TILES, 1),
    select_config("BF16", "FP8_BLOCK", 128, MANY_TILES, 1),
    select_config("NVFP4", "NVFP4", 64, MANY_TILES, 1, blocked=True),
    select_config("BF16", "MXFP4", 128, MANY_TILES, 1, blocked=True),
]


@pytest.mark.parametrize("config", CODE_CASES, ids=name_of)
def test_the_machine_code_is_what_it_should_be(config: Sm90Bf16Config, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), ARCH)
    assert code_complaints(instructions(kernel, tmp_path), config, kernel) == []


def main_loop(sass: list[str]) -> int:
    """Instructions between a full tile's first product and its last: of 128 of K, with three of four octets made."""
    products = [i for i, line in enumerate(sass) if line.startswith("HGMMA.64x128x16")]
    in_f16 = [i for i in products if ".BF16" not in sass[i].split()[0]]  # of MXFP4 x MXFP4 nearly all
    products = in_f16 or products
    return products[-1] - products[0]


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (CODE_CASES[0], 250),
        (select_config("MXFP8", "MXFP8", 128, MANY_TILES, 1), 400),
        (select_config("MXFP4", "MXFP4", 128, MANY_TILES, 1), 250),
    ],
    ids=["NVFP4", "MXFP8", "MXFP4"],
)
def test_the_main_loop_has_few_instructions(config: Sm90Bf16Config, most: int, tmp_path: Path) -> None:
    """What bounds the kernel beside the tensor core: docs/kernels/sm90_bf16/fragments.md counts them."""
    sass = instructions(jit.compile_kernel(KERNEL, config.prelude(), ARCH), tmp_path)
    m64s = config.block_n // 64 // config.num_warpgroups
    assert 24 * m64s * 4 < main_loop(sass) <= most  # 24 pairs of codes an m64 and thread


# --- planted: the same checks on kernels that are wrong ----------------------------------------------------

PLANTED = {
    # Fragments made while products are under way, and not carried round the loop.
    "(C7513)": (
        r"mbarrier_wait\(shared_address\(&shared.tokens_full\[from\]\), ring.phase\);",
        r"\g<0> section.make_fragments(fragments[0], 0);",
    ),
    "'setmaxnreg' ignored": (r"__launch_bounds__\([^)]*\)", ""),
    "spilled": (r"CONSUMER_REGISTERS = [^;]*;", "CONSUMER_REGISTERS = 128;"),
}


@pytest.mark.parametrize("complaint", PLANTED)
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch, complaint: str) -> None:
    edit_sources(monkeypatch, "sm90_bf16/", *PLANTED[complaint])
    prelude = f"// planted: {complaint}\n" + CODE_CASES[0].prelude()
    found = complaints(jit.compile_kernel(KERNEL, prelude, ARCH))
    assert any(complaint in line for line in found), found


def test_another_kernels_code_is_seen(tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, CODE_CASES[1].prelude(), ARCH)
    found = code_complaints(instructions(kernel, tmp_path), CODE_CASES[0], kernel)
    assert any("products" in complaint for complaint in found)
    assert "no transposing stmatrix" in found
