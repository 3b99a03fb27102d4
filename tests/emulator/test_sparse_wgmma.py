"""wgmma.mma_async.sp: random metadata; the expanded operands through the dense instruction, and through a scalar model.

Metadata is put into registers by the layouts that CUTLASS has (ELayout_64x16, x32 and x64), written here as strides.
"""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import itertools

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from padless.emulator.units import number_formats, sparsity
from padless.emulator.units.wgmma import Wgmma, pack_d, unpack_d
from support.emulator_cuda import compile_cuda, kinds
from support.scalar_dot import scalar_dot

SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
# (extent, stride) of a thread's number and of a value's, to row + 64 k; the stride None is the pair that is selected
THREADS = {
    1: ((2, 8), (2, 2048), (8, 1), (4, 16)),
    2: ((2, 1024), (2, None), (8, 1), (4, 16)),
    4: ((2, 512), (2, None), (8, 1), (4, 16)),
}
VALUES = {1: ((32, 64),), 2: ((16, 64), (2, 8)), 4: ((8, 64), (2, 8))}
TYPES = [
    ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"), ("f32", "e4m3", "e5m2"),
    ("f16", "e5m2", "e4m3"), ("s32", "s8", "u8"), ("s32", "u8", "s8"), ("s32", "s8", "s8"),
]  # fmt: skip


def coordinates(number: int, layout: tuple[tuple[int, int | None], ...]) -> tuple[int, int]:
    """(where a number lies, which pair of threads it is of)."""
    at = pair = 0
    for extent, stride in layout:
        number, digit = divmod(number, extent)
        at, pair = (at, digit) if stride is None else (at + digit * stride, pair)
    return at, pair


def registers_of(where: np.ndarray, size: int, selector: int, rng: np.random.Generator) -> np.ndarray:
    """Metadata uint32 (128,) of the positions (64, K / 2) of stored elements; noise in threads that are not selected."""
    out = rng.integers(0, 1 << 32, 128, dtype=np.uint32)
    count = 2 if size == 4 else 4  # elements of a chunk
    for thread in range(128):
        start, pair = coordinates(thread, THREADS[size])
        if size > 1 and pair != selector:
            continue
        word = 0
        for value in range(0, 16 if size == 4 else 32, count):
            at = start + coordinates(value, VALUES[size])[0]
            row, chunk = at % 64, at // 64 // count
            if size == 4:
                bits = 0b1110 if where[row, chunk] % 2 else 0b0100
            else:
                bits = where[row, 2 * chunk] % 4 | where[row, 2 * chunk + 1] % 4 << 2
            word |= int(bits) << value * (2 if size == 4 else 1)
        out[thread] = word
    return out


def positions(k: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """One place of two, or two of four in either order, along K."""
    if size == 4:
        return 2 * np.arange(k // 2) + rng.integers(0, 2, (64, k // 2))
    pairs = np.argsort(rng.random((64, k // 4, 4)), axis=2)[:, :, :2]
    return (pairs + 4 * np.arange(k // 4)[:, None]).reshape(64, -1)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    return values.astype(np.int8).view(np.uint8) if name in ("s8", "u8") else number_formats.encode(values, name)


def put(shared: np.ndarray, codes: np.ndarray, start: int) -> int:
    """Codes (rows, k) K-major without a swizzle: blocks of 8 rows of 16 bytes. -> a descriptor."""
    octets = np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)
    row, x = np.arange(len(octets))[:, None], np.arange(octets.shape[1])[None, :]
    leading = 16 * len(octets)
    shared[start + row // 8 * 128 + row % 8 * 16 + x % 16 + x // 16 * leading] = octets
    return start >> 4 | (leading >> 4) << 16 | (128 >> 4) << 32


def a_fragments(codes: np.ndarray) -> np.ndarray:
    octets = np.ascontiguousarray(codes).view(np.uint8).reshape(64, 32)
    out = np.zeros((128, 4), np.uint32)
    for thread, i in itertools.product(range(128), range(4)):
        t = thread % 32
        x = 4 * (t % 4) + 16 * (i // 2)
        out[thread, i] = octets[16 * (thread // 32) + t // 4 + 8 * (i % 2), x : x + 4].copy().view(np.uint32)[0]
    return out


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=" ".join)
def test_it_is_the_dense_product_of_the_expanded_operands(
    types: tuple[str, str, str], in_registers: bool, selector: int
) -> None:
    """Small integers, whose sums are exact: bit for bit two dense products, and the float64 one."""
    d_type, a_type, b_type = types
    size, n = SIZE[a_type], 24
    if size == 1 and selector:
        with pytest.raises(ValueError, match="sp-sel: 1"):
            Wgmma(n, d_type, a_type, b_type, None, 0, selector=1)
        return
    rng = np.random.default_rng([selector, in_registers, *types[1].encode()])
    k = 64 // size
    low = lambda name: 0 if name == "u8" else -8  # noqa: E731
    stored, b = rng.integers(low(a_type), 9, (64, k // 2)), rng.integers(low(b_type), 9, (n, k))
    c = rng.integers(-50, 50, (64, n))
    where = positions(k, size, rng)
    whole = np.zeros((64, k), np.int64)
    np.put_along_axis(whole, where, stored, axis=1)
    d = pack_d(c.astype(np.int32 if d_type == "s32" else np.float32), d_type)
    shared = np.full(32768, 0xFF, np.uint8)
    half_k = k // 2
    b_at = put(shared, encode(b, b_type), 0)
    halves = [(put(shared, encode(x[:, s], name), at)) for at, x, name, s in (
        (8192, whole, a_type, slice(0, half_k)), (12288, b, b_type, slice(0, half_k)),
        (16384, whole, a_type, slice(half_k, k)), (20480, b, b_type, slice(half_k, k)))]  # fmt: skip
    a_at = None if in_registers else put(shared, encode(stored, a_type), 24576)
    fragments = a_fragments(encode(stored, a_type)) if in_registers else None

    unit = Wgmma(n, d_type, a_type, b_type, a_at, b_at, selector=selector)
    assert (unit.k, unit.problems()) == (k, ())
    assert {name: sum(y - x for x, y in r) for name, r in unit.shared_ranges().items()} == {
        "a": 0 if in_registers else 64 * 32, "b": n * 64
    }  # fmt: skip
    chunks = sparsity.unpack(registers_of(where, size, selector, rng), size, selector)
    assert sparsity.problem(chunks, size) == ""
    out = unit.execute(shared, d, fragments, chunks=chunks)
    dense = d
    for a_half, b_half in (halves[:2], halves[2:]):
        dense = Wgmma(n, d_type, a_type, b_type, a_half, b_half).execute(shared, dense)
    assert (out == dense).all()
    assert (unpack_d(out, d_type) == whole @ b.T + c).all()


@pytest.mark.parametrize(("name", "fraction", "result"), [("f16", 25, 23), ("bf16", 25, 23), ("e4m3", 13, 13)])
def test_random_codes_round_as_one_dense_product_of_what_is_met(name: str, fraction: int, result: int) -> None:
    """Every stored element and the element of B that it meets, in one sum; NaN of B where no element meets it counts not."""
    rng = np.random.default_rng(fraction)
    size, n = SIZE[name], 8
    k = 64 // size
    values = rng.standard_normal((64 + n, k)) * np.exp2(rng.integers(-6, 6, (64 + n, k)))
    codes = encode(values, name)
    stored, b = codes[:64, : k // 2], codes[64:].copy()
    where = positions(k, size, rng)
    chunks = sparsity.unpack(registers_of(where, size, 0, rng), size, 0)
    c = rng.standard_normal((64, n)).astype(np.float32)
    for met in (False, True):
        shared = np.zeros(32768, np.uint8)
        if met:
            b[3, 5] = encode(np.array([np.nan]), name)[0]
        unit = Wgmma(n, "f32", name, name, put(shared, stored, 0), put(shared, b, 8192), selector=0)
        out = unpack_d(unit.execute(shared, pack_d(c, "f32"), chunks=chunks), "f32")
        for row, column in itertools.product(range(0, 64, 13), range(n)):
            if met and column == 3 and 5 in where[row]:
                assert np.isnan(out[row, column])
                continue
            codes_met = b[column, where[row]].tolist()
            bits = int(c.view(np.uint32)[row, column])
            expected = scalar_dot(stored[row].tolist(), codes_met, bits, name, name, fraction, result)
            assert out[row, column] == expected
    assert 0 < np.isnan(out[:, 3]).sum() < 64


KERNEL = r"""
extern "C" __global__ void k(float* out, const unsigned* in, const unsigned* metadata) {
  extern __shared__ __align__(1024) unsigned s[];
  for (int i = threadIdx.x; i < 2048; i += 128) s[i] = in[i];
  fence_async(); __syncthreads();
  const uint64_t form = 8ull << 32, a = form | 64ull << 16 | smem(s) >> 4, b = form | 8ull << 16 | smem(s) + 4096 >> 4;
  const unsigned e = metadata[threadIdx.x];
  float d[4] = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.fence.sync.aligned;\nwgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, %6, SELECTOR, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(e));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  EARLY
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  LATE
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  for (int i = 0; i < 4; ++i) out[8 * (row + 8 * (i / 2)) + column + i % 2] = d[i];
}"""
OVERWRITE = "if (threadIdx.x == 5) s[1024 + 32 * 3] = 0;"  # of the last 16 bytes of B's rows: 64 to a row


def run(selector: int = 0, given: int | None = None, broken: int | None = None, early: str = "", late: str = "") -> tuple[
    bool, LaunchResult
]:  # fmt: skip
    """Whether the product is right, and what was reported. given: the selector that the metadata is laid out for.
    broken: bits of a chunk of row 0."""
    rng = np.random.default_rng(selector)
    a, b = rng.standard_normal((64, 16)).astype(np.float16), rng.standard_normal((8, 32)).astype(np.float16)
    where = positions(32, 2, rng)
    metadata = registers_of(where, 2, selector if given is None else given, rng)
    if broken is not None:
        metadata[2 * selector] = metadata[2 * selector] & ~np.uint32(0xF0) | np.uint32(broken << 4)
    shared = np.zeros(8192, np.uint8)
    put(shared, a, 0), put(shared, b, 4096)
    out = np.full((64, 8), np.nan, np.float32)
    source = KERNEL.replace("SELECTOR", str(selector)).replace("EARLY", early).replace("LATE", late)
    emulator = Emulator(compile_cuda(source))
    arguments = [emulator.memory.register(x) for x in (out, shared.view(np.uint32), metadata)]
    result = emulator.launch("k", 1, 128, arguments, shared_bytes=8192)
    whole = np.zeros((64, 32))
    np.put_along_axis(whole, where, a.astype(float), axis=1)
    return bool(np.abs(out - whole @ b.astype(float).T).max() < 1e-3), result


@pytest.mark.parametrize("selector", [0, 1])
def test_a_kernel(selector: int) -> None:
    right, result = run(selector, late=OVERWRITE)
    assert right
    assert not result.reports


def test_planted_bugs() -> None:
    """Metadata in the other threads, a position twice, and a store to the second half of B's K before the wait."""
    right, result = run(0, given=1)
    assert not right
    assert kinds(result) == {"descriptor"}  # some chunk of the noise names one position twice
    for bits in (0b0000, 0b0101, 0b1010, 0b1111):
        _, result = run(1, broken=bits)
        assert [r.message for r in result.reports] == [
            f"the metadata of row 0, chunk 1 of K is 0b{bits:04b}, which is undefined"
        ]
    _, result = run(early=OVERWRITE)
    assert kinds(result) == {"race"}


def test_of_two_words_the_metadata_is_one_of_two_values() -> None:
    chunks = np.full((64, 8), 0b0100, np.uint8)
    chunks[9, 3] = 0b1110
    assert sparsity.problem(chunks, 4) == ""
    assert sparsity.positions(chunks, 4)[9].tolist() == [0, 2, 4, 7, 8, 10, 12, 14]
    chunks[17, 2] = 0b1001
    assert sparsity.problem(chunks, 4) == "the metadata of row 17, chunk 2 of K is 0b1001, which is undefined"
