"""From the tensors that cuDNN's grouped GEMM calls take, or from this package's own, to checked operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from padless.epilogue import Epilogue
from padless.formats import (
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
    ceil_div,
)
from padless.layouts import from_cudnn_view
from padless.ops.checks import Activation, describe

NUMBER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
    """a (M, K), b (G, N, K) and offs; as_cudnn: they came as cuDNN's 3-D tensors."""

    a: Activation
    b: BlockScaledTensor
    offs: torch.Tensor
    as_cudnn: bool

    def numbers(self, given: dict[str, Any], epilogue: Epilogue) -> dict[str, Any]:
        """alpha, bias, prob, norm_const and global_scale as EpilogueTensors has them. Raises ValueError."""
        groups, n = self.b.data.shape[:2]
        m, device = self.a.shape[0], self.a.device
        result: dict[str, Any] = {}
        if epilogue.alpha:
            result["alpha"] = number("alpha_tensor", given["alpha_tensor"], [(groups,)], device)
        if epilogue.prob:
            prob = number("prob_tensor", given["prob_tensor"], [(m, 1, 1), (m,)], device)
            result["prob"] = prob.reshape(m)
        if epilogue.bias:
            bias = given["bias_tensor"]
            shape = (n, groups) if self.as_cudnn else (groups, n)
            bias = number("bias_tensor", bias, [shape], device)
            result["bias"] = (bias.t() if self.as_cudnn else bias).contiguous()
        if epilogue.norm_const:
            shapes: list[tuple[int, ...]] = [(1,), (1, 1), (1, 1, 1), ()]
            norm_const = number("norm_const_tensor", given["norm_const_tensor"], shapes, device)
            result["norm_const"] = norm_const.reshape(1)
        if given.get("global_scale_tensor") is not None:
            scale = number("global_scale_tensor", given["global_scale_tensor"], [(), (1,), (groups,)], device)
            result["global_scale"] = scale.reshape(-1)
        return result


def number(name: str, t: object, shapes: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """`t` in float32 and contiguous, if it has one of the shapes; bias keeps its strides. ValueError if not."""
    if (
        not isinstance(t, torch.Tensor)
        or tuple(t.shape) not in shapes
        or t.dtype not in NUMBER_DTYPES
        or t.device != device
    ):
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(
            f"{name} must be {allowed}, float32, bfloat16 or float16, on {device}, got {describe(t)}"
        )
    t = t.detach().to(torch.float32)
    return t if name == "bias_tensor" else t.contiguous()


def operands_of(given: dict[str, Any]) -> Operands:
    """a, b and offs of a call. Raises ValueError in the words of its arguments."""
    a, b = given["a_tensor"], given["b_tensor"]
    sfa, sfb, offs = given["sfa_tensor"], given["sfb_tensor"], given["padded_offsets"]
    if isinstance(b, BlockScaledTensor):
        for name, t in (("sfa_tensor", sfa), ("sfb_tensor", sfb)):
            if t is not None:
                raise ValueError(f"{name} must be None with a BlockScaledTensor, which has its scales")
        if b.data.dim() != 3:
            raise ValueError(f"b_tensor must be (G, N, K), got {describe(b)}")
        _check_vec_size(given["sf_vec_size"], b.format)
        return Operands(a, b, offs, False)
    if isinstance(a, BlockScaledTensor):
        raise ValueError(f"a_tensor is a BlockScaledTensor, so b_tensor must be one too, got {describe(b)}")
    for name, t in (("a_tensor", a), ("b_tensor", b)):
        if not isinstance(t, torch.Tensor) or t.dim() != 3:
            shape = "(M, K, 1)" if name == "a_tensor" else "(N, K, G)"
            raise ValueError(f"{name} must be a {shape} tensor or a BlockScaledTensor, got {describe(t)}")
    if a.shape[2] != 1:
        raise ValueError(f"a_tensor must be (M, K, 1), got {describe(a)}")
    operand_a = _operand("a", a[:, :, 0], sfa, 1, given["sf_vec_size"])
    operand_b = _operand("b", b.permute(2, 0, 1), sfb, b.shape[2], given["sf_vec_size"])
    return Operands(operand_a, operand_b, offs, True)


def _operand(
    name: str, codes: torch.Tensor, scale: object, matrices: int, vec_size: int | None
) -> BlockScaledTensor:
    """codes (M, K) or (G, N, K) with a 6-D scale."""
    if codes.dtype in _FP4_DTYPES:
        codes = codes.view(torch.float4_e2m1fn_x2) if codes.dtype == torch.uint8 else codes
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"sf{name}_tensor must be a 6-D tensor of scales, got {describe(scale)}")
    format = _FORMATS.get((codes.dtype, scale.dtype))
    if format is None:
        pairs = ", ".join(f"{c} with {s}" for c, s in _FORMATS)
        raise ValueError(
            f"{name}_tensor has {codes.dtype} and sf{name}_tensor {scale.dtype}; allowed: {pairs}"
        )
    _check_vec_size(vec_size, format)
    rows, k = codes.shape[-2], codes.shape[-1] * format.codes_per_byte
    columns = ceil_div(ceil_div(k, format.block_k), 4)
    wanted = (32, 4, ceil_div(rows, 128), 4, columns, matrices)
    if tuple(scale.shape) != wanted or scale.device != codes.device:
        raise ValueError(f"sf{name}_tensor must be {wanted} on {codes.device}, got {describe(scale)}")
    if codes.numel() > 0 and codes.stride(-1) != 1:
        raise ValueError(
            f"{name}_tensor has strides {codes.stride()} with K last; K must be contiguous (K-major)"
        )
    tiles = from_cudnn_view(scale) if scale.numel() > 0 else scale.reshape(matrices, 0)
    tiles = tiles.contiguous()
    return BlockScaledTensor(codes, tiles[0] if codes.dim() == 2 else tiles, format, None, "blocked")


def _check_vec_size(vec_size: int | None, format: BlockScaledFormat) -> None:
    if vec_size is not None and vec_size != format.block_k:
        raise ValueError(f"sf_vec_size is {vec_size}; {format.name} has a scale for {format.block_k} values")
