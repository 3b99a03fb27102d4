"""Addresses that are no multiple of 16, as memory-mapped files have: good enough for a CPU, refused for kernels."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledTensor
from padless.kernels import remembered
from support.public_calls import (
    CALLS,
    OFFS,
    K,
    M,
    N,
    activation,
    cudnn_outputs,
    normal,
    product,
    same,
    tensors_in,
    weight,
)

PAIRS = {"FP8_BLOCK": (FP8_BLOCK, FP8_BLOCK), "MXFP8": (MXFP8, MXFP8), "BF16": (None, NVFP4)}

MODULE = importlib.import_module("padless.ops.grouped_gemm")  # the function has the name of its module


def displaced(t: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """The same values and strides at an address ``offset`` bytes past a multiple of 16: one element where None."""
    if offset is None:
        offset = t.element_size()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    size = elements * t.element_size()
    room = torch.zeros(size + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + offset
    moved = room[start : start + size].view(t.dtype).as_strided(t.shape, t.stride())
    is_byte = t.element_size() == 1
    (moved.view(torch.uint8) if is_byte else moved).copy_(t.view(torch.uint8) if is_byte else t)
    assert moved.data_ptr() % 16 == offset
    return moved


def moved_in(value: Any, name: str, wanted: str, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An argument with the one tensor in it that has the name ``wanted`` (see tensors_in) moved."""
    if isinstance(value, torch.Tensor):
        return move(value) if name == wanted else value
    if isinstance(value, BlockScaledTensor):
        parts = {part: getattr(value, part) for part in ("data", "scale", "global_scale")}
        return dataclasses.replace(
            value, **{part: moved_in(t, f"{name}.{part}", wanted, move) for part, t in parts.items()}
        )
    if isinstance(value, padless.EpilogueTensors):
        tensors = {part: moved_in(t, f"{name}.{part}", wanted, move) for part, t in vars(value).items()}
        return dataclasses.replace(value, **tensors)
    if isinstance(value, list):
        return [moved_in(one, f"{name}[{i}]", wanted, move) for i, one in enumerate(value)]
    return value


def with_moved(
    arguments: dict[str, Any], wanted: str, move: Callable[[torch.Tensor], torch.Tensor] = displaced
) -> dict[str, Any]:
    return {key: moved_in(value, key, wanted, move) for key, value in arguments.items()}


CASES = [(call, name) for call in CALLS for name, t in tensors_in(CALLS[call].arguments(), "") if t.numel()]


@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call}: {name}" for call, name in CASES])
def test_no_tensor_of_a_call_on_a_cpu_has_to_be_aligned(call: str, name: str) -> None:
    arguments = with_moved(CALLS[call].arguments(), name)
    assert dict(tensors_in(arguments, ""))[name].data_ptr() % 16 != 0
    good = CALLS[call].arguments()
    got, want = (dict(tensors_in(CALLS[call].function(**given), "")) for given in (arguments, good))
    assert got.keys() == want.keys()
    for part in got:
        assert same(got[part], want[part]), part
    if call == "GroupedGemmQuant.execute":  # returns nothing: its outputs are among its arguments
        for part, t in tensors_in(good, ""):
            assert same(dict(tensors_in(arguments, ""))[part], t), part


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_weights_of_a_memory_mapped_file(offset: int) -> None:
    """All of an operand's parts at once, in one buffer of bytes as a file has them."""
    for fmt in (FP8_BLOCK, MXFP8, NVFP4):
        a, b = activation(fmt), weight(fmt, 3)
        scale = displaced(b.scale, offset if b.scale.element_size() == 1 else 4)
        mapped = BlockScaledTensor(displaced(b.data, offset), scale, fmt, b.global_scale)
        assert same(padless.grouped_gemm(a, mapped, OFFS), padless.grouped_gemm(a, b, OFFS))
        assert torch.equal(padless.dequantize(mapped), padless.dequantize(b))


@pytest.mark.parametrize("t", [product()["out"], normal(M, K)], ids=["out", "a"])
def test_rows_may_start_anywhere_on_a_cpu(t: torch.Tensor) -> None:
    wide = torch.zeros((M, t.shape[1] + 1), dtype=torch.bfloat16)
    rows = wide[:, : t.shape[1]]
    b = weight(NVFP4, 3)
    if t.dtype == torch.bfloat16:
        a, out = normal(M, K).bfloat16(), rows
    else:
        a, out = rows.copy_(t), torch.empty((M, N), dtype=torch.bfloat16)
    want = padless.grouped_gemm(a.contiguous(), b, OFFS)
    assert same(padless.grouped_gemm(a, b, OFFS, out=out), want)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        padless.grouped_gemm(a, b, OFFS, out=out, backend="emulator")


# --- kernels ---------------------------------------------------------------------------------------------


def operands(pair: str, *groups: int) -> dict[str, Any]:
    a, b = PAIRS[pair]
    x = normal(M, K).bfloat16() if a is None else activation(a)
    return {"a": x, "b": weight(b, *groups), "out": torch.empty((M, N), dtype=torch.bfloat16)}


NAMES = [(pair, name) for pair in ("FP8_BLOCK", "MXFP8") for name in ("a.data", "b.data", "a.scale", "out")]
NAMES += [("BF16", name) for name in ("a", "b.data", "out")]


@pytest.mark.parametrize(("pair", "name"), NAMES)
@pytest.mark.parametrize("call", ["grouped_gemm", "gemm"])
def test_a_kernel_refuses_it_in_words(call: str, pair: str, name: str) -> None:
    arguments = operands(pair, 3) | {"offs": OFFS} if call == "grouped_gemm" else operands(pair)
    wanted = rf"^{re.escape(name)} is at address 0x[0-9a-f]+; it must be 16-byte aligned; clone\(\) it"
    with pytest.raises(ValueError, match=wanted):
        getattr(padless, call)(**with_moved(arguments, name), backend="emulator")


def test_what_the_reference_took_is_looked_at_before_a_kernel_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say they are on a GPU: what passed the checks of one backend has not passed those of another."""
    arguments = with_moved(operands("FP8_BLOCK", 3) | {"offs": OFFS}, "b.data")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    monkeypatch.setattr(MODULE, "device_of", lambda backend, out: None)
    padless.grouped_gemm(**arguments, backend="reference")
    with pytest.raises(ValueError, match=r"^b\.data is at address 0x"):
        padless.grouped_gemm(**arguments)


@pytest.mark.parametrize("name", ["a_tensor", "b_tensor", "sfa_tensor"])
def test_a_quantizing_kernel_refuses_it_in_words(name: str) -> None:
    wanted = {"a_tensor": "a.data", "b_tensor": "b.data", "sfa_tensor": "a.scale"}[name]
    with pytest.raises(ValueError, match=rf"^{re.escape(wanted)} is at address 0x.* 16-byte aligned"):
        padless.grouped_gemm_quant(**with_moved(cudnn_outputs(), name), backend="emulator")


@pytest.mark.parametrize("name", ["d_tensor", "d_col_tensor"])
def test_the_class_refuses_it_in_words(name: str) -> None:
    arguments = CALLS["GroupedGemmQuant.execute"].arguments()
    samples = {f"sample_{key.removesuffix('_tensor')}": t for key, t in arguments.items()}
    call = padless.GroupedGemmQuant(**samples)
    call.compile()
    call._backend = "emulator"  # what compile would compile there is not looked at here
    with pytest.raises(ValueError, match=r"is at address 0x.* 16-byte aligned"):
        call.execute(**with_moved(arguments, name))


@pytest.mark.parametrize("name", ["a[1].data", "b[1].data", "a[1].scale", "out[1]"])
def test_a_list_refuses_it_in_words(name: str) -> None:
    arguments = with_moved(CALLS["grouped_gemm_list"].arguments(), name)
    with pytest.raises(ValueError, match=r"^problem 1: .*(16-byte aligned|16 bytes)"):
        padless.grouped_gemm_list(**arguments, backend="emulator:sm_100a")
