"""Every dense MXFP8 kernel that can be asked for compiles for sm_100a: no spills, and the right instructions."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from padless.formats import OUT_DTYPES
from padless.kernels.sm100_dense.config import DenseProblem, Sm100DenseConfig, select_config
from padless.kernels.sm100_dense.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, edit_sources, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

PAIR = Sm100DenseConfig()
ONE = Sm100DenseConfig(cta_group=1, block_n=128)


@cache
def selectable() -> set[Sm100DenseConfig]:
    """Every config select_config gives, on a grid of problems finer than its choices; e4m3 operands."""
    sizes = (1, 100, 128, 129, 512, 1024, 2048, 4096, 8192, 16384)
    return {
        select_config(DenseProblem(m, n, k, dtype, num_sms=sms, can_stage=stage))
        for m, n, k in itertools.product(sizes, sizes, (32, 8192))
        for dtype, sms, stage in itertools.product(OUT_DTYPES, (1, 2, 132, 148), (False, True))
    }


ALTERNATIVES = [
    dataclasses.replace(PAIR, chunk_columns=32, out_dtype=torch.float32),
    dataclasses.replace(PAIR, chunk_columns=128, out_dtype=torch.float32),
    dataclasses.replace(PAIR, chunk_columns=128, store="staged", store_bytes=128),
    dataclasses.replace(PAIR, store="staged", store_bytes=128, out_dtype=torch.float32, block_k=256),
    dataclasses.replace(PAIR, num_stages=6, a_dtype=torch.float8_e5m2),
    dataclasses.replace(PAIR, block_n=128, store="staged", out_dtype=torch.float16),
    dataclasses.replace(ONE, block_n=256, b_dtype=torch.float8_e5m2),
    dataclasses.replace(ONE, tile_order="hilbert", store="staged", out_dtype=torch.float32),
]


def name_of(c: Sm100DenseConfig) -> str:
    types = "-".join(str(d).removeprefix("torch.") for d in (c.a_dtype, c.b_dtype, c.out_dtype))
    store = f"{c.store}{c.store_bytes if c.store == 'staged' else ''}"
    return f"{c.tile[0]}x{c.block_n}x{c.block_k}-{c.num_stages}-{store}-{c.tile_order}-{c.chunk_columns}-{types}"


# Every store, tile and order is among the quick ones; other output types of the same are slow.
CASES = [
    pytest.param(
        config,
        id=name_of(config),
        marks=[pytest.mark.slow] if config in selectable() and config.out_dtype != torch.bfloat16 else [],
    )
    for config in sorted(selectable() | set(ALTERNATIVES), key=name_of)
]


def code_complaints(sass: list[str], config: Sm100DenseConfig) -> list[str]:
    """What is wrong with the instructions."""
    opcodes = Counter(line.split()[0] for line in sass)
    pair = ".2CTA" if config.cta_group == 2 else ""
    slabs = 2  # of 128 of K in a round
    found = [f"{o} (local memory)" for o in opcodes if re.match(r"(LDL|STL)\b", o)]

    def expect(pattern: str, wanted: dict[str, int]) -> None:
        """The opcodes that match are these and no others, at least so often: the compiler may unroll loops."""
        have = {o: n for o, n in opcodes.items() if re.match(pattern, o)}
        found.extend(f"{o}, which should not be there" for o in have.keys() - wanted.keys())
        found.extend(f"{have.get(o, 0)} {o}, not {n}" for o, n in wanted.items() if have.get(o, 0) < n)

    expect(r"UTC\w*MMA|U?T?[HIQO]G?MMA", {f"UTCQMMA{pair}": slabs * 4})
    # One atom of scales of A and one for each 128 columns of B to a slab, to all four quarters of the lanes.
    copy = "UTCCP.T.S.2CTA.4x32dp128bit" if pair else "UTCCP.T.S.4x32dp128bit"
    expect("UTCCP", {copy: slabs * (1 + config.block_n // 128)})
    expect("UTCBAR", {"UTCBAR.2CTA.MULTICAST" if pair else "UTCBAR": 2})
    expect("LDTM", {f"LDTM.x{config.chunk_columns}": 1})
    loads = {f"UTMALDG.2D{pair}": 2, f"UTMALDG.3D{pair}": 1}
    if pair:
        loads["UTMALDG.3D.MULTICAST.2CTA"] = 1
    expect("UTMALDG", loads)

    words = config.chunk_columns * config.out_dtype.itemsize // 4
    direct = config.store == "direct"
    expect(r"STG\S*256|ST\S*NA", {"STG.E.NA.ENL2.256": words // 8} if direct else {})
    expect("UTMASTG", {} if direct else {"UTMASTG.2D": words * 4 // config.store_bytes})
    expect(r"STS\.128", {} if direct else {"STS.128": words // 4})
    packed = {torch.bfloat16: "F2FP.BF16", torch.float16: "F2FP.F16", torch.float32: None}[config.out_dtype]
    if packed is not None and not any(o.startswith(packed) for o in opcodes):
        found.append(f"no {packed}")
    return found


@pytest.mark.parametrize("config", CASES)
def test_a_kernel_compiles_into_what_it_should_be(config: Sm100DenseConfig, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_100a")
    assert complaints(kernel) == []
    assert kernel.num_threads == 192
    assert kernel.registers <= 2.5 * config.chunk_columns / 2 + 96
    assert config.num_stages in (0, kernel.num_stages)
    sass = instructions(kernel, tmp_path)
    assert len(sass) > 300
    assert code_complaints(sass, config) == []


def test_the_default_kernel_compiles_for_the_newer_chip() -> None:
    assert complaints(jit.compile_kernel(KERNEL, PAIR.prelude(), "sm_103a")) == []


def test_as_many_stages_as_fit() -> None:
    """Six stages of 128 elements of K, with and without room for the staged store."""
    for config in (PAIR, dataclasses.replace(PAIR, store="staged")):
        kernel = jit.compile_kernel(KERNEL, config.prelude(), "sm_100a")
        assert kernel.num_stages == 6
        one_more = dataclasses.replace(config, num_stages=7)
        with pytest.raises(jit.CompileError, match="does not fit in shared memory"):
            jit.compile_kernel(KERNEL, one_more.prelude(), "sm_100a")


def test_everything_that_can_be_selected_is_looked_at() -> None:
    chosen = {(c.cta_group, c.block_n, c.store, c.tile_order) for c in selectable()}
    assert chosen >= {(2, 256, "direct", "hilbert"), (2, 256, "direct", "row"), (1, 128, "direct", "row")}
    assert all(c.block_k == 128 and c.num_stages == 0 for c in selectable())


@pytest.mark.parametrize(
    ("compiled", "expected", "complaint"),
    [
        (ONE, dataclasses.replace(ONE, cta_group=2), "0 UTCQMMA.2CTA, not 8"),
        (PAIR, dataclasses.replace(PAIR, store="staged"), "0 UTMASTG.2D"),
        (dataclasses.replace(PAIR, block_n=128), PAIR, "4 UTCCP.T.S.2CTA.4x32dp128bit, not 6"),
        (PAIR, dataclasses.replace(PAIR, cta_group=1, block_n=128), "UTCQMMA.2CTA, which should not"),
        (PAIR, dataclasses.replace(PAIR, chunk_columns=32), "LDTM.x64, which should not"),
        (dataclasses.replace(PAIR, out_dtype=torch.float16), PAIR, "no F2FP.BF16"),
    ],
    ids=["pair", "store", "columns", "one", "chunk", "dtype"],
)
def test_another_kernels_code_is_seen(
    tmp_path: Path, compiled: Sm100DenseConfig, expected: Sm100DenseConfig, complaint: str
) -> None:
    sass = instructions(jit.compile_kernel(KERNEL, compiled.prelude(), "sm_100a"), tmp_path)
    found = code_complaints(sass, expected)
    assert any(text.startswith(complaint) for text in found), found


def test_barriers_in_a_local_array_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fault that the static addressing of barriers avoids: parities in an array that a variable indexes."""
    for old, new in (
        ("shared.full[stage]), here.phase);", "shared.full[stage]), parity[stage]); parity[stage] ^= 1;"),
        ("uint32_t turn = 0;  // tiles before", "uint32_t parity[STAGES] = {}; uint32_t turn = 0;  // tiles before"),
    ):
        edit_sources(monkeypatch, KERNEL, re.escape(old), new)
    kernel = jit.compile_kernel(KERNEL, "// planted\n" + PAIR.prelude(), "sm_100a")
    assert any("stack" in complaint for complaint in complaints(kernel))
    assert any("local memory" in complaint for complaint in code_complaints(instructions(kernel, tmp_path), PAIR))
