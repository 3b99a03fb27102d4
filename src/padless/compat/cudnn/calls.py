"""A grouped GEMM whose epilogue scales, gates, activates and quantizes: cuDNN's "Grouped GEMM + Quant", without padding.

What each call computes, and how it compares with cuDNN's, is in docs/grouped_gemm_quant.md; the arithmetic in
epilogue.py; the arguments, their types, defaults and rules in request.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, ParamSpec, cast

from padless.compat.cudnn.given import format_of, into
from padless.compat.cudnn.keywords import check_others
from padless.compat.cudnn.operands import NAMES
from padless.compat.cudnn.outputs import QuantOutputs, pack
from padless.compat.cudnn.request import CudnnRequest, SwigluRequest, stream_handle
from padless.ops.checks import data_of
from padless.ops.epilogue_checks import check_outputs_apart
from padless.ops.epilogue_run import compute, with_outputs
from padless.runtime.streams import on_stream

P = ParamSpec("P")


def _taking(request: Callable[P, CudnnRequest]) -> Callable[[Callable[..., QuantOutputs]], Callable[P, QuantOutputs]]:
    """Gives a function of keywords the signature of a request, for type checkers and for help()."""

    def decorate(function: Callable[..., QuantOutputs]) -> Callable[P, QuantOutputs]:
        own = inspect.signature(function)
        parameters = [*inspect.signature(request).parameters.values(), *own.parameters.values()]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast("Callable[P, QuantOutputs]", function)

    return decorate


def _run(call: str, kind: type[CudnnRequest], names: dict[str, bool], given: dict[str, Any]) -> QuantOutputs:
    """The result of a call of these arguments; names: the fields of its request, and which of them have to be given."""
    check_others(call, {name: value for name, value in given.items() if name not in names})
    if missing := [name for name, needed in names.items() if needed and name not in given]:
        raise TypeError(f"{call}() has no {' and no '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}")
    arguments = {name: value for name, value in given.items() if name in names}
    request = kind(**{**arguments, **format_of(arguments)})
    with on_stream("current_stream", stream_handle(request.current_stream), data_of(request.a_tensor)):
        resolved = request.resolve()
        o, epilogue = resolved.operands, resolved.epilogue
        tensors = into(request.out, epilogue, resolved.tensors, o)
        tensors = with_outputs(epilogue, tensors, o.m, o.n, o.num_groups, o.device, request.m_aligned)
        if request.out is not None:
            check_outputs_apart(o.a, o.b, o.offs, tensors, NAMES | {"row_codes": "out.data", "row_scale": "out.scale"})
        how = (request.backend, request.config, request.m_aligned, request.check_offs)
        compute(o.a, o.b, o.offs, epilogue, tensors, *how)
        return pack(epilogue, tensors, o)


@_taking(CudnnRequest)
def grouped_gemm_quant(**others: Any) -> QuantOutputs:
    """alpha, bias and prob on a grouped GEMM, and its result quantized along rows and columns, in one launch.

    Every argument is by keyword, since cuDNN's documentation and its code order them differently. Two ways to give
    operands, by the type of b_tensor: cuDNN's tensors, or `BlockScaledTensor`s. Shapes in brackets are the second's.

    Operands:
        a_tensor: (M, K, 1) or (M, K) codes, K contiguous; FP4 K / 2, float4_e2m1fn_x2 or uint8. [A BlockScaledTensor
            (M, K) of any format, or a bfloat16 tensor, that grouped_gemm takes with b.]
        b_tensor: (N, K, G) or (G, N, K) codes, K contiguous. [(G, N, K)]
        sfa_tensor, sfb_tensor: scales, (32, 4, ceil(M / 128), 4, ceil(ceil(K / v) / 4), 1) and (.., ceil(N / 128), ..,
            G), 32x4x4 tiles over all rows, or those bytes contiguous in any shape; float8_e8m0fnu (v = 32) or
            float8_e4m3fn (v = 16). [None]
        padded_offsets: (G,) int32 or int64 END row of each group. Any row: nothing has to be padded.
        alpha_tensor: (G,) float32; None is 1.
        prob_tensor: (M, 1, 1) or (M,) float32; None is 1.
        bias_tensor: (N, G) float32, bfloat16 or float16. [(G, N)]
        norm_const_tensor: (1,) float32, positive: scales of MX outputs are multiplied by it. None: scales are those
            of `quantize`.
        global_scale_tensor: NVFP4 output's decode scale, (1,) or (G,) float32.
        Numbers in other than float32 are converted first, which is a launch more.
    Outputs:
        d_dtype: bfloat16 (None), float16 or float32: values. float8_e4m3fn, float8_e5m2 and float4_e2m1fn_x2: codes,
            MXFP8, MXFP8_E5M2 and MXFP4.
        d_format: the format of codes, where d_dtype does not say it (FP8_BLOCK, NVFP4); overrides d_dtype.
        row_output, column_output: which codes are wanted. column_output None: for the FP8 formats, as cuDNN.
        row_layout, column_layout: where scales lie, see epilogue.py. None: "blocked", for FP8_BLOCK "plain_mn" and
            "plain"; column_layout "blocked_groups" with discrete_col_sfd.
        discrete_col_sfd: column scales as a matrix per group (which is what a GEMM along M reads).
        return_amax: None: for bfloat16 and float16 values, as cuDNN. generate_amax False: not for these either.
        m_aligned: what every end offset is a multiple of. 256 gives column scales of cuDNN's shape; 1 gives them room
            for any offsets.
        scale_rule: "rceil" or "floor" for MX outputs without norm_const.
        semantics: "implementation", what cuDNN computes; "documented", what its documentation says. They differ in
            the bias (prob multiplies the bias alone, or the sum), in the largest scaled magnitude of e5m2 (128 or
            57344) and in the order of norm_const.
    How:
        acc_dtype, cd_major: float32 (or None) and "n", nothing else. sf_vec_size: None, or v.
        others: cuDNN's keywords that choose its kernel are without effect, see config; more have one value. Which is
            which, and what is said of other values, is in docs/grouped_gemm_quant.md.
        current_stream: a torch.cuda.Stream, a CUstream or its number; None is torch's current one.
        backend, check_offs, config: as in grouped_gemm. check_offs also checks m_aligned.
        out: the row output to write into. d_format, row_layout and global_scale_tensor come from it where None.

    With a_tensor (M, K) outputs are (M, N), and scales contiguous (1, row tiles, column tiles, 32, 4, 4), as cuDNN's.
    The bits of a row depend on what grouped_gemm's do, but for column codes and amax, which are of many rows.

    Returns `QuantOutputs`: d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor, and `.row`, the
    activations of the next grouped_gemm. Rows at or past padded_offsets[-1] are left as they are.

    Raises ValueError before anything runs: an argument is not allowed, or there is no kernel that does all of it in one
    launch for these formats on this GPU. Nothing is done in several launches instead: for that, call
    grouped_gemm(out_dtype=torch.float32) and quantize.
    """
    return _run("grouped_gemm_quant", CudnnRequest, _NAMES, others)


@_taking(SwigluRequest)
def grouped_gemm_swiglu_quant(**others: Any) -> QuantOutputs:
    """An expert's whole first projection: D = prob * silu(gate) * up, N_out = N / 2, quantized, in one launch.

    gate_up: where the rows of b_tensor that make gate and up lie, and it has no default, since no error could tell the
        wrong one: "concatenated", gate in the first N / 2, up in the others (checkpoints, vLLM's w13); or
        "interleaved", 32 of gate, 32 of up, 32 of gate, .. (cuDNN).
    bias_tensor: added to gate and up before the activation, so semantics makes no difference to it.

    All else as grouped_gemm_quant.
    """
    return _run("grouped_gemm_swiglu_quant", SwigluRequest, _SWIGLU_NAMES, others)


_NAMES = {field.name: field.default is MISSING for field in fields(CudnnRequest)}
_SWIGLU_NAMES = {field.name: field.default is MISSING for field in fields(SwigluRequest)}
