"""A timed run in words: cycles by phase and role, what each server was used, what sets the pace."""

from __future__ import annotations

from padless.emulator.state.program import Program
from padless.emulator.timing.kernel import live_registers
from padless.emulator.timing.timeline import ROLES, Timeline


def phases(timeline: Timeline) -> list[tuple[str, float]]:
    """(name, cycles): until the first load, from there to the first product, products, and after the last; one phase
    where there is no product."""
    if "product" not in timeline.marks:
        return [("all of it, without a product", timeline.cycles)]
    first_load = timeline.marks.get("load", (0.0, 0.0))[0]
    low, high = timeline.window()
    first_load = min(first_load, low)
    return [
        ("before the first load", first_load),
        ("first load to first product", low - first_load),
        ("products", high - low),
        ("after the last product", timeline.cycles - high),
    ]


def lines_of(timeline: Timeline) -> list[str]:
    """The report, a line each, in a fixed order: the same run gives the same text."""
    chip = timeline.chip
    low_ghz, high_ghz = chip.clocks_ghz
    microseconds = [timeline.cycles / ghz / 1e3 for ghz in (high_ghz, low_ghz)]
    out = [
        f"{chip.name}: {timeline.cycles:,.0f} cycles, {microseconds[0]:.2f} to {microseconds[1]:.2f} us at "
        f"{high_ghz:g} to {low_ghz:g} GHz, on {len(timeline.sms)} multiprocessors",
        f"binding{' between the first product and the last' * ('product' in timeline.marks)}: {timeline.binding()}",
        "",
        f"{'phase':32s}{'cycles':>12s}",
    ]
    out += [f"{name:32s}{cycles:12,.0f}" for name, cycles in phases(timeline)]
    out += ["", f"{'server':32s}{'in use':>12s}"]
    used = timeline.utilization()
    out += [f"{name:32s}{share:12.1%}" for name, share in sorted(used.items(), key=lambda x: -x[1]) if share]
    waited = timeline.waited()
    out += ["", f"{'a warp of this role waits for':32s}{'cycles':>12s}{'of all':>9s}"]
    for role in ROLES:
        for what, cycles in sorted(waited.get(role, {}).items(), key=lambda x: -x[1]):
            if cycles >= 0.005 * timeline.cycles:
                out.append(f"{role + ': ' + what:32s}{cycles:12,.0f}{cycles / max(timeline.cycles, 1):9.1%}")
    return [*out, "", *caveats(timeline)]


def caveats(timeline: Timeline) -> list[str]:
    """How well the rates that this run took are known, and what of this kernel its cycles leave out."""
    asked = timeline.chip.asked()
    unknown = [name for name, rate in asked.items() if rate.mark not in ("measured", "fitted")]
    named = f": {', '.join(sorted(unknown))}" if unknown else ""
    return [
        f"caveats: {len(unknown)} of {len(asked)} rates of the {timeline.chip.name} that this kernel takes are "
        f"inferred, stated or of another chip{named}",
        "operands are taken to be in L2; the queue of tiles, memory and the clock under load belong to a whole call",
        f"left out: {'; '.join(left_out(timeline.program))}; known errors: docs/timing.md",
    ]


SPILLS = 250  # registers a thread
LONG_CODE = 8192  # instructions of PTX, more bytes of machine code than caches next to the SM keep


def left_out(program: Program) -> list[str]:
    """What this kernel does whose time is not charged."""
    found = ["ptxas' order"]
    plain = [i for i in program.instructions if i.opcode in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix")]
    if shared := sum(i.opcode.endswith("matrix") or any(m.startswith("shared") for m in i.modifiers) for i in plain):
        found.append(f"bank conflicts of {shared} accesses to shared memory")
    if loads := sum(i.opcode == "ld" and "global" in i.modifiers for i in plain):
        found.append(f"L1, and lanes that are no neighbours, of {loads} global loads")
    if any(i.opcode in ("atom", "red") for i in plain):
        found.append("atomics that meet at one address")
    if any(m.partition("::")[0] == "local" for i in plain for m in i.modifiers):
        found.append("local memory")
    if (live := live_registers(program)) > SPILLS:
        found.append(f"spills, {live} registers are live at once")
    if len(program.instructions) > LONG_CODE:
        found.append(f"instruction caches, of {len(program.instructions):,} instructions")
    return found
