"""The shared fixtures are what other tests lean on, so each must be able to fail."""

from __future__ import annotations

import pytest
import torch

from padless.testing.guarded import guarded_memory
from support.ragged import GUARD_ROWS, RAGGED_CASES, GuardedOutput, missing_gpu


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def guarded(request: pytest.FixtureRequest, guarded_out) -> GuardedOutput:
    return guarded_out(5, 24, request.param)


def test_the_output_starts_as_nan(guarded):
    assert guarded.out.isnan().all()


def test_a_correct_writer_passes(guarded):
    guarded.out[:3] = 1.5
    guarded.check(3)
    guarded.check(torch.tensor(3, dtype=torch.int32))


def test_nothing_written_passes_only_for_no_valid_rows(guarded):
    guarded.check(0)
    with pytest.raises(AssertionError, match=r"rows \[0\] of 1 were not written"):
        guarded.check(1)


@pytest.mark.parametrize("element", [0, 23])
def test_one_element_left_out_is_seen(guarded, element):
    guarded.out[:3] = 1.5
    guarded.out[1, element] = float("nan")
    with pytest.raises(AssertionError, match=r"rows \[1\] of 3"):
        guarded.check(3)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_write_past_the_valid_rows_is_seen(guarded, value):
    guarded.out[:3] = 1.5
    guarded.out[3, 23] = value
    with pytest.raises(AssertionError, match=r"rows \[3\] past the 3 valid"):
        guarded.check(3)


@pytest.mark.parametrize(("row", "where"), [(-1, "before"), (-GUARD_ROWS, "before"), (5, "behind"), (260, "behind")])
def test_a_write_outside_the_output_is_seen(guarded, row, where):
    guarded.out[:] = 1.5
    # The same allocation seen without bounds, as a kernel sees it.
    stray = torch.as_strided(guarded.out, (24,), (1,), guarded.out.storage_offset() + row * 24)
    stray[7] = 2.5
    with pytest.raises(AssertionError, match=f"guard rows {where}"):
        guarded.check(5)


@pytest.mark.parametrize("make", ["empty", "zeros"])
@pytest.mark.parametrize("place", [-1, 24])
def test_a_byte_beside_what_is_made_is_seen(make, place):
    with guarded_memory() as changed:
        t = getattr(torch, make)((3, 8), dtype=torch.uint8)
    t += 1
    assert not changed()
    torch.as_strided(t, (1,), (1,), t.storage_offset() + place).add_(1)
    assert changed()


def test_the_output_starts_where_a_tma_store_may():
    for N in (8, 24, 136):
        assert GuardedOutput(3, N, torch.bfloat16).out.data_ptr() % 16 == 0


def test_an_output_without_rows_keeps_its_fences():
    guarded = GuardedOutput(0, 64, torch.bfloat16)
    guarded.check(0)
    torch.as_strided(guarded.out, (1,), (1,), guarded.out.storage_offset())[0] = 1.0
    with pytest.raises(AssertionError, match="behind"):
        guarded.check(0)


def test_ragged_cases_cover_what_they_promise():
    sizes = {size for case in RAGGED_CASES for size in case.sizes}
    assert {0, 1, 127, 128, 129} <= sizes
    assert any(case.valid_rows < case.M for case in RAGGED_CASES)
    assert any(max(case.sizes) == case.M and case.num_groups > 1 for case in RAGGED_CASES)
    assert any(case.M == 0 for case in RAGGED_CASES)
    assert any(case.M > 0 and case.valid_rows == 0 for case in RAGGED_CASES)
    assert any(case.N % 128 for case in RAGGED_CASES)
    assert any(case.K % 128 for case in RAGGED_CASES)
    for case in RAGGED_CASES:
        assert len({case.M, case.N, case.K}) == 3
        assert case.N % 8 == 0
        assert case.K % 16 == 0
        assert case.valid_rows <= case.M
        assert case.offs().tolist() == [sum(case.sizes[: g + 1]) for g in range(case.num_groups)]


def test_a_gpu_test_needs_exactly_its_capability():
    assert "has none" in missing_gpu(None, (9, 0))
    assert "has none" in missing_gpu(None, None)
    assert missing_gpu((9, 0), (9, 0)) is None
    assert "8.0" in missing_gpu((8, 0), (9, 0))
    assert "10.0" in missing_gpu((10, 0), (9, 0))
    assert missing_gpu((8, 6), None) is None


def test_the_generator_is_seeded(generator):
    first = torch.randint(0, 2**31, (4,), generator=generator)
    again = torch.randint(0, 2**31, (4,), generator=torch.Generator().manual_seed(generator.initial_seed()))
    assert torch.equal(first, again)
