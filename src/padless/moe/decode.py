"""The layer of few tokens in one launch (kernels/sm90_moe_decode), where that is faster."""

from __future__ import annotations

import torch

from padless.arguments import is_one_of
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.kernels.remembered import Prepared, facts_of, launch_remembered
from padless.kernels.sm90_moe_decode import host
from padless.kernels.sm90_moe_decode.config import LayerShape
from padless.moe.activation import Activation
from padless.runtime.choices import BackendName
from padless.runtime.devices import chosen_backend, device_of

# Where one launch is faster than several, as measured on an H200: up to so many tokens whose hidden rows have at most so
# many values, and rows of x so many columns; a token alone always.
MOST_TOKENS, MOST_HIDDEN, MOST_COLUMNS = 8, 3 << 14, 4096

SPIN_LIMIT = 0  # turns of a wait for other CTAs after which a launch traps instead of hanging; 0 is none


def is_faster(shape: LayerShape) -> bool:
    """Whether moe() computes such a layer in one launch, if it can."""
    if shape.tokens == 1:
        return True
    return shape.tokens <= MOST_TOKENS and shape.hidden_words <= MOST_HIDDEN and shape.h <= MOST_COLUMNS


def moe_in_one_launch(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    *,
    activation: Activation,
    format: BlockScaledFormat | None,
    has_bias: bool,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: BackendName | None,
) -> torch.Tensor | None:
    """`padless.moe.moe` of checked arguments with at least one token; None where its several launches are to compute it.

    It takes FP8_BLOCK weights and activations and plain SwiGLU of concatenated or interleaved gate and up, no bias, on
    Hopper, where `is_faster`.
    """
    shape = host.shape_of(top_k_index, w2)
    if not is_faster(shape) or host.is_full(x.device):
        return None
    backend = chosen_backend(backend, x)
    if (
        not is_one_of(backend, ("cuda", "emulator"))
        or format != FP8_BLOCK
        or has_bias
        or out_dtype != torch.bfloat16
        or not activation.is_plain_swiglu
        or activation.gate_up == "alternating"
        or not host.takes(x, top_k_index, top_k_weights, w13, w2, shared)
    ):
        return None
    driver = device_of(backend, x)
    if driver.arch != "sm_90a":
        return None
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    scratch = host.scratch_for(out.device, out.data_ptr(), shape)
    if scratch is None:
        return None

    def pack() -> Prepared:
        return host.prepare(
            driver, x, top_k_index, top_k_weights, w13, w2, shared, out, scratch,
            interleaved=activation.gate_up == "interleaved", spin_limit=SPIN_LIMIT,
        )  # fmt: skip

    options = ("moe in one launch", activation.gate_up, SPIN_LIMIT)
    facts = facts_of(options, x, top_k_index, top_k_weights, w13, w2, shared, out) if backend == "cuda" else None
    launch_remembered(facts, pack, out)
    return out
