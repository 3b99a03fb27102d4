"""The page of the dense MXFP8 kernel shows what the code has, and what it shows holds together."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from kernel_map import SHARED_LIMIT, barriers, byte_budget, constants, kernel_map_markdown, tensor_memory_map
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_dense.host import KERNEL
from padless.runtime.jit import compile_kernel
from support.ragged import ROOT

FOLDER = ROOT / "docs" / "kernels" / "sm100_dense"
PAIR = Sm100DenseConfig()
CONFIGS = [
    PAIR,
    dataclasses.replace(PAIR, chunk_columns=32, store="staged"),
    dataclasses.replace(PAIR, chunk_columns=128, block_k=128, store="staged", store_bytes=128),
    dataclasses.replace(PAIR, cta_group=1, block_n=128),
]


def test_the_page_shows_the_code() -> None:
    (drawn,) = re.findall(r"<!-- map:begin -->\n(.*?)<!-- map:end -->", (FOLDER / "map.md").read_text(), re.DOTALL)
    assert drawn.strip() == kernel_map_markdown().strip(), "run python tools/kernel_map.py"


def test_the_page_says_what_is_known_of_speed() -> None:
    assert "Verified by emulation; its speed has never been measured." in (FOLDER / "index.md").read_text()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile}-{c.chunk_columns}")
def test_tensor_memory_holds_together(config: Sm100DenseConfig) -> None:
    """Two accumulators and the scales of a stage, overlapping by one chunk or not at all."""
    c = constants(config)
    slabs = 2  # of 128 of K, in one stage or in two
    common = config.block_n - c["accumulator_1"]
    assert common in (0, config.chunk_columns)
    assert c["sfa_column"] == c["accumulator_1"] + config.block_n
    assert c["sfb_column"] - c["sfa_column"] == 4 * slabs
    assert c["used_columns"] - c["sfb_column"] == 4 * slabs * config.block_n // 128
    assert c["used_columns"] <= 512
    assert (common == 0) == (2 * config.block_n + 4 * slabs * (1 + config.block_n // 128) <= 512)
    assert ("common" in "\n".join(tensor_memory_map(config))) == (common != 0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile}-{c.chunk_columns}")
def test_the_budget_adds_up(config: Sm100DenseConfig) -> None:
    budget = byte_budget(config)
    kernel = compile_kernel(KERNEL, config.prelude(), "sm_100a")
    assert sum(size for _, size in budget) == kernel.shared_bytes <= SHARED_LIMIT
    assert 0 < budget[-1][1] <= 2048, "what is not accounted for"
    staging = config.store_bytes * 32 * 2 * 4 if config.store == "staged" else 0
    assert dict(budget)["staging of the store"] == staging
    stage = config.cta_group * sum(size for _, size in budget[:4]) // kernel.num_stages
    assert str(stage) in barriers(config)[0][2]


def test_the_map_is_to_scale() -> None:
    rows = [line for line in tensor_memory_map(PAIR) if "#" in line]
    at = [(line.index("#") - 24, line.rindex("#") - 23) for line in rows]
    assert at[:2] == [(0, 32), (24, 56)]
    assert at[2] == (24, 32)
    assert all(first < end <= 64 for first, end in at)
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(at[3:]))
