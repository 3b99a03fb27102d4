"""The stamps of tools/decode_stages.py find their places in the kernels as they are, and what comes out compiles. A
sceptic would say that a tool for a GPU breaks unseen: so a line that is gone is named, every stage of every launch of a
layer is stamped, and under its own number.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decode_stages
import padless

PACKAGE = Path(padless.__file__).parent
COMPILE = """
import sys
from padless import FP8_BLOCK
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.moe.fused import epilogue_of
from padless.runtime.jit import compile_kernel
glu = epilogue_of("concatenated", False, FP8_BLOCK)
few, rows = Sm90Fp8Config(16, 256, few_rows=True), Sm90Fp8Config(128, 128)
source, config = {
    "FP8_BLOCK": ("sm90_moe_decode/sm90_moe_decode.cu", MoeDecodeConfig()),
    "MXFP4": ("sm90_moe_decode/sm90_moe_decode_fp4.cu", MoeDecodeFp4Config()),
    "few": (few.source, few),
    "few, gate": (few.source, QuantConfig(few, glu)),
    "rows": (rows.source, rows),
    "fp4": ("sm90_bf16/sm90_bf16_grouped_gemm.cu", Sm90Bf16Config("BF16", "MXFP4", 16, 256, 4)),
}[sys.argv[1]]
prelude = config.prelude() + "#define STAMPS_AT 0x7f0000000000ull\\n"
print(compile_kernel(source, prelude, "sm_90a", "ptx").image.decode())
"""
PRODUCTS = {"few": 2, "few, gate": 1, "rows": 2, "fp4": 2}  # launches of a layer


@pytest.fixture(scope="module")
def stamped(tmp_path_factory):
    return decode_stages.with_stamps(PACKAGE, tmp_path_factory.mktemp("stamped"))


def compiled(stamped: Path, kernel: str) -> str:
    cache = {"PADLESS_CACHE_DIR": str(stamped.parent / "cache")}
    command = [sys.executable, "-c", COMPILE, kernel]
    environment = os.environ | {"PYTHONPATH": str(stamped.parent)} | cache
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def stamps_of(ptx: str) -> set[tuple[int, int]]:
    """(launch, stage) of all places that store the clock."""
    return {(int(launch), int(stage)) for launch, stage in re.findall(r"%globaltimer; // stamp (\d+) (\d+)", ptx)}


@pytest.mark.parametrize("format", decode_stages.ONE_LAUNCH)
def test_every_stage_of_one_launch_has_a_stamp(stamped, format):
    whole, stages = len(decode_stages.LAUNCHES), range(len(decode_stages.ONE_LAUNCH[format]))
    assert stamps_of(compiled(stamped, format)) == {(whole, stage) for stage in stages}


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_every_stage_of_a_product_has_a_stamp_of_its_launch(stamped, kernel):
    assert stamps_of(compiled(stamped, kernel)) == {(PRODUCTS[kernel], stage) for stage in range(6)}


def test_passes_say_when_they_enter_have_waited_and_end(stamped):
    for launch, places in decode_stages.PASSES.items():
        tree = ast.parse((stamped / places[0].file).read_text())
        (function,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and "stamp(" in ast.unparse(node) and "begin(" in ast.unparse(node)
        )
        calls = [
            ast.unparse(line)
            for line in function.body
            if isinstance(line, ast.Expr) and re.match(r"(stamp|begin)\(", ast.unparse(line))
        ]
        number = decode_stages.LAUNCHES.index(launch)
        assert calls == [f"stamp({number}, 0)", "begin(PROGRAMMATIC)", f"stamp({number}, 1)", f"stamp({number}, 2)"]
        assert ast.unparse(function.body[-1]) == calls[-1]


def test_a_place_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = decode_stages.Place("gone", "sm90_bf16/load.cuh", "no such line")
    monkeypatch.setattr(decode_stages, "PRODUCTS", {"sm90_bf16": (gone,)})
    with pytest.raises(
        ValueError, match=r"no place for the stamp 'gone': sm90_bf16/load.cuh has no line 'no such line'"
    ):
        decode_stages.with_stamps(PACKAGE, tmp_path)


class Replayed:
    """A graph whose replays store what the clock would have been."""

    def __init__(self, stamps: torch.Tensor) -> None:
        self.stamps, self.count = stamps, 0

    def replay(self) -> None:
        self.count += 1
        now = 10**9 + self.count * 10**6
        self.stamps[0, :4, 1] = now
        self.stamps[1, :3, 0] = now + torch.tensor([-1000, 500, 2000])
        self.stamps[1, 3, 0] = now - 10**5  # of a layer before


def test_times_are_of_ctas_that_the_last_layer_had(monkeypatch):
    class Event:
        def record(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 0.12

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stamps = torch.zeros(5, decode_stages.MOST_CTAS, decode_stages.MOST_STAGES, dtype=torch.int64)
    stages = [("routing: entered", 0, 0), ("routing: waited", 0, 1), ("first product: entered", 1, 0)]
    record = decode_stages.timed(Replayed(stamps), stamps, 6, stages)
    assert record == {
        "us": 20.0,
        "stages_ns": {"routing: waited": [0, 0, 0], "first product: entered": [-1000, 500, 2000]},
    }
