"""The decoding layer's kernel compiles for sm_90a, without spills and into the right instructions; its rings fit."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from padless.epilogue import GateRule
from padless.kernels.sm90_moe_decode import config as decode_config
from padless.kernels.sm90_moe_decode import config_fp4, host_fp4
from padless.kernels.sm90_moe_decode.choice import LOGITS_ROOMS
from padless.kernels.sm90_moe_decode.config import LayerShape, MoeDecodeConfig
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.kernels.sm90_moe_decode.host import KERNEL
from padless.runtime import jit
from support.machine_code import complaints, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")


@pytest.mark.parametrize("most_tokens", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_kernel_compiles_into_what_it_should(most_tokens: int, tmp_path: Path) -> None:
    kernel = jit.compile_kernel(KERNEL, MoeDecodeConfig(most_tokens).prelude(), "sm_90a")
    assert complaints(kernel) == []
    sass = instructions(kernel, tmp_path)
    opcodes = {line.split()[0] for line in sass}
    assert not [o for o in opcodes if re.match(r"(LDL|STL)\b", o)], "local memory"
    products = {m[1] for line in sass if (m := re.match(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3", line))}
    assert products == {str(8 * n) for n in range(1, most_tokens // 2 + 2)}
    assert {"UTMALDG.5D", "UTMALDG.3D"} <= opcodes
    assert any(o.startswith("LDG.E.128.STRONG.GPU") for o in opcodes), "hidden rows past L1"
    assert any(o.startswith("STG.E.STRONG.GPU") for o in opcodes)


@pytest.mark.parametrize("repacked", [False, True])
@pytest.mark.parametrize("rule", [GateRule(1.702, 7.0, 1.0), None], ids=["gpt-oss", "plain"])
def test_the_kernel_of_fp4_weights_compiles_into_what_it_should(
    rule: GateRule | None, repacked: bool, tmp_path: Path
) -> None:
    kernel = jit.compile_kernel(host_fp4.KERNEL, MoeDecodeFp4Config(rule, repacked=repacked).prelude(), "sm_90a")
    assert complaints(kernel) == []
    sass = instructions(kernel, tmp_path)
    opcodes = {line.split()[0] for line in sass}
    assert not [o for o in opcodes if re.match(r"(LDL|STL)\b", o)], "local memory"
    assert {o for o in opcodes if "MMA" in o} == {"HMMA.16816.F32.BF16"}
    assert "UTMALDG.2D" in opcodes
    assert ("UTMALDG.5D" in opcodes) == repacked
    assert any(o.startswith("LDG.E.128.STRONG.GPU") for o in opcodes), "hidden rows past L1"
    assert any(o.startswith("STG.E.STRONG.GPU") for o in opcodes)


def test_repacked_codes_take_fewer_instructions(tmp_path: Path) -> None:
    """Both loops of a stage: 16 octets of either row with four instructions less each."""
    counts = []
    for repacked in (False, True):
        compiled = jit.compile_kernel(host_fp4.KERNEL, MoeDecodeFp4Config(repacked=repacked).prelude(), "sm_90a")
        opcodes = Counter(line.split()[0] for line in instructions(compiled, tmp_path))
        counts.append(sum(n for o, n in opcodes.items() if re.match(r"LOP3|SHF|IMAD\.SHL|PRMT", o)))
    assert counts[0] - counts[1] >= 2 * 8 * 2 * 4, counts


@pytest.mark.slow
@pytest.mark.parametrize("room", LOGITS_ROOMS)
@pytest.mark.parametrize("kernel", [KERNEL, host_fp4.KERNEL])
def test_kernels_that_choose_experts_do_not_spill(kernel: str, room: int, tmp_path: Path) -> None:
    """In the larger of two kernels there is least shared memory left."""
    fp8 = kernel == KERNEL
    if not fp8 and room > host_fp4.MOST_LOGITS_ROOM:
        return  # not taken
    config = MoeDecodeConfig(16, logits_room=room) if fp8 else MoeDecodeFp4Config(None, logits_room=room)
    compiled = jit.compile_kernel(kernel, config.prelude(), "sm_90a")
    assert complaints(compiled) == []
    opcodes = {line.split()[0] for line in instructions(compiled, tmp_path)}
    assert not [o for o in opcodes if re.match(r"(LDL|STL)\b", o)], "local memory"
    assert {"REDUX.MAX", "REDUX.MIN"} <= {o.removesuffix(".U32") for o in opcodes}


def test_constants_of_fp4_are_those_of_the_device() -> None:
    text = jit.sources()["sm90_moe_decode/fp4/storage.cuh"]
    for line in ("POOL_BYTES = 220 * 1024;", "STAGES = 8;", "STAGE_K = 256;", "NUM_CONSUMER_WARPS = 16;"):
        assert f"constexpr int {line}" in text
    assert (config_fp4.POOL_BYTES, config_fp4.MOST_STAGES, config_fp4.STAGE_K) == (220 * 1024, 8, 256)
    assert config_fp4._WARPS * config_fp4._STAGE_BYTES == 16 * (16 * 128 + 2 * 256)


def test_constants_are_those_of_the_device() -> None:
    text = "".join(jit.sources()[f"sm90_moe_decode/{name}.cuh"] for name in ("common", "storage"))
    names = {
        "POOL_BYTES": "POOL_BYTES",
        "STAGES": "MOST_STAGES",
        "MOST_SHARES": "MOST_SHARES",
        "MOST_TOP_K": "MOST_TOP_K",
    }
    for device, host in names.items():
        (value,) = re.findall(rf"constexpr int {device} = ([\d *]+);", text)
        product = 1
        for factor in value.split("*"):
            product *= int(factor)
        assert product == getattr(decode_config, host), device
    assert "constexpr int EXPERT_WORDS = 128;" in text
    assert decode_config.MOST_EXPERTS == 32 * 128
    assert "constexpr int MOST_K_BLOCKS = 64;" in jit.sources()["sm90_moe_decode/multiply.cuh"]
    assert decode_config.MOST_K == 64 * 128


def test_what_fits_fits() -> None:
    """Bytes of the pool, counted as storage.cuh places them."""
    seen = set()
    for tokens, top_k, h, i in itertools.product(
        (1, 3, 8, 9, 16), (1, 8, 16), (128, 2048, 7168, 8192), (128, 1408, 8192)
    ):
        shape = LayerShape(tokens, top_k, 8, h, i)
        rows = -(-tokens * top_k // 8) * 8
        codes = max(shape.most_tokens * h, rows * i)
        used = 2 * shape.stages * 8192 + codes + codes // 128 * 4 + 2 * rows * 32
        if shape.fits:
            assert used <= decode_config.POOL_BYTES
            assert codes % 1024 == 0, "codes and rings begin on an atom of the swizzle"
        seen.add(shape.fits)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "change",
    [{"tokens": 17}, {"tokens": 0}, {"top_k": 17}, {"experts": 4097}, {"h": 192}, {"i": 64}, {"h": 8320}, {"i": 0}],
)
def test_what_does_not_fit(change: dict[str, int]) -> None:
    sizes = {"tokens": 1, "top_k": 2, "experts": 8, "h": 256, "i": 128}
    assert LayerShape(**sizes).fits
    assert not LayerShape(**(sizes | change)).fits


def test_a_wrong_configuration_is_refused() -> None:
    for field, value in (("most_tokens", 12), ("spin_limit", -1)):
        with pytest.raises(ValueError, match=field):
            MoeDecodeConfig(**{field: value})
