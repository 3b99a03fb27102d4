"""A drop-in with the calling convention of ``torch.nn.functional.scaled_grouped_mm``.

torch has no grouped path for 1x128 / 128x128 scales (checked: 2.11 to 2.13); this is that path, called the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.arguments import check_flag, check_readable, check_tensor_type, is_one_of, shown
from padless.compat.torch_recipes import activations, columns, weights
from padless.formats import OUT_DTYPES, BlockScaledTensor
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad


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
    """Grouped product of (M, K) by (G, K, N), or of (M, T) by (T, N) along groups of T (a weight gradient).

    Recipes are ScalingTypes, of a and b each one of: BlockWise1x128 (a) and BlockWise128x128 (b) for float8_e4m3fn;
    BlockWise1x32 for float8_e4m3fn, float8_e5m2 and float4_e2m1fn_x2; BlockWise1x16 or [BlockWise1x16, TensorWise] for
    float4_e2m1fn_x2. The pairs of formats are grouped_gemm's. Along groups of T: BlockWise1x128 with either FP8 recipe.

    Args:
        mat_a: (M, K) codes, row-major; FP4 codes (M, K / 2).
        mat_b: (G, K, N), column-major: the transpose of a contiguous (G, N, K). Or (T, N), column-major.
        scale_a: decode scales, or a list of them. 1x128: (M, ceil(K / 128)) float32, row-major or MN-major. 1x32 and
            1x16: e8m0 and e4m3, unswizzled (M, K blocks), or 2-D in 32x4x4 tiles with each group's rows from a tile of
            their own (`padless.layouts.to_blocked_groups`). TensorWise: float32, one value or (G,). With (M, T):
            (M, S), best with strides (1, M), where every group's blocks of 128 count from its start, side by side.
        scale_recipe_a: a ScalingType, or a list of them.
        scale_b: 128x128: (G, ceil(K / 128), ceil(N / 128)) float32, in any layout, the K blocks rounded up to 4 or not;
            best the transpose of a contiguous (G, N blocks, K blocks), which needs no copy. Where the two numbers of
            blocks differ, (G, N blocks, K blocks) itself is taken too. 1x32 and 1x16: (G, N, K blocks), or (G, bytes)
            in 32x4x4 tiles. With (T, N): (S, N) or, for 128x128, (S, ceil(N / 128)).
        scale_recipe_b: a ScalingType, or a list of them.
        swizzle_a: SwizzleType.SWIZZLE_32_4_4 or NO_SWIZZLE of 1x32 and 1x16 scales, which must be said; else None too.
        swizzle_b: the same of scale_b.
        bias: must be None.
        offs: (G,) int32 or int64 cumulative end rows; with (M, T) ends along T, multiples of 32.
        output_dtype: bfloat16 (None too), float16 or float32; with (M, T) not float16.
        contraction_dim: empty or (-1, -2), the same.
        use_fast_accum: accepted; accumulation is in float32 across 128-blocks either way.

    Returns:
        (M, N), the bits of a row grouped_gemm's; rows past offs[-1] are undefined, as in torch. With (M, T): (G, M, N).

    Raises:
        ValueError: anything else, with what is allowed.
    """
    check_readable(mat_a=mat_a, mat_b=mat_b, scale_a=scale_a, scale_b=scale_b, bias=bias, offs=offs)
    for name, mat in (("mat_a", mat_a), ("mat_b", mat_b)):
        check_tensor_type(name, mat)
    check_flag("use_fast_accum", use_fast_accum)
    if bias is not None:
        raise ValueError("bias must be None: torch's grouped call has no bias either")
    if not isinstance(contraction_dim, (tuple, list)) or tuple(contraction_dim) not in ((), (-1, -2)):
        raise ValueError(
            f"contraction_dim is {shown(contraction_dim)}; only the default, empty, and (-1, -2) are supported"
        )
    if offs is None:
        raise ValueError("offs is None; pass the (G,) int32 cumulative end rows")
    dtype = torch.bfloat16 if output_dtype is None else output_dtype
    if not is_one_of(dtype, OUT_DTYPES):
        raise ValueError(f"output_dtype is {shown(dtype)}; allowed: {', '.join(map(str, OUT_DTYPES))}, None")
    if mat_a.dim() == mat_b.dim() == 2:
        scales, recipes = (scale_a, scale_b), (scale_recipe_a, scale_recipe_b)
        dy, x = columns((mat_a, mat_b), scales, recipes, (swizzle_a, swizzle_b), offs)
        return grouped_gemm_wgrad(dy, x, out_dtype=dtype)
    b = _named("b", lambda: weights(mat_b, scale_b, scale_recipe_b, swizzle_b))
    a = _named("a", lambda: activations(mat_a, scale_a, scale_recipe_a, swizzle_a, offs))
    return grouped_gemm(a, b, offs, out_dtype=dtype)


def _named(letter: str, make: Callable[[], BlockScaledTensor]) -> BlockScaledTensor:
    """The result of ``make``; errors about its parts name the arguments that they are."""
    try:
        return make()
    except ValueError as error:
        text = str(error)
        said = any(
            name in text for name in (f"mat_{letter}", f"scale_{letter}", f"swizzle_{letter}", f"recipe_{letter}")
        )
        raise ValueError(text if said else f"mat_{letter} (data) and scale_{letter} (scale): {text}") from None
