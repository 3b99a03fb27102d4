"""Block-scaled number formats and the tensor that carries one: what a code, a scale and a block are.

A block-scaled tensor stores small codes and, for every block of them, one decode scale: value = code * scale
(times a global scale where the format has one). `BlockScaledFormat` is the description, `BlockScaledTensor`
the data with it. The rules that turn values into codes and scales are in `padless.quantize`; docs/formats.md
has both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KINDS = ("activation", "weight")

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

    @property
    def block_k(self) -> int:
        """Codes along K that share one scale."""
        return self.activation_block[1]

    def block(self, kind: str) -> tuple[int, int]:
        """(rows, columns) of a block of an "activation" or a "weight"."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        return self.activation_block if kind == "activation" else self.weight_block

    def scale_shape(self, shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
        """Shape of the scales of values of `shape` (.., rows, K), in values and not in bytes."""
        block_rows, block_k = self.block(kind)
        return (*shape[:-2], ceil_div(shape[-2], block_rows), ceil_div(shape[-1], block_k))


FP8_BLOCK = BlockScaledFormat(
    name="FP8_BLOCK",
    data_dtype=torch.float8_e4m3fn,
    scale_dtype=torch.float32,
    activation_block=(1, 128),
    weight_block=(128, 128),
    max_value=448.0,
)


def is_mn_major(scale: torch.Tensor) -> bool:
    """Whether a (rows, columns) scale has strides (1, ld), ld = rows rounded up to 4 and at least 4."""
    if scale.dim() != 2:
        return False
    rows, columns = scale.shape
    ld = max(round_up(rows, MN_MAJOR_ALIGNMENT), MN_MAJOR_ALIGNMENT)
    return (rows <= 1 or scale.stride(0) == 1) and scale.stride(1) == ld and columns > 0


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """Codes with their decode scales: value = code * scale (* global_scale).

    data: (M, K) activations, (N, K) or (G, N, K) weights, dtype format.data_dtype; with two codes a byte the
        last size is K / 2.
    scale: dtype format.scale_dtype. Activations: (M, ceil(K / block_k)), either row-major (contiguous) or
        MN-major (strides (1, ld), ld = M rounded up to 4, at least 4). Weights: (.., ceil(N / block_n),
        ceil(K / block_k)), contiguous.
    global_scale: float32, for formats that have one.

    A tensor of one row has the same scale shape as an activation and as a weight, and can be used as either.
    Raises ValueError when the parts disagree.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: BlockScaledFormat
    global_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_parts(self)

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
        return self._has_scale_shape("activation") and self.data.dim() == 2

    @property
    def is_weight(self) -> bool:
        """Whether the scales are those of weights, and contiguous as weights' must be."""
        return self._has_scale_shape("weight") and self.scale.is_contiguous()

    @property
    def scale_major(self) -> str:
        """ "mn" for MN-major scales, "k" for row-major ones."""
        return "mn" if is_mn_major(self.scale) else "k"

    def _has_scale_shape(self, kind: str) -> bool:
        return tuple(self.scale.shape) == self.format.scale_shape(self.logical_shape, kind)


def _check_parts(t: BlockScaledTensor) -> None:
    fmt = t.format
    if not isinstance(fmt, BlockScaledFormat):
        raise ValueError(f"format must be a BlockScaledFormat, got {type(fmt).__name__}")
    for name in ("data", "scale"):
        if not isinstance(getattr(t, name), torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(getattr(t, name)).__name__}")
    if t.data.dtype != fmt.data_dtype:
        raise ValueError(f"data must be {fmt.data_dtype} for {fmt.name}, got {t.data.dtype}")
    if t.scale.dtype != fmt.scale_dtype:
        raise ValueError(f"scale must be {fmt.scale_dtype} for {fmt.name}, got {t.scale.dtype}")
    if t.data.dim() not in (2, 3):
        raise ValueError(f"data must be (rows, K) or (num_groups, rows, K), got shape {tuple(t.data.shape)}")
    if t.scale.device != t.data.device:
        raise ValueError(f"scale must be on data's device {t.data.device}, got {t.scale.device}")
    _check_scale_layout(t)
    _check_global_scale(t)


def _check_scale_layout(t: BlockScaledTensor) -> None:
    kinds = KINDS if t.data.dim() == 2 else ("weight",)
    allowed = {kind: t.format.scale_shape(t.logical_shape, kind) for kind in kinds}
    if tuple(t.scale.shape) not in allowed.values():
        described = " or ".join(f"{shape} ({kind})" for kind, shape in allowed.items())
        raise ValueError(
            f"scale must have shape {described} for {t.format.name} data of shape {tuple(t.data.shape)}, "
            f"got {tuple(t.scale.shape)}"
        )
    if t.scale.is_contiguous() or (t.is_activation and is_mn_major(t.scale)):
        return
    if not t.is_activation:
        raise ValueError(
            f"scale of a weight must be contiguous, got strides {t.scale.stride()}: call .contiguous()"
        )
    raise ValueError(
        "scale of an activation must be contiguous or MN-major (strides (1, rows rounded up to "
        f"{MN_MAJOR_ALIGNMENT})), got shape {tuple(t.scale.shape)} with strides {t.scale.stride()}"
    )


def _check_global_scale(t: BlockScaledTensor) -> None:
    if t.global_scale is None:
        return
    if not t.format.has_global_scale:
        raise ValueError(f"global_scale must be None for {t.format.name}, got {t.global_scale!r}")
    if t.global_scale.dtype != torch.float32:
        raise ValueError(f"global_scale must be torch.float32, got {t.global_scale.dtype}")
    if t.global_scale.device != t.data.device:
        raise ValueError(
            f"global_scale must be on data's device {t.data.device}, got {t.global_scale.device}"
        )
