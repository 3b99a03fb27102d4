"""Shares of tests for the processes of xdist, by the seconds that they are expected to take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScheduling

SHARES = 5  # that a process gets of what is left, at the least
LEAST, MOST = 1.0, 30.0  # seconds of a share


class Shares(LoadScheduling):
    """As `--dist load`, but a share ends with a number of seconds in place of a number of tests.

    Each process gets a test of the front, then shares of neighbours, which use each other's fixtures: the smaller, the
    less is left. A process starts a test once it knows the next, so that there are always two where it can be.
    """

    def __init__(self, config: Any, log: Any, expected: Callable[[str], float]) -> None:
        super().__init__(config, log)
        self._expected = expected
        self._left = 0.0

    def schedule(self) -> None:
        if self.collection is not None:
            super().schedule()
            return
        if not self._check_nodes_have_same_collection():
            return
        self.collection = next(iter(self.node2collection.values()))
        self.pending[:] = range(len(self.collection))
        self._left = sum(self._expected(nodeid) for nodeid in self.collection)
        for nodes in (self.nodes, self.nodes[::-1]):
            for node in nodes:
                self._send_tests(node, 1)
        for node in self.nodes if not self.pending else ():
            node.shutdown()

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        if node.shutting_down:
            return
        if not self.pending:
            node.shutdown()
        elif len(self.node2pending[node]) < 2:
            self._send_tests(node, self._share())

    def _share(self) -> int:
        """How many of the tests in front make the next share."""
        assert self.collection is not None
        seconds = min(max(self._left / len(self.node2pending) / SHARES, LEAST), MOST)
        taken = 0.0
        for count, index in enumerate(self.pending, 1):
            taken += self._expected(self.collection[index])
            if taken >= seconds:
                return count
        return len(self.pending)

    def _send_tests(self, node: Any, num: int) -> None:
        assert self.collection is not None
        self._left -= sum(self._expected(self.collection[index]) for index in self.pending[:num])
        super()._send_tests(node, num)
