"""The copy and the read that decoding calls are timed beside: how many bytes they touch, and that they touch them."""

from __future__ import annotations

import pytest
import torch

from padless.bench import measure, problem
from padless.bench.group_sizes import Point, decode_grid, decode_sizes
from padless.bench.traffic import ROW_WORDS, make_traffic, traffic_contenders
from support.bench_records import StandInTimer

ROW_BYTES = 8 * ROW_WORDS


@pytest.mark.parametrize("bytes_", [2, ROW_BYTES, ROW_BYTES + 4, 3 * ROW_BYTES - 4, 1_234_564])
def test_a_copy_moves_exactly_the_bytes_and_a_read_no_more_than_a_row_beyond(bytes_: int) -> None:
    traffic = make_traffic(bytes_, 0, "cpu")
    assert traffic.source.dtype == traffic.target.dtype == torch.uint8
    assert traffic.source.nbytes + traffic.target.nbytes == bytes_
    assert traffic.source.nbytes == traffic.target.nbytes
    assert bytes_ <= traffic.words.nbytes < bytes_ + ROW_BYTES
    source = (traffic.source.data_ptr(), traffic.source.data_ptr() + traffic.source.nbytes)
    target = (traffic.target.data_ptr(), traffic.target.data_ptr() + traffic.target.nbytes)
    assert source[1] <= target[0] or target[1] <= source[0], "a copy onto itself moves less"
    assert traffic.source.is_contiguous()
    assert traffic.words.is_contiguous()


def test_an_odd_number_of_bytes_is_rounded_up() -> None:
    traffic = make_traffic(7, 0, "cpu")
    assert (traffic.source.nbytes, traffic.target.nbytes) == (4, 4)
    with pytest.raises(ValueError, match="bytes_ must be at least 1, got 0"):
        make_traffic(0, 0, "cpu")


def test_every_byte_is_moved() -> None:
    traffic = make_traffic(5 * ROW_BYTES, 3, "cpu")
    copy, read = (contender.call for contender in traffic_contenders(traffic))
    traffic.target.copy_(~traffic.source)
    copy()
    assert torch.equal(traffic.target, traffic.source)
    traffic.sums.fill_(-1)
    read()
    assert torch.equal(traffic.sums, traffic.words.sum(1))
    before = traffic.sums.clone()
    for row in range(traffic.words.shape[0]):  # each row is read: a change anywhere changes its sum
        traffic.words[row, (row * 97 + 11) % ROW_WORDS] += 1
    read()
    assert torch.equal(traffic.sums, before + 1)
    counts = torch.bincount(traffic.source.to(torch.int64), minlength=256)
    assert (counts > 0).all(), "random bytes draw the power that data draws"


def test_calls_allocate_nothing() -> None:
    traffic = make_traffic(100_000, 0, "cpu")
    copy, read = (contender.call for contender in traffic_contenders(traffic))
    assert copy() is traffic.target
    assert read() is traffic.sums


def test_sizes_of_the_decode_grid_are_whole() -> None:
    """Every point's bytes can be halved, so that its copy moves exactly as many."""
    for decode in decode_grid():
        sizes = decode_sizes(decode)
        assert Point(sum(sizes), decode.N, decode.K, decode.groups).bytes % 2 == 0


def test_the_decode_record_has_them_with_the_bytes_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(bytes_: int, seed: int, device: torch.device) -> object:
        made.append(bytes_)
        return make_traffic(bytes_, seed, device)

    monkeypatch.setattr(measure, "make_traffic", noted)
    point = Point(9, 136, 272, 3)
    grouped = problem.make_grouped(point, [2, 0, 7], 0, "cpu")
    record = measure.measure_decode(grouped, [], StandInTimer())
    # By hand: codes, and scales of ceil(272 / 128) = 3 columns and ceil(136 / 128) = 2 rows; bf16 results.
    by_hand = 9 * (272 + 4 * 3) + 3 * (136 * 272 + 4 * 2 * 3) + 2 * 9 * 136
    assert made == [record["bytes"]] == [by_hand]
    assert list(record["gpu"]) == ["padless", "copy of as many bytes", "read of as many bytes"]
