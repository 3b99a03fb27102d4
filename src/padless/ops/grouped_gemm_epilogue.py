"""The quantizing call in padless's own words: a grouped GEMM, and everything that an `Epilogue` does to its sums."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from padless.arguments import check_flag, check_integer, check_readable, detached, shown
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.ops.checks import Activation, as_int32, check_offs_aligned, check_offs_values, check_operands, data_of
from padless.ops.epilogue_checks import check_outputs_apart, check_tensors
from padless.ops.epilogue_run import check_columns, check_m_aligned, compute, with_outputs
from padless.runtime.choices import BackendName
from padless.runtime.streams import on_stream


def grouped_gemm_epilogue(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors | None = None,
    *,
    m_aligned: int = 1,
    backend: BackendName | None = None,
    config: KernelChoice | None = None,
    stream: int | None = None,
    check_offs: bool = False,
) -> EpilogueTensors:
    """Multiplies as grouped_gemm does, and stores what ``epilogue`` makes of the float32 sums, in one launch.

    Args:
        a: (M, K) activations, as in grouped_gemm.
        b: (G, N, K) weights, as in grouped_gemm.
        offs: (G,) int32 or int64 end rows, as in grouped_gemm.
        epilogue: what is done, see padless.epilogue for the arithmetic, and which operands and outputs it has.
        tensors: the operands of the epilogue (alpha, bias, prob, norm_const, global_scale) and outputs to write into;
            outputs that are None are allocated; those given share no memory with what the call reads, nor with one
            another. What an ``amax`` given holds joins in: fill it with -inf first.
        m_aligned: what every end offset is a multiple of; decides the tiles that column scales need (``column_tiles``).
        backend: as in grouped_gemm.
        config: as in grouped_gemm.
        stream: handle of the CUDA stream that all of the call is on, also the memory of new outputs; None for torch's
            current one, as it has to be where the call is compiled.
        check_offs: validate the values of offs first, and whether they are multiples of m_aligned. This synchronises.

    Returns:
        ``tensors`` with every output of ``epilogue``. Rows at or past offs[-1] are left as they are; new scales in
        32x4x4 tiles start as zeros, a new amax as -inf, other new outputs hold whatever was in memory. The bits of a row
        of ``d`` and of row codes and scales depend on what grouped_gemm's do; amax and columns are of many rows.

    Raises:
        ValueError: an argument is not allowed, or no kernel does all of it in one launch for these formats on this
            device. Nothing is done in several launches instead: for that, call
            grouped_gemm(out_dtype=torch.float32) and quantize.
    """
    check_readable(a=a, b=b, offs=offs)
    check_flag("check_offs", check_offs)
    if not isinstance(epilogue, Epilogue):
        raise ValueError(f"epilogue must be a padless.Epilogue, got {shown(epilogue)}")
    if tensors is not None and not isinstance(tensors, EpilogueTensors):
        raise ValueError(f"tensors must be a padless.EpilogueTensors or None, got {shown(tensors)}")
    if stream is not None:
        check_integer("stream", stream, 0, 2**64 - 1)
    given = EpilogueTensors() if tensors is None else _detached(tensors)
    with on_stream("stream", stream, data_of(a)):
        a, offs = as_int32(a, offs)
        check_operands("grouped_gemm", a, b, offs)
        (num_groups, n), m = b.data.shape[:2], a.shape[0]
        check_columns(epilogue, n)
        check_m_aligned(m_aligned)
        check_tensors(epilogue, given, m, n, num_groups, data_of(a).device, m_aligned)
        if check_offs:
            check_offs_values(offs, m)
            check_offs_aligned(offs, m_aligned)
        complete = with_outputs(epilogue, given, m, n, num_groups, data_of(a).device, m_aligned)
        check_outputs_apart(a, b, offs, complete, _NAMES)
        compute(a, b, offs, epilogue, complete, backend, config, m_aligned, check_offs)
    return complete


_NAMES = {name: name for name in ("a", "b", "offs")} | {f.name: f"tensors.{f.name}" for f in fields(EpilogueTensors)}


def _detached(tensors: EpilogueTensors) -> EpilogueTensors:
    """``tensors`` cut off from their graphs; a ValueError where one requires grad with grad mode on."""
    given = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    cut = {name: detached(f"tensors.{name}", t) for name, t in given.items() if isinstance(t, torch.Tensor)}
    return replace(tensors, **cut)  # type: ignore[arg-type]  # none of them is column_tiles
