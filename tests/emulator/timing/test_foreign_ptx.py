"""A stranger's kernel gets its timeline from one command: PTX that Triton wrote, a launch file, the caveats printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from padless.emulator.cli import app
from padless.emulator.launch_file import make_buffer

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

LAUNCH = """
grid = [2, 1, 1]
block = 128
shared_bytes = {shared}
args = ["a", "b", "c", 256, 128, {k}, 0, 0]
[buffers.a]
dtype = "bfloat16"
shape = [256, {k}]
fill = "random"
[buffers.b]
dtype = "bfloat16"
shape = [128, {k}]
fill = "random"
[buffers.c]
dtype = "bfloat16"
shape = [256, 128]
fill = "nan"
save = "c.npy"
"""


@triton.jit
def product(a, b, c, m, n, k, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    of_k = tl.arange(0, STEP)
    a += rows[:, None] * k + of_k[None, :]
    b += columns[None, :] * k + of_k[:, None]
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, k, STEP):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += STEP
        b += STEP
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))


@pytest.fixture(scope="module")
def compiled() -> tuple[str, int]:
    """PTX of a matrix product with asynchronous copies and wgmma, and its bytes of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys("abc", "*bf16") | dict.fromkeys("mnk", "i32") | dict.fromkeys(("TILE", "STEP"), "constexpr")
    source = ASTSource(product, types, {"TILE": 128, "STEP": 64}, {(i,): [["tt.divisibility", 16]] for i in range(6)})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    return kernel.asm["ptx"], kernel.metadata.shared


def emulate(folder: Path, compiled: tuple[str, int], k: int, *options: str) -> str:
    ptx, shared = compiled
    (folder / "k.ptx").write_text(ptx)
    (folder / "l.toml").write_text(LAUNCH.format(shared=shared, k=k))
    result = CliRunner().invoke(app, [str(folder / "k.ptx"), "--launch", str(folder / "l.toml"), *options])
    assert result.exit_code == 0, result.output
    return result.output


def cycles_of(text: str) -> int:
    found = re.search(r"H200: ([\d,]+) cycles", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_foreign_kernel_has_a_timeline_with_caveats(tmp_path: Path, compiled: tuple[str, int]) -> None:
    """64 more of K are 8 products of m64n128k16, 64 cycles each, and nothing of this kernel is slower than those."""
    trace = tmp_path / "t.json"
    short, long = (emulate(tmp_path, compiled, k, "--time", "--time-trace", str(trace)) for k in (256, 512))
    assert (cycles_of(long) - cycles_of(short)) / 4 == pytest.approx(512, rel=0.05)
    assert "binding between the first product and the last: tensor pipe" in long
    for words in ("caveats:", "rates of the H200", "operands are taken to be in L2", "left out:", "docs/timing.md"):
        assert words in long
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100


def test_the_same_kernel_is_right(tmp_path: Path, compiled: tuple[str, int]) -> None:
    """Without --time the launch file computes what it says, so that the timed problem is a real one."""
    emulate(tmp_path, compiled, 128)
    a, b = (
        (
            make_buffer(name, {"dtype": "bfloat16", "shape": [rows, 128], "fill": "random"}, tmp_path).astype(np.uint32)
            << 16
        )
        .view(np.float32)
        .astype(np.float64)
        for name, rows in (("a", 256), ("b", 128))
    )
    c = (np.load(tmp_path / "c.npy").astype(np.uint32) << 16).view(np.float32)
    assert np.abs(a).max() > 3
    assert np.abs(c - a @ b.T).max() < 0.01 * np.abs(a @ b.T).max()


def test_bfloat16_buffers_hold_the_numbers_asked_for(tmp_path: Path) -> None:
    for fill, bits in ((1, 0x3F80), (-0.5, 0xBF00), ("nan", 0x7FC0)):
        found = make_buffer("x", {"dtype": "bfloat16", "shape": [3], "fill": fill}, tmp_path)
        assert found.dtype == np.uint16
        assert found.tolist() == [bits] * 3
