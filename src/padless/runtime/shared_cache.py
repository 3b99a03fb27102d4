"""A folder of compiled kernels that others write to as well: whose files are read, and one process at a time for each.

A compiled kernel is code that will run: it is read where the user who runs owns its file, or root, and no other user can
write to it. PADLESS_CACHE_SHARED names other users whose files are read as well ("alice,bob", or "*" for everybody's,
on file systems that have no owners); new files are then readable by all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from padless.runtime.disk_cache import cache_dir, shared_with


def _owner(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return str(number)


def _foreign(file: os.stat_result) -> str:
    """The reason for which a file is not to be read, "" where it may be."""
    users = shared_with()
    if not hasattr(os, "geteuid") or "*" in users:
        return ""
    if file.st_uid not in (0, os.geteuid()) and not {str(file.st_uid), _owner(file.st_uid)} & set(users):
        return f"belongs to {_owner(file.st_uid)}, whom PADLESS_CACHE_SHARED does not name"
    if file.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {stat.S_IMODE(file.st_mode):o} and may be written by others; chmod go-w it"
    return ""


def read_trusted(path: Path) -> bytes:
    """The content of a file. Raises OSError where there is none, or, with a warning, where it is not to be trusted."""
    with path.open("rb") as file:
        if reason := _foreign(os.fstat(file.fileno())):
            distrust(path, reason)
            raise PermissionError(f"{path} {reason}")
        return file.read()


def distrust(path: Path, reason: str) -> None:
    """Warns of a file that will not be used."""
    warnings.warn(f"{path} {reason}: the kernel is compiled again", RuntimeWarning, stacklevel=3)


@contextmanager
def alone(name: str, seconds: float = 60.0) -> Iterator[None]:
    """The first process in a block of this name is alone there: of several that need a kernel one compiles it.

    Those that come meanwhile enter together when it has left, and find the kernel on disk; also after ``seconds``, and
    immediately where files cannot be locked: that costs time only.
    """
    number = int(hashlib.sha256(name.encode()).hexdigest()[:3], 16)  # so many files are enough, and stay
    try:
        import fcntl

        folder = cache_dir() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{number:03x}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        start, waited = time.monotonic(), False
        while time.monotonic() - start < seconds:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # another process has it
                waited = True
                time.sleep(0.005)
            except OSError:
                break
        if waited:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the descriptor too, and the lock with it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
