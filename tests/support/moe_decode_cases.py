"""Layers for the kernel of sm90_moe_decode, one launch of it, and the steps that it stands for in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch

from padless import FP8_BLOCK, BlockScaledTensor, quantize
from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_moe_decode import host
from padless.kernels.sm90_moe_decode.choice import Choice, Given
from padless.moe import decode, moe

GUARD = 64  # values on either side of an output


class HasExperts(Protocol):
    """Weights of a layer's experts, in any format."""

    @property
    def w13(self) -> BlockScaledTensor: ...
    @property
    def experts(self) -> int: ...


@dataclass(frozen=True)
class Weights:
    w13: BlockScaledTensor
    w2: BlockScaledTensor
    gate_up: str

    @property
    def experts(self) -> int:
        return self.w13.data.shape[0]


@dataclass(frozen=True)
class Tokens:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None

    @property
    def choice(self) -> Choice:
        return Given(self.ids, self.weights)


def draw_weights(experts: int, h: int, i: int, gate_up: str = "concatenated", seed: int = 0) -> Weights:
    """Random experts whose scales differ from block to block."""
    g = torch.Generator().manual_seed(seed)

    def one(n: int, k: int) -> BlockScaledTensor:
        size = torch.rand(experts, n // 128, 1, k // 128, 1, generator=g) + 0.1
        values = torch.randn(experts, n // 128, 128, k // 128, 128, generator=g) * size
        return quantize(values.reshape(experts, n, k) * (2 / k**0.5), FP8_BLOCK, kind="weight")

    return Weights(one(2 * i, h), one(h, i), gate_up)


def draw_tokens(
    weights: HasExperts, tokens: int, top_k: int, seed: int = 0, *, shared: bool = False, kind: str = "any"
) -> Tokens:
    """Random tokens, the last of which is 0 where there are several.

    kind: of ids. "any": with repeats in a token, and some that are no expert; "distinct"; "none": no expert at all;
        "one": all the same.
    """
    g = torch.Generator().manual_seed(1000 + seed)
    h, experts = weights.w13.logical_shape[2], weights.experts
    x = torch.randn(tokens, h, generator=g) * (torch.rand(tokens, 1, generator=g) + 0.2)
    if tokens > 1:
        x[-1] = 0.0
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
    if kind == "distinct":
        ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
    if kind == "none":
        ids = torch.where(ids % 2 == 0, experts + ids.abs(), -1 - ids.abs())
    if kind == "one":
        ids = torch.full_like(ids, experts - 1)
    return Tokens(
        x.bfloat16(),
        ids.contiguous(),
        torch.rand(tokens, top_k, generator=g),
        torch.randn(tokens, h, generator=g).bfloat16() if shared else None,
    )


def several_launches(weights: Weights, tokens: Tokens, seed: int = 0) -> torch.Tensor:
    """What moe() gives in its steps, whose products run in the emulator."""
    with (
        emulated_driver().configured(num_sms=2, seed=seed, checks=False),
        mock.patch.object(decode, "is_faster", return_value=False),
    ):
        return moe(
            tokens.x, tokens.ids, tokens.weights, weights.w13, weights.w2, gate_up=weights.gate_up, shared=tokens.shared,
            backend="emulator",
        )  # fmt: skip


class Output:
    """Room for `tokens` rows of H values, one address for all launches, full of NaN before each, between guards."""

    def __init__(self, tokens: int, h: int) -> None:
        self._all = torch.empty(tokens * h + 2 * GUARD, dtype=torch.bfloat16)
        self._h = h

    def poisoned(self, tokens: int) -> torch.Tensor:
        self._all.view(torch.int16).fill_(0x7FAB)
        return self.rows(tokens)

    def rows(self, tokens: int) -> torch.Tensor:
        return self._all[GUARD : GUARD + tokens * self._h].view(tokens, self._h)

    def is_right(self, want: torch.Tensor) -> bool:
        """Every bit of the rows, and nothing else was written."""
        end = GUARD + want.numel()
        whole = self._all.view(torch.int16)
        inside = torch.equal(whole[GUARD:end], want.reshape(-1).view(torch.int16))
        return inside and bool((whole[:GUARD] == 0x7FAB).all()) and bool((whole[end:] == 0x7FAB).all())


def scratch(words: int) -> torch.Tensor:
    """New scratch with room for so many words of hidden rows."""
    return torch.zeros(32 + 2 * words, dtype=torch.int32)


def is_ready(memory: torch.Tensor, launches: int) -> bool:
    """Whether scratch is as the next launch needs it: what the launch before the last one wrote is cleared."""
    buffers = memory[32:].view(2, -1)
    return memory[:3].tolist() == [launches, 0, 0] and not bool(buffers[launches % 2].any())


def launch(driver: Any, weights: Weights, tokens: Tokens, out: torch.Tensor, memory: torch.Tensor) -> None:
    host.prepare(
        driver, tokens.x, tokens.choice, weights.w13, weights.w2, tokens.shared, out, memory,
        interleaved=weights.gate_up == "interleaved",
    ).launch(0)  # fmt: skip
