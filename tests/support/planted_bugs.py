"""Bugs planted in a kernel: its variant runs in the emulator, seed after seed, until the bug is found.

Tables of bugs are wrapped by hand (`# fmt: skip`): a bug takes a line or two, of which the formatter makes eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest
import torch

from padless.emulator import KINDS
from support.emulator_variants import Edit, Variant

Detect = Callable[[Any], tuple[int | None, list[str]]]


@dataclass(frozen=True)
class Bug:
    """An edit of a kernel's source, and what must be found when it runs.

    reports: kinds of report that name the fault itself, rather than a consequence, with spaces between them; one of
    them must appear. "" where only the output's bits can show it. changes: file, text, what takes its place; and again
    for another edit. config: None for the kernel's usual one. quick: runs with the quick tests. onto: whether the run
    accumulates.
    """

    name: str
    reports: str = ""
    changes: tuple[str, ...] = ()
    config: Any = None
    _: KW_ONLY
    quick: bool = False
    onto: bool = False
    seeds: int = 4  # within which it must be found
    nth: int = 0  # which occurrence of the edited text

    @property
    def kinds(self) -> set[str]:
        return set(self.reports.split())

    @property
    def edits(self) -> list[Edit]:
        return list(zip(self.changes[::3], self.changes[1::3], self.changes[2::3], strict=True))


def cases(bugs: Iterable[Bug]) -> list[Any]:
    """The bugs as parameters of a test."""
    return [pytest.param(bug, id=bug.name, marks=() if bug.quick else pytest.mark.slow) for bug in bugs]


def search(
    bug: Any,
    main: str,
    config: Any,
    launch: Callable[[Any], Callable[[], bool]],
    arch: str = "sm_90a",
    workers: int = 1,
) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found.

    launch: launches on the driver it is given, and returns what tells whether its output is right. A bug that has kinds
    is found by a report of one of them, any other by a report or a wrong output.
    """
    num_sms = workers * getattr(config, "cluster_n", 1)  # workers: CTAs, or clusters of them
    driver = Variant(arch, main, bug.edits, config, bug.nth)
    kinds: list[str] = []
    for seed in range(bug.seeds):
        # Bits tell of arithmetic; where a report must, what the products are does not matter.
        arithmetic = "fast" if bug.kinds else "truncate"
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=num_sms, arithmetic=arithmetic):
            is_right = launch(driver)
            result: Any = driver.last_result
        kinds += [report.kind for report in result.reports]
        if bug.kinds & set(kinds) or (not bug.kinds and (kinds or not is_right())):
            return seed + 1, kinds
    return None, kinds


def assert_found(bug: Any, detect: Detect) -> None:
    seeds, kinds = detect(bug)
    assert seeds is not None, f"{bug.name}: not found; reports seen: {sorted(set(kinds)) or 'none'}"
    assert bug.kinds <= set(KINDS)


def holds(check: Callable[[], object]) -> bool:
    """Whether a guard's check raises no AssertionError."""
    try:
        check()
    except AssertionError:
        return False
    return True


def gradient_before(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 gradient to add to, with a NaN in its first, empty group that no addition keeps; and the sum."""
    onto = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * wanted.abs().mean()
    onto[0].view(torch.int32).fill_(0x7FABCDEF)
    return onto, torch.cat([onto[:1], onto[1:] + wanted[1:]])
