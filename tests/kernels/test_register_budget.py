"""The warps of every kernel that moves registers with setmaxnreg ask for no more than their CTA has.

A kernel that does compiles, and hangs on hardware. The PTX says all that is needed, so this compiles only that far.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from padless.emulator.ptx.ast import Immediate, Instruction
from padless.emulator.ptx.parser import parse
from padless.emulator.state.register_pool import registers_at_launch
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16.config import QUANT_PAIRS
from padless.kernels.sm90_bf16_plain import host as bf16_plain
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_wgrad import host as bf16_wgrad
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.kernels.sm90_fp4_dgrad import host as fp4_dgrad
from padless.kernels.sm90_fp4_dgrad.config import Fp4DgradConfig
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_fp8.host_quant import LowRankConfig
from padless.kernels.sm90_fp8_wgrad import host as wgrad
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.kernels.sm90_moe_decode import host_fp4 as decode_fp4
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm100_grouped import host as sm100_grouped
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.table import PLAIN_ROUTES, ROUTES
from padless.runtime import jit
from support.machine_code import edit_sources

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

QUANT = Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn")


def bf16_configs() -> list[sm90_bf16.Sm90Bf16Config]:
    """One config for each way of dealing threads and tokens out that select_config knows, whatever the formats."""
    every = itertools.product(QUANT_PAIRS, (1, 16, 32, 64, 128), (False, True), (torch.bfloat16,))
    found = {}
    for pair, m, blocked, dtype in every:
        config = sm90_bf16.select_config(*pair, m, 4096, 1, blocked=blocked, out_dtype=dtype)
        found[config.num_warpgroups, config.block_m, config.block_n] = config
    return list(found.values())


FEW = Sm90Fp8Config(block_m=16, few_rows=True)
CONFIGS = {
    sm90_fp8.KERNEL: [Sm90Fp8Config(block_m=m, block_n=n) for m, n in ((64, 64), (128, 128), (128, 192), (256, 128))]
    + [QuantConfig(Sm90Fp8Config(block_m=m), QUANT) for m in (64, 128, 256)]
    + [LowRankConfig(Sm90Fp8Config(block_m=m), QUANT, 1) for m in (64, 128, 256)],
    FEW.source: [FEW, QuantConfig(FEW, QUANT)],
    sm90_mxfp8.KERNEL: [Sm90Mxfp8Config(block_m=m) for m in (64, 128)]
    + [QuantConfig(Sm90Mxfp8Config(block_m=m), QUANT) for m in (64, 128)],
    sm90_bf16.KERNEL: [*bf16_configs(), QuantConfig(bf16_configs()[-1], QUANT)],
    wgrad.KERNEL: [WgradConfig(block_m=128), WgradConfig(block_m=256)],
    bf16_plain.KERNEL: [Bf16PlainConfig(block_n=128), Bf16PlainConfig(block_n=256)],
    bf16_wgrad.KERNEL: [Bf16WgradConfig(block_n=128), Bf16WgradConfig(block_n=256)],
    fp4_dgrad.KERNEL: [Fp4DgradConfig("MXFP4"), Fp4DgradConfig("NVFP4", block_m=32)],
    decode_fp4.KERNEL: [MoeDecodeFp4Config(), MoeDecodeFp4Config(logits_room=128), MoeDecodeFp4Config(repacked=True)],
    sm100_grouped.KERNEL: [Sm100GroupedConfig(kind="FP8_BLOCK", mma_n=n) for n in (128, 256)],
}
CASES = [(kernel, i) for kernel, configs in CONFIGS.items() for i in range(len(configs))]


def complaint(kernel: str, prelude: str) -> str:
    """What is wrong with the registers that a kernel's warps ask for; empty if nothing."""
    arch = "sm_100a" if kernel == sm100_grouped.KERNEL else "sm_90a"
    compiled = jit.compile_kernel(kernel, prelude, arch, "ptx")
    entry = parse(compiled.image).functions[compiled.entry]
    body = [s for s in entry.body if isinstance(s, Instruction)]
    at_launch = registers_at_launch(entry, body)
    counts: dict[str, list[int]] = {"inc": [], "dec": []}
    for instruction in body:
        if instruction.opcode == "setmaxnreg":
            (count,) = instruction.operands
            assert isinstance(count, Immediate)
            counts[instruction.modifiers[0]].append(count.value)
    # Each decrease stands for one warpgroup, all others are consumers.
    consumers = compiled.num_threads // 128 - len(counts["dec"])
    if at_launch is None or len(set(counts["inc"])) != 1 or not counts["dec"] or consumers < 1:
        return f"{counts} with {at_launch} registers at launch"
    asked = 128 * (counts["inc"][0] * consumers + sum(counts["dec"]))
    given = compiled.num_threads * at_launch
    if asked > given or max(counts["dec"]) > at_launch or counts["inc"][0] < at_launch:
        return f"{counts} ask for {asked} of {given} registers, {at_launch} a thread"
    return ""


@pytest.mark.parametrize(("kernel", "i"), CASES)
def test_what_the_warps_ask_for_fits(kernel: str, i: int) -> None:
    assert complaint(kernel, CONFIGS[kernel][i].prelude()) == ""


def test_every_kernel_with_setmaxnreg_is_listed() -> None:
    using = {name for name, text in jit.sources().items() if name.endswith(".cu") and "setmaxnreg_inc<" in text}
    assert using == set(CONFIGS)
    others = {wgrad.KERNEL, bf16_wgrad.KERNEL, fp4_dgrad.KERNEL, decode_fp4.KERNEL, FEW.source}
    assert using <= {path.kernel for path in (*ROUTES, *PLAIN_ROUTES)} | others


@pytest.mark.parametrize("kernel", CONFIGS)
def test_eight_registers_too_many_are_seen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CTA has two consumer warpgroups or more; with one there is more than it can use."""
    edit_sources(
        monkeypatch, kernel, r"setmaxnreg_inc<(CONSUMER|PROMOTER)_REGISTERS>", r"setmaxnreg_inc<\1_REGISTERS + 8>"
    )
    text = complaint(kernel, "// planted\n" + CONFIGS[kernel][1].prelude())
    assert re.search(r"ask for \d+ of \d+ registers", text), text
