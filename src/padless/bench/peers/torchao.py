"""torchao (github.com/pytorch/ao): the differentiable grouped product in block-scaled FP8 of its prototypes.

It quantizes both operands in every pass, pads groups to 128 rows and multiplies by DeepGEMM, which has to be there:
without it torchao emulates the product in bf16. It reads the groups' sizes on the host, and so waits for the GPU several
times in a step and is in no CUDA graph.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from padless.bench.peers import Peer, hopper_or_reason, look_in, point_at_cuda_toolkit

_PRODUCTS = "torchao.prototype.moe_training.blockwise_fp8.grouped_mm"


class TorchAo(Peer):
    """The adapter; `folder`/torchao, and `folder`/deepgemm, are searched before the environment."""

    name = "torchao"
    compiles_at_run_time = False  # nothing that the grids compile ahead
    loading = "import torchao, deep_gemm"

    def obstacle(self) -> str:
        return hopper_or_reason() or point_at_cuda_toolkit()

    def load(self) -> Any:
        for name in ("torchao", "deepgemm"):
            look_in(self._folder, name)
        import_module("deep_gemm")
        self._products = import_module(_PRODUCTS)
        return import_module("torchao")

    def product(self, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x[rows of g] @ w[g].T, (M, N) bfloat16, under autograd: x (M, K), w (G, N, K), K and N multiples of 128."""
        out: torch.Tensor = self._products._to_fp8_blockwise_then_scaled_grouped_mm(x, w.transpose(-2, -1), offs)
        return out
