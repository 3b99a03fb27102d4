"""Activation functions between an expert's two projections: `Activation` and their arithmetic in torch.

All of it is float32, every operation that is written rounded once to nearest even. The sigmoid is that of
`padless.quantization.swiglu_rules`, a polynomial, so that Triton's kernel and the GEMM's epilogue give these bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.arguments import check_number, is_one_of, shown
from padless.quantization import swiglu_rules
from padless.runtime.choices import ActivationKind, GateUp

KINDS = ("swiglu", "geglu", "relu2", "gelu", "silu")
GATED = ("swiglu", "geglu")
GATE_UP = ("concatenated", "interleaved", "alternating")
RUN = 32  # columns of gate, then as many of up, in "interleaved"

GELU_SLOPE = 1.5957691216057308  # 2 sqrt(2 / pi)
GELU_CUBIC = 0.044715


@dataclass(frozen=True)
class Activation:
    """An activation of an expert's first projection.

    kind: "swiglu", gate * sigmoid(alpha * gate) * (up + up_offset); "geglu", gelu(gate) * (up + up_offset); and without
        a gate "relu2", max(x, 0)^2, "gelu" (the tanh form) and "silu".
    gate_up: which rows of w13 make gate and up: "concatenated", the first and the last half; "interleaved", 32 of gate,
        32 of up, 32 of gate, ..; "alternating", one of gate, one of up, .. (gpt-oss). Unused without a gate.
    alpha: what gate is multiplied by inside the sigmoid of "swiglu".
    limit: gate is at most limit and up between -limit and limit before anything else; None is no limit. Needs a gate.
    up_offset: added to up (1 for gpt-oss).

    Raises ValueError for what does not go together.
    """

    kind: ActivationKind = "swiglu"
    gate_up: GateUp = "concatenated"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if not is_one_of(self.kind, KINDS):
            raise ValueError(f"kind of activation is {shown(self.kind)}; allowed: {', '.join(map(repr, KINDS))}")
        if not is_one_of(self.gate_up, GATE_UP):
            raise ValueError(f"gate_up is {shown(self.gate_up)}; allowed: {', '.join(map(repr, GATE_UP))}")
        for name in ("alpha", "limit", "up_offset"):
            if (value := getattr(self, name)) is not None or name != "limit":
                check_number(name, value)
        if self.kind != "swiglu" and self.alpha != 1.0:
            raise ValueError(f"alpha is {self.alpha}; it must be 1 for activation {self.kind!r}, only 'swiglu' has it")
        if not self.is_gated and (self.limit is not None or self.up_offset != 0.0):
            raise ValueError(
                f"limit is {self.limit} and up_offset {self.up_offset}; activation {self.kind!r} has no gate, so they "
                "must be None and 0"
            )
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is {self.limit}; it must be None or positive")

    @property
    def is_gated(self) -> bool:
        """Whether pairs of columns become one."""
        return self.kind in GATED

    @property
    def is_plain_swiglu(self) -> bool:
        """Whether it is silu(gate) * up, which the GEMM's epilogue computes."""
        return self.kind == "swiglu" and self.alpha == 1.0 and self.limit is None and self.up_offset == 0.0

    def out_columns(self, n: int) -> int:
        """Columns after the activation of n columns. Raises ValueError for an n that it cannot have."""
        if not self.is_gated:
            return n
        multiple = 2 * RUN if self.gate_up == "interleaved" else 2
        if n % multiple != 0:
            raise ValueError(
                f"w13 has N = {n}; with a gate it must be a multiple of {multiple} for gate_up={self.gate_up!r}"
            )
        return n // 2


def split_gate_up(x: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) columns of x (.., N), each (.., N / 2)."""
    n = x.shape[-1]
    if activation.gate_up == "concatenated":
        return x[..., : n // 2], x[..., n // 2 :]
    if activation.gate_up == "alternating":
        return x[..., 0::2], x[..., 1::2]
    runs = x.unflatten(-1, (n // (2 * RUN), 2, RUN))
    return runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of x (M, N) in float32: (M, N / 2) with a gate, else (M, N)."""
    values = x.to(torch.float32)
    if not activation.is_gated:
        if activation.kind == "relu2":
            positive = torch.where(values < 0.0, 0.0, values)
            return positive * positive
        return gelu(values) if activation.kind == "gelu" else values * sigmoid(values)
    gate, up = split_gate_up(values, activation)
    if activation.limit is not None:
        limit = torch.full((), activation.limit, dtype=torch.float32, device=x.device)
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    up = up + _number(activation.up_offset, x)
    if activation.kind == "geglu":
        return gelu(gate) * up
    return (gate * sigmoid(gate * _number(activation.alpha, x))) * up


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) of float32 x, which counts as at least -87.25: that of `padless.quantization.swiglu_rules`."""
    return swiglu_rules.sigmoid(x.clamp(min=swiglu_rules.SMALLEST))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) of float32 x: the tanh form."""
    cubic = (x * x) * x
    return x * sigmoid((x + cubic * GELU_CUBIC) * GELU_SLOPE)


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A float32 scalar on like's device: torch multiplies by Python's numbers in float32, but does not divide so."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
