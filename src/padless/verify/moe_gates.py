"""SwiGLUs with a rule, such as gpt-oss', in the epilogue: a check of ``padless verify``. It raises AssertionError."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from padless.epilogue import Epilogue, EpilogueTensors, GateRule
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.kernels.table import kernels_arch
from padless.moe.fused import SCALE_RULES
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
from padless.quantization.quantize import quantize
from padless.reference.epilogue import group_values
from padless.runtime.choices import BackendName
from padless.verify import moe as layers
from padless.verify.fuzz.place import Place

RULES = (GateRule(1.702, 7.0, 1.0), GateRule(limit=0.75))
# (activations, None for bfloat16; weights; output, None for bfloat16; order of gate and up)
HOPPERS: tuple[tuple[BlockScaledFormat | None, BlockScaledFormat, BlockScaledFormat | None, str], ...] = (
    (None, MXFP4, None, "alternating"),
    (FP8_BLOCK, MXFP4, FP8_BLOCK, "alternating"),
    (NVFP4, NVFP4, NVFP4, "alternating"),
    (FP8_BLOCK, FP8_BLOCK, FP8_BLOCK, "concatenated"),
    (MXFP8, MXFP8, MXFP8, "interleaved"),
)
BLACKWELLS = (
    (FP8_BLOCK, FP8_BLOCK, FP8_BLOCK, "concatenated"),
    (MXFP8, MXFP4, MXFP8, "interleaved"),
    (NVFP4, NVFP4, NVFP4, "concatenated"),
)
SIZES, COLUMNS, DEPTH = ((1, 0, 9, 2), (200, 0, 130, 7)), 384, 256  # as in decoding, and as in prefill
# As in `padless.verify.epilogue`: what the exponential may be off by.
RELATIVE, ABSOLUTE = 2.0**-21 + 2.0**-22, 2.0**-140


class Gated(NamedTuple):
    """A product with a rule; operands on the CPU."""

    name: str
    a: BlockScaledTensor | torch.Tensor
    b: BlockScaledTensor
    offs: torch.Tensor
    bias: torch.Tensor
    format: BlockScaledFormat | None
    gate_up: str
    rule: GateRule

    def epilogue(self, *, values: bool) -> Epilogue:
        """The epilogue of the layer, or the one that stores its float32 values."""
        how: dict[str, object] = {"bias": True, "activation": f"swiglu_{self.gate_up}", "gate_rule": self.rule}
        if values or self.format is None:
            return Epilogue(d_dtype=torch.float32 if values else torch.bfloat16, **how)  # type: ignore[arg-type]
        layout = "plain_mn" if self.format == FP8_BLOCK else "plain"
        rule = SCALE_RULES.get(self.format.name, "rceil")
        return Epilogue(row_format=self.format, row_layout=layout, scale_rule=rule, **how)  # type: ignore[arg-type]

    def run(self, device: str, backend: BackendName | None, *, values: bool) -> EpilogueTensors:
        scale = torch.full((1,), 0.02, device=device) if self.format == NVFP4 and not values else None
        given = EpilogueTensors(bias=self.bias.to(device), global_scale=scale)
        return grouped_gemm_epilogue(
            *self.operands(device), self.offs.to(device), self.epilogue(values=values), given, backend=backend
        )

    def operands(self, device: str) -> tuple[BlockScaledTensor | torch.Tensor, BlockScaledTensor]:
        """a and b on a device."""
        a = self.a.to(device) if isinstance(self.a, torch.Tensor) else _moved(self.a, device)
        return a, _moved(self.b, device)


def _moved(t: BlockScaledTensor, device: str) -> BlockScaledTensor:
    scale = None if t.global_scale is None else t.global_scale.to(device)
    return BlockScaledTensor(t.data.to(device), t.scale.contiguous().to(device), t.format, scale, t.scale_layout)


def problems_of(arch: str) -> Iterator[Gated]:
    """Products of every kernel of ``arch`` that stores a SwiGLU."""
    for seed, (a, b, out, gate_up) in enumerate(HOPPERS if kernels_arch(arch) == "sm_90a" else BLACKWELLS):
        for sizes in SIZES:
            draw = torch.Generator().manual_seed(seed)
            offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
            x = 2 * torch.randn(sum(sizes) + 3, DEPTH, generator=draw)
            w = torch.randn(len(sizes), COLUMNS, DEPTH, generator=draw) / DEPTH**0.5
            bias = torch.randn(len(sizes), COLUMNS, generator=draw)
            rows = x.to(torch.bfloat16) if a is None else quantize(x, a)
            rule = RULES[seed % 2]
            name = f"{'BF16' if a is None else a.name} x {b.name}, {gate_up}, {rule}"
            yield Gated(name, rows, quantize(w, b, kind="weight"), offs, bias, out, gate_up, rule)


def check_gates(place: Place) -> None:
    """Values are the reference's for the GPU's sums, as far as exp's error goes; outputs are those values', exactly."""
    for problem in problems_of(place.arch):
        device, backend = str(place.device), place.backend
        offs = problem.offs.to(device)
        sums = grouped_gemm(*problem.operands(device), offs, out_dtype=torch.float32, backend=backend)
        values, stored = (problem.run(device, backend, values=values) for values in (True, False))
        assert values.d is not None
        place.judge.ask(partial(_judge_values, problem, sums, values.d))
        place.judge.ask(partial(_judge_stored, problem, values.d, stored))


def _judge_values(problem: Gated, sums: torch.Tensor, values: torch.Tensor) -> int:
    given, start = EpilogueTensors(bias=problem.bias), 0
    for group, end in enumerate(problem.offs.tolist()):
        if start < end:
            own = sums[start:end].cpu()
            want = group_values(own, group, start, problem.epilogue(values=True), given).double()
            off = (values[start:end].cpu().double() - want).abs()
            assert bool((off <= want.abs() * RELATIVE + ABSOLUTE).all()), f"{problem.name}: values of group {group}"
        start = end
    return start * values.shape[1]


def _judge_stored(problem: Gated, values: torch.Tensor, stored: EpilogueTensors) -> int:
    """The layer's epilogue stores its own values, rounded or quantized, bit for bit."""
    rows, values = int(problem.offs[-1]), values.cpu()
    if problem.format is None:
        assert stored.d is not None
        return layers.same_bits(problem.name, stored.d[:rows], values[:rows].to(torch.bfloat16))
    assert stored.row_codes is not None
    assert stored.row_scale is not None
    scale = torch.tensor(0.02) if problem.format == NVFP4 else None
    want = quantize(values[:rows], problem.format, global_scale=scale)
    codes = stored.row_codes[:rows].cpu().view(torch.uint8)
    count = layers.same_bits(f"codes of {problem.name}", codes, want.data.view(torch.uint8))
    scales = stored.row_scale[:rows].contiguous()
    return count + layers.same_bits(f"scales of {problem.name}", scales, want.scale.contiguous())
