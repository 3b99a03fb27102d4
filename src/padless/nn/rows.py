"""Passes over rows that training needs beside the quantizers: definitions in torch, and where Triton computes them."""

from __future__ import annotations

import torch

from padless.moe.checks import on_device_of, runs_triton
from padless.quantization import swiglu_rules
from padless.reference.gemm import group_rows


def spans(offs: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """[start, end) of each group's rows; offs on a CPU."""
    return group_rows(offs, num_rows)


def zero_tail(t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """t (M, N), contiguous, with zeros written to the rows from offs[-1] on."""
    if runs_triton(t):
        from padless.nn.triton import rows as kernels

        with on_device_of(t):
            kernels.zero_tail(t, offs)
        return t
    if t.is_cuda:
        tail = torch.arange(t.shape[0], device=t.device) >= offs[-1]
        return t.masked_fill_(tail[:, None], 0.0)
    t[max(int(offs[-1]), 0) :] = 0.0
    return t


def groups_to_front(t: torch.Tensor, offs: torch.Tensor, groups: slice) -> torch.Tensor:
    """(M, N) whose first rows are those of the groups, of t (M, N); the others hold anything. No wait for the device."""
    start, end = _bounds(offs, groups)
    if runs_triton(t) and t.numel() > 0:
        from padless.nn.triton import rows as kernels

        with on_device_of(t):
            return kernels.moved(t, torch.empty_like(t), start, end, forth=True)
    return t[(torch.arange(t.shape[0], device=t.device) + start) % max(t.shape[0], 1)]


def groups_from_front(found: torch.Tensor, out: torch.Tensor, offs: torch.Tensor, groups: slice) -> None:
    """Writes the first rows of found (M, N) to those of the groups in out (M, N): `groups_to_front` backwards."""
    start, end = _bounds(offs, groups)
    if runs_triton(out) and out.numel() > 0:
        from padless.nn.triton import rows as kernels

        with on_device_of(out):
            kernels.moved(found, out, start, end, forth=False)
        return
    row = torch.arange(out.shape[0], device=out.device)
    is_theirs = (row >= start) & (row < end)
    torch.where(is_theirs[:, None], found[(row - start) % max(out.shape[0], 1)], out, out=out)


def _bounds(offs: torch.Tensor, groups: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of the groups and the one behind them, (1,) each."""
    first, last = groups.start, min(groups.stop, offs.shape[0])
    return offs[first - 1 : first] if first else offs.new_zeros(1), offs[last - 1 : last]


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bfloat16 values, each code * scale of FP8_BLOCK rows (M, N) rounded once."""
    if runs_triton(codes) and codes.numel() > 0:
        from padless.nn.triton import rows as kernels

        with on_device_of(codes):
            return kernels.dequantize(codes, scale)
    per_column = scale.repeat_interleave(128, dim=1)[:, : codes.shape[1]]
    return (codes.to(torch.float32) * per_column).to(torch.bfloat16)


def swiglu_backward(
    dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dZ (M, 2 I), H (M, I), dprob (M,) float32) of `padless.quantization.swiglu_rules`, rounded to z's dtype.

    Rows past the last group: dZ and H as computed, dprob 0.
    """
    if runs_triton(z) and z.numel() > 0:
        from padless.nn.triton import swiglu as kernels

        with on_device_of(z):
            return kernels.swiglu_backward(dh, z, offs, prob, gate_up)
    found = swiglu_rules.backward(dh, *swiglu_rules.gate_and_up(z, gate_up), prob)
    dz = swiglu_rules.merge_gate_and_up(found.gate, found.up, gate_up)
    in_a_group = torch.arange(z.shape[0], device=z.device) < offs[-1]
    dprob = torch.where(in_a_group, swiglu_rules.dprob(found.products), 0.0)
    return dz.to(z.dtype), found.hidden.to(z.dtype), dprob
