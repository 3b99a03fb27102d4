"""The layer's checks of `padless verify`, as far as a CPU runs them, and that they notice what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from padless.moe import ops, twins
from padless.testing.bits import bits
from padless.verify import moe as verify_moe
from padless.verify.fuzz.layers import EDGES, draw_ids
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import check_of
from padless.verify.moe_edges import PASSES

CALLS = {
    "moe.route": "route",
    "moe.gather_quantize": "route_quantize",
    "moe.activate_quantize": "activate_quantize",
    "moe.combine": "combine",
}

OTHERS = [("moe.combine", "combine_backward"), ("moe.gather_quantize", "gather_quantize")]


def few(call: str, edges: bool, arch: str) -> list[Options]:
    """The smallest of a call's fixed problems, or those of the edges."""
    lines = [*SUBJECTS[call].lines(arch)]
    at_edges = [o for o in lines if o.get("n", o.get("k")) == 256 or o.get("experts") == 20]
    return at_edges if edges else [o for o in lines if sum(o.get(name) or 0 for name in ("tokens", "rows")) <= 64][:40]


def checked(call: str, edges: bool = False) -> str:
    return check_of(call, partial(few, call, edges)).on("reference")


@pytest.mark.parametrize("call", CALLS)
def test_passes_on_the_cpu(call: str) -> None:
    """The code of the check runs; what it compares are the twins with themselves, and with other rules."""
    assert int(checked(call).split()[0]) > 1000
    assert int(checked(call, edges=True).split()[0]) > 1000


def test_edges_are_there() -> None:
    """No tokens, k of 1 and 16, an expert with every slot, ids that are no expert."""
    found = [draw_ids(o, place_of("reference")) for o in EDGES]
    assert any(len(ids) == 0 for ids in found)
    assert {ids.shape[1] for ids in found} >= {1, 16}
    assert any(len(ids) > 128 and ids.unique().tolist() == [19] for ids in found)
    assert any(len(ids) and ((ids < 0) | (ids >= 20)).all() for ids in found)
    assert any((ids < 0).any() and (ids >= 20).any() and ((ids >= 0) & (ids < 20)).any() for ids in found)
    for call in CALLS:
        slots = {o["tokens"] * o["top_k"] for o in EDGES}
        assert slots <= {o.get("rows", o.get("tokens", 0) * o.get("top_k", 0)) for o in SUBJECTS[call].lines("sm_90a")}


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(
    ("call", "planted"),
    [*CALLS.items(), ("moe.combine", "combine_backward"), ("moe.gather_quantize", "gather_quantize")],
)
def test_a_wrong_pass_is_noticed(call: str, planted: str, edges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last element of one output is another."""
    function = ops._FUNCTIONS[planted]

    def wrong(*arguments: object) -> object:
        result = function(*arguments)
        first = result if isinstance(result, torch.Tensor) else result[-1 if planted != "activate_quantize" else 0]
        if first.numel():
            bits(first)[tuple(size - 1 for size in first.shape)] ^= 1
        return result

    monkeypatch.setitem(ops._FUNCTIONS, planted, wrong)
    with pytest.raises(AssertionError):
        checked(call, edges)


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
def test_on_the_gpu() -> None:
    every: list[Callable[[], str]] = [*PASSES.values(), verify_moe.CHECK]
    for check in every:
        check()
