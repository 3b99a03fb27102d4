"""The layer's functions as torch.library operators `padless::*`, with fake tensors.

Eager calls go to the function itself: the dispatcher would cost more time than the launch. Compiled ones, and calls with
fake tensors, go to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from padless import layouts
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor, blocked_size, ceil_div
from padless.moe import twins
from padless.moe.activation import Activation
from padless.moe.checks import check_each_row, check_rows_of, on_device_of, runs_triton
from padless.row_groups import is_dispatched
from padless.runtime.choices import ActivationKind, GateUp
from padless.runtime.operators import register_operator

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def call(name: str, *arguments: Any) -> Any:
    """The operator padless::name, or its function directly where nothing is being traced."""
    if is_traced(*arguments):
        return getattr(torch.ops.padless, name)(*arguments)
    return _FUNCTIONS[name](*arguments)


def is_traced(*arguments: Any) -> bool:
    """Whether a call is being compiled, or has a tensor without values: a fake one, one that traces or is on meta."""
    return torch.compiler.is_compiling() or any(
        isinstance(a, torch.Tensor) and (is_dispatched(a) or a.is_meta) for a in arguments
    )


def operator(name: str, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines padless::name with the decorated function for every device, and for `call`."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def computed(*arguments: Any, **options: Any) -> Any:
            if not torch.is_autocast_enabled("cpu"):
                return function(*arguments, **options)
            with torch.autocast("cpu", enabled=False):  # definitions multiply in float32
                return function(*arguments, **options)

        register_operator(name + schema, computed, fake)
        _FUNCTIONS[name] = computed
        return function

    return define


# --- route -----------------------------------------------------------------------------------------------


def _route_fake(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=top_k_index.device)

    return empty(num_experts), empty(top_k_index.numel()), empty(*top_k_index.shape)


@operator("route", "(Tensor top_k_index, int num_experts) -> (Tensor, Tensor, Tensor)", _route_fake)
def _route(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not runs_triton(top_k_index) or top_k_index.numel() == 0:
        return twins.route(top_k_index, num_experts)
    from padless.moe.triton import route

    with on_device_of(top_k_index):
        return route.route(top_k_index.contiguous(), num_experts)


# --- quantization ----------------------------------------------------------------------------------------


def _quantized_fake(
    rows: int, K: int, format: str, scale_layout: str, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes and scales of (rows, K) values; bfloat16 values and no scales for "BF16"."""
    if format == "BF16":
        return like.new_empty((rows, K), dtype=torch.bfloat16), like.new_empty((0,), dtype=torch.uint8)
    fmt = FORMAT_BY_NAME[format]
    data = like.new_empty((rows, K // fmt.codes_per_byte), dtype=torch.uint8)
    columns = ceil_div(K, fmt.block_k)
    if fmt == FP8_BLOCK:
        return data, layouts.empty_mn_major(rows, columns, like.device)
    shape = (blocked_size(rows, columns),) if scale_layout == "blocked" else (rows, columns)
    return data, like.new_empty(shape, dtype=torch.uint8).view(fmt.scale_dtype)


def _quantized(
    x: torch.Tensor,
    format: BlockScaledFormat | None,
    scale_rule: str,
    scale_layout: str,
    global_scale: torch.Tensor | None,
    offs: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernel's codes as bytes and scales."""
    from padless.moe.triton.quantize_rows import quantize_rows

    with on_device_of(x):
        factors = _factors(global_scale, scale_rule)
        data, scale = quantize_rows(
            x, format, scale_rule=scale_rule, scale_layout=scale_layout, factors=factors, offs=offs, **how
        )
    if scale is None:
        return data, torch.empty(0, dtype=torch.uint8, device=x.device)
    return data.view(torch.uint8), scale


def _quantized_by_twin(
    x: torch.Tensor,
    format: BlockScaledFormat,
    scale_rule: Any,
    scale_layout: Any,
    global_scale: torch.Tensor | None,
    offs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from padless.quantization.quantize import quantize

    by_group = offs if global_scale is not None and global_scale.numel() > 1 else None
    t = quantize(
        x, format, scale_rule=scale_rule or None, scale_layout=scale_layout, global_scale=global_scale, offs=by_group
    )
    return t.data.view(torch.uint8), t.scale


def _gather_quantize_fake(
    x: torch.Tensor,
    inverse: torch.Tensor,
    format: str,
    scale_rule: str,
    scale_layout: str,
    global_scale: Any,
    tokens: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantized_fake(inverse.numel(), x.shape[1], format, scale_layout, x)


@operator(
    "gather_quantize",
    "(Tensor x, Tensor inverse, str format, str scale_rule, str scale_layout, Tensor? global_scale, "
    "Tensor? tokens=None) -> (Tensor, Tensor)",
    _gather_quantize_fake,
)
def _gather_quantize(
    x: torch.Tensor,
    inverse: torch.Tensor,
    format: str,
    scale_rule: str,
    scale_layout: str,
    global_scale: torch.Tensor | None,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    fmt = FORMAT_BY_NAME[format]
    if not runs_triton(x):
        check_each_row(inverse)
        rows = x[twins.tokens_of(inverse)]
        return _quantized_by_twin(rows, fmt, scale_rule, scale_layout, global_scale, None)
    inverse = inverse.contiguous()
    tokens = None if tokens is None else tokens.contiguous()
    return _quantized(x, fmt, scale_rule, scale_layout, global_scale, None, inverse=inverse, tokens=tokens)


def _route_quantize_fake(
    x: torch.Tensor, top_k_index: torch.Tensor, num_experts: int, format: str, scale_rule: str, scale_layout: str,
    global_scale: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    quantized = _quantized_fake(top_k_index.numel(), x.shape[1], format, scale_layout, x)
    return *_route_fake(top_k_index, num_experts), *quantized


@operator(
    "route_quantize",
    "(Tensor x, Tensor top_k_index, int num_experts, str format, str scale_rule, str scale_layout, "
    "Tensor? global_scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _route_quantize_fake,
)
def _route_quantize(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    num_experts: int,
    format: str,
    scale_rule: str,
    scale_layout: str,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    if not fuses_routing(x, top_k_index):
        routing = _route(top_k_index, num_experts)
        gathered = _gather_quantize(x, routing[2], format, scale_rule, scale_layout, global_scale, routing[1])
        return *routing, *gathered
    from padless.moe.triton.quantize_rows import route_quantize

    with on_device_of(x):
        sorted_slots, data, scale = route_quantize(
            x,
            top_k_index.contiguous(),
            num_experts,
            FORMAT_BY_NAME[format],
            scale_rule=scale_rule,
            scale_layout=scale_layout,
            factors=_factors(global_scale, scale_rule),
        )
    return *sorted_slots, data.view(torch.uint8), scale


def fuses_routing(x: torch.Tensor, top_k_index: torch.Tensor) -> bool:
    """Whether sorting and quantizing are one launch: on a GPU, for few slots."""
    if not runs_triton(x) or x.shape[1] == 0:
        return False
    from padless.moe.triton.quantize_rows import ROUTED_SLOTS

    return 0 < top_k_index.numel() <= ROUTED_SLOTS


def _factors(global_scale: torch.Tensor | None, scale_rule: str) -> torch.Tensor | None:
    """NVFP4's factors of a given global scale: a launch."""
    if global_scale is None:
        return None
    from padless.quantization.triton.global_scale import given_factors

    return given_factors(global_scale, scale_rule)


def _activate_quantize_fake(
    x: torch.Tensor, kind: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
    format: str, scale_rule: str, scale_layout: str, global_scale: Any, offs: Any, row_weights: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    K = Activation(kind, gate_up, alpha, limit, up_offset).out_columns(x.shape[1])
    return _quantized_fake(x.shape[0], K, format, scale_layout, x)


@operator(
    "activate_quantize",
    "(Tensor x, str kind, str gate_up, float alpha, float? limit, float up_offset, str format, str scale_rule, "
    "str scale_layout, Tensor? global_scale, Tensor? offs, Tensor? row_weights=None) -> (Tensor, Tensor)",
    _activate_quantize_fake,
)
def _activate_quantize(
    x: torch.Tensor, kind: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
    format: str, scale_rule: str, scale_layout: str, global_scale: torch.Tensor | None, offs: torch.Tensor | None,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """row_weights: (rows of x,) float32 that the activated rows are multiplied by before anything is rounded."""
    activation = Activation(kind, gate_up, alpha, limit, up_offset)
    fmt = FORMAT_BY_NAME.get(format)
    if runs_triton(x):
        how = {"activation": activation, "row_weights": row_weights}
        return _quantized(x, fmt, scale_rule, scale_layout, global_scale, offs, **how)
    values = twins.activated(x, activation, row_weights, in_bfloat16=fmt is None)
    if fmt is None:
        return values, torch.empty(0, dtype=torch.uint8, device=x.device)
    return _quantized_by_twin(values, fmt, scale_rule, scale_layout, global_scale, offs)


def _activate_and_quantize_fake(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data, scale = _activate_quantize_fake(x, *others)
    return x.new_empty((x.shape[0], Activation(*others[:5]).out_columns(x.shape[1])), dtype=torch.bfloat16), data, scale


@operator(
    "activate_and_quantize",
    "(Tensor x, str kind, str gate_up, float alpha, float? limit, float up_offset, str format, str scale_rule, "
    "str scale_layout, Tensor? global_scale, Tensor? offs) -> (Tensor, Tensor, Tensor)",
    _activate_and_quantize_fake,
)
def _activate_and_quantize(
    x: torch.Tensor, kind: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
    format: str, scale_rule: str, scale_layout: str, global_scale: torch.Tensor | None, offs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The activation in bfloat16, and what `activate_quantize` makes of the same values, in one pass."""
    activation, fmt = Activation(kind, gate_up, alpha, limit, up_offset), FORMAT_BY_NAME[format]
    if runs_triton(x):
        values = torch.empty((x.shape[0], activation.out_columns(x.shape[1])), dtype=torch.bfloat16, device=x.device)
        how = {"activation": activation, "values": values}
        return values, *_quantized(x, fmt, scale_rule, scale_layout, global_scale, offs, **how)
    exact = twins.activated(x, activation, in_bfloat16=False)
    quantized = _quantized_by_twin(exact, fmt, scale_rule, scale_layout, global_scale, offs)
    return exact.to(torch.bfloat16), *quantized


# --- combine ---------------------------------------------------------------------------------------------


def _combine_fake(
    y: torch.Tensor, inverse: torch.Tensor, weights: Any, shared: Any, out_dtype: torch.dtype
) -> torch.Tensor:
    return y.new_empty((inverse.shape[0], y.shape[1]), dtype=out_dtype)


@operator(
    "combine",
    "(Tensor y, Tensor inverse, Tensor? weights, Tensor? shared, ScalarType out_dtype) -> Tensor",
    _combine_fake,
)
def _combine(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if not runs_triton(y):
        check_rows_of(inverse, y.shape[0])
        return twins.combine(y, inverse, weights, shared, out_dtype)
    out = torch.empty((inverse.shape[0], y.shape[1]), dtype=out_dtype, device=y.device)
    if out.numel() > 0:
        from padless.moe.triton import combine

        with on_device_of(y):
            weights = None if weights is None else weights.contiguous()
            combine.combine(_by_rows(y), inverse.contiguous(), weights, _by_rows(shared), out)
    return out


def _combine_backward_fake(
    dout: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return y.new_empty(y.shape), y.new_empty(inverse.shape, dtype=torch.float32)


@operator(
    "combine_backward",
    "(Tensor dout, Tensor y, Tensor inverse, Tensor weights) -> (Tensor, Tensor)",
    _combine_backward_fake,
)
def _combine_backward(
    dout: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not runs_triton(y) or y.numel() == 0:
        check_each_row(inverse)
        return twins.combine_backward(dout, y, inverse, weights)
    from padless.moe.triton import combine

    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dweights = torch.empty(inverse.shape, dtype=torch.float32, device=y.device)
    with on_device_of(y):
        combine.combine_backward(_by_rows(dout), _by_rows(y), inverse.contiguous(), weights.contiguous(), dy, dweights)
    return dy, dweights


def _by_rows(t: Any) -> Any:
    """t with adjacent columns."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


# --- moe -------------------------------------------------------------------------------------------------


def unpacked(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: str, layout: str
) -> BlockScaledTensor:
    """A weight from what an operator can take."""
    fmt = FORMAT_BY_NAME[format]
    return BlockScaledTensor(data.view(fmt.data_dtype), scale.view(fmt.scale_dtype), fmt, global_scale, layout)


def packed(t: BlockScaledTensor) -> tuple[Any, ...]:
    """A weight as arguments of an operator, one-byte types as bytes."""
    scale = t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
    return t.data.view(torch.uint8), scale, t.global_scale, t.format.name, t.scale_layout
