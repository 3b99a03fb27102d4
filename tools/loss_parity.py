"""Judges loss parity on recipes that are right and on ones with a planted fault.

    python tools/loss_parity.py [--task tenants] [--size large] [--seconds 60] [--seeds 3] [--recipe ..] [--fault ..]

Trains the model of `padless train-demo`, or of two tenants (tools/tenants.py), in each recipe, and on the same batches
in fp8 with each fault.
The number of steps is what --seconds allow, or --steps. Prints the table, writes the record and the picture, and fails
where a recipe is not within its limits or a fault is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from padless.demo.train import run as demo
from padless.demo.train.model import Model, ModelSize
from padless.demo.train.parity import verdicts
from padless.demo.train.report import print_training, save_training
from padless.demo.train.text import SOURCES, TOPICS, help_topics, library_sources
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import to_mn_major
from padless.nn import RECIPES, experts_function
from padless.nn.linear import QuantizedModule
from padless.nn.quantizers import quantize_rows
from padless.quantization.lifting import lift
from padless.quantization.quantize import dequantize, quantize
from tenants import Tenants

MEDIUM = ModelSize(layers=4, hidden=512, heads=8, experts=16, top_k=4, intermediate=512, length=256, batch=32)
SIZES = {"small": demo.SMALL, "medium": MEDIUM, "large": demo.LARGE}
TASKS = {"text": Model, "tenants": Tenants}
TRIAL_STEPS, MOST_STEPS = 16, 1000
RIGHT = ("bf16", "fp8", "fp8_1d1d")


@contextmanager
def stale_codes() -> Iterator[None]:
    """A weight is quantized once, and never again after an optimizer's step."""
    fresh = QuantizedModule._operands

    def operands(self: Any, name: str, *arguments: Any) -> Any:
        stale = self.__dict__.setdefault("stale", {})
        if name not in stale:
            stale[name] = fresh(self, name, *arguments)
        return stale[name]

    with patch.object(QuantizedModule, "_operands", operands):
        yield


@contextmanager
def scales_of_the_row_before() -> Iterator[None]:
    """Rows of every product, forward and dgrad, have the scales of the rows before them."""
    right = experts_function.product

    def shifted(a: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(a, BlockScaledTensor):
            a = BlockScaledTensor(a.data, to_mn_major(a.scale.roll(1, 0)), a.format)
        return right(a, *arguments, **options)

    with patch.object(experts_function, "product", shifted):
        yield


@contextmanager
def blocks_of_gradients() -> Iterator[None]:
    """Both gradients that a dgrad reads have a scale per 128 x 128."""
    right, right_activation = experts_function.operands_of_rows, experts_function.activation_gradients

    def in_squares(x: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(x, FP8_BLOCK, kind="weight"), torch.bfloat16)

    def by_blocks(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows, columns = right(x, *arguments, **options)
        if options.get("is_gradient"):
            rows = quantize_rows(in_squares(lift(x).index_select(0, options["tokens"])))
        return rows, columns

    def activation_by_blocks(dh: Any, z: Any, offs: Any, prob: Any, gate_up: Any, block: Any) -> Any:
        dz, _, _ = experts_function.call("swiglu_backward", dh, z, offs, prob, gate_up)
        found = right_activation(dh, z, offs, prob, gate_up, block)
        return replace(found, dz_rows=quantize_rows(in_squares(dz)))

    with (
        patch.object(experts_function, "operands_of_rows", by_blocks),
        patch.object(experts_function, "activation_gradients", activation_by_blocks),
    ):
        yield


FAULTS = {
    "stale codes": stale_codes,
    "scales of the row before": scales_of_the_row_before,
    "128 x 128 of dY in dgrad": blocks_of_gradients,
}


def main() -> int:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="text")
    parser.add_argument("--size", choices=list(SIZES), default="large" if on_gpu else "small")
    parser.add_argument("--steps", type=int, help="of every run, where not --seconds decide")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, beside compiling")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, help="the learning rate, where it is not the demo's")
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=RIGHT, help="the first is compared with")
    parser.add_argument("--fault", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, default=Path("padless-out"))
    options = parser.parse_args()

    device = "cuda" if on_gpu else "cpu"
    demo.LEARNING_RATE[device] = options.rate or demo.LEARNING_RATE[device]
    source = (SOURCES if on_gpu else TOPICS) + (", read by two tenants" if options.task == "tenants" else "")
    on: dict[str, Any] = {
        "size": SIZES[options.size], "device": device, "text": library_sources() if on_gpu else help_topics(),
        "source": source, "model": TASKS[options.task],
    }  # fmt: skip

    def trained(steps: int, seeds: int) -> demo.Training:
        training = demo.train([(r, RECIPES[r]) for r in options.recipe], steps=steps, seeds=range(seeds), **on)
        for fault in options.fault:
            with FAULTS[fault]():
                faulty = demo.train([(fault, RECIPES["fp8"])], steps=steps, seeds=range(seeds), **on)
            training = replace(training, curves=training.curves + faulty.curves)
        return training

    steps = options.steps
    if steps is None:
        trial = trained(TRIAL_STEPS, 1)
        steps = int(options.seconds / options.seeds / sum(curve.step_seconds for curve in trial.curves))
        steps = min(max(steps, TRIAL_STEPS), MOST_STEPS)
        print(f"{steps} steps", flush=True)
    training = trained(steps, options.seeds)
    console = Console(width=120)
    print_training(console, training)
    save_training(console, training, options.out)
    return int(any(v.holds == (v.recipe in FAULTS) for v in verdicts(training)))


if __name__ == "__main__":
    sys.exit(main())
