"""Reference of the epilogue's activations: a function of the name of each row of `padless.epilogue.ACTIVATIONS`.

Each takes gate, up and the epilogue, gate and up behind the limits and the offset of a `padless.epilogue.GateRule`; of
an activation without a gate both are the sums. float32, every operation rounded once, NaN stays NaN.
"""

from __future__ import annotations

import torch

from padless.epilogue import INTERLEAVE, Epilogue, GateRule
from padless.reference.gemm import fma_float32

# --- what a row of ACTIVATIONS names ---------------------------------------------------------------------


def swiglu(gate: torch.Tensor, up: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * up."""
    rule = epilogue.gate_rule
    inner = gate if rule is None else gate * torch.tensor(rule.alpha, dtype=torch.float32, device=gate.device)
    return gate * sigmoid_of(inner, epilogue) * up


# --- what they have in common ----------------------------------------------------------------------------


def activated(x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The activation of x (M, N) float32, (M, N_out)."""
    if epilogue.gate_in_bf16:
        x = x.to(torch.bfloat16).to(torch.float32)
    gate, up = gate_and_up(x, epilogue.gate_up) if epilogue.is_glu else (x, x)
    found: torch.Tensor = globals()[epilogue.activation](*limited(gate, up, epilogue.gate_rule), epilogue)
    return found


def gate_and_up(x: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of gate and of up of x (M, N)."""
    n = x.shape[1]
    if gate_up == "alternating":
        return x[:, 0::2], x[:, 1::2]
    if gate_up == "concatenated":
        return x[:, : n // 2], x[:, n // 2 :]
    column = torch.arange(n, device=x.device)
    is_gate = column // INTERLEAVE % 2 == 0
    return x[:, is_gate], x[:, ~is_gate]


def limited(gate: torch.Tensor, up: torch.Tensor, rule: GateRule | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up behind the limits and the offset of a rule."""
    if rule is None:
        return gate, up
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return gate, up + torch.tensor(rule.up_offset, dtype=torch.float32, device=up.device)


def sigmoid_of(x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The sigmoid that the epilogue's activations have."""
    return polynomial_sigmoid(x) if epilogue.gate_in_bf16 else sigmoid(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """fl(1 / fl(1 + fl(exp(-x)))), the exponential rounded once; 0 where that is subnormal."""
    power = torch.exp(-x.to(torch.float64)).to(torch.float32)
    s = 1.0 / (1.0 + power)
    return torch.where(s < 2.0**-126, 0.0, s)


def polynomial_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """s of `quantization.swiglu_rules` for x, which counts as at least -87.25."""

    def number(hexadecimal: str) -> torch.Tensor:
        return torch.tensor(float.fromhex(hexadecimal), dtype=torch.float32, device=x.device)

    x = x.clamp(-87.25, 87.0)
    n = (x.double() * -float.fromhex("0x1.715476p+0")).round().to(torch.float32)  # fma and 1.5 * 2^23 give the same
    r = fma_float32(n, number("-0x1.05c610p-29"), fma_float32(n, number("0x1.62e430p-1"), x))
    power = number("-0x1.106250p-7")
    for c in ("0x1.572a64p-5", "-0x1.5557b0p-3", "0x1.fffdfcp-2", "-0x1p+0", "0x1p+0"):
        power = fma_float32(power, r, number(c))
    return 1.0 / ((power.double() * torch.exp2(n.double())).to(torch.float32) + 1.0)
