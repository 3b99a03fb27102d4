"""Problems of a grouped layer's training, and what they are judged by: the layer in float64 under torch's own autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HUGE = 1e30  # what rows of no group hold, beside NaN


@dataclass
class Layer:
    """Inputs of an expert layer, float32, with ids that are no expert among them, and a gradient of its output."""

    x: torch.Tensor  # (T, H)
    index: torch.Tensor  # (T, k)
    prob: torch.Tensor  # (T, k)
    w13: torch.Tensor  # (E, 2 I, H)
    w2: torch.Tensor  # (E, H, I)
    shared: torch.Tensor  # (T, H)
    dout: torch.Tensor  # (T, H)

    NAMES = ("x", "prob", "w13", "w2", "shared")

    def leaves(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Copies of what can have a gradient."""
        return {name: getattr(self, name).detach().to(dtype).requires_grad_() for name in self.NAMES}


def layer(
    tokens: int = 150,
    hidden: int = 160,
    intermediate: int = 144,
    experts: int = 5,
    top_k: int = 3,
    seed: int = 0,
) -> Layer:
    """Normal values of a trained layer's sizes; the last expert is chosen by no token, and two ids are no expert."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, experts, (tokens, top_k), generator=g)
    index = torch.where(index == experts - 1, experts + 7, index)
    return Layer(
        torch.randn(tokens, hidden, generator=g),
        index,
        torch.rand(tokens, top_k, generator=g),
        torch.randn(experts, 2 * intermediate, hidden, generator=g) / hidden**0.5,
        torch.randn(experts, hidden, intermediate, generator=g) / intermediate**0.5,
        torch.randn(tokens, hidden, generator=g) / 3,
        torch.randn(tokens, hidden, generator=g),
    )


def split(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of z (.., 2 I)."""
    if gate_up == "concatenated":
        half = z.shape[-1] // 2
        return z[..., :half], z[..., half:]
    runs = z.unflatten(-1, (-1, 2, 32))
    return runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)


def layer_in_torch(
    p: dict[str, torch.Tensor], index: torch.Tensor, gate_up: str = "concatenated"
) -> torch.Tensor:
    """The layer's output from leaves of any one dtype, expert by expert."""
    out = p["shared"]
    for e in range(p["w13"].shape[0]):
        token, slot = torch.nonzero(index == e, as_tuple=True)
        gate, up = split(p["x"][token] @ p["w13"][e].T, gate_up)
        y = (torch.nn.functional.silu(gate) * up) @ p["w2"][e].T
        out = out.index_add(0, token, y * p["prob"][token, slot, None])
    return out


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal over error in dB; NaN where got has one."""
    got, want = got.detach().double(), want.detach().double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))
