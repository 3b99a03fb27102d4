"""moe() against a float64 layer, token by token, and that a token does not notice the tokens around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledTensor, quantize
from padless.moe import Routing, moe, twins
from support import moe_layer_problem as problems
from support.moe_layer_problem import PAIRS, Layer, dense, draw_layer, pair_name

# Largest error of a token over the typical size of a token's result, by the activations' format: two roundings to e4m3
# (2^-4 each, at most), e2m1 (2^-2) or bfloat16 (2^-9) in what is summed.
BOUNDS = {"FP8_BLOCK": 0.09, "MXFP8": 0.09, "NVFP4": 0.35, "MXFP4": 0.5, "BF16": 0.01}


def activations_of(pair: Any) -> str:
    from padless.moe.layer import ACTIVATIONS

    fmt, activations = pair
    if activations is torch.bfloat16:
        return "BF16"
    return (activations or ACTIVATIONS[fmt]).name


def check_layer(out: torch.Tensor, layer: Layer, bound: float) -> None:
    """Every token's error over its norm, with which that of quantization grows, or, for a smaller token, over the root
    of the mean square of all tokens' norms.
    """
    want = dense(layer)
    assert out.shape == want.shape
    assert out.isfinite().all()
    norms = want.norm(dim=1)
    error = (out.double() - want).norm(dim=1) / norms.clamp(min=float(norms.square().mean().sqrt()) or 1.0)
    assert float(error.max()) <= bound, f"token {int(error.argmax())} is off by {float(error.max()):.3f}"


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_every_format(pair: Any) -> None:
    layer = draw_layer(pair, shared=True)
    out = layer.run(moe)
    assert out.dtype == torch.bfloat16
    check_layer(out, layer, BOUNDS[activations_of(pair)])


KINDS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0, "bias": True},
    "limit that cuts": {"limit": 0.5, "gate_up": "concatenated"},
    "interleaved": {"gate_up": "interleaved"},
    "bias": {"bias": True},
    "relu2": {"activation": "relu2", "gated": False},
    "gelu": {"activation": "gelu", "gated": False, "bias": True},
    "silu": {"activation": "silu", "gated": False},
    "geglu": {"activation": "geglu", "gate_up": "interleaved"},
}


@pytest.mark.parametrize("pair", [(FP8_BLOCK, None), (MXFP4, torch.bfloat16)], ids=pair_name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation(kind: str, pair: Any) -> None:
    layer = draw_layer(pair, tokens=15, seed=3, **KINDS[kind])
    check_layer(layer.run(moe, out_dtype=torch.float32), layer, BOUNDS[activations_of(pair)])


@pytest.mark.parametrize(
    "planted",
    ["weight of the wrong slot", "tail counted", "gate for up", "no bias", "no limit", "rows of another expert"],
)
def test_a_wrong_layer_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = draw_layer((FP8_BLOCK, None), tokens=40, bias=True, limit=1.0, up_offset=1.0)
    changes: dict[str, Callable[[], Layer]] = {
        "weight of the wrong slot": lambda: replace(layer, weights=layer.weights.roll(1, dims=1)),
        "gate for up": lambda: replace(layer, options=layer.options | {"gate_up": "alternating"}),
        "no bias": lambda: replace(layer, options=layer.options | {"bias13": None}),
        "no limit": lambda: replace(layer, options=layer.options | {"limit": None}),
        "tail counted": lambda: layer,
        "rows of another expert": lambda: layer,
    }
    original = twins.route

    def route(ids: torch.Tensor, num_experts: int) -> Routing:
        offs, tokens, inverse = original(ids, num_experts)
        if planted == "tail counted":
            offs = torch.cat([offs[:-1], torch.full_like(offs[-1:], tokens.shape[0])])
            inverse = torch.where(inverse < 0, -1 - inverse, inverse)
        else:
            offs = offs.roll(1).cummax(0).values
        return Routing(offs, tokens, inverse)

    if planted in ("tail counted", "rows of another expert"):
        monkeypatch.setattr(twins, "route", route)
    # Tokens without an expert at all hide nothing: their result is 0.
    with pytest.raises(AssertionError):
        check_layer(changes[planted]().run(moe), layer, BOUNDS["FP8_BLOCK"])


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_a_token_does_not_notice_the_others(pair: Any) -> None:
    """Alone, in pieces, permuted and with tokens behind: the same bits."""
    layer = draw_layer(pair, tokens=23, shared=True, seed=5)
    out = layer.run(moe)
    for tokens in (torch.tensor([4]), torch.tensor([22]), torch.arange(3, 17), torch.randperm(23)):
        assert torch.equal(layer.only(tokens).run(moe), out[tokens])
    longer = draw_layer(pair, tokens=40, shared=True, seed=6)
    both = replace(
        layer,
        x=torch.cat([longer.x, layer.x]),
        ids=torch.cat([longer.ids, layer.ids]),
        weights=torch.cat([longer.weights, layer.weights]),
        options=layer.options | {"shared": torch.cat([longer.options["shared"], layer.options["shared"]])},
    )
    assert torch.equal(both.run(moe)[40:], out)


def test_a_scale_of_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVFP4's global scale of all tokens the check above fails."""
    layer = draw_layer((NVFP4, None), tokens=9)
    layer.x[4] *= 170
    both, alone = (
        part.run(moe, global_scale1=part.x.float().abs().amax() / 2688)
        for part in (layer, layer.only(torch.tensor([1])))
    )
    assert not torch.equal(both[1:2], alone)


@pytest.mark.parametrize("backend", ["emulator", "emulator:sm_100a"])
def test_in_the_emulator(backend: str) -> None:
    """Kernels' bits do not depend on the batch either, and are right."""
    pair = (FP8_BLOCK, None) if backend == "emulator" else (MXFP8, None)
    layer = draw_layer(pair, tokens=5, top_k=2, experts=2, h=128, i=128, seed=7)
    out = layer.run(moe, backend=backend)
    check_layer(out, layer, 0.09)
    assert torch.equal(layer.only(torch.tensor([3])).run(moe, backend=backend), out[3:4])
    assert torch.equal(layer.only(torch.tensor([4, 0, 2])).run(moe, backend=backend), out[[4, 0, 2]])


ON_HOPPER = [("emulator", pair) for pair in PAIRS if pair != (MXFP4, MXFP4)]
ON_BLACKWELL = [
    ("emulator:sm_100a", pair)
    for pair in ((FP8_BLOCK, None), (MXFP8, None), (NVFP4, None), (MXFP4, MXFP4), (MXFP4, MXFP8))
]


@pytest.mark.slow
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved", "alternating"])
@pytest.mark.parametrize(("backend", "pair"), ON_HOPPER + ON_BLACKWELL)
def test_every_format_in_the_emulator(backend: str, pair: Any, gate_up: str) -> None:
    """I is no multiple of 128; in each kernel a token alone has the bits that it has among others."""
    layer = draw_layer(pair, tokens=3, top_k=2, experts=2, h=128, i=192, seed=7, gate_up=gate_up)
    out = layer.run(moe, backend=backend)
    check_layer(out, layer, BOUNDS[activations_of(pair)])
    assert torch.equal(layer.only(torch.tensor([1])).run(moe, backend=backend), out[1:2])


def test_special_batches() -> None:
    layer = draw_layer((FP8_BLOCK, None), tokens=9)
    empty = layer.only(torch.arange(0)).run(moe)
    assert empty.shape == (0, 160)
    nobody = replace(layer, ids=torch.full_like(layer.ids, 5)).run(moe)
    assert (nobody == 0).all()
    shared = torch.randn(9, 160).bfloat16()
    assert torch.equal(replace(layer, ids=torch.full_like(layer.ids, -1)).run(moe, shared=shared), shared)
    all_to_one = replace(layer, ids=torch.full_like(layer.ids, 3))
    check_layer(all_to_one.run(moe, num_experts=5), all_to_one, 0.09)


def test_many_slots_of_a_token() -> None:
    layer = draw_layer((FP8_BLOCK, None), tokens=6, top_k=16, experts=20)
    check_layer(layer.run(moe), layer, 0.09)


def test_nan_stays_with_its_token() -> None:
    """Tokens of NaN whose slots go to no expert, and one that is computed."""
    layer = draw_layer((FP8_BLOCK, None), tokens=9)
    out = layer.run(moe)
    layer.x[2], layer.x[6] = float("nan"), float("nan")
    layer.ids[2] = -1
    layer.ids[6, 0] = 1
    layer.weights[2] = float("nan")
    again = layer.run(moe)
    others = [0, 1, 3, 4, 5, 7, 8]
    assert torch.equal(again[others], out[others])
    assert (again[2] == 0).all()
    assert again[6].isnan().all()


def test_global_scales() -> None:
    """One value, or one for each expert, for x and between the projections."""
    layer = draw_layer((NVFP4, None), tokens=12, seed=8)
    each = torch.rand(5) * 0.01 + 0.005
    for scale1, scale2 in ((torch.tensor(0.003), torch.tensor([0.01])), (each, each.flip(0))):
        out = layer.run(moe, global_scale1=scale1, global_scale2=scale2)
        check_layer(out, layer, BOUNDS["NVFP4"])
        one = layer.only(torch.tensor([5])).run(moe, global_scale1=scale1, global_scale2=scale2)
        assert torch.equal(one, out[5:6])
    same = layer.run(moe, global_scale1=torch.full((5,), 0.01), global_scale2=torch.full((5,), 0.02))
    assert torch.equal(same, layer.run(moe, global_scale1=torch.tensor(0.01), global_scale2=torch.tensor(0.02)))


@pytest.mark.parametrize("blocked", [False, True])
def test_fused_and_separate_activation_agree(blocked: bool) -> None:
    """Blocked scales of weights, and sizes that the epilogue does not have, go through the separate pass."""
    layer = draw_layer((MXFP8, None), tokens=15, i=128 if blocked else 96)
    if blocked:
        from padless.layouts import to_blocked

        w = layer.w13
        layer = replace(layer, w13=BlockScaledTensor(w.data, to_blocked(w.scale), w.format, None, "blocked"))
    check_layer(layer.run(moe), layer, BOUNDS["MXFP8"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(9, 128)}, "K must be x's columns"),
        ({"x": torch.zeros(9, 160, dtype=torch.int32)}, "x must be"),
        ({"ids": torch.zeros(8, 3, dtype=torch.int64)}, "top_k_index must be"),
        ({"weights": torch.zeros(9, 2)}, "top_k_weights must be 9 x 3"),
        ({"w2": quantize(torch.zeros(5, 160, 256), FP8_BLOCK, kind="weight")}, "w2 must be"),
        ({"w13": torch.zeros(5, 256, 160)}, "w13 must be"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"gate_up": "both"}, "gate_up is 'both'"),
        ({"activation": "relu2", "limit": 1.0}, "has no gate"),
        ({"limit": -1.0}, "limit is -1.0"),
        ({"activation": "geglu", "alpha": 2.0}, "alpha is 2.0"),
        ({"bias13": torch.zeros(5, 255)}, "bias13 must be"),
        ({"bias2": torch.zeros(4, 160)}, "bias2 must be"),
        ({"shared": torch.zeros(9, 161)}, "shared must be 9 x 160"),
        ({"activations": torch.float16}, "activations is torch.float16"),
        ({"global_scale1": torch.ones(())}, "NVFP4 has them"),
        ({"num_experts": 6}, "num_experts is 6"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ({"bias13": torch.zeros(5, 256, requires_grad=True)}, r"bias13 requires grad.*detach"),
    ],
)
def test_errors(change: dict[str, Any], named: str) -> None:
    layer = draw_layer((FP8_BLOCK, None), tokens=9)
    fields = {key: value for key, value in change.items() if key in ("x", "ids", "weights", "w13", "w2")}
    options = {key: value for key, value in change.items() if key not in fields}
    with pytest.raises(ValueError, match=named):
        replace(layer, **fields).run(moe, **options)


@pytest.mark.parametrize("part", ["scale", "global_scale"])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_weights_that_require_grad(name: str, part: str) -> None:
    layer = draw_layer((NVFP4, None), tokens=3)
    w = getattr(layer, name)
    parts = {"scale": w.scale, "global_scale": torch.full((5,), 0.1)}
    if part == "scale":  # of FP8_BLOCK: floating point that can have a gradient
        layer = draw_layer((FP8_BLOCK, None), tokens=3)
        w = getattr(layer, name)
        parts = {"scale": w.scale.clone(), "global_scale": None}
    parts[part].requires_grad_()
    with pytest.raises(ValueError, match=f"{part} requires grad.*detach"):
        BlockScaledTensor(w.data, parts["scale"], w.format, parts["global_scale"], w.scale_layout)
    with torch.no_grad():
        weights = BlockScaledTensor(w.data, parts["scale"], w.format, parts["global_scale"], w.scale_layout)
        assert not replace(layer, **{name: weights}).run(moe).requires_grad


def test_package_exports() -> None:
    import padless

    assert padless.moe.moe is moe
    assert padless.moe.route.__module__ == "padless.moe.routing"
    assert problems.dense is dense
