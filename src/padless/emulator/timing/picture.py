"""A timed run as a picture: when every server of one multiprocessor was busy, and what its warps waited for."""

from __future__ import annotations

from pathlib import Path

from padless.emulator.timing.timeline import Timeline

COLORS = {
    "copies": "#d08770", "products": "#5e81ac", "arrivals of warps": "#a3be8c", "named barrier": "#b48ead",
    "tensor memory": "#ebcb8b", "values": "#bf616a",
}  # fmt: skip


def draw(timeline: Timeline, path: Path, sm: int = 0) -> None:
    """Draw one multiprocessor's servers and warps to a file. Needs matplotlib (ModuleNotFoundError without it)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    servers = [server for server in timeline.sms[sm].servers() if server.spans]
    warps = sorted(warp for place, warp in timeline.ended if place == sm)
    names = [server.name for server in servers] + [f"warp {w}: {timeline.role((sm, w))}" for w in warps]
    figure, axes = plt.subplots(figsize=(12, 0.28 * len(names) + 1))
    for row, server in enumerate(servers):
        axes.broken_barh([(a, b - a) for a, b, _ in server.spans], (row - 0.4, 0.8), facecolors="#4c566a")
    for row, warp in enumerate(warps, len(servers)):
        waits = [w for w in timeline.waits if w.warp == (sm, warp)]
        axes.broken_barh(
            [(w.start, w.end - w.start) for w in waits],
            (row - 0.4, 0.8),
            facecolors=[COLORS.get(w.what, "#d8dee9") for w in waits],
        )
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.cycles)
    axes.set_xlabel(f"cycles of {timeline.chip.name}; grey: busy, colours: a warp waits")
    for what, color in COLORS.items():
        axes.plot([], [], color=color, linewidth=6, label=f"waits for {what}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=len(COLORS), fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
