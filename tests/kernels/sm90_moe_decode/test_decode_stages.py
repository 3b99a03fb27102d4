"""The stamps of tools/decode_stages.py find their places in the kernels as they are, and what comes out compiles. A
sceptic would say that a tool for a GPU breaks unseen: so a line that is gone is named.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import decode_stages
import padless

PACKAGE = Path(padless.__file__).parent
COMPILE = """
import sys
from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.runtime.jit import compile_kernel
name, config = {
    "FP8_BLOCK": ("sm90_moe_decode", MoeDecodeConfig), "MXFP4": ("sm90_moe_decode_fp4", MoeDecodeFp4Config)
}[sys.argv[1]]
prelude = config().prelude() + "#define STAMPS_AT 0x7f0000000000ull\\n"
kernel = compile_kernel(f"sm90_moe_decode/{name}.cu", prelude, "sm_90a", "ptx")
print(kernel.image.decode().count("%globaltimer"))
"""


@pytest.mark.parametrize("format", decode_stages.STAGES)
def test_every_stage_has_a_stamp_and_the_kernel_compiles(tmp_path, format):
    copy = decode_stages.with_stamps(PACKAGE, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(copy.parent), "PADLESS_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILE, format]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) >= len(decode_stages.STAGES[format])


def test_a_place_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = ("gone", "load.cuh", "no such line", True, "true")
    monkeypatch.setattr(decode_stages, "STAGES", {"FP8_BLOCK": (gone,)})
    with pytest.raises(ValueError, match=r"no place for the stamp 'gone': load.cuh has no line 'no such line'"):
        decode_stages.with_stamps(PACKAGE, tmp_path)
