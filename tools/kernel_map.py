"""Draws barriers and tensor memory of the dense MXFP8 kernel and counts its bytes, from its compiled constants.

``python tools/kernel_map.py`` prints what stands in docs/kernels/sm100_dense/map.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from padless.kernels.launch import KernelConfig
from padless.kernels.sm100_dense.config import DenseProblem, Sm100DenseConfig, select_config
from padless.kernels.sm100_dense.host import KERNEL
from padless.runtime.jit import compile_kernel

SHARED_LIMIT = 227 * 1024
TMEM_COLUMNS = 512
_CELL = 8  # columns to a character


def constants(config: KernelConfig, kernel: str = KERNEL) -> dict[str, int]:
    """Every ``padless_<name>`` of the compiled kernel."""
    text = compile_kernel(kernel, config.prelude(), "sm_100a", "ptx").image.decode()
    found = re.findall(r"\bpadless_(\w+)(?:\s*=\s*(\d+))?;", text)  # a zero is not written
    return {name: int(value or 0) for name, value in found}


def tensor_memory_map(config: Sm100DenseConfig) -> list[str]:
    """One line for each use of the 512 columns, drawn to scale."""
    c, n = constants(config), config.block_n
    regions = [
        ("accumulator 0", 0, n),
        ("accumulator 1", c["accumulator_1"], c["accumulator_1"] + n),
        ("scales of A", c["sfa_column"], c["sfb_column"]),
        ("scales of B", c["sfb_column"], c["used_columns"]),
    ]
    if c["accumulator_1"] < n:
        regions.insert(2, ("common", c["accumulator_1"], n))
    return drawn_columns(regions, c["used_columns"])


def drawn_columns(regions: Sequence[tuple[str, int, int]], used: int) -> list[str]:
    """One line for each (what, first column, end)."""
    lines = [f"{'columns':<24}0{'':{TMEM_COLUMNS // _CELL - 4}}512"]
    for name, first, end in regions:
        bar = " " * (first // _CELL) + "#" * max(-(-end // _CELL) - first // _CELL, 1)
        lines.append(f"{name:<14}{first:>3}-{end - 1:<5} {bar:<{TMEM_COLUMNS // _CELL}}")
    free = TMEM_COLUMNS - used
    return [line.rstrip() for line in lines] + [f"{free} of {TMEM_COLUMNS} columns are not used"]


def byte_budget(config: Sm100DenseConfig) -> list[tuple[str, int]]:
    """(what, bytes) of a CTA's shared memory; the sum is what a launch asks for."""
    c = constants(config)
    stages = c["num_stages"]
    rows = [
        (f"A, {stages} stages of {c['a_bytes']}", stages * c["a_bytes"]),
        (f"B, {stages} stages of {c['b_bytes']}", stages * c["b_bytes"]),
        (f"scales of A, {stages} stages of {c['sfa_bytes']}", stages * c["sfa_bytes"]),
        (f"scales of B, {stages} stages of {c['sfb_bytes']}", stages * c["sfb_bytes"]),
        ("staging of the store", c["staging_bytes"]),
    ]
    return [*rows, ("barriers and alignment", c["shared_bytes"] - sum(size for _, size in rows))]


def barriers(config: Sm100DenseConfig) -> list[tuple[str, int, str]]:
    """(barrier, how many, what ends a phase)."""
    c = constants(config)
    ctas = config.cta_group
    stage = ctas * sum(c[f"{name}_bytes"] for name in ("a", "b", "sfa", "sfb"))
    who = "the CTA" if ctas == 1 else "both CTAs"
    rows = [
        ("full", c["num_stages"], f"1 arrival and the bytes of {who}, {stage} of a whole stage"),
        ("empty", c["num_stages"], "1 commit"),
        ("accumulator_full", 2 * c["halves"], "1 commit"),
        ("free", 2, f"{c['free_arrivals']} arrivals, one from each store warp of {who}"),
        ("common_free", c["halves"] - 1, f"{c['free_arrivals']} arrivals, one from each store warp of {who}"),
    ]
    return [row for row in rows if row[1] > 0]


def barrier_graph(config: Sm100DenseConfig) -> list[str]:
    """Barriers: arrivals, the end of a phase, the place in memory, and waits."""
    even, both = ("own CTA", "own CTA") if config.cta_group == 1 else ("even CTA", "both CTAs")
    ends = {
        "full": ("load_tiles", even, "issue_mma"),
        "empty": ("issue_mma", both, "load_tiles"),
        "accumulator_full": ("issue_mma", both, "store_tiles"),
        "free": ("store_tiles", even, "issue_mma"),
        "common_free": ("store_tiles", even, "issue_mma"),
    }
    rows = []
    for name, number, what in barriers(config):
        source, at, sink = ends[name]
        rows.append((source, f"{name} x {number}: {what.split(',')[0]}", at, sink))
    return drawn_graph(rows)


def drawn_graph(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """A line for each barrier: (who arrives, what on, where it is, who waits)."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{a:>{widths[0]}} ──[ {b:<{widths[1]}} │ {at:<{widths[2]}} ]──▶ {z}".rstrip() for a, b, at, z in rows]


def shown() -> dict[str, Sm100DenseConfig]:
    """The configurations of the page: what select_config takes for three problems."""
    return {
        "8192 x 8192 x 8192": select_config(DenseProblem(8192, 8192, 8192)),
        "4096 x 4096 x 4096": select_config(DenseProblem(4096, 4096, 4096)),
        "128 rows": select_config(DenseProblem(128, 4096, 4096)),
    }


def kernel_map_markdown() -> str:
    """The part of the page that is drawn."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, config in shown().items():
        rows, columns = config.tile
        who = "one CTA" if config.cta_group == 1 else "a pair of CTAs"
        yield f"### {title}: {rows} x {columns} by {who}, {config.store} store, {config.tile_order} order"
        yield from ["", "```", *barrier_graph(config), "```", ""]
        yield from ["```", *tensor_memory_map(config), "```", ""]
        yield from ["| barrier | number | a phase ends with |", "|---|---|---|"]
        yield from (f"| `{name}` | {number} | {what} |" for name, number, what in barriers(config))
        yield from ["", "| shared memory | bytes |", "|---|---|"]
        budget = byte_budget(config)
        yield from (f"| {what} | {size} |" for what, size in budget)
        yield f"| all, of {SHARED_LIMIT} | {sum(size for _, size in budget)} |"
        yield ""


if __name__ == "__main__":
    print(kernel_map_markdown())
