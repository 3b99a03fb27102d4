"""A stand-in for DeepGEMM: its functions in torch, with its demands on operands."""

from __future__ import annotations

import types
from typing import Any

import torch


def product(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """float64 product of (rows, K) and (N, K) codes with their 1x128 and 128x128 scales."""
    wide_a = sfa.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    wide_b = sfb.double().repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
    return (a.float().double() * wide_a) @ (b.float().double() * wide_b).t()


def stand_in_deepgemm() -> types.ModuleType:
    library = types.ModuleType("deep_gemm")

    def contiguous(
        a: Any, b: Any, d: Any, layout: Any, disable_ue8m0_cast: bool, use_psum_layout: bool = False,
        expected_m_for_psum_layout: int | None = None,
    ) -> None:  # fmt: skip
        (codes, sfa), (weights, sfb) = a, b
        assert disable_ue8m0_cast
        assert layout.dtype == torch.int32
        assert layout.is_contiguous()
        assert codes.shape[0] % 128 == 0
        assert sfa.stride() in ((1, codes.shape[0]), (sfa.shape[1], 1))
        assert use_psum_layout == (expected_m_for_psum_layout is not None)
        start = 0
        for group, end in enumerate(layout.tolist()) if use_psum_layout else ():
            assert start <= end <= codes.shape[0]
            rows, tail = slice(start, end), slice(end, (end + 127) // 128 * 128)
            d[rows] = product(codes[rows], sfa[rows], weights[group], sfb[group]).to(d.dtype)
            d[tail] = float("nan")
            start = tail.stop
        assert use_psum_layout or layout.shape == (codes.shape[0],)
        for tile in () if use_psum_layout else range(0, codes.shape[0], 128):
            group = int(layout[tile])
            rows = slice(tile, tile + 128)
            assert set(layout[rows].tolist()) <= {group, -1}
            d[rows] = product(codes[rows], sfa[rows], weights[group], sfb[group]).to(d.dtype)

    def masked(a: Any, b: Any, d: Any, masked_m: Any, expected_m: int, disable_ue8m0_cast: bool) -> None:
        (codes, sfa), (weights, sfb) = a, b
        groups, rows, _ = codes.shape
        assert rows % 128 == 0
        assert sfa.stride() == (sfa.shape[2] * rows, 1, rows)
        assert masked_m.dtype == torch.int32
        assert expected_m >= 1
        for group in range(groups):
            valid = int(masked_m[group])
            d[group, :valid] = product(codes[group, :valid], sfa[group, :valid], weights[group], sfb[group]).to(d.dtype)

    def dense(a: Any, b: Any, d: Any, disable_ue8m0_cast: bool) -> None:
        assert a[1].stride(0) == 1
        d.copy_(product(a[0], a[1], b[0], b[1]))

    library.m_grouped_fp8_gemm_nt_contiguous = contiguous  # type: ignore[attr-defined]
    library.m_grouped_fp8_gemm_nt_masked = masked  # type: ignore[attr-defined]
    library.fp8_gemm_nt = dense  # type: ignore[attr-defined]
    library.__version__ = "2.6.1"  # type: ignore[attr-defined]
    return library
