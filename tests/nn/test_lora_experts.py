"""LoraExperts against float64, against the bits of moe, and its gradients in every state.

What would convince a sceptic: every gradient against autograd in float64 of dequantized weights, per row for dx; tokens
without an adapter to the bit; each token's adapter where tokens differ; groups without rows; planted faults are seen.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from padless import FP8_BLOCK, MXFP4, NVFP4
from padless.moe import Activation, moe
from padless.moe.ops import packed
from padless.nn.lora import experts, frozen, tokens
from support.lora_layer import BF16_PAIR, GPT_OSS, LEAST_DB, check, dout_of, least_db, module, run, truth
from support.moe_layer_problem import PAIRS, draw_layer, exact_activation, pair_name
from support.training_layer import sqnr


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_gradients_of_every_format(pair: Any) -> None:
    layer = draw_layer(pair, bias=True)
    m, dout = module(layer, train_biases=True), dout_of(layer)
    check(run(layer, m, dout, None), truth(layer, m, dout, None), least_db(pair))


@pytest.mark.parametrize("rank", [1, 7, 16, 24, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ranks(rank: int, dtype: torch.dtype) -> None:
    layer = draw_layer(BF16_PAIR, tokens=17, seed=rank)
    m, dout = module(layer, rank=rank, dtype=dtype, rslora=rank == 7), dout_of(layer)
    check(run(layer, m, dout, None), truth(layer, m, dout, None), LEAST_DB["BF16"])


@pytest.mark.parametrize(
    "options",
    [
        GPT_OSS,
        {"gate_up": "interleaved"},
        {"activation": "geglu"},
        {"activation": "gelu", "gated": False},
        {"activation": "relu2", "gated": False},
        {"activation": "silu", "gated": False},
    ],
    ids=str,
)
def test_activations(options: dict[str, Any]) -> None:
    layer = draw_layer(BF16_PAIR, bias=True, **options)
    m, dout = module(layer, train_biases=True), dout_of(layer)
    check(run(layer, m, dout, None), truth(layer, m, dout, None), LEAST_DB["BF16"])


@pytest.mark.parametrize("pair", [(FP8_BLOCK, None), BF16_PAIR], ids=pair_name)
def test_adapters_by_token(pair: Any) -> None:
    """Three adapters and none; experts and pairs without a row; checkpointing has the same bits."""
    layer = draw_layer(pair, tokens=29, experts=7, bias=True)
    layer.ids[layer.ids == 2] = 3
    ids = torch.randint(-1, 4, (29,), generator=torch.Generator().manual_seed(1))  # 3 is no adapter
    m, dout = module(layer, adapters=("one", "two", "three"), rank=5), dout_of(layer)
    got = run(layer, m, dout, ids)
    check(got, truth(layer, m, dout, ids), least_db(pair))
    assert all(torch.equal(t, got[n]) for n, t in run(layer, m, dout, ids, again=True).items())
    with torch.no_grad():
        for slots in (0, 1024):  # by groups of pairs, and looked up by each row
            with mock.patch.object(experts, "_FEW_SLOTS", slots):
                for given in (ids, ids.int()):
                    assert torch.equal(m(layer.x, layer.ids, layer.weights, adapter_ids=given), got["out"])
    base = layer.run(moe)
    none = (ids < 0) | (ids >= 3)
    assert torch.equal(got["out"][none], base[none])
    assert not torch.equal(got["out"][~none], base[~none])
    for n, name in enumerate(m.adapters):  # a token's row does not depend on the others' adapters
        m.active = name
        alone = m(layer.x, layer.ids, layer.weights)
        assert torch.equal(alone[ids == n], got["out"][ids == n])


@pytest.mark.parametrize("pair", [(FP8_BLOCK, None), BF16_PAIR], ids=pair_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_that_look_adapters_up(pair: Any, dtype: torch.dtype) -> None:
    """Without gradients, with slots of no expert, a shared expert and strided arguments: the bits of pairs."""
    layer = draw_layer(pair, tokens=23, bias=True, **GPT_OSS)
    m = module(layer, adapters=("one", "two"), rank=24)
    x, shared = (t.to(dtype).repeat_interleave(2, 1)[:, ::2] for t in (layer.x, layer.x.flip(0)))
    ids, weights = (t.repeat_interleave(2, 1)[:, ::2] for t in (layer.ids, layer.weights))
    ids[5, 0], ids[9] = -1, 77
    chosen = torch.arange(46)[::2] % 4 - 1
    with torch.no_grad(), mock.patch.object(experts, "looked_up_experts", wraps=experts.looked_up_experts) as looked:
        got = m(x, ids, weights, shared, adapter_ids=chosen)
        assert looked.call_count == 1
        with mock.patch.object(experts, "_FEW_SLOTS", 0):
            want = m(x, ids, weights, shared, adapter_ids=chosen)
        assert looked.call_count == 1
        assert got.dtype == want.dtype == dtype
        assert torch.equal(got, want)
        for other in ({"rank": 65}, {"adapters": tuple("abcdefghi")}, {"activations": NVFP4}):
            n = draw_layer((NVFP4, None)) if "activations" in other else layer
            of = module(n, **{name: value for name, value in other.items() if name != "activations"})
            of(n.x, n.ids, n.weights, adapter_ids=torch.zeros(len(n.x), dtype=torch.int64))
        assert looked.call_count == 1
    m(x.clone().requires_grad_(), ids, weights, shared, adapter_ids=chosen)
    assert looked.call_count == 1


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
@pytest.mark.parametrize("options", [{}, {"shared": True, "bias": True, **GPT_OSS}], ids=["plain", "gpt-oss"])
def test_without_adapters_bits_of_moe(pair: Any, options: dict[str, Any]) -> None:
    layer = draw_layer(pair, **options)
    m = module(layer)
    m.active = None
    want, shared = layer.run(moe), layer.options.get("shared")
    with torch.no_grad():
        assert torch.equal(m(layer.x, layer.ids, layer.weights, shared), want)
    x = layer.x.clone().requires_grad_()
    assert torch.equal(m(x, layer.ids, layer.weights, shared), want)
    none = torch.full((len(x),), -1)
    assert torch.equal(m(x, layer.ids, layer.weights, shared, adapter_ids=none), want)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=lambda f: f.name)
def test_runs_of_experts_have_the_bits_of_all(fmt: Any) -> None:
    """The workspace changes no bit, and no tensor of the backward pass is larger than it is said to be."""
    layer = draw_layer((fmt, None), experts=6, tokens=40)
    dy = torch.randn(100, layer.w13.logical_shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    offs = torch.tensor([0, 13, 13, 60, 61, 90], dtype=torch.int32)
    whole = frozen.input_gradient(dy, layer.w13, offs)
    size = layer.w13.logical_shape[1] * layer.w13.logical_shape[2]
    for run_of in (1, 2, 4):
        limit = run_of * size * frozen._bytes_of_a_value(layer.w13)
        with mock.patch.object(frozen, "WORKSPACE_BYTES", limit), Largest() as seen:
            assert torch.equal(frozen.input_gradient(dy, layer.w13, offs)[:90], whole[:90])
        assert size * run_of < seen.elements * 4 <= limit


@pytest.mark.parametrize("fmt", [FP8_BLOCK, MXFP4, NVFP4], ids=lambda f: f.name)
def test_the_operator_of_the_input_gradient(fmt: Any) -> None:
    """Its schema and its fake tensor are those of what it computes."""
    layer = draw_layer((fmt, None))
    dy = torch.randn(30, layer.w13.logical_shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    offs = torch.tensor([3, 3, 9, 20, 30], dtype=torch.int32)
    utils = ("test_schema", "test_faketensor")
    operator = torch.ops.padless.frozen_input_gradient
    torch.library.opcheck(operator, (dy, offs, *packed(layer.w13)), test_utils=utils)


def test_the_operators_of_low_rank_products() -> None:
    """Their schemas and fake tensors are those of what they compute."""
    g = torch.Generator().manual_seed(3)
    rows, factor, t, back = (
        torch.randn(shape, generator=g).bfloat16() for shape in ((9, 32), (2, 5, 32), (9, 16), (2, 48, 5))
    )
    offs, utils = torch.tensor([2, 6, 6, 9], dtype=torch.int32), ("test_schema", "test_faketensor")
    ops, ids = torch.ops.padless, torch.tensor([[0, 3], [1, -1]])
    torch.library.opcheck(ops.adapter_pairs, (ids, torch.tensor([1, -1]), 3, 2), test_utils=utils)
    torch.library.opcheck(ops.low_rank_down, (rows, [factor], offs, 2, 0.5), test_utils=utils)
    tokens = torch.tensor([3, 1, 8], dtype=torch.int32)
    torch.library.opcheck(ops.low_rank_down, (rows, [factor], offs, 2, 0.5, tokens), test_utils=utils)
    for added in (None, torch.randn((9, 48), generator=g).bfloat16()):
        torch.library.opcheck(ops.low_rank_up, (t, [back], offs, 2, 0.5, added), test_utils=utils)
    for format in ("BF16", "FP8_BLOCK"):
        given = (t, [back], offs, 2, 0.5, added, "swiglu", "alternating", 1.7, 7.0, 1.0, format)
        torch.library.opcheck(ops.low_rank_up_activated, given, test_utils=utils)
    chosen = (ids, torch.tensor([1, 0]))
    inverse = torch.tensor([[0, 3], [1, -3]], dtype=torch.int32)
    for given, of_rows in ((rows[:2], None), (rows[:4], inverse)):
        torch.library.opcheck(ops.looked_up_down, (given, [factor] * 2, *chosen, of_rows), test_utils=utils)
    of_slots = (t[:4], [back] * 2, *chosen, inverse, 0.5, added[:4])
    for format in ("BF16", "FP8_BLOCK"):
        given = (*of_slots, "swiglu", "alternating", 1.7, 7.0, 1.0, format)
        torch.library.opcheck(ops.looked_up_up_activated, given, test_utils=utils)
    for shared in (None, torch.ones(2, 48)):
        given = (*of_slots, torch.rand(2, 2), shared, torch.float32)
        torch.library.opcheck(ops.looked_up_combined, given, test_utils=utils)


class Largest(TorchDispatchMode):
    """The largest tensor, in elements of at most four bytes, that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel() * t.element_size() // 4)
        return out


KINDS = (
    {**GPT_OSS, "limit": 0.5},
    {"gate_up": "interleaved", "limit": 0.5},
    {"activation": "geglu", "limit": 0.5, "up_offset": 1.0},
    {"activation": "relu2"},
    {"activation": "gelu"},
    {"activation": "silu"},
)


def slope_db(options: dict[str, Any], used: Activation) -> float:
    """The activation's gradient as ``used`` has it, against float64 of the same values."""
    g = torch.Generator().manual_seed(5)
    h = torch.randn(50, 192, generator=g).bfloat16()
    exact = h.double().requires_grad_()
    out = exact_activation(exact, options)
    dout = torch.randn(out.shape, generator=g).bfloat16()
    out.backward(dout.double())
    return sqnr(tokens.activation_gradient(dout, h, used), exact.grad)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_slope_of_activations(options: dict[str, Any]) -> None:
    """Values beyond the limit included: of the same values, since the gradient jumps there."""
    used = {"kind" if k == "activation" else k: v for k, v in options.items()}
    assert slope_db(options, Activation(**used)) >= 45.0
    for wrong in ({"limit": None}, {"alpha": 1.1}, {"up_offset": 0.5}, {"gate_up": "concatenated"}):
        if any(used.get(name) not in (None, value) for name, value in wrong.items()):  # a fault that this kind can have
            assert slope_db(options, Activation(**(used | wrong))) < 36.0, wrong


def test_planted_faults_are_seen() -> None:
    """Ends of groups that are off by a row in the gradient, and tokens with one another's adapters."""
    layer = draw_layer(BF16_PAIR, bias=True)
    m, dout = module(layer, adapters=("one", "two")), dout_of(layer)
    ids = torch.randint(-1, 2, (len(layer.x),), generator=torch.Generator().manual_seed(4))
    want = truth(layer, m, dout, ids)
    check(run(layer, m, dout, ids), want, LEAST_DB["BF16"])
    right = frozen.input_gradient
    off_by_a_row = lambda dy, w, offs, *others: right(dy, w, (offs - 1).clamp(min=0), *others)  # noqa: E731
    with mock.patch.object(frozen, "input_gradient", off_by_a_row), pytest.raises(AssertionError):
        check(run(layer, m, dout, ids), want, LEAST_DB["BF16"])
    with pytest.raises(AssertionError):
        check(run(layer, m, dout, 1 - ids), want, LEAST_DB["BF16"])


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed: int) -> None:
    """Formats, sizes, ranks, gates, biases, adapters and experts without rows as a seed draws them."""
    rng = random.Random(seed)
    pair = PAIRS[seed % len(PAIRS)]
    options = rng.choice([{}, GPT_OSS, {"gate_up": "interleaved"}, {"activation": "gelu", "gated": False}])
    sizes = {"tokens": rng.randint(1, 150), "experts": rng.randint(1, 9), "top_k": rng.randint(1, 4)}
    bias = rng.random() < 0.5
    layer = draw_layer(
        pair, h=32 * rng.randint(1, 6), i=32 * rng.randint(2, 6), bias=bias, seed=seed, **sizes, **options
    )
    names = tuple(f"adapter{n}" for n in range(rng.randint(1, 4)))
    m = module(layer, rank=rng.choice([1, 3, 8, 17, 64]), adapters=names, train_biases=bias, rslora=rng.random() < 0.5)
    ids = torch.randint(-1, len(names), (len(layer.x),), generator=torch.Generator().manual_seed(seed))
    chosen, dout = ids if rng.random() < 0.7 else None, dout_of(layer)
    check(run(layer, m, dout, chosen), truth(layer, m, dout, chosen), least_db(pair))


@pytest.mark.parametrize(
    ("chosen", "dynamic"), [(True, None), (False, None), (False, True)], ids=["by token", "one for all", "any sizes"]
)
@pytest.mark.parametrize("pair", [(FP8_BLOCK, None), BF16_PAIR], ids=pair_name)
def test_compiled_whole(pair: Any, chosen: bool, dynamic: bool | None) -> None:
    """One graph, forward and backward, with the bits of the eager call."""
    layer = draw_layer(pair, bias=True)
    m, dout = module(layer, adapters=("one", "two"), train_biases=True), dout_of(layer)
    ids = torch.arange(len(layer.x)) % 3 - 1 if chosen else None
    want = run(layer, m, dout, ids)
    torch._dynamo.reset()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    got = run(layer, compiled, dout, ids)
    assert all(torch.equal(got[name], t) for name, t in want.items())
    with torch.no_grad():
        assert torch.equal(compiled(layer.x, layer.ids, layer.weights, adapter_ids=ids), want["out"])


def test_dropout_acts_in_training_alone() -> None:
    layer = draw_layer(BF16_PAIR)
    m, plain = module(layer, dropout=0.5), module(layer)
    arguments = layer.x, layer.ids, layer.weights
    assert not torch.equal(m(*arguments), plain(*arguments))
    assert torch.equal(m.eval()(*arguments), plain(*arguments))


def test_no_tokens() -> None:
    layer = draw_layer(BF16_PAIR, tokens=3).only(torch.empty(0, dtype=torch.int64))
    m = module(layer)
    x = layer.x.clone().requires_grad_()
    out = m(x, layer.ids, layer.weights)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
    assert not any(bool(p.grad.any()) for p in m.parameters())


def test_refusals() -> None:
    layer = draw_layer(BF16_PAIR)
    for options, word in (
        ({"rank": 0}, "rank"),
        ({"rank": 257}, "rank"),
        ({"adapters": ()}, "adapters"),
        ({"adapters": ("a", "a")}, "adapters"),
        ({"dropout": 1.0}, "dropout"),
        ({"dtype": torch.float16}, "dtype"),
        ({"bias2": torch.randn(5, 3)}, "bias2"),
    ):
        with pytest.raises(ValueError, match=word):
            module(layer, **options)
    m = module(layer, adapters=tuple(f"a{i}" for i in range(900)), rank=1)
    with pytest.raises(ValueError, match="4096"):
        m(layer.x, layer.ids, layer.weights, adapter_ids=torch.zeros(21, dtype=torch.int64))
    m = module(layer)
    m.active = "other"
    with pytest.raises(ValueError, match="active"):
        m(layer.x, layer.ids, layer.weights)
    with pytest.raises(ValueError, match="adapter_ids"):
        m(layer.x, layer.ids, layer.weights, adapter_ids=torch.zeros(20, dtype=torch.int64))
