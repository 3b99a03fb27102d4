"""Host side of sm90_swiglu_backward.cu: which operands it takes, its configuration, the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.kernels.config import cpp_constants
from padless.kernels.launch import Prepared, load_kernel, persistent_grid
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_swiglu_backward/sm90_swiglu_backward.cu"
_TILE = 128
_LINE = 16  # bytes of a copy


@dataclass(frozen=True)
class SwigluBackwardConfig:
    """One compiled kernel. Each field becomes a constant in the device code; no size is among them.

    Attributes:
        has_prob: the output was multiplied by a probability of its row.
        interleaved: gate and up lie in runs of 32 columns; else concatenated.
        square: 128 features of H share a scale; else each has its own.
    """

    has_prob: bool = True
    interleaved: bool = False
    square: bool = False

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        flags = {"HAS_PROB": self.has_prob, "INTERLEAVED": self.interleaved, "SQUARE": self.square}
        return cpp_constants({}, flags)


def fits(dh: torch.Tensor, z: torch.Tensor) -> bool:
    """Whether the kernel takes dh (M, I) and z (M, 2 I): bfloat16, I a multiple of 128, rows at multiples of 16 bytes."""
    return dh.shape[1] % _TILE == 0 and all(
        t.dtype == torch.bfloat16
        and t.stride(1) == 1
        and t.data_ptr() % _LINE == 0
        and t.stride(0) * t.element_size() % _LINE == 0
        for t in (dh, z)
    )


@dataclass(frozen=True, eq=False)
class Outputs:
    """Where the results go: codes uint8, scales float32.

    row_scale: (M, 2 I / 128), strides (1, ld). dz_codes, hidden_codes: (2 I, T') and (I, T'). dz_scale: (S, 2 I);
    hidden_scale: (S, I), or (S, I / 128) of square blocks. sums: (I / 128, M), dprob of each 128 columns, or None.
    """

    row_codes: torch.Tensor
    row_scale: torch.Tensor
    dz_codes: torch.Tensor
    dz_scale: torch.Tensor
    hidden_codes: torch.Tensor
    hidden_scale: torch.Tensor
    sums: torch.Tensor | None


def prepare(
    driver: Driver,
    dh: torch.Tensor,
    z: torch.Tensor,
    prob: torch.Tensor | None,
    table: torch.Tensor,
    out: Outputs,
    config: SwigluBackwardConfig,
) -> Prepared:
    """Packs the launch for operands that fit, with at least one tile and one column; table: of `group_tiles`."""
    device = dh.device.index or 0
    kernel, function = load_kernel(driver, KERNEL, config, device)
    num_rows, hidden = dh.shape
    num_tiles = table.shape[1]
    pointers = (
        dh,
        z,
        prob,
        table,
        out.row_codes,
        out.row_scale,
        out.dz_codes,
        out.dz_scale,
        out.hidden_codes,
        out.hidden_scale,
        out.sums,
    )
    integers = (
        num_rows,
        hidden,
        dh.stride(0),
        z.stride(0),
        out.row_scale.stride(1),
        out.dz_codes.shape[1],
        out.dz_scale.shape[0],
        num_tiles,
    )
    arguments: list[Argument] = [(0 if t is None else t.data_ptr(), 8) for t in pointers]
    arguments += [(value, 4) for value in integers]
    ctas = persistent_grid(driver.num_sms(device), num_tiles * (hidden // _TILE))
    shape = LaunchShape(ctas, kernel.num_threads, 1)
    tensors = [t for t in pointers if t is not None]
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors))
