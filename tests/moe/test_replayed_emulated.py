"""Replayed layers as machine code: a program that calls `moe` for a GPU, run in the emulator with Triton's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from padless import FP8_BLOCK, BlockScaledTensor, quantize
from padless.kernels import replay
from padless.moe import moe

# The GPU is pretended by a mode of torch, and a pretended launch looks at all memory by empty tensors put over it.
torch._C._len_torch_function_stack = lambda: 0
watched = replay._Watch.__torch_dispatch__

def dispatched(watch, func, types, args=(), kwargs=None):
    if func is torch.ops.aten.set_.source_Storage or (func in replay._EMPTY and list(args[0]) == [0]):
        return func(*args, **(kwargs or {}))
    found = watched(watch, func, types, args, kwargs)
    if isinstance(found, torch.Tensor):
        found._padless_on_gpu = True
    return found

replay._Watch.__torch_dispatch__ = dispatched
draw = torch.Generator().manual_seed(0)
E, H, I, K, T = 3, 256, 128, 2, 5
values = [torch.randn(E, n, k, generator=draw) / k**0.5 for n, k in ((2 * I, H), (H, I))]
weights = [quantize(w, FP8_BLOCK, kind="weight") for w in values]
on_gpu = [w.cuda() for w in weights]
kept = []
for turn in range(4):
    x, shared = (torch.randn(T, H, generator=draw).bfloat16() for _ in range(2))
    ids, factors = torch.randint(0, E + 1, (T, K), generator=draw), torch.rand(T, K, generator=draw)
    given = [t.cuda() for t in (x, ids, factors, shared)]
    known = sum(found is not None for found in replay._REPLAYS.values())
    got = moe(*given[:3], *on_gpu, shared=given[3])
    found, replay.known, replay._REPLAYS = (replay.known, replay._REPLAYS), lambda facts: None, {}
    first = moe(*given[:3], *on_gpu, shared=given[3])
    (replay.known, replay._REPLAYS) = found
    want = moe(x, ids, factors, *weights, shared=shared).float()
    off = float((got.cpu().float() - want).abs().max() / want.abs().max())
    print(known, torch.equal(got.cpu(), first.cpu()), off < 0.01)
    kept.append((given, got))
"""


@pytest.mark.slow
def test_replayed_layers_have_the_bits_of_first_ones(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--chip", "H200", "--sms", "2", "--program", str(tmp_path / "program.py")]
    command = [sys.executable, "-m", "padless", "emulate", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "0 True True", "as it is"
    assert lines[-2:] == ["1 True True"] * 2, "replayed"
    assert all(line.endswith("True True") for line in lines), done.stdout
