"""A call of grouped_gemm_quant or grouped_gemm_swiglu_quant as one value: arguments, their defaults and rules."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import SupportsInt, cast

import torch

from padless.arguments import check_flag, check_readable, is_one_of, shown
from padless.compat.cudnn.operands import GATE_UP, SEMANTICS, Bound, Inputs
from padless.epilogue import COLUMN_FORMATS, MX_FORMATS, NORM_CONST_RULES, ROW_FORMATS, Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.kernels.launch import KernelChoice
from padless.ops.checks import check_offs_aligned, check_offs_values
from padless.ops.epilogue_run import check_columns, check_m_aligned, default_row_layout
from padless.runtime.choices import BackendName, OutputLayout, ScaleLayout, ScaleRule, SwigluGateUp

D_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMAT_OF_DTYPE = {torch.float8_e4m3fn: MXFP8, torch.float8_e5m2: MXFP8_E5M2, torch.float4_e2m1fn_x2: MXFP4}
# A torch.cuda.Stream, a CUstream or its number; None is torch's current one.
Stream = torch.cuda.Stream | SupportsInt | None


@dataclass(frozen=True, eq=False, kw_only=True)
class CudnnRequest(Inputs):
    """The arguments of grouped_gemm_quant, in its words and with its defaults; what they mean is said there."""

    d_dtype: torch.dtype | None = None
    d_format: BlockScaledFormat | None = None
    row_output: bool = True
    column_output: bool | None = None
    row_layout: OutputLayout | None = None
    column_layout: ScaleLayout | None = None
    scale_rule: ScaleRule | None = None
    return_amax: bool | None = None
    generate_amax: bool = True
    current_stream: Stream = None
    backend: BackendName | None = None
    check_offs: bool = False
    config: KernelChoice | None = None
    out: BlockScaledTensor | None = None

    def resolve(self) -> Bound:
        """Operands, epilogue and its operands. Raises ValueError in the arguments' words for what is not allowed."""
        check_readable(**{field.name: getattr(self, field.name) for field in fields(self)})
        self.check_fixed()
        for name in ("row_output", "column_output", "return_amax", "generate_amax", "check_offs"):
            if (flag := getattr(self, name)) is not None or name not in ("column_output", "return_amax"):
                check_flag(name, flag)
        operands = self.operands()
        epilogue = self.epilogue()
        operands.check()
        check_columns(epilogue, operands.n, "b_tensor")
        check_m_aligned(self.m_aligned)
        tensors = self.numbers(operands, epilogue)
        if self.check_offs:
            check_offs_values(operands.offs, operands.m)
            check_offs_aligned(operands.offs, self.m_aligned, "padded_offsets")
        return Bound(operands, epilogue, tensors)

    @property
    def order(self) -> str | None:
        """Order of gate and up; None: there is no activation. Raises ValueError."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that d_dtype stands for."""
        return torch.bfloat16 if self.d_dtype is None else self.d_dtype

    @property
    def format(self) -> BlockScaledFormat | None:
        """The format of codes, None where the output is values. Raises ValueError."""
        if not is_one_of(self.dtype, (*D_DTYPES, *FORMAT_OF_DTYPE)):
            allowed = ", ".join(map(str, (*D_DTYPES, *FORMAT_OF_DTYPE)))
            raise ValueError(f"d_dtype is {shown(self.d_dtype)}; allowed: {allowed}")
        if self.d_format is not None:
            if not is_one_of(self.d_format, ROW_FORMATS):
                names = ", ".join(format.name for format in ROW_FORMATS)
                raise ValueError(
                    f"d_format is {getattr(self.d_format, 'name', None) or shown(self.d_format)}; allowed: {names}, None"
                )
            return self.d_format
        return FORMAT_OF_DTYPE.get(self.dtype)

    def epilogue(self) -> Epilogue:
        """The epilogue that the arguments ask for. Raises ValueError under their names."""
        format = self.format
        d_dtype = self.dtype if format is None else None
        rule = self.epilogue_scale_rule(format)
        rows = format if self.row_output else None
        columns = self.column_format(format)
        if format is not None and rows is None and columns is None:
            raise ValueError("row_output and column_output are both off; nothing would be left of the quantized output")
        amax = d_dtype in (torch.bfloat16, torch.float16) if self.return_amax is None else self.return_amax
        amax = amax and self.generate_amax
        return self.epilogue_of(
            self.order,
            amax=bool(amax),
            d_dtype=d_dtype,
            row_format=rows,
            row_layout=self.epilogue_row_layout(rows),
            column_format=columns,
            column_layout=self.epilogue_column_layout(columns),
            scale_rule=rule,
        )

    def epilogue_scale_rule(self, format: BlockScaledFormat | None) -> str:
        """Epilogue.scale_rule. Raises ValueError for factors and rules that ``format`` has not."""
        # Where no scales are made norm_const is dropped, as in cuDNN: a call need not change with d_dtype.
        rule, has_rules = self.scale_rule, format in MX_FORMATS
        name = str(self.dtype) if format is None else format.name
        if self.norm_const_tensor is not None and format is not None and not has_rules:
            raise ValueError(f"norm_const_tensor must be None for {name} output; the MX formats have one")
        if rule is not None and not has_rules:
            raise ValueError(f"scale_rule is {shown(rule)}; it must be None for {name} output")
        if format == NVFP4:
            if self.global_scale_tensor is None:
                raise ValueError("global_scale_tensor is None; NVFP4 output needs its decode scale, amax / 2688 of D")
            return "te"
        if self.global_scale_tensor is not None:
            raise ValueError(f"global_scale_tensor must be None for {name} output")
        if not has_rules:
            return ""
        if self.norm_const_tensor is None:
            if not is_one_of(rule, (None, "rceil", "floor")):
                raise ValueError(f"scale_rule is {shown(rule)}; allowed: None, 'rceil', 'floor'")
            return rule or "rceil"
        if rule is not None:
            raise ValueError(f"scale_rule is {shown(rule)}; with norm_const_tensor it must be None (see semantics)")
        return NORM_CONST_RULES[SEMANTICS.index(self.semantics)]

    def column_format(self, format: BlockScaledFormat | None) -> BlockScaledFormat | None:
        """Epilogue.column_format, for codes of ``format``. Raises ValueError where there can be none."""
        if not self.column_output:
            return format if self.column_output is None and format in COLUMN_FORMATS else None
        if format is None:
            raise ValueError(f"column_output is True and d_dtype {self.dtype} has no codes; take an FP8 format")
        if format not in COLUMN_FORMATS:
            names = ", ".join(allowed.name for allowed in COLUMN_FORMATS)
            raise ValueError(f"column_output is True for {format.name}; only {names} are quantized along columns")
        return format

    def epilogue_row_layout(self, rows: BlockScaledFormat | None) -> str:
        """Epilogue.row_layout."""
        if self.row_layout is not None:
            return self.row_layout
        return "plain" if rows is None else default_row_layout(rows)

    def epilogue_column_layout(self, columns: BlockScaledFormat | None) -> str:
        """Epilogue.column_layout. Raises ValueError for a layout of columns that are not there."""
        if self.column_layout is None:
            if columns is None or columns == FP8_BLOCK:
                return "plain"
            return "blocked_groups" if self.discrete_col_sfd else "blocked"
        if columns is None:
            raise ValueError(
                f"column_layout is {shown(self.column_layout)} and there is no column output; leave it None"
            )
        return self.column_layout


@dataclass(frozen=True, eq=False, kw_only=True)
class SwigluRequest(CudnnRequest):
    """The arguments of grouped_gemm_swiglu_quant."""

    gate_up: SwigluGateUp

    @property
    def order(self) -> str | None:
        if not is_one_of(self.gate_up, GATE_UP):
            raise ValueError(f"gate_up is {shown(self.gate_up)}; allowed: {', '.join(map(repr, GATE_UP))}")
        return self.gate_up


def stream_handle(stream: Stream) -> int | None:
    """The number of a stream, None for torch's current one. Raises ValueError for what is no stream."""
    if stream is None:
        return None
    handle = cast("SupportsInt", getattr(stream, "cuda_stream", stream))
    try:
        number = -1 if isinstance(handle, (str, float, torch.Tensor)) else int(handle)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(f"current_stream must be a stream or its number, got {shown(stream)}")
    return number
