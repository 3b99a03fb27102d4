"""The demo's Mixture-of-Experts layer (route, quantize, grouped GEMM, un-permute) and its error per row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from padless.formats import BlockScaledTensor, round_up
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.testing.judge import values_of
from padless.testing.operands import Activation, quantized

T = TypeVar("T")

TOP_K = 2
FP8 = ("FP8_BLOCK", "FP8_BLOCK")
PADDED_TO = 128  # the alignment that kernels which cannot take ragged groups ask for


@dataclass(frozen=True)
class LayerInputs:
    """Activations and experts on one device, float32.

    hidden: (T, K) one row per token. up: (G, N, K), up_bias: (G, N), down: (G, K, N).
    """

    hidden: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.up.shape[0]


@dataclass(frozen=True)
class Routing:
    """Tokens and their experts, sorted by expert. M = T * TOP_K rows.

    token: (M,) int64, the token of each sorted row. gate: (M,) float32, its weight in the token's sum.
    expert: (M,) int64, ascending. sizes: rows per expert.
    """

    token: torch.Tensor
    gate: torch.Tensor
    expert: torch.Tensor
    sizes: list[int]


def route(hidden: torch.Tensor, num_experts: int, seed: int = 3) -> Routing:
    """A top-2 softmax router with seeded random weights, as at the start of training.

    Hidden states share a large mean, so random directions are far from equally liked: the groups come out
    uneven with nothing done to make them so.
    """
    directions = torch.randn(
        num_experts, hidden.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    # float64, so that the same tokens go to the same experts on every machine.
    logits = hidden.to("cpu", torch.float64) @ directions.t() / hidden.shape[1] ** 0.5
    best, expert = logits.topk(TOP_K, dim=1)
    gate = best.softmax(dim=1)
    order = expert.flatten().argsort(stable=True)
    expert = expert.flatten()[order]
    return Routing(
        token=(order // TOP_K).to(hidden.device),
        gate=gate.flatten()[order].to(hidden.device, torch.float32),
        expert=expert.to(hidden.device),
        sizes=torch.bincount(expert, minlength=num_experts).tolist(),
    )


@dataclass(frozen=True)
class Gemm:
    """One grouped GEMM: x (M, K) and w (G, N, K) before quantization, a and b after it, d (M, N) in bf16."""

    x: torch.Tensor
    w: torch.Tensor
    a: Activation
    b: BlockScaledTensor
    d: torch.Tensor
    quantize_seconds: float
    gemm_seconds: float


def run_gemm(x: torch.Tensor, w: torch.Tensor, sizes: list[int], formats: tuple[str, str] = FP8) -> Gemm:
    """Quantize both sides and multiply every expert's rows by that expert's weights. No row is ever added."""
    offs = group_offsets(torch.tensor(sizes, device=x.device))
    b = quantized(w, formats[1], "weight")
    a, quantize_seconds = timed(lambda: quantized(x, formats[0], "activation"), x.device)
    d, gemm_seconds = timed(lambda: grouped_gemm(a, b, offs), x.device)
    return Gemm(x, w, a, b, d, quantize_seconds, gemm_seconds)


def run_layer(inputs: LayerInputs, routing: Routing) -> tuple[Gemm, Gemm, torch.Tensor]:
    """(up, down, output): both GEMMs, and (T, K) float32, the gated sum over each token's experts."""
    up = run_gemm(inputs.hidden[routing.token], inputs.up, routing.sizes)
    activated = F.gelu(up.d.float() + inputs.up_bias[routing.expert])
    down = run_gemm(activated, inputs.down, routing.sizes)
    output = torch.zeros_like(inputs.hidden)
    output.index_add_(0, routing.token, down.d.float() * routing.gate[:, None])
    return up, down, output


def plain_layer(inputs: LayerInputs, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """The same layer with nothing quantized, its matmuls in dtype: (T, K) float64."""
    x = inputs.hidden[routing.token].to(dtype)
    up = per_expert(x, inputs.up.to(dtype), routing.sizes).double()
    activated = F.gelu(up + inputs.up_bias[routing.expert].double()).to(dtype)
    down = per_expert(activated, inputs.down.to(dtype), routing.sizes).double()
    output = torch.zeros_like(inputs.hidden, dtype=torch.float64)
    return output.index_add_(0, routing.token, down * routing.gate[:, None].double())


def per_expert(x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """x (M, K) times w (G, N, K), one plain matmul per expert, in the dtype of x: (M, N)."""
    rows = x.split(sizes)
    return torch.cat([rows[g] @ w[g].t() for g in range(len(sizes))])


@dataclass(frozen=True)
class RowErrors:
    """|difference| / |reference| of every row of one GEMM, in the 2-norm; (M,) float64 on the CPU.

    against_bf16: padless against a bf16 matmul of the unquantized inputs.
    against_exact: padless against the float64 product of the unquantized inputs.
    bf16: the bf16 matmul against that same float64 product.
    arithmetic: padless against the float64 product of the codes and scales it was given. What is left is the
        kernel's own rounding.
    """

    against_bf16: torch.Tensor
    against_exact: torch.Tensor
    bf16: torch.Tensor
    arithmetic: torch.Tensor


def row_errors(gemm: Gemm, sizes: list[int]) -> RowErrors:
    exact = per_expert(gemm.x.double(), gemm.w.double(), sizes)
    bf16 = per_expert(gemm.x.bfloat16(), gemm.w.bfloat16(), sizes).double()
    same_codes = per_expert(values_of(gemm.a), values_of(gemm.b), sizes)
    return RowErrors(
        against_bf16=relative(gemm.d, bf16),
        against_exact=relative(gemm.d, exact),
        bf16=relative(bf16, exact),
        arithmetic=relative(gemm.d, same_codes),
    )


def relative(result: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per row, in float64. A row of zeros that should be zeros has error 0; a NaN makes its row NaN."""
    error = (result.double() - reference).norm(dim=1)
    return torch.where(error == 0, error, error / reference.norm(dim=1)).cpu()


@dataclass(frozen=True)
class Product:
    """One grouped GEMM and the errors of its rows."""

    name: str
    gemm: Gemm
    errors: RowErrors


def run_product(
    name: str, x: torch.Tensor, w: torch.Tensor, sizes: list[int], formats: tuple[str, str] = FP8
) -> Product:
    """`run_gemm`, checked."""
    gemm = run_gemm(x, w, sizes, formats)
    return Product(name, gemm, row_errors(gemm, sizes))


def random_twin(product: Product, sizes: list[int], seed: int = 4) -> Product:
    """The same shapes filled with independent normal numbers of the same spread: data without outliers."""
    generator = torch.Generator().manual_seed(seed)

    def like(t: torch.Tensor) -> torch.Tensor:
        return (torch.randn(t.shape, generator=generator) * t.std().cpu()).to(t.device)

    return run_product(product.name, like(product.gemm.x), like(product.gemm.w), sizes)


def outlier_ratio(x: torch.Tensor) -> float:
    """Largest magnitude over root mean square of a block of 128, the median over blocks; 2.8 if normal."""
    blocks = x[:, : x.shape[1] // 128 * 128].unflatten(1, (-1, 128))
    return float((blocks.abs().amax(-1) / blocks.square().mean(-1).sqrt().clamp_min(1e-30)).median())


def padded_rows(sizes: list[int]) -> int:
    """Rows in memory if every expert's rows were padded up to a multiple of 128. Empty experts need none."""
    return sum(round_up(size, PADDED_TO) for size in sizes)


def activation_bytes(rows: int, k: int, n: int) -> int:
    """Bytes of one GEMM's row-shaped tensors: FP8 codes, a float32 scale per 1x128 and a bf16 result."""
    return rows * (k + 4 * -(-k // 128) + 2 * n)


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result and its seconds: the median of ten after a warm-up on a GPU, one call on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start
    result = call()
    seconds = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return result, statistics.median(seconds)
