"""Reference of `padless.epilogue.GateRule`: what a SwiGLU's gate and up are multiplied as."""

from __future__ import annotations

import torch

from padless.epilogue import GateRule


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
