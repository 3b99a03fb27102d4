"""Operands of cuDNN's grouped GEMM calls, in cuDNN's tensors or this package's own, to checked operands of padless."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.arguments import check_flag, is_one_of, shown
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.layouts import from_cudnn_view
from padless.ops.checks import Activation, as_int32, check_operands, data_of, describe
from padless.row_groups import is_integers
from padless.runtime.choices import Semantics

GATE_UP = ("interleaved", "concatenated")
SEMANTICS = ("implementation", "documented")
NUMBER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What callers call the tensors of a call, by their names in `padless.ops`.
NAMES = {
    **{name: f"{name}_tensor" for name in ("a", "b", "alpha", "bias", "prob", "norm_const", "global_scale")},
    "offs": "padded_offsets",
    "d": "d_tensor",
    "amax": "amax_tensor",
    "row_codes": "d_tensor",
    "row_scale": "sfd_row_tensor",
    "column_codes": "d_col_tensor",
    "column_scale": "sfd_col_tensor",
}
_FP4_DTYPES = (torch.float4_e2m1fn_x2, torch.uint8)
# (codes, scales) -> format; uint8 is two FP4 codes.
_FORMATS = {
    (torch.float8_e4m3fn, torch.float8_e8m0fnu): MXFP8,
    (torch.float8_e5m2, torch.float8_e8m0fnu): MXFP8_E5M2,
    (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu): MXFP4,
    (torch.float4_e2m1fn_x2, torch.float8_e4m3fn): NVFP4,
}


@dataclass(frozen=True, eq=False)
class Operands:
    """a (M, K), b (G, N, K) and offs (G,); as_cudnn: they came as cuDNN's tensors; flat: a as (M, K), not (M, K, 1)."""

    a: Activation
    b: BlockScaledTensor
    offs: torch.Tensor
    as_cudnn: bool
    flat: bool = False

    @property
    def formats(self) -> tuple[BlockScaledFormat, ...]:
        """The block-scaled formats among a and b, in this order."""
        return tuple(t.format for t in (self.a, self.b) if isinstance(t, BlockScaledTensor))

    @property
    def m(self) -> int:
        return self.a.shape[0]

    @property
    def n(self) -> int:
        return self.b.data.shape[1]

    @property
    def num_groups(self) -> int:
        return self.b.data.shape[0]

    @property
    def device(self) -> torch.device:
        return self.a.device

    def check(self) -> None:
        """Raises ValueError for operands that no grouped product can have."""
        if self.offs is None:
            raise ValueError("padded_offsets is None; it must be (G,) int32 end rows (see padless.group_offsets)")
        check_operands("grouped_gemm", self.a, self.b, self.offs)


# Epilogue, formats of a and b, and (G, N, K) of b's codes.
Kind = tuple[Epilogue, tuple[BlockScaledFormat, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Bound:
    """A call in padless's words, checked: tensors holds the epilogue's operands, and outputs where buffers are given."""

    operands: Operands
    epilogue: Epilogue
    tensors: EpilogueTensors

    @property
    def kind(self) -> Kind:
        """The key that executions have in common with the samples."""
        return self.epilogue, self.operands.formats, tuple(self.operands.b.data.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """The arguments that both calls and the class of cuDNN have, under their names; see grouped_gemm_quant."""

    a_tensor: torch.Tensor | BlockScaledTensor
    b_tensor: torch.Tensor | BlockScaledTensor
    sfa_tensor: torch.Tensor | None = None
    sfb_tensor: torch.Tensor | None = None
    padded_offsets: torch.Tensor
    alpha_tensor: torch.Tensor | None = None
    norm_const_tensor: torch.Tensor | None = None
    prob_tensor: torch.Tensor | None = None
    bias_tensor: torch.Tensor | None = None
    global_scale_tensor: torch.Tensor | None = None
    acc_dtype: torch.dtype | None = None
    cd_major: str = "n"
    sf_vec_size: int | None = None
    m_aligned: int = 1
    discrete_col_sfd: bool = False
    semantics: Semantics = "implementation"

    def check_fixed(self) -> None:
        """Raises ValueError for cuDNN's arguments that have one value, and for unknown semantics."""
        if not is_one_of(self.acc_dtype, (None, torch.float32)):
            raise ValueError(f"acc_dtype is {shown(self.acc_dtype)}; it must be torch.float32 or None")
        check_flag("discrete_col_sfd", self.discrete_col_sfd)
        if not is_one_of(self.cd_major, ("n",)):
            raise ValueError(f"cd_major is {shown(self.cd_major)}; only 'n' is supported")
        if not is_one_of(self.semantics, SEMANTICS):
            raise ValueError(f"semantics is {shown(self.semantics)}; allowed: {', '.join(map(repr, SEMANTICS))}")

    def epilogue_of(self, gate_up: str | None, **others: Any) -> Epilogue:
        """The epilogue with these operands and outputs; cuDNN's kernel has prob multiply the bias alone, its
        documentation the sum.
        """
        gated_bias = gate_up is None and self.semantics == "implementation"
        return Epilogue(
            alpha=self.alpha_tensor is not None,
            bias=self.bias_tensor is not None,
            prob=self.prob_tensor is not None,
            bias_rule="gated_bias" if gated_bias else "gated_sum",
            activation="none" if gate_up is None else "swiglu",
            gate_up="concatenated" if gate_up is None else gate_up,
            **others,
        )

    def operands(self) -> Operands:
        """a, b and offs. Raises ValueError in the words of the arguments."""
        a, b = self.a_tensor, self.b_tensor
        if self.padded_offsets is not None and not is_integers(self.padded_offsets):
            raise ValueError(
                "padded_offsets must be a 1-D int32 or int64 tensor (see padless.group_offsets), got "
                f"{describe(self.padded_offsets)}"
            )
        if isinstance(b, BlockScaledTensor):
            for name, t in (("sfa_tensor", self.sfa_tensor), ("sfb_tensor", self.sfb_tensor)):
                if t is not None:
                    raise ValueError(f"{name} must be None with a BlockScaledTensor, which has its scales")
            if b.data.dim() != 3:
                raise ValueError(f"b_tensor must be (G, N, K), got {describe(b)}")
            is_plain = isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16
            if not (is_plain or isinstance(a, BlockScaledTensor)) or data_of(a).dim() != 2:
                raise ValueError(f"a_tensor must be a BlockScaledTensor or a bfloat16 tensor (M, K), got {describe(a)}")
            _check_vec_size(self.sf_vec_size, b.format)
            a, offs = as_int32(a, self.padded_offsets)
            return Operands(a, b, offs, False)
        if isinstance(a, BlockScaledTensor):
            raise ValueError(f"a_tensor is a BlockScaledTensor, so b_tensor must be one too, got {describe(b)}")
        if not isinstance(a, torch.Tensor) or a.dim() not in (2, 3) or (a.dim() == 3 and a.shape[2] != 1):
            raise ValueError(f"a_tensor must be a (M, K) or (M, K, 1) tensor or a BlockScaledTensor, got {describe(a)}")
        if not isinstance(b, torch.Tensor) or b.dim() != 3:
            shapes = "(N, K, G) or (G, N, K)"
            raise ValueError(f"b_tensor must be a {shapes} tensor or a BlockScaledTensor, got {describe(b)}")
        flat = a.dim() == 2
        rows = a if flat else a[:, :, 0]
        weights = b if b.stride(2) == 1 and b.shape[2] == rows.shape[1] else b.permute(2, 0, 1)
        operand_a, offs = as_int32(_operand("a", rows, self.sfa_tensor, 1, self.sf_vec_size), self.padded_offsets)
        operand_b = _operand("b", weights, self.sfb_tensor, weights.shape[0], self.sf_vec_size)
        return Operands(operand_a, operand_b, offs, True, flat)

    def numbers(self, operands: Operands, epilogue: Epilogue) -> EpilogueTensors:
        """alpha, bias, prob, norm_const and global_scale, of those that the epilogue has. Raises ValueError."""
        groups, n, m, device = operands.num_groups, operands.n, operands.m, operands.device
        alpha = prob = bias = norm_const = global_scale = None
        if epilogue.alpha:
            alpha = number("alpha_tensor", self.alpha_tensor, [(groups,)], device)
        if epilogue.prob:
            prob = number("prob_tensor", self.prob_tensor, [(m, 1, 1), (m,)], device).reshape(m)
        if epilogue.bias:
            shape = (n, groups) if operands.as_cudnn else (groups, n)
            bias = number("bias_tensor", self.bias_tensor, [shape], device)
            bias = (bias.t() if operands.as_cudnn else bias).contiguous()
        if epilogue.norm_const:
            shapes = [(1,), (1, 1), (1, 1, 1), ()]
            norm_const = number("norm_const_tensor", self.norm_const_tensor, shapes, device).reshape(1)
        if self.global_scale_tensor is not None:
            scale = number("global_scale_tensor", self.global_scale_tensor, [(), (1,), (groups,)], device)
            global_scale = scale.reshape(-1)
        return EpilogueTensors(alpha=alpha, bias=bias, prob=prob, norm_const=norm_const, global_scale=global_scale)


def number(name: str, t: object, shapes: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """`t` in float32 and contiguous, if it has one of the shapes; bias keeps its strides. ValueError if not."""
    if (
        not isinstance(t, torch.Tensor)
        or tuple(t.shape) not in shapes
        or t.dtype not in NUMBER_DTYPES
        or t.device != device
    ):
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} must be {allowed}, float32, bfloat16 or float16, on {device}, got {describe(t)}")
    t = t.detach().to(torch.float32)
    return t if name == "bias_tensor" else t.contiguous()


def _operand(name: str, codes: torch.Tensor, scale: object, matrices: int, vec_size: int | None) -> BlockScaledTensor:
    """codes (M, K) or (G, N, K) with the bytes of 32x4x4 tiles, cuDNN's 6-D view of them or as they lie."""
    if codes.dtype in _FP4_DTYPES:
        codes = codes.view(torch.float4_e2m1fn_x2) if codes.dtype == torch.uint8 else codes
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"sf{name}_tensor must be a tensor of scales, got {describe(scale)}")
    format = _FORMATS.get((codes.dtype, scale.dtype))
    if format is None:
        pairs = ", ".join(f"{c} with {s}" for c, s in _FORMATS)
        raise ValueError(f"{name}_tensor has {codes.dtype} and sf{name}_tensor {scale.dtype}; allowed: {pairs}")
    _check_vec_size(vec_size, format)
    rows, k = codes.shape[-2], codes.shape[-1] * format.codes_per_byte
    columns = ceil_div(ceil_div(k, format.block_k), 4)
    wanted = (32, 4, ceil_div(rows, 128), 4, columns, matrices)
    is_view = tuple(scale.shape) == wanted
    if scale.device != codes.device or not (is_view or (scale.is_contiguous() and scale.numel() == math.prod(wanted))):
        raise ValueError(
            f"sf{name}_tensor must be {wanted} on {codes.device}, or as many bytes in any contiguous shape, got "
            f"{describe(scale)}"
        )
    if codes.numel() > 0 and codes.stride(-1) != 1:
        raise ValueError(f"{name}_tensor has strides {codes.stride()} with K last; K must be contiguous (K-major)")
    tiles = (
        from_cudnn_view(scale) if is_view and scale.numel() > 0 else scale.reshape(matrices, -1 if scale.numel() else 0)
    )
    tiles = tiles.contiguous()
    return BlockScaledTensor(codes, tiles[0] if codes.dim() == 2 else tiles, format, None, "blocked")


def _check_vec_size(vec_size: int | None, format: BlockScaledFormat) -> None:
    if not is_one_of(vec_size, (None, format.block_k)):
        raise ValueError(f"sf_vec_size is {shown(vec_size)}; {format.name} has a scale for {format.block_k} values")
