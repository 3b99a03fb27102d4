"""Compiles the kernels of known models' layers into the package padless-cubins.

    python tools/build_cubins.py OUT            all models of `padless bench layer`, Hopper and the Blackwell family
    python tools/build_cubins.py OUT --model Qwen3-30B --arch sm_90a
    pip wheel --no-deps -w dist OUT             the wheel

No GPU is needed: which kernels a layer asks for is found by rehearsing it for GPUs of so many multiprocessors, from one
token up to --tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

import padless
from padless.bench.cases.problems.layer import MODELS
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.moe import moe
from padless.runtime import jit, shipped
from padless.runtime.choices import BackendName
from padless.testing.compile_ahead import Gpu, Rehearsal, kernels_of
from padless.testing.processes import worker_pool

# What is compiled, and the GPUs that are rehearsed for it: H100 SXM and H200, H100 PCIe, H20; B200 and B300.
GPUS = {"sm_90a": [("sm_90a", 132), ("sm_90a", 114), ("sm_90a", 78)], "sm_100f": [("sm_100a", 148)]}
BACKENDS: dict[str, BackendName] = {"sm_90a": "emulator", "sm_100a": "emulator:sm_100a"}


def weights(experts: int, n: int, k: int) -> BlockScaledTensor:
    """FP8_BLOCK weights (experts, n, k) whose codes are never read."""
    codes = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn)
    return BlockScaledTensor(codes, torch.ones(experts, ceil_div(n, 128), ceil_div(k, 128)), FP8_BLOCK)


def kernels_of_model(model: str, gpu: Gpu, tokens: int) -> list[jit.Kernel]:
    """Kernels of the model's layer for 1, 2, 4, .. tokens. RuntimeError where a rehearsal failed."""
    experts, top_k, hidden, intermediate = MODELS[model]
    w13, w2 = weights(experts, 2 * intermediate, hidden), weights(experts, hidden, intermediate)
    found: dict[jit.Kernel, None] = {}
    draw = torch.Generator().manual_seed(0)
    for t in (1 << power for power in range(tokens.bit_length())):
        ids = torch.rand(t, experts, generator=draw).topk(top_k).indices.int()
        x, shares = torch.zeros(t, hidden, dtype=torch.bfloat16), torch.ones(t, top_k)
        call = partial(moe, x, ids, shares, w13, w2, backend=BACKENDS[gpu.arch])
        kernels, problems = kernels_of([Rehearsal(call)], gpu)
        if problems:
            raise RuntimeError(f"{model}, {t} tokens, {gpu}: {problems[0]}")
        found |= dict.fromkeys(kernels)
    return list(found)


def image_of(kernel: jit.Kernel) -> tuple[bytes, str]:
    """Cubin and log of a kernel."""
    compiled = jit.compile_kernel(*kernel)
    return compiled.image, compiled.log


def build(out: Path, kernels: Iterable[jit.Kernel]) -> int:
    """Compiles the kernels into the package at ``out``; returns the bytes of all images."""
    compiler = jit.nvrtc_version()
    with worker_pool(None) as pool:
        asked = {jit.cache_name(compiler, kernel): pool.submit(image_of, kernel) for kernel in kernels}
        images = {name: future.result() for name, future in asked.items()}
    shipped.write(out, compiler, images, padless.__version__)
    return sum(len(image) for image, _ in images.values())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--arch", action="append", choices=list(GPUS))
    parser.add_argument("--tokens", type=int, default=8192)
    chosen = parser.parse_args(arguments)
    kernels: dict[jit.Kernel, None] = {}
    for arch in chosen.arch or GPUS:
        for model in chosen.model or MODELS:
            for gpu in GPUS[arch]:
                found = kernels_of_model(model, Gpu(*gpu), chosen.tokens)
                kernels |= dict.fromkeys(kernel._replace(arch=arch) for kernel in found)
    size = build(chosen.out, kernels)
    print(f"{len(kernels)} kernels, {size / 1e6:.1f} MB, in {chosen.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
