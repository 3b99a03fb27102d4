"""A drop-in with the calling convention of ``torch.nn.functional.scaled_grouped_mm``.

torch has no grouped path for 1x128 / 128x128 scales (checked: 2.11 to 2.13); this is that path, called the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.gradients import refuse_gradients
from padless.layouts import to_mn_major
from padless.ops.grouped_gemm import grouped_gemm


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
        scale_b: (G, ceil(K / 128), ceil(N / 128)) float32, in any layout, the K blocks rounded up to 4 or not; best the
            transpose of a contiguous (G, N blocks, K blocks), which needs no copy. Where the two numbers of blocks
            differ, (G, N blocks, K blocks) itself is taken too.
        scale_recipe_b: ScalingType.BlockWise128x128, or a list of it.
        swizzle_a: None or SwizzleType.NO_SWIZZLE.
        swizzle_b: None or SwizzleType.NO_SWIZZLE.
        bias: must be None.
        offs: (G,) int32 or int64 cumulative end rows.
        output_dtype: bfloat16 (None too), float16 or float32.
        contraction_dim: must be empty.
        use_fast_accum: accepted; accumulation is in float32 across 128-blocks either way.

    Returns:
        (M, N); rows at or past offs[-1] are undefined, as in torch.

    Raises:
        ValueError: anything else, with what is allowed.
    """
    refuse_gradients(mat_a=mat_a, mat_b=mat_b, scale_a=scale_a, scale_b=scale_b, bias=bias)
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
    scale_of_a = _only("scale_a", scale_a)
    if scale_of_a.dim() == 2 and not scale_of_a.is_contiguous():
        scale_of_a = to_mn_major(scale_of_a)  # torch's (1, M) strides are MN-major only where M is a multiple of 4
    a = BlockScaledTensor(mat_a, scale_of_a, FP8_BLOCK)
    scale_of_b = _scale_of_b(_only("scale_b", scale_b), tuple(b.shape))
    return grouped_gemm(a, BlockScaledTensor(b, scale_of_b, FP8_BLOCK), offs, out_dtype=output_dtype or torch.bfloat16)


def _scale_of_b(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The scales as (G, N blocks, K blocks) contiguous, from torch's (G, K blocks, N blocks) or from just that."""
    wanted = FP8_BLOCK.scale_shape(shape, "weight")
    groups, n_blocks, k_blocks = wanted
    if scale.dim() == 3:
        if tuple(scale.shape) in ((groups, k_blocks, n_blocks), (groups, -(-k_blocks // 4) * 4, n_blocks)):
            return scale.transpose(-2, -1)[..., :k_blocks].contiguous()
        if tuple(scale.shape) == wanted:
            return scale.contiguous()
    raise ValueError(
        f"scale_b has shape {tuple(scale.shape)}; allowed: (G, K blocks, N blocks) = {(groups, k_blocks, n_blocks)}, "
        f"K blocks rounded up to 4 or not, or {wanted}"
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
