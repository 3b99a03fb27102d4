"""padless.moe.topk's Triton kernel against its twin in torch, bit for bit, on any device.

`test_moe_topk.py` runs every case on a GPU where there is one, and everywhere in Triton's interpreter.
"""

from __future__ import annotations

import random

import torch

from padless.moe import Router, twins
from support.interpreter import Cases, main
from support.moe_cases import same_values
from support.training_quantizer_cases import poisoned_memory
from support.triton_cases import awkward

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RULES = {
    "Mixtral": (Router(2), 8, False),
    "Qwen3-MoE": (Router(8), 128, False),
    "Qwen2-MoE": (Router(4, renormalize=False), 60, False),
    "gpt-oss": (Router(4), 32, False),
    "DeepSeek-V3": (Router(8, "sigmoid", scaling_factor=2.5, num_expert_groups=8, top_groups=4), 256, True),
    "Kimi-K2": (Router(8, "sigmoid", scaling_factor=2.827), 384, True),
    "GLM-4.5-Air": (Router(8, "sigmoid"), 128, True),
    "sigmoids as they are": (Router(3, "sigmoid", renormalize=False), 11, False),
    "softmax with a bias": (Router(6, scaling_factor=0.3), 64, True),
    "softmax in groups of 20": (Router(6, renormalize=False, num_expert_groups=8, top_groups=3), 160, False),
    "softmax in three groups": (Router(5, num_expert_groups=3, top_groups=2), 33, True),
    "all groups": (Router(5, "sigmoid", num_expert_groups=4, top_groups=4), 20, False),
    "all experts": (Router(7, renormalize=False), 7, False),
    "one expert": (Router(1, "sigmoid"), 1, True),
    "groups of two, one chosen": (Router(2, "sigmoid", num_expert_groups=5, top_groups=1), 10, True),
}


def draw_logits(tokens: int, experts: int, dtype: torch.dtype, seed: int, *, ties: bool = False) -> torch.Tensor:
    """(T, E) of random magnitudes; with ties a few values alone, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, experts), generator=generator)
    logits = logits * 2.0 ** torch.randint(-3, 7, (tokens, 1), generator=generator)
    if ties:
        logits = logits.clamp(-1, 1).round()
        logits[logits == 0] *= torch.randn(int((logits == 0).sum()), generator=generator).sign()
    return logits.to(dtype)


def draw_bias(experts: int, seed: int) -> torch.Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.1


def draw_rule(seed: int, most: int) -> tuple[Router, int, bool]:
    """(a rule, E up to most, whether it has a bias) at random."""
    draw = random.Random(seed)
    groups = draw.choice((1, 1, 2, 3, 4, 8, 9))
    size = draw.randint(2, max(most // groups, 2)) if groups > 1 else draw.randint(1, most)
    top_groups = draw.randint(1, groups)
    k = draw.randint(1, min(64 if draw.random() < 0.1 else 12, size * top_groups))
    scaling = draw.choice((1.0, 2.5, draw.uniform(0.01, 9)))
    rule = Router(k, draw.choice(("softmax", "sigmoid")), draw.random() < 0.5, scaling, groups, top_groups)
    return rule, size * groups, draw.random() < 0.5


def compare(logits: torch.Tensor, bias: torch.Tensor | None, rule: Router, device: str) -> None:
    """Ids and every bit of the weights."""
    from padless.moe.triton.topk import topk

    weights, ids = twins.topk(logits, bias, rule)
    whole = torch.empty(0, dtype=logits.dtype).set_(logits.untyped_storage()).to(device)
    there = whole.as_strided(logits.shape, logits.stride(), logits.storage_offset())
    with poisoned_memory():
        got_weights, got_ids = topk(there, None if bias is None else bias.to(device), rule)
    assert got_ids.dtype == torch.int64
    assert torch.equal(got_ids.cpu(), ids), "ids"
    same_values(got_weights, weights)


def special_logits() -> torch.Tensor:
    """(9, 24): NaN, Inf, rows of one value, logits beyond the exponential's range."""
    inf, nan = float("inf"), float("nan")
    rows = torch.randn((9, 24), generator=torch.Generator().manual_seed(4))
    rows[1] = 3.0
    rows[2, 5], rows[2, 9] = nan, -nan
    rows[3, 7] = inf
    rows[4, 3:] = -inf
    rows[5] = -inf
    rows[6] = nan
    rows[7] *= 60
    rows[8] = torch.linspace(-200, 200, 24)
    return rows


CASES = Cases()
case = CASES.add


@case
def rules(device: str) -> None:
    for seed, (rule, experts, biased) in enumerate(RULES.values()):
        bias = draw_bias(experts, seed) if biased else None
        for ties in (False, True):
            compare(draw_logits(4, experts, DTYPES[(seed + ties) % 3], seed, ties=ties), bias, rule, device)


@case
def random_rules(device: str) -> None:
    for seed in range(40):
        rule, experts, biased = draw_rule(seed, 300)
        bias = draw_bias(experts, seed).to(DTYPES[seed % 2]) if biased else None
        compare(draw_logits(3, experts, DTYPES[seed % 3], seed, ties=seed % 5 == 0), bias, rule, device)


@case
def large_rules(device: str) -> None:
    """Up to 4096 experts and 64 of them."""
    compare(draw_logits(2, 4096, torch.float32, 1), None, Router(64, renormalize=False), device)
    compare(draw_logits(2, 4095, torch.bfloat16, 2), draw_bias(4095, 2), Router(33, "sigmoid", True, 2.0, 9, 4), device)
    compare(draw_logits(2, 1500, torch.float16, 3), draw_bias(1500, 3), Router(16), device)


@case
def awkward_logits(device: str) -> None:
    """Subnormals, NaN, Inf, zeros of both signs, rows of one value, logits beyond the exponential's range."""
    rows, inf, nan = special_logits(), float("inf"), float("nan")
    for seed, (rule, _, biased) in enumerate(RULES.values()):
        if (
            rule.k <= 8
            and 24 % rule.num_expert_groups == 0
            and rule.top_groups * 24 // rule.num_expert_groups >= rule.k
        ):
            bias = draw_bias(24, seed) if biased else None
            compare(rows, bias, rule, device)
            compare(awkward((6, 24), torch.float32, seed), bias, rule, device)
    for rule in (Router(5, "sigmoid"), Router(5)):
        compare(rows, torch.tensor([nan, inf, -inf, *[0.0] * 21]), rule, device)


@case
def strides(device: str) -> None:
    """Rows further apart than E, columns that are not adjacent, a transposed matrix, a row that all tokens share."""
    wide = draw_logits(9, 320, torch.bfloat16, 7)
    for logits in (wide[:, :100], wide.t(), wide[:, 1::3], wide[:1].expand(5, -1), wide[::2, 7:40]):
        compare(logits, None, Router(3, renormalize=False), device)


@case
def many_tokens(device: str) -> None:
    """Sizes that the interpreter takes long for."""
    if device == "cpu":
        return
    for seed, (rule, experts, biased) in enumerate(RULES.values()):
        bias = draw_bias(experts, seed) if biased else None
        compare(draw_logits(5000, experts, DTYPES[seed % 3], seed, ties=seed % 4 == 0), bias, rule, device)
    for seed in range(200):
        rule, experts, biased = draw_rule(1000 + seed, 4096 if seed % 4 == 0 else 512)
        bias = draw_bias(experts, seed) if biased else None
        compare(draw_logits(1 + seed * 3, experts, DTYPES[seed % 3], seed), bias, rule, device)


if __name__ == "__main__":
    main(CASES)
