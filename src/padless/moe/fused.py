"""First projection with SwiGLU and quantization in the GEMM's epilogue, and which activations that can be."""

from __future__ import annotations

from functools import lru_cache

import torch

from padless.epilogue import Epilogue, EpilogueTensors, GateRule
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.kernels import ahead
from padless.kernels.launch import Prepared
from padless.kernels.remembered import facts_of, launch_remembered
from padless.moe.activation import Activation
from padless.ops.checks import check_operands, data_of
from padless.ops.epilogue_run import check_columns, compute, prepare, with_outputs
from padless.row_groups import is_traced
from padless.runtime.architecture import BLACKWELL
from padless.runtime.choices import BackendName
from padless.runtime.devices import kernels_for

SCALE_RULES = {"FP8_BLOCK": "", "NVFP4": "te"}


def fuses(
    weights: BlockScaledTensor, activation: Activation, format: BlockScaledFormat | None, backend: str | None = None
) -> bool:
    """Whether the GEMM's epilogue computes the activation and quantizes: SwiGLU, with a limit, alpha and offset too.

    format: of the activated rows, None for bfloat16. The bits are the same either way. Gate and up are halves or runs of
    32, I a multiple of 64 and the weights' scales plain for halves; or they alternate in FP4 weights, I a multiple of
    32, but on Blackwell. On Hopper FP4 weights and FP8_BLOCK rows take two launches: as long for 64 tokens, and up to a
    quarter less from there on, since the epilogue leaves room for smaller tiles alone.
    """
    if activation.kind != "swiglu":
        return False
    n = weights.data.shape[1]
    is_fp4, on_blackwell = weights.format.codes_per_byte == 2, kernels_for(weights.device, backend) == BLACKWELL.name
    if is_fp4 and format == FP8_BLOCK and not on_blackwell:
        return False
    if activation.gate_up == "alternating":
        return is_fp4 and format != FP8_BLOCK and n % 64 == 0 and not on_blackwell
    apart = activation.gate_up == "concatenated"
    return n % 128 == 0 and not (apart and weights.scale_layout != "plain")


def gate_rule_of(activation: Activation) -> GateRule | None:
    """The rule of a SwiGLU's epilogue; None for the plain one."""
    if activation.is_plain_swiglu:
        return None
    return GateRule(activation.alpha, activation.limit, activation.up_offset)


@lru_cache(maxsize=64)
def epilogue_of(
    gate_up: str,
    has_bias: bool,
    format: BlockScaledFormat | None,
    gate_rule: GateRule | None = None,
    has_row_weights: bool = False,
) -> Epilogue:
    """SwiGLU, quantized to format with scales that the next product reads, or rounded to bfloat16 for None."""
    if format is None:
        return Epilogue(
            bias=has_bias,
            prob=has_row_weights,
            activation="swiglu",
            gate_up=gate_up,
            gate_rule=gate_rule,
            gate_in_bf16=True,
            d_dtype=torch.bfloat16,
        )
    return Epilogue(
        bias=has_bias,
        prob=has_row_weights,
        activation="swiglu",
        gate_up=gate_up,
        gate_rule=gate_rule,
        gate_in_bf16=True,
        row_format=format,
        row_layout="plain_mn" if format == FP8_BLOCK else "plain",
        scale_rule=SCALE_RULES.get(format.name, "rceil"),
    )


def swiglu(
    a: BlockScaledTensor | torch.Tensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor,
    *,
    gate_up: str,
    gate_rule: GateRule | None = None,
    bias: torch.Tensor | None,
    format: BlockScaledFormat | None,
    global_scale: torch.Tensor | None,
    backend: BackendName | None,
    row_weights: torch.Tensor | None = None,
) -> BlockScaledTensor | torch.Tensor:
    """silu(gate) * up of a @ weights of its group (+ bias), (M, N / 2), as `padless.grouped_gemm_swiglu_quant`.

    bias: (G, N); in another dtype than float32 it is converted first. global_scale: NVFP4's, one value or (G,).
    row_weights: (M,) float32, contiguous, that the activated rows are multiplied by.
    """
    epilogue = epilogue_of(gate_up, bias is not None, format, gate_rule, row_weights is not None)
    m, (num_groups, n, _) = a.shape[0], weights.data.shape
    numbers = EpilogueTensors(
        bias=None if bias is None else bias.to(torch.float32).contiguous(),
        prob=row_weights,
        global_scale=None if global_scale is None else global_scale.reshape(-1),
    )
    tensors = with_outputs(epilogue, numbers, m, n, num_groups, a.device)
    if is_traced(data_of(a)) or a.device.type != "cuda" or backend not in (None, "cuda"):
        _check(a, weights, offs, epilogue)
        compute(a, weights, offs, epilogue, tensors, backend, None)
    else:
        _launch(a, weights, offs, epilogue, tensors)
    if format is None:
        assert tensors.d is not None
        return tensors.d
    assert tensors.row_codes is not None
    assert tensors.row_scale is not None
    return BlockScaledTensor(tensors.row_codes, tensors.row_scale, format, global_scale)


def _check(
    a: BlockScaledTensor | torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor, epilogue: Epilogue
) -> None:
    """Raises ValueError for operands that no epilogue, or not this one, can have."""
    check_operands("grouped_gemm", a, weights, offs)
    check_columns(epilogue, weights.data.shape[1])


def _launch(
    a: BlockScaledTensor | torch.Tensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
) -> None:
    """Launches on the current stream: what was packed for the same addresses, or anew."""

    def pack() -> Prepared | None:
        _check(a, weights, offs, epilogue)
        return prepare(a, weights, offs, epilogue, tensors, "cuda", None)

    t = tensors
    facts = facts_of(
        (epilogue, ahead.facts()), a, weights, offs, t.bias, t.prob, t.global_scale, t.d, t.row_codes, t.row_scale
    )
    launch_remembered(facts, pack, offs)
