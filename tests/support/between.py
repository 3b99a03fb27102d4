"""A call in the middle of which another thread makes one, at each place in turn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def with_one_between(
    code: CodeType, place: int, first: Callable[[], Any], second: Callable[[], object], seconds: float = 0.5
) -> Any:
    """The result of ``first``, and whether another thread ran ``second`` in front of instruction ``place`` of ``code``.

    ``second`` may wait for a lock that ``first`` holds: after ``seconds`` it goes on behind that.
    """
    passed, threads, errors = 0, list[threading.Thread](), list[BaseException]()

    def guarded() -> None:
        try:
            second()
        except BaseException as error:
            errors.append(error)

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal passed
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            passed += 1
            if passed == place:
                threads.append(threading.Thread(target=guarded))
                threads[0].start()
                threads[0].join(seconds)
        return traced

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of instructions where settrace finds that somebody asked
    sys.settrace(traced)
    try:
        result = first()
    finally:
        sys.settrace(before)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return result, bool(threads)
