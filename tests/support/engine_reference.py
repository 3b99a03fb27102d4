"""Engines' completions judged by transformers, which computes the same checkpoint through padless.

The reference is given the engine's tokens, so that a near tie costs one token and not all behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.hub_checkpoints import VOCABULARY, load

LENGTHS = (5, 17, 33, 1, 64, 40)
# Tokens, and logits (tokens, vocabulary) float32 or their logarithms of probabilities, of one prompt.
Completions = list[tuple[list[int], torch.Tensor]]


def prompts() -> list[list[int]]:
    """Random token ids, LENGTHS of them."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


class Reference:
    """Logits of checkpoints in a folder, on the GPU where one is."""

    def __init__(self, root: Path) -> None:
        import padless.integrations.transformers  # noqa: F401

        self.root = root
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._models: dict[str, Any] = {}

    def logits(self, model: str, completions: Completions) -> list[torch.Tensor]:
        """Logits (tokens, vocabulary) for each token that was served, given those before it."""
        if model not in self._models:
            how = {"experts_implementation": "padless", "attn_implementation": "eager"}
            self._models[model] = load(self.root / model, **how).to(self.device)
        found = []
        for prompt, (tokens, _) in zip(prompts(), completions, strict=True):
            with torch.no_grad():
                rows = self._models[model](torch.tensor([prompt + tokens], device=self.device)).logits[0]
            found.append(rows[len(prompt) - 1 : -1].float().cpu())
        return found


def judge(completions: Completions, want: list[torch.Tensor]) -> tuple[float, float, float]:
    """(median of the tokens' errors of logits, share of tokens over 5%, share of tokens that are the reference's).

    A token's logits are compared without their mean, which probabilities do not have.
    """
    logits, reference = (torch.cat(t).double() for t in ([each for _, each in completions], want))
    logits, reference = (t - t.mean(dim=1, keepdim=True) for t in (logits, reference))
    errors = (logits - reference).norm(dim=1) / reference.norm(dim=1)
    alike = reference.argmax(-1) == torch.tensor([token for tokens, _ in completions for token in tokens])
    found = float(errors.median()), float((errors > 0.05).double().mean()), float(alike.double().mean())
    print("median error {:.4f}, over 5%: {:.3f}, tokens alike {:.3f}".format(*found), "of", len(alike))
    return found


def well(completions: Completions, want: list[torch.Tensor], bound: float = 0.02) -> bool:
    """Whether the engine computed what the reference does, but for roundings and near ties of routers and tokens."""
    median, far, alike = judge(completions, want)
    return median < bound and far < 0.15 and alike > 0.93
