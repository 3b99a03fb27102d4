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

from adapter_parity import FAULT, FORMATS, Verdict, run
from padless.demo.train.model import ModelSize

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


@pytest.fixture(scope="module")
def small() -> dict[str, Verdict]:
    size = ModelSize(layers=1, hidden=128, heads=2, experts=4, top_k=2, intermediate=128, length=32, batch=4)
    verdicts, record = run(size, before=20, steps=30, seeds=3, device="cpu")
    assert [v["name"] for v in record["verdicts"]] == [v.name for v in verdicts]
    return {v.name: v for v in verdicts}


@pytest.mark.slow
def test_adapters_over_codes_learn_as_over_dequantized_weights(small: dict[str, Verdict]):
    """The small form: one layer of four experts, by the same limits; and the fault is outside of them."""
    for name in FORMATS:
        assert small[name].holds, small[name]
        assert small[name].by_seed != [0.0] * 3, "another computation has other roundings"
        assert not small[name + FAULT].holds, small[name + FAULT]
