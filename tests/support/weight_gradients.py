"""Weight gradients in guarded outputs, and the configurations that `padless verify` launches."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.kernels.sm90_fp8_wgrad.config import MODES, WgradConfig, blocks_m
from padless.kernels.wgrad import GRADIENT_DTYPES
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.runtime.choices import BackendName
from padless.testing.gradients import Rows
from padless.testing.guarded import GuardedOutput

FP8_VARIANTS = tuple(
    WgradConfig(block_m=block_m, mode=mode, out_dtype=dtype)
    for mode, dtype in itertools.product(MODES, GRADIENT_DTYPES)
    for block_m in blocks_m(mode, dtype)
) + tuple(WgradConfig(cluster_n=2, mode=mode) for mode in MODES)
# What is added by the multiprocessor and by the copy engine, in clusters too; these store nothing.
FP8_ADDING = tuple(
    WgradConfig(256, 0, cluster_n, mode=mode, out_dtype=torch.float32, accumulate=True, reduced_pieces=2)
    for cluster_n, mode in ((1, "1d2d"), (2, "1d2d"), (2, "1d1d"))
)
BF16_VARIANTS = tuple(
    Bf16WgradConfig(block_n=block_n, block_t=block_t, piece_slabs=slabs, out_dtype=dtype)
    for dtype, (block_n, block_t, slabs) in itertools.product(
        GRADIENT_DTYPES, ((256, 32, 2), (256, 32, 1), (128, 32, 1), (256, 64, 1))
    )
)


class Recording:
    """A device that keeps what it is asked to launch."""

    kind = "ptx"
    arch = "sm_90a"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def num_sms(self, device: int) -> int:
        return 132

    def load(self, kernel: Any, device: int) -> Any:
        return kernel.entry

    def encode(self, spec: Any) -> bytes:
        return emulated_driver().encode(spec)

    def prepare(self, *arguments: Any) -> Any:
        self.launches.append(arguments)
        return lambda stream: None


class GuardedGradient(GuardedOutput):
    """A (groups, N, K) output of poison, or of given values, between guards; any values may be stored."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, values: torch.Tensor | None = None) -> None:
        super().__init__(shape[:2], shape[2], dtype, guard=64)
        if values is not None:
            self.out.copy_(values)

    def check(self, *_: Any, **__: Any) -> None:
        super().check(expect_finite=False)


def gradient_of_columns(
    dy: GroupedColumns,
    x: GroupedColumns,
    config: WgradConfig,
    backend: BackendName | None = None,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel's result in a guarded output; ``onto``: what it is accumulated onto."""
    guarded = GuardedGradient((dy.num_groups, dy.features, x.features), config.out_dtype, onto)
    grouped_gemm_wgrad(dy, x, out=guarded.out, accumulate=onto is not None, backend=backend, config=config)
    guarded.check()
    return guarded.out


def gradient_of_rows(
    rows: Rows, config: Bf16WgradConfig, backend: BackendName | None = None, onto: torch.Tensor | None = None
) -> torch.Tensor:
    """The same of bf16 rows."""
    guarded = GuardedGradient((rows.offs.shape[0], rows.dy.shape[1], rows.x.shape[1]), config.out_dtype, onto)
    grouped_gemm_wgrad(
        rows.dy, rows.x, offs=rows.offs, out=guarded.out, accumulate=onto is not None, backend=backend, config=config
    )
    guarded.check()
    return guarded.out
