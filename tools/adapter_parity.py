"""Loss parity of adapters: LoRA over frozen codes against LoRA over the same weights dequantized.

    python tools/adapter_parity.py [--size small] [--before 150] [--steps 120] [--seeds 3] [--out FILE]

Trains the model of `padless train-demo` in bfloat16 on one text, quantizes its experts, freezes everything, and trains
adapters of them on another text: by `padless.nn.LoraExperts` over the codes, by torch's own products and autograd over
bfloat16 copies of the dequantized weights, and over the codes with a fault. All see the same batches and begin with the
same A. Prints a line for each, writes the record, and fails where codes are not within the limits or the fault is.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from padless.demo.train.curves import LAST
from padless.demo.train.model import Model, ModelSize
from padless.demo.train.run import LARGE, SMALL, Contender
from padless.demo.train.text import draw_batch, help_topics, library_sources
from padless.formats import FP8_BLOCK, MXFP4, BlockScaledFormat
from padless.nn import RECIPES
from padless.nn.lora import LoraExperts
from padless.quantization.quantize import dequantize, quantize

SIZES = {"small": SMALL, "large": LARGE}
RANK, ALPHA, RATE = 8, 16.0, 3e-3
# Codes of the experts, and what rows are multiplied in with them.
FORMATS: dict[str, tuple[BlockScaledFormat, torch.dtype | None]] = {
    "FP8": (FP8_BLOCK, None),
    "MXFP4": (MXFP4, torch.bfloat16),
}
FAULT = ", gradients of the expert before"

LIMIT = 0.005  # of the mean over seeds of |last loss / last loss over dequantized weights - 1|, both ways
SEED_LIMIT = 0.01  # of one seed's
LEAST_LEARNED = 0.05  # nats a byte that adapters must take off the frozen model's loss, or equal losses say nothing


@dataclass(frozen=True)
class Verdict:
    """Last losses of adapters over codes against those over dequantized weights, by seed.

    over_codes, dequantized: mean losses of the last fifth of the steps, nats a byte. frozen: losses without adapters, on
    the same batches.
    """

    name: str
    over_codes: Sequence[float]
    dequantized: Sequence[float]
    frozen: Sequence[float]

    @property
    def by_seed(self) -> list[float]:
        """Of each seed, the loss over codes relative to the other, minus 1."""
        return [mine / other - 1 for mine, other in zip(self.over_codes, self.dequantized, strict=True)]

    @property
    def difference(self) -> float:
        """Mean over seeds of `by_seed`."""
        return sum(self.by_seed) / len(self.by_seed)

    @property
    def learned(self) -> float:
        """The least over seeds of what adapters over dequantized weights took off the frozen model's loss."""
        return min(before - after for before, after in zip(self.frozen, self.dequantized, strict=True))

    @property
    def holds(self) -> bool:
        """Whether three seeds or more end at the same loss; a NaN does not."""
        near = abs(self.difference) <= LIMIT and all(abs(d) <= SEED_LIMIT for d in self.by_seed)
        return len(self.by_seed) >= 3 and near and self.learned >= LEAST_LEARNED


# --- contenders ------------------------------------------------------------------------------------------


class Dequantized(nn.Module):
    """The same adapters over bfloat16 weights, an expert at a time, by torch."""

    ep = None

    def __init__(self, over_codes: LoraExperts) -> None:
        super().__init__()
        self.scaling = over_codes.scaling
        self.w13, self.w2 = (dequantize(w, torch.bfloat16) for w in (over_codes.w13, over_codes.w2))
        factors = (over_codes.a13, over_codes.b13, over_codes.a2, over_codes.b2)
        self.factors = nn.ParameterList(p["default"].detach().clone() for p in factors)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        a13, b13, a2, b2 = (p.to(torch.bfloat16) for p in self.factors)
        out = torch.zeros_like(x, dtype=torch.float32)
        for e in range(len(self.w13)):
            tokens, slots = (index == e).nonzero(as_tuple=True)
            rows = x[tokens]
            gate, up = (rows @ self.w13[e].T + self.scaling * (rows @ a13[e].T @ b13[e].T)).chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
            y = hidden @ self.w2[e].T + self.scaling * (hidden @ a2[e].T @ b2[e].T)
            out = out.index_add(0, tokens, y.float() * weights[tokens, slots, None])
        return out.to(x.dtype)


def adapted(model: Model, format: BlockScaledFormat, activations: torch.dtype | None, seed: int) -> Model:
    """A copy of a model, frozen, with adapters over codes of its experts."""
    torch.manual_seed(seed)
    made = copy.deepcopy(model).requires_grad_(False)
    blocks: Any = made.blocks
    for block in blocks:
        w13, w2 = (quantize(w.detach(), format, kind="weight") for w in (block.experts.w13, block.experts.w2))
        block.experts = LoraExperts(
            w13, w2, activations=activations, rank=RANK, alpha=ALPHA, dtype=torch.float32
        )  # fmt: skip
        block.experts.ep = None
    return made


def dequantized(model: Model) -> Model:
    """The same adapters over dequantized weights."""
    made = copy.deepcopy(model)
    blocks: Any = made.blocks
    for block in blocks:
        block.experts = Dequantized(block.experts)
    return made


def faulty(model: Model) -> Model:
    """The same adapters, each with the gradients of the expert before."""
    made = copy.deepcopy(model)
    for p in made.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient.roll(1, 0))
    return made


class Trained:
    """Adapters with their optimizer, and the losses of their steps; without parameters that train, losses alone."""

    def __init__(self, model: Model) -> None:
        self.model, self.losses = model, list[float]()
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE) if parameters else None

    def step(self, ids: torch.Tensor, following: torch.Tensor) -> None:
        loss, entropy = self.model.loss(ids, following)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        self.losses.append(float(entropy))

    @property
    def last(self) -> float:
        """Mean loss of the last fifth of the steps."""
        tail = self.losses[-max(1, round(LAST * len(self.losses))) :]
        return sum(tail) / len(tail)


def train_seed(size: ModelSize, before: int, steps: int, seed: int, device: str) -> dict[str, Trained]:
    """Every contender of a seed, by name."""
    start = Contender("bf16", RECIPES["bf16"], size, seed, before, device)
    generator = torch.Generator().manual_seed(seed)

    def batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, following = draw_batch(text, size.batch, size.length, generator)
        return ids.to(device), following.to(device)

    first, second = help_topics(), library_sources()
    for _ in range(before):
        start.step(*batch(first))
    contenders: dict[str, Trained] = {}
    for name, (format, activations) in FORMATS.items():
        over_codes = adapted(start.model, format, activations, seed)
        contenders[name] = Trained(over_codes)
        contenders[f"{name}, dequantized"] = Trained(dequantized(over_codes))
        contenders[f"{name}{FAULT}"] = Trained(faulty(over_codes))
        contenders[f"{name}, frozen"] = Trained(copy.deepcopy(over_codes).requires_grad_(False))
    for _ in range(steps):
        ids, following = batch(second)
        for contender in contenders.values():
            contender.step(ids, following)
    return contenders


def run(size: ModelSize, before: int, steps: int, seeds: int, device: str) -> tuple[list[Verdict], dict[str, Any]]:
    """The verdicts, of each format over codes and with the fault, and the record."""
    by_seed = []
    for seed in range(seeds):
        by_seed.append(train_seed(size, before, steps, seed, device))
        print(f"seed {seed}: " + ", ".join(f"{n} {c.last:.4f}" for n, c in by_seed[-1].items()), flush=True)
    verdicts = []
    for name in FORMATS:
        for kind in ("", FAULT):
            columns = [[c[n].last for c in by_seed] for n in (name + kind, f"{name}, dequantized", f"{name}, frozen")]
            verdicts.append(Verdict(name + kind, *columns))
    record = {
        "kind": "adapter_parity", "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device,
        "torch": torch.__version__, "size": asdict(size), "before": before, "steps": steps, "rank": RANK, "alpha": ALPHA,
        "limits": {"mean": LIMIT, "seed": SEED_LIMIT, "learned": LEAST_LEARNED},
        "verdicts": [asdict(v) | {"difference": v.difference, "learned": v.learned, "holds": v.holds} for v in verdicts],
        "losses": [{name: [round(x, 5) for x in c.losses] for name, c in found.items()} for found in by_seed],
    }  # fmt: skip
    return verdicts, record


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--before", type=int, default=150, help="steps before adapters")
    parser.add_argument("--steps", type=int, default=120, help="of adapters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("padless-out/adapter-parity.json"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    verdicts, record = run(SIZES[options.size], options.before, options.steps, options.seeds, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record) + "\n")
    for v in verdicts:
        seeds = ", ".join(f"{d:+.2%}" for d in v.by_seed)
        says = "holds" if v.holds else "does not hold"
        print(f"{v.name} {says}: {v.difference:+.2%} ({seeds}); learned {v.learned:.3f}")
    return int(any(v.holds == v.name.endswith(FAULT) for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
