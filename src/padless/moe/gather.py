"""Quantization of tokens into the rows of their experts, and of activated rows between the two projections."""

from __future__ import annotations

import torch

from padless.arguments import check_readable, check_tensor_type, is_one_of, refuse_kinds, shown
from padless.formats import FORMATS, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.checks import check_device, check_inverse, check_matrix, on_device_of
from padless.moe.combining import combine
from padless.moe.routing import Routing, check_ids, route
from padless.ops.checks import describe
from padless.quantization.quantize import SCALE_RULES
from padless.runtime.choices import ScaleLayout, ScaleRule

LAYOUTS = ("plain", "blocked")


def gather_quantize(
    x: torch.Tensor,
    inverse: torch.Tensor,
    format: BlockScaledFormat,
    *,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "plain",
    global_scale: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> BlockScaledTensor:
    """quantize(x[tokens], format) of a routing, reading and quantizing every token once: (S, K), S = T * k.

    x: (T, K) bfloat16, float16 or float32.
    inverse: (T, k) int32 of `route`. Rows of the tail are quantized too.
    scale_rule, scale_layout: as in `padless.quantize`; "plain" or "blocked". FP8_BLOCK's scales are MN-major.
    global_scale: NVFP4's decode scale, one float32 value. It must be given: it is no business of the other tokens.
    tokens: (S,) int32 of the same `route`, where they are at hand: the bits are the same, in less time.

    The bits are those of quantize(x[tokens], format, ..). Raises ValueError.
    """
    check_inverse(inverse, None, None)
    check_matrix("x", x, inverse.shape[0], None, inverse.device)
    rule = _check_gathered(x, format, scale_rule, scale_layout, global_scale)
    refuse_kinds(tokens=tokens)
    wanted = (inverse.numel(),), torch.int32, inverse.device
    found = (tuple(tokens.shape), tokens.dtype, tokens.device) if isinstance(tokens, torch.Tensor) else None
    if tokens is not None and found != wanted:
        raise ValueError(f"tokens must be ({inverse.numel()},) int32 of the same route, got {describe(tokens)}")
    data, scale = ops.call("gather_quantize", x, inverse, format.name, rule, scale_layout, global_scale, tokens)
    return BlockScaledTensor(data.view(format.data_dtype), scale, format, global_scale, scale_layout)


def route_quantize(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    num_experts: int,
    format: BlockScaledFormat,
    *,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout = "plain",
    global_scale: torch.Tensor | None = None,
) -> tuple[Routing, BlockScaledTensor]:
    """(route(top_k_index, num_experts), gather_quantize of it): one launch up to 1024 slots. Raises ValueError."""
    check_ids(top_k_index, num_experts)
    check_matrix("x", x, top_k_index.shape[0], None, top_k_index.device)
    rule = _check_gathered(x, format, scale_rule, scale_layout, global_scale)
    offs, tokens, inverse, data, scale = ops.call(
        "route_quantize", x, top_k_index, num_experts, format.name, rule, scale_layout, global_scale
    )
    t = BlockScaledTensor(data.view(format.data_dtype), scale, format, global_scale, scale_layout)
    return Routing(offs, tokens, inverse), t


def route_gather(x: torch.Tensor, top_k_index: torch.Tensor, num_experts: int) -> tuple[Routing, torch.Tensor]:
    """(route(top_k_index, num_experts), x[tokens] (S, K)) of bfloat16 x: one launch up to 1024 slots."""
    if ops.is_traced(x, top_k_index) or not ops.fuses_routing(x, top_k_index):
        routing = route(top_k_index, num_experts)
        return routing, x.index_select(0, routing.tokens)
    from padless.moe.triton import quantize_rows

    with on_device_of(x):
        slots, rows = quantize_rows.route_gather(x, top_k_index.contiguous(), num_experts)
    return Routing(*slots), rows


def _check_gathered(
    x: torch.Tensor,
    format: BlockScaledFormat,
    scale_rule: str | None,
    scale_layout: str,
    global_scale: torch.Tensor | None,
) -> str:
    """The scale rule to use. Raises ValueError."""
    check_readable(x=x, global_scale=global_scale)
    rule = check_format(format, x.shape[1], scale_rule, scale_layout, global_scale)
    check_device("global_scale", global_scale, x)
    if global_scale is not None and global_scale.numel() != 1:
        raise ValueError(
            f"global_scale must be one value, got {describe(global_scale)}; quantize(rows=) takes one for each group"
        )
    return rule


def activate_quantize(
    x: torch.Tensor,
    activation: Activation,
    format: BlockScaledFormat | None,
    *,
    scale_rule: str | None = None,
    scale_layout: str = "plain",
    global_scale: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
) -> BlockScaledTensor | torch.Tensor:
    """quantize(activate(x), format) in one pass: (M, K), K = N / 2 with a gate, else N.

    x: (M, N) bfloat16, float16 or float32, the first projection's result. The activation is computed in float32 and
        quantized as it is.
    format: None gives the activation rounded to bfloat16.
    scale_rule, scale_layout: as in `gather_quantize`.
    global_scale: NVFP4's decode scale, one float32 value or, with offs, one for each group.
    offs: (G,) int32 end rows, for a global scale of each group.

    Raises ValueError.
    """
    check_tensor_type("x", x)
    check_matrix("x", x, None, None, x.device)
    check_readable(x=x, global_scale=global_scale, offs=offs)
    if not isinstance(activation, Activation):
        raise ValueError(f"activation must be a padless.moe.Activation, got {type(activation).__name__}")
    k = activation.out_columns(x.shape[1])
    check_device("global_scale", global_scale, x)
    check_device("offs", offs, x)
    name = "BF16"
    if format is not None:
        scale_rule = check_format(format, k, scale_rule, scale_layout, global_scale)
        name = format.name
        if (
            global_scale is not None
            and global_scale.numel() != 1
            and (not isinstance(offs, torch.Tensor) or global_scale.shape != offs.shape)
        ):
            raise ValueError(
                f"global_scale must be one value or one for each group of offs, got {describe(global_scale)} and offs "
                f"{describe(offs)}"
            )
    a = activation
    data, scale = ops.call(
        "activate_quantize", x, a.kind, a.gate_up, a.alpha, a.limit, a.up_offset,
        name, scale_rule or "", scale_layout, global_scale, offs,
    )  # fmt: skip
    if format is None:
        return data
    return BlockScaledTensor(data.view(format.data_dtype), scale, format, global_scale, scale_layout)


def gather_backward(
    drows: torch.Tensor, inverse: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gradient of x[tokens] for x: dx[t] = the sum of drows[inverse[t, j]] over j in order, in float32; (T, K).

    drows: (S, K), inverse: (T, k) int32 of `route`; slots of ids that are no expert add nothing.
    out_dtype: of dx; None is that of drows. Raises ValueError.
    """
    check_inverse(inverse, None, None)
    check_matrix("drows", drows, None, None, inverse.device)
    return combine(drows, inverse, None, out_dtype=out_dtype)


def check_format(
    format: BlockScaledFormat, k: int, scale_rule: str | None, scale_layout: str, global_scale: torch.Tensor | None
) -> str:
    """The scale rule to use. Raises ValueError."""
    if not is_one_of(format, FORMATS):
        names = ", ".join(f.name for f in FORMATS)
        raise ValueError(f"format is {getattr(format, 'name', format)!r:.80}; allowed: {names}")
    if k == 0 or k % format.codes_per_byte != 0:
        raise ValueError(f"K is {k}; it must be positive{' and even' if format.codes_per_byte == 2 else ''}")
    rules = SCALE_RULES[format] or ("",)
    rule = rules[0] if scale_rule is None else scale_rule
    if not is_one_of(rule, rules):
        raise ValueError(f"scale_rule is {shown(scale_rule)}; allowed for {format.name}: {', '.join(map(repr, rules))}")
    if not is_one_of(scale_layout, LAYOUTS) or (scale_layout == "blocked" and format.scale_dtype == torch.float32):
        raise ValueError(f"scale_layout is {shown(scale_layout)}; allowed: 'plain', and 'blocked' for one-byte scales")
    if (global_scale is None) == (format == NVFP4):
        wanted = "a float32 tensor" if format == NVFP4 else "None"
        raise ValueError(f"global_scale must be {wanted} for {format.name}, got {describe(global_scale)}")
    if global_scale is not None and (not isinstance(global_scale, torch.Tensor) or global_scale.dtype != torch.float32):
        raise ValueError(f"global_scale must be float32, got {describe(global_scale)}")
    return rule
