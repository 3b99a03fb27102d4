"""Benchmark records with known answers, for the tests of tables, figures and correlations; and a stand-in clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padless.bench.group_sizes import Point, full_grid, group_sizes, memory_saving_percent, padded_rows
from padless.testing.timing import Call, Timing

KIND = "paper"


class StandInTimer:
    """Calls everything once; a time depends on the name alone, and further ones are longer by `later`."""

    def __init__(self, *later: float) -> None:
        self._samples = (0.0, *later)

    def gpu(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing(tuple(len(name) + more for more in self._samples)) for name in calls}

    end_to_end = gpu


def timing(us: float) -> dict[str, Any]:
    return {"us": us, "spread_percent": 1.0, "samples_us": [us]}


def record(point: Point, /, *, baseline: str = "pad_then_padless", **changes: Any) -> dict[str, Any]:
    """A record whose acceleration over `baseline` is 30 - N / 512 percent: it falls with N and with nothing
    else.
    """
    sizes = group_sizes(point, 0)
    own = point.flops / 1.3e15 * 1e6
    gain = 30.0 - point.N / 512
    return {
        "kind": KIND,
        "session": "then",
        "seed": 0,
        "point": vars(point),
        "sizes": sizes,
        "padded_rows": padded_rows(sizes),
        "memory_saving_percent": memory_saving_percent(sizes),
        "flops": point.flops,
        "bytes": point.bytes,
        "bitwise_identical": True,
        "row_error": {"padless": 0.002},
        "wrong": {},
        "errors": {},
        "gpu": {
            "padless": timing(own),
            "padless_on_padded": timing(own * 1.02),
            "pad": timing(own * 0.05),
            baseline: timing(own * (1 + gain / 100)),
        },
        "end_to_end": {"padless": timing(own + 20), "tma_adaptive": timing(own * 2)},
        "floor_us": own * 0.9,
        "clocks": {"sm_mhz": 1500},
        "took_s": 0.5,
    } | changes


def full_records() -> list[dict[str, Any]]:
    return [record(point) for point in full_grid()]
