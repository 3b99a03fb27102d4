"""Compiles the kernels of known models' layers into the package padless-cubins.

    python tools/build_cubins.py OUT            all models of `padless bench decoding`, Hopper and the Blackwell family
    python tools/build_cubins.py OUT --model Qwen3-30B --format FP8_BLOCK --arch sm_90a
    python tools/build_cubins.py OUT --passes   adds the Triton kernels that another version of Triton compiles
    pip wheel --no-deps -w dist OUT             the wheel

No GPU is needed: which kernels a layer asks for is found by rehearsing it for GPUs of so many multiprocessors, from one
token up to --tokens. Those of Triton serve the version of Triton that compiled them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import triton

import padless
from padless.bench.cases.problems.decoding import GPT_OSS, MODELS
from padless.formats import (
    FORMAT_BY_NAME,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
    ceil_div,
)
from padless.layouts import _with_kernel_scales
from padless.moe import Router, choosing, moe, ops, topk
from padless.moe.decode import MOST_TOKENS
from padless.quantization.triton import casts, compiled, launches
from padless.runtime import jit, shipped
from padless.runtime.choices import BackendName
from padless.testing.compile_ahead import Gpu, Rehearsal, kernels_of
from padless.testing.processes import cpus, worker_pool

# What is compiled, and the GPUs that are rehearsed for it: H100 SXM and H200, H100 PCIe, H20; B200 and B300.
GPUS = {"sm_90a": [("sm_90a", 132), ("sm_90a", 114), ("sm_90a", 78)], "sm_100f": [("sm_100a", 148)]}
BACKENDS: dict[str, BackendName] = {"sm_90a": "emulator", "sm_100a": "emulator:sm_100a"}
CAPABILITIES = {"sm_90a": [90], "sm_100f": [100, 103]}  # Triton knows no families
ROUTINGS = [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)]  # no kernel depends on both
# What a model's weights are published in or are quantized to when they are loaded.
FORMATS = ("FP8_BLOCK", "MXFP8", "NVFP4", "MXFP4")


def formats_of(model: str) -> tuple[str, ...]:
    """gpt-oss has its own, which no other model has."""
    own = MODELS[model][-1]
    return (own,) if own == MXFP4.name else FORMATS[:-1]


class Routes(NamedTuple):
    """Experts that a router chooses from, those of other GPUs too; its rule; whether it has a correction bias."""

    experts: int
    router: Router
    corrected: bool = False


# Routers that are no plain softmax over a layer's own experts.
ROUTES = {
    "DeepSeek-V3 / 8": Routes(256, Router(8, "sigmoid", True, 2.5, 8, 4), corrected=True),
    "Kimi-K2 / 8": Routes(384, Router(8, "sigmoid", True, 2.827), corrected=True),
    "GLM-4.5-Air": Routes(128, Router(8, "sigmoid"), corrected=True),
    "OLMoE": Routes(64, Router(8, renormalize=False)),
}

Images = dict[str, tuple[bytes, dict[str, Any]]]
T = TypeVar("T")


class Pass(NamedTuple):
    """A Triton kernel as it is launched: its module and name, and the arguments of `compiled.compile_for`; facts: of
    the arguments, as `compiled.name_of` takes them."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    facts: list[Any]


class Asked(NamedTuple):
    """Requests of layers: kernels of NVRTC, and Triton's, each once."""

    kernels: dict[jit.Kernel, None]
    passes: dict[str, Pass]


def weights(experts: int, n: int, k: int, format: BlockScaledFormat = FP8_BLOCK) -> BlockScaledTensor:
    """Weights (experts, n, k) as `padless.quantize` and the plug-ins hold them, whose codes are never read."""
    codes = torch.empty(experts, n, k // format.codes_per_byte, dtype=format.data_dtype)
    if format is FP8_BLOCK:
        return BlockScaledTensor(codes, torch.ones(experts, ceil_div(n, 128), ceil_div(k, 128)), format)
    scale = torch.empty(experts, n, ceil_div(k, format.block_k), dtype=format.scale_dtype)
    decode = torch.ones(experts) if format is NVFP4 else None
    return _with_kernel_scales(BlockScaledTensor(codes, scale, format, decode))


def options_of(format: BlockScaledFormat, arch: str) -> dict[str, Any]:
    """Options that the plug-ins give `moe` next to operands: the format of activations; gpt-oss' gate."""
    found: dict[str, Any] = {"backend": BACKENDS[arch]}
    if format in (MXFP4, NVFP4):
        found["activations"] = torch.bfloat16 if arch == "sm_90a" else MXFP8 if format is MXFP4 else NVFP4
    if format is MXFP4:
        found |= {"gate_up": GPT_OSS.gate_up, "alpha": GPT_OSS.alpha, "limit": GPT_OSS.limit, "up_offset": 1.0}
    return found


def always(*_: object) -> bool:
    """True; a mock in its place would keep the operands of every call."""
    return True


def rows_unread(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """In the place of x.index_select(0, index): no bytes are copied, by an index that no pass has written."""
    return x.new_empty(index.shape[0], *x.shape[1:])


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
        mock.patch.object(ops, "runs_triton", always),
        mock.patch.object(choosing, "runs_triton", always),
        mock.patch.object(casts, "casts_in_hardware", always),
        mock.patch.object(launches, "is_programmatic", always),
        mock.patch.object(launches, "_launch", listed),
        mock.patch.object(torch.Tensor, "index_select", rows_unread),
    ):
        yield found


def rehearsed(most: int) -> list[int]:
    """Numbers of tokens up to ``most``, itself too: all to 64, then 16 an octave and the one below each power of two,
    since tiles change at numbers that are not powers of two.
    """
    larger = (
        t
        for power in range(6, most.bit_length())
        for t in (*range(1 << power, 2 << power, 1 << power - 4), (1 << power) - 1)
    )
    return sorted({t for t in (*range(1, 65), *larger, most) if t <= most})


def at_every_change(numbers: list[int], at: Callable[[int], T]) -> dict[int, T]:
    """``at`` of the numbers and, where it differs between neighbours, of numbers between them, halving until the place
    is found: what holds for a few numbers there, as a tile between a smaller and a larger one, is then met too.
    """
    found = {number: at(number) for number in numbers}
    waiting = list(pairwise(numbers))
    while waiting:
        low, high = waiting.pop()
        if high - low > 1 and found[low] != found[high]:
            middle = (low + high) // 2
            found[middle] = at(middle)
            waiting += [(low, middle), (middle, high)]
    return found


def asked_of_model(model: str, gpu: Gpu, tokens: int, format: str = "FP8_BLOCK") -> Asked:
    """Requests of the model's layer with up to so many tokens. RuntimeError where a rehearsal failed."""
    experts, top_k, hidden, intermediate, _ = MODELS[model]
    kind = FORMAT_BY_NAME[format]
    w13, w2 = weights(experts, 2 * intermediate, hidden, kind), weights(experts, hidden, intermediate, kind)
    options = options_of(kind, gpu.arch)
    if kind is MXFP4:
        options |= {"bias13": torch.zeros(experts, 2 * intermediate), "bias2": torch.zeros(experts, hidden)}
    chosen_from, router, corrected = ROUTES.get(model, Routes(experts, Router(top_k)))
    correction = torch.zeros(chosen_from) if corrected else None

    def first_call(t: int, of_ids: torch.dtype, of_shares: torch.dtype) -> None:
        x = torch.empty(t, hidden, dtype=torch.bfloat16)
        moe(x, torch.zeros(t, top_k, dtype=of_ids), torch.ones(t, top_k, dtype=of_shares), w13, w2, **options)
        logits = torch.zeros(t, chosen_from, dtype=of_shares)
        topk(logits, router, correction)
        if chosen_from == experts and t <= MOST_TOKENS:  # one launch may choose experts
            by_logits: dict[str, Any] = {"router_logits": logits, "router": router, "correction_bias": correction}
            moe(x, None, None, w13, w2, **by_logits, **options)

    asked = Asked({}, {})

    def at(t: int) -> set[object]:
        calls = [Rehearsal(partial(first_call, t, *routing)) for routing in ROUTINGS]
        with passes_listed() as passes:
            kernels, problems = kernels_of(calls, gpu)
        if problems:
            raise RuntimeError(f"{model}, {format}, {gpu}: {problems[0]}")
        asked.kernels.update(dict.fromkeys(kernels))
        asked.passes.update(passes)
        return {*kernels, *passes}

    at_every_change(rehearsed(tokens), at)
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
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--arch", action="append", choices=list(GPUS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--passes", action="store_true", help="only Triton's kernels, into a package that is there")
    chosen = parser.parse_args(arguments)
    kernels: dict[jit.Kernel, None] = {}
    passes: dict[str, tuple[Pass, int]] = {}
    with worker_pool(cpus()) as pool:  # this process only waits
        rehearsals = [
            (arch, pool.submit(asked_of_model, model, Gpu(*gpu), chosen.tokens, format))
            for arch in chosen.arch or GPUS
            for model in chosen.model or MODELS
            for format in formats_of(model)
            if format in (chosen.format or FORMATS)
            for gpu in GPUS[arch]
        ]
        for arch, waited in rehearsals:
            asked = waited.result()
            kernels |= dict.fromkeys(kernel._replace(arch=arch) for kernel in asked.kernels)
            for capability in CAPABILITIES[arch]:
                passes |= {f"{capability} {name}": (one, capability) for name, one in asked.passes.items()}
        wanted = () if chosen.passes else kernels
        print(f"{len(wanted)} kernels and {len(passes)} of Triton {triton.__version__} to compile", flush=True)
        images = build(chosen.out, wanted, passes.values())
    size = sum(len(image) for image, _ in images.values())
    print(f"{len(images)} kernels, {size / 1e6:.1f} MB, in {chosen.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
