"""The layer's checks of `padless verify`, as far as a CPU runs them, and that they notice what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from padless.moe import ops, route, twins
from padless.testing.bits import bits
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify import moe as verify_moe
from padless.verify.fuzz import whole_layer
from padless.verify.fuzz.layers import EDGES, draw_ids
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import check_of
from padless.verify.run import jobs_of

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


@pytest.mark.parametrize("call", ["moe.gather_quantize", "moe.combine"])
def test_rows_that_there_are_not_are_refused_without_kernels(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/moe/test_moe_triton.py has the same problems for kernels."""

    def hostile(arch: str) -> list[Options]:
        return [o for o in SUBJECTS[call].lines(arch) if o.get("hostile")]

    assert check_of(call, hostile).on("reference") == "0 elements"

    def taken(function: Callable[..., object], *arguments: torch.Tensor) -> object:
        """Rows of another routing in the place of these."""
        another = [route(t.long() * 0, 1).inverse if is_inverse(t) else t for t in arguments]
        return function(*another)

    def is_inverse(t: object) -> bool:
        return isinstance(t, torch.Tensor) and t.dtype == torch.int32 and t.dim() == 2

    for name in ("gather_quantize", "combine", "combine_backward"):
        monkeypatch.setitem(ops._FUNCTIONS, name, partial(taken, ops._FUNCTIONS[name]))
    with pytest.raises(AssertionError, match="rows that there are not were taken"):
        check_of(call, hostile).on("reference")


# --- the layer -------------------------------------------------------------------------------------------

LAYERS = {"MoE layer": whole_layer.lines, "MoE layer at edges": whole_layer.edge_lines}


def first(lines: Callable[[str], Iterator[Options]], number: int, arch: str) -> list[Options]:
    """The first problems of FP8_BLOCK, of few tokens."""
    return [o | {"tokens": min(o["tokens"], 24)} for o in itertools.islice(lines(arch), number)]


def checked_layers(name: str, number: int = 1) -> str:
    return check_of("moe.moe", partial(first, LAYERS[name], number)).on("reference", "sm_90a")


@pytest.mark.parametrize("name", [pytest.param("MoE layer", marks=pytest.mark.slow), "MoE layer at edges"])
def test_layers_on_the_cpu(name: str) -> None:
    """The composition is moe() by the reference, and right, and so are its gradients."""
    for arch in ("sm_90a", "sm_100a"):
        assert "elements" in check_of("moe.moe", LAYERS[name]).on("reference", arch)


def test_both_architectures_have_layers() -> None:
    for arch, least in (("sm_90a", 8), ("sm_100a", 3)):
        every = list(whole_layer.lines(arch))
        assert len(every) >= least
        assert len(list(whole_layer.edge_lines(arch))) == len(EDGES) * len(every)
        assert all({"near", "bits", "changes", "replay"} == {*o["properties"]} for o in every)
        assert any(o["gradients"] for o in whole_layer.edge_lines(arch))


Layers = Callable[[whole_layer.Tokens, torch.Tensor], torch.Tensor]


def one_ulp(t: whole_layer.Tokens, out: torch.Tensor) -> torch.Tensor:
    if t.ids.shape[1] > 1 and out.numel():
        bits(out)[-1, -1:] ^= 1
    return out


def by_tokens(t: whole_layer.Tokens, out: torch.Tensor) -> torch.Tensor:
    if out.shape[0] > 1:
        bits(out)[-1, -1:] ^= 1
    return out


def doubled(t: whole_layer.Tokens, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


# What is wrong with the layer's result; what finds it.
PLANTED: dict[str, tuple[Layers, set[str]]] = {
    "a unit": (one_ulp, {"the reference's bits", "the passes one by one"}),
    "a unit of several tokens": (by_tokens, {"the reference's bits", "the passes one by one", "a token alone"}),
    "doubled": (doubled, {"a token is far from float64", "the reference's bits"}),
}


def findings(o: Options) -> set[str]:
    place = place_of("reference")
    whole_layer.judge_moe(o, place)
    return {name for found in place.judge.verdicts().values() for name in found}


@pytest.mark.parametrize("index", range(9))
def test_planted_errors_of_a_layer_are_found(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format; of fewer experts and columns, which the reference is soon done with."""
    smaller = {"tokens": 12, "experts": 5, "i": 128, "properties": ["near", "bits", "changes"]}
    o = [*whole_layer.lines("sm_90a")][index] | smaller
    assert findings(o) == set()
    right = whole_layer.Layer.call
    for wrong, expected in PLANTED.values():
        monkeypatch.setattr(whole_layer.Layer, "call", lambda self, t, wrong=wrong: wrong(t, right(self, t)))
        assert expected <= findings(o)


@pytest.mark.parametrize("planted", ["tail counted", "dx of half", "dweights of others", "moe doubled"])
def test_a_wrong_layer_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin itself is wrong, or the gradient is, or a fused step of the layer."""
    original, backward, forward = twins.route, ops._FUNCTIONS["moe_backward"], ops._FUNCTIONS["combine"]

    def tail_counted(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offs, tokens, inverse = original(ids, num_experts)
        return offs, tokens, torch.where(inverse < 0, -1 - inverse, inverse)

    def wrong_gradient(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dweights = backward(*arguments)
        return (dx / 2, dweights) if planted == "dx of half" else (dx, dweights.flip(0))

    if planted == "tail counted":
        monkeypatch.setattr(twins, "route", tail_counted)
    elif planted == "moe doubled":
        monkeypatch.setitem(ops._FUNCTIONS, "combine", lambda *arguments: 2 * forward(*arguments))
    else:
        monkeypatch.setattr(torch.ops.padless, "moe_backward", wrong_gradient)
    with pytest.raises(AssertionError):
        checked_layers("MoE layer at edges", len(EDGES))


def test_what_the_rehearsal_lists() -> None:
    """Kernels of every pair of formats that the check multiplies."""
    every = [*whole_layer.lines("sm_90a")]
    some = check_of("moe.moe", lambda arch: [every[0], every[7]])
    kernels, problems = kernels_of(some.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert problems == []
    assert {kernel.source for kernel in kernels} >= {
        "sm90_fp8/sm90_fp8_grouped_gemm.cu",
        "sm90_bf16/sm90_bf16_grouped_gemm.cu",
    }
    assert twins.LANES == 256


# --- operators and launches ------------------------------------------------------------------------------


@pytest.mark.slow
def test_operators_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs, and an operator that gives other bits when it is compiled is noticed."""
    monkeypatch.setattr(verify_moe, "DEVICE", "cpu")
    assert "8 operators" in verify_moe.check_operators()
    monkeypatch.setattr(verify_moe, "operators", dict)
    monkeypatch.setattr(verify_moe, "moe", lambda *a: ops.call("combine", a[0], a[1] * 0, None, None, torch.bfloat16))
    monkeypatch.setattr(ops, "call", lambda name, *a: getattr(torch.ops.padless, name)(*a))
    verify_moe.check_operators()
    monkeypatch.setattr(ops, "call", lambda name, *a: a[0] * (3 if torch.compiler.is_compiling() else 1))
    with pytest.raises(AssertionError, match="compiled moe"):
        verify_moe.check_operators()


@pytest.mark.parametrize(
    ("kinds", "early", "said"),
    [
        (["KERNEL"] * 5, 3, "5 launches"),
        (["KERNEL", "MEMSET", "KERNEL"], 2, "nodes are"),
        (["KERNEL"] * 4, 1, "1 launches begin early"),
    ],
)
def test_a_layer_of_more_launches_is_noticed(kinds: list[str], early: int, said: str) -> None:
    verify_moe.judge_launches("a layer", ["KERNEL"] * 4, 2, programmatic=True)
    verify_moe.judge_launches("a layer", ["KERNEL"] * 4, 0, programmatic=False)
    with pytest.raises(AssertionError, match=said):
        verify_moe.judge_launches("a layer", kinds, early, programmatic=True)


def test_decoding_is_of_more_than_one_pair() -> None:
    hopper, blackwell = (list(verify_moe.decoded(arch)) for arch in ("sm_90a", "sm_100a"))
    assert len(blackwell) >= 2
    assert len(hopper) >= 4
    assert {activations for _, activations, options in hopper if options} == {"BF16"}


def test_verify_has_the_checks() -> None:
    assert set(verify_moe.CHECKS) <= set(jobs_of("sm_90a")[0])
    formats = [o["format"] for o in SUBJECTS["moe.activate_quantize"].lines("sm_90a")]
    parts = [[name for name in formats if name in part] for part in verify_moe.ACTIVATED.values()]
    assert sorted(str(name) for part in parts for name in part) == sorted(map(str, formats))
    assert all(len(part) >= len(formats) // 4 for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", verify_moe.CHECKS)
def test_on_the_gpu(name: str) -> None:
    verify_moe.CHECKS[name]()
