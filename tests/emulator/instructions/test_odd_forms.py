"""Forms that no emitter foresaw: each is computed, or refused by a sentence with its line."""

from __future__ import annotations

import random
import re
import struct

import numpy as np
import pytest

from padless.emulator import Emulator, EmulatorError, UnsupportedInstruction
from padless.emulator.instructions import comparison
from padless.emulator.prepare.registry import EMITTERS, FLOATING
from padless.emulator.ptx.types import TYPES
from padless.emulator.state.program import TERMINATORS
from support.emulator_kernels import HEADER, kernel, run, values


# ---- mov of a register and a literal
@pytest.mark.parametrize(
    ("body", "pack"),
    [
        ("mov.b64 %d, {%a, 0x40004040};", lambda a: struct.pack("<2I", a, 0x40004040)),
        ("mov.b64 %d, {-2, %a};", lambda a: struct.pack("<iI", -2, a)),
        ("mov.b64 %d, {%a, 0f3FC00000};", lambda a: struct.pack("<If", a, 1.5)),
        ("mov.b64 %d, {17, 0x80000001};", lambda a: struct.pack("<2I", 17, 0x80000001)),
        ("mov.b32 {%h0, %h1}, %a; mov.b64 %d, {%h1, 7, %h0, 0xFFFE};",
         lambda a: struct.pack("<4H", a >> 16, 7, a & 0xFFFF, 0xFFFE)),
        ("mov.b64 %y1, {%a, 99}; mov.b64 {_, %x1}, %y1; mov.b64 %d, {%x1, %a};", lambda a: struct.pack("<2I", 99, a)),
    ],
)  # fmt: skip
def test_registers_and_literals_are_packed(body: str, pack) -> None:
    a = values("u32", 8)
    got = run(kernel(".reg .b16 %h<2>; " + body, ["u32"], "b64"), [a], np.uint64)
    assert got.tolist() == [int.from_bytes(pack(int(x)), "little") for x in a]


def test_literals_in_128_bits() -> None:
    a = values("u64", 8)
    body = ".reg .b128 %w; mov.b128 %w, {%a, 0x123456789ABCDEF0}; mov.b128 {%y1, %y2}, %w; xor.b64 %d, %y1, %y2;"
    assert (run(kernel(body, ["u64"], "u64"), [a], np.uint64) == (a ^ np.uint64(0x123456789ABCDEF0))).all()


@pytest.mark.parametrize(
    "body",
    ["mov.b64 %d, {%a, %a, %a};", "mov.b64 %d, {%a, %y1};", "mov.b64 {%x1, %x2, %x3}, %y1;",
     ".reg .b128 %w; mov.b128 %w, {%y1, %y2, %y3};", ".reg .b128 %w; mov.b128 {%y1, %y2, %y3}, %w;"],
)  # fmt: skip
def test_vectors_that_do_not_fit(body: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"<ptx>:\d+: `mov"):
        Emulator(kernel(body, ["u32"], "b64")).program("k")


# ---- set of packed operands into an integer: 0xFFFF in each half (PTX ISA, "set", half precision)
@pytest.mark.parametrize("to", ["u32", "s32", "packed"])
@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize(
    ("relation", "holds"),
    [("lt", lambda x, y: x < y), ("geu", lambda x, y: not x < y), ("ne", lambda x, y: x < y or x > y)],
)
def test_set_of_packed_operands(to: str, kind: str, relation: str, holds) -> None:
    a, b = values("u32", 5), values("u32", 6)
    a[:8] = b[:8]
    a[8], b[8] = 0x3C007E00, 0x3C017E00  # a NaN of f16 in the low halves
    a[9], b[9] = 0x7FC03F80, 0x3F803F80  # and one of bf16 in the high ones
    body = f"set.{relation}.{kind if to == 'packed' else to}.{kind} %d, %a, %b;"
    got = run(kernel(body, ["u32", "u32"], "u32"), [a, b], np.uint32).view(np.uint16)
    halves = [x.view(np.uint16) for x in (a, b)]
    x, y = ((h.astype(np.uint32) << 16).view(np.float32) if kind[0] == "b" else h.view(np.float16) for h in halves)
    true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}[kind] if to == "packed" else 0xFFFF
    assert got.tolist() == [true if holds(p, q) else 0 for p, q in zip(x.tolist(), y.tolist(), strict=True)]


@pytest.mark.parametrize("form", ["f32.f16x2", "u16.bf16x2", "f16.f16x2", "f16x2.f32", "f16x2.s32", "bf16x2.f16x2"])
def test_set_between_packed_and_others_is_refused(form: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=f"`set.lt.{form}"):
        Emulator(kernel(f"set.lt.{form} %x1, %x2, %x3;", [], "u32")).program("k")


# ---- any opcode
REGISTERS = (
    ".reg .pred %p<3>; .reg .b8 %c<3>; .reg .b16 %h<3>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b128 %w<2>; "
    ".shared .align 16 .b8 s[4096];"
)
OPERANDS = (
    "%p1", "%p2", "!%p1", "%c1", "%h1", "%r1", "%r2", "%d1", "%d2", "%w1", "%tid.x", "%clock64", "0", "1", "-3",
    "0x40004040", "4294967296", "0f3F800000", "0d3FF0000000000000", "{%r1, 7}", "{%r1, %r2}", "{%r1, %r2, %r3, %r4}",
    "{1, 2, 3}", "{}", "{_, %r1}", "{%h1, %h2}", "{{%r1}, %d1}", "%p1|%p2", "%r1|%p1", "_", "[%r1]", "[%d1+16]", "[s]",
    "[s+8]", "[0]", "[%d1, {%r1, %r2}]", "[%d1, {%r1, %r2}], [%r3]", "[%p1]", "[%h1]", "s", "nowhere", "s+4",
    "(%r1)", "[{%r1, %r2}]", "[%d1, %r1]", "[%r1], %d1, %d2, %r2, %p1",
)  # fmt: skip
WORDS = (
    "sync", "aligned", "async", "shared", "shared::cta", "shared::cluster", "global", "local", "param", "const", "bulk",
    "tensor", "2d", "tile", "mbarrier::complete_tx::bytes", "bulk_group", "commit_group", "wait_group", "add", "min",
    "and", "cas", "lo", "hi", "wide", "rn", "rz", "rs", "ftz", "sat", "relu", "approx", "lt", "ltu", "num", "nan",
    "arrive", "expect_tx", "try_wait", "parity", "relaxed", "cluster", "cta_group::1", "alloc", "ld", "32x32b", "x1",
    "x4", "x3", "mma", "kind::f16", "kind::mxf8f6f4", "commit", "init", "wait::ld", "fence::before_thread_sync", "cp",
    "mma_async", "m64n8k16", "m16n8k16", "row", "col", "m8n8", "trans", "bfly", "idx", "ballot", "any", "v2", "v4", "v8",
    "dim", "replace", "rank", "box_dim", "elemtype", "cp_fenceproxy", "try_cancel", "query_cancel", "is_canceled",
    "get_first_ctaid", "l", "r", "clamp", "wrap", "f4e", "ecr", "cc", "uni", "inc", "dec", "popc", "proxy", "acq_rel",
    "to", "space", "L2::cache_hint", "ca", "v9", "x2", "noftz", "oob", "seed", "128x256b",
)  # fmt: skip
OPCODES = sorted({*EMITTERS, *FLOATING, *TERMINATORS} - {"call.external"})
FORMS = 40  # of an opcode


def form(opcode: str, draw: random.Random) -> str:
    modifiers = draw.sample(WORDS, draw.randrange(4)) + draw.sample(sorted(TYPES), draw.randrange(3))
    guard = draw.choice(("", "", "@%p1 ", "@!%p2 "))
    return f"{guard}{'.'.join((opcode, *modifiers))} {', '.join(draw.choices(OPERANDS, k=draw.randrange(6)))};"


@pytest.mark.parametrize("opcode", OPCODES)
def test_forms_that_are_drawn(opcode: str) -> None:
    """Prepared, and where that is taken run: what goes wrong is a report, or a refusal with the line."""
    draw = random.Random(opcode)
    for _ in range(FORMS):
        text = form(opcode, draw)
        setup = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7;"
        whole = HEADER + ".visible .entry k() {" + REGISTERS + setup + "\n" + text + "\nret; }"
        try:
            Emulator(whole, seed=1).launch("k", 1, 32, [])
        except EmulatorError as error:
            message = str(error)
        else:
            continue
        assert re.match(r"<ptx>:\d+: ", message), text


# ---- what goes wrong inside an emitter, or in the code that it wrote
def planted(monkeypatch: pytest.MonkeyPatch, value: str) -> tuple[str, int]:
    monkeypatch.setattr(comparison, "COMPARE", comparison.COMPARE | {"lt": value})
    body = "add.u32 %x1, %t, 1;\nsetp.lt.u32 %q0, %x1, 5;\nselp.u32 %d, 1, 0, %q0;"
    text = kernel(body, [], "u32")
    return text, 1 + text.splitlines().index("setp.lt.u32 %q0, %x1, 5;")


@pytest.mark.parametrize("value", ["< undefined +", "< <", "< np.zeros(5) +", "< {}[3] +"])
def test_code_that_does_not_run_is_a_refusal_with_its_line(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    text, line = planted(monkeypatch, value)
    with pytest.raises(UnsupportedInstruction, match=rf"^<ptx>:{line}: `setp\.lt\.u32 .*` is not supported \("):
        Emulator(text).launch("k", 1, 32, [0])


def test_an_instruction_that_waits_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(emitter) -> None:
        emitter.synchronise(lambda fragment, lanes: {}[7])

    monkeypatch.setitem(EMITTERS, "bar", broken)
    text = kernel("mov.u32 %d, 3;\nbar.sync 0;", [], "u32")
    line = 1 + text.splitlines().index("bar.sync 0;")
    with pytest.raises(UnsupportedInstruction, match=rf"^<ptx>:{line}: `bar.sync 0` is not supported \(KeyError"):
        Emulator(text).launch("k", 1, 32, [0])


# ---- instructions that there are not, and text that is not PTX
WHOLE = HEADER + ".visible .entry k() {" + REGISTERS + "\n"


@pytest.mark.parametrize(
    "text",
    ["frobnicate.b32 %r1, %r2;", "movv.u32 %r1, 0;", "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1, %r2, "
     "%r3, %r4}, %d1, %d2, %r5, 2, 1, 1, 1, 0, 0;", "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r2], %r3, "
     "%p1;", "tex.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [s, {%r5, %r6}];", "call (%r1), absent, (%r2);",
     "ld.u32 %r1, [q];"],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(EmulatorError, match=r"^<ptx>:5: "):
        Emulator(WHOLE + text + "\nret; }").launch("k", 1, 32, [])


SOUND = (
    "mov.u32 %r1, %tid.x;", "@%p1 add.s32 %r1, %r2, -3;", "ld.shared.v2.b32 {%r1, %r2}, [s+8];", "$L: bra $L2;", "$L2:",
    "setp.lt.u32 %p1|%p2, %r1, 7;", "{ .reg .b32 %inner; mov.b32 %inner, 0f3F800000; }", ".reg .b64 %more<4>;",
    ".loc 1 7 3", '.pragma "nounroll";', "call (%r1), absent, (%r2);", ".shared .align 8 .b8 t[16];",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_text_with_a_token_gone_doubled_or_changed(seed: int) -> None:
    """It is another program, or it is refused; whatever is said of the text has a line."""
    draw = random.Random(seed)
    for _ in range(60):
        tokens = re.findall(r"[%$]?[\w.:]+|\S|\n", "\n".join(draw.sample(SOUND, 5)) + "\nret; }\n")
        at = draw.randrange(len(tokens))
        other = draw.choice([*tokens, "9", "%r1", ".align", "<", ">", "[", "(", '"', "0x", "@", "!", "1e9", "\x00"])
        tokens[at : at + 1] = draw.choice(([], [tokens[at]] * 2, [other], [tokens[at], other]))
        text = " ".join(tokens)
        try:
            Emulator(WHOLE + text).program("k")
        except EmulatorError as error:
            message = str(error)
        else:
            continue
        assert re.match(r"<ptx>:\d+: ", message), f"{message}: {text}"
