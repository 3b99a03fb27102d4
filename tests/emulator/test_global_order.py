"""Global memory between CTAs: what hands data from one to another, and what only seems to.

What would convince a sceptic: a kernel of tickets and flags that is right gives no report on any of many schedules, with
one to three CTAs resident, and its output is right bit for bit from random operands; every edit that takes one of its
fences, barriers, scopes or waits away is reported, and so is none of the other ways to write it that the ISA allows.
"""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from support.emulator_cuda import compile_cuda

RNG = np.random.default_rng(29)
SEEDS = range(24)
TILES, THREADS = 5, 64

PRELUDE = r"""
typedef unsigned long long u64;
#define FENCE(s) asm volatile("fence." s ";" ::: "memory")
#define LOAD(s, v, p) asm volatile("ld." s ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory")
#define STORE(s, p, v) asm volatile("st." s ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory")
#define RED(s, p, v) asm volatile("red." s ".global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory")
DEVICE unsigned draw(unsigned* p) { unsigned v; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory"); return v; }
#define WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
"""

# Tiles of a first pass, then tiles of a second one that need two of the first: drawn from one counter, so that a CTA waits
# for none but those that others have begun. A tile of the first pass has a flag, which is the number of the launch. A tile of
# the second pass adds itself to a count, and who completes it sums up the second pass' results.
TICKETS = (
    PRELUDE
    + r"""
struct Control { unsigned tickets, finished, epoch, added, flags[TILES]; };
extern "C" __global__ void k(unsigned* out, const unsigned* in, unsigned* hidden, unsigned* partial, Control* control) {
  __shared__ unsigned ticket, is_last;
  const unsigned t = threadIdx.x;
  unsigned epoch, seen;
  WAIT();
  LOAD("relaxed.gpu", epoch, &control->epoch);
  for (;;) {
    __syncthreads();
    if (t == 0) ticket = draw(&control->tickets);
    __syncthreads();
    const unsigned drawn = ticket;
    if (drawn >= 2 * TILES) break;
    const unsigned tile = ORDER(drawn) % TILES;
    if (ORDER(drawn) < TILES) {
      hidden[tile * THREADS + t] = 3 * in[tile * THREADS + t] + 1;
      __syncthreads();  // hidden rows are written
      if (t == 0) {
        FENCE("acq_rel.gpu");
        STORE("relaxed.gpu", &control->flags[tile], epoch + 1);
      }
    } else {
      if (t == 0) {
        for (unsigned n = 0; n < 2; ++n)
          do { LOAD("relaxed.gpu", seen, &control->flags[(tile + 3 + n) % TILES]); } while (seen != epoch + 1);
        FENCE("acq_rel.gpu");
      }
      __syncthreads();  // flags are seen
      const unsigned left = hidden[(tile + 3) % TILES * THREADS + THREADS - 1 - t], right = hidden[(tile + 4) % TILES * THREADS + (t ^ 5)];
      partial[tile * THREADS + t] = left ^ 7 * right;
      __syncthreads();  // partial results are written
      if (t == 0) {
        FENCE("acq_rel.gpu");
        is_last = draw(&control->added) == TILES - 1;
        FENCE("acq_rel.gpu");
      }
      __syncthreads();  // who is last is known
      if (is_last) {
        unsigned sum = 0;
        for (unsigned n = 0; n < TILES; ++n) sum = 5 * sum + partial[n * THREADS + t];
        out[t] = sum;
        if (t == 0) STORE("relaxed.gpu", &control->added, 0);
      }
    }
  }
  if (t == 0) {
    FENCE("acq_rel.gpu");
    if (draw(&control->finished) == gridDim.x - 1) {
      FENCE("acq_rel.gpu");
      STORE("relaxed.gpu", &control->tickets, 0);
      STORE("relaxed.gpu", &control->finished, 0);
      STORE("relaxed.gpu", &control->epoch, epoch + 1);
    }
  }
}"""
)
TICKETS = TICKETS.replace("TILES", str(TILES)).replace("THREADS", str(THREADS))

WRITTEN = "__syncthreads();  // hidden rows are written"
RELEASED_FLAG = """FENCE("acq_rel.gpu");
        STORE("relaxed.gpu", &control->flags[tile], epoch + 1);"""
AWAITED = """do { LOAD("relaxed.gpu", seen, &control->flags[(tile + 3 + n) % 5]); } while (seen != epoch + 1);
        FENCE("acq_rel.gpu");"""
ADDED = """FENCE("acq_rel.gpu");
        is_last = draw(&control->added) == 5 - 1;
        FENCE("acq_rel.gpu");"""
LAST = """FENCE("acq_rel.gpu");
    if (draw(&control->finished) == gridDim.x - 1) {
      FENCE("acq_rel.gpu");"""


def edited(source: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


def within(text: str, old: str, new: str, nth: int = 0) -> tuple[str, str]:
    """The edit of a piece of the kernel in which occurrence `nth` of `old` becomes `new`."""
    parts = text.split(old)
    assert len(parts) > nth + 1, old
    return text, old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


def run_twice(source: str, seed: int) -> tuple[list[LaunchResult], bool]:
    """Two launches on one scratch with other operands: (results, whether both outputs and the scratch are right). Fewer
    CTAs than tiles of a pass, or more, as the seed chooses."""
    grid = (4, 7)[seed % 2]
    source = source if "ORDER(x)" in source else "#define ORDER(x) (x)\n" + source
    emulator = Emulator(compile_cuda(source), seed=seed, name="test.ptx")
    control, hidden, partial = (np.zeros(n, np.uint32) for n in (4 + TILES, TILES * THREADS, TILES * THREADS))
    kept = [emulator.memory.register(x) for x in (hidden, partial, control)]
    results, is_right = [], True
    for epoch in (1, 2):
        data = RNG.integers(0, 1 << 32, (TILES, THREADS), dtype=np.uint32)
        out = np.full(3 * THREADS, 0xFFC0FFEE, np.uint32)
        hidden[:], partial[:] = 0xDEADBEEF, 0xBADC0DE5
        arguments = [emulator.memory.register(out[THREADS : 2 * THREADS]), emulator.memory.register(data), *kept]
        results.append(emulator.launch("k", grid, THREADS, arguments, programmatic=True, seed=seed + epoch))
        is_right &= bool((out[THREADS:-THREADS] == wanted(data)).all())
        is_right &= bool((out[:THREADS] == 0xFFC0FFEE).all() and (out[-THREADS:] == 0xFFC0FFEE).all())
        is_right &= control.tolist() == [0, 0, epoch, 0] + [epoch] * TILES
        for address in arguments[:2]:
            emulator.memory.forget(address)
    return results, is_right


def wanted(data: np.ndarray) -> np.ndarray:
    hidden = 3 * data + 1
    partial = np.roll(hidden, -3, 0)[:, ::-1] ^ 7 * np.roll(hidden, -4, 0)[:, np.arange(THREADS) ^ 5]
    total = np.zeros(THREADS, np.uint32)
    for row in partial:
        total = 5 * total + row
    return total


RIGHT: dict[str, tuple[tuple[str, str], ...]] = {
    "as it is": (),
    "fence.sc": (within(RELEASED_FLAG, "acq_rel.gpu", "sc.gpu"), within(AWAITED, "acq_rel.gpu", "sc.sys")),
    "fences that are halves": (within(RELEASED_FLAG, "acq_rel.gpu", "release.gpu"), within(AWAITED, "acq_rel.gpu", "acquire.gpu")),
    "release and acquire": (
        (RELEASED_FLAG, 'STORE("release.gpu", &control->flags[tile], epoch + 1);'),
        (AWAITED, 'do { LOAD("acquire.gpu", seen, &control->flags[(tile + 3 + n) % 5]); } while (seen != epoch + 1);'),
    ),
    "a release at the system's scope": ((RELEASED_FLAG, 'STORE("release.sys", &control->flags[tile], epoch + 1);'),),
    "volatile": (within(RELEASED_FLAG, "relaxed.gpu", "volatile"), within(AWAITED, "relaxed.gpu", "volatile")),
    "every thread fences": (
        (WRITTEN, f'FENCE("acq_rel.gpu"); {WRITTEN}'),
    ),
    "an atomic that is all of it": (
        (ADDED, 'asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(seen) : "l"(&control->added) : "memory"); is_last = seen == 4;'),
    ),
    # What is stored hangs on the atomic by a branch.
    "no fence between being last and stores": (within(LAST, 'FENCE("acq_rel.gpu");', "", 1),),
    "every thread waits for flags": (
        (
            """if (t == 0) {
        for (unsigned n = 0; n < 2; ++n)
          """ + AWAITED + """
      }
      __syncthreads();  // flags are seen""",
            "for (unsigned n = 0; n < 2; ++n) " + AWAITED,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("edits", RIGHT.values(), ids=list(RIGHT))
def test_a_kernel_of_tickets_and_flags_that_is_right(edits: tuple[tuple[str, str], ...]) -> None:
    for seed in SEEDS if not edits else range(6):
        results, is_right = run_twice(edited(TICKETS, *edits), seed)
        assert not [str(report) for result in results for report in result.reports], f"seed {seed}"
        assert is_right, f"seed {seed}"


# What is planted, and the kinds of report that name it; none where the output alone can tell.
PLANTED: dict[str, tuple[set[str], tuple[tuple[str, str], ...]]] = {
    "no fence before the flag": ({"race"}, (within(RELEASED_FLAG, 'FENCE("acq_rel.gpu");', ""),)),
    "a fence of the CTA before the flag": ({"race"}, (within(RELEASED_FLAG, "acq_rel.gpu", "acq_rel.cta"),)),
    "a fence that only acquires": ({"race"}, (within(RELEASED_FLAG, "acq_rel.gpu", "acquire.gpu"),)),
    "no barrier before the fence": ({"race"}, ((WRITTEN, ""),)),
    "the fence behind the flag": (
        {"race"},
        ((RELEASED_FLAG, 'STORE("relaxed.gpu", &control->flags[tile], epoch + 1); FENCE("acq_rel.gpu");'),),
    ),
    "the flag before the data": (
        {"race"},
        (
            (RELEASED_FLAG, ""),
            ("hidden[tile * 64 + t] =", 'if (t == 0) { FENCE("acq_rel.gpu"); STORE("relaxed.gpu", &control->flags[tile], epoch + 1); } hidden[tile * 64 + t] ='),
        ),
    ),
    "a weak flag": ({"race"}, (within(RELEASED_FLAG, 'STORE("relaxed.gpu", &control->flags[tile], epoch + 1)', "control->flags[tile] = epoch + 1"),)),
    "a flag of the CTA's scope": ({"race"}, (within(RELEASED_FLAG, '"relaxed.gpu"', '"relaxed.cta"'),)),
    "a release of the CTA's scope": ({"race"}, ((RELEASED_FLAG, 'STORE("release.cta", &control->flags[tile], epoch + 1);'),)),
    "no acquire": ({"race"}, (within(AWAITED, 'FENCE("acq_rel.gpu");', ""),)),
    "an acquire of the CTA's scope": ({"race"}, (within(AWAITED, "acq_rel.gpu", "acq_rel.cta"),)),
    "a fence that only releases": ({"race"}, (within(AWAITED, "acq_rel.gpu", "release.gpu"),)),
    "a poll of the CTA's scope": ({"race"}, (within(AWAITED, "relaxed.gpu", "relaxed.cta"),)),
    "a weak poll": ({"race"}, (within(AWAITED, 'LOAD("relaxed.gpu",', 'LOAD("weak",'),)),
    "no barrier behind the acquire": ({"race"}, (("__syncthreads();  // flags are seen", ""),)),
    "a fence before the flag is seen": (
        {"race"},
        ((AWAITED, AWAITED.replace('FENCE("acq_rel.gpu");', "")), ("if (t == 0) {\n        for", 'if (t == 0) { FENCE("acq_rel.gpu");\n        for')),
    ),
    "flags are not awaited": ({"race"}, (within(AWAITED, "seen != epoch + 1", "false"),)),
    "one flag of two is awaited": ({"race"}, (("n < 2;", "n < 1;"),)),
    "flags of the launch before will do": ({"race"}, (within(AWAITED, "seen != epoch + 1", "seen < epoch"),)),
    "second tiles first": ({"deadlock"}, (("typedef", "#define ORDER(x) ((x) < 10 ? 9 - (x) : (x))\ntypedef"),)),
    "partial results are not fenced": ({"race"}, (within(ADDED, 'FENCE("acq_rel.gpu");', ""),)),
    "partial results are fenced in the CTA": ({"race"}, (within(ADDED, "acq_rel.gpu", "acq_rel.cta"),)),
    "partial results are no more in the CTA": ({"race"}, (("__syncthreads();  // partial results are written", ""),)),
    "who is last does not acquire": ({"race"}, (within(ADDED, 'FENCE("acq_rel.gpu");', "", 1),)),
    "a stripe's counter is kept": (set(), (('if (t == 0) STORE("relaxed.gpu", &control->added, 0);', ""),)),
    "the first to finish resets": ({"race"}, (within(LAST, "gridDim.x - 1", "0"),)),
    "no fence before being counted": ({"race"}, (within(LAST, 'FENCE("acq_rel.gpu");', ""),)),
    "the epoch is kept": (set(), (('STORE("relaxed.gpu", &control->epoch, epoch + 1);', ""),)),
    "a draw before the kernels ahead are over": ({"grid-dependency"}, (("  WAIT();\n", "  if (t == 0) draw(&control->tickets);\n  WAIT();\n"),)),
}  # fmt: skip


@pytest.mark.parametrize(("expected", "edits"), PLANTED.values(), ids=list(PLANTED))
def test_every_planted_bug_is_reported(expected: set[str], edits: tuple[tuple[str, str], ...]) -> None:
    found: set[str] = set()
    for seed in (*range(5, 11), 3, 4):  # of the first ones fewer end in a deadlock, which takes long to be sure of
        results, is_right = run_twice(edited(TICKETS, *edits), seed)
        found |= {report.kind for result in results for report in result.reports}
        if found & expected or (not expected and (found or not is_right)):
            return
    raise AssertionError(f"not found; reports seen: {sorted(found) or 'none'}")


READ_THEN_WRITTEN = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 words)
{
	.reg .pred %p0;
	.reg .b32 %r<2>;
	.reg .b64 %rd0;
	ld.param.b64 %rd0, [words];
	mov.u32 %r0, %ctaid.x;
	setp.eq.u32 %p0, %r0, 0;
	@%p0 ld.global.b32 %r1, [%rd0];
	@!%p0 st.global.b32 [%rd0], %r0;
	ret;
}
"""


@pytest.mark.parametrize("followed", [False, True])
def test_a_read_in_front_of_all_stores_is_remembered_of_a_followed_array(followed: bool) -> None:
    emulator = Emulator(READ_THEN_WRITTEN)
    address = emulator.memory.register(np.zeros(4, np.uint32))
    emulator.memory.allocations[0].followed = followed
    result = emulator.launch("k", 2, 1, [address], seed=0)
    assert [report.kind for report in result.errors] == ["race"] * followed
