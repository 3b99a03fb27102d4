"""The padding kernel against an obvious loop, bit for bit: as Triton code in the interpreter, and its torch
twin.

The interpreter is chosen when Triton is imported, so those cases run in a process of their own.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from padless.bench import pad
from padless.bench.group_sizes import draw_group_sizes, padded_rows
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import to_mn_major

GUARD = 128
POISON_BYTE = 0xA5
POISON_FLOAT = -7.25

# (group sizes, rows of a past the last group, K)
CASES = [
    ((3, 0, 130), 0, 256),
    ((0, 0, 5, 0), 7, 128),
    ((127, 128, 129, 1), 2, 384),
    ((1,), 0, 16),
    ((140,), 0, 4112),  # a row of more than one tile, the second one short
    ((0,), 4, 128),
    ((5, 9), 0, 40),  # rows are not whole 16-byte units: bytes
    (tuple(draw_group_sizes(5, 60, random.Random(5))), 11, 144),  # a number of groups that is no power of two
]
IDS = [f"groups{len(sizes)}-rows{sum(sizes)}-K{K}" for sizes, _, K in CASES]


def make(
    sizes: tuple[int, ...], extra: int, K: int, major: str, seed: int, device: str = "cpu"
) -> tuple[BlockScaledTensor, torch.Tensor]:
    """Random bytes as codes (every bit pattern, NaN too), random scales, and the offsets."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes) + extra
    codes = torch.randint(0, 256, (rows, K), dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, -(-K // 128), generator=generator) + 0.5
    codes, scale = codes.to(device), scale.to(device)
    data = BlockScaledTensor(codes.view(torch.float8_e4m3fn), to_mn_major(scale) if major == "mn" else scale, FP8_BLOCK)
    return data, torch.tensor(sizes).cumsum(0).to(torch.int32).to(device)


def poisoned(
    a: BlockScaledTensor, offs: torch.Tensor, rows: int
) -> tuple[pad.PaddedGroups, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers of `rows` poisoned rows inside larger poisoned storage, and that storage to be checked."""
    bytes_ = torch.full((rows + 2 * GUARD, a.shape[1]), POISON_BYTE, dtype=torch.uint8, device=a.device)
    columns = a.scale.shape[1]
    floats = torch.full(((rows + 2 * GUARD) * columns,), POISON_FLOAT, device=a.device)
    inner = floats[GUARD * columns : (GUARD + rows) * columns]
    scale = inner.view(columns, rows).t() if a.scale_major == "mn" else inner.view(rows, columns)
    index = torch.full((rows + 2 * GUARD,), 99, dtype=torch.int32, device=a.device)
    out = pad.PaddedGroups(
        BlockScaledTensor(bytes_[GUARD : GUARD + rows].view(torch.float8_e4m3fn), scale, a.format),
        torch.full_like(offs, -5),
        index[GUARD : GUARD + rows],
    )
    return out, bytes_, floats, index


def reference(
    sizes: tuple[int, ...], a: BlockScaledTensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Codes, scales, group index and ends: one row at a time; poison where nothing may be written."""
    codes = torch.full((rows, a.shape[1]), POISON_BYTE, dtype=torch.uint8)
    scale = torch.full((rows, a.scale.shape[1]), POISON_FLOAT)
    index = torch.full((rows,), -1, dtype=torch.int32)
    source, target, ends = 0, 0, []
    for group, size in enumerate(sizes):
        for row in range(size):
            codes[target + row] = a.data.view(torch.uint8)[source + row].cpu()
            scale[target + row] = a.scale[source + row].cpu()
            index[target + row] = group
        padded = (size + 127) // 128 * 128
        codes[target + size : target + padded] = 0
        scale[target + size : target + padded] = 0
        source, target = source + size, target + padded
        ends.append(target)
    return codes, scale, index, ends


def check_case(sizes: tuple[int, ...], extra: int, K: int, major: str, backend: str, exact: bool, device: str) -> None:
    a, offs = make(sizes, extra, K, major, seed=len(sizes) * 1000 + K, device=device)
    rows = padded_rows(sizes) + (0 if exact else 256)
    out, bytes_, floats, index = poisoned(a, offs, rows)
    fence = (bytes_.clone(), floats.clone(), index.clone())
    result = pad.pad_groups(a, offs, rows=rows, out=out, backend=backend)
    codes, scale, want_index, ends = reference(sizes, a, rows)
    assert torch.equal(result.a.data.view(torch.uint8).cpu(), codes)
    assert torch.equal(result.a.scale.cpu(), scale)
    assert result.a.scale_major == a.scale_major or rows == 0
    assert result.offs.tolist() == ends
    assert torch.equal(result.group_index.cpu(), want_index)
    columns = a.scale.shape[1]
    for now, before, unit in zip((bytes_, floats, index), fence, (1, columns, 1), strict=True):
        assert torch.equal(now[: GUARD * unit], before[: GUARD * unit])
        assert torch.equal(now[(GUARD + rows) * unit :], before[(GUARD + rows) * unit :])

    # And back, of something with another width and element size; rows that belong to no group survive.
    generator = torch.Generator().manual_seed(K)
    padded = torch.randint(-30000, 30000, (rows, 72), dtype=torch.int16, generator=generator).to(device)
    back = torch.full((a.shape[0] + GUARD, 72), -1234, dtype=torch.int16, device=device)
    pad.unpad_rows(padded, offs, back[: a.shape[0]], backend=backend)
    rows_of = [row for row in range(rows) if want_index[row] >= 0]
    assert torch.equal(back[: sum(sizes)], padded[rows_of])
    assert bool((back[sum(sizes) :] == -1234).all())


@pytest.mark.parametrize("exact", [False, True], ids=["more", "exact"])
@pytest.mark.parametrize("major", ["mn", "k"])
@pytest.mark.parametrize(("sizes", "extra", "K"), CASES, ids=IDS)
def test_torch_twin(sizes: tuple[int, ...], extra: int, K: int, major: str, exact: bool) -> None:
    check_case(sizes, extra, K, major, "torch", exact, "cpu")


def test_triton_kernels_in_the_interpreter() -> None:
    script = (
        "import test_pad as t\n"
        "for sizes, extra, K in t.CASES:\n"
        "    for major, exact in (('mn', False), ('k', True)):\n"
        "        t.check_case(sizes, extra, K, major, 'triton', exact, 'cpu')\n"
        "        print('checked', sizes, K, major, exact)\n"
    )
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([*sys.path, str(here)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("checked") == 2 * len(CASES)


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("exact", [False, True], ids=["more", "exact"])
@pytest.mark.parametrize("major", ["mn", "k"])
@pytest.mark.parametrize(("sizes", "extra", "K"), CASES, ids=IDS)
def test_triton_kernels_on_the_gpu(sizes: tuple[int, ...], extra: int, K: int, major: str, exact: bool) -> None:
    check_case(sizes, extra, K, major, "triton", exact, "cuda")


def test_the_check_notices_a_wrong_row() -> None:
    """The comparison above can fail: a group index off by one, a padding row left as it was."""
    sizes = (3, 0, 130)
    a, offs = make(sizes, 0, 256, "mn", seed=1)
    result = pad.pad_groups(a, offs, rows=384)
    codes, _, index, _ = reference(sizes, a, 384)
    assert torch.equal(result.a.data.view(torch.uint8), codes)
    codes[200], index[200] = POISON_BYTE, 1
    assert not torch.equal(result.a.data.view(torch.uint8), codes)
    assert not torch.equal(result.group_index, index)


def test_rows_move_in_wide_loads_several_in_flight() -> None:
    """Compiled for capability 9.0: eight 16-byte loads per thread before the first store, no barrier."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from padless.bench import pad_kernels

    constants = {
        "WORDS": 2048,
        "BLOCK_WORDS": 1024,
        "BLOCK_ROWS": pad._DATA_ROWS,
        "SCALE_COLUMNS": 64,
        "BLOCK_COLUMNS": 32,
        "BLOCK_GROUPS": 32,
        "MULTIPLE": 128,
        "ROW_MAJOR": False,
    }
    names = pad_kernels.pad_kernel.arg_names
    pointers = {name: "*fp32" if "scale" in name else "*i32" for name in names if name.endswith("_ptr")}
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(pad_kernels.pad_kernel, signature, constants, aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": pad._NUM_WARPS})
    wide = re.findall(r"(ld|st)\.global\.v4\.b32|bar\.sync", compiled.asm["ptx"])
    assert wide == ["ld"] * 8 + ["st"] * 8


def test_bytes_counted() -> None:
    assert pad.pad_bytes(100, 128, 256) == (100 + 128) * (256 + 8)


def test_bad_input_is_refused() -> None:
    a, offs = make((3, 4), 0, 256, "mn", seed=2)
    with pytest.raises(ValueError, match="offs must be a non-empty 1-D int32"):
        pad.pad_groups(a, offs.to(torch.int64), rows=256)
    with pytest.raises(ValueError, match="rows must be a multiple of 128"):
        pad.pad_groups(a, offs, rows=100)
    with pytest.raises(ValueError, match="backend must be one of"):
        pad.pad_groups(a, offs, rows=256, backend="cuda")
    wide = BlockScaledTensor(a.data.t().contiguous().t(), a.scale, FP8_BLOCK)
    with pytest.raises(ValueError, match="contiguous"):
        pad.pad_groups(wide, offs, rows=256)
    with pytest.raises(ValueError, match=r"out must be \(M, 8\)"):
        pad.unpad_rows(torch.zeros(4, 8), offs, torch.zeros(4, 9))
