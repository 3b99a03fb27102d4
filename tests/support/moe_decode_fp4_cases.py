"""Layers for the kernel of sm90_moe_decode_fp4, one launch of it, and the steps that it stands for in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from padless import MXFP4, BlockScaledTensor, quantize
from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_moe_decode import host_fp4
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.layouts import plain_scale, to_blocked
from padless.moe import Activation, decode, moe
from padless.moe.fused import gate_rule_of
from support.emulator_variants import Edit, Variant, replace_nth
from support.moe_decode_cases import Tokens

GPT_OSS = Activation("swiglu", "alternating", 1.702, 7.0, 1.0)
PLAIN = Activation("swiglu", "alternating")


@dataclass(frozen=True)
class Fp4Weights:
    w13: BlockScaledTensor
    w2: BlockScaledTensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    @property
    def experts(self) -> int:
        return self.w13.data.shape[0]


def draw_fp4_weights(
    experts: int, h: int, i: int, seed: int = 0, *, bias: str = "both", size: float = 1.0
) -> Fp4Weights:
    """Random experts whose scales differ from block to block; scales past the end of K are no numbers.

    bias: "both", "first", "second" or "none" of the projections have one.
    """
    g = torch.Generator().manual_seed(seed)

    def one(n: int, k: int) -> BlockScaledTensor:
        sizes = torch.rand(experts, n, k // 32, 1, generator=g) * 3 + 0.05
        values = (torch.randn(experts, n, k // 32, 32, generator=g) * sizes).reshape(experts, n, k)
        plain = quantize(values * (size / k**0.5), MXFP4, kind="weight")
        columns = k // 32
        padded = torch.full((experts, -(-n // 128) * 128, -(-columns // 4) * 4), 0xFF, dtype=torch.uint8)
        padded[:, :n, :columns] = plain_scale(plain).view(torch.uint8)
        return BlockScaledTensor(plain.data, to_blocked(padded).view(plain.scale.dtype), MXFP4, None, "blocked")

    w13, w2 = one(2 * i, h), one(h, i)
    bias13 = torch.randn(experts, 2 * i, generator=g) if bias in ("both", "first") else None
    bias2 = torch.randn(experts, h, generator=g) if bias in ("both", "second") else None
    return Fp4Weights(w13, w2, bias13, bias2)


def call(weights: Fp4Weights, tokens: Tokens, activation: Activation, /, **more: Any) -> torch.Tensor:
    options: dict[str, Any] = {
        "gate_up": activation.gate_up,
        "alpha": activation.alpha,
        "limit": activation.limit,
        "up_offset": activation.up_offset,
        "bias13": weights.bias13,
        "bias2": weights.bias2,
        "shared": tokens.shared,
        "activations": torch.bfloat16,
        "backend": "emulator",
    }
    return moe(tokens.x, tokens.ids, tokens.weights, weights.w13, weights.w2, **options | more)


def several_launches(weights: Fp4Weights, tokens: Tokens, activation: Activation = GPT_OSS) -> torch.Tensor:
    """What moe() gives in its steps, whose products run in the emulator."""
    with (
        emulated_driver().configured(num_sms=2, seed=0, checks=False),
        mock.patch.object(decode, "is_faster", return_value=False),
    ):
        return call(weights, tokens, activation)


class Patient(Variant):
    """The kernel with edits, and with CTAs that wait for each other to start: every CTA has a share of its own.

    Seeds draw schedules; there has to be room for all CTAs at once.
    """

    def __init__(self, edits: tuple[Edit, ...], config: MoeDecodeFp4Config, nth: int = 0) -> None:
        super().__init__("sm_90a", host_fp4.KERNEL, edits, config, nth)
        share = "sm90_moe_decode/share.cuh"
        self.texts[share] = replace_nth(self.texts[share], "PATIENCE = 16;", "PATIENCE = 1 << 30;", 0, share)


def launch(
    driver: Any,
    weights: Fp4Weights,
    tokens: Tokens,
    out: torch.Tensor,
    memory: torch.Tensor,
    activation: Activation = GPT_OSS,
) -> None:
    host_fp4.prepare(
        driver, tokens.x, tokens.choice, weights.w13, weights.w2, weights.bias13, weights.bias2,
        tokens.shared, out, memory, gate_rule=gate_rule_of(activation),
    ).launch(0)  # fmt: skip
