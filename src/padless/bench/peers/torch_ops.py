"""torch's own products: grouped FP8 with one scale per row, grouped bf16, and cuBLASLt's dense block-scaled FP8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from padless.bench.peers import Contender, Peer, returning
from padless.bench.problem import GroupedProblem
from padless.formats import round_up

_ROW_SCALED_TOLERANCE = 0.1  # other codes of the same values: each operand is 2 to 3% from its values


class TorchOps(Peer):
    """The adapter."""

    name = "torch"
    licence = "BSD-3-Clause"
    compiles_at_run_time = False

    def obstacle(self) -> str:
        return "" if torch.cuda.is_available() else "needs a CUDA GPU"

    def load(self) -> Any:
        return torch

    def grouped(self, problem: GroupedProblem) -> list[Contender]:
        """torch_rowwise: FP8 with one scale per row of a and per row of each weight. torch_bf16: no quantisation."""
        x, w = problem.values()
        x8, x_scale = rowwise(x)
        w8, w_scale = rowwise(w)
        columns, offs, dtype = w8.transpose(-2, -1), problem.offs, torch.bfloat16

        def fp8() -> torch.Tensor:
            scales = (x_scale, w_scale)
            return torch._scaled_grouped_mm(x8, columns, *scales, offs=offs, out_dtype=dtype, use_fast_accum=True)

        def bf16() -> torch.Tensor:
            return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs, out_dtype=dtype)

        return [
            returning("torch_rowwise", fp8, _ROW_SCALED_TOLERANCE),
            returning("torch_bf16", bf16, _ROW_SCALED_TOLERANCE),
        ]

    def dense(self, problem: GroupedProblem) -> list[Contender]:
        """cublaslt_block: the scales padless uses. cublaslt_tensor: one scale per tensor, an upper bound."""
        a, b = problem.a.data, problem.b.data[0].t()
        scale_b = cublaslt_weight_scale(problem.b.scale[0])
        one = torch.ones((), device=problem.device)

        def block() -> torch.Tensor:
            return F.scaled_mm(
                a,
                b,
                problem.a.scale,
                F.ScalingType.BlockWise1x128,
                scale_b,
                F.ScalingType.BlockWise128x128,
                swizzle_a=F.SwizzleType.NO_SWIZZLE,
                swizzle_b=F.SwizzleType.NO_SWIZZLE,
                output_dtype=torch.bfloat16,
            )

        def tensor() -> torch.Tensor:
            return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return [returning("cublaslt_block", block), Contender("cublaslt_tensor", tensor, whole=False)]


def rowwise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of (.., rows, K) with one decode scale per row, (.., rows) float32."""
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    scale = torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device)
    batches = values if values.dim() == 3 else values[None]
    for index in range(batches.shape[0]):  # one group at a time: float32 copies of all weights would be large
        x = batches[index].to(torch.float32)
        s = x.abs().amax(dim=-1).clamp(min=1e-4) / 448.0
        code = (x / s[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        (codes if values.dim() == 2 else codes[index]).copy_(code)
        (scale if values.dim() == 2 else scale[index]).copy_(s)
    return codes, scale


def cublaslt_weight_scale(scale: torch.Tensor) -> torch.Tensor:
    """128x128 scales (N / 128, k_blocks) as cuBLASLt takes them: (k_blocks rounded up to 4, N / 128), K-major."""
    k_blocks = scale.shape[1]
    padded = F.pad(scale, (0, round_up(k_blocks, 4) - k_blocks))
    return padded.t()
