"""FlashInfer's MonoMoE (github.com/flashinfer-ai/flashinfer): a layer in one launch on Hopper, router included.

It has one shape, 256 experts of 2048 x 512 with 8 a token, and takes up to 8 tokens. Its result is not that of padless:
hidden rows have scales of 1 x 64, routing weights are multiplied in before they are quantized, and slots are summed in
the order in which they are ready. The library is what tools/monomoe/build.sh makes of FlashInfer's wheel, since its
Python package builds with nvcc where it is called.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from padless.bench.peers import Contender, Peer, hopper_or_reason

if TYPE_CHECKING:
    from padless.bench.cases.problems.layer import LayerProblem

NAME = "monomoe"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 256, 8, 2048, 512
MOST_TOKENS = 8
_TOLERANCE = 0.1


class MonoMoe(Peer):
    """The adapter; the library is `folder`/monomoe/monomoe.so."""

    name = NAME
    licence = "Apache-2.0"
    by_default = False  # it has a layer alone
    compiles_at_run_time = False
    loading = "loading monomoe.so"
    needs = ("monomoe_layer", "monomoe_scratch_bytes")

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder)
        self._scratch: torch.Tensor | None = None

    @property
    def _file(self) -> Path:
        return (self._folder or Path()) / "monomoe" / "monomoe.so"

    def obstacle(self) -> str:
        there = self._folder is not None and self._file.exists()
        return hopper_or_reason() or ("" if there else "no monomoe/monomoe.so among the peers (tools/monomoe/build.sh)")

    def load(self) -> Any:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # it calls the driver by name
        library = ctypes.CDLL(str(self._file))
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        library.monomoe_scratch_bytes.restype = ctypes.c_size_t
        library.monomoe_layer.argtypes = (pointer, number, *(pointer,) * 7, number, pointer)
        return library

    def version(self) -> str:
        return self._file.with_name("version.txt").read_text().strip()

    def layer(self, problem: LayerProblem) -> list[Contender]:
        p = problem.point
        shape = (p.experts, p.top_k, p.hidden, p.intermediate)
        if shape != (EXPERTS, TOP_K, HIDDEN, INTERMEDIATE) or p.tokens > MOST_TOKENS:
            return []
        device = problem.x.device
        if self._scratch is None:  # one for all layers, as in an engine: the kernel keeps it right
            self._scratch = torch.zeros(self._library.monomoe_scratch_bytes(), dtype=torch.uint8, device=device)
        w13, out = in_eights(problem.w13.data), torch.full_like(problem.x, float("nan"))
        operands = (problem.logits, w13, problem.w13.scale, problem.w2.data, problem.w2.scale, out, self._scratch)

        def call() -> None:
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            pointers = [t.data_ptr() for t in operands]
            error = self._library.monomoe_layer(problem.x.data_ptr(), p.tokens, *pointers, TOP_K, stream)
            if error:
                raise RuntimeError(f"MonoMoE was not launched: CUDA error {error}")

        return [Contender(NAME, call, lambda: out, _TOLERANCE, buffer=out)]


def in_eights(w13: torch.Tensor) -> torch.Tensor:
    """Rows of w13 (E, 2 I, H) in its order: eight of gate, eight of up, in turn."""
    experts, rows, hidden = w13.shape
    gate, up = w13.view(torch.uint8).view(experts, 2, rows // 16, 8, hidden).unbind(1)
    return torch.stack((gate, up), dim=2).view(experts, rows, hidden).view(w13.dtype)
