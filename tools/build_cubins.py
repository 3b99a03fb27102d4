"""Compiles the kernels of known models' layers into the package padless-cubins.

    python tools/build_cubins.py OUT            all models of `padless bench layer`, Hopper and the Blackwell family
    python tools/build_cubins.py OUT --model Qwen3-30B --arch sm_90a
    python tools/build_cubins.py OUT --passes   adds the Triton kernels that another version of Triton compiles
    pip wheel --no-deps -w dist OUT             the wheel

No GPU is needed: which kernels a layer asks for is found by rehearsing it for GPUs of so many multiprocessors, from one
token up to --tokens. Those of Triton serve the version of Triton that compiled them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import padless
from padless.bench.cases.problems.layer import MODELS
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.moe import Router, moe, ops
from padless.moe.decode import MOST_TOKENS
from padless.quantization.triton import casts, compiled, launches
from padless.runtime import jit, shipped
from padless.runtime.choices import BackendName
from padless.testing.compile_ahead import Gpu, Rehearsal, kernels_of
from padless.testing.processes import worker_pool

# What is compiled, and the GPUs that are rehearsed for it: H100 SXM and H200, H100 PCIe, H20; B200 and B300.
GPUS = {"sm_90a": [("sm_90a", 132), ("sm_90a", 114), ("sm_90a", 78)], "sm_100f": [("sm_100a", 148)]}
BACKENDS: dict[str, BackendName] = {"sm_90a": "emulator", "sm_100a": "emulator:sm_100a"}
CAPABILITIES = {"sm_90a": [90], "sm_100f": [100, 103]}  # Triton knows no families
ROUTINGS = [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)]  # no kernel depends on both

Images = dict[str, tuple[bytes, dict[str, Any]]]


class Pass(NamedTuple):
    """A Triton kernel as it is launched: its module and name, and the arguments of `compiled.compile_for`; facts: of
    the arguments, as `compiled.name_of` takes them."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    facts: list[Any]


class Asked(NamedTuple):
    """What layers ask for: kernels of NVRTC, and Triton's, each once."""

    kernels: dict[jit.Kernel, None]
    passes: dict[str, Pass]


def weights(experts: int, n: int, k: int) -> BlockScaledTensor:
    """FP8_BLOCK weights (experts, n, k) whose codes are never read."""
    codes = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn)
    return BlockScaledTensor(codes, torch.ones(experts, ceil_div(n, 128), ceil_div(k, 128)), FP8_BLOCK)


@contextmanager
def passes_listed() -> Iterator[dict[str, Pass]]:
    """In this block layers on the CPU choose Triton's passes as on a GPU from Hopper on. None is run: what would have
    been launched comes into the yielded dictionary.
    """
    found: dict[str, Pass] = {}

    def listed(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        facts = launches._facts(kernel, arguments)
        given = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        if any(isinstance(a, torch.Tensor) and a.data_ptr() % 16 for a in arguments):
            raise RuntimeError(f"{kernel.__name__} is rehearsed with an address that is no multiple of 16")
        one = Pass(kernel.__module__, kernel.__name__, given, options, facts)
        found.setdefault(repr((one.module, one.name, facts, options)), one)

    with (
        mock.patch.object(ops, "runs_triton", return_value=True),
        mock.patch.object(casts, "casts_in_hardware", return_value=True),
        mock.patch.object(launches, "is_programmatic", return_value=True),
        mock.patch.object(launches, "_launch", listed),
    ):
        yield found


def rehearsed(most: int) -> list[int]:
    """Numbers of tokens up to ``most``: all to 64, then 16 an octave and the one below each power of two, since tiles
    change at numbers that are not powers of two.
    """
    larger = (
        t
        for power in range(6, most.bit_length())
        for t in (*range(1 << power, 2 << power, 1 << power - 4), (1 << power) - 1)
    )
    return sorted({t for t in (*range(1, 65), *larger) if t <= most})


def asked_of_model(model: str, gpu: Gpu, tokens: int) -> Asked:
    """What the model's layer asks for with up to so many tokens. RuntimeError where a rehearsal failed."""
    experts, top_k, hidden, intermediate = MODELS[model]
    w13, w2 = weights(experts, 2 * intermediate, hidden), weights(experts, hidden, intermediate)
    asked = Asked({}, {})
    for t in rehearsed(tokens):
        x = torch.empty(t, hidden, dtype=torch.bfloat16)
        layer = partial(moe, x, w13=w13, w2=w2, backend=BACKENDS[gpu.arch])
        calls = [
            partial(layer, torch.zeros(t, top_k, dtype=of_ids), torch.ones(t, top_k, dtype=of_shares))
            for of_ids, of_shares in ROUTINGS
        ]
        if t <= MOST_TOKENS:  # one launch may choose experts
            calls.append(partial(layer, None, None, router_logits=torch.zeros(t, experts), router=Router(top_k)))
        for call in calls:
            with passes_listed() as passes:
                kernels, problems = kernels_of([Rehearsal(call)], gpu)
            if problems:
                raise RuntimeError(f"{model}, {t} tokens, {gpu}: {problems[0]}")
            asked.kernels.update(dict.fromkeys(kernels))
            asked.passes.update(passes)
    return asked


def image_of(kernel: jit.Kernel) -> Images:
    """A kernel's image and log, by name."""
    found = jit.compile_kernel(*kernel)
    return {jit.cache_name(jit.nvrtc_version(), kernel): (found.image, {"log": found.log})}


def image_of_pass(one: Pass, capability: int) -> Images:
    """A pass's image and description, by name; nothing where padless does not launch it itself."""
    kernel = getattr(importlib.import_module(one.module), one.name)
    found = compiled.compile_for(kernel, capability, one.arguments, one.options)
    return {} if found is None else {compiled.name_of(kernel, capability, one.facts, one.options): found}


def build(out: Path, kernels: Iterable[jit.Kernel], passes: Iterable[tuple[Pass, int]]) -> Images:
    """Compiles the kernels, and the passes for capabilities, into the package at ``out``."""
    with worker_pool(None) as pool:
        waited: list[Future[Images]] = [pool.submit(image_of, kernel) for kernel in kernels]
        waited += [pool.submit(image_of_pass, *one) for one in passes]
        images = {name: image for future in waited for name, image in future.result().items()}
    shipped.write(out, jit.nvrtc_version(), images, padless.__version__)
    return images


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--arch", action="append", choices=list(GPUS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--passes", action="store_true", help="only Triton's kernels, into a package that is there")
    chosen = parser.parse_args(arguments)
    kernels: dict[jit.Kernel, None] = {}
    passes: dict[str, tuple[Pass, int]] = {}
    for arch in chosen.arch or GPUS:
        for model in chosen.model or MODELS:
            for gpu in GPUS[arch]:
                asked = asked_of_model(model, Gpu(*gpu), chosen.tokens)
                kernels |= dict.fromkeys(kernel._replace(arch=arch) for kernel in asked.kernels)
                for capability in CAPABILITIES[arch]:
                    passes |= {f"{capability} {name}": (one, capability) for name, one in asked.passes.items()}
    images = build(chosen.out, () if chosen.passes else kernels, passes.values())
    size = sum(len(image) for image, _ in images.values())
    print(f"{len(images)} kernels, {size / 1e6:.1f} MB, in {chosen.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
