"""LoRA over frozen FP8 and MXFP4 experts learns as LoRA over the same experts dequantized.

What would convince a sceptic, written before the first run: the demo's small model is trained, its experts are
quantized, everything is frozen, and adapters of rank 8 learn another text from there. The other contender has bfloat16
copies of the dequantized weights, torch's own products and autograd, and begins with the same A. Three seeds. Limits:

- mean over seeds of the last fifth's loss: within 0.5% of the dequantized one's, above or below;
- each seed within 1%;
- adapters over dequantized weights take at least 0.05 nats a byte off the frozen model's loss on the same batches:
  where nothing is learned, equal losses prove nothing;
- the same run with adapters that have the gradients of the expert before them is not within these limits.
"""

from __future__ import annotations

import math

import pytest

from adapter_parity import Verdict

FROZEN = (3.0, 3.1, 2.9)
LASTS = (2.5, 2.6, 2.4)


def judged(*ratios: float, frozen: tuple[float, ...] = FROZEN) -> bool:
    lasts = LASTS[: len(ratios)]
    mine = [last * ratio for last, ratio in zip(lasts, ratios, strict=True)]
    verdict = Verdict("fp8", mine, lasts, frozen[: len(ratios)])
    assert verdict.by_seed == pytest.approx([ratio - 1 for ratio in ratios], nan_ok=True)
    return verdict.holds


def test_the_judge_of_adapters():
    assert judged(1.004, 1.004, 1.004)
    assert judged(1.009, 0.993, 1.0)  # seeds differ, their mean does not
    assert not judged(1.006, 1.006, 1.004)
    assert not judged(0.994, 0.994, 0.996), "a lower loss is a difference too: it is another computation"
    assert not judged(1.011, 0.99, 1.0)
    assert not judged(1.0, math.nan, 1.0)
    assert not judged(1.0, 1.0), "two seeds are not three"
    assert not judged(1.0, 1.0, 1.0, frozen=(2.54, 3.1, 2.9)), "nothing was learned"
