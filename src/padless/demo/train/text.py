"""Text that ships with Python, as bytes, and batches drawn from it."""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path

import torch

TOPICS = "Python's help topics (pydoc_data.topics)"
SOURCES = "the source files of Python's standard library"
NUM_BYTES = 256  # what one position can be


def help_topics() -> torch.Tensor:
    """The texts that help() prints, about half a million bytes; (bytes,) uint8."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return _as_bytes("\n".join(topics[name] for name in sorted(topics)).encode())


def library_sources() -> torch.Tensor:
    """All Python files of the standard library without its tests, about ten million bytes; (bytes,) uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [f for f in sorted(root.rglob("*.py")) if not skipped & set(f.relative_to(root).parts)]
    return _as_bytes(b"\n".join(f.read_bytes() for f in files))


def draw_batch(
    text: torch.Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and the bytes that follow them, from random places; (batch, length) int64 each."""
    starts = torch.randint(text.numel() - length, (batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _as_bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
