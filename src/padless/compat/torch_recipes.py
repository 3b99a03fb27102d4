"""Operands of `padless.scaled_grouped_mm`: torch's codes, scales, recipes and swizzles as those of padless's calls.

Shapes and layouts are those that ATen's GroupedBlas.cpp and ScaledBlas.cpp (2.13) check for.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.arguments import shown
from padless.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    TILE_ROWS,
    BlockScaledFormat,
    BlockScaledTensor,
    blocked_size,
    ceil_div,
    round_up,
)
from padless.layouts import to_mn_major
from padless.ops.checks import describe
from padless.row_groups import SCALE_BLOCK, GroupedColumns, clamped_ends, is_readable

ROWS, SQUARES = "BlockWise1x128", "BlockWise128x128"
_FORMATS = {
    (ROWS, torch.float8_e4m3fn): FP8_BLOCK,
    (SQUARES, torch.float8_e4m3fn): FP8_BLOCK,
    ("BlockWise1x32", torch.float8_e4m3fn): MXFP8,
    ("BlockWise1x32", torch.float8_e5m2): MXFP8_E5M2,
    ("BlockWise1x32", torch.float4_e2m1fn_x2): MXFP4,
    ("BlockWise1x16", torch.float4_e2m1fn_x2): NVFP4,
}
_TOKENS = 32  # a group of the summed dimension is a multiple of it


def activations(mat: torch.Tensor, scale: Any, recipe: Any, swizzle: Any, offs: torch.Tensor) -> BlockScaledTensor:
    """mat_a (M, K) with what torch says of its scales. Raises ValueError."""
    if mat.dim() != 2:
        raise ValueError(f"mat_a must be (M, K), or (M, T) beside a 2-D mat_b, got {describe(mat)}")
    fmt = _format("a", mat, recipe, (ROWS, "BlockWise1x32", "BlockWise1x16"))
    block_scale, global_scale = _scales("a", scale, recipe, fmt)
    if not _is_swizzled("a", swizzle, fmt):
        if fmt is FP8_BLOCK and block_scale.dim() == 2 and not block_scale.is_contiguous():
            block_scale = to_mn_major(block_scale)  # torch's (1, M) strides are MN-major only where M % 4 is 0
        return BlockScaledTensor(mat, block_scale, fmt, global_scale, offs=_groups_of(global_scale, offs))
    blocks = ceil_div(mat.shape[-1] * fmt.codes_per_byte, fmt.block_k)
    tile_row, wanted = blocked_size(1, blocks), blocked_size(mat.shape[0], blocks)
    if block_scale.dim() != 2 or not block_scale.is_contiguous() or block_scale.numel() < wanted:
        raise ValueError(
            f"scale_a is {describe(block_scale)} with strides {block_scale.stride()}; swizzled scales are 2-D and "
            f"contiguous, {tile_row} bytes for every started 128 rows of each group and {wanted} or more in all"
        )
    a = BlockScaledTensor(mat, block_scale.view(-1), fmt, global_scale, "blocked_groups", offs)
    if is_readable(offs):
        ends = clamped_ends(offs.tolist(), mat.shape[0])
        needed = sum(ceil_div(end - start, TILE_ROWS) for start, end in zip([0, *ends], ends, strict=False))
        if block_scale.numel() < needed * tile_row:
            raise ValueError(
                f"scale_a is {describe(block_scale)}; these groups have {needed * tile_row} bytes of tiles"
            )
    return a


def weights(mat: torch.Tensor, scale: Any, recipe: Any, swizzle: Any) -> BlockScaledTensor:
    """mat_b (G, K, N), column-major, with what torch says of its scales. Raises ValueError."""
    require_column_major(mat, 3)
    b = mat.transpose(-2, -1)
    fmt = _format("b", b, recipe, (SQUARES, "BlockWise1x32", "BlockWise1x16"))
    block_scale, global_scale = _scales("b", scale, recipe, fmt)
    swizzled = _is_swizzled("b", swizzle, fmt)
    if fmt is FP8_BLOCK:
        return BlockScaledTensor(b, _scale_of_squares(block_scale, tuple(b.shape)), fmt)
    groups, n, stored = b.shape
    blocks = ceil_div(stored * fmt.codes_per_byte, fmt.block_k)
    wanted = (groups, blocked_size(n, blocks)) if swizzled else (groups, n, blocks)
    if tuple(block_scale.shape) != wanted or not block_scale.is_contiguous():
        with_or_without, shape = ("with", "(G, bytes)") if swizzled else ("without", "(G, N, K blocks)")
        raise ValueError(
            f"scale_b is {describe(block_scale)} with strides {block_scale.stride()}; {with_or_without} a swizzle it "
            f"must be contiguous, {shape} = {wanted}"
        )
    return BlockScaledTensor(b, block_scale, fmt, global_scale, "blocked" if swizzled else "plain")


def columns(
    mats: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[Any, Any],
    recipes: tuple[Any, Any],
    swizzles: tuple[Any, Any],
    offs: torch.Tensor,
) -> tuple[GroupedColumns, GroupedColumns]:
    """mat_a (M, T) and mat_b (T, N), groups side by side along T, as the operands of `padless.grouped_gemm_wgrad`.

    Raises ValueError; where groups end is checked on a CPU alone.
    """
    a, b = mats
    if names(recipes[0]) != ROWS or names(recipes[1]) not in (ROWS, SQUARES):
        raise ValueError(
            f"scale_recipe_a is {_told(recipes[0])} and scale_recipe_b {_told(recipes[1])} of 2-D mat_a and mat_b; "
            f"supported: ScalingType.{ROWS} with ScalingType.{ROWS} or ScalingType.{SQUARES}"
        )
    require_column_major(b, 2)
    b = b.t()
    for name, mat in (("a", a), ("b", b)):
        _format(name, mat, recipes[name == "b"], (ROWS, SQUARES))
        _is_swizzled(name, swizzles[name == "b"], FP8_BLOCK)
    if a.shape[1] != b.shape[1] or a.shape[1] % SCALE_BLOCK:
        raise ValueError(
            f"mat_a has {a.shape[1]} columns and mat_b {b.shape[1]} rows; they must be as many, a multiple of "
            f"{SCALE_BLOCK}"
        )
    if not isinstance(offs, torch.Tensor) or offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offs must be a 1-D int32 or int64 tensor (see padless.group_offsets), got {describe(offs)}")
    ends = offs.clamp(0, a.shape[1]).cummax(0).values
    starts = ends.roll(1)
    starts[:1] = 0
    blocks = (ends - starts + SCALE_BLOCK - 1) // SCALE_BLOCK
    after = blocks.cumsum(0)
    scale_a, scale_b = (_scales(name, scale, [""], FP8_BLOCK)[0] for name, scale in zip("ab", scales, strict=True))
    of_a, of_b = scale_a.transpose(0, -1), scale_b  # rows of blocks along T, features innermost, as scale_b comes
    if is_readable(offs):
        needed = int(after[-1]) if len(offs) else 0
        if not torch.equal(ends.to(offs.dtype), offs) or bool((offs % _TOKENS).any()):
            raise ValueError(
                f"offs is {offs.tolist()}; ends must ascend to {a.shape[1]} at most, by multiples of {_TOKENS}"
            )
        if min(of_a.shape[0], of_b.shape[0]) < needed:
            raise ValueError(
                f"scale_a has {of_a.shape[0]} blocks along the groups and scale_b {of_b.shape[0]}; these groups have "
                f"{needed}"
            )
    groups = {"offs": ends, "starts": starts, "block_starts": after - blocks}
    groups = {name: t.to(torch.int32).contiguous() for name, t in groups.items()}
    block = (SCALE_BLOCK if names(recipes[1]) == SQUARES else 1, SCALE_BLOCK)
    return (
        GroupedColumns(a, of_a.contiguous(), block=(1, SCALE_BLOCK), alignment=_TOKENS, **groups),
        GroupedColumns(b, of_b.contiguous(), block=block, alignment=_TOKENS, **groups),
    )


def require_column_major(mat: torch.Tensor, rank: int) -> None:
    """Raises ValueError unless mat_b is the transpose of what is contiguous along K."""
    if mat.dim() != rank or mat.stride(-2) != 1:
        shape, plain = ("(G, K, N)", "(G, N, K)") if rank == 3 else ("(K, N)", "(N, K)")
        raise ValueError(
            f"mat_b must be {shape} and column-major (weights.transpose(-2, -1) of a contiguous {plain}), "
            f"got shape {tuple(mat.shape)} with strides {mat.stride()}"
        )


def names(value: Any) -> str:
    """Names of one of torch's enums, or of a list of them, with "+" between; "" of None."""
    return "+".join([one if isinstance(one, str) else str(getattr(one, "name", one)) for one in _listed(value)])


def _format(name: str, mat: torch.Tensor, recipe: Any, allowed: tuple[str, ...]) -> BlockScaledFormat:
    """The format of the codes by their recipe; NVFP4 may have a scale per tensor or group as well."""
    first, _, others = names(recipe).partition("+")
    if first not in allowed or others not in ("", "TensorWise" if first == "BlockWise1x16" else ""):
        supported = ", ".join(f"ScalingType.{one}" for one in allowed)
        raise ValueError(f"scale_recipe_{name} is {_told(recipe)}; supported: {supported}")
    if (fmt := _FORMATS.get((first, mat.dtype))) is None:
        dtypes = " or ".join(str(dtype) for one, dtype in _FORMATS if one == first)
        raise ValueError(f"mat_{name} is {mat.dtype}; ScalingType.{first} scales {dtypes}")
    return fmt


def _scales(name: str, scale: Any, recipe: Any, fmt: BlockScaledFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block scales, and the global ones where the recipe has them."""
    scales, wanted = _listed(scale), len(_listed(recipe))
    if len(scales) != wanted or not all(isinstance(one, torch.Tensor) for one in scales):
        what = "one tensor, or a list of one" if wanted == 1 else f"a list of {wanted} tensors"
        raise ValueError(f"scale_{name} must be {what}, got {type(scale).__name__} of {len(scales)}")
    if scales[0].dtype != fmt.scale_dtype or scales[0].dim() == 0:
        raise ValueError(f"scale_{name}'s scale must be {fmt.scale_dtype} blocks, got {describe(scales[0])}")
    return scales[0], scales[1].reshape(-1) if wanted == 2 else None


def _is_swizzled(name: str, swizzle: Any, fmt: BlockScaledFormat) -> bool:
    """Tells whether scales lie in 32x4x4 tiles. For one-byte scales it must be said, since shapes need not tell."""
    first, _, others = names(swizzle).partition("+")
    if fmt is FP8_BLOCK:
        if names(swizzle) not in ("", "NO_SWIZZLE"):
            raise ValueError(
                f"swizzle_{name} is {_told(swizzle)}; 1x128 and 128x128 scales are not swizzled: leave it None"
            )
        return False
    if first not in ("SWIZZLE_32_4_4", "NO_SWIZZLE") or others not in ("", "NO_SWIZZLE"):
        raise ValueError(
            f"swizzle_{name} is {_told(swizzle)}; pass SwizzleType.SWIZZLE_32_4_4 or SwizzleType.NO_SWIZZLE"
        )
    return first == "SWIZZLE_32_4_4"


def _groups_of(global_scale: torch.Tensor | None, offs: torch.Tensor) -> torch.Tensor | None:
    return offs if global_scale is not None and global_scale.numel() > 1 else None


def _scale_of_squares(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The scales as (G, N blocks, K blocks) contiguous, from torch's (G, K blocks, N blocks) or from just that."""
    wanted = FP8_BLOCK.scale_shape(shape, "weight")
    groups, n_blocks, k_blocks = wanted
    if scale.dim() == 3:
        if tuple(scale.shape) in ((groups, k_blocks, n_blocks), (groups, round_up(k_blocks, 4), n_blocks)):
            return scale.transpose(-2, -1)[..., :k_blocks].contiguous()
        if tuple(scale.shape) == wanted:
            return scale.contiguous()
    raise ValueError(
        f"scale_b has shape {tuple(scale.shape)}; allowed: (G, K blocks, N blocks) = {(groups, k_blocks, n_blocks)}, "
        f"K blocks rounded up to 4 or not, or {wanted}"
    )


def _told(value: Any) -> str:
    """A recipe or a swizzle in a message."""
    return shown(value) if isinstance(value, torch.Tensor) else str(value)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
