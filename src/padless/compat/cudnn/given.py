"""A row output that the caller gives, with its parts in the place of new tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from padless.arguments import check_readable
from padless.compat.cudnn.operands import Operands
from padless.epilogue import Epilogue, EpilogueTensors, row_scale_shape
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.ops.checks import check_rows, describe
from padless.ops.epilogue_run import check_tensor


def format_of(given: dict[str, Any]) -> dict[str, Any]:
    """Format, layout and global scale of the output as ``given`` has them, or those of ``out`` where they are None."""
    names = ("d_format", "row_layout", "global_scale_tensor")
    found = {name: given.get(name) for name in names}
    if (out := given.get("out")) is None:
        return found
    if not isinstance(out, BlockScaledTensor):
        raise ValueError(f"out must be a BlockScaledTensor to write codes and scales into, got {describe(out)}")
    check_readable(out=out)
    own = dict(zip(names, (out.format, _layout(out), out.global_scale), strict=True))
    found = {name: own[name] if value is None else value for name, value in found.items()}
    if found["global_scale_tensor"] is not out.global_scale:
        raise ValueError("out has a global scale that is not global_scale_tensor; leave that one None")
    return found


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
