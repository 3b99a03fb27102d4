"""The first projection in one launch: the bits of two launches, and packed launches that are found again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from padless import FP8_BLOCK, MXFP8, NVFP4, BlockScaledTensor, grouped_gemm, quantize
from padless.kernels import ahead, remembered
from padless.moe import Activation, activate_quantize, fused, ops
from padless.moe.layer import ACTIVATIONS, Projection, gathered
from padless.runtime import driver
from support.moe_layer_problem import PAIRS, draw_layer, pair_name
from support.triton_cases import bits


def operands(pair: Any) -> tuple[Any, Any, Any, Any]:
    """(a, weights, offs, format of activations)."""
    fmt, activations = pair
    layer = draw_layer(pair, tokens=11)
    format = None if activations is torch.bfloat16 else activations or ACTIVATIONS[fmt]
    scale = torch.tensor(0.01) if format == NVFP4 else None
    routing, rows = gathered(layer.x, layer.ids, 5, format, scale)
    return rows, layer.w13, routing.offs, format


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_bits_of_two_launches(pair: Any, has_weights: bool, has_bias: bool, gate_up: str) -> None:
    a, w, offs, format = operands(pair)
    bias = torch.randn(5, 256).bfloat16() if has_bias else None
    scale = torch.tensor([0.02]) if format == NVFP4 else None
    weights = torch.randn(a.shape[0]) if has_weights else None
    got = fused.swiglu(
        a, w, offs, gate_up=gate_up, bias=bias, format=format, global_scale=scale, backend=None, row_weights=weights
    )
    product = Projection(w, bias, None).product(a, offs)
    name, rule = ("BF16", "") if format is None else (format.name, fused.SCALE_RULES.get(format.name, "rceil"))
    activated = ops.call(
        "activate_quantize", product, "swiglu", gate_up, 1.0, None, 0.0, name, rule, "plain", scale, offs, weights
    )
    want: Any = activated[0]
    if format is not None:
        want = BlockScaledTensor(want.view(format.data_dtype), activated[1], format, scale)
    if not has_weights:
        same = activate_quantize(product, Activation(gate_up=gate_up), format, global_scale=scale, offs=offs)
        assert torch.equal(bits(getattr(same, "data", same)), bits(getattr(want, "data", want)))
    end = int(offs[-1])
    if isinstance(got, BlockScaledTensor):
        assert isinstance(want, BlockScaledTensor)
        assert torch.equal(bits(got.data[:end]), bits(want.data[:end]))
        assert torch.equal(bits(got.scale[:end]), bits(want.scale[:end]))
        assert got.scale.stride() == want.scale.stride()
    else:
        assert torch.equal(got[:end], want[:end])


def test_weighted_rows_of_hoppers_kernel() -> None:
    """In the emulator: the launch's codes and scales are those of its product, activated, weighted and quantized."""
    g = torch.Generator().manual_seed(2)
    a = quantize(torch.randn(37, 128, generator=g), FP8_BLOCK)
    w = quantize(torch.randn(3, 256, 128, generator=g) / 11, FP8_BLOCK, kind="weight")
    offs, weights = torch.tensor([20, 20, 33], dtype=torch.int32), torch.randn(37, generator=g)
    how: Any = {"gate_up": "concatenated", "bias": None, "format": FP8_BLOCK, "global_scale": None}
    product = grouped_gemm(a, w, offs, backend="emulator")
    codes = []
    for given in (weights, None):
        got = fused.swiglu(a, w, offs, backend="emulator", row_weights=given, **how)
        activated = ("swiglu", "concatenated", 1.0, None, 0.0, "FP8_BLOCK", "", "plain", None, None, given)
        data, scale = ops.call("activate_quantize", product, *activated)
        assert isinstance(got, BlockScaledTensor)
        assert torch.equal(bits(got.data[:33]), data[:33])
        assert torch.equal(got.scale[:33], scale[:33])
        codes.append(data)
    assert not torch.equal(codes[0][:33], codes[1][:33])


class Launches:
    """Stands in for `prepare`: packs nothing, and counts."""

    def __init__(self, copies: tuple[torch.Tensor, ...] = ()) -> None:
        self.packed = self.launched = 0
        self.copies = copies

    def __call__(self, *arguments: Any) -> Any:
        self.packed += 1

        def launch(stream: int) -> None:
            self.launched += 1

        return type("Prepared", (), {"launch": staticmethod(launch), "copies": self.copies})


def call(launches: Launches, a: Any, w: Any, offs: torch.Tensor, tensors: Any, format: Any = FP8_BLOCK) -> None:
    with (
        mock.patch.object(fused, "prepare", launches),
        mock.patch.object(fused, "_check"),
        mock.patch.object(torch.Tensor, "is_cuda", True, create=True),
        mock.patch.object(driver, "current_stream", return_value=0),
    ):
        fused._launch(a, w, offs, fused.epilogue_of("concatenated", False, format), tensors)


def outputs(a: Any, w: Any, format: Any = FP8_BLOCK) -> fused.EpilogueTensors:
    epilogue = fused.epilogue_of("concatenated", False, format)
    return fused.with_outputs(epilogue, fused.EpilogueTensors(), a.shape[0], 256, 5, a.device)


def test_a_launch_is_found_again_by_what_it_depends_on() -> None:
    remembered.forget()
    a, w, offs, _ = operands((FP8_BLOCK, None))
    tensors, launches = outputs(a, w), Launches()
    for _ in range(3):
        same = BlockScaledTensor(a.data, a.scale, a.format)  # other objects, the same memory
        call(launches, same, w, offs, tensors)
    assert (launches.packed, launches.launched) == (1, 3)
    others: list[tuple[Any, Any, Any, Any]] = [
        (BlockScaledTensor(a.data.clone(), a.scale, a.format), w, offs, tensors),
        (BlockScaledTensor(a.data, a.scale.contiguous(), a.format), w, offs, tensors),
        (a, BlockScaledTensor(w.data.clone(), w.scale, w.format), offs, tensors),
        (a, BlockScaledTensor(w.data, w.scale.clone(), w.format), offs, tensors),
        (a, w, offs.clone(), tensors),
        (a, w, offs, outputs(a, w)),
        (BlockScaledTensor(a.data[:7], a.scale[:7].contiguous(), a.format), w, offs, tensors),
    ]
    for i, other in enumerate(others):
        call(launches, *other)
        assert launches.packed == 2 + i
    call(launches, a, w, offs, tensors)
    assert launches.packed == 1 + len(others)
    call(launches, a, w, offs, outputs(a, w, MXFP8), MXFP8)
    assert launches.packed == 2 + len(others)
    remembered.forget()


def test_a_launch_that_reads_ahead_is_not_taken_for_one_that_waits() -> None:
    remembered.forget()
    a, w, offs, _ = operands((FP8_BLOCK, None))
    tensors, launches = outputs(a, w), Launches()
    ids, others = (torch.zeros(22, 1, dtype=torch.int64) for _ in range(2))
    states = (None, ahead.Ready(), ahead.Ready(ids), ahead.Ready(others))
    for _ in range(2):
        for what in states:
            with ahead.ready(what):
                call(launches, a, w, offs, tensors)
        assert launches.packed == len(states)
    remembered.forget()


def test_a_launch_with_copies_is_not_kept() -> None:
    remembered.forget()
    a, w, offs, _ = operands((FP8_BLOCK, None))
    tensors, launches = outputs(a, w), Launches((torch.zeros(1),))
    for _ in range(2):
        call(launches, a, w, offs, tensors)
    assert (launches.packed, launches.launched) == (2, 2)
    assert remembered._KNOWN == {}
