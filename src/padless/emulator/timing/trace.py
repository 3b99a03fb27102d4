"""A timed run as a trace that Perfetto and chrome://tracing show: a process for every multiprocessor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from padless.emulator.timing.timeline import Timeline


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Chrome's trace format. A cycle is drawn as a nanosecond; servers are threads, and so are warps, with their
    waits."""
    events: list[dict[str, Any]] = []

    def thread(sm: int, number: int, name: str) -> None:
        events.append({"ph": "M", "name": "thread_name", "pid": sm, "tid": number, "args": {"name": name}})

    def span(sm: int, number: int, name: str, start: float, end: float) -> None:
        events.append(
            {"ph": "X", "name": name, "pid": sm, "tid": number, "ts": start / 1e3, "dur": (end - start) / 1e3}
        )

    for number, sm in sorted(timeline.sms.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"multiprocessor {number}"}})
        for i, server in enumerate(sm.servers()):
            if server.spans:
                thread(number, i, server.name)
                for start, end, label in server.spans:
                    span(number, i, label or server.name, start, end)
    for place, warp in sorted(timeline.ended):
        thread(place, 100 + warp, f"warp {warp}: {timeline.role((place, warp))}")
    for wait in timeline.waits:
        span(wait.warp[0], 100 + wait.warp[1], f"waits for {wait.what}", wait.start, wait.end)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": "1 ns is 1 cycle"}}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace_of(timeline)))
