"""Random sequences in which there is something to learn: half of the tokens follow from the one before them."""

from __future__ import annotations

import torch


def sequences(count: int, length: int, vocab: int, seed: int) -> torch.Tensor:
    """(count, length) int64 on the CPU.

    A token is, with probability 1/2, the successor that a random table has for the one before, else drawn with
    probabilities that fall as 1 / (rank + 10).
    """
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(vocab, generator=generator)
    frequencies = 1 / (torch.arange(vocab) + 10.0)
    found = torch.multinomial(frequencies, count * length, replacement=True, generator=generator).view(length, count)
    follows = torch.rand((length, count), generator=generator) < 0.5
    for i in range(1, length):
        found[i] = torch.where(follows[i], successor[found[i - 1]], found[i])
    return found.T.contiguous()
