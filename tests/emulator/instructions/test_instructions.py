"""Integer, bit, warp, control-flow and memory instructions against references in exact Python numbers, and errors."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from padless.emulator import Emulator, EmulatorError, PtxSyntaxError, UnsupportedInstruction
from support.emulator_kernels import HEADER, NUMPY, SIZES, bfe, kernel, run, values, wrap


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def prmt(a: int, b: int, c: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    out = []
    for i in range(4):
        n = c >> 4 * i & 15
        byte = source[n & 7]
        out.append((0xFF if byte & 0x80 else 0) if n & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def bfi(a: int, b: int, c: int, d: int, bits: int = 32) -> int:
    for i in range(min(d & 0xFF, bits)):
        at = (c & 0xFF) + i
        if at < bits:
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def shf(a: int, b: int, c: int, left: bool, clamp: bool) -> int:
    n = min(c, 32) if clamp else c & 31
    both = b << 32 | a
    return ((both << n) >> 32 if left else both >> n) & 0xFFFFFFFF


INTEGER: list[tuple[str, list[str], str, Callable[..., int]]] = []
for k in ("u32", "s32", "u64", "s64", "u16", "s16"):
    two = [k, k]
    INTEGER += [
        (f"add.{k} %d, %a, %b;", two, k, lambda a, b: a + b),
        (f"sub.{k} %d, %a, %b;", two, k, lambda a, b: a - b),
        (f"mul.lo.{k} %d, %a, %b;", two, k, lambda a, b: a * b),
        (f"mul.hi.{k} %d, %a, %b;", two, k, lambda a, b, n=8 * SIZES[k]: (a * b) >> n),
        (f"mad.lo.{k} %d, %a, %b, %c;", [k] * 3, k, lambda a, b, c: a * b + c),
        (f"min.{k} %d, %a, %b;", two, k, min),
        (f"max.{k} %d, %a, %b;", two, k, max),
        (f"div.{k} %d, %a, %b;", two, k, lambda a, b: trunc_div(a, b) if b else None),
        (f"rem.{k} %d, %a, %b;", two, k, lambda a, b: a - b * trunc_div(a, b) if b else None),
        (f"shl.b{k[1:]} %d, %a, %b;", [k, "u32"], k, lambda a, b, n=8 * SIZES[k]: a << b if b < n else 0),
        (f"shr.{k} %d, %a, %b;", [k, "u32"], k, lambda a, b: a >> min(b, 200)),
    ]
    if k[0] == "s":
        INTEGER += [(f"abs.{k} %d, %a;", [k], k, abs), (f"neg.{k} %d, %a;", [k], k, lambda a: -a)]
for k in ("u32", "s32", "u16", "s16"):
    w = f"{k[0]}{2 * int(k[1:])}"
    INTEGER += [
        (f"mul.wide.{k} %d, %a, %b;", [k, k], w, lambda a, b: a * b),
        (f"mad.wide.{k} %d, %a, %b, %c;", [k, k, w], w, lambda a, b, c: a * b + c),
    ]
for k in ("u32", "s32", "u64", "s64"):
    INTEGER.append((f"bfe.{k} %d, %a, %b, %c;", [k, "u32", "u32"], k, bfe(k)))
    INTEGER.append(
        (f"bfind.{k} %d, %a;", [k], "u32",
         lambda a, k=k: ((~a if a < 0 else a).bit_length() - 1) & 0xFFFFFFFF)
    )  # fmt: skip
INTEGER += [
    ("and.b32 %d, %a, %b;", ["u32", "u32"], "u32", lambda a, b: a & b),
    ("or.b64 %d, %a, %b;", ["u64", "u64"], "u64", lambda a, b: a | b),
    ("xor.b16 %d, %a, %b;", ["u16", "u16"], "u16", lambda a, b: a ^ b),
    ("not.b32 %d, %a;", ["u32"], "u32", lambda a: ~a),
    ("cnot.b32 %d, %a;", ["u32"], "u32", lambda a: int(a == 0)),
    ("popc.b32 %d, %a;", ["u32"], "u32", lambda a: a.bit_count()),
    ("popc.b64 %d, %a;", ["u64"], "u32", lambda a: a.bit_count()),
    ("clz.b32 %d, %a;", ["u32"], "u32", lambda a: 32 - a.bit_length()),
    ("clz.b64 %d, %a;", ["u64"], "u32", lambda a: 64 - a.bit_length()),
    ("brev.b32 %d, %a;", ["u32"], "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    ("prmt.b32 %d, %a, %b, %c;", ["u32"] * 3, "u32", prmt),
    ("prmt.b32 %d, %a, %b, 0x7250;", ["u32"] * 2, "u32", lambda a, b: prmt(a, b, 0x7250)),
    ("prmt.b32 %d, %a, %b, 0x3F61;", ["u32"] * 2, "u32", lambda a, b: prmt(a, b, 0x3F61)),
    ("bfi.b32 %d, %a, %b, %c, 9;", ["u32"] * 3, "u32", lambda a, b, c: bfi(a, b, c, 9)),
    ("bfi.b64 %d, %a, %b, 7, %c;", ["u64", "u64", "u32"], "u64", lambda a, b, c: bfi(a, b, 7, c, 64)),
    ("shf.l.wrap.b32 %d, %a, %b, %c;", ["u32"] * 3, "u32", lambda a, b, c: shf(a, b, c, True, False)),
    ("shf.r.wrap.b32 %d, %a, %b, %c;", ["u32"] * 3, "u32", lambda a, b, c: shf(a, b, c, False, False)),
    ("shf.l.clamp.b32 %d, %a, %b, %c;", ["u32"] * 3, "u32", lambda a, b, c: shf(a, b, c, True, True)),
    ("shf.r.clamp.b32 %d, %a, %b, %c;", ["u32"] * 3, "u32", lambda a, b, c: shf(a, b, c, False, True)),
    ("sad.s32 %d, %a, %b, %c;", ["s32", "s32", "s32"], "s32", lambda a, b, c: abs(wrap("s32", a - b)) + c if abs(a - b) < 2**31 else None),
    ("add.cc.u32 %x1, %a, %b; addc.u32 %d, %c, 0;", ["u32"] * 3, "u32", lambda a, b, c: c + ((a + b) >> 32)),
    ("sub.cc.u32 %x1, %a, %b; subc.u32 %d, %c, 0;", ["u32"] * 3, "u32", lambda a, b, c: c - (a < b)),
    ("dp4a.s32.s32 %d, %a, %b, %c;", ["u32", "u32", "s32"], "s32",
     lambda a, b, c: c + sum(x * y for x, y in zip(struct.unpack("4b", struct.pack("<I", a)), struct.unpack("4b", struct.pack("<I", b)), strict=True))),
    ("setp.lt.s32 %q0, %a, %b; selp.b32 %d, %a, %b, %q0;", ["s32", "s32"], "s32", min),
    ("setp.hs.u32 %q0, %a, %b; selp.u32 %d, 7, 9, %q0;", ["u32", "u32"], "u32", lambda a, b: 7 if a >= b else 9),
    ("setp.eq.u32 %q2, %t, %t; setp.eq.and.s32 %q0|%q1, %a, %b, %q2; selp.u32 %d, 1, 0, %q1;", ["s32", "s32"], "u32",
     lambda a, b: int(a != b)),
    ("set.lt.u32.s32 %d, %a, %b;", ["s32", "s32"], "u32", lambda a, b: 0xFFFFFFFF if a < b else 0),
    ("mov.b64 %y1, {%a, %b}; mov.b64 {%x1, %x2}, %y1; sub.u32 %d, %x2, %x1;", ["u32", "u32"], "u32", lambda a, b: b - a),
    ("slct.s32.s32 %d, %a, %b, %c;", ["s32"] * 3, "s32", lambda a, b, c: a if c >= 0 else b),
]  # fmt: skip
for table in (0x00, 0x6A, 0x96, 0xC0, 0xE8, 0xFF, 0x1B):

    def logic(a: int, b: int, c: int, table: int = table) -> int:
        out = 0
        for i in range(32):
            at = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
            out |= (table >> at & 1) << i
        return out

    INTEGER.append((f"lop3.b32 %d, %a, %b, %c, {table};", ["u32"] * 3, "u32", logic))


@pytest.mark.parametrize(
    ("body", "inputs", "output", "reference"), INTEGER, ids=lambda v: v if isinstance(v, str) else ""
)
def test_integer(body: str, inputs: list[str], output: str, reference: Callable[..., int]) -> None:
    arrays = [values(kind, i + 3) for i, kind in enumerate(inputs)]
    if len(inputs) > 1 and inputs[-1] == "u32" and inputs[0] != "u32":  # shift amounts and field positions
        arrays[-1] = arrays[-1] % np.uint32(80)
    got = run(kernel(body, inputs, output), arrays, NUMPY[output])
    for i in range(32):
        expected = reference(*(int(x[i]) for x in arrays))
        if expected is not None:
            assert int(got[i]) == wrap(output, expected), (i, [hex(int(x[i])) for x in arrays])


# ---- lanes
LANE = np.arange(32)


@pytest.mark.parametrize(
    ("form", "source"),
    [("bfly.b32 %d|%q0, %a, 5, 31", LANE ^ 5), ("idx.b32 %d|%q0, %a, 7, 31", np.full(32, 7)),
     ("up.b32 %d|%q0, %a, 3, 0", np.where(LANE >= 3, LANE - 3, LANE)),
     ("down.b32 %d|%q0, %a, 4, 31", np.where(LANE + 4 < 32, LANE + 4, LANE)),
     ("idx.b32 %d|%q0, %a, 2, 6175", (LANE & 24) | 2)],  # 0x181f: segments of eight lanes
)  # fmt: skip
def test_shuffle(form: str, source: np.ndarray) -> None:
    a = values("u32", 1)
    got = run(kernel(f"shfl.sync.{form}, -1;", ["u32"], "u32"), [a], np.uint32)
    assert (got == a[source]).all()


def test_votes_and_matches() -> None:
    a = (LANE % 3).astype(np.uint32)
    odd = run(kernel("setp.eq.u32 %q0, %a, 1; vote.sync.ballot.b32 %d, %q0, -1;", ["u32"], "u32"), [a], np.uint32)
    assert (odd == sum(1 << i for i in range(32) if i % 3 == 1)).all()
    matched = run(kernel("match.any.sync.b32 %d, %a, -1;", ["u32"], "u32"), [a], np.uint32)
    assert matched.tolist() == [sum(1 << j for j in range(32) if j % 3 == i % 3) for i in range(32)]
    total = run(kernel("redux.sync.add.s32 %d, %a, -1;", ["u32"], "u32"), [a], np.uint32)
    assert (total == a.sum()).all()
    every = run(kernel("setp.lt.u32 %q0, %a, 3; vote.sync.all.pred %q1, %q0, -1; selp.u32 %d, 1, 0, %q1;", ["u32"], "u32"), [a], np.uint32)  # fmt: skip
    assert (every == 1).all()


def test_elect_picks_one_lane_whichever_the_schedule_likes() -> None:
    text = kernel("elect.sync %x1|%q0, -1; selp.u32 %d, 1, 0, %q0;", [], "u32")
    leaders = set()
    for seed in range(24):
        emulator = Emulator(text, seed=seed)
        out = np.zeros(32, np.uint32)
        emulator.launch("k", 1, 32, [emulator.memory.register(out)]).raise_on_reports()
        assert out.sum() == 1
        leaders.add(int(out.argmax()))
    assert len(leaders) > 1


# ---- control flow
def test_divergent_loop_reconverges() -> None:
    body = """
      mov.u32 %d, 0; mov.u32 %x1, 0;
    LOOP: setp.ge.u32 %q0, %x1, %a; @%q0 bra DONE;
      add.u32 %d, %d, %x1; add.u32 %x1, %x1, 1;
      and.b32 %x2, %x1, 1; setp.eq.u32 %q1, %x2, 0; @%q1 bra LOOP;
      add.u32 %d, %d, 100; bra LOOP;
    DONE: activemask.b32 %x3; shfl.sync.idx.b32 %x4, %d, 31, 31, -1; xor.b32 %d, %d, %x4;
      popc.b32 %x3, %x3; shl.b32 %x3, %x3, 16; xor.b32 %d, %d, %x3;"""
    a = (LANE * 7 % 13).astype(np.uint32)
    got = run(kernel(body, ["u32"], "u32"), [a], np.uint32)

    def reference(n: int) -> int:
        return sum(i + (100 if (i + 1) % 2 else 0) for i in range(n))

    plain = np.array([reference(int(x)) for x in a])
    assert (got == (plain ^ plain[31] ^ (32 << 16))).all()


def test_indexed_branch_and_calls() -> None:
    function = """
    .func (.param .b32 result) twice(.param .b32 x) {
      .reg .b32 %r<3>; .reg .pred %p;
      ld.param.b32 %r1, [x]; setp.gt.u32 %p, %r1, 50; @%p bra BIG;
      shl.b32 %r1, %r1, 1;
      BIG: st.param.b32 [result+0], %r1; ret; }"""
    body = """
    ts: .branchtargets T0, T1, T2;
      brx.idx %a, ts;
    T0: mov.u32 %x1, 10; bra.uni E;
    T1: mov.u32 %x1, 20; bra.uni E;
    T2: mov.u32 %x1, 60;
    E: { .param .b32 p0; st.param.b32 [p0+0], %x1; .param .b32 r0;
      call.uni (r0), twice, (p0); ld.param.b32 %d, [r0+0]; }"""
    a = (LANE % 3).astype(np.uint32)
    got = run(kernel(body, ["u32"], "u32", function), [a], np.uint32)
    assert (got == np.array([20, 40, 60])[LANE % 3]).all()


def test_lanes_of_one_warp_can_wait_for_each_other() -> None:
    """A spin of one lane on what a sibling writes after the branch: forward progress of every thread."""
    body = """
      mov.u32 %x1, flag; setp.eq.u32 %q0, %t, 0; @%q0 st.volatile.shared.u32 [%x1], 0; bar.warp.sync -1;
      setp.ne.u32 %q1, %t, 0; @%q1 bra WRITER;
    SPIN: ld.volatile.shared.u32 %x2, [%x1]; setp.eq.u32 %q2, %x2, 0; @%q2 bra SPIN;
      bra.uni OUT;
    WRITER: setp.eq.u32 %q3, %t, 5; @%q3 st.volatile.shared.u32 [%x1], 1;
    OUT: mov.u32 %d, %t;"""
    got = run(kernel(body, [], "u32", ".shared .align 4 .u32 flag;"), [], np.uint32)
    assert (got == LANE).all()


# ---- memory
def test_vectors_and_widths() -> None:
    body = """
      mov.u32 %x1, buffer; mad.lo.u32 %x1, %t, 16, %x1;
      st.shared.v4.b32 [%x1], {%a, %b, %a, %b}; ld.shared.v2.b64 {%y1, %y2}, [%x1];
      ld.shared.s8 %x2, [%x1+1]; ld.shared.u16 %x3, [%x1+2]; ld.shared.v4.u32 {%x4, %x5, %x6, _}, [%x1];
      st.shared.u8 [%x1], %x3; ld.shared.u8 %x7, [%x1];
      shl.b32 %x2, %x2, 8; xor.b32 %x2, %x2, %x5; xor.b32 %d, %x2, %x7;"""
    a, b = values("u32", 1), values("u32", 2)
    got = run(kernel(body, ["u32", "u32"], "u32", ".shared .align 16 .b8 buffer[512];"), [a, b], np.uint32)
    for i in range(32):
        raw = struct.pack("<2I", int(a[i]), int(b[i]))
        byte = struct.unpack_from("b", raw, 1)[0]
        half = struct.unpack_from("<H", raw, 2)[0]
        assert int(got[i]) == ((byte << 8) ^ int(b[i]) ^ (half & 0xFF)) & 0xFFFFFFFF


def test_generic_addresses_reach_every_space() -> None:
    body = """
      .local .align 8 .b8 depot[64];
      mov.u64 %y1, depot; cvta.local.u64 %y1, %y1; st.u32 [%y1+4], %a;
      mov.u64 %y2, buffer; cvta.shared.u64 %y2, %y2; mul.wide.u32 %y3, %t, 4; add.u64 %y2, %y2, %y3; st.u32 [%y2], %a;
      ld.u32 %x1, [%y1+4]; ld.u32 %x2, [%y2];
      mov.u64 %y4, table; cvta.const.u64 %y4, %y4; ld.u32 %x3, [%y4+8];
      add.u32 %d, %x1, %x2; add.u32 %d, %d, %x3;
      cvta.to.shared.u64 %y2, %y2; cvt.u32.u64 %x4, %y2; ld.shared.u32 %x4, [%x4]; add.u32 %d, %d, %x4;"""
    declarations = ".shared .align 4 .b8 buffer[128];\n.const .align 4 .u32 table[3] = {1, 2, 77};"
    a = values("u32", 1)
    got = run(kernel(body, ["u32"], "u32", declarations), [a], np.uint32)
    assert (got == a * 3 + 77).all()


def test_atomics() -> None:
    body = """
      ld.param.u64 %p, [in0]; atom.global.add.u32 %d, [%p], 1; red.global.max.u32 [%p+4], %t;
      atom.global.cas.b32 %x1, [%p+8], 5, %t; red.global.add.f32 [%p+12], 0f3F800000;
      atom.global.exch.b32 %x2, [%p+16], 9; atom.global.inc.u32 %x3, [%p+20], 2;"""
    memory = np.zeros(6, np.uint32)
    memory[2] = 5
    got = run(kernel(body, ["u32"], "u32"), [np.concatenate([memory, np.zeros(26, np.uint32)])], np.uint32)
    assert sorted(got.tolist()) == list(range(32))


def test_atomics_leave_the_right_memory() -> None:
    memory = np.zeros(32, np.uint32)
    memory[2] = 5
    body = """
      ld.param.u64 %p, [in0]; atom.global.add.u32 %d, [%p], 1; red.global.max.u32 [%p+4], %t;
      atom.global.cas.b32 %x1, [%p+8], 5, 1234; red.global.add.f32 [%p+12], 0f3F800000; red.global.and.b32 [%p+20], 3;"""
    memory[5] = 7
    run(kernel(body, ["u32"], "u32"), [memory], np.uint32)
    assert memory[:3].tolist() == [32, 31, 1234]
    assert memory[3:4].view(np.float32)[0] == 32.0
    assert memory[5] == 3


# ---- errors
def test_unknown_instruction_is_named_before_anything_runs() -> None:
    text = kernel("frobnicate.u32 %d, %a;", ["u32"], "u32")
    with pytest.raises(UnsupportedInstruction, match=r"mine\.ptx:\d+: .*frobnicate\.u32 %d, %a"):
        Emulator(text, name="mine.ptx").program("k")


def test_unknown_modifier_is_refused_rather_than_ignored() -> None:
    with pytest.raises(UnsupportedInstruction, match="weird"):
        Emulator(kernel("add.weird.u32 %d, %a, %a;", ["u32"], "u32")).program("k")


@pytest.mark.parametrize("text", ["hello", HEADER + ".entry k() { add.u32 ^ ; }", HEADER + ".visible .entry k( {"])
def test_not_ptx(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match=r"<ptx>:\d+"):
        Emulator(text)


def test_launch_arguments_are_checked() -> None:
    emulator = Emulator(kernel("mov.u32 %d, 0;", [], "u32"))
    with pytest.raises(EmulatorError, match="takes 1 parameters"):
        emulator.launch("k", 1, 32, [])
    with pytest.raises(EmulatorError, match="no entry"):
        emulator.launch("nothing", 1, 32, [0])
    with pytest.raises(EmulatorError, match="2048 threads"):
        emulator.launch("k", 1, 2048, [0])
    with pytest.raises(EmulatorError, match="multiple of cluster"):
        emulator.launch("k", 3, 32, [0], cluster=2)


def test_out_of_bounds_and_traps_are_reported() -> None:
    emulator = Emulator(kernel("mov.u32 %d, 1;", [], "u32"))
    out = np.zeros(31, np.uint32)
    result = emulator.launch("k", 1, 32, [emulator.memory.register(out, name="out")])
    assert [r.kind for r in result.reports] == ["out-of-bounds"]
    assert result.reports[0].lane == 31
    assert "out" in result.reports[0].message
    assert (out == 1).all()
    trapped = Emulator(kernel("setp.eq.u32 %q0, %t, 3; @%q0 trap; mov.u32 %d, 1;", [], "u32"))
    result = trapped.launch("k", 1, 32, [trapped.memory.register(np.zeros(32, np.uint32))])
    assert [r.kind for r in result.reports] == ["fault"]


def test_uninitialised_registers_are_reported() -> None:
    emulator = Emulator(kernel("add.u32 %d, %x5, 1;", [], "u32"))
    result = emulator.launch("k", 1, 32, [emulator.memory.register(np.zeros(32, np.uint32))])
    assert [r.kind for r in result.reports] == ["uninitialised-register"]
    assert "%x5" in result.reports[0].message
