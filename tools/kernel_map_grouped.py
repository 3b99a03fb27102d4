"""Draws barriers and tensor memory of the grouped Blackwell kernel and counts its bytes, from its compiled constants.

``python tools/kernel_map_grouped.py`` prints what stands in docs/kernels/sm100_grouped/map.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernel_map import SHARED_LIMIT, constants, drawn_columns, drawn_graph
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import KERNEL
from padless.runtime.jit import compile_kernel

_C = Sm100GroupedConfig
# What operands with copied scales and an output on 32-byte boundaries are compiled for.
_TILED = _C(scales_a="tiled", scales_b="tiled", groups_on_tiles=True, wide_stores=True)


# The kernels of the tables.
LISTED = {
    "128 x 128, MXFP8, tiled": _TILED,
    "128 x 128, MXFP8, gathered": _C(),
    "128 x 256, NVFP4, tiled": replace(_TILED, mma_n=256, kind="NVFP4"),
    "pair 256 x 128, NVFP4, tiled": replace(_TILED, cta_group=2, kind="NVFP4"),
    "pair 256 x 256, MXFP8, tiled": replace(_TILED, cta_group=2, mma_n=256),
    "pair 256 x 256, MXFP4, tiled": replace(_TILED, cta_group=2, mma_n=256, kind="MXFP4"),
    "pair 256 x 256, NVFP4, tiled": replace(_TILED, cta_group=2, mma_n=256, kind="NVFP4"),
    "pair 256 x 256, NVFP4, gathered": _C(cta_group=2, mma_n=256, kind="NVFP4", scales_b="tiled", wide_stores=True),
    "two pairs 256 x 256, MXFP8, tiled": replace(_TILED, cta_group=2, mma_n=256, multicast=2),
    "two pairs 256 x 256, NVFP4, tiled": replace(_TILED, cta_group=2, mma_n=256, multicast=2, kind="NVFP4"),
    "pair, 32 tokens, NVFP4": _C(cta_group=2, mma_n=32, tokens_on_n=True, kind="NVFP4", scales_b="tiled"),
    "pair, 64 tokens, NVFP4": _C(cta_group=2, mma_n=64, tokens_on_n=True, kind="NVFP4", scales_b="tiled"),
    "pair, 128 tokens, NVFP4": replace(_TILED, cta_group=2, tokens_on_n=True, kind="NVFP4"),
}
_PAIRS = replace(_TILED, cta_group=2, mma_n=256, multicast=2)
_EVERYTHING = Epilogue(alpha=True, bias=True, prob=True, amax=True, d_dtype=torch.bfloat16)
_BOTH = replace(_EVERYTHING, row_format=MXFP8, column_format=MXFP8, scale_rule="rceil")
# Quantising ones.
QUANTIZING = {
    "MXFP8 rows": Epilogue(row_format=MXFP8, scale_rule="rceil"),
    "MXFP8 rows and columns, everything": _BOTH,
    "NVFP4 rows of a SwiGLU in halves": Epilogue(row_format=NVFP4, scale_rule="te", activation="swiglu"),
    "FP8_BLOCK rows and columns of an interleaved SwiGLU, everything": replace(
        _BOTH, row_format=FP8_BLOCK, column_format=FP8_BLOCK, scale_rule="", activation="swiglu", gate_up="interleaved"
    ),
}
# Those that are drawn: large groups, small ones, and scales that have to be gathered.
DRAWN = (
    "two pairs 256 x 256, MXFP8, tiled",
    "pair 256 x 256, NVFP4, gathered",
    "pair, 32 tokens, NVFP4",
    "128 x 128, MXFP8, tiled",
)


def tables() -> list[str]:
    """Stages, bytes, threads, registers and columns of tensor memory of every kernel listed."""
    budgets = [
        "| kernel | stages | bytes a stage | shared memory | left of 227 KiB | threads | registers |",
        "|---|---|---|---|---|---|---|",
    ]
    columns = [
        "| kernel | first sums | second sums | scales, left | scales, right | allocated |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in LISTED.items():
        kernel, c = compile_kernel(KERNEL, config.prelude(), "sm_100a"), constants(config, KERNEL)
        budgets.append(
            f"| {name} | {kernel.num_stages} | {c['stage_bytes']:,} | {kernel.shared_bytes:,} "
            f"| {SHARED_LIMIT - kernel.shared_bytes:,} | {kernel.num_threads} | {kernel.registers} |"
        )
        spans = [f"{first}-{end - 1}" for what, first, end in regions(config) if what != "common"]
        columns.append(f"| {name} | {' | '.join(spans)} | {c['tmem_columns']} |")
    quantizing = [
        "| two pairs 256 x 256, MXFP8, tiled; output | stages | shared memory | threads |",
        "|---|---|---|---|",
    ]
    for name, epilogue in QUANTIZING.items():
        kernel = compile_kernel(KERNEL, QuantConfig(_PAIRS, epilogue).prelude(), "sm_100a")
        quantizing.append(f"| {name} | {kernel.num_stages} | {kernel.shared_bytes:,} | {kernel.num_threads} |")
    return [*budgets, "", *columns, "", *quantizing]


def regions(config: Sm100GroupedConfig) -> list[tuple[str, int, int]]:
    """(what, first column, end) of tensor memory."""
    c, n = constants(config, KERNEL), config.mma_n
    second, left, right = c["second_accumulator"], c["left_scales_at"], c["right_scales_at"]
    common = [("common", second, n)] if second < n else []
    return [
        ("first sums", 0, n),
        ("second sums", second, second + n),
        *common,
        ("scales, left", left, right),
        ("scales, right", right, c["tmem_used"]),
    ]


def barrier_graph(config: Sm100GroupedConfig) -> list[str]:
    """Barriers: arrivals, the end of a phase, the place in memory, and waits."""
    c = constants(config, KERNEL)
    producers = "load A, load B" + (", gather" if {config.scales_a, config.scales_b} != {"tiled"} else "")
    pair = config.cta_group == 2
    even, both = ("even CTA", "both CTAs of the pair") if pair else ("own CTA", "own CTA")
    everywhere = "own CTA" if config.cluster == 1 else f"all {config.cluster} CTAs"
    stages, slots = c["num_stages"], c["queue_slots"]
    first = "own CTA" if config.cluster == 1 else "first CTA"
    full = f"{_arrivals(c['full_arrivals'])} and {c['full_bytes']} bytes"
    rows = [
        ("hand out tiles", f"queue.full x {slots}: 1 arrival", everywhere, "all roles"),
        ("all roles", f"queue.empty x {slots}: {_arrivals(c['queue_arrivals'])}", first, "hand out tiles"),
        (producers, f"full x {stages}: {full}", even, "multiply"),
        ("multiply", f"empty x {stages}: {_arrivals(c['empty_arrivals'], 'commit')}", everywhere, producers),
        ("multiply", "done x 2: 1 commit", both, "store"),
        (
            "store", f"drained x {1 if c['tmem_shared'] else 2}: {_arrivals(c['drained_arrivals'])}", even,
            "multiply",
        ),
    ]  # fmt: skip
    return drawn_graph(rows)


def _arrivals(count: int, what: str = "arrival") -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def byte_budget(config: Sm100GroupedConfig) -> list[tuple[str, int]]:
    """(what, bytes) of a CTA's shared memory; the sum is what a launch asks for."""
    c = constants(config, KERNEL)
    stages = c["num_stages"]
    names = (("left", "left operand"), ("right", "right operand"), ("left_scale", "left scales"),
             ("right_scale", "right scales"))  # fmt: skip
    rows = [(f"{what}, {stages} stages of {c[f'{name}_bytes']}", stages * c[f"{name}_bytes"]) for name, what in names]
    rest = c["shared_bytes"] - sum(size for _, size in rows)
    return [*rows, ("barriers, queue of tiles, table of groups", rest)]


def kernel_map_markdown() -> str:
    """The part of the page that is drawn."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from tables()
    for name in DRAWN:
        config = LISTED[name]
        yield from ["", f"### {name}", "", "```", *barrier_graph(config), "```", ""]
        yield from ["```", *drawn_columns(regions(config), constants(config, KERNEL)["tmem_used"]), "```", ""]
        yield from ["| shared memory | bytes |", "|---|---|"]
        budget = byte_budget(config)
        yield from (f"| {what} | {size} |" for what, size in budget)
        yield f"| all, of {SHARED_LIMIT} | {sum(size for _, size in budget)} |"


if __name__ == "__main__":
    print(kernel_map_markdown())
