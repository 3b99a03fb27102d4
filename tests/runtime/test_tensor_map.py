"""Tensor maps: the elements that a map's box covers, worked out from the specification alone."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless.kernels import maps
from padless.kernels.maps import RAGGED_B
from padless.layouts import empty_mn_major
from padless.runtime import tensor_map
from padless.runtime.jit import sources
from padless.runtime.tensor_map import SWIZZLE_128B, SWIZZLE_NONE, TensorMapSpec

OUT_DTYPES = {torch.bfloat16: (9, 2), torch.float16: (6, 2), torch.float32: (7, 4)}


def element_addresses(spec: TensorMapSpec, element_size: int, start: tuple[int, ...]) -> list[int]:
    """Byte addresses of the elements of the box at coordinates `start` that are inside the tensor.

    CUDA driver API, cuTensorMapEncodeTiled: address + x0 * size + sum over i of x_i * strides[i - 1], where an
    element is inside when 0 <= x_i < dims[i] for every i. Addresses are 64 bits.
    """
    steps = (element_size, *spec.strides)
    axes = [
        [x for x in range(at, at + box) if 0 <= x < dim]
        for at, box, dim in zip(start, spec.box, spec.dims, strict=True)
    ]
    return [
        (spec.address + sum(x * step for x, step in zip(reversed(position), steps, strict=True))) % 2**64
        for position in itertools.product(*reversed(axes))
    ]


def addresses_of(tensor: torch.Tensor) -> list[int]:
    """The same of a torch view, row after row."""
    base, size = tensor.data_ptr(), tensor.element_size()
    return [
        base + size * sum(i * s for i, s in zip(position, tensor.stride(), strict=True))
        for position in itertools.product(*(range(n) for n in tensor.shape))
    ]


def output(m: int, n: int, dtype: torch.dtype, row_elements: int | None = None) -> torch.Tensor:
    """(m, n) with rows `row_elements` apart: what TMA takes, rows of a multiple of 16 bytes."""
    return torch.empty((m, row_elements or n), dtype=dtype)[:, :n]


def encodable(spec: TensorMapSpec, element_size: int) -> list[str]:
    """What cuTensorMapEncodeTiled's documentation forbids."""
    found = []
    if spec.address % 16:
        found.append("address")
    if not 1 <= len(spec.dims) <= 5 or len(spec.strides) != len(spec.dims) - 1 or len(spec.box) != len(spec.dims):
        found.append("rank")
    if any(not 1 <= d <= 2**32 for d in spec.dims):
        found.append("dims")
    if any(s % 16 or not 0 <= s < 2**40 for s in spec.strides):
        found.append("strides")
    if any(not 1 <= b <= 256 for b in spec.box) or spec.box[0] * element_size % 16:
        found.append("box")
    if spec.swizzle == SWIZZLE_128B and spec.box[0] * element_size > 128:
        found.append("box wider than the swizzle")
    return found


# --- literal examples ------------------------------------------------------------------------------------


def test_an_operand_of_two_and_of_three_dimensions() -> None:
    a = torch.zeros((5, 400), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert tensor_map.operand(a, 64) == TensorMapSpec(0, a.data_ptr(), (400, 5), (400,), (128, 64), SWIZZLE_128B)
    b = torch.zeros((3, 24, 400), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert tensor_map.operand(b, 192) == TensorMapSpec(
        0, b.data_ptr(), (400, 24, 3), (400, 24 * 400), (128, 192, 1), SWIZZLE_128B
    )


def test_scales() -> None:
    scale = empty_mn_major(5, 3, torch.device("cpu"))
    assert tensor_map.mn_major_scales(scale, 132) == TensorMapSpec(
        7, scale.data_ptr(), (5, 3), (8 * 4,), (132, 1), SWIZZLE_NONE
    )
    row_major = torch.zeros((5, 3))
    assert tensor_map.flat(row_major, 256) == TensorMapSpec(7, row_major.data_ptr(), (15,), (), (256,), SWIZZLE_NONE)


def test_the_ragged_descriptor() -> None:
    d = output(100, 72, torch.bfloat16, row_elements=80)
    assert maps.output_ragged(d, 64) == TensorMapSpec(
        9, d.data_ptr(), (72, 2**30, 0x7FFF0000, 0x7FFF0000), (160, 160, 2 * (2**34 - 80)), (64, 64, 1, 1), SWIZZLE_128B
    )


def test_the_descriptor_pool() -> None:
    d = output(100, 72, torch.float32)
    pool = maps.output_pool(d, 64)
    assert [spec.box for spec in pool] == [(32, r) for r in (1, 2, 4, 8, 16, 32, 64)]
    for spec in pool:
        assert (spec.dims, spec.strides, spec.swizzle) == ((72, 100), (288,), SWIZZLE_128B)


def test_the_device_code_uses_the_same_number() -> None:
    found = re.findall(r"RAGGED_B = 1 << (\d+);", sources()["device/sm90/output.cuh"])
    assert [1 << int(exponent) for exponent in found] == [RAGGED_B]


# --- loads -----------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 20).map(lambda x: 16 * x)),
    row=st.integers(0, 100),
    kb=st.integers(0, 2),
)
def test_an_operands_box_is_rows_by_128_of_k(shape: tuple[int, int, int], row: int, kb: int) -> None:
    b = torch.zeros(shape, dtype=torch.uint8)
    for group in range(shape[0]):
        spec = tensor_map.operand(b, 64)
        assert encodable(spec, 1) == []
        inside = b[group, row : row + 64, kb * 128 : kb * 128 + 128]
        assert element_addresses(spec, 1, (kb * 128, row, group)) == addresses_of(inside)
    a = b[0]
    spec = tensor_map.operand(a, 64)
    assert encodable(spec, 1) == []
    inside = a[row : row + 64, kb * 128 : kb * 128 + 128]
    assert element_addresses(spec, 1, (kb * 128, row)) == addresses_of(inside)


@given(m=st.integers(1, 300), k_blocks=st.integers(1, 4), row=st.integers(0, 299))
def test_a_column_of_mn_major_scales(m: int, k_blocks: int, row: int) -> None:
    """From the row rounded down to 16 bytes, as the copy engine needs, to the end of the tensor and no further."""
    scale = empty_mn_major(m, k_blocks, torch.device("cpu"))
    spec = tensor_map.mn_major_scales(scale, 132)
    assert encodable(spec, 4) == []
    first = row & ~3
    for kb in range(k_blocks):
        assert element_addresses(spec, 4, (first, kb)) == addresses_of(scale[first : first + 132, kb : kb + 1])


@given(m=st.integers(1, 90), k_blocks=st.integers(1, 9), row=st.integers(0, 89), rows=st.integers(1, 64))
def test_a_window_of_row_major_scales(m: int, k_blocks: int, row: int, rows: int) -> None:
    """All K blocks of the tile's rows lie in copies of 256 that start at a multiple of 4 floats (16 bytes)."""
    scale = torch.zeros((m, k_blocks))
    row = min(row, m - 1)
    rows = min(rows, m - row)
    spec = tensor_map.flat(scale, 256)
    assert encodable(spec, 4) == []
    first, last = row * k_blocks & ~3, (row + rows) * k_blocks
    copied = [address for start in range(first, last, 256) for address in element_addresses(spec, 4, (start,))]
    shift = row * k_blocks & 3
    wanted = addresses_of(scale[row : row + rows])
    assert copied[shift : shift + len(wanted)] == wanted
    assert max(copied) < scale.data_ptr() + 4 * scale.numel()


# --- stores ----------------------------------------------------------------------------------------------

OUTPUTS = st.tuples(
    st.integers(1, 5).map(lambda x: 32 * x),  # N
    st.integers(0, 3).map(lambda x: 16 * x),  # elements between rows
    st.sampled_from(list(OUT_DTYPES)),
)


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    output_of=OUTPUTS,
    past=st.integers(0, 70),
    data=st.data(),
)
def test_the_ragged_descriptor_hits_the_groups_rows_and_stops_at_its_end(
    sizes: list[int], output_of: tuple[int, int, torch.dtype], past: int, data: st.DataObject
) -> None:
    n, gap, dtype = output_of
    size = OUT_DTYPES[dtype][1]
    d = output(sum(sizes) + past, n, dtype, row_elements=n + gap)
    if d.numel() == 0:
        return
    spec = maps.output_ragged(d, 64)
    assert encodable(spec, size) == []
    columns = 128 // size
    ends = list(itertools.accumulate(sizes))
    group = data.draw(st.sampled_from([g for g, rows in enumerate(sizes) if rows] or [0]))
    if sizes[group] == 0:
        return
    start, end = ends[group] - sizes[group], ends[group]
    row = start + data.draw(st.integers(0, sizes[group] - 1))
    column = columns * data.draw(st.integers(0, (n - 1) // columns))
    left = end - row
    hit = element_addresses(spec, size, (column, RAGGED_B - left, end, RAGGED_B))
    assert hit == addresses_of(d[row : min(row + 64, end), column : column + columns])


def test_the_ragged_descriptor_in_a_tensor_of_many_gigabytes() -> None:
    """Rows far from the start, where the address needs more than 32 bits; nothing is allocated."""
    d = torch.empty((2**30 - 1, 8192), dtype=torch.bfloat16, device="meta")
    spec = maps.output_ragged(d, 64)
    assert encodable(spec, 2) == []
    for row, end in ((0, 3), (123_456_789, 123_456_800), (2**30 - 65, 2**30 - 1)):
        hit = element_addresses(spec, 2, (64, RAGGED_B - (end - row), end, RAGGED_B))
        first = spec.address + 2 * (row * 8192 + 64)
        assert hit[0] == first % 2**64
        assert len(hit) == 64 * min(64, end - row)
        assert hit[-1] == (spec.address + 2 * ((row + len(hit) // 64 - 1) * 8192 + 127)) % 2**64


def test_a_wrong_stride_is_seen() -> None:
    """The large strides vanish only as a multiple of 2^64 bytes: one off, and the addresses are elsewhere."""
    d = output(100, 64, torch.bfloat16)
    good = maps.output_ragged(d, 64)
    wanted = addresses_of(d[10:30])
    at = (0, RAGGED_B - 20, 30, RAGGED_B)
    assert element_addresses(good, 2, at) == wanted
    for stride in (2**32 - 64, 2**34 - 56):
        bad = TensorMapSpec(good.data_type, good.address, good.dims, (*good.strides[:2], 2 * stride), good.box)
        assert element_addresses(bad, 2, at) != wanted
    assert len(element_addresses(good, 2, (0, RAGGED_B - 21, 30, RAGGED_B))) == 21 * 64


@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("rows", range(1, 65))
def test_two_boxes_of_the_pool_cover_exactly_the_rows(rows: int, dtype: torch.dtype) -> None:
    """Every row of the tail, none of the next group's, and no more than two stores."""
    size = OUT_DTYPES[dtype][1]
    columns = 128 // size
    d = output(200, 2 * columns, dtype)
    pool = maps.output_pool(d, 64)
    first_row = 37
    box = max(i for i in range(7) if 1 << i <= rows)  # the largest power of two that fits
    spec = pool[box]
    assert encodable(spec, size) == []
    height = spec.box[1]
    starts = {first_row, first_row + rows - height}
    hit = Counter(address for start in starts for address in element_addresses(spec, size, (columns, start)))
    assert sorted(hit) == addresses_of(d[first_row : first_row + rows, columns:])
    assert len(starts) == (1 if height == rows else 2)
    # Where the two overlap, the second box must send the same rows: it starts in shared memory where it starts in D.
    assert max(hit.values()) <= 2


def test_columns_past_the_end_are_not_written() -> None:
    """N = 72 is not a multiple of 64 columns."""
    d = output(10, 72, torch.bfloat16, row_elements=128)
    for spec, at in (
        (maps.output_ragged(d, 64), (64, RAGGED_B - 3, 10, RAGGED_B)),
        (maps.output_pool(d, 64)[1], (64, 8)),
    ):
        hit = element_addresses(spec, 2, at)
        assert set(hit) <= set(addresses_of(d[:, 64:72]))
        assert len(hit) % 8 == 0
        assert len(hit) > 0
