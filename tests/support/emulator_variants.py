"""Kernels with planted bugs for the emulator: an edited copy of the sources takes the kernel's place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from padless.emulator import Emulator
from padless.emulator.fake_driver import EmulatedDriver
from padless.runtime import jit
from support.emulator_cuda import compile_ptx

Edit = tuple[str, str, str]  # file, text, what takes its place


class Variant(EmulatedDriver):
    """An emulated device that compiles an edited copy of a kernel's sources in place of the kernel.

    Every edit replaces occurrence `nth` of its text.
    """

    def __init__(self, arch: str, kernel: str, edits: Iterable[Edit], config: Any, nth: int = 0) -> None:
        super().__init__(arch)
        self.texts = dict(jit.sources())
        for file, old, new in edits:
            self.texts[file] = replace_nth(self.texts[file], old, new, nth, file)
        self.kernel, self.config = kernel, config

    def load(self, kernel: Any, device: int) -> Emulator:
        text = self.config.prelude() + self.texts[self.kernel]
        image = compile_ptx(text, self.kernel, self.arch.removeprefix("sm_"), self.texts)
        emulator = Emulator(image, name=self.kernel)
        emulator.program(kernel.entry)
        return emulator


def replace_nth(text: str, old: str, new: str, nth: int, file: str) -> str:
    """Replace one occurrence; any run of spaces and line ends matches any other."""
    pattern = re.sub(r"(?:\\?\s)+", lambda _: r"\s+", re.escape(old.strip()))
    found = list(re.finditer(pattern, text))
    assert len(found) > nth, f"{file} has no occurrence {nth} of {old!r}: the planted bug needs a new anchor"
    return text[: found[nth].start()] + new + text[found[nth].end() :]
