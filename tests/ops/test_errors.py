"""Bad calls: each gets a ValueError that names the argument, what it was and what is allowed, and writes nothing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, MXFP8, MXFP8_E5M2, BlockScaledTensor
from padless.runtime import devices
from support.ragged import GuardedOutput

# The function has the name of its module.
MODULE = importlib.import_module("padless.ops.grouped_gemm")
M, N, K, G = 6, 24, 256, 2


def codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 100, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)


def activation(m: int = M, k: int = K) -> BlockScaledTensor:
    return BlockScaledTensor(codes(m, k), torch.ones((m, -(-k // 128))), FP8_BLOCK)


def weight(groups: int = G, n: int = N, k: int = K) -> BlockScaledTensor:
    return BlockScaledTensor(codes(groups, n, k), torch.ones((groups, -(-n // 128), -(-k // 128))), FP8_BLOCK)


def with_data(t: BlockScaledTensor, data: torch.Tensor) -> BlockScaledTensor:
    return BlockScaledTensor(data, t.scale, t.format)


def with_scale(t: BlockScaledTensor, scale: torch.Tensor) -> BlockScaledTensor:
    return BlockScaledTensor(t.data, scale, t.format)


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values at an address `elements` further than an aligned one."""
    storage = torch.zeros(t.numel() + elements, dtype=t.dtype)
    storage[elements:] = t.flatten()
    return storage[elements:].view(t.shape)


def rows_apart(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values with rows `elements` further apart."""
    wide = torch.zeros((*t.shape[:-1], t.shape[-1] + elements), dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def column_major(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-2, -1).contiguous().transpose(-2, -1)


def meta(t: BlockScaledTensor) -> BlockScaledTensor:
    return BlockScaledTensor(t.data.to("meta"), t.scale.to("meta"), t.format)


OFFS = torch.tensor([2, 6], dtype=torch.int32)


@dataclass(frozen=True)
class Bad:
    """A call with one argument wrong, and what the message must say: the argument, its value, the remedy."""

    name: str
    arguments: Callable[[], dict[str, Any]]
    says: tuple[str, ...]


BAD_CALLS = [
    # what a and b are
    Bad("a_is_a_tensor", lambda: {"a": torch.ones(M, K)}, ("a must be a BlockScaledTensor", "(6, 256) torch.float32")),
    Bad("b_is_none", lambda: {"b": None}, ("b must be a BlockScaledTensor", "NoneType", "padless.quantize")),
    Bad("a_rank", lambda: {"a": weight()}, ("a must have rank 2, (M, K)", "(2, 24, 256)")),
    Bad(
        "b_rank",
        lambda: {"b": BlockScaledTensor(codes(N, K), torch.ones((1, 2)), FP8_BLOCK)},
        ("b must have rank 3, (G, N, K)", "(24, 256)"),
    ),
    Bad(
        "a_format",
        lambda: {"a": padless.quantize(torch.ones(M, K), MXFP8)},
        ("a has format MXFP8", "supported: FP8_BLOCK"),
    ),
    Bad(
        "b_format",
        lambda: {"b": padless.quantize(torch.ones(G, N, K), MXFP8_E5M2, kind="weight")},
        ("b has format MXFP8_E5M2", "supported: FP8_BLOCK"),
    ),
    Bad(
        "a_with_weight_scales",
        lambda: {"a": BlockScaledTensor(codes(M, K), torch.ones((1, 2)), FP8_BLOCK)},
        ("a has scales of shape (1, 2)", "kind='activation'"),
    ),
    # shapes
    Bad("k_differs", lambda: {"b": weight(k=384)}, ("(6, 256)", "(2, 24, 384)", "K must be the same")),
    Bad("k_not_16", lambda: {"a": activation(k=264), "b": weight(k=264)}, ("K is 264", "positive multiple of 16")),
    Bad("k_zero", lambda: {"a": activation(k=0), "b": weight(k=0)}, ("K is 0", "positive multiple of 16")),
    Bad("n_not_8", lambda: {"b": weight(n=20), "out": None}, ("N is 20", "multiple of 8", "bfloat16")),
    Bad(
        "n_not_4",
        lambda: {"b": weight(n=22), "out": None, "out_dtype": torch.float32},
        ("N is 22", "multiple of 4", "float32"),
    ),
    Bad(
        "too_many_groups",
        lambda: {"b": weight(groups=4097, n=8, k=K), "offs": torch.zeros(4097, dtype=torch.int32), "out": None},
        ("b has 4097 groups", "at most 4096"),
    ),
    # devices
    Bad("b_device", lambda: {"b": meta(weight())}, ("b is on meta and a on cpu", "one device")),
    Bad("offs_device", lambda: {"offs": OFFS.to("meta")}, ("offs is on meta and a on cpu", "one device")),
    Bad(
        "out_device",
        lambda: {"out": torch.empty((M, N), dtype=torch.bfloat16, device="meta")},
        ("out must be (M, N) = (6, 24) on cpu", "on meta"),
    ),
    # offs
    Bad("offs_none", lambda: {"offs": None}, ("offs is None and b has 2 groups", "padless.group_offsets")),
    Bad(
        "offs_none_of_one_group",
        lambda: {"offs": None, "b": weight(groups=1)},
        ("offs is None and b has 1 group;", "padless.group_offsets"),
    ),
    Bad("offs_list", lambda: {"offs": [2, 6]}, ("offs must be a 1-D int32 or int64 tensor", "list", "group_offsets")),
    Bad("offs_int16", lambda: {"offs": OFFS.short()}, ("offs must be a 1-D int32 or int64 tensor", "torch.int16")),
    Bad("offs_rank", lambda: {"offs": OFFS[None]}, ("offs must be a 1-D int32 or int64 tensor", "(1, 2)")),
    Bad("offs_short", lambda: {"offs": OFFS[:1]}, ("offs has 1 entries and b 2 groups",)),
    Bad(
        "offs_with_a_leading_zero",
        lambda: {"offs": torch.tensor([0, 2, 6], dtype=torch.int32)},
        ("offs has 3 entries and b 2 groups",),
    ),
    Bad("offs_strided", lambda: {"offs": OFFS.repeat_interleave(2)[::2]}, ("offs", "stride 2", ".contiguous()")),
    # out
    Bad("out_shape", lambda: {"out": torch.empty((M + 1, N), dtype=torch.bfloat16)}, ("(6, 24)", "(7, 24)")),
    Bad("out_dtype_float64", lambda: {"out": torch.empty((M, N), dtype=torch.float64)}, ("out", "torch.float64")),
    Bad("out_is_numpy", lambda: {"out": torch.empty((M, N)).numpy()}, ("out must be", "ndarray")),
    Bad(
        "out_dtype",
        lambda: {"out": None, "out_dtype": torch.float8_e4m3fn},
        ("out_dtype is torch.float8_e4m3fn", "bfloat16, torch.float16, torch.float32"),
    ),
    # layouts
    Bad(
        "a_column_major",
        lambda: {"a": with_data(activation(), column_major(codes(M, K)))},
        ("a.data has strides (1, 6)", "the last must be 1", ".contiguous()"),
    ),
    Bad(
        "a_rows_apart",
        lambda: {"backend": "emulator", "a": with_data(activation(), rows_apart(codes(M, K), 8))},
        ("a.data has strides (264, 1)", "multiples of 16 bytes", ".contiguous()"),
    ),
    Bad(
        "a_rows_on_top_of_each_other",
        lambda: {"a": with_data(activation(), codes(1, K).expand(M, K))},
        ("a.data has strides (0, 1)", ".contiguous()"),
    ),
    Bad(
        "b_column_major",
        lambda: {"b": with_data(weight(), column_major(codes(G, N, K)))},
        ("b.data has strides (6144, 1, 24)", ".contiguous()"),
    ),
    Bad(
        "out_column_major",
        lambda: {"out": column_major(torch.zeros((M, N), dtype=torch.bfloat16))},
        ("out has strides (1, 6)", ".contiguous()"),
    ),
    Bad(
        "out_rows_apart",
        lambda: {"backend": "emulator", "out": rows_apart(torch.zeros((M, N), dtype=torch.float16), 4)},
        ("out has strides (28, 1)", "multiples of 16 bytes"),
    ),
    Bad(
        "a_misaligned",
        lambda: {
            "backend": "emulator",
            "a": with_data(activation(), shifted(codes(M, K).view(torch.uint8), 8).view(torch.float8_e4m3fn)),
        },
        ("a.data is at address 0x", "16-byte aligned", "clone"),
    ),
    Bad(
        "b_misaligned",
        lambda: {
            "backend": "emulator",
            "b": with_data(weight(), shifted(codes(G, N, K).view(torch.uint8), 1).view(torch.float8_e4m3fn)),
        },
        ("b.data is at address 0x", "16-byte aligned", "clone"),
    ),
    Bad(
        "out_misaligned",
        lambda: {"backend": "emulator", "out": shifted(torch.zeros((M, N), dtype=torch.bfloat16), 4)},
        ("out is at address 0x", "16-byte aligned", "clone"),
    ),
    Bad(
        "a_scale_misaligned",
        lambda: {"backend": "emulator", "a": with_scale(activation(), shifted(torch.ones((M, 2)), 1))},
        ("a.scale is at address 0x", "16-byte aligned"),
    ),
    # backends
    Bad(
        "backend_unknown",
        lambda: {"backend": "gpu"},
        ("backend is 'gpu'", "allowed: None, 'cuda', 'emulator', 'emulator:sm_100a', 'reference'"),
    ),
]


@pytest.mark.parametrize("bad", BAD_CALLS, ids=lambda bad: bad.name)
def test_a_bad_call_is_refused_in_words(bad: Bad) -> None:
    guarded = GuardedOutput(M, N, torch.bfloat16)
    arguments = {"a": activation(), "b": weight(), "offs": OFFS, "out": guarded.out, **bad.arguments()}
    with pytest.raises(ValueError, match=re.escape(bad.says[0])) as error:
        padless.grouped_gemm(**arguments)
    for words in bad.says:
        assert words in str(error.value)
    guarded.check(0)


def test_the_call_they_are_made_from_is_good() -> None:
    guarded = GuardedOutput(M, N, torch.bfloat16)
    padless.grouped_gemm(activation(), weight(), OFFS, out=guarded.out)
    guarded.check(M)


def test_a_bad_call_is_refused_by_check_offs_too() -> None:
    """With check_offs the values of offs are looked at, so that it is a tensor has to be known before."""
    for bad in BAD_CALLS:
        if bad.name.startswith("offs"):
            arguments = {"a": activation(), "b": weight(), "offs": OFFS, **bad.arguments()}
            with pytest.raises(ValueError, match=re.escape(bad.says[0])):
                padless.grouped_gemm(**arguments, check_offs=True)


@pytest.mark.parametrize("backend", ["reference", "emulator", "emulator:sm_100a"])
@pytest.mark.parametrize("fmt", [FP8_BLOCK, MXFP8], ids=lambda fmt: fmt.name)
def test_no_backend_takes_a_missing_offs_for_one_group(fmt: Any, backend: str) -> None:
    """Every row would be multiplied by the first group's weights."""
    a = padless.quantize(torch.randn(M, K), fmt)
    b = padless.quantize(torch.randn(G, N, K), fmt, kind="weight")
    guarded = GuardedOutput(M, N, torch.bfloat16)
    with pytest.raises(ValueError, match="offs is None and b has 2 groups"):
        padless.grouped_gemm(a, b, None, out=guarded.out, backend=backend)  # type: ignore[arg-type]
    guarded.check(0)


@pytest.mark.parametrize("b", [torch.ones(N, K), None, weight()], ids=["tensor", "none", "grouped"])
def test_the_dense_product_takes_two_dimensions(b: object) -> None:
    with pytest.raises(ValueError, match=re.escape("b must be a BlockScaledTensor of rank 2, (N, K)")):
        padless.gemm(activation(), b)


def test_the_dense_product_names_b_when_its_scales_are_wrong() -> None:
    with pytest.raises(ValueError, match=r"^b .*kind='weight'"):
        padless.gemm(activation(), activation(m=N))


def test_the_weights_of_one_expert_can_be_taken_from_the_stack() -> None:
    b = weight(k=272)  # three scales to an expert: the second one's start at byte 12
    padless.gemm(activation(k=272), BlockScaledTensor(b.data[1], b.scale[1], FP8_BLOCK))


def test_what_torch_calls_contiguous_is() -> None:
    """The message says `call .contiguous()`, and that changes nothing here: one row with strides (1, 1)."""
    one_row = codes(K, 1).t()
    assert one_row.is_contiguous()
    padless.grouped_gemm(with_data(activation(m=1), one_row), weight(groups=1), torch.tensor([1], dtype=torch.int32))


def test_too_many_rows_for_the_kernels_arithmetic() -> None:
    """Meta tensors: shapes without memory."""
    for m, n, k, what in (
        (2**30, N, 16, "each must be below 2^30"),
        (M, 2**30, 16, "each must be below 2^30"),
        (M, N, 2**30, "each must be below 2^30"),
        (2**27, N, 16 * 128, "M * ceil(K / 128) must be below 2^31"),
    ):
        data = torch.empty((m, k), dtype=torch.float8_e4m3fn, device="meta")
        a = BlockScaledTensor(data, torch.empty((m, -(-k // 128)), device="meta"), FP8_BLOCK)
        codes_of_b = torch.empty((2, n, k), dtype=torch.float8_e4m3fn, device="meta")
        scale_of_b = torch.empty((2, -(-n // 128), -(-k // 128)), device="meta")
        b = BlockScaledTensor(codes_of_b, scale_of_b, FP8_BLOCK)
        with pytest.raises(ValueError, match=re.escape(what)):
            padless.grouped_gemm(a, b, torch.empty(2, dtype=torch.int32, device="meta"))
    for m, n, k in ((2**30, N, 16), (M, 2**30, 16), (M, N, 2**30)):
        a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
        with pytest.raises(ValueError, match=re.escape(f"M is {m}, N is {n} and K is {k}; each must be below 2^30")):
            padless.gemm(a, b)


@pytest.mark.parametrize("backend", ["cuda", "emulator", "emulator:sm_100a"])
def test_a_backend_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    found = dict(padless.backends())
    found[backend] = type(found[backend])(backend, False, "it was taken away")
    monkeypatch.setattr(devices, "backends", lambda: found)
    with pytest.raises(ValueError, match=f"backend '{backend}' is not available here: it was taken away"):
        padless.grouped_gemm(activation(), weight(), OFFS, backend=backend)


def test_a_gpu_backend_wants_tensors_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(padless.backends())
    found["cuda"] = type(found["cuda"])("cuda", True, "pretended")
    monkeypatch.setattr(devices, "backends", lambda: found)
    with pytest.raises(ValueError, match="backend is 'cuda' and the tensors are on cpu; move them"):
        padless.grouped_gemm(activation(), weight(), OFFS, backend="cuda")
