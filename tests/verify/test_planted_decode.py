"""Bugs planted in a layer of few tokens, one at a time, and which comparison finds each.

In the kernel's place stands the layer of the reference, which has the bits of its passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from padless.kernels.sm90_moe_decode.config import LayerShape
from padless.kernels.sm90_moe_decode.config_fp4 import Fp4LayerShape
from padless.testing.bits import bits
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz import case, decode, whole_layer
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.run import jobs_of

pytestmark = pytest.mark.usefixtures("one_thread")

PASSES, TURNED, ALONE, AFTER, MOVED, REPLAY = (
    "the passes one by one", "tokens in reverse", "a token alone", "the same after other tokens", "from call to call",
    "replay",
)  # fmt: skip
SOME = "some tokens"
BLOCKS = {"FP8_BLOCK": 128, "MXFP4": 32, "MXFP4_REPACKED": 64}  # of H and I
KINDS = (SOME, PASSES, TURNED, ALONE, AFTER, MOVED, REPLAY)


@dataclass
class Planted:
    """A call with a bug: its operands, the layer that is right, and what earlier calls left."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    layer: Callable[..., torch.Tensor]
    experts: int
    memory: dict[str, Any]

    def result(self, **other: Any) -> torch.Tensor:
        p = replace(self, **other)
        return self.layer(p.x, p.ids, p.weights, shared=p.shared)


def one_ulp(p: Planted) -> torch.Tensor:
    out = p.result()
    bits(out)[0, 3:4] += 1
    return out


def no_shared(p: Planted) -> torch.Tensor:
    return p.result(shared=None)


def any_id_is_an_expert(p: Planted) -> torch.Tensor:
    return p.result(ids=p.ids.clamp(0, p.experts - 1))


def an_expert_once_a_token(p: Planted) -> torch.Tensor:
    """The second slot of a token that names an expert again is lost."""
    ids = p.ids.clone()
    for token in ids:
        for slot in range(1, ids.shape[1]):
            if token[slot] in token[:slot]:
                token[slot] = -1
    return p.result(ids=ids)


def an_expert_once(p: Planted) -> torch.Tensor:
    """A row for all tokens of an expert: that of the first of them."""
    x = p.x.clone()
    for token in range(1, x.shape[0]):
        shared = [first for first in range(token) if set(p.ids[first].tolist()) & set(p.ids[token].tolist())]
        if shared:
            x[token] = p.x[shared[0]]
    return p.result(x=x)


def by_number_of_tokens(p: Planted) -> torch.Tensor:
    out = p.result()
    if out.shape[0] > 1:
        bits(out)[-1, :1] += 1
    return out


def by_position(p: Planted) -> torch.Tensor:
    out = p.result()
    if out.shape[0] > 1:
        bits(out)[1, :1] += 1
    return out


def old_hidden_rows(p: Planted) -> torch.Tensor:
    """The first token's result is what the call before left where that was of as many tokens."""
    out = p.result()
    before, p.memory["out"] = p.memory.get("out"), out
    return out if before is None or before.shape != out.shape else torch.cat([before[:1], out[1:]])


def every_seventh(p: Planted) -> torch.Tensor:
    p.memory["calls"] = p.memory.get("calls", 0) + 1
    out = p.result()
    if p.memory["calls"] % 7 == 0:
        bits(out)[0, :1] += 1
    return out


def remembered_ids(p: Planted) -> torch.Tensor:
    """Ids of the first call on these buffers: what a graph may not remember."""
    key = str(p.ids.data_ptr())
    ids, _ = p.memory.setdefault(key, (p.ids.clone(), p.ids))
    return p.result(ids=ids)


Bug = Callable[[Planted], torch.Tensor]
BUGS: dict[str, tuple[Bug, set[str]]] = {
    "one unit off": (one_ulp, {PASSES, TURNED, ALONE}),
    "no shared expert": (no_shared, {PASSES}),
    "any id is an expert": (any_id_is_an_expert, {PASSES}),
    "an expert once a token": (an_expert_once_a_token, {PASSES}),
    "a row for all tokens of an expert": (an_expert_once, {PASSES, TURNED, ALONE}),
    "bits that depend on the number of tokens": (by_number_of_tokens, {PASSES, TURNED, ALONE}),
    "bits that depend on the position": (by_position, {PASSES, TURNED}),
    "hidden rows of the call before": (old_hidden_rows, {TURNED, REPLAY}),
    "bits that move": (every_seventh, {MOVED}),
    "ids remembered": (remembered_ids, {REPLAY}),
}


def found_by(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What finds the bug in the fixed problems, cut to a block of each dimension."""
    right, memory = whole_layer.moe.moe, dict[str, Any]()

    def planted(x: Any, ids: Any, weights: Any, w13: Any, w2: Any, *, shared: Any, **how: Any) -> torch.Tensor:
        def layer(x: Any, ids: Any, weights: Any, *, shared: Any) -> torch.Tensor:
            return right(x, ids, weights, w13, w2, shared=shared, **how)

        return bug(Planted(x, ids, weights, shared, layer, w2.logical_shape[0], memory))

    monkeypatch.setattr(case, "REPEATS", 7)
    monkeypatch.setattr(whole_layer.moe, "moe", planted)
    place = place_of("reference")
    for o in decode.lines("sm_90a"):
        memory.clear()
        block = BLOCKS[o["w"]]
        decode.judge_decode(o | {"h": block, "i": block, "experts": min(o["experts"], 4)}, place)
    names = [name for found in place.judge.verdicts().values() for name in found]
    return {next(kind for kind in KINDS if kind in name) for name in names}


def test_nothing_is_wrong_with_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by(Planted.result, monkeypatch) == set()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_all_that_should(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug, expected = BUGS[name]
    assert expected <= found_by(bug, monkeypatch)


# --- the fixed problems ------------------------------------------------------------------------------------


def test_problems_have_what_is_hard_and_are_one_launch() -> None:
    stages = {name: set[int]() for name in BLOCKS}
    for o in (every := list(decode.lines("sm_90a"))):
        sizes = (o["tokens"], o["top_k"], o["experts"], o["h"], o["i"])
        shape: LayerShape | Fp4LayerShape = (
            LayerShape(*sizes) if o["w"] == "FP8_BLOCK" else Fp4LayerShape(*sizes, shares=132)
        )
        assert shape.fits, o
        assert o["tokens"] <= o["most"], o
        assert o["h"] != o["i"] or o["experts"] == 1024, o
        stages[o["w"]].add(shape.stages)
    assert {1, 2, 5, 8, 16} <= {o["tokens"] for o in every}
    assert max(o["experts"] for o in every) == 1024
    for name in ("id_dtype", "weights", "shared", "same", "gate_up", "limit", "bias13", "most"):
        assert len({o[name] for o in every}) > 1, name
    assert all(len(depths) > 1 for depths in stages.values()), stages


@pytest.mark.parametrize(
    "fmt", ["FP8_BLOCK", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MXFP4", "MXFP4_REPACKED"))]
)
def test_they_pass_in_the_emulator(fmt: str) -> None:
    """The kernel itself on a block of each dimension, several tokens."""
    place, block = place_of("emulator"), BLOCKS[fmt]
    o = next(o for o in decode.lines("sm_90a") if o["w"] == fmt and o["shared"])
    with settings_of("emulator"):
        cut = {"tokens": 2, "top_k": 2, "experts": 3, "h": block, "i": block, "properties": ["changes", "replay"]}
        decode.judge_decode(o | cut, place)
    assert "elements" in place.judge.outcome()


def test_the_check_is_of_hopper_alone() -> None:
    assert "layers in one launch" in jobs_of("sm_90a")[0]
    assert "layers in one launch" not in jobs_of("sm_100a")[0]
    assert "sm_100a" not in SUBJECTS["moe.decode"].kernels
