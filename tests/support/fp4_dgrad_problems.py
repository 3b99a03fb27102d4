"""Random gradients through FP4 weights: operands, their product in float64, and the bits of the tensor core's sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from padless.emulator.fake_driver import emulated_driver
from padless.formats import FORMAT_BY_NAME, BlockScaledTensor
from padless.kernels.sm90_fp4_dgrad.config import Fp4DgradConfig
from padless.layouts import to_blocked, unpack_fp4
from padless.ops.fp4_input_gradient import fp4_input_gradient
from padless.ops.grouped_gemm import group_offsets
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.runtime.choices import BackendName
from padless.testing.guarded import GuardedOutput
from padless.testing.operands import spans
from support.bf16_problems import Shape

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
# Bytes of scales, from and to. MXFP4: around 1, the smallest, those that take two factors; NVFP4: all numbers.
SCALES = {"MXFP4": (116, 128), "smallest": (0, 4), "largest": (124, 136), "NVFP4": (0, 127)}
EMULATOR: BackendName = "emulator"


@dataclass(frozen=True)
class Problem:
    """dy (M, N) bfloat16, weights (G, N, K), and where groups end. values: of the weights, without a global scale."""

    dy: torch.Tensor
    weights: BlockScaledTensor
    values: torch.Tensor
    offs: torch.Tensor

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return spans(self.offs.tolist(), self.dy.shape[0])

    @property
    def last(self) -> int:
        return max((end for _, end in self.groups), default=0)

    def factors(self) -> torch.Tensor:
        """(G,) float32 global scales."""
        scale, groups = self.weights.global_scale, self.values.shape[0]
        return torch.ones(groups) if scale is None else scale.expand(groups)

    def exact(self) -> torch.Tensor:
        """The product in float64; rows of groups alone."""
        return self._product(self.values)

    def sizes(self) -> torch.Tensor:
        """The same of absolute values: what errors are measured by."""
        return replace(self, dy=self.dy.abs())._product(self.values.abs())

    def _product(self, values: torch.Tensor) -> torch.Tensor:
        scaled = values * self.factors().double()[:, None, None]
        return torch.cat([self.dy[a:b].double() @ scaled[g] for g, (a, b) in enumerate(self.groups)])

    def wanted(self) -> torch.Tensor:
        """The kernel's bits: the tensor core's sums, times the global scale, rounded; rows of groups alone."""
        values = self.values.to(torch.bfloat16)
        assert torch.equal(values.double().nan_to_num(), self.values.nan_to_num()), "a value is no bfloat16 number"
        sums = grouped_gemm_plain_reference(
            self.dy, values.transpose(1, 2), self.offs, out_dtype=torch.float32, accumulation="tensor_core"
        )
        parts = [sums[a:b] * self.factors()[g] for g, (a, b) in enumerate(self.groups)]
        return torch.cat(parts).to(torch.bfloat16)

    def blocked(self) -> Problem:
        """The same with scales in the 32x4x4 layout, NaN where there are no rows."""
        w = self.weights
        scale = torch.nn.functional.pad(w.scale.view(torch.uint8), (0, 0, 0, -w.scale.shape[1] % 128), value=0xFF)
        stored = to_blocked(scale.view(w.scale.dtype))
        return replace(self, weights=BlockScaledTensor(w.data, stored, w.format, w.global_scale, "blocked"))


def random_problem(
    format: str, shape: Shape, seed: int = 0, *, scales: str = "", globals_each: bool = False
) -> Problem:
    """Operands on the CPU. scales: a key of `SCALES`; globals_each: NVFP4's global scale for each group."""
    generator = torch.Generator().manual_seed(seed)
    groups, n, k = len(shape.sizes), shape.n, shape.k

    def draw(low: int, high: int, *dims: int) -> torch.Tensor:
        return torch.randint(low, high, dims, generator=generator, dtype=torch.uint8)

    codes = draw(0, 256, groups, n, k // 2).view(torch.float4_e2m1fn_x2)
    block = 16 if format == "NVFP4" else 32
    bytes_ = draw(*SCALES[scales or format], groups, n, k // block)
    if format == "NVFP4":
        scale = bytes_.view(torch.float8_e4m3fn)
        sizes = scale.double()
        global_scale = torch.rand(groups if globals_each else 1, generator=generator) + 0.5
    else:
        scale, global_scale = bytes_.view(torch.float8_e8m0fnu), None
        sizes = torch.exp2(bytes_.double() - 127)
    unpacked = unpack_fp4(codes).long()
    signs = 1.0 - 2.0 * (unpacked // 8)
    values = signs * _E2M1[unpacked % 8] * sizes.repeat_interleave(block, 2)
    dy = torch.randn(shape.rows, n, generator=generator).to(torch.bfloat16)
    weights = BlockScaledTensor(codes, scale, FORMAT_BY_NAME[format], global_scale)
    return Problem(dy, weights, values, group_offsets(shape.sizes))


def launched(problem: Problem, config: Fp4DgradConfig | None = None, **settings: Any) -> torch.Tensor:
    """The emulator's result in a guarded output, rows of groups alone; its reports are errors."""
    guarded = GuardedOutput(problem.dy.shape[0], problem.values.shape[2], torch.bfloat16)
    with emulated_driver().configured(**settings):
        fp4_input_gradient(problem.dy, problem.weights, problem.offs, out=guarded.out, backend=EMULATOR, config=config)
    guarded.check(problem.last, expect_finite=False)
    return guarded.out[: problem.last]
