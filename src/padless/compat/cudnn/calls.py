"""A grouped GEMM whose epilogue scales, gates, activates and quantises: cuDNN's "Grouped GEMM + Quant", without padding.

What each call computes, and how it compares with cuDNN's, is in docs/grouped_gemm_quant.md; the arithmetic in
epilogue.py.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.compat.cudnn.operands import Operands, operands_of
from padless.epilogue import COLUMN_FORMATS, NORM_CONST_RULES, ROW_FORMATS, Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.gradients import refuse_gradients
from padless.kernels.launch import KernelChoice
from padless.ops.checks import check_offs_values
from padless.ops.grouped_gemm_epilogue import QuantOutputs, allocate, check, default_row_layout, pack, run

SEMANTICS = ("implementation", "documented")
GATE_UP = {"interleaved": "swiglu_interleaved", "concatenated": "swiglu_concatenated"}
D_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMAT_OF_DTYPE = {
    torch.float8_e4m3fn: MXFP8,
    torch.float8_e5m2: MXFP8_E5M2,
    torch.float4_e2m1fn_x2: MXFP4,
}


def grouped_gemm_quant(
    *,
    a_tensor: torch.Tensor | BlockScaledTensor,
    b_tensor: torch.Tensor | BlockScaledTensor,
    sfa_tensor: torch.Tensor | None = None,
    sfb_tensor: torch.Tensor | None = None,
    padded_offsets: torch.Tensor,
    alpha_tensor: torch.Tensor | None = None,
    norm_const_tensor: torch.Tensor | None = None,
    prob_tensor: torch.Tensor | None = None,
    bias_tensor: torch.Tensor | None = None,
    acc_dtype: torch.dtype = torch.float32,
    c_dtype: torch.dtype = torch.bfloat16,
    d_dtype: torch.dtype = torch.bfloat16,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] | None = None,
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int | None = None,
    vector_f32: bool = False,
    m_aligned: int = 1,
    discrete_col_sfd: bool = False,
    current_stream: Any = None,
    d_format: BlockScaledFormat | None = None,
    row_output: bool = True,
    column_output: bool | None = None,
    row_layout: str | None = None,
    column_layout: str | None = None,
    scale_rule: str | None = None,
    global_scale_tensor: torch.Tensor | None = None,
    return_amax: bool | None = None,
    semantics: str = "implementation",
    backend: str | None = None,
    check_offs: bool = False,
    config: KernelChoice | None = None,
) -> QuantOutputs:
    """alpha, bias and prob on a grouped GEMM, and its result quantised along rows and columns, in one launch.

    Every argument is by keyword, since cuDNN's documentation and its code order them differently. Two ways to give
    operands, by the type of b_tensor: cuDNN's tensors, or `BlockScaledTensor`s. Shapes in brackets are the second's.

    Operands:
        a_tensor: (M, K, 1) codes, K contiguous; FP4 (M, K / 2, 1), float4_e2m1fn_x2 or uint8. [A BlockScaledTensor
            (M, K) of any format, or a bfloat16 tensor, that grouped_gemm takes with b.]
        b_tensor: (N, K, G) codes, K contiguous. [(G, N, K)]
        sfa_tensor, sfb_tensor: scales, (32, 4, ceil(M / 128), 4, ceil(ceil(K / v) / 4), 1) and (.., ceil(N / 128), ..,
            G), 32x4x4 tiles over all rows; float8_e8m0fnu (v = 32) or float8_e4m3fn (v = 16). [None]
        padded_offsets: (G,) int32 END row of each group. Any row: nothing has to be padded.
        alpha_tensor: (G,) float32; None is 1.
        prob_tensor: (M, 1, 1) or (M,) float32; None is 1.
        bias_tensor: (N, G) float32, bfloat16 or float16. [(G, N)]
        norm_const_tensor: (1,) float32, positive: scales of MX outputs are multiplied by it. None: scales are those
            of `quantize`.
        global_scale_tensor: NVFP4 output's decode scale, (1,) or (G,) float32.
        Numbers in other than float32 are converted first, which is a launch more.
    Outputs:
        d_dtype: bfloat16, float16 or float32: values. float8_e4m3fn, float8_e5m2 and float4_e2m1fn_x2: codes, MXFP8,
            MXFP8_E5M2 and MXFP4.
        d_format: the format of codes, where d_dtype does not say it (FP8_BLOCK, NVFP4); overrides d_dtype.
        row_output, column_output: which codes are wanted. column_output None: for the FP8 formats, as cuDNN.
        row_layout, column_layout: where scales lie, see epilogue.py. None: "blocked", for FP8_BLOCK "plain_mn" and
            "plain"; column_layout "blocked_groups" with discrete_col_sfd.
        discrete_col_sfd: column scales as a matrix per group (which is what a GEMM along M reads).
        return_amax: None: for bfloat16 and float16 values, as cuDNN.
        m_aligned: what every end offset is a multiple of. 256 gives column scales of cuDNN's shape; 1 gives them room
            for any offsets.
        scale_rule: "rceil" or "floor" for MX outputs without norm_const.
        semantics: "implementation", what cuDNN computes; "documented", what its documentation says. They differ in
            the bias (prob multiplies the bias alone, or the sum), in the largest scaled magnitude of e5m2 (128 or
            57344) and in the order of norm_const.
    How:
        acc_dtype, cd_major: float32 and "n", nothing else. sf_vec_size: None, or v.
        c_dtype, mma_tiler_mn, cluster_shape_mn, vector_f32: cuDNN's choice of kernel; without effect, see config.
        current_stream: a torch.cuda.Stream, a CUstream or its number; None is torch's current one.
        backend, check_offs, config: as in grouped_gemm. check_offs also holds m_aligned to its word.

    Returns `QuantOutputs`: d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor, and `.row`, the
    activations of the next grouped_gemm. Rows at or past padded_offsets[-1] are left as they are.

    Raises ValueError before anything runs: an argument is not allowed, or there is no kernel that does all of it in one
    launch for these formats on this GPU. Nothing is done in several launches instead: for that, call
    grouped_gemm(out_dtype=torch.float32) and quantize.
    """
    options = locals()
    return _call("none", **options)


def grouped_gemm_swiglu_quant(
    *,
    gate_up: str,
    a_tensor: torch.Tensor | BlockScaledTensor,
    b_tensor: torch.Tensor | BlockScaledTensor,
    sfa_tensor: torch.Tensor | None = None,
    sfb_tensor: torch.Tensor | None = None,
    padded_offsets: torch.Tensor,
    alpha_tensor: torch.Tensor | None = None,
    norm_const_tensor: torch.Tensor | None = None,
    prob_tensor: torch.Tensor | None = None,
    bias_tensor: torch.Tensor | None = None,
    acc_dtype: torch.dtype = torch.float32,
    c_dtype: torch.dtype = torch.bfloat16,
    d_dtype: torch.dtype = torch.bfloat16,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] | None = None,
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int | None = None,
    vector_f32: bool = False,
    m_aligned: int = 1,
    discrete_col_sfd: bool = False,
    current_stream: Any = None,
    d_format: BlockScaledFormat | None = None,
    row_output: bool = True,
    column_output: bool | None = None,
    row_layout: str | None = None,
    column_layout: str | None = None,
    scale_rule: str | None = None,
    global_scale_tensor: torch.Tensor | None = None,
    return_amax: bool | None = None,
    semantics: str = "implementation",
    backend: str | None = None,
    check_offs: bool = False,
    config: KernelChoice | None = None,
) -> QuantOutputs:
    """An expert's whole first projection: D = prob * silu(gate) * up, N_out = N / 2, quantised, in one launch.

    gate_up: where the rows of b_tensor that make gate and up lie, and it has no default, since no error could tell the
        wrong one: "concatenated", gate in the first N / 2, up in the others (checkpoints, vLLM's w13); or
        "interleaved", 32 of gate, 32 of up, 32 of gate, .. (cuDNN).
    bias_tensor: added to gate and up before the activation, so semantics makes no difference to it.

    All else as grouped_gemm_quant.
    """
    options = locals()
    gate_up = options.pop("gate_up")
    if gate_up not in GATE_UP:
        raise ValueError(f"gate_up is {gate_up!r}; allowed: {', '.join(map(repr, GATE_UP))}")
    return _call(GATE_UP[gate_up], **options)


def _call(activation: str, **o: Any) -> QuantOutputs:
    refuse_gradients(**o)
    check_fixed(o)
    operands = operands_of(o)
    epilogue = _epilogue(activation, operands, o)
    check(operands.a, operands.b, operands.offs, epilogue)
    a, b, offs = operands.a, operands.b, operands.offs
    (num_groups, n), m = b.data.shape[:2], a.shape[0]
    if not isinstance(o["m_aligned"], int) or o["m_aligned"] < 1:
        raise ValueError(f"m_aligned is {o['m_aligned']!r}; it must be an integer of 1 or more")
    numbers = operands.numbers(o, epilogue)
    if o["check_offs"]:
        check_offs_values(offs, m)
        check_aligned(offs, o["m_aligned"])
    outputs = allocate(epilogue, m, n, num_groups, a.device, o["m_aligned"])
    tensors = EpilogueTensors(**numbers, **outputs)
    run(a, b, offs, epilogue, tensors, o["backend"], o["config"], stream_handle(o["current_stream"]))
    return pack(epilogue, tensors, operands.as_cudnn, offs)


def _epilogue(activation: str, operands: Operands, o: dict[str, Any]) -> Epilogue:
    """What the arguments ask for. Raises ValueError in the arguments' words."""
    format, d_dtype = _outputs(o)
    rule = _scale_rule(format, o)
    rows = format if o["row_output"] else None
    columns = _column_format(format, o)
    if format is not None and rows is None and columns is None:
        raise ValueError(
            "row_output and column_output are both off; nothing would be left of the quantised output"
        )
    amax = d_dtype in (torch.bfloat16, torch.float16) if o["return_amax"] is None else o["return_amax"]
    row_layout = o["row_layout"] or ("plain" if rows is None else default_row_layout(rows))
    column_layout = o["column_layout"]
    if column_layout is None:
        tiled = columns is not None and columns != FP8_BLOCK
        column_layout = ("blocked_groups" if o["discrete_col_sfd"] else "blocked") if tiled else "plain"
    elif columns is None:
        raise ValueError(f"column_layout is {column_layout!r} and there is no column output; leave it None")
    gated_bias = activation == "none" and o["semantics"] == "implementation"
    return Epilogue(
        alpha=o["alpha_tensor"] is not None,
        bias=o["bias_tensor"] is not None,
        prob=o["prob_tensor"] is not None,
        bias_rule="gated_bias" if gated_bias else "gated_sum",
        activation=activation,
        amax=bool(amax),
        d_dtype=d_dtype,
        row_format=rows,
        row_layout=row_layout,
        column_format=columns,
        column_layout=column_layout,
        scale_rule=rule,
    )


def _outputs(o: dict[str, Any]) -> tuple[BlockScaledFormat | None, torch.dtype | None]:
    """(format of codes, dtype of values): one of them is None."""
    if o["d_format"] is not None:
        if o["d_format"] not in ROW_FORMATS:
            names = ", ".join(format.name for format in ROW_FORMATS)
            raise ValueError(
                f"d_format is {getattr(o['d_format'], 'name', o['d_format'])!r}; allowed: {names}, None"
            )
        return o["d_format"], None
    if o["d_dtype"] in FORMAT_OF_DTYPE:
        return FORMAT_OF_DTYPE[o["d_dtype"]], None
    if o["d_dtype"] not in D_DTYPES:
        allowed = ", ".join(map(str, (*D_DTYPES, *FORMAT_OF_DTYPE)))
        raise ValueError(f"d_dtype is {o['d_dtype']}; allowed: {allowed}")
    return None, o["d_dtype"]


def _scale_rule(format: BlockScaledFormat | None, o: dict[str, Any]) -> str:
    # Where no scales are made norm_const is dropped, as in cuDNN: a call need not change with d_dtype.
    rule = o["scale_rule"]
    if format in (None, FP8_BLOCK, NVFP4):
        name = str(o["d_dtype"]) if format is None else format.name
        if format is not None and o["norm_const_tensor"] is not None:
            raise ValueError(f"norm_const_tensor must be None for {name} output; the MX formats have one")
        if rule is not None:
            raise ValueError(f"scale_rule is {rule!r}; it must be None for {name} output")
        if format is None and o["global_scale_tensor"] is not None:
            raise ValueError("global_scale_tensor must be None for output that has no scales")
        if format == NVFP4 and o["global_scale_tensor"] is None:
            raise ValueError(
                "global_scale_tensor is None; NVFP4 output needs its decode scale, amax / 2688 of D"
            )
        if format == FP8_BLOCK and o["global_scale_tensor"] is not None:
            raise ValueError("global_scale_tensor must be None for FP8_BLOCK output")
        return "te" if format == NVFP4 else ""
    if o["global_scale_tensor"] is not None:
        raise ValueError(f"global_scale_tensor must be None for {format.name} output")
    if o["norm_const_tensor"] is None:
        if rule not in (None, "rceil", "floor"):
            raise ValueError(f"scale_rule is {rule!r}; allowed: None, 'rceil', 'floor'")
        return rule or "rceil"
    if rule is not None:
        raise ValueError(f"scale_rule is {rule!r}; with norm_const_tensor it must be None (see semantics)")
    return NORM_CONST_RULES[SEMANTICS.index(o["semantics"])]


def _column_format(format: BlockScaledFormat | None, o: dict[str, Any]) -> BlockScaledFormat | None:
    if format is None:
        if o["column_output"]:
            raise ValueError(
                f"column_output is True and d_dtype {o['d_dtype']} has no codes; ask for an FP8 format"
            )
        return None
    possible = format in COLUMN_FORMATS
    if o["column_output"] and not possible:
        names = ", ".join(allowed.name for allowed in COLUMN_FORMATS)
        raise ValueError(f"column_output is True for {format.name}; only {names} are quantised along columns")
    wanted = possible if o["column_output"] is None else o["column_output"]
    return format if wanted else None


# --- checks that the class makes too -------------------------------------------------------------------------


def check_fixed(o: dict[str, Any]) -> None:
    """Raises ValueError for cuDNN's arguments that have one value, and for unknown semantics."""
    if o["acc_dtype"] != torch.float32:
        raise ValueError(f"acc_dtype is {o['acc_dtype']}; it must be torch.float32")
    if o["cd_major"] != "n":
        raise ValueError(f"cd_major is {o['cd_major']!r}; only 'n' is supported")
    if o["semantics"] not in SEMANTICS:
        raise ValueError(f"semantics is {o['semantics']!r}; allowed: {', '.join(map(repr, SEMANTICS))}")


def check_aligned(offs: torch.Tensor, m_aligned: int) -> None:
    """Raises ValueError for an end offset that is no multiple of m_aligned. Waits for the device."""
    for group, end in enumerate(offs.tolist()):
        if end % m_aligned != 0:
            raise ValueError(
                f"padded_offsets[{group}] is {end}, which is no multiple of m_aligned = {m_aligned}; use 1"
            )


def stream_handle(stream: Any) -> int | None:
    """The number of a stream: a torch.cuda.Stream, a CUstream, a number, or None for torch's current one."""
    if stream is None:
        return None
    handle = getattr(stream, "cuda_stream", stream)
    try:
        return int(handle)
    except (TypeError, ValueError):
        raise ValueError(
            f"current_stream must be a stream or its number, got {type(stream).__name__}"
        ) from None
