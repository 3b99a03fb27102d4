"""Every text that a planted bug replaces is in its file: most bugs are slow tests, which tell of a lost anchor late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from padless.runtime import jit
from support.emulator_variants import replace_nth

HOMES = {
    "bf16_plain_bugs": ("BUGS",),
    "bf16_wgrad_bugs": ("BUGS",),
    "emulator_bugs": ("BUGS",),
    "emulator_bugs_bf16": ("BUGS",),
    "emulator_bugs_shared": ("BUGS",),
    "emulator_bugs_sm100": ("DENSE_BUGS",),
    "fp8_few_bugs": ("BUGS",),
    "mxfp8_wgrad_bugs": ("BUGS",),
    "nvfp4_wgrad_bugs": ("BUGS",),
    "sm100_grouped_bugs": ("BUGS",),
    "sm100_quant_cases": ("BUGS",),
    "token_tile_bugs": ("BUGS",),
    "wgrad_bugs": ("BUGS",),
}


def edits_in(found: Any) -> Iterator[tuple[str, str, str, int]]:
    """(file, text, what takes its place, which occurrence) wherever they stand in a bug or in tables of bugs."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        for edit in edits_in([getattr(found, field.name) for field in dataclasses.fields(found)]):
            yield (*edit[:3], getattr(found, "nth", 0))
    elif isinstance(found, dict):
        yield from edits_in(list(found.values()))
    elif isinstance(found, (tuple, list)):
        if len(found) >= 3 and all(isinstance(x, str) for x in found[:3]) and found[0] in jit.sources():
            yield (found[0], found[1], found[2], 0)
        else:
            for each in found:
                yield from edits_in(each)


@pytest.mark.parametrize("home", HOMES)
def test_every_anchor_is_there(home: str) -> None:
    module = import_module(f"support.{home}")
    edits = [edit for name in HOMES[home] for edit in edits_in(getattr(module, name))]
    bugs = sum(len(getattr(module, name)) for name in HOMES[home])
    assert len(edits) >= bugs > 0, f"of {bugs} bugs {len(edits)} edits were seen"
    for file, old, new, nth in edits:
        replace_nth(jit.sources()[file], old, new, nth, file)


def test_a_lost_anchor_is_seen() -> None:
    file = next(iter(jit.sources()))
    with pytest.raises(AssertionError, match="needs a new anchor"):
        replace_nth(jit.sources()[file], "no such text anywhere", "", 0, file)
