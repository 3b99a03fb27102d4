"""Outputs, options and tables of calls that were made before, on a GPU that is pretended."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import padless
from padless.formats import FP8_BLOCK, MXFP8, BlockScaledTensor, blocked_size
from padless.kernels import remembered
from padless.layouts import to_mn_major
from padless.runtime import devices, jit
from support import hopper

LISTS = importlib.import_module("padless.ops.grouped_gemm_list")


class Sub(torch.Tensor):
    """A subclass, of which a call knows too little to remember it."""


def operands() -> tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor]:
    codes = [torch.zeros(s, dtype=torch.uint8).view(torch.float8_e4m3fn) for s in ((16, 128), (2, 128, 128))]
    a = BlockScaledTensor(codes[0], to_mn_major(torch.ones(16, 1)), FP8_BLOCK)
    return a, BlockScaledTensor(codes[1], torch.ones(2, 1, 1), FP8_BLOCK), torch.tensor([8, 16], dtype=torch.int32)


def test_each_output_of_a_subclass_is_written(gpu: hopper.Gpu) -> None:
    a, b, offs = operands()
    for _ in range(2):
        out = torch.empty(16, 128, dtype=torch.bfloat16).as_subclass(Sub)
        assert padless.grouped_gemm(a, b, offs, out=out) is out
        assert out.data_ptr().to_bytes(8, "little") in b"".join(gpu.launched[-1].arguments)


@pytest.mark.parametrize(
    "wrong", ["out", torch.empty(3, 5).as_subclass(Sub), torch.nn.Parameter(torch.empty(16, 128))], ids=type
)
def test_what_is_no_output_is_refused_after_one_that_was_not_remembered(gpu: hopper.Gpu, wrong: Any) -> None:
    a, b, offs = operands()
    for _ in range(2):
        padless.grouped_gemm(a, b, offs, out=torch.empty(16, 128, dtype=torch.bfloat16).as_subclass(Sub))
        with pytest.raises(ValueError, match="out"):
            padless.grouped_gemm(a, b, offs, out=wrong)


def test_an_operand_of_a_subclass_is_multiplied() -> None:
    x, w, offs = torch.randn(4, 128).bfloat16(), torch.randn(2, 64, 128).bfloat16(), padless.group_offsets([1, 3])
    of_subclass = padless.grouped_gemm(x.as_subclass(Sub), w, offs)
    assert torch.equal(of_subclass.as_subclass(torch.Tensor), padless.grouped_gemm(x, w, offs))
    codes = padless.quantize(x.as_subclass(Sub), FP8_BLOCK)
    assert torch.equal(codes.data.view(torch.uint8), padless.quantize(x, FP8_BLOCK).data.view(torch.uint8))


def test_tangents_are_refused() -> None:
    x, w, offs = torch.randn(4, 128).bfloat16(), torch.randn(2, 64, 128).bfloat16(), padless.group_offsets([1, 3])
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(ValueError, match="x has a tangent"):
        padless.quantize(forward_ad.make_dual(x, torch.ones_like(x)), FP8_BLOCK)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="a has a tangent"):
        padless.grouped_gemm(forward_ad.make_dual(x, torch.ones_like(x)), w, offs)


@pytest.mark.parametrize("wrong", [{"config": ["x"]}, {"config": {}}, {"out_dtype": ["x"]}], ids=repr)
def test_options_without_a_hash_are_refused_in_a_sentence(gpu: hopper.Gpu, wrong: dict[str, Any]) -> None:
    a, b, offs = operands()
    for _ in range(2):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            padless.grouped_gemm(a, b, offs, **wrong)
        padless.grouped_gemm(a, b, offs)


def test_a_flag_without_a_hash_is_refused_in_a_sentence(gpu: hopper.Gpu) -> None:
    dy, out = torch.zeros(16, 16, dtype=torch.bfloat16), torch.empty(2, 16, 16)
    with pytest.raises(ValueError, match="accumulate"):
        padless.grouped_gemm_wgrad(dy, dy, offs=operands()[2], out=out, accumulate=[])  # type: ignore[arg-type]


def test_a_missing_compiler_is_looked_for_again(gpu: hopper.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(jit, "nvrtc_version", missing)
        with pytest.raises(ValueError, match="NVRTC"):
            padless.grouped_gemm(*operands())
    assert devices.backends()["cuda"].available
    padless.grouped_gemm(*operands())
    assert gpu.launched


def blocked(rows: int) -> BlockScaledTensor:
    scale = torch.zeros(blocked_size(rows, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes = torch.zeros(rows, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return BlockScaledTensor(codes, scale, MXFP8, None, "blocked")


def test_the_table_of_a_list_outlives_launches_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed when what is remembered is forgotten, by torch in the order of the streams that it was told of."""
    tables: list[int] = []
    right = LISTS.prepare_list

    def noted(*given: Any) -> Any:
        found = right(*given)
        tables.append(found.table.data_ptr())
        return found

    monkeypatch.setattr(LISTS, "prepare_list", noted)
    with hopper.pretended(arch="sm_100a") as gpu:
        a, b, out = [blocked(16)], [blocked(128)], [torch.empty(16, 128, dtype=torch.bfloat16)]
        for _ in range(2):
            padless.grouped_gemm_list(a, b, out=out)
        assert gpu.orders == []
        for stream in (0x9000, 0xA000):
            gpu.stream, gpu.orders = stream, []
            padless.grouped_gemm_list(a, b, out=out)
            assert gpu.launched[-1].stream == stream
            assert gpu.orders == [("wait", hopper.STREAM, stream), ("memory", tables[0], stream)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        gpu.orders = []
        padless.grouped_gemm_list(a, b, out=out)
        assert gpu.orders == []
    assert len(tables) == 1


def test_a_list_that_is_captured_before_it_was_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with hopper.pretended(arch="sm_100a"):
        a, b, out = [blocked(16)], [blocked(128)], [torch.empty(16, 128, dtype=torch.bfloat16)]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="call grouped_gemm_list once with these tensors before the capture"):
            padless.grouped_gemm_list(a, b, out=out)


@pytest.mark.parametrize("captured", [False, True])
def test_the_table_of_a_list_lives_as_long_as_a_graph_may_read_it(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[weakref.ref[torch.Tensor]] = []
    right = LISTS.prepare_list

    def noted(*given: Any) -> Any:
        found = right(*given)
        tables.append(weakref.ref(found.table))
        return found

    monkeypatch.setattr(LISTS, "prepare_list", noted)
    with hopper.pretended(arch="sm_100a"):
        a, b, out = [blocked(16)], [blocked(128)], [torch.empty(16, 128, dtype=torch.bfloat16)]
        padless.grouped_gemm_list(a, b, out=out)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        padless.grouped_gemm_list(a, b, out=out)
        assert len(tables) == 1
        remembered.forget()  # as after many other calls
        gc.collect()
        assert (tables[0]() is not None) == captured
