"""The Triton quantizers of training against their definitions in torch, bit for bit, on any device.

A GPU runs the cases directly, Triton's interpreter in a process of its own. All memory that the kernels allocate is
poisoned first, so that what is not written differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from support.interpreter import Case, Cases, main
from support.triton_cases import awkward, bits

CASES = Cases()
case = CASES.add
# Cases of many programs; the others take a second or two each in the interpreter.
LONG: set[str] = set()


def long_case(function: Case) -> Case:
    """The same for what takes longer."""
    LONG.add(function.__name__)
    return case(function)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch.empty allocates is full of NaN, 0x7F or large numbers."""
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        t = original(*args, **options)
        return t.fill_(float("nan") if t.is_floating_point() else 0x7F)

    with mock.patch.object(torch, "empty", empty):
        yield


def offs_of(sizes: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], names: str) -> None:
    """Every tensor has the same shape, dtype, strides and bits; MN-major scales their padding too."""
    for name, a, b in zip(names.split(), got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        if a.dim() == 2 and a.stride(0) == 1 < a.stride(1) and name == "row_scale":
            a, b = (t.as_strided((t.stride(1), t.shape[1]), t.stride()) for t in (a, b))
        wrong = torch.nonzero(bits(a) != bits(b))
        assert len(wrong) == 0, f"{len(wrong)} bytes of {name} differ, the first at {wrong[0].tolist()}"


COLUMNS = "row_codes row_scale codes scale starts block_starts"


def rows_columns_pair(
    x: torch.Tensor, offs: torch.Tensor, block: tuple[int, int], alignment: int, rows: bool, device: str
) -> None:
    from padless.quantization.rows_columns import rows_columns_torch
    from padless.quantization.triton.rows_columns import rows_columns

    want = rows_columns_torch(x.cpu(), offs.cpu(), block, alignment, rows)
    with poisoned_memory():
        got = rows_columns(x.to(device), offs.to(device), block, alignment, rows)
    if not rows:
        assert got[0].numel() == got[1].numel() == 0
        got, want = got[2:], want[2:]
    assert_equal(got, want, COLUMNS if rows else COLUMNS.split(" ", 2)[2])


def swiglu_pair(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None,
    gate_up: str,
    block: tuple[int, int],
    alignment: int,
    device: str,
) -> None:
    from padless.quantization.swiglu_backward import swiglu_backward_torch
    from padless.quantization.triton.swiglu_backward import swiglu_backward

    operands = (dh, z, offs, prob)
    want = swiglu_backward_torch(*(None if t is None else t.cpu() for t in operands), gate_up, block, alignment)
    with poisoned_memory():
        moved = (None if t is None else t.to(device) for t in operands)
        got = swiglu_backward(*moved, gate_up, block, alignment)
    names = "row_codes row_scale dz_codes dz_scale hidden_codes hidden_scale starts block_starts dprob"
    assert_equal(got, want, names)


def weight_pair(w: torch.Tensor, device: str) -> None:
    from padless.quantization.triton.weight_both import weight_both
    from padless.quantization.weight_both import weight_both_torch

    with poisoned_memory():
        got = weight_both(w.to(device))
    assert_equal(got, weight_both_torch(w.cpu()), "codes scale transposed transposed_scale")


# --- rows and columns ------------------------------------------------------------------------------------


@case
def columns_by_feature(device: str) -> None:
    """Groups around a step of 32 and a block of 128, an empty one, rows past the last, a short block of features."""
    x = awkward((5 + 130 + 33 + 2, 144), torch.bfloat16, 1)
    rows_columns_pair(x, offs_of((5, 0, 130, 33), device), (1, 128), 32, True, device)


@case
def columns_by_square(device: str) -> None:
    x = awkward((127 + 3, 160), torch.float16, 2)
    rows_columns_pair(x, offs_of((127, 0, 1), device), (128, 128), 128, True, device)


@case
def columns_alone(device: str) -> None:
    x = awkward((40, 16), torch.float32, 3)
    for block in ((1, 128), (128, 128)):
        rows_columns_pair(x, offs_of((0, 31, 5), device), block, 32, False, device)


@case
def columns_of_no_rows(device: str) -> None:
    for alignment in (32, 128):
        x = torch.zeros(0, 48)
        rows_columns_pair(x, offs_of((0, 0, 0), device), (1, 128), alignment, True, device)
        rows_columns_pair(
            awkward((7, 48), torch.bfloat16, 4), offs_of((0, 0), device), (1, 128), alignment, True, device
        )


@case
def columns_of_wrong_offs(device: str) -> None:
    x = awkward((61, 32), torch.bfloat16, 5)
    for ends in ([90, 10, -5, 40], [-1, -1, -1], [2**31 - 1] * 3, [0, 2**30, -(2**31), 5], [60, 20, 0]):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        rows_columns_pair(x, offs, (1, 128), 32, True, device)


@case
def columns_of_strided_rows(device: str) -> None:
    wide = awkward((9, 320), torch.bfloat16, 6)
    for x in (wide[:, :48], wide[:, 1:50], wide[:, 1:49], wide.t()[:9, :8], wide[:, :64:2]):
        rows_columns_pair(x, offs_of((4, 3), device), (1, 128), 32, True, device)


@long_case
def columns_of_many_groups(device: str) -> None:
    """More groups than a power of two, sizes around every edge, all inputs."""
    sizes = (0, 1, 15, 16, 17, 31, 32, 33, 63, 65, 95, 97, 127, 128, 129, 0, 255, 257, 2, 0)
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        x = awkward((sum(sizes) + 140, 272), dtype, seed)
        for block in ((1, 128), (128, 128)):
            for alignment in (32, 128):
                rows_columns_pair(x, offs_of(sizes, device), block, alignment, True, device)


@case
def scale_boundaries(device: str) -> None:
    """Columns whose amax is at and next to the floor, 448, and float32's limits; and casts at every decision."""
    from support.triton_cases import code_boundaries

    values = code_boundaries(448.0, torch.float8_e4m3fn)
    count = values.numel() // 16 * 16
    x = values[:count].view(16, -1)
    x = torch.cat([x, torch.full_like(x[:1], 448.0)])  # scale 1: the codes are the cast alone
    rows_columns_pair(x, offs_of((17,), device), (1, 128), 32, True, device)
    floor = torch.tensor(1e-4)
    edges = [floor, *(torch.nextafter(floor, torch.tensor(d)) for d in (0.0, 1.0))]
    edges += [torch.tensor(v) for v in (3.4028234663852886e38, 1e-45, 0.0, float("inf"), float("nan"), 2.0**100)]
    x = torch.linspace(-1, 1, 20)[:, None] * torch.stack(edges)
    rows_columns_pair(x, offs_of((20,), device), (1, 128), 32, True, device)


# --- weights ---------------------------------------------------------------------------------------------


@case
def weights(device: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for shape in ((1, 1), (132, 144), (2, 127, 257), (0, 16, 16)):
            weight_pair(awkward(shape, dtype, seed), device)
    wide = awkward((2, 40, 320), torch.bfloat16, 7)
    for w in (wide[:, :, :144], wide.mT[:, :80], wide[..., 1:100]):
        weight_pair(w, device)


# --- SwiGLU ----------------------------------------------------------------------------------------------


def swiglu_operands(m: int, columns: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """(dh, z, prob) with zeros, subnormals, NaN and Inf among them, and gates beyond all bounds."""
    generator = torch.Generator().manual_seed(seed)
    dh, z = awkward((m, columns), dtype, seed), torch.randn(m, 2 * columns, generator=generator) * 8
    z *= torch.exp2(torch.randint(-6, 6, (m, 1), generator=generator).float())
    z[1::7] = awkward(z[1::7].shape, torch.float32, seed + 1)
    prob = torch.rand(m, generator=generator)
    prob[3::11] = float("inf")
    prob[4::11] = 0.0
    return dh, z.to(dtype), prob


def add_swiglu_case(name: str, gate_up: str, columns: int, dtype: torch.dtype, block: tuple[int, int]) -> None:
    def run(device: str) -> None:
        dh, z, prob = swiglu_operands(47, columns, dtype, columns)
        offs = offs_of((12, 0, 33), device)
        swiglu_pair(dh, z, offs, prob, gate_up, block, 32, device)

    run.__name__ = f"swiglu_{name}"
    case(run)


add_swiglu_case("concatenated", "concatenated", 128, torch.bfloat16, (1, 128))
add_swiglu_case("interleaved", "interleaved", 128, torch.bfloat16, (128, 128))
add_swiglu_case("interleaved_short", "interleaved", 32, torch.float16, (1, 128))
add_swiglu_case("straddling", "concatenated", 80, torch.bfloat16, (128, 128))


@case
def swiglu_without_prob(device: str) -> None:
    dh, z, _ = swiglu_operands(20, 32, torch.float32, 9)
    for gate_up in ("concatenated", "interleaved"):
        swiglu_pair(dh, z, offs_of((15, 3), device), None, gate_up, (1, 128), 128, device)
    swiglu_pair(dh[:, :9], z[:, :18], offs_of((15, 3), device), None, "concatenated", (1, 128), 128, device)


@case
def swiglu_of_no_rows(device: str) -> None:
    dh, z, prob = torch.zeros(0, 32), torch.zeros(0, 64), torch.zeros(0)
    swiglu_pair(dh, z, offs_of((0, 0), device), prob, "concatenated", (1, 128), 32, device)


@long_case
def swiglu_of_many_groups(device: str) -> None:
    sizes = (0, 1, 127, 129, 33, 0, 200)
    for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
        for gate_up, columns in (("concatenated", 256), ("concatenated", 208), ("interleaved", 288)):
            dh, z, prob = swiglu_operands(sum(sizes) + 9, columns, dtype, seed)
            for block, alignment in (((1, 128), 32), ((128, 128), 128)):
                swiglu_pair(dh, z, offs_of(sizes, device), prob, gate_up, block, alignment, device)


# --- NVFP4 by chance -------------------------------------------------------------------------------------


@case
def nvfp4_stochastic(device: str) -> None:
    from padless.quantization.nvfp4_random import stochastic_torch
    from padless.quantization.quantize import _nvfp4_global
    from padless.quantization.triton import nvfp4_random

    for seed, (shape, dtype) in enumerate(
        (((0, 16), torch.bfloat16), ((5, 2), torch.bfloat16), ((19, 144), torch.float32), ((17, 290), torch.float16))
    ):
        x = awkward(shape, dtype, seed)
        key = torch.tensor((0, -3, 12345678901234567, 2**63 - 1)[seed])
        _, factors = _nvfp4_global(x, "te", None, None, False)
        want = stochastic_torch(x, key, factors)
        with poisoned_memory():
            got = nvfp4_random.nvfp4_stochastic(x.to(device), key.to(device), factors.to(device))
        assert_equal(got, want, "data scale")


@case
def nvfp4_hadamard(device: str) -> None:
    from padless.quantization import nvfp4_random_rules
    from padless.quantization.triton import nvfp4_random

    for seed, (shape, dtype) in enumerate(
        (((3, 16), torch.float16), ((19, 144), torch.bfloat16), ((2, 288), torch.float32))
    ):
        x = awkward(shape, dtype, seed).nan_to_num(0.0, 0.0, 0.0)  # a NaN has other bits on a GPU
        for signs in (0, 0x5A3C, 0xFFFF):
            with poisoned_memory():
                got = nvfp4_random.hadamard(x.to(device), signs)
            assert_equal((got,), (nvfp4_random_rules.hadamard(x, signs),), "transformed")


if __name__ == "__main__":
    main(CASES)
