"""Layers that moe() computes in one launch: which they are, the bits of several launches, and whose the scratch is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from padless import MXFP4, MXFP8, BlockScaledTensor, quantize
from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_moe_decode import host, host_fp4
from padless.kernels.sm90_moe_decode.config import LayerShape
from padless.kernels.sm90_moe_decode.config_fp4 import Fp4LayerShape
from padless.layouts import plain_scale
from padless.moe import Router, choosing, decode, moe, topk
from support import moe_decode_fp4_cases as fp4
from support.moe_decode_cases import draw_tokens, draw_weights, several_launches

WEIGHTS = draw_weights(3, 128, 128, seed=4)


def call(tokens: Any, weights: Any = WEIGHTS, **more: Any) -> torch.Tensor:
    options = {"gate_up": weights.gate_up, "shared": tokens.shared, "backend": "emulator"} | more
    return moe(tokens.x, tokens.ids, tokens.weights, weights.w13, weights.w2, **options)


def launches_of(tokens: Any, weights: Any = WEIGHTS, **more: Any) -> int:
    """How often a kernel was prepared; nothing is computed."""
    with (
        mock.patch.object(host, "prepare") as prepare,
        mock.patch.object(host_fp4, "prepare") as prepare_fp4,
        mock.patch("padless.moe.layer.gathered", side_effect=InterruptedError),
        suppress(InterruptedError),
    ):
        if isinstance(weights, fp4.Fp4Weights):
            fp4.call(weights, tokens, fp4.GPT_OSS, **more)
        else:
            call(tokens, weights, **more)
    return prepare.call_count + prepare_fp4.call_count


def test_few_tokens_are_one_launch_with_the_bits_of_several() -> None:
    tokens = draw_tokens(WEIGHTS, 2, 2, 1, shared=True)
    want = several_launches(WEIGHTS, tokens)
    with emulated_driver().configured(num_sms=2), mock.patch.object(host, "prepare", wraps=host.prepare) as prepare:
        out = call(tokens)
    assert prepare.call_count == 1
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_what_is_one_launch() -> None:
    tokens = draw_tokens(WEIGHTS, 2, 2, 1, shared=True)
    assert launches_of(tokens) == 1
    assert launches_of(tokens, gate_up="interleaved") == 1
    nine = draw_tokens(WEIGHTS, 9, 2, 1)
    assert launches_of(nine) == 0
    with mock.patch.object(decode, "MOST_TOKENS", 16):
        assert launches_of(nine) == 1
    others: dict[str, dict[str, Any]] = {
        "another activation": {"activation": "geglu"},
        "a limit": {"limit": 7.0},
        "alternating": {"gate_up": "alternating"},
        "a bias": {"bias13": torch.zeros(3, 256)},
        "another bias": {"bias2": torch.zeros(3, 128)},
        "a float32 result": {"out_dtype": torch.float32},
        "the reference": {"backend": "reference"},
        "Blackwell": {"backend": "emulator:sm_100a"},
        "shared in float32": {"shared": torch.zeros(2, 128)},
        "shared with gaps": {"shared": torch.zeros(2, 256).bfloat16()[:, ::2]},
    }
    for name, more in others.items():
        assert launches_of(tokens, **more) == 0, name
    wide = torch.zeros(2, 256).bfloat16()[:, ::2]
    for name, other in {
        "x with gaps": type(tokens)(wide, tokens.ids, tokens.weights, None),
        "x in float32": type(tokens)(tokens.x.float(), tokens.ids, tokens.weights, None),
        "ids by column": type(tokens)(tokens.x, tokens.ids.T.contiguous().T, tokens.weights, None),
    }.items():
        assert launches_of(other, out_dtype=torch.bfloat16) == 0, name
    w13, w2 = (quantize(torch.randn(3, n, 128), MXFP8, kind="weight") for n in (256, 128))
    assert launches_of(tokens, type(WEIGHTS)(w13, w2, "concatenated")) == 0


def test_few_tokens_of_logits_are_one_launch_with_the_bits_of_topk_and_several() -> None:
    tokens = draw_tokens(WEIGHTS, 2, 2, 1, shared=True)
    logits, bias, rule = torch.randn(2, 3), torch.randn(3), Router(2, "sigmoid", scaling_factor=1.7)
    weights, ids = topk(logits, rule, bias)
    want = several_launches(WEIGHTS, replace(tokens, ids=ids, weights=weights))
    given: dict[str, Any] = {"router_logits": logits, "router": rule, "correction_bias": bias}
    unchosen = replace(tokens, ids=None, weights=None)  # type: ignore[arg-type]
    with emulated_driver().configured(num_sms=2), mock.patch.object(choosing, "topk") as chosen:
        out = call(unchosen, **given)
    assert chosen.call_count == 0
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_which_logits_the_launch_chooses_by() -> None:
    """By others the layer is one launch behind topk."""
    tokens = replace(draw_tokens(WEIGHTS, 2, 2, 1), ids=None, weights=None)  # type: ignore[arg-type]
    wide = torch.randn(2, 6)
    for logits, launches, chosen in ((wide[:, :3].contiguous(), 1, 0), (wide[:, :3], 1, 1), (wide[:, ::2], 1, 1)):
        with mock.patch.object(choosing, "topk", wraps=topk) as choose:
            assert launches_of(tokens, router_logits=logits, router=Router(2)) == launches
        assert choose.call_count == chosen
    with mock.patch.object(choosing, "topk", wraps=topk) as choose:
        assert launches_of(tokens, router_logits=wide[:, :3].clone(), router=Router(2), gate_up="alternating") == 0
    assert choose.call_count == 1


FP4_WEIGHTS = fp4.draw_fp4_weights(3, 96, 64, seed=3)


def test_few_tokens_with_fp4_weights_are_one_launch_with_the_bits_of_several() -> None:
    tokens = draw_tokens(FP4_WEIGHTS, 2, 2, 1, shared=True)
    want = fp4.several_launches(FP4_WEIGHTS, tokens)
    with (
        emulated_driver().configured(num_sms=2),
        mock.patch.object(decode, "MOST_FP4_TOKENS", 2),
        mock.patch.object(host_fp4, "prepare", wraps=host_fp4.prepare) as prepare,
    ):
        out = fp4.call(FP4_WEIGHTS, tokens, fp4.GPT_OSS)
    assert prepare.call_count == 1
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def test_what_is_one_launch_with_fp4_weights() -> None:
    tokens = draw_tokens(FP4_WEIGHTS, 1, 2, 1, shared=True)
    one: dict[str, dict[str, Any]] = {
        "gpt-oss": {},
        "plain SwiGLU": {"alpha": 1.0, "limit": None, "up_offset": 0.0},
        "no bias": {"bias13": None, "bias2": None},
    }
    several: dict[str, dict[str, Any]] = {
        "another activation": {"activation": "geglu", "alpha": 1.0},
        "concatenated": {"gate_up": "concatenated"},
        "quantized activations": {"activations": MXFP8},
        "a bias in bfloat16": {"bias13": torch.zeros(3, 128).bfloat16()},
        "a float32 result": {"out_dtype": torch.float32},
        "the reference": {"backend": "reference"},
        "Blackwell": {"backend": "emulator:sm_100a"},
        "shared in float32": {"shared": torch.zeros(1, 96)},
    }
    for name, more in (one | several).items():
        assert launches_of(tokens, FP4_WEIGHTS, **more) == (name in one), name
    assert launches_of(draw_tokens(FP4_WEIGHTS, decode.MOST_FP4_TOKENS, 2, 1), FP4_WEIGHTS) == 1
    assert launches_of(draw_tokens(FP4_WEIGHTS, decode.MOST_FP4_TOKENS + 1, 2, 1), FP4_WEIGHTS) == 0
    w13 = BlockScaledTensor(FP4_WEIGHTS.w13.data, plain_scale(FP4_WEIGHTS.w13).contiguous(), MXFP4)
    plain = replace(FP4_WEIGHTS, w13=w13)
    assert launches_of(tokens, plain) == 0, "plain scales"


def test_fp4_weights_that_do_not_fit_are_several_launches() -> None:
    assert not Fp4LayerShape(4, 8, 2, 2880, 2880, 132).fits
    tokens = draw_tokens(FP4_WEIGHTS, 2, 2, 1)
    with mock.patch.object(Fp4LayerShape, "fits", False):
        assert launches_of(tokens, FP4_WEIGHTS) == 0


@pytest.mark.parametrize(
    ("sizes", "one"),
    [
        ((1, 8, 32, 7168, 2048), True),
        ((2, 8, 32, 7168, 2048), False),
        ((7, 8, 256, 2048, 512), True),
        ((8, 8, 256, 2048, 512), False),
        ((9, 1, 256, 2048, 512), False),
        ((4, 8, 128, 2048, 768), True),
        ((5, 8, 128, 2048, 768), False),
        ((2, 8, 128, 4096, 1408), True),
        ((3, 8, 128, 4096, 1408), False),
        ((9, 1, 128, 128, 128), False),
    ],
)
def test_what_is_faster(sizes: tuple[int, int, int, int, int], one: bool) -> None:
    assert decode.is_faster(LayerShape(*sizes)) == one


def test_from_logits_one_launch_is_faster_for_longer() -> None:
    """Among several launches the router is one more."""
    tokens = [t for t in range(1, 10) if decode.is_faster(LayerShape(t, 8, 256, 2048, 512), from_logits=True)]
    assert tokens == list(range(1, 9))


@pytest.fixture
def no_scratch() -> Any:
    with (
        mock.patch.object(host, "_CHUNKS", {}),
        mock.patch.object(host, "_USED", {}),
        mock.patch.object(host, "_NEXT", {}),
        mock.patch.object(host, "_SCRATCH", {}),
        mock.patch.object(host, "_FULL", set()),
    ):
        yield


def test_scratch_belongs_to_an_address(no_scratch: None) -> None:
    cpu, shape = torch.device("cpu"), LayerShape(8, 8, 4, 128, 512)
    first, other = (host.scratch_for(cpu, address, shape) for address in (4096, 8192))
    again = host.scratch_for(cpu, 4096, LayerShape(8, 8, 9, 256, 512))
    assert first is not None
    assert other is not None
    assert again is first
    spans = [(t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in (first, other)]
    assert spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]
    assert first.numel() == 32 + 2 * shape.hidden_words
    assert not first.any()
    assert first.data_ptr() % 16 == 0
    larger = host.scratch_for(cpu, 4096, LayerShape(8, 8, 4, 128, 1024))
    assert larger is not None
    assert larger.data_ptr() not in (first.data_ptr(), other.data_ptr())


def test_scratch_comes_to_an_end(no_scratch: None) -> None:
    cpu, shape = torch.device("cpu"), LayerShape(1, 8, 4, 128, 512)
    with mock.patch.object(host, "_CHUNK_WORDS", 20000), mock.patch.object(host, "_MOST_CHUNKS", 2):
        found = [host.scratch_for(cpu, 16 * n, shape) for n in range(6)]
        assert [t is None for t in found] == [False] * 4 + [True] * 2
        assert host.scratch_for(cpu, 0, shape) is found[0]
        assert host.scratch_for(cpu, 999, LayerShape(8, 8, 4, 128, 8192)) is None
        tokens = draw_tokens(WEIGHTS, 1, 8)
        with mock.patch.object(host, "scratch_for", return_value=None):
            assert launches_of(tokens) == 0, "several launches where there is no scratch"


def test_the_next_scratch_is_cleared_before_it_is_needed(no_scratch: None) -> None:
    cpu, shape = torch.device("cpu"), LayerShape(1, 8, 4, 128, 512)
    cleared, waits = [], []

    def clear(device: torch.device) -> tuple[torch.Tensor, Any]:
        number = len(cleared)
        cleared.append(torch.zeros(100_000, dtype=torch.int32))
        return cleared[-1], SimpleNamespace(synchronize=lambda: waits.append(number))

    with mock.patch.object(host, "_CHUNK_WORDS", 100_000), mock.patch.object(host, "_cleared_chunk", clear):
        counts = []
        for n in range(24):
            found = host.scratch_for(cpu, 16 * n, shape)
            assert found is not None
            assert any(found.untyped_storage().data_ptr() == chunk.data_ptr() for chunk in cleared)
            counts.append((len(cleared), len(waits)))
    # twelve pieces a chunk: the second is cleared with the eighth piece, and waited for with the thirteenth
    assert counts == [(1, 1)] * 7 + [(2, 1)] * 5 + [(2, 2)] * 7 + [(3, 2)] * 5


def test_errors_of_the_next_scratch_lose_nothing(no_scratch: None) -> None:
    """No memory for it half a chunk before it is needed, and a wait for it that fails, as while a thread captures."""
    cpu, shape, events = torch.device("cpu"), LayerShape(1, 8, 4, 128, 512), mock.Mock()
    made: list[Any] = [(torch.zeros(100_000, dtype=torch.int32), events) for _ in range(2)]
    given = [made[0], torch.OutOfMemoryError(), made[1]]
    with mock.patch.object(host, "_CHUNK_WORDS", 100_000), mock.patch.object(host, "_cleared_chunk", side_effect=given):
        found = [host.scratch_for(cpu, 16 * n, shape) for n in range(12)]
        assert all(t is not None for t in found)
        events.synchronize.side_effect = RuntimeError("a capture is under way")
        with pytest.raises(RuntimeError, match="capture"):
            host.scratch_for(cpu, 16 * 12, shape)
        events.synchronize.side_effect = None
        assert host.scratch_for(cpu, 16 * 12, shape) is not None
    assert [chunk.data_ptr() for chunk in host._CHUNKS[cpu]] == [chunk.data_ptr() for chunk, _ in made]


def test_no_scratch_is_made_while_a_graph_is_captured(no_scratch: None) -> None:
    cpu, shape = torch.device("cpu"), LayerShape(1, 8, 4, 128, 512)
    with mock.patch.object(host, "is_capturing", return_value=True):
        assert host.scratch_for(cpu, 16, shape) is None
    made = host.scratch_for(cpu, 16, shape)
    with mock.patch.object(host, "is_capturing", return_value=True):
        assert host.scratch_for(cpu, 16, shape) is made
        assert host.scratch_for(cpu, 32, shape) is not None
