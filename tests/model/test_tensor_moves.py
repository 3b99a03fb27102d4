"""BlockScaledTensors as torch users expect of tensors: moved, copied, indexed, printed, saved and read back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless.formats import FORMATS, FP8_BLOCK, MXFP4_REPACKED, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.row_groups import RowGroups

OFFS = torch.tensor([3, 3, 7], dtype=torch.int32)
CASES: dict[str, Callable[[], BlockScaledTensor]] = {
    **{f"{f.name} activations": lambda f=f: made(f) for f in FORMATS},
    **{f"{f.name} weights": lambda f=f: made(f, kind="weight") for f in FORMATS},
    "FP8_BLOCK, row-major scales": lambda: made(FP8_BLOCK, scale_major="k"),
    "MXFP8 on tiles": lambda: made(MXFP8, scale_layout="blocked"),
    "MXFP8 weights on tiles": lambda: made(MXFP8, kind="weight", scale_layout="blocked"),
    "MXFP8 on groups' tiles": lambda: made(MXFP8, scale_layout="blocked_groups", offs=OFFS),
    "NVFP4 of groups": lambda: made(NVFP4, offs=OFFS),
    "MXFP4_REPACKED weights": lambda: made(MXFP4_REPACKED, kind="weight"),
    "codes with gaps": lambda: with_gaps(made(MXFP8)),
}


def made(fmt: BlockScaledFormat, **options: Any) -> BlockScaledTensor:
    shape = (3, 72, 160) if options.get("kind") == "weight" else (7, 160)
    if fmt == MXFP4_REPACKED:
        shape = (3, 64, 192)
    return padless.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)), fmt, **options)


def with_gaps(t: BlockScaledTensor) -> BlockScaledTensor:
    wide = torch.zeros((7, 200), dtype=torch.uint8)
    wide[:, :160] = t.data.view(torch.uint8)
    return BlockScaledTensor(wide.view(t.data.dtype)[:, :160], t.scale, t.format)


def assert_same(got: BlockScaledTensor, want: BlockScaledTensor) -> None:
    assert got.format is want.format
    assert (got.scale_layout, got.scale_major) == (want.scale_layout, want.scale_major)
    for name in ("data", "scale", "global_scale", "offs"):
        x, y = getattr(got, name), getattr(want, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            raw = [t.contiguous() if t.element_size() > 1 else t.view(torch.uint8) for t in (x, y)]
            assert torch.equal(*raw), name
    assert torch.equal(values(got), values(want))
    assert got.is_activation == want.is_activation
    assert got.is_weight == want.is_weight


def values(t: BlockScaledTensor) -> torch.Tensor:
    return padless.dequantize(t, offs=OFFS if t.offs is not None else None)


def saved(t: BlockScaledTensor) -> BlockScaledTensor:
    file = io.BytesIO()
    torch.save({"layers": [t]}, file)
    file.seek(0)
    read: BlockScaledTensor = torch.load(file, weights_only=True)["layers"][0]
    return read


COPIES: dict[str, Callable[[BlockScaledTensor], BlockScaledTensor]] = {
    "clone": lambda t: t.clone(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("case", CASES)
def test_a_copy_is_the_same_elsewhere(case: str, how: str) -> None:
    t = CASES[case]()
    got = COPIES[how](t)
    assert_same(got, t)
    assert got.data.data_ptr() != t.data.data_ptr()
    assert got.scale.data_ptr() != t.scale.data_ptr()
    t.data.view(torch.uint8).zero_()
    assert got.data.view(torch.uint8).any()


@pytest.mark.parametrize("how", [*COPIES, "copy"])
def test_a_copy_is_for_the_groups_that_its_scales_were_made_for(how: str) -> None:
    """Also where offs has been written to in the meantime, as a buffer of sizes is."""
    x, weights = torch.randn(7, 160), made(NVFP4, kind="weight")
    offs = OFFS.clone()
    t = padless.quantize(x, NVFP4, offs=offs, global_scale=torch.tensor([1.0, 2.0, 3.0]))
    want = padless.grouped_gemm(t, weights, OFFS)
    offs.copy_(torch.tensor([1, 2, 7]))
    got = (COPIES | {"copy": copy.copy})[how](t)
    assert got.offs is not None
    assert got.offs.tolist() == OFFS.tolist()
    assert torch.equal(padless.grouped_gemm(got, weights, OFFS), want)
    with pytest.raises(ValueError, match=r"^offs\[0\] is 1 and a has scales for groups of which that one ends at 3"):
        padless.grouped_gemm(got, weights, offs)


@pytest.mark.parametrize("how", [*COPIES, "copy"])
def test_a_copy_whose_groups_are_gone_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where nothing waits for values, offs alone has them."""
    offs = OFFS.clone()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        groups = RowGroups(offs)
    t = padless.quantize(torch.randn(7, 160), NVFP4, offs=offs, global_scale=torch.tensor([1.0, 2.0, 3.0]))
    object.__setattr__(t, "row_groups", groups)
    assert (COPIES | {"copy": copy.copy})[how](t).offs is not None
    offs.add_(0)
    with pytest.raises(ValueError, match=r"^offs was written to since t was quantized with it"):
        (COPIES | {"copy": copy.copy})[how](t)


@pytest.mark.parametrize("how", [name for name in COPIES if name != "clone"])
def test_copies_of_grouped_columns(how: str) -> None:
    t = padless.quantize_rows_columns(torch.randn(7, 160).bfloat16(), OFFS)[1]
    got: Any = COPIES[how](t)  # type: ignore[arg-type]
    for name in ("data", "scale", "offs", "starts", "block_starts"):
        mine, other = getattr(t, name), getattr(got, name)
        assert other.dtype == mine.dtype
        assert other.stride() == mine.stride()
        assert torch.equal(*(x.view(torch.uint8) if x.element_size() == 1 else x for x in (mine, other)))
        assert other.data_ptr() != mine.data_ptr()
    assert (got.block, got.alignment) == (t.block, t.alignment)


@pytest.mark.parametrize("case", CASES)
def test_to_moves_every_part(case: str) -> None:
    t = CASES[case]()
    moved = (
        t.to("meta") if t.offs is None else None
    )  # values of offs on meta cannot be remembered, nor are they asked for
    if moved is not None:
        parts = (moved.data, moved.scale, *(() if moved.global_scale is None else (moved.global_scale,)))
        assert {part.device.type for part in parts} == {"meta"}
        assert moved.scale.stride() == t.scale.stride()
        assert moved.logical_shape == t.logical_shape
    assert t.to("cpu") is t
    assert t.cpu() is t
    assert t.to(torch.device("cpu")) is t


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("case", CASES)
def test_to_a_gpu_and_back(case: str) -> None:
    t = CASES[case]()
    there = t.cuda()
    assert there.device.type == "cuda"
    assert there.to("cuda") is there
    assert_same(there.cpu(), t)


def test_to_takes_no_dtype() -> None:
    with pytest.raises(ValueError, match=r"^device is torch.float32; to\(\) moves, and padless.dequantize"):
        made(MXFP8).to(torch.float32)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_to_a_gpu_that_is_not_there() -> None:
    with pytest.raises((AssertionError, RuntimeError)):  # torch's own
        made(MXFP8).cuda()


# --- groups of weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_weights_are_indexed_by_group(fmt: BlockScaledFormat, layout: str) -> None:
    if fmt == FP8_BLOCK and layout == "blocked":
        layout = "plain"
    w = made(fmt, kind="weight", scale_layout=layout)
    whole = padless.dequantize(w)
    for group in (0, 2, -1):
        one = w[group]
        assert one.is_weight
        assert torch.equal(padless.dequantize(one), whole[group])
        assert one.data.data_ptr() == w.data[group].data_ptr()  # a view
    for some in (slice(1, None), slice(0, 2), slice(1, 1)):
        assert torch.equal(padless.dequantize(w[some]), whole[some])
    assert [tuple(one.shape) for one in w] == [tuple(w.shape[1:])] * 3  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        w[3]


def test_one_global_scale_serves_every_group() -> None:
    w = padless.quantize(torch.randn(3, 16, 32), NVFP4, kind="weight", global_scale=0.25)
    assert w[1].global_scale is not None
    assert w[1].global_scale.numel() == 1
    assert torch.equal(padless.dequantize(w[1:]), padless.dequantize(w)[1:])


def test_what_has_no_groups_is_not_indexed() -> None:
    with pytest.raises(ValueError, match=r"only weights \(G, N, K\) are indexed, by group"):
        made(MXFP8)[0]
    for bad in ([0], torch.tensor(0), None, (0, 1)):
        with pytest.raises(ValueError, match=r"^group must be an integer or a slice, got"):
            made(MXFP8, kind="weight")[bad]  # type: ignore[index]


# --- printed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_repr_is_a_line_without_values(case: str) -> None:
    text = repr(CASES[case]())
    assert len(text) < 140
    assert "tensor(" not in text


def test_repr_says_what_matters() -> None:
    t = made(NVFP4, offs=OFFS)
    assert repr(t) == ("BlockScaledTensor(NVFP4, (7, 160), scale (7, 10), plain, global_scale (3,), for 3 groups, cpu)")
    assert repr(made(FP8_BLOCK)) == "BlockScaledTensor(FP8_BLOCK, (7, 160), scale (7, 2), mn-major, cpu)"


# --- modules ---------------------------------------------------------------------------------------------


class Expert(torch.nn.Module):
    """Keeps its weights as extra state, as modules do with what is no tensor."""

    def __init__(self, w: BlockScaledTensor) -> None:
        super().__init__()
        self.w = w

    def get_extra_state(self) -> BlockScaledTensor:
        return self.w

    def set_extra_state(self, state: BlockScaledTensor) -> None:
        self.w = state


def test_a_modules_state() -> None:
    first, second = (Expert(made(NVFP4, kind="weight")) for _ in range(2))
    first.w.data.view(torch.uint8)[0, 0, 0] ^= 1
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(first).state_dict(), file)
    file.seek(0)
    torch.nn.Sequential(second).load_state_dict(torch.load(file, weights_only=True))
    assert_same(second.w, first.w)


def test_a_format_of_ones_own_is_read_back() -> None:
    own = BlockScaledFormat("OWN", torch.float8_e4m3fn, torch.float32, (1, 64), (64, 64), 448.0)
    t = BlockScaledTensor(torch.zeros((2, 128), dtype=torch.uint8).view(own.data_dtype), torch.ones(2, 2), own)
    assert saved(t).format == own
    assert pickle.loads(pickle.dumps(MXFP8)) is MXFP8


def test_a_file_that_was_changed_is_refused() -> None:
    """What is read goes through the same checks as what is made."""
    t = made(MXFP8)
    rebuild, parts = t.__reduce__()
    with pytest.raises(ValueError, match="scale must have shape"):
        rebuild(parts[0], parts[1][:3], *parts[2:])  # type: ignore[operator]
