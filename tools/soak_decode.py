"""Many layers of few tokens in one launch, on a Hopper GPU: their bits and those of several launches, and whether one of
a million launches gets stuck.

    python tools/soak_decode.py RECORD.json [--layers 100000] [--replays 1000000]

A CUDA graph draws tokens, ids (some are no expert) and routing weights, computes the layer both ways and counts layers
that differ in a bit; it is replayed for each of twelve shapes. Then a graph of one launch is replayed, with other tokens
and ids every time, while products run on another stream.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from padless.formats import FP8_BLOCK, MXFP4, MXFP4_REPACKED, BlockScaledFormat, BlockScaledTensor
from padless.kernels import replay
from padless.kernels.sm90_moe_decode.choice import Given
from padless.layouts import to_blocked
from padless.moe import layer as moe_layer
from padless.moe.activation import Activation
from padless.moe.decode import moe_in_one_launch
from padless.quantization.quantize import quantize
from padless.testing import machine
from padless.testing.timing import capture

# (E, k, H, I, T, weights)
SHAPES: list[tuple[int, int, int, int, int, BlockScaledFormat]] = [
    (256, 8, 2048, 512, 1, FP8_BLOCK),
    (256, 8, 2048, 512, 4, FP8_BLOCK),
    (256, 8, 2048, 512, 8, FP8_BLOCK),
    (512, 10, 2048, 512, 2, FP8_BLOCK),
    (128, 8, 2048, 768, 3, FP8_BLOCK),
    (32, 8, 1024, 256, 16, FP8_BLOCK),
    (3, 2, 128, 128, 5, FP8_BLOCK),
    (1024, 16, 512, 128, 6, FP8_BLOCK),
    (128, 8, 4096, 1408, 1, FP8_BLOCK),
    (64, 4, 2880, 2880, 1, MXFP4),
    (32, 4, 2880, 1472, 3, MXFP4_REPACKED),
    (9, 3, 96, 64, 4, MXFP4),
]
REPLAYED = (64, 8, 1024, 256, 2, FP8_BLOCK)
AT_ONCE = 2000  # replays between two looks at the clock


class Layer:
    """Random weights, and buffers of tokens. bad: layers that differed; total: of one element of each result."""

    def __init__(self, experts: int, top_k: int, h: int, i: int, tokens: int, format: BlockScaledFormat) -> None:
        self.what = (experts, top_k, h, i, tokens, format.name)
        self.experts, self.is_fp4 = experts, format is not FP8_BLOCK
        self.w13, self.w2 = (_weight(experts, n, k, format) for n, k in ((2 * i, h), (h, i)))
        self.activation = Activation("swiglu", "alternating", 1.702, 7.0, 1.0) if self.is_fp4 else Activation()
        shapes = ((experts, 2 * i), (experts, h))
        self.biases = [torch.randn(shape, device="cuda") if self.is_fp4 else None for shape in shapes]
        self.x = torch.empty((tokens, h), dtype=torch.bfloat16, device="cuda")
        self.ids = torch.empty((tokens, top_k), dtype=torch.int64, device="cuda")
        self.weights = torch.empty((tokens, top_k), device="cuda")
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.total = torch.zeros((), device="cuda")

    def draw(self) -> None:
        self.x.normal_()
        self.ids.random_(0, self.experts + 1)
        self.weights.uniform_()

    def one_launch(self) -> torch.Tensor:
        out = moe_in_one_launch(
            self.x, Given(self.ids, self.weights), self.w13, self.w2, activation=self.activation,
            format=None if self.is_fp4 else FP8_BLOCK, bias13=self.biases[0], bias2=self.biases[1], shared=None,
            out_dtype=torch.bfloat16, backend=None, only_if_faster=False,
        )  # fmt: skip
        assert out is not None, self.what
        return out

    def several_launches(self) -> torch.Tensor:
        act = self.activation
        with mock.patch.object(moe_layer, "moe_in_one_launch", return_value=None):
            return moe_layer.moe(
                self.x, self.ids, self.weights, self.w13, self.w2, gate_up=act.gate_up, alpha=act.alpha, limit=act.limit,
                up_offset=act.up_offset, bias13=self.biases[0], bias2=self.biases[1],
                activations=torch.bfloat16 if self.is_fp4 else None,
            )  # fmt: skip

    def compare(self) -> None:
        self.draw()
        both = (self.one_launch().view(torch.int16), self.several_launches().view(torch.int16))
        self.bad += (both[0] != both[1]).any()

    def launch(self) -> None:
        self.draw()
        self.total += self.one_launch()[0, 0]


def _weight(experts: int, n: int, k: int, format: BlockScaledFormat) -> BlockScaledTensor:
    found = quantize(torch.randn(experts, n, k, device="cuda").bfloat16() / k**0.5, format, kind="weight")
    if format is FP8_BLOCK or found.scale_layout == "blocked":
        return found
    return BlockScaledTensor(found.data, to_blocked(found.scale), format, None, "blocked")


def compare_layers(shape: Any, layers: int) -> dict[str, Any]:
    """Replays of one shape's layer both ways."""
    layer = Layer(*shape)
    graph = capture(layer.compare)
    layer.bad.zero_()
    began = time.time()
    for _ in range(layers):
        graph.replay()
    wrong = int(layer.bad)
    return {"layer": layer.what, "layers": layers, "wrong": wrong, "seconds": round(time.time() - began, 2)}


def replay_next_to_products(replays: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Replays of a graph of one launch, while another stream multiplies."""
    layer = Layer(*REPLAYED)
    graph, side = capture(layer.launch), torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device="cuda").bfloat16()
    began = time.time()
    for done in range(0, replays, AT_ONCE):
        with torch.cuda.stream(side):
            for _ in range(6):
                matrix @ matrix
        for _ in range(min(AT_ONCE, replays - done)):
            graph.replay()
        torch.cuda.synchronize()
        if done % (50 * AT_ONCE) == 0:
            say(f"{done} of {replays} replays, {time.time() - began:.0f} s")
    finite = bool(layer.total.isfinite())
    return {"layer": layer.what, "replays": replays, "seconds": round(time.time() - began, 1), "finite": finite}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--layers", type=int, default=100_000)
    parser.add_argument("--replays", type=int, default=1_000_000)
    given = parser.parse_args()
    machine.require_gpu("tools/soak_decode.py")
    torch.manual_seed(0)
    # Launches that were recorded would be repeated for both ways.
    with (
        mock.patch.object(replay, "run", lambda facts, call, inputs: call(*inputs)),
        mock.patch.object(replay, "known", return_value=None),
    ):
        record: dict[str, Any] = {"machine": machine.describe(), "shapes": []}
        for shape in SHAPES:
            record["shapes"].append(compare_layers(shape, -(-given.layers // len(SHAPES))))
            print(record["shapes"][-1], flush=True)
        record["replays"] = replay_next_to_products(given.replays, print)
    given.record.write_text(json.dumps(record, indent=1) + "\n")
    return sum(found["wrong"] for found in record["shapes"])


if __name__ == "__main__":
    sys.exit(main())
