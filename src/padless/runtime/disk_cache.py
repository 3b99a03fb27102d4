"""Files on disk that outlive a process, compiled kernels above all: where they are, and writing them whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder of compiled kernels: $PADLESS_CACHE_DIR, else $XDG_CACHE_HOME/padless, else ~/.cache/padless.

    A user without a home, such as a container's, has one for temporary files.
    """
    if explicit := os.environ.get("PADLESS_CACHE_DIR"):
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "padless"
    try:
        return Path.home() / ".cache" / "padless"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"padless-{os.getuid()}"


def shared_with() -> list[str]:
    """The users that PADLESS_CACHE_SHARED names."""
    return [name.strip() for name in os.environ.get("PADLESS_CACHE_SHARED", "").split(",") if name.strip()]


def write_atomically(path: Path, content: bytes) -> None:
    """Writes under another name and moves into place: a reader sees the old content or the new. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            if shared_with():
                os.fchmod(descriptor, 0o644)
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
