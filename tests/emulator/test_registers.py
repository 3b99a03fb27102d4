"""setmaxnreg moves a CTA's registers between its warps: what launch gives, what waits, what can never be given."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from padless.emulator.ptx.parser import parse
from padless.emulator.state.register_pool import GRANULE, registers_at_launch
from support.emulator_cuda import kinds

SEEDS = range(6)
BOUNDS_384 = ".maxntid 384 .minnctapersm 1"  # 168 registers a thread
BOUNDS_640 = ".maxntid 640 .minnctapersm 1"  # 96


def kernel(bounds: str, *roles: str, target: str = "sm_90a") -> str:
    """A kernel whose warpgroup i runs roles[i], PTX or a count with its sign (+232: inc), then every thread stores %v.

    %w is a word that all CTAs share, %v starts as the thread's number plus one.
    """
    body = []
    for i, role in enumerate(roles):
        name = {"+": "inc", "-": "dec"}.get(role[:1])
        text = f"setmaxnreg.{name}.sync.aligned.u32 {role[1:]};" if name else role
        body.append(f"setp.ne.u32 %q, %g, {i}; @%q bra R{i}; {text} bra.uni END; R{i}:")
    return f"""
.version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 word) {bounds} {{
.reg .b32 %t, %g, %v; .reg .b64 %o, %w, %at; .reg .pred %q;
mov.u32 %t, %tid.x; shr.u32 %g, %t, 7; add.u32 %v, %t, 1;
ld.param.u64 %o, [out]; ld.param.u64 %w, [word];
{chr(10).join(body)}
END:
mul.wide.u32 %at, %t, 4; add.s64 %o, %o, %at; st.global.u32 [%o], %v;
ret; }}
"""


def run(text: str, threads: int, seed: int = 0) -> tuple[LaunchResult, np.ndarray]:
    emulator = Emulator(text, seed=seed, name="test.ptx")
    out, word = np.zeros(threads, np.uint32), np.zeros(1, np.uint32)
    addresses = [emulator.memory.register(x) for x in (out, word)]
    return emulator.launch("k", 1, threads, addresses), out


def check_runs(text: str, threads: int) -> None:
    for seed in SEEDS:
        result, out = run(text, threads, seed)
        result.raise_on_reports()
        assert (out == np.arange(1, threads + 1)).all()


def deadlock(text: str, threads: int) -> str:
    """The report's text, the same kind on every seed."""
    messages = []
    for seed in SEEDS:
        result, out = run(text, threads, seed)
        assert kinds(result) == {"deadlock"}
        assert not out.all()
        messages.append(result.reports[0].message)
    return messages[0]


# --- what fits and what does not ---------------------------------------------------------------------------

FITTING = {
    "two consumers of 232 beside 40": (BOUNDS_384, ("-40", "+232", "+232")),
    "consumers first": (BOUNDS_384, ("+232", "+232", "-40")),
    "one consumer": (".reqntid 256 .minnctapersm 1", ("-40", "+248")),
    "a pool with something left": (BOUNDS_384, ("-24", "+232", "+232")),
    "five warpgroups": (BOUNDS_640, ("+112", "+112", "+112", "+112", "-32")),
    "as many as at launch": (BOUNDS_640, ("-40", "-56", "+96", "+96", "+96")),
    "two CTAs an SM": (".maxntid 384 .minnctapersm 2", ("-24", "+104", "+104")),
    ".maxnreg": (".maxnreg 128", ("-24", "+232")),
    "as many as an instruction can name": (".reqntid 256 .maxnreg 256", ("+256", "+256")),
    "and with some given back": (".reqntid 256 .maxnreg 256", ("-240", "+256")),
    "an increase below the bounds, which lowers what launch gives": (BOUNDS_384, ("-24", "+160", "+160")),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_runs(name: str) -> None:
    bounds, roles = FITTING[name]
    check_runs(kernel(bounds, *roles), 128 * len(roles))


# Roles; asked for, given, what fits.
BEYOND = {
    "8 too many": (BOUNDS_384, ("-40", "+240", "+240"), (66560, 64512, 232)),
    "consumers first": (BOUNDS_384, ("+240", "+240", "-40"), (66560, 64512, 232)),
    "the producer gives 8 too few": (BOUNDS_384, ("-48", "+232", "+232"), (65536, 64512, 224)),
    "no more than the SM has, and more than the CTA has": (
        BOUNDS_640,
        ("+120", "+120", "+120", "+120", "-32"),
        (65536, 61440, 112),
    ),
    "two CTAs an SM": (".maxntid 384 .minnctapersm 2", ("-24", "+112", "+112"), (31744, 30720, 104)),
    "nobody gives": (".maxnreg 96", ("+104", "+104"), (26624, 24576, 96)),
    ".maxnreg below the launch bounds": (BOUNDS_384 + " .maxnreg 96", ("-40", "+128", "+128"), (37888, 36864, 120)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_does_not_fit_is_reported_with_its_numbers(name: str) -> None:
    bounds, roles, (asked, given, fits) = BEYOND[name]
    message = deadlock(kernel(bounds, *roles), 128 * len(roles))
    assert f"{asked} are asked for" in message
    assert f"{given} were given to the CTA at launch" in message
    assert re.search(rf"; {fits} for these \d+ warps would fit", message), message
    count = max(int(role[1:]) for role in roles)
    check_runs(kernel(bounds, *(r.replace(f"+{count}", f"+{fits}") for r in roles)), 128 * len(roles))


def test_where_no_count_fits_it_says_so() -> None:
    """Each of two warpgroups asks for more than the whole CTA has."""
    assert "no count for these warps would fit" in deadlock(kernel(".maxnreg 96", "+240", "+248"), 256)


def test_a_launch_of_fewer_threads_than_the_bounds_has_fewer_registers() -> None:
    """The bounds of 512 threads give 128 a thread; 256 threads have half of the SM's registers."""
    bounds = ".maxntid 512 .minnctapersm 1"
    check_runs(kernel(bounds, "-24", "+232"), 256)
    assert "32768 were given" in deadlock(kernel(bounds, "-24", "+240"), 256)


def test_registers_of_warps_that_have_ended_stay_theirs() -> None:
    assert "deadlock" in kinds(run(kernel(BOUNDS_384, "ret;", "+232", "+232"), 384)[0])


# --- order -------------------------------------------------------------------------------------------------

SET = "st.volatile.global.u32 [%w], 7;"
READ = "ld.volatile.global.u32 %v, [%w];"


def words_read(consumer: str, producer: str) -> set[int]:
    """What the second of two warpgroups reads after its setmaxnreg of the word that the first sets before its own."""
    found: set[int] = set()
    for seed in range(12):
        text = kernel(
            ".maxntid 256 .minnctapersm 1 .maxnreg 128",
            f"{SET} setmaxnreg.{producer};",
            f"setmaxnreg.{consumer}; {READ}",
        )
        result, out = run(text, 256, seed)
        result.raise_on_reports()
        found |= set(out[128:].tolist())
    return found


def test_an_increase_waits_for_another_warps_decrease() -> None:
    assert words_read("inc.sync.aligned.u32 200", "dec.sync.aligned.u32 56") == {7}


def test_an_increase_by_nothing_waits_for_nobody() -> None:
    """So the test above sees the wait, and not the order in which warps happen to run."""
    assert 0 in words_read("inc.sync.aligned.u32 128", "dec.sync.aligned.u32 56")


def test_registers_come_back_and_go_again() -> None:
    """The second warpgroup can have 200 only once the first has given back the 200 that it had meanwhile."""
    first = (
        "setmaxnreg.inc.sync.aligned.u32 200; bar.arrive 1, 256; "
        f"{SET} bar.sync 2, 128; setmaxnreg.dec.sync.aligned.u32 56;"
    )
    second = f"setmaxnreg.dec.sync.aligned.u32 56; bar.sync 1, 256; setmaxnreg.inc.sync.aligned.u32 200; {READ}"
    for seed in SEEDS:
        result, out = run(kernel(".maxnreg 128", first, second), 256, seed)
        result.raise_on_reports()
        assert (out[128:] == 7).all()


# --- misuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "role",
    ["setmaxnreg.dec.sync.aligned.u32 176;", "setmaxnreg.inc.sync.aligned.u32 160;"],
    ids=["a decrease to more", "an increase to less"],
)
def test_the_wrong_direction_is_reported(role: str) -> None:
    result, _ = run(kernel(BOUNDS_384, "-40", "+168", role), 384)
    assert kinds(result) == {"registers"}
    assert "holds 168 registers a thread" in result.reports[0].message


@pytest.mark.parametrize("bounds", ["", ".maxntid 384", ".reqntid 384", ".minnctapersm 1"])
def test_without_a_known_count_at_launch_it_does_nothing(bounds: str) -> None:
    """As with ptxas, which drops it (C7508)."""
    check_runs(kernel(bounds, "+248", "+248", "+248"), 384)


# --- against ptxas -----------------------------------------------------------------------------------------

BOUNDS = [
    "", ".maxntid 384", ".minnctapersm 1", ".maxnreg 96", ".maxnreg 20", ".maxnreg 255", ".maxntid 384 .maxnreg 200",
    ".maxntid 384 .minnctapersm 1 .maxnreg 96", ".maxntid 640 .minnctapersm 1 .maxnreg 200",
    ".reqntid 16, 8, 3 .minnctapersm 1", ".maxntid 384 .minnctapersm 2", ".maxntid 384 .minnctapersm 3",
    ".maxntid 160 .minnctapersm 2", ".maxntid 96 .minnctapersm 3", ".maxntid 64 .minnctapersm 5",
    ".maxntid 256 .minnctapersm 8", ".maxntid 256 .minnctapersm 9", ".maxntid 128 .minnctapersm 17",
    *(f".maxntid {n} .minnctapersm 1" for n in (128, 256, 288, 300, 384, 400, 512, 544, 640, 768, 896, 1024)),
]  # fmt: skip
ROLES = [("-24", "+248"), ("-24", "+64"), ("-40", "+160", "+200"), ("-40", "-80")]


def ptxas(text: str, target: str, folder: Path) -> int | None:
    """Registers a thread at launch as the assembler of the triton package reports; None if it drops setmaxnreg."""
    triton = pytest.importorskip("triton")
    tools = triton.knobs.nvidia
    tool = (tools.ptxas if target == "sm_90a" else getattr(tools, "ptxas_blackwell", tools.ptxas)).path
    (folder / "k.ptx").write_text(text)
    done = subprocess.run(
        [tool, "-v", f"-arch={target}", "k.ptx", "-o", os.devnull], cwd=folder, capture_output=True, text=True
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    return None if "C7508" in log else int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_registers_at_launch_are_those_of_ptxas(target: str, tmp_path: Path) -> None:
    wrong, seen = {}, set()
    cases = [(bounds, ROLES[0]) for bounds in BOUNDS]
    cases += [
        (b, roles) for b in (".reqntid 256 .maxnreg 256", ".maxnreg 255") for roles in (*ROLES[1:], ("-240", "+256"))
    ]
    cases += [(bounds, roles) for bounds in (BOUNDS_384, BOUNDS_640, ".maxnreg 168") for roles in ROLES[1:]]
    for bounds, roles in cases:
        text = kernel(bounds, *roles, target=target)
        function = parse(text).functions["k"]
        instructions = [s for s in function.body if hasattr(s, "opcode")]
        found, expected = registers_at_launch(function, instructions), ptxas(text, target, tmp_path)
        seen.add(expected)
        if expected is not None:
            expected = -(-expected // GRANULE) * GRANULE  # 255 are allocated as 256
        if found != expected:
            wrong[bounds, roles] = (found, expected)
    assert not wrong
    assert len(seen) >= 10
