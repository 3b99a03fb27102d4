"""Every text that a planted bug replaces is in its file: most bugs are slow tests, which tell of a lost anchor late."""

from __future__ import annotations

from importlib import import_module

import pytest

from padless.runtime import jit
from support.emulator_variants import replace_nth
from support.planted_bugs import Bug

HOMES = [
    "bf16_plain_bugs",
    "bf16_wgrad_bugs",
    "emulator_bugs",
    "emulator_bugs_bf16",
    "emulator_bugs_shared",
    "emulator_bugs_sm100",
    "fp4_dgrad_bugs",
    "fp8_few_bugs",
    "moe_decode_bugs",
    "moe_decode_fp4_bugs",
    "moe_decode_logits_bugs",
    "mxfp8_wgrad_bugs",
    "nvfp4_wgrad_bugs",
    "sm100_grouped_bugs",
    "sm100_quant_cases",
    "token_tile_bugs",
    "wgrad_bugs",
]


@pytest.mark.parametrize("home", HOMES)
def test_every_anchor_is_there(home: str) -> None:
    bugs = import_module(f"support.{home}").BUGS
    if isinstance(bugs, dict):
        bugs = [Bug(name, "", bug[:3]) for name, bug in bugs.items()]
    edits = [(*edit, bug.nth) for bug in bugs for edit in bug.edits]
    assert len(edits) >= len(bugs) > 0
    for file, old, new, nth in edits:
        replace_nth(jit.sources()[file], old, new, nth, file)


def test_a_lost_anchor_is_seen() -> None:
    file = next(iter(jit.sources()))
    with pytest.raises(AssertionError, match="needs a new anchor"):
        replace_nth(jit.sources()[file], "no such text anywhere", "", 0, file)
