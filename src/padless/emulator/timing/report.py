"""A timed run in words: cycles by phase and role, what each server was used, what sets the pace."""

from __future__ import annotations

from padless.emulator.timing.rates import Chip
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
    return [*out, "", *caveats(chip)]


def caveats(chip: Chip) -> list[str]:
    """What the cycles leave out, and how well the chip's rates are known."""
    unmeasured = sum(rate.mark not in ("measured", "fitted") for rate in chip.rates.values())
    return [
        f"caveats: {unmeasured} of {len(chip.rates)} rates of the {chip.name} are inferred, stated or of another chip",
        "operands are taken to be in L2; the queue of tiles, memory and the clock under load belong to a whole call",
        "left out: instruction caches, L1, bank conflicts, ptxas' order and spills; known errors: docs/timing.md",
    ]
