"""Sums, operands and poisoned outputs for the tests of the epilogue's definition."""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.ops.epilogue_run import with_outputs

POISON_BYTE = 0xA5


def sums(m: int, n: int, seed: int = 0) -> torch.Tensor:
    """Sums over many magnitudes, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=generator) * torch.exp(3 * torch.randn(m, n, generator=generator))
    return x.masked_fill(torch.rand(m, n, generator=generator) < 0.02, 0.0)


def poisoned(
    epilogue: Epilogue, m: int, n: int, groups: int, m_aligned: int = 1, **numbers: torch.Tensor
) -> EpilogueTensors:
    """Outputs full of a byte pattern, so that what is not written shows; amax starts at -inf."""
    new = with_outputs(epilogue, EpilogueTensors(), m, n, groups, torch.device("cpu"), m_aligned)
    for name, t in vars(new).items():
        if isinstance(t, torch.Tensor) and name != "amax":
            t.untyped_storage().fill_(POISON_BYTE)
    return replace(new, **numbers)


def numbers_for(m: int, n: int, groups: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "alpha": torch.randn(groups, generator=generator),
        "bias": torch.randn(groups, n, generator=generator),
        "prob": torch.rand(m, generator=generator),
    }
