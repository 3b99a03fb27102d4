"""The page of the grouped Blackwell kernel shows what the code has, and what it shows holds together."""

from __future__ import annotations

import re

import pytest

from kernel_map import SHARED_LIMIT
from kernel_map_grouped import DRAWN, LISTED, barrier_graph, byte_budget, kernel_map_markdown, regions
from padless.kernels.sm100_grouped.host import KERNEL
from padless.runtime.jit import compile_kernel
from support.ragged import ROOT

FOLDER = ROOT / "docs" / "kernels" / "sm100_grouped"
ATOMS = {"MXFP8": 1, "NVFP4": 4, "MXFP4": 2}  # of scales along K in a stage


def test_the_page_shows_the_code() -> None:
    (drawn,) = re.findall(r"<!-- map:begin -->\n(.*?)<!-- map:end -->", (FOLDER / "map.md").read_text(), re.DOTALL)
    assert drawn.strip() == kernel_map_markdown().strip(), "run python tools/kernel_map_grouped.py"


def test_the_page_says_what_is_known_of_speed() -> None:
    assert "**Verified by emulation. Its speed has never been measured**" in (FOLDER / "index.md").read_text()


@pytest.mark.parametrize("name", LISTED)
def test_tensor_memory_holds_together(name: str) -> None:
    config = LISTED[name]
    spans = {what: (first, end) for what, first, end in regions(config)}
    n, right_atoms = config.mma_n, -(-config.mma_n // 128)
    assert [end - first for first, end in (spans["first sums"], spans["second sums"])] == [n, n]
    left, right = spans["scales, left"], spans["scales, right"]
    assert spans["second sums"][1] == left[0]
    assert left[1] == right[0]
    assert right[1] <= 512
    assert (left[1] - left[0], right[1] - right[0]) == (4 * ATOMS[config.kind], 4 * ATOMS[config.kind] * right_atoms)
    wanted = 2 * n + 4 * ATOMS[config.kind] * (1 + right_atoms)
    assert ("common" in spans) == (wanted > 512)


@pytest.mark.parametrize("name", DRAWN)
def test_the_budget_adds_up(name: str) -> None:
    config = LISTED[name]
    budget = byte_budget(config)
    kernel = compile_kernel(KERNEL, config.prelude(), "sm_100a")
    assert sum(size for _, size in budget) == kernel.shared_bytes <= SHARED_LIMIT
    left, right = 128 * 128, config.right_rows * 128
    scales = 512 * ATOMS[config.kind]
    stage = (left, right, scales, scales * -(-config.mma_n // 128))
    assert [size for _, size in budget[:4]] == [kernel.num_stages * size for size in stage]
    assert 0 < budget[4][1] <= 8192, "what is not accounted for"


@pytest.mark.parametrize("name", DRAWN)
def test_the_graph_counts_who_arrives(name: str) -> None:
    """Roles: 4 store warps, 2 loading threads, 4 gathering warps or none, and 1 that multiplies for both of a pair."""
    config = LISTED[name]
    graph = barrier_graph(config)
    gatherers = 0 if {config.scales_a, config.scales_b} == {"tiled"} else 4
    readers = config.cluster * (4 + 2 + gatherers) + config.multicast
    copied = 128 * 128 + config.right_rows * 128
    copied += 512 * ATOMS[config.kind] if config.scales_a == "tiled" and not config.tokens_on_n else 0
    copied += 512 * ATOMS[config.kind] if config.scales_b == "tiled" and config.tokens_on_n else 0
    if config.scales_b == "tiled" and not config.tokens_on_n:
        copied += 512 * ATOMS[config.kind] * (config.mma_n // 128)
    arrivals = 2 + (config.cta_group if gatherers else 0)
    assert f": {readers} arrivals" in graph[1]
    assert f": {arrivals} arrivals and {config.cta_group * copied} bytes" in graph[2]
    assert f": {config.multicast} commit" in graph[3]
    assert f": {4 * config.cta_group} arrivals" in graph[5]
