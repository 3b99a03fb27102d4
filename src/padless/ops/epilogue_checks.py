"""Checks of the operands of an epilogue and of outputs that a caller gives, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from padless.epilogue import Epilogue, EpilogueTensors, column_scale_shape, column_tiles, row_scale_shape
from padless.formats import BlockScaledTensor, is_mn_major
from padless.ops.checks import Activation, check_rows, data_of, describe, tensors_of
from padless.ops.epilogue_run import check_tensor
from padless.ops.outputs import check_outputs
from padless.row_groups import is_traced


def check_tensors(
    epilogue: Epilogue, tensors: EpilogueTensors, m: int, n: int, num_groups: int, device: torch.device, m_aligned: int
) -> None:
    """Raises ValueError for operands that are missing, and operands and outputs that are wrong or of no use."""
    t, n_out, float32 = tensors, epilogue.out_columns(n), (torch.float32,)
    is_nvfp4 = epilogue.scale_rule == "te"
    operands: tuple[tuple[str, bool, tuple[int, ...]], ...] = (
        ("alpha", epilogue.alpha, (num_groups,)),
        ("bias", epilogue.bias, (num_groups, n)),
        ("prob", epilogue.prob, (m,)),
        ("norm_const", epilogue.norm_const, (1,)),
        ("global_scale", is_nvfp4, (1,) if _is_one_number(t.global_scale) else (num_groups,)),
    )
    for name, wanted, shape in operands:
        _check_wanted(name, getattr(t, name), wanted)
        if wanted:
            _check_contiguous(name, check_tensor(f"tensors.{name}", getattr(t, name), shape, float32, device))
    outputs = (
        ("d", epilogue.d_dtype is not None),
        ("amax", epilogue.amax),
        *((name, epilogue.row_format is not None) for name in ("row_codes", "row_scale")),
        *((name, epilogue.column_format is not None) for name in ("column_codes", "column_scale")),
    )
    for name, wanted in outputs:
        if getattr(t, name) is not None:
            _check_wanted(name, getattr(t, name), wanted)
    if t.d is not None and epilogue.d_dtype is not None:
        check_rows("tensors.d", check_tensor("tensors.d", t.d, (m, n_out), (epilogue.d_dtype,), device))
    if t.amax is not None:
        _check_contiguous("amax", check_tensor("tensors.amax", t.amax, (num_groups,), float32, device))
    for name, format in (("row", epilogue.row_format), ("column", epilogue.column_format)):
        codes = getattr(t, f"{name}_codes")
        if codes is not None and format is not None:
            shape = (m, n_out // format.codes_per_byte)
            name = f"tensors.{name}_codes"
            check_rows(name, check_tensor(name, codes, shape, (format.data_dtype,), device))
    _check_row_scale(epilogue, t, m, n_out, num_groups, device)
    _check_column_scale(epilogue, t, n_out, column_tiles(m, num_groups, m_aligned), device)


# Of EpilogueTensors.
_NUMBERS = ("alpha", "bias", "prob", "norm_const", "global_scale")
_OUTPUTS = ("d", "amax", "row_codes", "row_scale", "column_codes", "column_scale")


def check_outputs_apart(
    a: Activation, b: BlockScaledTensor, offs: torch.Tensor, tensors: EpilogueTensors, names: Mapping[str, str]
) -> None:
    """Raises ValueError for an output in memory that the call reads, or of another output; traced ones pass.

    names: what the caller calls the tensors: "a", "b", "offs" and those of EpilogueTensors.
    """
    if is_traced(data_of(a)):
        return
    numbers, outputs = ([(names[part], getattr(tensors, part)) for part in of] for of in (_NUMBERS, _OUTPUTS))
    check_outputs(outputs, [*tensors_of(names["a"], a), *tensors_of(names["b"], b), (names["offs"], offs), *numbers])


def _is_one_number(t: torch.Tensor | None) -> bool:
    return isinstance(t, torch.Tensor) and t.numel() == 1


def _check_wanted(name: str, t: torch.Tensor | None, wanted: bool) -> None:
    if wanted and t is None:
        raise ValueError(f"tensors.{name} is None; this epilogue needs it (see EpilogueTensors)")
    if not wanted and t is not None:
        raise ValueError(f"tensors.{name} is {describe(t)}; this epilogue has no use for it, so it must be None")


def _check_contiguous(name: str, t: torch.Tensor) -> None:
    if not t.is_contiguous():
        raise ValueError(f"tensors.{name} has strides {t.stride()}; it must be contiguous; call .contiguous()")


def _check_row_scale(
    epilogue: Epilogue, t: EpilogueTensors, m: int, n_out: int, num_groups: int, device: torch.device
) -> None:
    if t.row_scale is None or epilogue.row_format is None:
        return
    shape = row_scale_shape(epilogue, m, n_out, num_groups)
    check_tensor("tensors.row_scale", t.row_scale, shape, (epilogue.row_format.scale_dtype,), device)
    if epilogue.row_layout != "plain_mn":
        _check_contiguous("row_scale", t.row_scale)
    elif not is_mn_major(t.row_scale):
        raise ValueError(
            f"tensors.row_scale has strides {t.row_scale.stride()}; layout 'plain_mn' has (1, M rounded up to 4); "
            "allocate it with padless.layouts.empty_mn_major"
        )


def _check_column_scale(epilogue: Epilogue, t: EpilogueTensors, n_out: int, needed: int, device: torch.device) -> None:
    if t.column_scale is None or epilogue.column_format is None:
        return
    if t.column_tiles < needed:
        raise ValueError(
            f"tensors.column_tiles is {t.column_tiles}; groups that end anywhere can need {needed} (see "
            "padless.epilogue.column_tiles, and m_aligned)"
        )
    shape = column_scale_shape(epilogue, n_out, t.column_tiles)
    dtypes = (epilogue.column_format.scale_dtype,)
    _check_contiguous("column_scale", check_tensor("tensors.column_scale", t.column_scale, shape, dtypes, device))
