"""The MXFP8 weight-gradient kernel compiles for sm_100a as it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless.kernels.sm100_mxfp8_wgrad.host import KERNEL
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from padless.runtime.jit import compile_kernel
from support.machine_code import complaints, instructions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")
CONFIGS = [Mxfp8WgradConfig(), Mxfp8WgradConfig(out_dtype=torch.float32, accumulate=True)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "accumulates" if c.accumulate else str(c.out_dtype)[6:])
def test_the_machine_code_is_what_it_should_be(config: Mxfp8WgradConfig, tmp_path: Path) -> None:
    kernel = compile_kernel(KERNEL, config.prelude(), "sm_100a")
    assert complaints(kernel) == []
    assert kernel.num_stages == 6
    opcodes = {line.split()[0].split(".")[0] for line in instructions(kernel, tmp_path)}
    assert {"UTCQMMA", "UTCCP", "UTMALDG", "LDTM"} <= opcodes
    assert not opcodes & {"STL", "LDL"}
