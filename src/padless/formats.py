"""Block-scaled number formats and the tensor that carries one: what a code, a scale and a block are.

A block-scaled tensor stores small codes and, for every block of them, one decode scale: value = code * scale (times a
global scale where the format has one). `BlockScaledFormat` is the description, `BlockScaledTensor` the data with it.
The rules that turn values into codes and scales are in `padless.quantize`; docs/formats_rules.md has both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from padless.arguments import check_device, detached, is_one_of, refuse_kinds, shown
from padless.row_groups import RowGroups, check_offs, is_traced, row_groups_of

KINDS = ("activation", "weight")

# How scales can lie in memory: as their logical shape says, or in the 32x4x4 tiles of padless.layouts, for
# all rows at once or starting on a fresh tile of 128 rows for every group of rows.
SCALE_LAYOUTS = ("plain", "blocked", "blocked_groups")

# One 32x4x4 tile: 128 rows of 4 scales.
TILE_ROWS = 128
TILE_COLUMNS = 4
TILE_BYTES = TILE_ROWS * TILE_COLUMNS

# MN-major scales start every column on a 16-byte boundary: four float32.
MN_MAJOR_ALIGNMENT = 4


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below value / divisor."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` not below value."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BlockScaledFormat:
    """One block-scaled format.

    name: how messages and tables call it.
    data_dtype, scale_dtype: torch dtypes of the stored codes and of the block scales.
    activation_block, weight_block: (rows, columns along K) that share a scale.
    max_value: largest finite magnitude of a code.
    codes_per_byte: 1, or 2 when two FP4 codes share a byte along K (then a data row has K / 2 elements).
    has_global_scale: whether a float32 scale per tensor (or per group) multiplies the block scales.
    """

    name: str
    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    activation_block: tuple[int, int]
    weight_block: tuple[int, int]
    max_value: float
    codes_per_byte: int = 1
    has_global_scale: bool = False

    def __eq__(self, other: object) -> bool:
        """By name first, a constant where Dynamo takes numbers for sizes that may change."""
        if self is other:
            return True
        return isinstance(other, BlockScaledFormat) and self.name == other.name and vars(self) == vars(other)

    def __reduce__(self) -> tuple[object, ...]:
        return _format_from, tuple(str(v) if isinstance(v, torch.dtype) else v for v in vars(self).values())

    @property
    def block_k(self) -> int:
        """Codes along K that share one scale."""
        return self.activation_block[1]

    def block(self, kind: str) -> tuple[int, int]:
        """(rows, columns) of a block of an "activation" or a "weight"."""
        if not is_one_of(kind, KINDS):
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        return self.activation_block if kind == "activation" else self.weight_block

    def scale_shape(self, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
        """Shape of the scales of values of `shape` (.., rows, K), in values and not in bytes."""
        block_rows, block_k = self.block(kind)
        return (*shape[:-2], ceil_div(shape[-2], block_rows), ceil_div(shape[-1], block_k))


FP8_BLOCK = BlockScaledFormat("FP8_BLOCK", torch.float8_e4m3fn, torch.float32, (1, 128), (128, 128), 448.0)
# OCP microscaling: one power-of-two scale (E8M0) per 32 along K.
MXFP8 = BlockScaledFormat("MXFP8", torch.float8_e4m3fn, torch.float8_e8m0fnu, (1, 32), (1, 32), 448.0)
MXFP8_E5M2 = BlockScaledFormat("MXFP8_E5M2", torch.float8_e5m2, torch.float8_e8m0fnu, (1, 32), (1, 32), 57344.0)
MXFP4 = BlockScaledFormat("MXFP4", torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, (1, 32), (1, 32), 6.0, 2)
# An e4m3 scale per 16 along K and a float32 global scale (None is 1).
NVFP4 = BlockScaledFormat("NVFP4", torch.float4_e2m1fn_x2, torch.float8_e4m3fn, (1, 16), (1, 16), 6.0, 2, True)
# MXFP4 weights with their codes in another order, in which Hopper multiplies them in less time
# (`padless.layouts.to_repacked`): of products with bfloat16 activations on Hopper, to the same bits, and no others.
MXFP4_REPACKED = replace(MXFP4, name="MXFP4_REPACKED")

FORMATS = (FP8_BLOCK, MXFP8, MXFP8_E5M2, MXFP4, NVFP4)
# Of what activations and weights are quantized to; and of all that a tensor may have.
FORMAT_NAMES = tuple(format.name for format in FORMATS)
FORMAT_BY_NAME = {format.name: format for format in (*FORMATS, MXFP4_REPACKED)}

# Element types of a product, with their names in device code.
OUT_DTYPES: dict[torch.dtype, str] = {torch.bfloat16: "OUT_BF16", torch.float16: "OUT_F16", torch.float32: "OUT_F32"}


def is_mn_major(scale: torch.Tensor) -> bool:
    """Whether a (rows, columns) scale has strides (1, ld), ld = rows rounded up to 4 and at least 4."""
    if scale.dim() != 2:
        return False
    rows, columns = scale.shape
    ld = max(round_up(rows, MN_MAJOR_ALIGNMENT), MN_MAJOR_ALIGNMENT)
    return (rows <= 1 or scale.stride(0) == 1) and scale.stride(1) == ld and columns > 0


def blocked_size(rows: int, columns: int) -> int:
    """Bytes of a (rows, columns) scale in 32x4x4 tiles: 512 for every started 128 rows x 4 columns."""
    return TILE_BYTES * ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS)


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaledTensor:
    """Codes with their decode scales: value = code * scale (* global_scale).

    data: (M, K) activations, (N, K) or (G, N, K) weights, dtype format.data_dtype; with two codes a byte the
        last size is K / 2, code 2i in the low and code 2i + 1 in the high half of byte i (but for MXFP4_REPACKED).
    scale: dtype format.scale_dtype. Activations: (M, ceil(K / block_k)), contiguous or, if float32, MN-major
        (strides (1, ld), ld = M rounded up to 4, at least 4). Weights: (.., ceil(N / block_n),
        ceil(K / block_k)), contiguous.
    global_scale: float32, for formats that have one: one value, or (G,) for G groups of rows or of weights.
    scale_layout: "plain" for the shapes above. For one-byte scales of R rows and C columns also "blocked":
        (blocked_size(R, C),), or (G, blocked_size(N, C)) for 3-D data; and, for activations,
        "blocked_groups": (bytes,) with every group's rows starting on a tile of its own
        (`padless.layouts.to_blocked_groups`).
    offs: (G,) int32 cumulative END offsets of the groups of rows that scales in "blocked_groups", or global scales one
        per group, were made for; None where nothing depends on groups, or where nobody said. A call with other groups
        is refused: on a CPU by the values of the two offs, which are remembered here; on a GPU, where nothing waits for
        values, by the number of groups and by the tensor: it must be the one given here, or share its memory, and
        torch must not have written to it since. The tensor is kept alive.

    It moves, copies and is saved as a tensor is: `to`, `cpu`, `cuda`, `clone`, pickle, and torch.save with
    torch.load(weights_only=True) where `padless.BlockScaledTensor` has been imported. `offs` goes along: calls on
    another device take the ``offs`` of the result. Weights of several groups are indexed by group.

    Where activations and weights have the same block, and for a tensor of one row, the scales serve as either. Raises
    ValueError when the parts disagree, or when one requires grad; with grad mode off such a part is kept detached.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: BlockScaledFormat
    global_scale: torch.Tensor | None = None
    scale_layout: str = "plain"
    offs: torch.Tensor | None = None
    row_groups: RowGroups | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        _check_parts(self)
        if self.offs is not None:
            depends = self.scale_layout == "blocked_groups" or _num_global_scales(self) > 1
            object.__setattr__(self, "offs", self.offs if depends else None)
            known = depends and not is_traced(self.offs)
            object.__setattr__(self, "row_groups", RowGroups(self.offs) if known else None)
        for name in ("data", "scale", "global_scale"):
            part = getattr(self, name)
            if part is not None and part.requires_grad:
                object.__setattr__(self, name, detached(name, part))

    def __repr__(self) -> str:
        parts = [self.format.name, str(tuple(self.logical_shape)), f"scale {tuple(self.scale.shape)}"]
        parts += [self.scale_layout if self.scale_layout != "plain" or self.scale_major == "k" else "mn-major"]
        parts += [] if self.global_scale is None else [f"global_scale {tuple(self.global_scale.shape)}"]
        parts += [] if self.offs is None else [f"for {len(self.offs)} groups"]
        return f"BlockScaledTensor({', '.join(parts)}, {self.device})"

    def __reduce__(self) -> tuple[object, ...]:
        data, scale = _carried(self.data), _carried(self.scale)
        return _tensor_from, (data, scale, self.format, self.global_scale, self.scale_layout, self._given_offs())

    def __getitem__(self, group: int | slice) -> BlockScaledTensor:
        """Weights of one group, (N, K), or of a slice of groups, (G', N, K): views. Without groups a ValueError."""
        if self.data.dim() != 3:
            raise ValueError(f"t is {tuple(self.data.shape)}; only weights (G, N, K) are indexed, by group")
        if isinstance(group, bool) or not isinstance(group, (int, slice)):
            raise ValueError(f"group must be an integer or a slice, got {type(group).__name__}")
        shared = self.global_scale
        if shared is not None and shared.numel() > 1:
            shared = shared[group]
        data, scale = (_carried(t)[group].view(t.dtype) for t in (self.data, self.scale))
        return BlockScaledTensor(data, scale, self.format, shared, self.scale_layout)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockScaledTensor:
        """The same on a device; itself where it is there. Values in another dtype: `padless.dequantize`."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"device is {device}; to() moves, and padless.dequantize gives values of a dtype")
        check_device(device)
        if torch.empty(0, device=self.device).to(device=device).device == self.device:
            return self
        return self._with(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self) -> BlockScaledTensor:
        """The same on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None) -> BlockScaledTensor:
        """The same on a GPU, None for the current one."""
        return self.to("cuda" if device is None else device)

    def clone(self) -> BlockScaledTensor:
        """A copy in memory of its own."""
        return self._with(torch.clone)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockScaledTensor:
        """Every part changed; narrow types as bytes, MN-major scales with what lies between their columns as zeros."""
        if is_mn_major(self.scale) and self.scale.dtype == torch.float32:
            whole = self.scale.new_zeros((self.scale.shape[1], self.scale.stride(1)))
            whole[:, : self.scale.shape[0]] = self.scale.t()
            scale = change(whole).t()[: self.scale.shape[0]]
        else:
            scale = change(_carried(self.scale)).view(self.scale.dtype)
        data = change(_carried(self.data)).view(self.data.dtype)
        shared, offs = (None if t is None else change(t) for t in (self.global_scale, self._given_offs()))
        return BlockScaledTensor(data, scale, self.format, shared, self.scale_layout, offs)

    def _given_offs(self) -> torch.Tensor | None:
        """``offs`` with the values that the scales were made for. Raises ValueError where they are gone."""
        groups = row_groups_of(self)
        return self.offs if groups is None else groups.given()

    @property
    def shape(self) -> torch.Size:
        """Shape of data, as stored."""
        return self.data.shape

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape in values: K counts codes, not bytes."""
        return (*self.data.shape[:-1], self.data.shape[-1] * self.format.codes_per_byte)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of data."""
        return self.data.dtype

    @property
    def is_activation(self) -> bool:
        """Whether the scales are those of activations (2-D data)."""
        if self.scale_layout != "plain":
            return self.data.dim() == 2
        return self._has_scale_shape("activation") and self.data.dim() == 2

    @property
    def is_weight(self) -> bool:
        """Whether the scales are those of weights, and contiguous as weights' must be."""
        if self.scale_layout != "plain":
            return self.scale_layout == "blocked"
        return self._has_scale_shape("weight") and self.scale.is_contiguous()

    @property
    def scale_major(self) -> str:
        """ "mn" for MN-major scales, "k" for row-major ones."""
        return "mn" if is_mn_major(self.scale) else "k"

    @property
    def scale_rows(self) -> int:
        """Logical rows of the scales: of each matrix, for 3-D weights."""
        kind = "activation" if self.is_activation else "weight"
        return self.format.scale_shape(self.logical_shape, kind)[-2]

    @property
    def scale_columns(self) -> int:
        """Logical columns of the scales: blocks along K."""
        return ceil_div(self.logical_shape[-1], self.format.block_k)

    def _has_scale_shape(self, kind: str) -> bool:
        return tuple(self.scale.shape) == self.format.scale_shape(self.logical_shape, kind)


def _carried(t: torch.Tensor) -> torch.Tensor:
    """One-byte types as bytes: only so torch copies, indexes and saves them all."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _tensor_from(data: torch.Tensor, scale: torch.Tensor, format: BlockScaledFormat, *others: Any) -> BlockScaledTensor:
    """A tensor of what ``BlockScaledTensor.__reduce__`` took apart."""
    return BlockScaledTensor(data.view(format.data_dtype), scale.view(format.scale_dtype), format, *others)


def _format_from(name: str, data_dtype: str, scale_dtype: str, *others: object) -> BlockScaledFormat:
    """The format of these fields: the package's own where it is one."""
    dtypes = (getattr(torch, dtype.removeprefix("torch.")) for dtype in (data_dtype, scale_dtype))
    made = BlockScaledFormat(name, *dtypes, *others)  # type: ignore[arg-type]
    return next((format for format in FORMAT_BY_NAME.values() if format == made), made)


torch.serialization.add_safe_globals([_tensor_from, _format_from])


def _check_parts(t: BlockScaledTensor) -> None:
    fmt = t.format
    if not isinstance(fmt, BlockScaledFormat):
        raise ValueError(f"format must be a BlockScaledFormat, got {type(fmt).__name__}")
    for name in ("data", "scale"):
        if not isinstance(getattr(t, name), torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(getattr(t, name)).__name__}")
    refuse_kinds(data=t.data, scale=t.scale, global_scale=t.global_scale)
    if t.data.dtype != fmt.data_dtype:
        raise ValueError(f"data must be {fmt.data_dtype} for {fmt.name}, got {t.data.dtype}")
    if t.scale.dtype != fmt.scale_dtype:
        raise ValueError(f"scale must be {fmt.scale_dtype} for {fmt.name}, got {t.scale.dtype}")
    if t.data.dim() not in (2, 3):
        raise ValueError(f"data must be (rows, K) or (num_groups, rows, K), got shape {tuple(t.data.shape)}")
    if fmt == MXFP4_REPACKED and t.data.shape[-2] > 1 and t.data.stride()[-2:] != (t.data.shape[-1], 1):
        raise ValueError(f"data of {fmt.name} must have its rows one after the other, got strides {t.data.stride()}")
    if t.scale.device != t.data.device:
        raise ValueError(f"scale must be on data's device {t.data.device}, got {t.scale.device}")
    _check_scale_layout(t)
    _check_global_scale(t)
    if t.offs is not None:
        check_offs(t.offs, t.data, _num_global_scales(t))


def _check_scale_layout(t: BlockScaledTensor) -> None:
    if not is_one_of(t.scale_layout, SCALE_LAYOUTS):
        raise ValueError(f"scale_layout must be one of {SCALE_LAYOUTS}, got {shown(t.scale_layout)}")
    if t.scale_layout != "plain":
        _check_blocked_scale(t)
        return
    kinds = KINDS if t.data.dim() == 2 else ("weight",)
    allowed = {kind: t.format.scale_shape(t.logical_shape, kind) for kind in kinds}
    if tuple(t.scale.shape) not in allowed.values():
        described = " or ".join(f"{shape} ({kind})" for kind, shape in allowed.items())
        raise ValueError(
            f"scale must have shape {described} for {t.format.name} data of shape {tuple(t.data.shape)}, "
            f"got {tuple(t.scale.shape)}"
        )
    may_be_mn_major = t.is_activation and t.scale.dtype == torch.float32
    if t.scale.is_contiguous() or (may_be_mn_major and is_mn_major(t.scale)):
        return
    if not may_be_mn_major:
        raise ValueError(f"scale must be contiguous, got strides {t.scale.stride()}: call .contiguous()")
    raise ValueError(
        "scale of an activation must be contiguous or MN-major (strides (1, rows rounded up to "
        f"{MN_MAJOR_ALIGNMENT})), got shape {tuple(t.scale.shape)} with strides {t.scale.stride()}"
    )


def _check_blocked_scale(t: BlockScaledTensor) -> None:
    if t.format.scale_dtype.itemsize != 1 or t.format.weight_block[0] != 1:
        raise ValueError(f"scale_layout must be 'plain' for {t.format.name}, got {t.scale_layout!r}")
    if not t.scale.is_contiguous():
        raise ValueError(f"scale must be contiguous, got strides {t.scale.stride()}: call .contiguous()")
    rows, columns = t.data.shape[-2], t.scale_columns
    if t.scale_layout == "blocked":
        wanted = (*t.data.shape[:-2], blocked_size(rows, columns))
        if tuple(t.scale.shape) != wanted:
            raise ValueError(
                f"scale must have shape {wanted}, 32x4x4 tiles of {rows} x {columns} scales, got {tuple(t.scale.shape)}"
            )
        return
    if t.data.dim() != 2:
        raise ValueError(f"scale_layout 'blocked_groups' needs 2-D data, got shape {tuple(t.data.shape)}")
    tile_row = blocked_size(1, columns)
    if t.scale.dim() != 1 or t.scale.numel() % tile_row != 0 or t.scale.numel() < blocked_size(rows, columns):
        raise ValueError(
            f"scale must be 1-D, a multiple of {tile_row} bytes (128 rows x {columns} scales, tiled 32x4x4) "
            f"and at least {blocked_size(rows, columns)}, got shape {tuple(t.scale.shape)}"
        )


def _check_global_scale(t: BlockScaledTensor) -> None:
    scale = t.global_scale
    if scale is None:
        return
    if not t.format.has_global_scale:
        raise ValueError(f"global_scale must be None for {t.format.name}, got {type(scale).__name__}")
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise ValueError(f"global_scale must be a torch.float32 tensor, got {got}")
    if scale.device != t.data.device:
        raise ValueError(f"global_scale must be on data's device {t.data.device}, got {scale.device}")
    groups = {1, t.data.shape[0]} if t.data.dim() == 3 else {scale.numel()}
    if scale.dim() > 1 or scale.numel() not in groups:
        raise ValueError(
            f"global_scale must be one value or one per group, got shape {tuple(scale.shape)} "
            f"for data of shape {tuple(t.data.shape)}"
        )


def _num_global_scales(t: BlockScaledTensor) -> int:
    return 1 if t.global_scale is None else t.global_scale.numel()
