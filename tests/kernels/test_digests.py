"""Generated code of the kernels beside tests/kernels/digests.json: a refactoring that changes it has to say so."""

from __future__ import annotations

import pytest

import kernel_digests as tool
from padless.kernels.table import ROUTES
from padless.runtime import jit

RECORDED = tool.recorded()
SAMPLE = tool.sample(RECORDED)
WHAT_TO_DO = "generated code changed, or is new; where that was meant: python tools/kernel_digests.py --write"


def test_every_kernel_of_the_table_is_recorded_and_in_the_sample():
    """As is every other one that the calls of `padless verify` compile ahead."""
    stems = {stem for stem, *_ in RECORDED}
    assert {route.name for route in ROUTES} | {"sm90_fp8_wgrad", "wgmma_probe"} <= stems, WHAT_TO_DO
    assert {stem for stem, *_ in SAMPLE} == stems


@pytest.mark.parametrize("kernel", SAMPLE, ids=tool.name_of)
def test_sampled_kernels_are_as_recorded(kernel):
    assert tool.digest(kernel) == RECORDED[kernel], WHAT_TO_DO


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_kernels_are_as_recorded(capsys):
    assert tool.main(["--workers", "2"]) == 0, f"{capsys.readouterr().out}\n{WHAT_TO_DO}"


@pytest.fixture
def edited(monkeypatch, tmp_path):
    """edited(file, old, new): the digest of the simplest kernel after an edit of a source."""
    kernel = min(RECORDED, key=lambda kernel: (kernel[0] != "wgmma_probe", tool.name_of(kernel)))

    def digest(file: str, old: str, new: str) -> tuple[str, str]:
        texts = dict(jit.sources())
        assert old in texts[file]
        texts[file] = texts[file].replace(old, new)
        monkeypatch.setattr(jit, "sources", lambda: texts)
        monkeypatch.setattr(jit, "_in_memory", {})
        monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path))
        return tool.digest(kernel), RECORDED[kernel]

    return digest


def test_another_instruction_changes_a_digest(edited):
    now, before = edited("device/ptx/tma.cuh", "fence.proxy.async.shared::cta;", "fence.proxy.async;")
    assert now != before


def test_comments_and_the_entrys_name_change_none(edited):
    now, before = edited("wgmma_probe/wgmma_probe.cu", "padless_wgmma_probe(", "padless_by_another_name(\n// so\n")
    assert now == before
