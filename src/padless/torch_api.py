"""A drop-in with the calling convention of ``torch.nn.functional.scaled_grouped_mm``.

torch has no grouped path for 1x128 / 128x128 scales (checked: 2.11 to 2.13); this is that path, called the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.grouped_gemm import grouped_gemm


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: Any,
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: tuple[int, ...] | list[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Grouped product of (M, K) by (G, K, N) with 1x128 scales on the left and 128x128 scales on the right.

    Args:
        mat_a: (M, K) float8_e4m3fn, row-major.
        mat_b: (G, K, N) float8_e4m3fn, column-major: the transpose of a contiguous (G, N, K).
        scale_a: (M, ceil(K / 128)) float32 decode scales, row-major or MN-major, or a list of that one tensor.
        scale_recipe_a: ScalingType.BlockWise1x128, or a list of it.
        scale_b: (G, ceil(K / 128), ceil(N / 128)) float32, the transpose of a contiguous (G, N / 128, K / 128) as
            mat_b is; or (G, ceil(N / 128), ceil(K / 128)) contiguous where the two cannot be confused.
        scale_recipe_b: ScalingType.BlockWise128x128, or a list of it.
        swizzle_a, swizzle_b: None or SwizzleType.NO_SWIZZLE.
        bias: must be None.
        offs: (G,) int32 cumulative end rows.
        output_dtype: bfloat16 (None too), float16 or float32.
        contraction_dim: must be empty.
        use_fast_accum: accepted; accumulation is in float32 across 128-blocks either way.

    Returns:
        (M, N); rows at or past offs[-1] are undefined, as in torch.

    Raises:
        ValueError: anything else, with what is allowed.
    """
    _require_recipe("scale_recipe_a", scale_recipe_a, "BlockWise1x128")
    _require_recipe("scale_recipe_b", scale_recipe_b, "BlockWise128x128")
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if any(getattr(one, "name", str(one)) != "NO_SWIZZLE" for one in _listed(swizzle)):
            raise ValueError(f"{name} is {swizzle}; 1x128 and 128x128 scales are not swizzled: leave it None")
    if bias is not None:
        raise ValueError("bias must be None: torch's grouped call has no bias either")
    if len(contraction_dim) != 0:
        raise ValueError(f"contraction_dim is {contraction_dim}; only the default, empty, is supported")
    if offs is None:
        raise ValueError("offs is None; pass the (G,) int32 cumulative end rows")
    if mat_b.dim() != 3 or mat_b.stride(-2) != 1:
        raise ValueError(
            f"mat_b must be (G, K, N) and column-major (weights.transpose(-2, -1) of a contiguous (G, N, K)), "
            f"got shape {tuple(mat_b.shape)} with strides {mat_b.stride()}"
        )
    b = mat_b.transpose(-2, -1)
    a = BlockScaledTensor(mat_a, _only("scale_a", scale_a), FP8_BLOCK)
    scales = _only("scale_b", scale_b)
    if scales.dim() == 3 and not scales.is_contiguous() and scales.transpose(-2, -1).is_contiguous():
        scales = scales.transpose(-2, -1)
    elif tuple(scales.shape) != FP8_BLOCK.scale_shape(tuple(b.shape), "weight"):
        scales = scales.transpose(-2, -1).contiguous()
    return grouped_gemm(
        a, BlockScaledTensor(b, scales, FP8_BLOCK), offs, out_dtype=output_dtype or torch.bfloat16
    )


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _require_recipe(argument: str, recipe: Any, name: str) -> None:
    names = [getattr(one, "name", str(one)) for one in _listed(recipe)]
    if names != [name]:
        raise ValueError(f"{argument} is {recipe}; supported: ScalingType.{name}")


def _only(argument: str, scale: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    scales = _listed(scale)
    if len(scales) != 1 or not isinstance(scales[0], torch.Tensor):
        raise ValueError(f"{argument} must be one tensor, or a list of one, got {type(scale).__name__}")
    return scales[0]
