"""Arguments of a call by name, and a row output that the caller gives, with its parts in the place of new tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from padless.arguments import check_readable
from padless.compat.cudnn.operands import Operands
from padless.epilogue import Epilogue, EpilogueTensors, row_scale_shape
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.ops.checks import check_rows, describe
from padless.ops.epilogue_run import check_tensor

_Call = TypeVar("_Call", bound=Callable[..., Any])


def without_locals(run: Callable[[str, dict[str, Any]], Any]) -> Callable[[_Call], _Call]:
    """While torch.compile traces a call by keywords: run(name, arguments), as its body says with locals(), which torch
    2.11 cannot trace."""

    def decorate(function: _Call) -> _Call:
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
        names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

        @wraps(function)
        def call(**given: Any) -> Any:
            if not torch.compiler.is_compiling():
                return function(**given)
            named = {name: value for name, value in given.items() if name in names}
            others = {name: value for name, value in given.items() if name not in names}
            return run(function.__name__, {**defaults, **named, "others": others})

        return cast("_Call", call)

    return decorate


def format_from(out: object, given: dict[str, Any]) -> BlockScaledTensor | None:
    """``out``; format, layout and global scale of the output come from it where ``given`` says nothing of them."""
    if out is None:
        return None
    if not isinstance(out, BlockScaledTensor):
        raise ValueError(f"out must be a BlockScaledTensor to write codes and scales into, got {describe(out)}")
    check_readable(out=out)
    for name, value in (
        ("d_format", out.format),
        ("row_layout", _layout(out)),
        ("global_scale_tensor", out.global_scale),
    ):
        given[name] = value if given[name] is None else given[name]
    if given["global_scale_tensor"] is not out.global_scale:
        raise ValueError("out has a global scale that is not global_scale_tensor; leave that one None")
    return out


def into(out: BlockScaledTensor | None, epilogue: Epilogue, tensors: EpilogueTensors, o: Operands) -> EpilogueTensors:
    """``tensors`` with the parts of ``out`` as row output. Raises ValueError where it is not what the call computes."""
    if out is None:
        return tensors
    format, n_out = epilogue.row_format, epilogue.out_columns(o.n)
    if format != out.format or epilogue.row_layout != _layout(out):
        computed = "no row output" if format is None else f"{format.name} with {epilogue.row_layout!r} scales"
        raise ValueError(f"out is {out.format.name} with {_layout(out)!r} scales; this call computes {computed}")
    codes = check_tensor("out.data", out.data, (o.m, n_out // format.codes_per_byte), (format.data_dtype,), o.device)
    check_rows("out.data", codes)
    shape = row_scale_shape(epilogue, o.m, n_out, o.num_groups)
    scale = check_tensor("out.scale", out.scale, shape, (format.scale_dtype,), o.device)
    return replace(tensors, row_codes=codes, row_scale=scale)


def _layout(out: BlockScaledTensor) -> str:
    """The Epilogue.row_layout of its scales."""
    return "plain_mn" if out.format == FP8_BLOCK and out.scale_major == "mn" else out.scale_layout
