"""Repeated calls of a layer on a GPU that is pretended (`support.hopper`): what they launch, and how two calls differ.

What is compared is every byte that the driver is given: of a replayed call, and of the same call made from nothing.
Where the two differ they must differ as addresses do, by one distance for each tensor that the call makes, and no two of
these tensors may lie on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, BlockScaledTensor
from padless.kernels import remembered, replay
from support.hopper import Gpu, Launched
from support.moe_layer_problem import Layer, draw_layer

GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
LAYERS: dict[str, dict[str, Any]] = {
    "one token": {"pair": (FP8_BLOCK, None), "tokens": 1, "top_k": 1},
    "fp8": {"pair": (FP8_BLOCK, None), "shared": True},
    "one launch": {"pair": (FP8_BLOCK, None), "tokens": 4, "h": 256, "i": 256},
    "many slots": {"pair": (FP8_BLOCK, None), "tokens": 400, "top_k": 12},
    "mxfp8": {"pair": (MXFP8, None), "top_k": 4},
    "mxfp4": {"pair": (MXFP4, None), "gate_up": "interleaved", "h": 512, "i": 512},
    "gpt-oss": {"pair": (MXFP4, torch.bfloat16), "bias": True, "h": 512, "i": 512, **GPT_OSS},
    "geglu": {"pair": (FP8_BLOCK, None), "activation": "geglu"},
}


def layer_of(name: str, seed: int = 0) -> Layer:
    layer = draw_layer(seed=seed, **LAYERS[name])
    if layer.options.get("bias2") is not None:  # other types are converted at every call, which is not replayed
        layer.options["bias2"] = layer.options["bias2"].float()
    return layer


def with_other_tensors(layer: Layer, seed: int) -> Layer:
    """Other tokens, ids, weights and shared rows, in other memory; the same experts."""
    found = layer_of_tokens(layer, seed)
    shared = layer.options.get("shared")
    options = layer.options if shared is None else layer.options | {"shared": torch.randn(shared.shape).bfloat16()}
    return replace(found, options=options)


def layer_of_tokens(layer: Layer, seed: int) -> Layer:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(layer.x.shape, generator=g).to(layer.x.dtype)
    ids = torch.randint(0, 5, layer.ids.shape, generator=g).to(layer.ids.dtype)
    return replace(layer, x=x, ids=ids, weights=torch.rand(layer.weights.shape, generator=g).to(layer.weights.dtype))


# --- calls, and what they launch -------------------------------------------------------------------------


@dataclass
class Call:
    """What a call launched, and the memory of the tensors that it made, the result's among it."""

    launched: list[Launched]
    made: list[tuple[int, int]]
    result: torch.Tensor


def called(gpu: Gpu, work: Callable[[], torch.Tensor]) -> Call:
    made: list[tuple[int, int]] = []
    kept: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        t = empty(*arguments, **options)
        made.append((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()))
        kept.append(t)
        return t

    gpu.launched = []
    torch.empty = noted  # type: ignore[assignment]
    try:
        result = work()
    finally:
        torch.empty = empty  # type: ignore[assignment]
    return Call(gpu.launched, made, result)


def from_nothing(gpu: Gpu, work: Callable[[], torch.Tensor]) -> Call:
    """The call with nothing remembered but Triton's compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "_KNOWN", {})
        patch.setattr(replay, "_REPLAYS", {})
        return called(gpu, work)


def words(argument: bytes) -> list[int]:
    return [int.from_bytes(argument[i : i + 8], "little") for i in range(0, len(argument), 8)]


def differences(first: Call, again: Call, is_counter: Callable[[Launched, int], bool]) -> list[str]:
    """How ``again`` launches something else than ``first``."""
    found: list[str] = []
    if len(first.launched) != len(again.launched):
        return [f"{len(again.launched)} launches and not {len(first.launched)}"]
    distances: dict[int, int] = {}  # by the tensor that the first call made

    def tensor_at(address: int) -> int | None:
        return next((i for i, (start, end) in enumerate(first.made) if start <= address < end), None)

    for number, (one, other) in enumerate(zip(first.launched, again.launched, strict=True)):
        names = ("kernel", "grid", "block", "shared_bytes", "stream", "attributes")
        found += [f"launch {number} has another {name}" for name in names if getattr(one, name) != getattr(other, name)]
        for at, (old, new) in enumerate(zip(one.arguments, other.arguments, strict=True)):
            if len(old) != len(new):
                return [*found, f"launch {number}: argument {at} has another size"]
            if is_counter(one, at):
                continue
            for word, (a, b) in enumerate(zip(words(old), words(new), strict=True)):
                made = tensor_at(a)
                if made is None and a != b:
                    found.append(f"launch {number}: argument {at}, word {word} is {b:#x} and not {a:#x}")
                elif made is not None and distances.setdefault(made, b - a) != b - a:
                    found.append(f"launch {number}: argument {at}, word {word} is in another place than before")
    there = sorted((first.made[i][0] + d, first.made[i][1] + d, i) for i, d in distances.items())
    for (_, end, one_made), (start, _, other_made) in pairwise(there):
        if start < end:
            found.append(f"tensors {one_made} and {other_made} lie on each other")
    for start, end, i in there:
        if not any(a <= start and end <= b for a, b in again.made):
            found.append(f"tensor {i} lies in no memory of the call")
    result = tensor_at(first.result.data_ptr())
    if result is None or first.result.data_ptr() + distances.get(result, 0) != again.result.data_ptr():
        found.append("the result is another tensor")
    if facts(first.result) != facts(again.result):
        found.append(f"the result is {facts(again.result)} and not {facts(first.result)}")
    return found


def facts(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.requires_grad, t.is_inference()


def counters_of(gpu: Gpu) -> Callable[[Launched, int], bool]:
    return lambda one, at: (one.kernel, at) in gpu.counters


def compared(gpu: Gpu, work: Callable[[], torch.Tensor]) -> list[str]:
    """How the next call of what may be remembered differs from one from nothing; counters are looked at apart."""
    again = called(gpu, work)
    return differences(from_nothing(gpu, work), again, counters_of(gpu))


def is_replayed(gpu: Gpu, work: Callable[[], torch.Tensor]) -> bool:
    """Whether a call makes its result and one more tensor."""
    return len(called(gpu, work).made) == 2


# --- what changes between calls --------------------------------------------------------------------------


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, so many elements behind a multiple of 256 bytes."""
    memory = torch.empty(t.numel() + 512, dtype=t.dtype)
    start = -memory.data_ptr() % 256 // t.element_size() + elements
    there = memory[start : start + t.numel()].view(t.shape)
    return there.copy_(t)


def wide(t: torch.Tensor) -> torch.Tensor:
    memory = torch.empty((t.shape[0], t.shape[1] + 32), dtype=t.dtype)
    return memory[:, : t.shape[1]].copy_(t)


def moved_weights(w: BlockScaledTensor, part: str) -> BlockScaledTensor:
    return replace(w, **{part: getattr(w, part).view(torch.uint8).clone().view(getattr(w, part).dtype)})


def in_place(layer: Layer) -> Layer:
    """The same objects over other memory."""
    layer.w13.data.set_(layer.w13.data.view(torch.uint8).clone().view(layer.w13.data.dtype))
    return layer


CHANGES: dict[str, Callable[[Layer], Layer]] = {
    "nothing": lambda a: a,
    "other tokens": lambda a: with_other_tensors(a, 9),
    "fewer tokens": lambda a: replace(
        a.only(torch.arange(4)), options=a.options | {"shared": a.options["shared"][:4].clone()}
    ),
    "no token": lambda a: replace(a.only(torch.arange(0)), options=a.options | {"shared": a.options["shared"][:0]}),
    "x between multiples of 16 bytes": lambda a: replace(a, x=shifted(a.x, 4)),
    "x at a multiple of 16 bytes": lambda a: replace(a, x=shifted(a.x, 8)),
    "x with wide rows": lambda a: replace(a, x=wide(a.x)),
    "x in float32": lambda a: replace(a, x=a.x.float()),
    "int32 ids": lambda a: replace(a, ids=a.ids.int()),
    "bfloat16 weights": lambda a: replace(a, weights=a.weights.bfloat16()),
    "weights at an odd address": lambda a: replace(a, weights=shifted(a.weights, 1)),
    "no shared rows": lambda a: replace(a, options=a.options | {"shared": None}),
    "shared rows are x": lambda a: replace(a, options=a.options | {"shared": a.x}),
    "shared rows in float32": lambda a: replace(a, options=a.options | {"shared": a.options["shared"].float()}),
    "weights w13 elsewhere": lambda a: replace(a, w13=moved_weights(a.w13, "data")),
    "scales of w13 elsewhere": lambda a: replace(a, w13=moved_weights(a.w13, "scale")),
    "weights w2 elsewhere": lambda a: replace(a, w2=moved_weights(a.w2, "data")),
    "scales of w2 elsewhere": lambda a: replace(a, w2=moved_weights(a.w2, "scale")),
    "other memory in place": in_place,
    "the first experts alone": lambda a: replace(a, w13=a.w13[:3], w2=a.w2[:3]),
    "an interleaved gate": lambda a: replace(a, options=a.options | {"gate_up": "interleaved"}),
    "a limit": lambda a: replace(a, options=a.options | {"limit": 3.0}),
    "an offset": lambda a: replace(a, options=a.options | {"up_offset": 1.0}),
    "float32 out": lambda a: replace(a, options=a.options | {"out_dtype": torch.float32}),
    "bias": lambda a: replace(a, options=a.options | {"bias2": torch.randn(5, 160)}),
    "number of experts": lambda a: replace(a, options=a.options | {"num_experts": 5}),
}
