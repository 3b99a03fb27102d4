"""Cases of adapters over experts of several ranks, which `support.ep_cases` runs with its own."""

from __future__ import annotations

import pytest
import torch

from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK, MXFP4, BlockScaledFormat
from padless.nn import LoraExperts
from padless.testing.exchange import Problem
from padless.verify.ranks.exchange import Ranks
from padless.verify.ranks.layers import HIDDEN, INTERMEDIATE, assert_bits, drawn, poison_rows, quantized

NAMES = ("law", "code")


def of_pairs(p: Problem) -> Problem:
    """The same tokens, with the places of pairs (expert, adapter or none)."""
    return Problem(p.tokens, p.ids, p.weights, [rank for rank in p.expert_map for _ in range(len(NAMES) + 1)])


def adapted(
    ranks: Ranks, weights: list[torch.Tensor], experts: list[int], fmt: BlockScaledFormat, ep: ExpertParallel | None
) -> LoraExperts:
    """These experts' codes, biases and adapters; of all experts the same values are drawn."""
    generator = torch.Generator().manual_seed(7)
    biases = [torch.randn((len(weights[0]), n), generator=generator) for n in (2 * INTERMEDIATE, HIDDEN)]
    bias13, bias2 = (torch.nn.Parameter(b[experts].to(ranks.device)) for b in biases)
    given = {"bias13": bias13, "bias2": bias2, "rank": 4, "adapters": NAMES, "dtype": torch.float32, "ep": ep}
    made = LoraExperts(*quantized(weights, experts, fmt, ranks), **given)
    with torch.no_grad():
        for name, factor in sorted(made.named_parameters()):
            if not name.startswith("bias"):
                values = torch.randn((len(weights[0]), *factor.shape[1:]), generator=generator) / 8
                factor.copy_(values[experts])
    return made


def adapters(ranks: Ranks) -> None:
    """Outputs and gradients of tokens have the bits of one process; those of adapters are of all ranks' tokens.

    One adapter for all tokens, none, and one chosen by each token, none of some; exchanges of experts, and of pairs with
    adapters; NaN in rows of no expert.
    """
    for number, fmt in enumerate((FP8_BLOCK, MXFP4)):
        p, weights, shared = drawn(ranks, 121 + number, torch.float32)
        every = list(range(len(p.expert_map)))
        here = [e for e in every if p.expert_map[e] == ranks.rank]
        generator = torch.Generator().manual_seed(number)
        chosen = [torch.randint(-1, len(NAMES), (len(t),), generator=generator).to(ranks.device) for t in p.tokens]
        douts = [torch.randn(t.shape, generator=generator).to(ranks.device) for t in p.tokens]
        all_shared = [torch.randn(t.shape, generator=generator).to(ranks.device) for t in p.tokens]
        all_shared[ranks.rank] = shared
        for pairs, by_token, active in (
            (False, False, "code"), (False, False, None), (True, True, "law"), (True, False, "code"), (True, False, None)
        ):  # fmt: skip
            ep = ranks.make(of_pairs(p) if pairs else p, fmt=torch.float32, sums="slots")
            poison_rows(ep)
            over, alone = adapted(ranks, weights, here, fmt, ep), adapted(ranks, weights, every, fmt, None)
            over.active = alone.active = active
            case = f"{fmt.name}, exchange of pairs {pairs}, by token {by_token}, active {active}"

            def step(
                layer: LoraExperts, own: list[int], by_token: bool = by_token, chosen: list = chosen,
                p: Problem = p, all_shared: list = all_shared, douts: list = douts,
            ) -> list[torch.Tensor]:  # fmt: skip
                x, ids, weight = (torch.cat([t[r] for r in own]).to(ranks.device) for t in (p.tokens, p.ids, p.weights))
                leaves = [x.requires_grad_(), weight.requires_grad_()]
                more = {"adapter_ids": torch.cat([chosen[r] for r in own])} if by_token else {}
                out = layer(x, ids, weight, torch.cat([all_shared[r] for r in own]), **more)
                out.backward(torch.cat([douts[r] for r in own]))
                return [out.detach(), *(t.grad for t in leaves)]

            got, want = step(over, [ranks.rank]), step(alone, [ranks.rank])
            for what, mine, other in zip(("out", "x"), got, want, strict=False):
                assert_bits(mine, other, f"{case}: {what}")
            torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-4)
            alone.zero_grad()
            step(alone, list(range(ranks.size)))
            whole = dict(alone.named_parameters())
            for name, parameter in over.named_parameters():
                expected = whole[name].grad
                assert (parameter.grad is None) == (expected is None), f"{case}: {name}"
                if expected is not None and expected[here].norm() > 0:
                    off = float((parameter.grad - expected[here]).norm() / expected[here].norm())
                    assert off < 1e-6, f"{case}: {name} is off by {off}"
            with torch.no_grad():
                p_own = ranks.own(p)
                more = {"adapter_ids": chosen[ranks.rank]} if by_token else {}
                assert_bits(over(*p_own, **more), alone(*p_own, **more), f"{case}: served")
    x, ids, weight = ranks.own(p)
    with pytest.raises(ValueError, match="adapter_ids are given and ep is of"):
        adapted(ranks, weights, here, fmt, ranks.make(p, fmt=torch.float32))(
            x, ids, weight, adapter_ids=chosen[ranks.rank]
        )
    with pytest.raises(ValueError, match=r"ep has \d+ experts here and 128 columns in .*; it must have"):
        adapted(ranks, weights, here[:-1], fmt, ranks.make(p, fmt=torch.float32))
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 and ep's rows are torch\.float32"):
        adapted(ranks, weights, here, fmt, ranks.make(p, fmt=torch.float32))(x.bfloat16(), ids, weight)


def adapters_and_shared_rows(ranks: Ranks) -> None:
    """In bfloat16: with sums of slots one rounding, shared included, and its gradient; with sums of ranks one more."""
    p, weights, shared = drawn(ranks, 123, torch.bfloat16)
    every, given = list(range(len(p.expert_map))), ranks.own(p)
    here = [e for e in every if p.expert_map[e] == ranks.rank]
    dout = torch.randn(shared.shape, generator=torch.Generator().manual_seed(5)).to(shared)
    for sums in ("slots", "ranks"):
        layer = adapted(ranks, weights, here, FP8_BLOCK, ranks.make(p, fmt=torch.bfloat16, sums=sums))
        alone = adapted(ranks, weights, every, FP8_BLOCK, None)
        for shared_dtype in (torch.bfloat16, torch.float32):
            added = shared.to(shared_dtype, copy=True).requires_grad_()
            out = layer(*given, added)
            if sums == "slots":
                want = alone(*given, added.detach())
            else:
                want = (layer(*given).float() + shared.float()).to(torch.bfloat16)
            assert_bits(out.detach(), want.detach(), f"{sums}, {shared_dtype}")
            out.backward(dout)
            assert_bits(added.grad, dout.to(shared_dtype), f"{sums}, {shared_dtype}: gradient")


CASES = {"adapters": adapters, "adapters_and_shared_rows": adapters_and_shared_rows}
