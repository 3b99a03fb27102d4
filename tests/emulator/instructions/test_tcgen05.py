"""A small Blackwell kernel: exact results on every schedule, and a report for each planted bug."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from padless.emulator import Emulator, LaunchError, LaunchResult, UnsupportedInstruction
from padless.emulator.cli import app
from support.emulator_cuda import compile_cuda, kinds, launch, tiled
from support.ragged import ROOT

SOURCE = (ROOT / "tests/emulator/programs" / "sm100_mxfp8_gemm.cu").read_text()
N = 64


def problem(tiles: int, k_blocks: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """A, B codes and scales whose products and sums are exact in float32, and the exact D."""
    rng = np.random.default_rng(seed)
    m, k = 128 * tiles, 128 * k_blocks
    a, b = (rng.integers(-4, 5, (rows, k)).astype(np.float32) for rows in (m, N))
    codes = [torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in (a, b)]
    sa, sb = (
        rng.integers(125, 130, (m, k // 32)).astype(np.uint8),
        rng.integers(125, 130, (N, k // 32)).astype(np.uint8),
    )
    exact = (a * np.repeat(2.0 ** (sa.astype(float) - 127), 32, 1)) @ (
        b * np.repeat(2.0 ** (sb.astype(float) - 127), 32, 1)
    ).T
    return (
        codes[0],
        codes[1],
        atoms(sa),
        atoms(np.concatenate([sb, np.full((128 - N, k // 32), 127, np.uint8)])),
        exact,
    )


def atoms(scales: np.ndarray) -> np.ndarray:
    """(rows, k / 32) scales as 512-byte atoms of 128 rows x 4: byte (r % 32) * 16 + r / 32 % 4 * 4 + k % 4."""
    rows, blocks = scales.shape
    out = np.zeros((rows // 128, blocks // 4, 512), np.uint8)
    for r in range(rows):
        for kb in range(blocks):
            out[r // 128, kb // 4, r % 32 * 16 + r % 128 // 32 * 4 + kb % 4] = scales[r, kb]
    return out


def run(
    source: str, tiles: int, k_blocks: int, seed: int, **settings: str
) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    a, b, sfa, sfb, exact = problem(tiles, k_blocks)
    out = np.full((128 * tiles, N), np.nan, np.float32)
    result = launch(
        f"constexpr int N = {N};\n{source}",
        [tiled(a, (128, 128), 3), tiled(b, (128, N), 3), sfa, sfb, out, tiles, k_blocks],
        arch="100a", block=192, shared_bytes=2 * (128 + N) * 128 + 2 * 1024 + 1024, seed=seed, **settings,
    )  # fmt: skip
    return out, exact, result


@pytest.mark.parametrize("seed", range(6))
def test_exact_on_every_schedule(seed: int) -> None:
    out, exact, result = run(SOURCE, 2, 3, seed)
    result.raise_on_reports()
    assert (out == exact).all()


@pytest.mark.parametrize("arithmetic", ["truncate", "exact", "separate_add", "fast"])
def test_every_arithmetic_agrees_on_exact_data(arithmetic: str) -> None:
    out, exact, result = run(SOURCE, 1, 2, 3, arithmetic=arithmetic)
    result.raise_on_reports()
    assert (out == exact).all()


BUGS = {
    "no wait::ld": ("wait_loads();\n", "\n", "register-in-flight"),
    "no fence after the done barrier": ("wait(smem(&s.done), tile & 1);\n            fence_after();", "wait(smem(&s.done), tile & 1);", "missing-tcgen05-fence"),
    "no fence before the free barrier": ("            fence_before();\n            __syncwarp();", "            __syncwarp();", "missing-tcgen05-fence"),
    "free barrier not waited for": ("wait(smem(&s.free), (tile & 1) ^ 1);", "", "race"),
    "done barrier not waited for": ("wait(smem(&s.done), tile & 1);", "", "uninitialised-tensor-memory"),
    "stage not waited for": ("wait(smem(&s.full[stage]), i / STAGES & 1);", "", "race"),
    "stage overwritten early": ("wait(smem(&s.empty[stage]), (i / STAGES & 1) ^ 1);", "", "race"),
    "stage never committed": ("commit(smem(&s.empty[stage]));", "", "deadlock"),
    "result never committed": ("if (kb == k_blocks - 1) commit(smem(&s.done));", "", "deadlock"),
    "result committed a block early": ("kb == k_blocks - 1) commit", "kb == k_blocks - 2) commit", "race"),
    "commit by another thread": ("if (kb == k_blocks - 1) commit(smem(&s.done));\n            }\n        }", "}\n        } if (lane == 1) commit(smem(&s.done));", "tensor-memory"),
    "never freed": ('asm volatile("tcgen05.dealloc', '(void)0; if (tiles < 0) asm volatile("tcgen05.dealloc', "tensor-memory"),
    "freed in part": ('"r"(base), "r"(COLUMNS));', '"r"(base), "r"(COLUMNS / 2));', "tensor-memory"),
    "freed too early": ("    __syncthreads();\n    if (warp == 5)", "    if (warp == 5)", "race"),
    "too few columns": ("COLUMNS = 128", "COLUMNS = 64", "tensor-memory"),
    "wrong lanes": ("(warp * 32 << 16)", "((warp ^ 1) * 32 << 16)", "tensor-memory"),
    "descriptor of the older encoding": ("0x4000404000000000ull", "0x4000004000000000ull", "descriptor"),
    "shape of another kind": ("1u << 23 | 1u << 27", "1u << 23 | 3u << 27", "descriptor"),
    "accumulates into nothing": ("kb + j > 0)", "1)", "uninitialised-tensor-memory"),
    "alloc address read too early": ("    __syncthreads();\n    fence_after();\n    const", "    const", "race"),
    "no scales copied": ("copy_scales(base + SFB_COLUMN, atom(smem(s.sfb[stage])));", "", "uninitialised-tensor-memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    old, new, expected = BUGS[name]
    assert SOURCE.count(old) >= 1, name
    found: set[str] = set()
    for seed in range(6):
        found |= kinds(run(SOURCE.replace(old, new), 3, 3, seed, arithmetic="fast")[2])
        if expected in found:
            return
    raise AssertionError(f"{name}: expected {expected}, found {sorted(found)}")


# ---- two CTAs as one
PAIR = (ROOT / "tests/emulator/programs" / "sm100_pair.cu").read_text()
PAIR_DEFAULTS = {
    "WAIT_FULL": "wait(smem(&s.full), 0);",
    "WAIT_DONE": "wait(smem(&s.done), 0);",
    "COMMIT_MASK": "3",
    "END": "__syncthreads(); cluster_sync();",
    "COMMIT_BEFORE": "",
    "COMMIT_AFTER": "",
}


def run_pair(seed: int, source: str = PAIR, strict: bool = True, **changes: str) -> tuple[bool, LaunchResult]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-8, 9, (rows, 64)).astype(np.float16) for rows in (256, N))
    out = np.full((256, N), np.nan, np.float32)
    for name, text in (PAIR_DEFAULTS | changes).items():
        source = source.replace(name, text)
    result = launch(
        f"constexpr int N = {N};\n{source}", [tiled(a, (64, 128), 3), tiled(b, (64, N // 2), 3), out], arch="100a",
        grid=2, block=128, shared_bytes=128 * 128 + N * 64 + 2048, seed=seed, strict=strict,
    )  # fmt: skip
    return bool((out == a.astype(np.float32) @ b.astype(np.float32).T).all()), result


def test_what_has_been_waited_for_needs_no_barrier_at_the_end() -> None:
    """All that the even CTA does to the odd one's memory is over when the commit arrives there."""
    for seed in range(3):
        right, result = run_pair(seed, END="__syncthreads();")
        result.raise_on_reports()
        assert right


@pytest.mark.parametrize("seed", range(6))
def test_pair_of_ctas(seed: int) -> None:
    right, result = run_pair(seed)
    result.raise_on_reports()
    assert right


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"WAIT_FULL": ""}, "race"),
        ({"COMMIT_MASK": "1"}, "deadlock"),
        ({"COMMIT_MASK": "2"}, "deadlock"),
        ({"WAIT_DONE": "if (rank == 0) wait(smem(&s.done), 0);"}, "race"),
        ({"WAIT_DONE": "if (rank == 0) wait(smem(&s.done), 0);", "END": "__syncthreads();"}, "exit"),
        ({"END": ""}, "race"),
    ],
    ids=str,
)
def test_pair_bugs(changes: dict[str, str], expected: str) -> None:
    found: set[str] = set()
    for seed in range(4):
        found |= kinds(run_pair(seed, **changes)[1])
    assert expected in found


def test_pair_allocates_together() -> None:
    """The even CTA multiplies as soon as its own allocation is told to it, whenever the odd one came to its own."""
    loads = PAIR[
        PAIR.index("        const uint32_t full") : PAIR.index("        if (rank == 0) {\n            WAIT_FULL")
    ]
    early = (
        "__syncthreads();\n    cluster_sync();\n    if (threadIdx.x == 96) {\n"
        + loads
        + "    }\n    if (warp == 0) {\n"
    )
    source = PAIR.replace(loads, "").replace("    __syncthreads();\n    cluster_sync();\n", "    __syncthreads();\n")
    source = source.replace("if (warp == 0) {\n", early, 1)
    assert source.count("cluster_sync") == 1
    for seed in range(4):
        right, result = run_pair(seed, source)
        result.raise_on_reports()
        assert right
    _, result = run_pair(1, source.replace("if (warp == 0) {", "if (warp == 0 && rank == 0) {"))
    assert any("CTA (1, 0, 0), the other of its pair" in r.message for r in result.reports if r.kind == "deadlock")


SPARE = 'asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(smem(&s.spare)), "h"((uint16_t)2) : "memory");'


@pytest.mark.parametrize(("place", "strict", "kind"), [
    ("COMMIT_BEFORE", True, "exit"), ("COMMIT_BEFORE", False, "tolerated"), ("COMMIT_AFTER", False, "exit"),
])  # fmt: skip
def test_an_arrival_that_a_later_one_covers(place: str, strict: bool, kind: str) -> None:
    right, result = run_pair(2, strict=strict, **{place: SPARE})
    assert right
    assert kinds(result) == {kind}


WIDENED = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ alignas(1024) unsigned s[512]; __shared__ alignas(8) uint64_t done; __shared__ unsigned base;
  for (int i = threadIdx.x; i < 512; i += 128) s[i] = in[i];
  if (threadIdx.x == 0) { init(smem(&done), 1); fence_init(); }
  fence_async();
  if (threadIdx.x < 32) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(smem(&base)) : "memory");
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); __syncthreads(); asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned t = base;
  if (threadIdx.x == 0) {
    asm volatile("tcgen05.cp.cta_group::1.128x128b.b8x16.b4x16_p64 [%0], %1;" ::"r"(t), "l"(1ull << 46 | 8ull << 32 | smem(s) >> 4) : "memory");
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(smem(&done)) : "memory");
  }
  wait(smem(&done), 0);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  unsigned r[4];
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(t + (threadIdx.x / 32 * 32 << 16)));
  asm volatile("tcgen05.wait::ld.sync.aligned;" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) :: "memory");
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = r[i];
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); __syncthreads(); asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (threadIdx.x < 32) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" ::"r"(t));
}"""


def test_copy_widens_four_bit_numbers() -> None:
    data, out = (np.random.default_rng(8).integers(0, 1 << 32, 512, dtype=np.uint32), np.full(512, 9, np.uint32))
    launch(WIDENED, [out, data], arch="100a").raise_on_reports()
    packed = data.view(np.uint8).reshape(128, 16)[:, :8]
    wanted = np.stack([packed & 15, packed >> 4], axis=2).reshape(128, 16) << 2
    assert (out.view(np.uint8).reshape(128, 16) == wanted).all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_stores_bytes_transposed(count: int) -> None:
    """Matrix k of 16 x 8 bytes, fragments as mma's accumulators, is stored as 8 rows of 16 at lanes 8 k and up."""
    registers = ", ".join(f"%{i + 1}" for i in range(count))
    values = ", ".join(f'"r"(in[{count} * threadIdx.x + {i}])' for i in range(count))
    source = f"""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {{
      __shared__ alignas(128) unsigned s[{32 * count}];
      asm volatile("stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%0], {{{registers}}};" :: "r"(smem(&s[4 * (threadIdx.x % {8 * count})])), {values} : "memory");
      __syncwarp();
      for (int i = threadIdx.x; i < {32 * count}; i += 32) out[i] = s[i];
    }}"""
    data = np.random.default_rng(9).integers(0, 1 << 32, 32 * count, dtype=np.uint32)
    out = np.zeros(32 * count, np.uint32)
    launch(source, [out, data], block=32, arch="100a").raise_on_reports()
    fragments = data.view(np.uint8).reshape(32, count, 4)
    stored = out.view(np.uint8).reshape(count, 8, 16)
    for k in range(count):
        for lane in range(32):
            for b in range(4):
                row, column = lane // 4 + 8 * (b // 2), 2 * (lane % 4) + b % 2
                assert stored[k, column, row] == fragments[lane, k, b]


# ---- what chips tolerate
WAIT_LD = 'asm volatile("tcgen05.wait::ld.sync.aligned;" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) :: "memory");'
AFTER = 'asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");'


def run_widened(edits: dict[str, str], strict: bool) -> tuple[LaunchResult, bool]:
    source = WIDENED
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    data, out = (np.random.default_rng(8).integers(0, 1 << 32, 512, dtype=np.uint32), np.full(512, 9, np.uint32))
    emulator = Emulator(compile_cuda(source, "100a"), strict=strict, seed=1)
    result = emulator.launch("k", 1, 128, [emulator.memory.register(x) for x in (out, data)])
    codes = out.view(np.uint8).reshape(128, 16)
    return result, bool((codes & 15 << 2 == codes).all())


@pytest.mark.parametrize(
    ("edits", "kind", "sentence"),
    [
        (
            {"wait(smem(&done), 0);\n  " + AFTER: "wait(smem(&done), 0);"},
            "missing-tcgen05-fence",
            "tcgen05.fence::after_thread_sync",
        ),
        ({WAIT_LD: ""}, "register-in-flight", "tcgen05.wait::ld waits for it"),
    ],
    ids=["no fence", "no wait"],
)
def test_what_chips_tolerate_is_said_and_is_an_error_when_strict(
    edits: dict[str, str], kind: str, sentence: str
) -> None:
    strict, right = run_widened(edits, strict=True)
    assert right
    assert kind in kinds(strict)
    with pytest.raises(LaunchError, match=kind):
        strict.raise_on_reports()
    lenient, right = run_widened(edits, strict=False)
    assert right
    found = [r for r in lenient.reports if r.kind == "tolerated"]
    assert any(r.message.startswith(f"{kind}: ") and sentence in r.message for r in found)
    assert kind not in kinds(lenient)
    assert not lenient.errors  # a use of a register waits for it, on these chips


def test_a_load_that_nothing_has_used_is_not_waited_for() -> None:
    used = "for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = r[i];"
    lenient, _ = run_widened({WAIT_LD: "", used: ""}, strict=False)
    assert {r.kind for r in lenient.errors} == {"exit"}


def test_the_command_takes_strict(tmp_path: Path) -> None:
    source = WIDENED.replace("wait(smem(&done), 0);\n  " + AFTER, "wait(smem(&done), 0);")
    buffers = {name: {"dtype": "uint32", "shape": [512], "fill": "random"} for name in ("out", "in")}
    (tmp_path / "k.ptx").write_text(compile_cuda(source, "100a"))
    (tmp_path / "k.json").write_text(json.dumps({"block": 128, "buffers": buffers, "args": ["out", "in"]}))
    for options, code, word in (([], 0, "tolerated: "), (["--strict"], 1, "missing-tcgen05-fence: ")):
        arguments = [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.json"), *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code
        assert result.output.startswith(word)


def test_what_is_packed_before_the_wait_stays_in_flight() -> None:
    """A mov is no use: the register that it writes is in flight instead, until the wait or the first real use."""
    moved = 'unsigned q; asm volatile("mov.b32 %0, %1;" : "=r"(q) : "r"(r[3]) : "memory");'
    used = "for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = r[i];"
    store = "for (int i = 0; i < 3; ++i) out[4 * threadIdx.x + i] = r[i]; out[4 * threadIdx.x + 3] = q;"
    result, right = run_widened({WAIT_LD: moved + WAIT_LD, used: store}, strict=True)
    assert right
    assert not result.reports
    early = moved + 'asm volatile("add.u32 %0, %0, 0;" : "+r"(q) :: "memory");' + WAIT_LD
    result, right = run_widened({WAIT_LD: early, used: store}, strict=True)
    assert right
    assert kinds(result) == {"register-in-flight"}


@pytest.mark.parametrize(
    ("move", "found"),
    [
        ("mov.b32 {0}, 0;", {"register-in-flight"}),  # of the load itself, which may still write it
        ("mov.b32 {0}, {1};", {"register-in-flight"}),
        ("mov.b64 {{{0}, {1}}}, 5;", {"register-in-flight"}),
        ("mov.b32 {spare}, {1};", set()),  # a copy
        ("mov.b32 {spare}, {1}; mov.b32 {spare}, 0; add.u32 {spare}, {spare}, 1;", set()),  # which is overwritten
        ("mov.b32 {spare}, {1}; add.u32 {spare}, {spare}, 1;", {"register-in-flight"}),
    ],
)
def test_a_move_into_a_register_of_an_unfinished_load_is_reported(move: str, found: set[str]) -> None:
    ptx = compile_cuda(WIDENED, "100a")
    loads = re.findall(r"tcgen05\.ld[^{]*\{([^}]*)\}[^;]*;", ptx)
    registers = [name.strip() for name in loads[0].split(",")]
    line = next(line for line in ptx.splitlines() if "tcgen05.ld" in line)
    inserted = "{ .reg .b32 %spare; " + move.format(*registers, spare="%spare") + " }"
    data, out = (np.random.default_rng(8).integers(0, 1 << 32, 512, dtype=np.uint32), np.full(512, 9, np.uint32))
    emulator = Emulator(ptx.replace(line, f"{line}\n{inserted}"), seed=1)
    result = emulator.launch("k", 1, 128, [emulator.memory.register(x) for x in (out, data)])
    assert kinds(result) == found
    if found:
        assert ("overwrites" in result.reports[0].message) == ("{spare}" not in move)


def test_a_product_that_is_not_modelled_is_refused_by_its_line() -> None:
    """A sparse A, which is known only when the descriptor is."""
    text = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k() {
.reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .pred %p; .shared .b32 base;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base], 64;
ld.shared.u32 %r1, [base]; mov.b32 %r2, 0x04080014; mov.b64 %rd1, 0x4000404000000000; setp.ne.u32 %p, 0, 0;
tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r1], %rd1, %r2, %p;
ret; }"""
    with pytest.raises(UnsupportedInstruction, match=r"^<ptx>:8: `tcgen05.mma.*sparsity is not modelled"):
        Emulator(text).launch("k", 1, 32, [])
