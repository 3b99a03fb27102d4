"""Scales that belong to groups of rows: a call with other groups is refused by every backend, one with the same runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import layouts
from padless.formats import MXFP8, NVFP4, BlockScaledTensor
from padless.kernels import remembered as memory
from padless.row_groups import RowGroups
from padless.runtime import driver
from support.ragged import GuardedOutput

M, N, K = 300, 64, 96
SIZES = [0, 127, 129, 1]  # 43 rows belong to nobody
BACKENDS = [None, "reference", "emulator", "emulator:sm_100a"]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(fmt: padless.BlockScaledFormat, groups: int = 4) -> BlockScaledTensor:
    return padless.quantize(normal(groups, N, K), fmt, kind="weight")


def activations(fmt: padless.BlockScaledFormat, offs: torch.Tensor, **options: Any) -> BlockScaledTensor:
    return padless.quantize(normal(M, K), fmt, offs=offs, **options)


def offsets(sizes: list[int] = SIZES) -> torch.Tensor:
    return padless.group_offsets(sizes)


def on_tiles(fmt: padless.BlockScaledFormat = MXFP8) -> BlockScaledTensor:
    return activations(fmt, offsets(), scale_layout="blocked_groups")


def calls(a: BlockScaledTensor, offs: torch.Tensor, backend: str | None) -> list[Callable[[], Any]]:
    """The calls with groups of rows; outputs are guarded where the caller gives them."""
    b = weights(a.format, len(offs))
    guarded = GuardedOutput(a.shape[0], N, torch.bfloat16)

    def product() -> None:
        try:
            padless.grouped_gemm(a, b, offs, out=guarded.out, backend=backend)
        finally:
            guarded.check(0)

    quant = {"a_tensor": a, "b_tensor": b, "padded_offsets": offs, "backend": backend}
    return [
        product,
        lambda: padless.grouped_gemm(a, b, offs, backend=backend, check_offs=True),
        lambda: padless.grouped_gemm_quant(**quant, d_format=MXFP8),
        lambda: padless.grouped_gemm_swiglu_quant(**quant, gate_up="concatenated"),
    ]


# --- global scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [2, 5])
def test_another_number_of_global_scales_is_refused(groups: int, backend: str | None) -> None:
    """Made by hand, so that nothing but their number is known."""
    made = activations(NVFP4, offsets())
    a = BlockScaledTensor(made.data, made.scale, NVFP4, made.global_scale)
    offs = offsets([10] * groups)
    wanted = f"a.global_scale has 4 values and b {groups} groups; it must have one value, or one for each group"
    for call in calls(a, offs, backend):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            call()


def test_the_dense_product_takes_one_global_scale() -> None:
    made, w = activations(NVFP4, offsets()), padless.quantize(normal(N, K), NVFP4, kind="weight")
    a = BlockScaledTensor(made.data, made.scale, NVFP4, made.global_scale)
    b = BlockScaledTensor(w.data, w.scale, NVFP4, torch.rand(3), w.scale_layout)
    one = BlockScaledTensor(made.data, made.scale, NVFP4, made.global_scale[:1])
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"^a\.global_scale has 4 values"):
            padless.gemm(a, w, backend=backend)
        with pytest.raises(ValueError, match=r"^b\.global_scale has 3 values"):
            padless.gemm(one, b, backend=backend)
    for problem in ({"a": [a], "b": [w]}, {"a": [one], "b": [b]}):
        with pytest.raises(ValueError, match=r"^problem 0: [ab]\.global_scale has [34] values"):
            padless.grouped_gemm_list(**problem)
    of_no_dimension = BlockScaledTensor(one.data, one.scale, NVFP4, one.global_scale[0])
    assert torch.equal(padless.gemm(one, w), padless.gemm(of_no_dimension, w))


def test_one_global_scale_serves_any_groups() -> None:
    a, b = padless.quantize(normal(M, K), NVFP4), weights(NVFP4)
    wanted = padless.grouped_gemm(a, b, offsets())
    given = padless.quantize(normal(M, K), NVFP4, offs=offsets([7, 8]), global_scale=a.global_scale)
    assert given.offs is None, "nothing in it depends on groups"
    assert torch.equal(padless.grouped_gemm(given, b, offsets())[:257], wanted[:257])


# --- scales made for other groups ------------------------------------------------------------------------

MADE: dict[str, Callable[[], BlockScaledTensor]] = {
    "MXFP8 on tiles": on_tiles,
    "NVFP4 on tiles": lambda: on_tiles(NVFP4),
    "NVFP4": lambda: activations(NVFP4, offsets()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made", MADE)
def test_other_groups_are_refused(made: str, backend: str | None) -> None:
    a = MADE[made]()
    for sizes, wanted in (
        ([127, 130], "for 4 groups of rows and b has 2 groups"),
        ([0, 128, 128, 1], "offs[1] is 128 and a has scales for groups of which that one ends at 127"),
        ([0, 127, 129, 2], "offs[3] is 258 and a has scales for groups of which that one ends at 257"),
    ):
        for call in calls(a, offsets(sizes), backend):
            with pytest.raises(ValueError, match=re.escape(wanted)):
                call()


@pytest.mark.parametrize("made", MADE)
def test_equal_groups_are_accepted(made: str) -> None:
    """Other tensors, of equal values; values that differ and mean the same rows; a copy of the operand."""
    a = MADE[made]()
    b = weights(a.format)
    plain = BlockScaledTensor(a.data, layouts.plain_scale(a, offsets()), a.format, a.global_scale)
    wanted = padless.grouped_gemm(plain, b, offsets())
    assert wanted[:257].isfinite().all()
    for again in (a, copy.deepcopy(a)):
        assert torch.equal(padless.grouped_gemm(again, b, offsets())[:257], wanted[:257])
    assert torch.equal(padless.grouped_gemm(a, b, offsets().long())[:257], wanted[:257])
    with pytest.raises(ValueError, match=r"offs\[0\] is -3"):  # the same rows, but no partition
        padless.grouped_gemm(a, b, torch.tensor([-3, 127, 256, 257], dtype=torch.int32))
    values = [padless.dequantize(t, offs=offsets())[:257] for t in (a, plain)]
    assert torch.equal(*values)


def test_an_offs_that_was_written_to_since_is_refused() -> None:
    offs = offsets()
    a = activations(MXFP8, offs, scale_layout="blocked_groups")
    offs[1] += 1
    with pytest.raises(ValueError, match=r"^offs\[1\] is 128 and a has scales for groups"):
        padless.grouped_gemm(a, weights(MXFP8), offs)


def test_dequantize_looks_too() -> None:
    for made in MADE.values():
        t = made()
        with pytest.raises(ValueError, match=r"^offs\[1\] is 128 and t has scales for groups"):
            padless.dequantize(t, offs=offsets([0, 128, 128, 1]))
        with pytest.raises(ValueError, match=r"^t has scales for 4 groups of rows and offs has 3 groups"):
            padless.dequantize(t, offs=offsets([0, 128, 128]))


def test_the_dense_product_is_one_group_of_all_rows() -> None:
    b = padless.quantize(normal(N, K), MXFP8, kind="weight")
    whole = activations(MXFP8, offsets([M]), scale_layout="blocked_groups")
    assert torch.equal(padless.gemm(whole, b), padless.gemm(padless.quantize(normal(M, K), MXFP8), b))
    with pytest.raises(ValueError, match=r"^a has scales for a group that ends at row 257 and M is 300"):
        padless.gemm(activations(MXFP8, offsets([257]), scale_layout="blocked_groups"), b)
    with pytest.raises(ValueError, match=r"^a has scales for 4 groups of rows and b has 1 group;"):
        padless.gemm(on_tiles(), b)


def test_codes_of_a_fused_epilogue_remember_their_groups() -> None:
    operands = {"a_tensor": activations(NVFP4, offsets()), "b_tensor": weights(NVFP4), "padded_offsets": offsets()}
    b = padless.quantize(normal(4, 16, N), NVFP4, kind="weight")
    b2 = padless.quantize(normal(4, 16, N), MXFP8, kind="weight")
    scaled = padless.grouped_gemm_quant(**operands, d_format=NVFP4, global_scale_tensor=torch.full((4,), 0.01))
    tiled = padless.grouped_gemm_quant(**operands, d_format=MXFP8, row_layout="blocked_groups")
    for row, w in ((scaled.row, b), (tiled.row, b2)):
        assert row is not None
        padless.grouped_gemm(row, w, offsets())
        with pytest.raises(ValueError, match=r"^offs\[1\] is 128 and a has scales"):
            padless.grouped_gemm(row, w, offsets([0, 128, 128, 1]))


# --- made by hand ----------------------------------------------------------------------------------------


def test_scales_without_room_for_the_groups_are_refused() -> None:
    """Of scales on tiles whose groups nobody said, their number of tiles is known: 3 here, and these groups need 4."""
    a = activations(MXFP8, offsets([128, 129]), scale_layout="blocked_groups")
    by_hand = BlockScaledTensor(a.data, a.scale[: 3 * 512], MXFP8, None, "blocked_groups")
    padless.grouped_gemm(by_hand, weights(MXFP8, 2), offsets([128, 129]))
    with pytest.raises(ValueError, match=r"^a\.scale has 3 tiles of 128 rows and the groups of offs need 4"):
        padless.grouped_gemm(by_hand, weights(MXFP8, 4), offsets(SIZES))


def test_a_hand_made_tensor_can_say_its_groups() -> None:
    a = on_tiles()
    by_hand = BlockScaledTensor(a.data, a.scale, MXFP8, None, "blocked_groups", offs=offsets())
    with pytest.raises(ValueError, match=r"^offs\[1\] is 128 and a has scales"):
        padless.grouped_gemm(by_hand, weights(MXFP8), offsets([0, 128, 128, 1]))
    assert BlockScaledTensor(a.data, layouts.plain_scale(a, offsets()), MXFP8, offs=offsets()).offs is None
    for offs, wanted in (
        (offsets()[None], "offs must be a 1-D tensor of integers"),
        (offsets().float(), "offs must be a 1-D tensor of integers"),
        (SIZES, "offs must be a 1-D tensor of integers"),
        (offsets().to("meta"), "offs must be on data's device cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            BlockScaledTensor(a.data, a.scale, MXFP8, None, "blocked_groups", offs=offs)  # type: ignore[arg-type]
    n = activations(NVFP4, offsets())
    with pytest.raises(ValueError, match="global_scale has 4 values and offs 3 groups"):
        BlockScaledTensor(n.data, n.scale, NVFP4, n.global_scale, offs=offsets()[:3])


# --- on a GPU, where values are not looked at --------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in host memory that say they are on a GPU, whose values cannot be read."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    monkeypatch.setattr(memory, "_KNOWN", {})
    monkeypatch.setattr(driver, "current_stream", lambda index: 0)
    for reading in ("tolist", "item", "__int__", "__bool__", "clone"):
        monkeypatch.setattr(torch.Tensor, reading, lambda *_: pytest.fail("waits for the GPU"))


def test_on_a_gpu_the_tensor_itself_counts(on_gpu: None) -> None:
    made, offs, same_values = made_on_gpu()
    launches = remembered(made, offs)
    padless.grouped_gemm(*launches.arguments, out=launches.out)
    padless.grouped_gemm(made, launches.arguments[1], offs.view(-1), out=launches.out)
    assert launches.count == 2, "the same memory is the same tensor"
    other = r"^offs is another tensor than the one that a was quantized with, or was written to since; pass that one"
    b = launches.arguments[1]
    with pytest.raises(ValueError, match=other):
        padless.grouped_gemm(made, b, same_values, out=launches.out)
    with pytest.raises(ValueError, match=r"^a has scales for 4 groups of rows and b has 3 groups"):
        padless.grouped_gemm(made, BlockScaledTensor(b.data[:3], b.scale[:3], b.format), offs[:3])
    offs.add_(0)
    with pytest.raises(ValueError, match=other):
        padless.grouped_gemm(*launches.arguments, out=launches.out)
    assert launches.count == 2, "nothing was launched for the calls that were refused"


def test_on_a_gpu_another_view_of_the_same_memory(on_gpu: None) -> None:
    ends = torch.tensor([4, 4, 16, 16], dtype=torch.int32)
    made = RowGroups(ends[::2])
    assert made.is_of(ends[::2])
    assert not made.is_of(ends[:2])


def test_on_a_gpu_offs_whose_data_was_assigned(on_gpu: None) -> None:
    ends = torch.tensor([4, 8, 16], dtype=torch.int32)
    made = RowGroups(ends)
    assert made.is_of(ends)
    ends.data = torch.tensor([1, 2, 16], dtype=torch.int32)
    assert not made.is_of(ends)


def test_on_a_gpu_another_tensor_in_the_place_of_a_remembered_one(on_gpu: None) -> None:
    """The launch of an operand is remembered by addresses; another operand there, made for other groups, is refused."""
    made, offs, other = made_on_gpu()
    launches = remembered(made, offs)
    padless.grouped_gemm(*launches.arguments, out=launches.out)
    there = BlockScaledTensor(made.data, made.scale, MXFP8, None, "blocked_groups", offs=other)
    with pytest.raises(ValueError, match=r"^offs is another tensor than the one that a was quantized with"):
        padless.grouped_gemm(there, *launches.arguments[1:3], out=launches.out)
    assert launches.count == 1


def made_on_gpu() -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor]:
    """(activations on tiles, their offs, other offs with the same values)."""
    offs, other = (torch.tensor([0, 127, 256, 257], dtype=torch.int32) for _ in range(2))
    data = torch.zeros((M, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(layouts.blocked_size(layouts.blocked_groups_rows(M, 4), 3), dtype=torch.uint8)
    scale = scale.view(torch.float8_e8m0fnu)
    return BlockScaledTensor(data, scale, MXFP8, None, "blocked_groups", offs=offs), offs, other


class Remembered:
    """Operands whose launch is in the cache, and how often it was launched."""

    def __init__(self, a: BlockScaledTensor, offs: torch.Tensor):
        data = torch.zeros((4, N, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.zeros((4, N, K // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        self.out = torch.empty((M, N), dtype=torch.bfloat16)
        self.arguments = (a, BlockScaledTensor(data, scale, MXFP8), offs)
        self.count = 0

    def launch(self, stream: int) -> None:
        self.count += 1


def remembered(a: BlockScaledTensor, offs: torch.Tensor) -> Remembered:
    made = Remembered(a, offs)
    facts = memory.facts_of(("grouped_gemm", None), *made.arguments, offs=made.arguments[2])
    assert facts is not None
    memory.remember(facts, {memory.facts_of((None,), made.out): made.launch})
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["blocked_groups", "plain"])
@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda fmt: fmt.name)
def test_nothing_waits_for_a_real_gpu(fmt: padless.BlockScaledFormat, layout: str) -> None:
    """What is refused and what runs, twice, so that the second call is a remembered one; and gradients beside it."""
    offs, b = offsets().cuda(), padless.quantize(normal(4, N, K).cuda(), fmt, kind="weight")
    groups = {"offs": offs} if layout == "blocked_groups" or fmt == NVFP4 else {}
    a = padless.quantize(normal(M, K).cuda(), fmt, scale_layout=layout, **groups)
    out = torch.empty((M, N), dtype=torch.bfloat16, device="cuda")
    padless.grouped_gemm(a, b, offs, out=out)  # compiled
    want = out[:257].clone()
    other = offs.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            padless.grouped_gemm(a, b, offs, out=out.fill_(float("nan")))
            if groups:
                with pytest.raises(ValueError, match=r"^offs is another tensor than the one that a was quantized"):
                    padless.grouped_gemm(a, b, other, out=out)
        b.scale.requires_grad_()
        with pytest.raises(ValueError, match=r"^b\.scale requires grad"):
            padless.grouped_gemm(a, b, offs, out=out)
        with torch.no_grad():
            padless.grouped_gemm(a, b, offs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out[:257], want)
    assert not out.requires_grad
