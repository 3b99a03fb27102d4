"""Values to block-scaled codes and back: `quantize` and `dequantize`.

What a code and a scale are is in `padless.quantization.rules`, in torch. On a GPU the same arithmetic runs in the Triton
kernels of `padless.quantization.triton`, equal to it bit for bit: `fp8_block`, `row_blocks` for the other formats, and
`global_scale` for NVFP4's global scale.
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from numbers import Real

import torch

from padless import layouts
from padless.arguments import check_readable, check_sizes, is_one_of, shown
from padless.formats import (
    FORMATS,
    FP8_BLOCK,
    KINDS,
    MXFP4,
    MXFP4_REPACKED,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    SCALE_LAYOUTS,
    BlockScaledFormat,
    BlockScaledTensor,
)
from padless.quantization import rules as quantize_rules
from padless.quantization import traced
from padless.row_groups import is_integers, is_readable, is_traced, row_groups_of
from padless.runtime.choices import Kind, ScaleLayout, ScaleMajor, ScaleRule
from padless.runtime.devices import on_device_of

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_MAJORS = ("mn", "k")
_BECOMES_ZERO = 2.0**-150  # in float32, to even

# The allowed values of scale_rule, the default first.
SCALE_RULES: dict[BlockScaledFormat, tuple[str, ...]] = {
    FP8_BLOCK: (),
    MXFP8: ("rceil", "floor"),
    MXFP8_E5M2: ("rceil", "floor"),
    MXFP4: ("rceil", "floor"),
    NVFP4: ("te", "torchao"),
}


def quantize(
    x: torch.Tensor,
    format: BlockScaledFormat,
    *,
    kind: Kind = "activation",
    scale_major: ScaleMajor | None = None,
    scale_rule: ScaleRule | None = None,
    scale_layout: ScaleLayout | None = None,
    global_scale: torch.Tensor | float | None = None,
    offs: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> BlockScaledTensor:
    """Codes and decode scales of x, all arithmetic in float32.

    x: (M, K) for kind "activation"; (N, K) or (G, N, K) for "weight"; bf16, fp16 or fp32; any strides. Blocks
        at the end of K (and of N, for FP8_BLOCK weights) are short when the sizes are not multiples of
        theirs. K must be even for the FP4 formats.
    scale_major: layout of FP8_BLOCK activations' scales, "mn" (the default: MN-major, ld rounded up to 4,
        zero padding) or "k" (row-major).
    scale_rule: MX formats "rceil" (default) or "floor"; NVFP4 "te" (default) or "torchao".
    scale_layout: "plain", or for one-byte scales "blocked", or for activations "blocked_groups" (with offs);
        see BlockScaledTensor. None is "plain"; on a GPU what kernels read in place, which is "blocked" for FP4 weights
        whose rows of plain scales are no multiple of 16 bytes (`padless.layouts.of_weight_scales`).
    global_scale: NVFP4's decode scale where it is known; one number, or one per group (float32). None
        computes amax / 2688 of x, of each weight of a (G, N, K) x, or of each group of rows where offs is
        given.
    offs: (G,) int32 or int64 cumulative END offsets of groups of rows, for "blocked_groups" and for NVFP4. Rows past
        the last group take its global scale. Scales that depend on the groups serve calls with these groups
        alone: the result remembers offs, see BlockScaledTensor.
    rows: (R,) int32 or int64, for activations: the result is quantize(x[rows], ..), bit for bit, without the copy.
        Values outside of x's rows count as the nearest row. NVFP4 must be given its global scale then.

    The rules, and what zeros, NaN, Inf and subnormals become, are in docs/formats_rules.md. In short: a block with
    a NaN or an Inf decodes to NaN, and no other block notices.
    """
    if format == MXFP4_REPACKED and kind == "weight":
        plain = quantize(
            x, MXFP4, kind=kind, scale_major=scale_major, scale_rule=scale_rule, scale_layout=scale_layout,
            global_scale=global_scale, offs=offs, rows=rows,
        )  # fmt: skip
        return layouts.to_repacked(plain)
    check_readable(x=x, global_scale=global_scale, offs=offs, rows=rows)
    _check_x(x, format, kind)
    if scale_layout is None:
        is_read = kind == "weight" and x.is_cuda  # on a CPU scales are files' and references', which take them plain
        scale_layout = layouts.of_weight_scales(format, x.shape[-1]) if is_read else "plain"
    major = _check_options(format, kind, scale_major, scale_layout, global_scale, offs)
    rule = check_scale_rule(format, scale_rule)
    if offs is not None and offs.device != x.device:
        raise ValueError(f"offs is on {offs.device} and x on {x.device}; they must be on one device")
    if rows is not None:
        _check_rows(rows, x, format, kind, global_scale)
        rows = rows.contiguous()
    if is_traced(x):
        return traced.quantized(x, format, kind, major, rule, scale_layout, global_scale, offs, rows)
    on_gpu = x.is_cuda and has_triton()
    if rows is not None and not on_gpu:
        x, rows = x[rows.to(torch.int64).clamp(0, max(x.shape[0] - 1, 0))], None
    with on_device_of(x):
        if format == FP8_BLOCK:
            return _quantize_fp8_block(x, kind, major, rows, on_gpu)
        decode, factors = None, None
        if format == NVFP4:
            decode, factors = _nvfp4_global(x, rule, global_scale, offs, on_gpu)
        if on_gpu:
            from padless.quantization.triton import row_blocks as quantize_triton_rows

            data, scale = quantize_triton_rows.row_blocks(x, format, rule, scale_layout, offs, factors, rows)
        else:
            data, scale = _row_blocks_torch(x, format, rule, scale_layout, offs, factors)
        return BlockScaledTensor(data, scale, format, decode, scale_layout, offs)


def dequantize(
    t: BlockScaledTensor, dtype: torch.dtype = torch.float32, *, offs: torch.Tensor | None = None
) -> torch.Tensor:
    """Values of t in its logical shape: code * scale (* global scale) in float32, then rounded to dtype.

    offs: (G,) int32 cumulative END offsets, needed where t's scales or global scales are per group of rows.
    """
    if not isinstance(t, BlockScaledTensor):
        raise ValueError(f"t must be a BlockScaledTensor, got {type(t).__name__}")
    check_readable(t=t, offs=offs)
    if t.format == MXFP4_REPACKED:
        t = layouts.from_repacked(t)
    if not is_one_of(dtype, (*INPUT_DTYPES, torch.float64)):
        raise ValueError(
            f"dtype is {shown(dtype)}; allowed: torch.float32, torch.bfloat16, torch.float16, torch.float64"
        )
    if offs is not None and not is_integers(offs):
        raise ValueError(f"offs must be a 1-D int32 or int64 tensor (padless.group_offsets), got {shown(offs)}")
    if offs is not None and (groups := row_groups_of(t)) is not None:
        groups.check("t", offs, t.shape[0], len(offs), "offs")
    block_rows, block_k = t.format.block("activation" if t.is_activation else "weight")
    scale = layouts.plain_scale(t, offs).to(torch.float32)
    codes = layouts.unpack_fp4(t.data) if t.format.codes_per_byte == 2 else t.data
    values = quantize_rules.from_e2m1(codes) if t.format.codes_per_byte == 2 else codes.to(torch.float32)
    values = values * quantize_rules.expand_blocks(scale, block_rows, block_k, t.logical_shape)
    if t.global_scale is not None:
        values = values * _per_row(t.global_scale, t.logical_shape, offs)
    return values.to(dtype)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is a dependency of torch's CUDA builds only."""
    return importlib.util.find_spec("triton") is not None


# --- the two paths ---------------------------------------------------------------------------------------


def _quantize_fp8_block(
    x: torch.Tensor, kind: str, scale_major: str, rows: torch.Tensor | None, on_gpu: bool
) -> BlockScaledTensor:
    if on_gpu:
        from padless.quantization.triton import fp8_block as quantize_triton

        return quantize_triton.fp8_block(x, kind, scale_major, rows)
    codes, scale = quantize_rules.fp8_block(x, kind)
    if kind == "activation" and scale_major == "mn":
        scale = layouts.to_mn_major(scale)
    return BlockScaledTensor(codes.view(FP8_BLOCK.data_dtype), scale, FP8_BLOCK)


def _row_blocks_torch(
    x: torch.Tensor, format: BlockScaledFormat, scale_rule: str, scale_layout: str, offs: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(data, scale) of the formats whose blocks lie in one row; factors: NVFP4's, (2,) or (groups, 2)."""
    if factors is None:
        codes, scale = quantize_rules.mx(x, format, scale_rule)
    else:
        columns = [_per_row(factors[..., i], tuple(x.shape), offs) for i in range(2)]
        codes, scale = quantize_rules.nvfp4(x, scale_rule, torch.stack(columns, dim=-1))
    data = layouts.pack_fp4(codes) if format.codes_per_byte == 2 else codes.view(format.data_dtype)
    if scale_layout == "blocked":
        scale = layouts.to_blocked(scale)
    elif scale_layout == "blocked_groups":
        assert offs is not None
        scale = layouts.to_blocked_groups(scale, offs)
    return data, scale.view(format.scale_dtype)


def _nvfp4_global(
    x: torch.Tensor, scale_rule: str, global_scale: torch.Tensor | float | None, offs: torch.Tensor | None, on_gpu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decode scale () or (groups,), the factors derived from it (.., 2))."""
    if on_gpu:
        from padless.quantization.triton import global_scale as quantize_triton_global
    if global_scale is not None:
        given = traced.float32_scale(global_scale, x.device)
        groups = x.shape[0] if x.dim() == 3 else len(offs) if offs is not None else 1
        if given.dim() > 1 or given.numel() not in (1, groups):
            raise ValueError(
                f"global_scale must be one number or one for each of {groups} groups, got shape {tuple(given.shape)}"
            )
        if on_gpu:
            return given, quantize_triton_global.given_factors(given, scale_rule)
        return given, quantize_rules.nvfp4_factors(scale_rule, given, None)
    if on_gpu:
        return quantize_triton_global.global_scale(x, scale_rule, offs)
    if x.dim() == 3:
        amax = quantize_rules.finite_amax(x, (1, 2))
    elif offs is None:
        amax = quantize_rules.finite_amax(x, (0, 1))
    else:
        amax = layouts.group_max(quantize_rules.finite_amax(x, (1,)), offs)
    decode = quantize_rules.nvfp4_global_scale(amax)
    return decode, quantize_rules.nvfp4_factors(scale_rule, decode, amax)


def _per_row(values: torch.Tensor, shape: tuple[int, ...], offs: torch.Tensor | None) -> torch.Tensor:
    """One value, one per weight or one per group of rows, to broadcast against (.., rows, columns)."""
    if values.numel() == 1:
        return values.reshape(1, 1)
    if len(shape) == 3:
        return values.view(-1, 1, 1)
    if offs is None or offs.shape[0] != values.shape[0]:
        got = None if offs is None else tuple(offs.shape)
        raise ValueError(f"offs must have {values.shape[0]} entries, one per global scale, got {got}")
    return values[layouts.group_of_rows(offs, shape[0]).clamp(max=offs.shape[0] - 1)][:, None]


# --- checks ----------------------------------------------------------------------------------------------


def _check_x(x: torch.Tensor, format: BlockScaledFormat, kind: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if not isinstance(format, BlockScaledFormat):
        raise ValueError(f"format must be a BlockScaledFormat such as padless.FP8_BLOCK, got {shown(format)}")
    if format not in SCALE_RULES:
        raise ValueError(f"format must be one of {[f.name for f in FORMATS]}, got {format}")
    if not is_one_of(kind, KINDS):
        raise ValueError(f"kind must be one of {KINDS}, got {shown(kind)}")
    ranks = (2,) if kind == "activation" else (2, 3)
    if x.dim() not in ranks:
        wanted = "(M, K)" if kind == "activation" else "(N, K) or (num_groups, N, K)"
        raise ValueError(f"x must be {wanted} for kind={kind!r}, got shape {tuple(x.shape)}")
    if x.shape[-1] == 0 or x.shape[-1] % format.codes_per_byte != 0:
        even = "" if format.codes_per_byte == 1 else f" and even for {format.name}"
        raise ValueError(f"x must have K > 0{even}, got shape {tuple(x.shape)}")
    check_sizes("x", x)


def _check_options(
    format: BlockScaledFormat,
    kind: str,
    scale_major: str | None,
    scale_layout: str,
    global_scale: torch.Tensor | float | None,
    offs: torch.Tensor | None,
) -> str:
    """Raise ValueError for options that do not go together; the scale_major to use."""
    if scale_major is None:
        scale_major = "mn" if format == FP8_BLOCK else "k"
    if not is_one_of(scale_major, SCALE_MAJORS):
        raise ValueError(f"scale_major must be one of {SCALE_MAJORS}, got {shown(scale_major)}")
    if scale_major == "mn" and format != FP8_BLOCK:
        raise ValueError(f"scale_major must be 'k' for {format.name}, got 'mn'; see scale_layout")
    if not is_one_of(scale_layout, SCALE_LAYOUTS):
        raise ValueError(f"scale_layout must be one of {SCALE_LAYOUTS}, got {shown(scale_layout)}")
    if format == FP8_BLOCK and scale_layout != "plain":
        raise ValueError(f"scale_layout must be 'plain' for FP8_BLOCK, got {scale_layout!r}; see scale_major")
    if global_scale is not None:
        if not format.has_global_scale:
            raise ValueError(f"global_scale must be None for {format.name}, got {shown(global_scale)}")
        check_global_scale(global_scale)
    if scale_layout == "blocked_groups" and offs is None:
        raise ValueError("offs must be given for scale_layout 'blocked_groups', got None")
    if offs is not None:
        if kind != "activation":
            raise ValueError(f"offs must be None for kind={kind!r}: only activations have groups of rows")
        if format != NVFP4 and scale_layout != "blocked_groups":
            raise ValueError(f"offs must be None for {format.name} with scale_layout {scale_layout!r}")
        if not is_integers(offs) or not len(offs):
            raise ValueError(
                "offs must be a 1-D int32 or int64 tensor of at least one end offset (padless.group_offsets)"
            )
    return scale_major


def check_global_scale(given: object) -> None:
    """Raises ValueError unless every scale is positive, Inf or NaN, and so in float32; values on a GPU are not
    validated.
    """
    wanted = "global_scale must be a positive number, or a float32 tensor of one for each group"
    if isinstance(given, torch.Tensor):
        if not given.is_floating_point():
            raise ValueError(f"{wanted}, got {shown(given)}")
        if is_readable(given) and bool((given <= _BECOMES_ZERO).any()):
            raise ValueError(f"{wanted}, got {given.flatten().tolist()[:4]}")
    elif isinstance(given, bool) or not isinstance(given, (Real, torch.SymFloat)) or given <= _BECOMES_ZERO:
        raise ValueError(f"{wanted}, got {shown(given)}")
    elif not given <= torch.finfo(torch.float32).max and given < math.inf:
        raise ValueError(f"{wanted}, got {shown(given)}, which float32 does not hold")


def _check_rows(
    rows: object, x: torch.Tensor, format: BlockScaledFormat, kind: str, global_scale: torch.Tensor | float | None
) -> None:
    if not is_integers(rows) or rows.device != x.device:
        got = f"{tuple(rows.shape)} {rows.dtype} on {rows.device}" if isinstance(rows, torch.Tensor) else rows
        raise ValueError(f"rows must be 1-D int32 or int64 on {x.device}, got {got}")
    if kind != "activation":
        raise ValueError(f"rows must be None for kind={kind!r}: only rows of activations are gathered")
    if x.shape[0] == 0 and rows.shape[0] > 0:
        raise ValueError(f"rows has {rows.shape[0]} entries and x no rows; give x at least one")
    if format == NVFP4 and global_scale is None:
        raise ValueError("global_scale is None; with rows NVFP4 must be given it (of all of x: amax / 2688)")


def check_scale_rule(format: BlockScaledFormat, scale_rule: str | None) -> str:
    """The scale_rule to use, "" where a format has one alone. Raises ValueError."""
    allowed = SCALE_RULES[format]
    if scale_rule is None:
        return allowed[0] if allowed else ""
    if not is_one_of(scale_rule, allowed):
        wanted = f"one of {allowed}" if allowed else "None"
        raise ValueError(f"scale_rule must be {wanted} for {format.name}, got {shown(scale_rule)}")
    return scale_rule
