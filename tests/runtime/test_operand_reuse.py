"""Operands kept for the next multiply-add: what may be marked, and that nothing else of a kernel changes.

A sceptic would ask: is a mark ever set where the next instruction is not certain to be the FFMA with the same operand?
Does anything but the marks change? Is anything marked at all?
"""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.runtime import jit, operand_reuse
from padless.runtime.operand_reuse import keep_shared_operands
from support.machine_code import cuobjdump

pytestmark = pytest.mark.kernels

KERNEL = "sm90_fp8/sm90_fp8_grouped_gemm.cu"
GLU = Epilogue(activation="swiglu", gate_up="concatenated", row_format=FP8_BLOCK)
CONFIGS = {
    "256x128": Sm90Fp8Config(block_m=256, cluster_n=2),
    "128x192": Sm90Fp8Config(block_n=192, raster_m=16),
    "128x128, pool, row-major scales": Sm90Fp8Config(store="pool", scales="k", scale_window_k_blocks=32),
    "128x128, float32": Sm90Fp8Config(cluster_n=2, out_dtype=torch.float32),
    "SwiGLU": QuantConfig(Sm90Fp8Config(block_m=256, cluster_n=2), dataclasses.replace(GLU)),
}


def both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Sm90Fp8Config) -> tuple[bytes, bytes]:
    """The kernel as the compiler made it, and as it is launched."""
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_in_memory", {})
    plain: list[bytes] = []

    def noted(cubin: bytes, entry: str, run: int) -> bytes:
        plain.append(cubin)
        return keep_shared_operands(cubin, entry, run)

    monkeypatch.setattr(operand_reuse, "keep_shared_operands", noted)
    launched = jit.compile_kernel(KERNEL, config.prelude(), "sm_90a").image
    assert len(plain) == 1
    return plain[0], launched


def listing(cubin: bytes, folder: Path) -> list[str]:
    """Instructions and labels of the kernel, in order, without addresses."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = cuobjdump().parent / "nvdisasm"
    text = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True, check=True).stdout
    lines = (re.sub(r"/\*[0-9a-f]+\*/", "", line).strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"\.L_x_\d+:|(@!?U?P\w+\s+)?[A-Z][A-Z0-9_.]+ ?.*;$", line)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_only_marks_change_and_each_is_used_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Sm90Fp8Config
) -> None:
    plain, launched = both(monkeypatch, tmp_path, config)
    before, after = listing(plain, tmp_path), listing(launched, tmp_path)
    assert [line.replace(".reuse", "") for line in before] == [line.replace(".reuse", "") for line in after]
    new = [i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a.count(".reuse") > b.count(".reuse")]
    assert len(new) > 20
    multiply_add = re.compile(r"FFMA R(\d+), R\d+(?:\.reuse)?, R(\d+)(\.reuse)?, R\d+(?:\.reuse)? ;")
    for i in new:
        one, following = (multiply_add.fullmatch(after[j]) for j in (i, i + 1))  # no label, and no predicate
        assert one is not None, after[i]
        assert one[3] is not None, after[i]
        assert following is not None, after[i : i + 2]
        assert following[2] == one[2] != one[1]
    # Bit for bit: bits 45 and 59 of the upper halves of instructions.
    assert len(plain) == len(launched)
    differing = [i for i in range(len(plain)) if plain[i] != launched[i]]
    assert {(i - differing[0]) % 16 for i in differing} <= {0, 2, 14}
    assert {plain[i] ^ launched[i] for i in differing} <= {1 << 3, 1 << 5}


# --- on machine code of our own --------------------------------------------------------------------------

KEEP, HOLD = 1 << 59, 1 << 45
ALWAYS, P0 = 7, 0


def ffma(d: int, a: int, b: int, *, predicate: int = ALWAYS) -> tuple[int, int]:
    return 0x223 | predicate << 12 | d << 16 | a << 24 | b << 32, d


def branch(words: int) -> tuple[int, int]:
    """To so many words of four bytes after it."""
    words &= (1 << 56) - 1
    return 0x947 | ALWAYS << 12 | (words & 0xFF) << 16 | (words >> 8 << 34) & (1 << 64) - 1, words >> 38


def other(opcode: int = 0x210) -> tuple[int, int]:
    return opcode | ALWAYS << 12, 0


def elf(code: list[tuple[int, int]], entry: str = "k") -> bytes:
    """A file with a section of names and one of code, as far as the reader looks."""
    text = b"".join(struct.pack("<QQ", *instruction) for instruction in code)
    names = b"\0.text." + entry.encode() + b"\0"
    body = 64 + len(names)
    headers = [(0,) * 10, (0, 3, 0, 0, 64, len(names), 0, 0, 0, 0), (1, 1, 0, 0, body, len(text), 0, 0, 0, 0)]
    start = bytearray(64)
    struct.pack_into("<Q", start, 40, body + len(text))
    struct.pack_into("<HHH", start, 58, 64, 3, 1)
    return bytes(start) + names + text + b"".join(struct.pack("<IIQQQQIIQQ", *h) for h in headers)


def marks(code: list[tuple[int, int]], run: int) -> str:
    """For each instruction: K kept and held, - neither."""
    image = elf(code)
    changed = keep_shared_operands(image, "k", run)
    at = 64 + len("\0.text.k\0")
    found = ""
    for i, (low, high) in enumerate(code):
        new_low, new_high = struct.unpack_from("<QQ", changed, at + i * 16)
        assert new_low == low
        assert new_high & ~(KEEP | HOLD) == high & ~(KEEP | HOLD)
        assert bool(new_high & KEEP) == bool(new_high & HOLD)
        found += "K" if new_high & KEEP else "-"
    return found


SIX = [ffma(10 + i, 20 + i, 5) for i in range(6)]


@pytest.mark.parametrize(
    ("code", "run", "expected"),
    [
        (SIX, 6, "KKKKK-"),
        (SIX, 12, "KKKKK-"),
        (SIX, 4, "KKK-K-"),
        (SIX, 2, "K-K-K-"),
        (SIX, 1, "------"),
        (SIX, 0, "------"),
        ([*SIX[:2], other(), *SIX[2:]], 8, "K--KKK-"),
        ([*SIX[:2], ffma(9, 9, 6), *SIX[2:]], 8, "K--KKK-"),  # another scale
        ([*SIX[:2], ffma(12, 22, 5, predicate=P0), *SIX[3:]], 8, "K--KK-"),  # may not be executed
        ([*SIX[:2], ffma(5, 22, 5), *SIX[3:]], 8, "KK-KK-"),  # writes the scale
        ([*SIX, branch(4 * -5)], 8, "K-KKK--"),  # back to the third
        ([*SIX, branch(4 * -7)], 8, "KKKKK--"),  # back to the first
        ([branch(4 * 3), *SIX], 8, "-KK-KK-"),  # to the fourth
        ([*SIX, other(0x949)], 8, "-------"),  # a branch to anywhere
    ],
)
def test_marks_of_runs(code: list[tuple[int, int]], run: int, expected: str) -> None:
    assert marks(code, run) == expected


def test_a_cubin_without_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel other"):
        keep_shared_operands(elf(SIX), "other", 4)


def test_a_longer_run_is_another_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, launched = both(monkeypatch, tmp_path, CONFIGS["256x128"])
    sources = dict(jit.sources())
    where = "sm90_fp8/storage.cuh"
    sources[where] = re.sub(r"(padless_reuse_run = ).*;", r"\g<1>0;", sources[where])
    monkeypatch.setattr(jit, "sources", lambda: sources)
    monkeypatch.setattr(jit, "_in_memory", {})
    assert jit.compile_kernel(KERNEL, CONFIGS["256x128"].prelude(), "sm_90a").image != launched
