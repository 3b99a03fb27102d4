"""Times the passes around a layer's products, in turns with a copy and a fill of as many bytes, on a GPU.

`python tools/time_passes.py --out FILE` writes a record as docs/measured has it, one line for each model and number of
tokens: microseconds, medians. gather_quantize is timed whole and without the launch that places its scales; up to
`DECODE_TOKENS` routing, gather and sum are one call, replayed from a CUDA graph. The layers of an older record stay with
`--keep RECORD`. Every result is compared with the definition first, on the GPU itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from padless import FP8_BLOCK, quantize
from padless.bench.cases.problems.layer import DECODE_TOKENS, MODELS
from padless.formats import ceil_div
from padless.moe import combine, gather_quantize, route, route_quantize
from padless.moe.triton import place_scales
from padless.quantization.triton import launches
from padless.testing.timing import FLUSH, Timer, capture

POINTS = [(model, tokens) for tokens in (64, 2048, 8192, 16384) for model in MODELS]
Call = Callable[[], Any]


def drawn(model: str, tokens: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """(x, ids) of a model's sizes: an expert's popularity and a token's preferences are normal."""
    experts, top_k, hidden, _ = MODELS[model]
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator, device=device, dtype=torch.bfloat16)
    popular = torch.randn(experts, generator=generator, device=device) * 0.5
    likes = torch.randn(tokens, experts, generator=generator, device=device)
    return x, (popular + likes).topk(top_k, dim=1).indices


def calls_of(model: str, tokens: int, device: str = "cuda") -> dict[str, Call]:
    """The calls of a point by name, checked; empty tensors of as many bytes are copied and filled."""
    experts, top_k, hidden, _ = MODELS[model]
    x, ids = drawn(model, tokens, device)
    routing = route(ids, experts)
    gathered = partial(gather_quantize, x, routing.inverse, FP8_BLOCK, tokens=routing.tokens)
    got, want = gathered(), quantize(x[routing.tokens.long()], FP8_BLOCK)
    if not (
        torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(got.scale, want.scale)
    ):
        raise AssertionError(f"{model}, {tokens} tokens: gathered rows have other bits than quantized ones")
    y = torch.randn(tokens * top_k, hidden, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, top_k, device=device)
    if tokens <= DECODE_TOKENS:
        return {
            "routing, gather and sum": partial(_all, x, ids, experts, y, weights),
            "routing and gather": partial(route_quantize, x, ids, experts, FP8_BLOCK),
            "sum": partial(combine, y, routing.inverse, weights),
        }
    row = hidden + 4 * ceil_div(hidden, 128)
    moved = 2 * tokens * hidden + tokens * top_k * (row + 4)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target, filled = torch.empty_like(source), torch.empty(tokens * top_k * row, dtype=torch.uint8, device=device)
    return {
        "gather_quantize": gathered,
        "its quantizing launch alone": partial(_without_placing, gathered),
        "copy of as many bytes": partial(target.copy_, source),
        "fill of what it writes": partial(filled.fill_, 7),
        "route": partial(route, ids, experts),
        "route, launches one after the other": partial(_one_after_the_other, partial(route, ids, experts)),
        "combine": partial(combine, y, routing.inverse, weights),
    }


def _all(x: torch.Tensor, ids: torch.Tensor, experts: int, y: torch.Tensor, weights: torch.Tensor) -> Any:
    routing, rows = route_quantize(x, ids, experts, FP8_BLOCK)
    return routing, rows, combine(y, routing.inverse, weights)


def _without_placing(call: Call) -> Any:
    with mock.patch.object(place_scales, "place", return_value=None):
        return call()


def _one_after_the_other(call: Call) -> Any:
    with mock.patch.object(launches, "is_programmatic", return_value=False):
        return call()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the record to write")
    parser.add_argument("--keep", type=Path, help="an older record, whose layers stay in the new one")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds, after which no new point is begun")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("time_passes needs a GPU that CUDA sees; there is none")
        return 1
    started, timer = time.monotonic(), Timer(repeats=arguments.repeats, pause_s=0.002)
    found: list[dict[str, Any]] = []
    for model, tokens in POINTS:
        if time.monotonic() - started > arguments.limit:
            print(f"no time for {model}, {tokens} tokens")
            continue
        calls = calls_of(model, tokens)
        # A graph keeps addresses and no tensors: `calls`, which holds the operands, lives until the end.
        timed = {name: capture(call).replay for name, call in calls.items()} if tokens <= DECODE_TOKENS else calls
        us = {name: round(timing.median_us, 1) for name, timing in timer.gpu(timed).items()}
        found.append({"model": model, "tokens": tokens, "us": us})
        print(json.dumps(found[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(text_of(found, arguments))
    return 0


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def text_of(found: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The record: a field a line, then a point a line."""
    import triton

    fields: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__.split("+")[0],
        "triton": triton.__version__,
        "repeats": arguments.repeats,
        "flush": FLUSH,
        "what": "medians in turns; layers, and passes of few tokens, replayed from CUDA graphs",
    }
    lists = {"passes": found}
    if arguments.keep is not None:
        lists["layers"] = json.loads(arguments.keep.read_text())["layers"]
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    for name, points in lists.items():
        rows = ",\n".join(f"  {json.dumps(point)}" for point in points)
        lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
