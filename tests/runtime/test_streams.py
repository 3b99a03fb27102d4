"""Tensors that calls keep for later ones on other streams: those wait, and the memory is given away behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from padless.integrations.weights import WeightCache
from padless.nn import GroupedLinear
from padless.runtime.streams import Kept
from support import hopper
from support.hopper import STREAM, Gpu
from support.public_calls import PUBLIC, replaced


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with hopper.pretended() as found:
        yield found


def orders_of(gpu: Gpu, stream: int, call: Callable[[], object]) -> list[tuple[str, int, int]]:
    """What torch is told of streams when the call is made on one."""
    gpu.stream, gpu.orders = stream, []
    call()
    return gpu.orders


def told(tensors: list[torch.Tensor], stream: int) -> list[tuple[str, int, int]]:
    return [("wait", STREAM, stream), *(("memory", t.data_ptr(), stream) for t in tensors)]


def test_another_stream_waits_and_is_known_to_use_the_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(4), torch.zeros(5)]
    kept = Kept([tensors[0], None, tensors[1]])
    assert orders_of(gpu, STREAM, kept.read) == []
    for _ in range(2):
        assert orders_of(gpu, 0x9000, kept.read) == told(tensors, 0x9000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert orders_of(gpu, 0x9000, kept.read) == []


def test_on_a_cpu_nothing_is_to_do() -> None:
    Kept([torch.zeros(4), None]).read()


def test_codes_that_a_layer_keeps(gpu: Gpu) -> None:
    layer = GroupedLinear(2, 128, 128, dtype=torch.bfloat16, keep_codes=True)

    def operands() -> Any:
        return layer._operands("weight", layer.weight, layer.weight, True)

    assert orders_of(gpu, STREAM, operands) == []
    parts = [t for operand in operands() for t in (operand.data, operand.scale)]
    assert orders_of(gpu, 0x9000, operands) == told(parts, 0x9000)
    assert orders_of(gpu, STREAM, operands) == []


def test_weights_that_a_plug_in_keeps(gpu: Gpu) -> None:
    """Of them what the engine's tensors do not share."""
    cache, tensors = WeightCache(""), []
    for n in (256, 128):
        codes = torch.zeros(2, n, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors += [codes, torch.ones(2, n // 128, 1)]
    biases = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(2, 128)

    def weights() -> Any:
        return cache.get(*tensors, *biases)

    assert orders_of(gpu, STREAM, weights) == []
    made = weights()
    assert orders_of(gpu, 0x9000, weights) == told([made.bias13], 0x9000)


# --- a stream that is given ------------------------------------------------------------------------------

GIVEN = {
    "grouped_gemm_epilogue": "stream",
    "grouped_gemm_quant": "current_stream",
    "grouped_gemm_quant of cuDNN's tensors": "current_stream",
    "GroupedGemmQuant.execute": "current_stream",
}


@pytest.mark.parametrize("name", GIVEN)
def test_all_of_a_call_is_on_the_stream_that_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it launches, and what it fills and converts before, which nothing else would order."""
    call, used = PUBLIC[name], list[int]()
    arguments = call.arguments()
    with hopper.pretended(arch="sm_100a") as gpu:
        if name == "GroupedGemmQuant.execute":
            arguments = call.arguments()  # compiled for this device
            gpu.launched.clear()

        def noted(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given, **options: (used.append(gpu.stream), function(*given, **options))[1]

        for maker in ("zeros", "full", "empty"):
            monkeypatch.setattr(torch, maker, noted(getattr(torch, maker)))
        call.function(**arguments, **{GIVEN[name]: 0x9000})
        assert {one.stream for one in gpu.launched} == {0x9000}
        assert set(used) <= {0x9000}
        assert used or name == "GroupedGemmQuant.execute"
        assert gpu.stream == STREAM, "the current stream stays"


@pytest.mark.parametrize("name", GIVEN)
def test_a_stream_is_refused_where_a_call_is_traced(name: str) -> None:
    call = PUBLIC[name]
    arguments = {
        key: replaced(value, lambda t: t.to("meta")) if key.startswith(("a", "sfa")) else value
        for key, value in call.arguments().items()
    }
    with pytest.raises(ValueError, match=f"{GIVEN[name]} must be None in a call that is compiled"):
        call.function(**arguments, **{GIVEN[name]: 0x9000})
