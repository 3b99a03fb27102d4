"""Reference of a SwiGLU's gate and up: which columns they are, and what a `padless.epilogue.GateRule` makes of them."""

from __future__ import annotations

import torch

from padless.epilogue import INTERLEAVE, GateRule


def gate_and_up(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of gate and of up of x (M, N)."""
    n = x.shape[1]
    if activation == "swiglu_alternating":
        return x[:, 0::2], x[:, 1::2]
    if activation == "swiglu_concatenated":
        return x[:, : n // 2], x[:, n // 2 :]
    column = torch.arange(n)
    is_gate = column // INTERLEAVE % 2 == 0
    return x[:, is_gate], x[:, ~is_gate]


def gates_of(
    gate: torch.Tensor, up: torch.Tensor, rule: GateRule | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gate, up, what the sigmoid is of) of float32 gate and up, every operation rounded once; NaN stays NaN."""
    if rule is None:
        return gate, up, gate
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    alpha, offset = (torch.tensor(value, dtype=torch.float32) for value in (rule.alpha, rule.up_offset))
    return gate, up + offset, gate * alpha
