"""The MXFP8 weight-gradient kernel compiles for sm_100a as it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from padless.kernels.sm100_mxfp8_wgrad.host import KERNEL
from padless.runtime.jit import compile_kernel
from support.machine_code import complaints, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")
CONFIGS = {
    "bfloat16": Mxfp8WgradConfig(),
    "accumulates": Mxfp8WgradConfig(out_dtype=torch.float32, accumulate=True),
    "pair": Mxfp8WgradConfig(cta_group=2),
    "pair accumulates": Mxfp8WgradConfig(out_dtype=torch.float32, accumulate=True, cta_group=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_machine_code_is_what_it_should_be(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    kernel = compile_kernel(KERNEL, config.prelude(), "sm_100a")
    assert complaints(kernel) == []
    assert kernel.num_stages == 6
    lines = {line.split()[0] for line in instructions(kernel, tmp_path)}
    opcodes = {line.split(".")[0] for line in lines}
    assert {"UTCQMMA", "UTCCP", "UTMALDG", "LDTM"} <= opcodes
    assert not opcodes & {"STL", "LDL"}
    of_pairs = {line.split(".")[0] for line in lines if ".2CTA" in line}
    assert of_pairs >= {"UTCQMMA", "UTCCP", "UTMALDG", "UTCBAR"} if config.cta_group == 2 else not of_pairs
    assert {".2CTA" in line for line in lines if line.startswith(("UTCQMMA", "UTCCP"))} == {config.cta_group == 2}
