"""The layer of few tokens in one launch (kernels/sm90_moe_decode), where that is faster."""

from __future__ import annotations

import torch

from padless.arguments import is_one_of
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.kernels.remembered import Prepared, facts_of, launch_remembered
from padless.kernels.sm90_moe_decode import host, host_fp4
from padless.kernels.sm90_moe_decode.choice import ByLogits, Choice
from padless.kernels.sm90_moe_decode.config import LayerShape
from padless.kernels.sm90_moe_decode.config_fp4 import Fp4LayerShape
from padless.moe.activation import Activation
from padless.moe.fused import gate_rule_of
from padless.runtime.architecture import HOPPER
from padless.runtime.choices import BackendName
from padless.runtime.devices import chosen_backend, device_of

# Where one launch is faster than several, as measured on an H200: up to so many tokens whose hidden rows have at most so
# many values, more from logits, which are a launch more among several, and rows of x so many columns; a token alone
# always.
MOST_TOKENS, MOST_HIDDEN, MOST_HIDDEN_FROM_LOGITS, MOST_COLUMNS = 8, 7 << 12, 8 << 12, 4096
MOST_FP4_TOKENS = 8  # with FP4 weights

SPIN_LIMIT = 0  # turns of a wait for other CTAs after which a launch traps instead of hanging; 0 is none


def is_faster(shape: LayerShape | Fp4LayerShape, *, from_logits: bool = False) -> bool:
    """Whether moe() computes such a layer in one launch, if it can."""
    if isinstance(shape, Fp4LayerShape):
        return shape.tokens <= MOST_FP4_TOKENS
    if shape.tokens == 1:
        return True
    most_hidden = MOST_HIDDEN_FROM_LOGITS if from_logits else MOST_HIDDEN
    return shape.tokens <= MOST_TOKENS and shape.hidden_words <= most_hidden and shape.h <= MOST_COLUMNS


def moe_in_one_launch(
    x: torch.Tensor,
    choice: Choice,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    *,
    activation: Activation,
    format: BlockScaledFormat | None,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: BackendName | None,
    only_if_faster: bool = True,
) -> torch.Tensor | None:
    """`padless.moe.moe` of checked arguments with at least one token; None where its several launches are to compute it.

    choice: experts and weights, or a router's logits, by which the launch chooses them itself: up to 1024 experts, and
    groups of which not all are taken up to 32, else None.

    On Hopper, where `is_faster` unless ``only_if_faster`` is False, it takes FP8_BLOCK weights and activations and plain
    SwiGLU of concatenated or interleaved gate and up, no bias; and MXFP4 weights, repacked or not, with blocked scales,
    bfloat16 activations (``format`` None) and any SwiGLU of alternating gate and up, with float32 biases or without.
    """
    if (only_if_faster and choice.sizes[0] > max(MOST_TOKENS, MOST_FP4_TOKENS)) or host.is_full(x.device):
        return None
    backend = chosen_backend(backend, x)
    is_fp4 = format is None
    if (
        not is_one_of(backend, ("cuda", "emulator"))
        or out_dtype != torch.bfloat16
        or activation.kind != "swiglu"
        or (activation.gate_up == "alternating") != is_fp4
    ):
        return None
    if is_fp4:
        if not host_fp4.takes(x, choice, w13, w2, bias13, bias2, shared):
            return None
    elif (
        format != FP8_BLOCK
        or not activation.is_plain_swiglu
        or bias13 is not None
        or bias2 is not None
        or not host.takes(x, choice, w13, w2, shared)
    ):
        return None
    driver = device_of(backend, x)
    if driver.arch != HOPPER.name:
        return None
    shape: LayerShape | Fp4LayerShape = (
        host_fp4.shape_of(choice, w2, driver.num_sms(x.device.index or 0)) if is_fp4 else host.shape_of(choice, w2)
    )
    if not shape.fits or (only_if_faster and not is_faster(shape, from_logits=isinstance(choice, ByLogits))):
        return None
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    scratch = host.scratch_for(out.device, out.data_ptr(), shape)
    if scratch is None:
        return None

    def pack() -> Prepared:
        if is_fp4:
            return host_fp4.prepare(
                driver, x, choice, w13, w2, bias13, bias2, shared, out, scratch,
                gate_rule=gate_rule_of(activation), spin_limit=SPIN_LIMIT,
            )  # fmt: skip
        return host.prepare(
            driver, x, choice, w13, w2, shared, out, scratch,
            interleaved=activation.gate_up == "interleaved", spin_limit=SPIN_LIMIT,
        )  # fmt: skip

    options = ("moe in one launch", activation, SPIN_LIMIT, *choice.facts)
    tensors = (x, *choice.tensors, w13, w2, bias13, bias2, shared, out)
    facts = facts_of(options, *tensors) if backend == "cuda" else None
    launch_remembered(facts, pack, out)
    return out
