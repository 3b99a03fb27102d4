"""What a slower run of the same work does otherwise than a faster one."""

from __future__ import annotations

from dataclasses import dataclass

from padless.emulator.timing.timeline import Timeline

STAGE = ("arrivals of warps", "first arrivals", "products")  # what a load waits for before it may take a stage


@dataclass(frozen=True)
class Finding:
    """A cause and a sentence with its numbers."""

    cause: str
    text: str


def compare(before: Timeline, after: Timeline) -> list[Finding]:
    """Why ``after`` takes longer than ``before``, the surest cause first; nothing if it does not.

    The causes: "loads" (more bytes a product), "products" (more of them), "release" (stages are given back later after
    their products), "ring" (loads wait longer for a stage, or less is on its way at once, and products wait longer for
    copies), else the server whose use grew most.
    """
    if after.cycles <= 1.005 * before.cycles:
        return []
    found = []
    per_product = [t.loaded / max(t.product_cycles, 1) for t in (before, after)]
    if per_product[1] > 1.1 * per_product[0]:
        ratio = per_product[1] / per_product[0]
        found.append(Finding("loads", f"operands are loaded {ratio:.2f} times as often as before"))
    if after.product_cycles > 1.02 * before.product_cycles:
        ratio = after.product_cycles / before.product_cycles
        found.append(Finding("products", f"the tensor pipe does {ratio:.2f} times as much"))
    if after.hold > before.hold + 30:
        found.append(
            Finding(
                "release", f"stages are released {after.hold:.0f} cycles after their products, before {before.hold:.0f}"
            )
        )
    waits = [t.waited().get("multiply", {}).get("copies", 0.0) / t.cycles for t in (before, after)]
    stages = [sum(t.waited().get("load", {}).get(what, 0.0) for what in STAGE) / t.cycles for t in (before, after)]
    fewer = after.most_in_flight < 0.9 * before.most_in_flight or stages[1] > stages[0] + 0.03
    if fewer and waits[1] > waits[0]:
        found.append(
            Finding(
                "ring",
                f"at most {after.most_in_flight:,.0f} bytes are on their way, before {before.most_in_flight:,.0f}; "
                f"loads wait for a stage {stages[1]:.0%} of the time, before {stages[0]:.0%}, and "
                f"products wait for copies {waits[1]:.0%} of the time, before {waits[0]:.0%}",
            )
        )
    if not found:
        used = [t.utilization() for t in (before, after)]
        name = max(used[1], key=lambda n: used[1][n] - used[0].get(n, 0.0))
        found.append(Finding(name, f"{name} is in use {used[1][name]:.0%}, before {used[0].get(name, 0.0):.0%}"))
    return found
