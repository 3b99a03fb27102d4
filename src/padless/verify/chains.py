"""Calls one after another, each of which may begin while the one ahead of it is ending.

Layers of an expert: a quantising call makes codes and scales that the next two calls read at once, one of them into an
output that a copy ahead of it is still reading. Inputs and offsets are written by copies just before. Everything is done
twice, waiting for the GPU after each step and not waiting at all; what a call read too early would be another input's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, BlockScaledFormat, BlockScaledTensor
from padless.kernels.table import ROUTES, kernels_arch
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.testing.operands import moved
from padless.testing.timing import capture
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place

FORMATS = (FP8_BLOCK, MXFP8, MXFP4)
Input = tuple[BlockScaledTensor, torch.Tensor]  # of the first layer: activations and offsets
LAYERS = 6
WIDTH = 1024  # N and K: what comes out goes in again
# Two inputs of as many rows, cut differently, so that stale offsets are seen as well.
SIZES = ((1300, 0, 7, 129, 627, 64, 1, 540), (1, 627, 540, 0, 64, 129, 7, 1300))
REPEATS = 20
_SLEEP_CYCLES = 20_000_000  # 10 ms, in which the host puts all calls behind one another into the stream


@dataclass(frozen=True)
class Chain:
    """Weights of all layers, two inputs, and the buffers that every run writes its input to."""

    weights: tuple[BlockScaledTensor, ...]
    inputs: tuple[Input, Input]
    given: Input
    out: torch.Tensor
    backend: BackendName | None

    def load(self, which: int) -> None:
        """Copies an input to where the first layer reads it."""
        (x, offs), (to, to_offs) = self.inputs[which], self.given
        for a, b in ((x.data, to.data), (x.scale, to.scale), (offs, to_offs)):
            _bytes(b).copy_(_bytes(a))

    def run(self, pause: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        """The products of all layers. `pause` is called after every step."""
        products = []
        x, offs = self.given
        for weight in self.weights:
            outputs = grouped_gemm_quant(
                a_tensor=x,
                b_tensor=weight,
                padded_offsets=offs,
                d_format=weight.format,
                column_output=False,
                backend=self.backend,
            )
            assert outputs.row is not None
            x = outputs.row
            pause()
            grouped_gemm(x, weight, offs, out=self.out, backend=self.backend)
            pause()
            products.append(self.out.clone())
            pause()
        return products


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t if t.element_size() == 4 else t.view(torch.uint8)


def _input(sizes: Sequence[int], format: BlockScaledFormat, generator: torch.Generator, device: str) -> Input:
    x = quantize(torch.randn(sum(sizes), WIDTH, generator=generator), format, kind="activation")
    return moved(x, device), group_offsets(sizes).to(device)


def make_chain(format: BlockScaledFormat, device: str, backend: BackendName | None, seed: int = 0) -> Chain:
    """A chain whose values keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    weights = tuple(
        moved(
            quantize(torch.randn(len(SIZES[0]), WIDTH, WIDTH, generator=generator) / WIDTH**0.5, format, kind="weight"),
            device,
        )
        for _ in range(LAYERS)
    )
    first, second, given = (_input(sizes, format, generator, device) for sizes in (*SIZES, SIZES[0]))
    out = torch.empty((sum(SIZES[0]), WIDTH), dtype=torch.bfloat16, device=device)
    return Chain(weights, (first, second), given, out, backend)


def formats_of(arch: str) -> list[BlockScaledFormat]:
    """Formats whose quantised output the next call can read."""
    here = {p.a for p in ROUTES if (p.operation, p.arch, p.a) == ("grouped_gemm_quant", kernels_arch(arch), p.b)}
    return [format for format in FORMATS if format.name in here]


def check_chains(place: Place) -> None:
    """A chain's products do not depend on whether somebody waited between its calls."""
    for format in formats_of(place.arch):
        chain = make_chain(format, str(place.device), place.backend)
        expected = []
        for which in (0, 1):
            chain.load(which)
            expected.append(chain.run(place.synchronize))
        place.judge.ask(partial(assert_all_differ, *expected))
        if place.device.type != "cuda":
            continue
        captured: list[torch.Tensor] = []
        graph = capture(lambda: captured.__setitem__(slice(None), chain.run()), place.device)  # noqa: B023
        for repeat in range(REPEATS):
            which = repeat % 2
            torch.cuda._sleep(_SLEEP_CYCLES)
            chain.load(which)
            place.judge.ask(partial(_compare, chain.run(), expected[which], f"{format.name}, in a stream"))
            chain.load(which)
            graph.replay()
            place.judge.ask(partial(_compare, captured, expected[which], f"{format.name}, in a graph"))


def assert_all_differ(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> int:
    """Of two inputs every layer makes other products; else a stale one would look right."""
    for layer, (x, y) in enumerate(zip(one, other, strict=True)):
        same = (x == y).float().mean().item()
        assert same < 0.05, f"layer {layer} gives {same:.0%} of its products for either input"
    return 0


def _compare(products: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], where: str) -> int:
    for layer, (found, right) in enumerate(zip(products, expected, strict=True)):
        rows = (found.view(torch.int16) != right.view(torch.int16)).any(dim=1).nonzero().flatten().tolist()
        assert not rows, f"{where}: layer {layer}, {len(rows)} rows differ, the first is {rows[0]}"
    return sum(found.numel() for found in products)


CHECK = Check(check_chains)
