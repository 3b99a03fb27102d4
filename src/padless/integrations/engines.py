"""Engines that call a plug-in of padless in each of their processes, whether padless is used or not.

So nothing that goes wrong there may stop one, and nothing is imported that they did not ask for: a start costs a line in
the log at most, and a user who names padless gets a sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from padless.integrations import NAME

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """An engine whose internals a plug-in uses.

    package: as it is imported, and the name of padless' extra. first, end: versions from the first on and below the
    end are served. option: the words with which a user asks for padless.
    """

    name: str
    package: str
    first: str
    end: str
    option: str

    @property
    def remedy(self) -> str:
        """The remedy of every case."""
        return f"start {self.name} without {self.option}"

    def open(self, register: Callable[[], None], *, others: bool = False) -> None:
        """Calls register where this version is served, and with `others` everywhere. Raises nothing: logs one line."""
        reason = ""
        try:
            reason = self._version_refused()
            if others or not reason:
                register()
        except Exception as error:
            reason = reason or self._refused(error)
        if reason:
            _log.warning("%s; without it %s goes on", reason, self.name)

    def load(self, module: str) -> Any:
        """The module of padless', for a user who asked. Raises ValueError where this version cannot have it."""
        if reason := self._version_refused():
            raise ValueError(reason)
        try:
            return import_module(module)
        except Exception as error:
            raise ValueError(self._refused(error)) from error

    def _version_refused(self) -> str:
        """A sentence, or nothing where this version is served, or has no number, as builds from source."""
        found = _numbers(self._version())
        served = not any(found) or _numbers(self.first) <= found < _numbers(self.end)
        return "" if served else self._sentence(f"{self.name} is {self._version()}")

    def _refused(self, error: Exception) -> str:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return self._sentence(f"{self.name} {self._version()} lacks what padless uses of it ({problem})")

    def _sentence(self, found: str) -> str:
        return (
            f"{found}, and {self.option} needs {self.name} {self.first} or newer, below {self.end}: "
            f"pip install 'padless[{self.package}]', or {self.remedy}"
        )

    def _version(self) -> str:
        return str(getattr(import_module(self.package), "__version__", "of no version"))


VLLM = Engine(name="vLLM", package="vllm", first="0.33", end="0.34", option=f"--quantization {NAME}")
SGLANG = Engine(name="SGLang", package="sglang", first="0.5.23", end="0.6", option=f"--moe-runner-backend {NAME}")


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 33, 1) of "0.33.1rc1.dev5"; () of "dev"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
