"""torchao (github.com/pytorch/ao): the differentiable grouped product in block-scaled FP8 of its prototypes.

It quantizes both operands in every pass, pads groups to 128 rows and multiplies by DeepGEMM, which has to be there:
without it torchao emulates the product in bf16. It reads the groups' sizes on the host, and so waits for the GPU several
times in a step and is in no CUDA graph.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from padless.bench.peers import Peer, hopper_or_reason, look_in, point_at_cuda_toolkit

_PRODUCTS = "torchao.prototype.moe_training.blockwise_fp8.grouped_mm"
_QUANTIZERS = [f"torchao.prototype.blockwise_fp8_training.{name}" for name in ("kernels", "deepgemm_quant")]


def few(configs: Sequence[Any]) -> list[Any]:
    """Of what a quantizer tries, every tile with 4 warps and the fewest stages: all 45 compile one by one.

    Stages say nothing there, as no quantizer has a loop; they are bound by memory.
    """
    least = min(config.num_stages for config in configs)
    return [c for c in configs if c.num_stages == least and c.num_warps == 4]


class TorchAo(Peer):
    """The adapter; `folder`/torchao, and `folder`/deepgemm, are searched before the environment."""

    name = "torchao"
    licence = "BSD-3-Clause"
    compiles_at_run_time = False  # nothing that the grids compile ahead
    by_default = False  # it has a training step alone
    loading = "import torchao, deep_gemm"

    def obstacle(self) -> str:
        return hopper_or_reason() or point_at_cuda_toolkit()

    def load(self) -> Any:
        for name in ("torchao", "deepgemm"):
            look_in(self._folder, name)
        import_module("deep_gemm")
        self._products = import_module(_PRODUCTS)
        tuned = import_module("triton.runtime.autotuner").Autotuner
        for name in _QUANTIZERS:
            for kernel in vars(import_module(name)).values():
                if isinstance(kernel, tuned):
                    kernel.configs = few(kernel.configs)
        return import_module("torchao")

    def product(self, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x[rows of g] @ w[g].T, (M, N) bfloat16, under autograd: x (M, K), w (G, N, K), K and N multiples of 128."""
        out: torch.Tensor = self._products._to_fp8_blockwise_then_scaled_grouped_mm(x, w.transpose(-2, -1), offs)
        return out

    def compile_ahead(
        self, products: Iterable[tuple[int, int, int, int]], seconds: float
    ) -> set[tuple[int, int, int, int]]:
        """Compiles what products (rows, G, N, K) and their gradients run, a process each; those that are done in time.

        A product along the inputs' gradient is one with N and K exchanged, so its kernel compiles with the others.
        """
        wanted = list(products)
        each = [(*p, 1) for p in wanted] + [(m, g, k, n, 0) for m, g, n, k in wanted] + [(*p, 0) for p in wanted]
        program = [sys.executable, "-m", __name__, str(self._folder or "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        none = subprocess.DEVNULL
        running = {p: subprocess.Popen([*program, *map(str, p)], env=env, stdout=none, stderr=none) for p in each}
        ends, failed = time.monotonic() + seconds, set[tuple[int, int, int, int]]()
        for (m, g, n, k, backward), process in running.items():
            try:
                code = process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code != 0:
                failed |= {(m, g, n, k), *(() if backward else [(m, g, k, n)])}
        return set(wanted) - failed


def main(folder: str, *numbers: str) -> None:
    """One product of random values, and its gradients where the last number is not 0."""
    rows, groups, n, k, backward = map(int, numbers)
    peer = TorchAo(Path(folder) if folder else None)
    if reason := peer.missing():
        raise RuntimeError(reason)
    x, w = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in ((rows, k), (groups, n, k))
    )
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * (rows // groups)
    out = peer.product(x, w, offs)
    if backward:
        out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
