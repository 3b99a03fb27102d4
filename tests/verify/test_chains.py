"""Chains of calls: what would make the check on the GPU pass for a wrong reason.

It compares runs with and without pauses. That sees a call that reads too early only if what it reads then is wrong: so
the two inputs have to differ in every layer, the other input's codes, scales or offsets have to change the products of
all layers, and a run has to be a function of its input alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.verify import chains as verify_chain
from padless.verify.chains import Chain, assert_all_differ, formats_of, make_chain


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_chain, "WIDTH", 128)
    monkeypatch.setattr(verify_chain, "LAYERS", 2)
    monkeypatch.setattr(verify_chain, "SIZES", ((3, 0, 70, 1), (30, 9, 0, 35)))


@pytest.mark.parametrize("format", verify_chain.FORMATS, ids=lambda f: f.name)
def test_the_two_inputs_differ_in_every_layer_and_a_run_depends_on_its_input_alone(format: object) -> None:
    chain = make_chain(format, "cpu", "reference")  # type: ignore[arg-type]
    results = []
    for which in (0, 1, 0):
        chain.load(which)
        results.append(chain.run())
    assert_all_differ(results[0], results[1])
    for first, again in zip(results[0], results[2], strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, again)


def test_whatever_of_an_input_is_stale_shows_in_every_layer() -> None:
    def run(x: BlockScaledTensor, offs: torch.Tensor) -> list[torch.Tensor]:
        return replace(chain, given=(x, offs)).run()

    chain = make_chain(FP8_BLOCK, "cpu", "reference")
    (this, offs), (other, other_offs) = chain.inputs
    right = run(this, offs)
    stale_codes = BlockScaledTensor(other.data, this.scale, FP8_BLOCK)
    stale_scales = BlockScaledTensor(this.data, other.scale, FP8_BLOCK)
    for stale in (run(stale_codes, offs), run(stale_scales, offs), run(this, other_offs)):
        for layer, (x, y) in enumerate(zip(right, stale, strict=True)):
            assert not torch.equal(x, y), f"layer {layer}"


def test_inputs_of_no_difference_are_refused() -> None:
    with pytest.raises(AssertionError, match="layer 1 gives 100% of its products"):
        assert_all_differ([torch.zeros(4), torch.ones(4)], [torch.ones(4), torch.ones(4)])


def test_a_pause_comes_after_every_step() -> None:
    chain: Chain = make_chain(FP8_BLOCK, "cpu", "reference")
    pauses: list[int] = []
    chain.run(lambda: pauses.append(1))
    assert len(pauses) == 3 * verify_chain.LAYERS


def test_the_emulated_kernels_run_the_chain_and_are_right() -> None:
    """The same calls by the kernels, which are launched to begin early: their waits are checked on the way."""
    chain = make_chain(FP8_BLOCK, "cpu", "emulator")
    chain.load(0)
    by_reference = replace(chain, backend="reference", out=torch.empty_like(chain.out)).run()
    for x, y in zip(chain.run(), by_reference, strict=True):
        assert float((x - y).float().norm() / y.float().norm()) < 0.02


def test_every_architecture_has_chains() -> None:
    assert [f.name for f in formats_of("sm_90a")] == ["FP8_BLOCK", "MXFP8", "MXFP4"]
    assert [f.name for f in formats_of("sm_100a")] == ["FP8_BLOCK", "MXFP8", "MXFP4"]
