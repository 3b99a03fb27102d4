"""The layer's checks of `padless verify`, as far as a CPU runs them, and that they notice what is wrong."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from padless.moe import ops, twins
from padless.verify import moe as verify_moe


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "DEVICE", "cpu")


def _check_passes() -> list[str]:
    return [check() for check in verify_moe.PASSES.values()]


def test_passes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the check runs; what it compares are the twins with themselves."""
    monkeypatch.setattr(verify_moe, "ROUTINGS", verify_moe.ROUTINGS[:3])
    monkeypatch.setattr(verify_moe, "GATHERS", ((9, 3, 4, 272),))
    monkeypatch.setattr(verify_moe, "ACTIVATIONS", verify_moe.ACTIVATIONS[:2])
    assert all("bit for bit" in detail for detail in _check_passes())


@pytest.mark.parametrize("planted", ["route", "combine", "combine_backward"])
def test_a_wrong_pass_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "ROUTINGS", ((9, 2, 4),))
    monkeypatch.setattr(verify_moe, "GATHERS", ((9, 3, 4, 272),))
    monkeypatch.setattr(verify_moe, "ACTIVATIONS", ())
    function = ops._FUNCTIONS[planted]

    def wrong(*arguments: object) -> object:
        result = function(*arguments)
        first = result if isinstance(result, torch.Tensor) else result[-1]
        if first.numel():
            first.view(-1)[-1] += 1
        return result

    monkeypatch.setitem(ops._FUNCTIONS, planted, wrong)
    with pytest.raises(AssertionError):
        _check_passes()


@pytest.mark.parametrize("index", range(9))
def test_layers_on_the_cpu(index: int) -> None:
    """The composition is moe() by the reference, and right; planted errors show."""
    weights, activations, sizes, options, with_bias = verify_moe.CASES[index]
    small = (min(sizes[0], 24), *sizes[1:])
    layer = verify_moe.draw_layer(weights, activations, small, options, with_bias, index)
    out = layer.run()
    verify_moe.same_bits("moe()", out, verify_moe.composed(layer, "cpu"))
    limit = verify_moe.BOUNDS[verify_moe.activations_of(weights, activations)]
    assert verify_moe.largest_error(out, layer) < limit
    moved = replace(layer, weights=layer.weights.roll(1, dims=1))
    assert verify_moe.largest_error(moved.run(), layer) > limit or limit > 0.3
    with pytest.raises(AssertionError):
        verify_moe.same_bits("moe()", moved.run(), verify_moe.composed(layer, "cpu"))


def test_both_architectures_have_layers() -> None:
    for arch, least in (("sm_90a", 8), ("sm_100a", 3)):
        assert sum(1 for _ in verify_moe.layers(arch)) >= least


def test_nan_is_any_nan_but_a_value_is_not() -> None:
    got, want = torch.tensor([float("nan"), -0.0]), torch.tensor([-float("nan"), 0.0])
    verify_moe.same_bits("NaN", got[:1], want[:1])
    with pytest.raises(AssertionError):
        verify_moe.same_bits("zeros", got, want)


def test_what_the_rehearsal_lists() -> None:
    """Kernels of every pair of formats that the check multiplies."""
    from padless.testing.compile_ahead import Gpu, kernels_of

    some = (verify_moe.CASES[0], verify_moe.CASES[7])
    with mock.patch.object(verify_moe, "CASES", some):
        kernels, problems = kernels_of(verify_moe.CHECK.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert problems == []
    assert {kernel.source for kernel in kernels} >= {
        "sm90_fp8/sm90_fp8_grouped_gemm.cu",
        "sm90_bf16/sm90_bf16_grouped_gemm.cu",
    }
    assert twins.LANES == 256


@pytest.mark.gpu
def test_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "DEVICE", "cuda")
    _check_passes()
    verify_moe.CHECK()
