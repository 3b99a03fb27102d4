"""Microseconds of decoding layers in one launch and in four, by which `padless.moe.decode.is_faster` is chosen.

    python tools/time_one_launch.py OUT.json      on a Hopper GPU, about 40 s

The models of `padless bench decoding` at 1 to 8 tokens, their layers with weights of their own in turn in a CUDA graph;
one launch, four, and both again, so that a drift of the clock shows.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from padless.bench.cases.layer import padless_layer
from padless.bench.cases.problems.decoding import MODELS, DecodingPoint, Stack, layers_of, make_stack
from padless.kernels import remembered, replay
from padless.kernels.sm90_moe_decode import host
from padless.moe import decode
from padless.testing import machine
from padless.testing.timing import capture

TURNS = (("one", True), ("four", False), ("one again", True), ("four again", False))


def layer_us(stack: Stack, in_one: bool, repeats: int = 9) -> float:
    """A layer's time, with nothing remembered of earlier calls, whose scratch is taken back: there is not enough for
    all.
    """
    remembered.forget()
    replay._REPLAYS.clear()
    host._SCRATCH.clear()
    for device, chunks in host._CHUNKS.items():
        host._USED[device] = 0
        del chunks[1:]
        chunks[0].zero_()
    with mock.patch.object(decode, "is_faster", return_value=in_one):
        graph = capture(lambda: [padless_layer(layer) for layer in stack.layers])
    if host._FULL:
        raise RuntimeError("a layer found no scratch, so its time is that of several launches")
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(stack.layers))
    return round(median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found = []
    for name, (experts, top_k, hidden, width, format) in MODELS.items():
        layers = layers_of(top_k, hidden, width, format)
        make = partial(DecodingPoint, name, experts=experts, top_k=top_k, hidden=hidden, intermediate=width)
        for tokens in range(1, 9):
            stack = make_stack(make(tokens, format=format, layers=layers), 0, "cuda")
            us = {turn: layer_us(stack, in_one) for turn, in_one in TURNS}
            found.append({"model": name, "tokens": tokens, "hidden_words": tokens * top_k * width, "us": us})
            print(name, tokens, *(f"{turn} {t}" for turn, t in us.items()), flush=True)
    given.out.write_text(json.dumps({"kind": "one launch", "machine": machine.describe(), "found": found}, indent=1))


if __name__ == "__main__":
    main()
