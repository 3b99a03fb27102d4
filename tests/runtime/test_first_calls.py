"""The first call of each known model's layer, on GPUs that are not there: all that it launches is in padless-cubins."""

from __future__ import annotations

import gc
import importlib
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import build_cubins
from padless.formats import FORMAT_BY_NAME
from padless.kernels import launch
from padless.moe import Router, moe, topk
from padless.quantization.triton import compiled, launches
from padless.runtime import jit
from padless.testing.compile_ahead import Gpu
from support import hopper

GPUS = [Gpu("sm_90a", 132), Gpu("sm_100a", 148)]
OWN = [(model, facts[-1]) for model, facts in build_cubins.MODELS.items()]
ALL = [(model, format) for model in build_cubins.MODELS for format in build_cubins.formats_of(model)]
TOKENS = 64

Wanted = set[jit.Kernel | str]


def in_package(asked: build_cubins.Asked, gpu: Gpu) -> Wanted:
    """NVRTC's kernels, and names of Triton's, that the package has for what was asked."""
    passes = (
        compiled.name_of(getattr(importlib.import_module(p.module), p.name), capability_of(gpu), p.facts, p.options)
        for p in asked.passes.values()
    )
    return {*asked.kernels, *passes}


def capability_of(gpu: Gpu) -> int:
    return int(gpu.arch[3:-1])


@contextmanager
def asked_for(gpu: Gpu) -> Iterator[Wanted]:
    """A process with this GPU in which nothing is compiled: what would have been looked for in the package."""
    found: Wanted = set()

    def of_nvrtc(*kernel: Any) -> jit.CompiledKernel:
        found.add(jit.Kernel(*kernel))
        return jit.CompiledKernel(repr(kernel).encode(), "cubin", "entry", 202_752, 384, 5, 168, 0, 0, "")

    def of_triton(kernel: Any, device: int, facts: list[Any], options: dict[str, Any]) -> Callable[..., None]:
        found.add(compiled.name_of(kernel, capability_of(gpu), facts, options))
        return lambda programs, arguments: None

    with hopper.pretended(arch=gpu.arch, num_sms=gpu.num_sms), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "compile_kernel", of_nvrtc)
        patch.setattr(launches, "shipped_kernel", of_triton)
        patch.setattr(torch.Tensor, "index_select", build_cubins.rows_unread)
        yield found


def first_calls(model: str, format: str, gpu: Gpu, numbers: list[int]) -> Wanted:
    """Everything that a process asks for whose layers have so many tokens, chosen by the model's router."""
    experts, top_k, hidden, intermediate, _ = build_cubins.MODELS[model]
    kind = FORMAT_BY_NAME[format]
    w13 = build_cubins.weights(experts, 2 * intermediate, hidden, kind)
    w2 = build_cubins.weights(experts, hidden, intermediate, kind)
    options = build_cubins.options_of(kind, gpu.arch) | {"backend": None}
    if format == "MXFP4":
        options |= {"bias13": torch.zeros(experts, 2 * intermediate), "bias2": torch.zeros(experts, hidden)}
    routes = build_cubins.ROUTES.get(model, build_cubins.Routes(experts, Router(top_k)))
    correction = torch.zeros(routes.experts) if routes.corrected else None
    with asked_for(gpu) as found:
        for tokens in numbers:
            x, logits = torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, routes.experts)
            shares, ids = topk(logits, routes.router, correction)
            moe(x, ids, shares, w13, w2, **options)
    return found


def check(model: str, format: str, gpu: Gpu, tokens: int, drawn: int) -> None:
    r = random.Random(f"{model} {format} {gpu}")
    found = first_calls(model, format, gpu, [1, *r.sample(range(2, tokens + 1), drawn), tokens])
    assert any(isinstance(one, jit.Kernel) for one in found)
    assert any(isinstance(one, str) for one in found)
    missing = found - in_package(build_cubins.asked_of_model(model, gpu, tokens, format), gpu)
    assert not missing, "\n".join(map(repr, sorted(missing, key=repr)))


def test_the_ten_models_are_there() -> None:
    assert len(OWN) == 10
    assert {format for _, format in OWN} == {"FP8_BLOCK", "MXFP4"}
    assert {format for _, format in ALL} == {"FP8_BLOCK", "MXFP8", "NVFP4", "MXFP4"}


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize(("model", "format"), OWN)
def test_a_first_call_compiles_nothing(model: str, format: str, gpu: Gpu) -> None:
    check(model, format, gpu, TOKENS, 3)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize(("model", "format"), ALL)
def test_no_first_call_of_many_tokens_compiles(model: str, format: str, gpu: Gpu) -> None:
    check(model, format, gpu, 2100, 12)


def test_what_holds_for_a_few_numbers_between_two_is_met() -> None:
    def tile(number: int) -> str:
        return "small" if number < 1009 else "middle" if number < 1017 else "large"

    found = build_cubins.at_every_change([1, 992, 1023, 2048], tile)
    assert set(found.values()) == {"small", "middle", "large"}
    assert {1008, 1009, 1016, 1017} <= set(found)
    assert len(found) < 20
    assert list(build_cubins.at_every_change([1, 992], tile)) == [1, 992], "nothing changes between them"


def test_a_tile_of_few_numbers_of_tokens_is_there() -> None:
    """1009 to 1016 tokens of this layer have a tile of their own, and none of them is rehearsed for its own sake."""
    (model, format), gpu = ("Qwen3-30B", "MXFP8"), GPUS[1]
    assert not {*range(1009, 1017)} & {*build_cubins.rehearsed(1040)}
    first = first_calls(model, format, gpu, [1012])
    assert not first <= first_calls(model, format, gpu, [1008, 1017]), "it has none any more: take other numbers"
    assert first <= in_package(build_cubins.asked_of_model(model, gpu, 1040, format), gpu)


def test_a_rehearsal_keeps_no_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals of thousands of tokens would fill the memory."""
    made: list[weakref.ref[torch.Tensor]] = []
    real = build_cubins.moe

    def noted(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made.append(weakref.ref(x))
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        return real(x, *arguments, **options)

    alive: list[int] = []
    monkeypatch.setattr(build_cubins, "moe", noted)
    monkeypatch.setattr(build_cubins, "rehearsed", lambda most: [9, 10, 11])
    build_cubins.asked_of_model(OWN[0][0], GPUS[0], TOKENS)
    assert len(alive) == 3 * len(build_cubins.ROUTINGS)
    assert max(alive) <= 2, alive


@pytest.mark.parametrize("lost", ["kernels", "passes"])
def test_a_kernel_that_the_package_lacks_is_found(lost: str) -> None:
    gpu, (model, format) = GPUS[0], OWN[0]
    asked = build_cubins.asked_of_model(model, gpu, TOKENS, format)
    found = first_calls(model, format, gpu, [1, TOKENS])
    assert found <= in_package(asked, gpu)
    everything = getattr(asked, lost)
    for one in list(everything):
        less = asked._replace(**{lost: {key: value for key, value in everything.items() if key != one}})
        if in_package(less, gpu) >= found:
            continue
        return
    raise AssertionError(f"a package without any one of its {lost} has all that is asked for")
