"""PTX that somebody else's compiler wrote: Triton kernels for three generations, compiled without a GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from padless.emulator import Emulator

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, sa, sb, sc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        a = tl.load(
            a_ptr + rm[:, None] * sa + (k + rk)[None, :], mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0
        )
        b = tl.load(
            b_ptr + (k + rk)[:, None] * sb + rn[None, :], mask=((k + rk)[:, None] < K) & (rn[None, :] < N), other=0.0
        )
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rm[:, None] * sc + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + tl.program_id(0) * n + offsets, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * n + offsets, e / tl.sum(e, 0), mask=mask)


@triton.jit
def histogram(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.atomic_add(out_ptr + x, 1, mask=offsets < n)


@triton.jit
def descriptor_matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(a_ptr + rm[:, None] * K + rk[None, :])
        b = tl.load(b_ptr + rn[None, :] * K + rk[:, None])
        acc += tl.dot(a, b)
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc)


@triton.jit
def tensor_map_matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_map = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_map = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    c_map = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_map.load([row, k]), b_map.load([column, k]).T, acc)
    c_map.store([row, column], acc.to(tl.float16))


@triton.jit
def unscaled_attention(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    first = tl.program_id(0) * BM
    k_map = tl.make_tensor_descriptor(k_ptr, [S, D], [D, 1], [BN, D])
    v_map = tl.make_tensor_descriptor(v_ptr, [S, D], [D, 1], [BN, D])
    q = tl.make_tensor_descriptor(q_ptr, [S, D], [D, 1], [BM, D]).load([first, 0])
    acc = tl.zeros((BM, D), tl.float32)
    for n in tl.range(0, S, BN):
        p = tl.dot(q, k_map.load([n, 0]).T)
        acc = tl.dot(p.to(tl.float16), v_map.load([n, 0]), acc)
    tl.make_tensor_descriptor(o_ptr, [S, D], [D, 1], [BM, D]).store([first, 0], acc.to(tl.float16))


@triton.jit
def scaled_matmul(a_ptr, sa_ptr, b_ptr, sb_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm, rn, rk, rs = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rm[:, None] * K + k + rk[None, :])
        b = tl.load(b_ptr + rn[None, :] * K + k + rk[:, None])
        sa = tl.load(sa_ptr + rm[:, None] * (K // 32) + k // 32 + rs[None, :])
        sb = tl.load(sb_ptr + rn[:, None] * (K // 32) + k // 32 + rs[None, :])
        acc = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", acc)
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc)


def compile_for(
    capability: int, function: Any, signature: dict[str, str], constants: dict[str, int], **options: int
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def run(kernel: Any, grid: tuple[int, ...], arguments: list[Any], seed: int, strict: bool = True) -> set[str]:
    emulator = Emulator(kernel.asm["ptx"], seed=seed, name=f"{kernel.name}.ptx", strict=strict)
    program = emulator.program(kernel.name)
    values = [emulator.memory.register(x) if isinstance(x, np.ndarray) else x for x in arguments]
    values += [0] * (len(program.function.parameters) - len(values))  # scratch pointers that these kernels do not use
    result = emulator.launch(
        kernel.name, grid, 32 * kernel.metadata.num_warps, values, shared_bytes=kernel.metadata.shared
    )
    return {report.kind for report in result.reports}


MATMUL = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"} | dict.fromkeys(
    ("M", "N", "K", "sa", "sb", "sc"), "i32"
)


# Triton's Blackwell code has no tcgen05.fence between an mma's completion and the tcgen05.ld of its result, nor between
# a tcgen05.st and the mma that reads it; the ISA asks for both, and the emulator says so.
FOUND: dict[int, set[str]] = {80: set(), 90: set(), 100: {"missing-tcgen05-fence"}}


@pytest.mark.parametrize(
    ("capability", "instruction"),
    [(80, r"mma\.sync\.aligned\.m16n8k16"), (90, r"wgmma\.mma_async"), (100, r"tcgen05\.mma")],
)
def test_matmul(capability: int, instruction: str) -> None:
    kernel = compile_for(capability, matmul, MATMUL, {"BM": 64, "BN": 64, "BK": 32}, num_warps=4, num_stages=3)
    assert re.search(instruction, kernel.asm["ptx"])
    rng = np.random.default_rng(0)
    m, n, k = 100, 72, 80
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) * k * 2.0**-22
    for seed in range(3):
        c = np.full((m, n), np.nan, np.float32)
        assert run(kernel, (2, 2), [a, b, c, m, n, k, k, n, n], seed) == FOUND[capability]
        assert (np.abs(c - exact) <= bound).all()


@pytest.mark.parametrize("capability", [90, 100])
def test_fp8_matmul(capability: int) -> None:
    torch = pytest.importorskip("torch")
    signature = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    kernel = compile_for(capability, descriptor_matmul, signature, {"BM": 64, "BN": 64, "BK": 64}, num_warps=4)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (128, 192)).astype(np.float32) for _ in "ab")
    codes = [torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in (a, b)]
    c = np.full((128, 128), np.nan, np.float32)
    assert run(kernel, (2, 2), [*codes, c, 128, 128, 192], 4) == FOUND[capability]
    exact = a @ b.T
    assert (np.abs(c - exact) <= (np.abs(a) @ np.abs(b).T) * 2.0**-10).all()


def test_softmax_and_atomics() -> None:
    kernel = compile_for(90, softmax, {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}, num_warps=4)
    x = np.random.default_rng(0).standard_normal((3, 700)).astype(np.float32)
    y = np.full_like(x, np.nan)
    assert run(kernel, (3,), [x, y, 700], 1) == set()
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.abs(y - e / e.sum(1, keepdims=True)).max() < 1e-7
    counter = compile_for(90, histogram, {"x_ptr": "*i32", "out_ptr": "*i32", "n": "i32"}, {"BLOCK": 256}, num_warps=4)
    values, out = np.random.default_rng(0).integers(0, 9, 700).astype(np.int32), np.zeros(9, np.int32)
    assert run(counter, (3,), [values, out, 700], 2) == set()
    assert (out == np.bincount(values, minlength=9)).all()


@pytest.mark.parametrize("capability", [90, 100])
def test_tensor_maps_made_on_the_device(capability: int) -> None:
    """tensormap.replace from nothing, a copy to global memory, and tiled loads and stores through the result."""
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    kernel = compile_for(capability, tensor_map_matmul, signature, {"BM": 64, "BN": 64, "BK": 64}, num_warps=4)
    assert "tensormap.replace" in kernel.asm["ptx"]
    rng = np.random.default_rng(2)
    m, n, k = 100, 72, 200
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((n, k)).astype(np.float16)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    for seed in range(2):
        c = np.full((m, n), np.nan, np.float16)
        scratch = np.zeros(1 << 14, np.uint8)
        assert run(kernel, (2, 2), [a, b, c, m, n, k, scratch], seed) == FOUND[capability]
        assert (np.abs(c - exact) <= 2.0**-10 * np.abs(exact) + 1e-4).all()


@pytest.mark.parametrize(("strict", "kind"), [(False, "tolerated"), (True, "mbarrier-init")])
def test_barriers_that_are_made_with_no_fence(strict: bool, kind: str) -> None:
    """Triton's pipelined copies: between an mbarrier's making and a copy there is a barrier of the CTA, and no fence."""
    signature = {"q_ptr": "*fp16", "k_ptr": "*fp16", "v_ptr": "*fp16", "o_ptr": "*fp16", "S": "i32"}
    kernel = compile_for(90, unscaled_attention, signature, {"D": 64, "BM": 64, "BN": 32}, num_warps=4, num_stages=2)
    if "fence.mbarrier_init" in kernel.asm["ptx"]:
        pytest.skip("this Triton writes the fence")
    q, k, v = (np.random.default_rng(5).standard_normal((3, 128, 64)) / 4).astype(np.float16)
    o, scratch = np.full((128, 64), np.nan, np.float16), np.zeros(1 << 14, np.uint8)
    assert run(kernel, (2,), [q, k, v, o, 128, scratch], 1, strict) == {kind}
    exact = (q.astype(float) @ k.astype(float).T) @ v.astype(float)
    assert (np.abs(o - exact) <= 2.0**-8 * (np.abs(q.astype(float)) @ np.abs(k.astype(float)).T) @ np.abs(v)).all()


def test_scaled_matmul_is_exact() -> None:
    """Triton writes the scale factors with tcgen05.st, so their place in tensor memory is its own, not ours."""
    torch = pytest.importorskip("torch")
    signature = {"a_ptr": "*fp8e4nv", "sa_ptr": "*u8", "b_ptr": "*fp8e4nv", "sb_ptr": "*u8", "c_ptr": "*fp32",
                 "N": "i32", "K": "i32"}  # fmt: skip
    kernel = compile_for(100, scaled_matmul, signature, {"BM": 128, "BN": 128, "BK": 128}, num_warps=4)
    assert "block_scale" in kernel.asm["ptx"]
    rng = np.random.default_rng(3)
    k = 256
    a, b = (rng.integers(-4, 5, (128, k)).astype(np.float32) for _ in "ab")
    codes = [torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in (a, b)]
    scales = [rng.integers(125, 130, (128, k // 32)).astype(np.uint8) for _ in "ab"]
    wide = [x * np.repeat(2.0 ** (s.astype(float) - 127), 32, 1) for x, s in zip((a, b), scales, strict=True)]
    c = np.full((128, 128), np.nan, np.float32)
    assert run(kernel, (1,), [codes[0], scales[0], codes[1], scales[1], c, 128, k], 1) == FOUND[100]
    assert (c == wide[0] @ wide[1].T).all()
