"""Checks of arguments of expert parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist

from padless.arguments import check_integer, check_number, check_readable, refuse_kinds, refuse_tangents
from padless.distributed.plan import ExpertPlan
from padless.distributed.row_format import PLAIN
from padless.distributed.settings import Settings
from padless.formats import FORMATS, FP8_BLOCK, NVFP4, BlockScaledFormat
from padless.moe.checks import MAX_EXPERTS, MAX_TOP_K, check_matrix
from padless.ops.checks import describe
from padless.quantization.quantize import check_global_scale, check_scale_rule
from padless.runtime.choices import ScaleMajor, ScaleRule

SUMS = ("ranks", "slots")
HIDDEN_MULTIPLE = 32  # so that codes of every format are whole 16-byte words


def check_settings(
    num_experts: int,
    hidden: int,
    top_k: int,
    max_tokens: int,
    fmt: object,
    scale_major: ScaleMajor | None,
    scale_rule: ScaleRule | None,
    timeout: float,
    programs: int | None,
) -> ScaleMajor:
    """The scale_major to use. Raises ValueError."""
    check_integer("num_experts", num_experts, 1, MAX_EXPERTS)
    check_integer("hidden", hidden, HIDDEN_MULTIPLE)
    if hidden % HIDDEN_MULTIPLE != 0:
        raise ValueError(f"hidden is {hidden}; it must be a positive multiple of {HIDDEN_MULTIPLE}")
    check_integer("top_k", top_k, 1, MAX_TOP_K)
    check_integer("max_tokens", max_tokens, 1)
    check_number("timeout", timeout)
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout} seconds; it must be positive")
    if programs is not None:
        check_integer("programs", programs, 1)
    if fmt not in PLAIN and fmt not in FORMATS:
        names = ", ".join(f.name for f in FORMATS)
        raise ValueError(f"fmt is {fmt!r}; allowed: {names}, torch.bfloat16, torch.float32")
    if scale_major not in (None, "mn", "k") or (scale_major == "mn" and fmt != FP8_BLOCK):
        raise ValueError(f"scale_major is {scale_major!r}; allowed: 'mn' for FP8_BLOCK, 'k', None")
    if isinstance(fmt, BlockScaledFormat):
        check_scale_rule(fmt, scale_rule)
    elif scale_rule is not None:
        raise ValueError(f"scale_rule must be None for rows that are not quantized, got {scale_rule!r}")
    return scale_major or ("mn" if fmt == FP8_BLOCK else "k")


def check_capacity(capacity: int | str | None, backend: str, default: int) -> int | str:
    """The capacity to use. Raises ValueError."""
    if capacity is None:
        return default
    if capacity == "exact" and backend != "symm":
        return capacity
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity >= 1:
        return capacity
    raise ValueError(f"capacity is {capacity!r}; allowed: a positive number of rows, None, and 'exact' but for 'symm'")


def check_gradient_format(gradient_fmt: object, fmt: object) -> None:
    """Raises ValueError."""
    if gradient_fmt is None or (gradient_fmt == FP8_BLOCK and fmt in PLAIN):
        return
    raise ValueError(
        f"gradient_fmt is {gradient_fmt!r} and fmt {fmt!r}; allowed: None, and FP8_BLOCK where fmt is torch.bfloat16 or "
        "torch.float32"
    )


def check_sums(sums: object) -> None:
    """Raises ValueError."""
    if sums not in SUMS:
        raise ValueError(f"sums is {sums!r}; allowed: {', '.join(map(repr, SUMS))}")


def device_of(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """The device that tensors must be on. Raises ValueError."""
    if device is None:
        nccl = "nccl" in str(dist.get_backend(group))
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; it must be a torch.device or the name of one") from error
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_tokens(
    s: Settings, device: torch.device, tokens: object, ids: object, weights: object, global_scale: torch.Tensor | None
) -> None:
    """Raises ValueError for what cannot be dispatched."""
    check_matrix("tokens", tokens, None, s.hidden, device)
    assert isinstance(tokens, torch.Tensor)
    count = tokens.shape[0]
    if count > s.max_tokens:
        raise ValueError(
            f"tokens has {count} rows and max_tokens is {s.max_tokens}; give fewer, or make the object with more"
        )
    if (
        not isinstance(ids, torch.Tensor)
        or ids.dtype not in (torch.int32, torch.int64)
        or tuple(ids.shape) != (count, s.top_k)
        or ids.device != device
    ):
        raise ValueError(f"ids must be {count} x {s.top_k} int32 or int64 on {device}, got {describe(ids)}")
    check_matrix("weights", weights, count, s.top_k, device)
    refuse_kinds(ids=ids)
    refuse_tangents(tokens=tokens, weights=weights)
    fmt = s.row_format.format
    if (global_scale is None) == (fmt == NVFP4):
        wanted = "one float32 value" if fmt == NVFP4 else "None"
        raise ValueError(f"global_scale must be {wanted}, got {describe(global_scale)}")
    if global_scale is not None:
        if (
            not isinstance(global_scale, torch.Tensor)
            or tuple(global_scale.shape) not in ((), (1,))
            or global_scale.dtype != torch.float32
            or global_scale.device != device
        ):
            raise ValueError(f"global_scale must be one float32 value on {device}, got {describe(global_scale)}")
        check_readable(global_scale=global_scale)
        check_global_scale(global_scale)
    if isinstance(fmt, BlockScaledFormat):
        for name, t in (("tokens", tokens), ("weights", weights)):
            assert isinstance(t, torch.Tensor)
            if torch.is_grad_enabled() and t.requires_grad:
                raise ValueError(
                    f"{name} requires grad and rows in {fmt.name} carry none; use fmt=torch.bfloat16, or call under "
                    "torch.no_grad()"
                )
    elif tokens.dtype != fmt and torch.is_grad_enabled() and tokens.requires_grad:
        raise ValueError(f"tokens is {tokens.dtype} and rows are {fmt}; convert tokens, which is differentiated")


def check_rows(s: Settings, device: torch.device, rows: object, plan: object) -> None:
    """Raises ValueError for what cannot be combined."""
    if not isinstance(plan, ExpertPlan):
        raise ValueError(f"plan must be the ExpertPlan of a dispatch, got {type(plan).__name__}")
    slots = s.num_ranks * s.max_tokens, s.top_k
    if tuple(plan.inverse.shape) != slots:
        raise ValueError(
            f"plan has {tuple(plan.inverse.shape)} slots and this object {slots}; give the plan that its own dispatch "
            "returned"
        )
    wanted = (plan.prob.shape[0], s.hidden)
    if (
        not isinstance(rows, torch.Tensor)
        or rows.dtype != s.partial
        or tuple(rows.shape) != wanted
        or rows.device != device
    ):
        raise ValueError(f"rows must be {wanted[0]} x {wanted[1]} {s.partial} on {device}, got {describe(rows)}")
    refuse_tangents(rows=rows)
