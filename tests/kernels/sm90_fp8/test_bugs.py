"""Every planted bug of the real Hopper kernel is found, and the unmodified kernel gives no report on any seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from padless.emulator.fake_driver import EmulatedDriver
from support import emulator_bugs, emulator_bugs_shared
from support.emulator_bugs import BASE, CLUSTER, FLOAT_OUT, MAIN, ROW_MAJOR, Bug
from support.emulator_cases import make_case, run_case
from support.emulator_variants import Variant
from support.planted_bugs import assert_found, search

BUGS = emulator_bugs.BUGS + emulator_bugs_shared.BUGS
CONFIGS = {
    "ragged store": BASE,
    "pool store": dataclasses.replace(BASE, store="pool"),
    "row-major scales": ROW_MAJOR,
    "float32 output": FLOAT_OUT,
    "cluster of two": CLUSTER,
    "tile of 192 columns": dataclasses.replace(BASE, block_n=192),
    "one warpgroup": dataclasses.replace(BASE, block_m=64),
    "two waves": dataclasses.replace(BASE, block_m=256),
}


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    case = make_case(bug.sizes, bug.n, bug.k, bug.config.scales)

    def launch(driver: EmulatedDriver) -> Callable[[], bool]:
        right, _ = run_case(driver, case, bug.config)
        return lambda: right

    return search(bug, MAIN, bug.config, launch, workers=bug.workers)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


def test_there_are_enough_bugs() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS) >= 25


def check_clean(name: str, seeds: range) -> None:
    config = CONFIGS[name]
    case = make_case((70, 0, 129, 3), 512 if config.cluster_n > 1 else 320, 384, config.scales)
    driver = EmulatedDriver()
    for seed in seeds:
        sms = config.cluster_n * (1 + seed % 3)
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=sms, arithmetic="fast"):
            right, result = run_case(driver, case, config)
        assert result is not None
        assert not result.reports, f"seed {seed}:\n" + "\n".join(map(str, result.reports))
        assert right, f"seed {seed}: wrong result"


@pytest.mark.parametrize("name", CONFIGS)
def test_unmodified_kernel_gives_no_report(name: str) -> None:
    check_clean(name, range(3, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_unmodified_kernel_gives_no_report_on_fifty_seeds(name: str) -> None:
    check_clean(name, range(50))


def test_same_seed_same_run() -> None:
    case = make_case((70, 0, 3), 128, 256, "mn")
    driver = EmulatedDriver()
    counts = []
    for seed in (5, 5):
        with driver.configured(seed=seed):
            right, result = run_case(driver, case, BASE)
        assert right
        assert result is not None
        counts.append((result.statistics.warp_instructions, result.statistics.async_operations))
    assert counts[0] == counts[1]


def test_reports_name_the_source_line() -> None:
    bug = next(b for b in BUGS if b.name == "no proxy fence before the store")
    driver = Variant("sm_90a", MAIN, bug.edits, bug.config)
    case = make_case((70, 3), 128, 256, "mn")
    with driver.configured(seed=0, raise_on_reports=False):
        _, result = run_case(driver, case, bug.config)
    assert result is not None
    report = next(r for r in result.reports if r.kind == "missing-proxy-fence")
    assert "tma.cuh" in report.source
    assert "stmatrix" in report.other
    assert report.ptx_line > 0
    assert report.seed == 0


def test_a_deadlock_over_registers_says_what_would_fit() -> None:
    bug = next(b for b in BUGS if b.name.startswith("consumers ask for 8 registers more"))
    driver = Variant("sm_90a", MAIN, bug.edits, bug.config)
    case = make_case((70, 3), 128, 256, "mn")
    with driver.configured(seed=0, raise_on_reports=False, num_sms=1):
        _, result = run_case(driver, case, bug.config)
    assert result is not None
    (report,) = result.reports
    assert "66560 are asked for (8 warps x 32 x 240 + 4 warps x 32 x 40)" in report.message
    assert "64512 were given to the CTA at launch (384 threads x 168)" in report.message
    assert "232 for these 8 warps would fit" in report.message
    assert "memory.cuh" in report.message  # where setmaxnreg.inc stands


def test_reports_raise_from_the_backend() -> None:
    bug = next(b for b in BUGS if b.name == "no wgmma.fence")
    driver = Variant("sm_90a", MAIN, bug.edits, bug.config)
    case = make_case((70, 3), 128, 256, "mn")
    with pytest.raises(ValueError, match="missing-wgmma-fence"):
        run_case(driver, case, bug.config)
