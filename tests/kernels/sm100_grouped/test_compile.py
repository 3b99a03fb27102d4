"""The grouped Blackwell kernel as the compiler made it: the right instructions, nothing spilled, inside its budgets."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from padless.kernels.sm100_grouped.config import KINDS, Sm100GroupedConfig
from padless.runtime import jit
from support.machine_code import SHARED_LIMIT, instructions
from support.machine_code import complaints as common_complaints

KERNEL = "sm100_grouped/sm100_grouped_gemm.cu"
C = Sm100GroupedConfig
TILED = {"scales_a": "tiled", "scales_b": "tiled", "groups_on_tiles": True, "wide_stores": True}
CASES = {
    "128x128": C(),
    "128x128 tiled": C(**TILED),
    "128x256 NVFP4": C(mma_n=256, kind="NVFP4", **TILED),
    "pair 256x256 NVFP4": C(cta_group=2, mma_n=256, kind="NVFP4", **TILED),
    "pair 256x256 NVFP4 gathered": C(cta_group=2, mma_n=256, kind="NVFP4", wide_stores=True),
    "pair 256x256 MXFP8": C(cta_group=2, mma_n=256, **TILED),
    "two pairs 256x256 NVFP4": C(cta_group=2, mma_n=256, multicast=2, kind="NVFP4", **TILED),
    "four 128x128": C(multicast=4, scales_b="tiled"),
    "pair 256 tokens MXFP4 column-major": C(
        cta_group=2, mma_n=256, tokens_on_n=True, kind="MXFP4", column_major=True, **TILED
    ),
    "pair 32 tokens float32": C(cta_group=2, mma_n=32, tokens_on_n=True, out_dtype=torch.float32, scales_a="plain"),
    "64 tokens list": C(mma_n=64, tokens_on_n=True, kind="NVFP4", problem_list=True, out_dtype=torch.float16),
    "pair 64 tokens, MXFP4 weights": C(cta_group=2, mma_n=64, tokens_on_n=True, b_e2m1=True, scales_b="tiled"),
    "pair 256x128 FP8_BLOCK": C(cta_group=2, kind="FP8_BLOCK", scales_a="plain", scales_b="plain"),
    "1024 groups e5m2": C(cta_group=2, mma_n=256, a_e5m2=True, max_groups=1024, groups_on_tiles=True),
}
MANY = {
    f"{kind} {g} {n} {t} {a}": C(kind=kind, cta_group=g, mma_n=n, tokens_on_n=t, scales_a=a, out_dtype=dtype)
    for (kind, g, n, t), (a, dtype) in itertools.product(
        itertools.product(KINDS, (1, 2), (32, 64, 128, 256), (False, True)),
        (("window", torch.bfloat16), ("plain", torch.float32)),
    )
}


def compiled(config: Sm100GroupedConfig) -> jit.CompiledKernel:
    return jit.compile_kernel(KERNEL, config.prelude(), "sm_100a")


def constant(kernel: jit.CompiledKernel, name: str) -> int:
    return jit._constant(kernel.image, "cubin", f"padless_{name}")


def complaints(config: Sm100GroupedConfig, kernel: jit.CompiledKernel) -> list[str]:
    found = common_complaints(kernel)
    if config.num_stages == 0 and kernel.num_stages < 24:
        with_one_more = kernel.shared_bytes + constant(kernel, "stage_bytes") + 16
        if with_one_more <= SHARED_LIMIT:
            found.append(f"a stage more would fit: {with_one_more} bytes")
    used, columns, shared = (constant(kernel, f"tmem_{name}") for name in ("used", "columns", "shared"))
    if not (used <= columns <= 512 and columns & (columns - 1) == 0):
        found.append(f"{used} of {columns} columns of tensor memory")
    if config.kind == "FP8_BLOCK":  # four units, with the sums in the last ones
        return found + (["units"] if used != 4 * min(config.mma_n, 128) else [])
    atoms = {"MXFP8": 1, "NVFP4": 4, "MXFP4": 2}[config.kind]
    scales = 4 * atoms * (1 + -(-config.mma_n // 128))
    if used != 2 * config.mma_n + scales - shared or (shared > 0) != (2 * config.mma_n + scales > 512):
        found.append(f"{used} columns of tensor memory used, {shared} of them by both accumulators")
    return found


def code_complaints(config: Sm100GroupedConfig, sass: list[str]) -> list[str]:
    opcodes = {line.split()[0] for line in sass}
    found = [f"{o} (local memory)" for o in opcodes if re.match(r"(LDL|STL)\b", o)]
    found += [f"{o} (another tensor core)" for o in opcodes if re.match(r"(HMMA|QMMA|OMMA|IMMA)\b", o)]
    pair = ".2CTA" if config.cta_group == 2 else ""
    eight = f"UTCQMMA{pair}"
    product = {"NVFP4": f"UTCOMMA{pair}.4X", "MXFP4": f"UTCOMMA{pair}"}.get(config.kind, eight)
    found += [f"product {o}, not {product}" for o in opcodes if re.match(r"UTC[A-Z]MMA", o) and o != product]
    wanted = {product, f"UTMALDG.3D{pair}", "LDTM.x32"}
    wanted.add("STTM.x32" if config.kind == "FP8_BLOCK" else f"UTCCP.T.S{pair}.4x32dp128bit")
    wanted |= {f"UTMALDG.4D{pair}"} if config.b_e2m1 else set()
    wanted.add("UTCBAR.2CTA.MULTICAST" if pair else "UTCBAR")
    if config.multicast > 1:
        wanted |= {f"UTMALDG.3D.MULTICAST{pair}", f"UTCBAR{pair}.MULTICAST"}
    elif any(".MULTICAST" in o for o in opcodes if o.startswith("UTMALDG")):
        found.append("a load is multicast")
    wide = config.wide_stores and config.tokens_on_n == config.column_major
    wanted |= {"STG.E.NA.ENL2.256"} if wide else set()
    found += [f"no {o}" for o in sorted(wanted) if not any(have.startswith(o) for have in opcodes)]
    found += [f"{o} (of a pair)" for o in opcodes if ".2CTA" in o and not pair]
    gathers = "window" in (config.scales_a, config.scales_b)
    if gathers != ("LDG.E.128.CONSTANT" in opcodes):
        found.append("scales gathered" + (" by no load of 16 bytes" if gathers else ""))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_machine_code_is_what_it_should_be(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    kernel = compiled(config)
    assert complaints(config, kernel) == []
    assert code_complaints(config, instructions(kernel, tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_every_tile_compiles(name: str) -> None:
    assert complaints(MANY[name], compiled(MANY[name])) == []


def test_another_kernels_code_is_seen(tmp_path: Path) -> None:
    sass = instructions(compiled(CASES["128x128"]), tmp_path)
    assert "no UTCQMMA.2CTA" in code_complaints(C(cta_group=2), sass)
    assert any("not UTCOMMA" in complaint for complaint in code_complaints(C(kind="MXFP4"), sass))
    assert any("STG" in complaint for complaint in code_complaints(C(wide_stores=True), sass))
    assert "no UTMALDG.3D.MULTICAST" in code_complaints(C(multicast=2), sass)
    shares = instructions(compiled(CASES["four 128x128"]), tmp_path)
    assert "a load is multicast" in code_complaints(C(), shares)
    few = jit.compile_kernel(KERNEL, C(num_stages=3).prelude(), "sm_100a")
    assert any("would fit" in complaint for complaint in complaints(C(), few))


def test_the_columns_of_tensor_memory_of_the_widest_tiles() -> None:
    """Two accumulators of 256 columns and the scales of 128 and 256 rows: 12, 48 or 24 columns more than there are."""
    shared = {kind: constant(compiled(C(mma_n=256, kind=kind)), "tmem_shared") for kind in KINDS[:3]}
    assert shared == {"MXFP8": 32, "NVFP4": 64, "MXFP4": 32}
