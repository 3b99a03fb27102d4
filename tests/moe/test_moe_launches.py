"""The whole layer as a GPU runs it, with every kernel's machine code in the emulator: its bits and its launches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, NVFP4
from padless.emulator import Emulator
from padless.emulator.fake_driver import EmulatedDriver
from padless.kernels import ahead
from padless.moe import combine, moe, ops
from padless.moe import layer as moe_layer
from padless.runtime.driver import LaunchShape
from support.moe_layer_problem import PAIRS, draw_layer

pytest.importorskip("triton")
from support.emulated_triton import EmulatedKernel


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, EmulatedKernel]:
    """The layer's Triton kernels, emulated and begun before those ahead have ended, for CPU tensors too."""
    from padless.moe.triton import combine, quantize_rows, route
    from padless.quantization.triton import casts as triton_casts
    from padless.quantization.triton import global_scale as quantize_triton_global
    from padless.quantization.triton import launches

    monkeypatch.setattr(launches, "is_programmatic", lambda device: True)
    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: True)
    monkeypatch.setattr(ops, "runs_triton", lambda t: True)
    found = {}
    for module, name in (
        (route, "_route_few"),
        (route, "_rank"),
        (route, "_scan"),
        (route, "_place"),
        (quantize_rows, "_quantize_rows"),
        (combine, "_combine"),
        (quantize_triton_global, "_factors_of_given"),
    ):
        found[name] = EmulatedKernel(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


def counted(kernels: dict[str, EmulatedKernel]) -> dict[str, int]:
    return {name: kernel.launches for name, kernel in kernels.items() if kernel.launches}


CASES: list[tuple[str, Any, dict[str, Any], dict[str, int]]] = [
    ("few slots", (FP8_BLOCK, None), {}, {"_quantize_rows": 1, "_combine": 1}),
    (
        "an activation of its own",
        (FP8_BLOCK, None),
        {"gate_up": "alternating", "limit": 2.0, "up_offset": 1.0},
        {"_quantize_rows": 2, "_combine": 1},
    ),
    ("global scales", (NVFP4, None), {}, {"_quantize_rows": 1, "_combine": 1, "_factors_of_given": 1}),
    ("bfloat16 activations", (MXFP4, torch.bfloat16), {}, {"_quantize_rows": 1, "_combine": 1}),
]


@pytest.mark.parametrize(("pair", "options", "launches"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_launches_and_bits(
    pair: Any, options: dict[str, Any], launches: dict[str, int], triton_kernels: dict[str, EmulatedKernel]
) -> None:
    """A GPU launches these, and a product for each projection."""
    assert pair in PAIRS
    layer = draw_layer(pair, tokens=5, top_k=2, experts=3, h=128, i=64, seed=9, shared=True, **options)
    got = layer.run(moe, backend="emulator")
    assert counted(triton_kernels) == launches
    with mock.patch.object(ops, "runs_triton", return_value=False):
        assert torch.equal(got, layer.run(moe, backend="emulator"))
    assert counted(triton_kernels) == launches


GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0, "bias": True}


@pytest.mark.parametrize(
    ("pair", "options", "kernels", "ready"),
    [
        # 10 rows in 3 groups: few behind a SwiGLU alone. Weights and ids are ready, and weights and ends of groups.
        ((FP8_BLOCK, None), {}, ("sm90_fp8_few", "sm90_fp8"), [2, 2]),
        # Weights, scales and ends of groups, of the second product alone.
        ((MXFP4, torch.bfloat16), GPT_OSS | {"scale_layout": "blocked"}, ("sm90_bf16", "sm90_bf16"), [0, 3]),
    ],
    ids=["FP8", "gpt-oss"],
)
def test_decoding_is_four_launches(
    pair: Any,
    options: dict[str, Any],
    kernels: tuple[str, str],
    ready: list[int],
    triton_kernels: dict[str, EmulatedKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every launch of a layer, products too, and which of them begin before the kernel ahead has ended."""
    launched: list[tuple[str, bool]] = []
    launch = Emulator.launch

    def noted(self: Emulator, name: str, *arguments: Any, **options: Any) -> Any:
        launched.append((name, options["programmatic"]))
        return launch(self, name, *arguments, **options)

    monkeypatch.setattr(Emulator, "launch", noted)
    read_ahead: list[int] = []
    prepare = EmulatedDriver.prepare

    def prepared(self: EmulatedDriver, function: Any, kernel: Any, shape: LaunchShape, *rest: Any) -> Any:
        read_ahead.append(len(shape.ready))
        return prepare(self, function, kernel, shape, *rest)

    monkeypatch.setattr(EmulatedDriver, "prepare", prepared)
    layer = draw_layer(pair, tokens=5, top_k=2, experts=3, h=128, i=64, seed=9, **options)
    got = layer.run(moe, backend="emulator")
    products = [(f"padless_{kernel}_grouped_gemm", True) for kernel in kernels]
    assert launched == [("_quantize_rows", True), *products, ("_combine", True)]
    assert read_ahead == ready
    with mock.patch.object(ops, "runs_triton", return_value=False):
        assert torch.equal(got, layer.run(moe, backend="emulator"))


def test_nothing_is_ready_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products let the next launch begin when they begin themselves: a sum would lie next to them and wait."""
    layer = draw_layer((FP8_BLOCK, None), tokens=3, top_k=2, experts=3, h=128, i=64, seed=9)
    found: dict[str, ahead.Ready | None] = {}

    def noted(backend: str) -> Any:
        def combined(y: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
            found[backend] = ahead.current()
            return combine(y, *rest, **how)

        return combined

    for backend in ("emulator", "emulator:sm_100a"):
        monkeypatch.setattr(moe_layer, "combine", noted(backend))
        layer.run(moe, backend=backend)
    assert found["emulator"] is not None
    assert found["emulator:sm_100a"] is None


@pytest.mark.parametrize(("most", "launches"), [(9, {"_route_few": 1}), (0, {"_rank": 1, "_scan": 1, "_place": 1})])
def test_launches_of_more_slots(
    most: int, launches: dict[str, int], triton_kernels: dict[str, EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the slots that are sorted where they are quantized, and beyond those that one launch sorts."""
    from padless.moe.triton import quantize_rows, route

    monkeypatch.setattr(quantize_rows, "ROUTED_SLOTS", 9)
    monkeypatch.setattr(route, "FEW_SLOTS", 1000 if most else 9)
    layer = draw_layer((FP8_BLOCK, None), tokens=5, top_k=2, experts=3, h=128, i=64, seed=9)
    got = layer.run(moe)
    assert counted(triton_kernels) == {**launches, "_quantize_rows": 1, "_combine": 1}
    with mock.patch.object(ops, "runs_triton", return_value=False):
        assert torch.equal(got, layer.run(moe))
