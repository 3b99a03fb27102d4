"""Rows as they travel: codes and then scales of one token, opaque bytes to the exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor, ceil_div, round_up
from padless.layouts import to_mn_major
from padless.quantization.quantize import dequantize, quantize
from padless.runtime.choices import ScaleMajor, ScaleRule

PLAIN = (torch.bfloat16, torch.float32)
ALIGNMENT = 16


@dataclass(frozen=True)
class RowFormat:
    """The form in which a token of so many values is sent and rows are handed over.

    format: a block-scaled format, or torch.bfloat16 or torch.float32 for values as they are.
    hidden: H. scale_major: of FP8_BLOCK's scales. scale_rule: as in `padless.quantize`. lift: a power of two
    that FP8_BLOCK's values are multiplied by before they are quantized, and their scales divided by afterwards.
    """

    format: BlockScaledFormat | torch.dtype
    hidden: int
    scale_major: ScaleMajor = "mn"
    scale_rule: ScaleRule | None = None
    lift: float = 1.0

    @property
    def is_plain(self) -> bool:
        return isinstance(self.format, torch.dtype)

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes or values."""
        if isinstance(self.format, torch.dtype):
            return self.hidden * self.format.itemsize
        return self.hidden // self.format.codes_per_byte

    @property
    def scale_columns(self) -> int:
        return 0 if isinstance(self.format, torch.dtype) else ceil_div(self.hidden, self.format.block_k)

    @property
    def placed_columns(self) -> int:
        """MN-major scales of a row; 0 where scales lie next to each other."""
        return self.scale_columns if self.scale_major == "mn" and self.format == FP8_BLOCK else 0

    @property
    def scale_itemsize(self) -> int:
        return 1 if isinstance(self.format, torch.dtype) else self.format.scale_dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of codes and scales, rounded up to 16."""
        return round_up(self.code_bytes + self.scale_columns * self.scale_itemsize, ALIGNMENT)

    def parts(self, x: torch.Tensor, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes (T, code_bytes), scales (T, scale bytes)) of tokens x (T, H), as bytes."""
        if isinstance(self.format, torch.dtype):
            return as_bytes(x.to(self.format)), x.new_empty((x.shape[0], 0), dtype=torch.uint8)
        major: ScaleMajor | None = "k" if self.format == FP8_BLOCK else None
        x = x if self.lift == 1 else x * self.lift
        t = quantize(x, self.format, scale_major=major, scale_rule=self.scale_rule, global_scale=global_scale)
        return as_bytes(t.data), as_bytes(t.scale if self.lift == 1 else t.scale * (1 / self.lift))

    def records(self, x: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
        """(T, record_bytes) uint8."""
        codes, scales = self.parts(x, global_scale)
        out = torch.zeros((x.shape[0], self.record_bytes), dtype=torch.uint8, device=x.device)
        out[:, : self.code_bytes] = codes
        out[:, self.code_bytes : self.code_bytes + scales.shape[1]] = scales
        return out

    def rows(self, records: torch.Tensor, global_scale: torch.Tensor | None) -> BlockScaledTensor | torch.Tensor:
        """Rows of (M, record_bytes) uint8 records, as the grouped GEMM takes them."""
        codes = records[:, : self.code_bytes].contiguous()
        if isinstance(self.format, torch.dtype):
            return codes.view(self.format)
        size = self.scale_columns * self.scale_itemsize
        scale = records[:, self.code_bytes : self.code_bytes + size].contiguous().view(self.format.scale_dtype)
        scale = scale.view(records.shape[0], self.scale_columns)
        if self.format == FP8_BLOCK and self.scale_major == "mn":
            scale = to_mn_major(scale)
        return BlockScaledTensor(codes.view(self.format.data_dtype), scale, self.format, global_scale)

    def values(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`rows` as they are, or decoded to dtype."""
        rows = self.rows(records, None)
        return rows if isinstance(rows, torch.Tensor) else dequantize(rows, dtype)


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """A (rows, columns) tensor's bytes, (rows, columns * itemsize) uint8."""
    # Where a tensor has no more than one row or column, `contiguous` leaves whatever strides it has, 0 of expanded ones
    # too, and `view` refuses them.
    return t.contiguous().as_strided(t.shape, (t.shape[1], 1)).view(torch.uint8)


@dataclass(frozen=True)
class Rows:
    """Memory of rows: bytes of codes (C, code_bytes), and scales."""

    data: torch.Tensor
    scale: torch.Tensor | None

    @property
    def integers(self) -> torch.Tensor | None:
        """The scales' bits, in the same layout."""
        if self.scale is None or self.scale.dtype == torch.uint8:
            return self.scale
        return self.scale.view(torch.int32)

    @property
    def scale_strides(self) -> tuple[int, int]:
        return (0, 0) if self.scale is None else (self.scale.stride(0), self.scale.stride(1))

    def tensor(self, row_format: RowFormat, global_scale: torch.Tensor | None) -> BlockScaledTensor | torch.Tensor:
        fmt = row_format.format
        if isinstance(fmt, torch.dtype):
            return self.data.view(fmt)
        assert self.scale is not None
        return BlockScaledTensor(self.data.view(fmt.data_dtype), self.scale.view(fmt.scale_dtype), fmt, global_scale)
