"""Compiled kernels on disk: where they are, whose files are read, and one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from padless.runtime import disk_cache, shared_cache
from padless.runtime.disk_cache import write_atomically
from padless.runtime.shared_cache import read_trusted

OTHER = 54321  # a user that nobody is


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PADLESS_CACHE_SHARED", raising=False)
    path = tmp_path / "kernel.cubin"
    write_atomically(path, b"code")
    return path


def given_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The owner that the file has now, who is neither root nor the user who runs."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1)
        return str(OTHER)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    return str(path.stat().st_uid)


def test_a_user_without_a_home_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user no file names."""
    for name in ("HOME", "XDG_CACHE_HOME", "PADLESS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert disk_cache.cache_dir() == tmp_path / f"padless-{os.getuid()}"


def test_a_file_of_the_own_is_read_and_nobody_elses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_trusted(file) == b"code"
    owner = given_to_another_user(file, monkeypatch)
    with pytest.warns(RuntimeWarning, match="PADLESS_CACHE_SHARED does not name"), pytest.raises(PermissionError):
        read_trusted(file)
    for names in (owner, f"nobody-of-this-name, {owner}", "*"):
        monkeypatch.setenv("PADLESS_CACHE_SHARED", names)
        assert read_trusted(file) == b"code"
    monkeypatch.setenv("PADLESS_CACHE_SHARED", "nobody-of-this-name")
    with pytest.warns(RuntimeWarning), pytest.raises(PermissionError):
        read_trusted(file)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    file.chmod(mode)
    monkeypatch.setenv("PADLESS_CACHE_SHARED", str(file.stat().st_uid))
    with pytest.warns(RuntimeWarning, match=f"has mode {mode:o}"), pytest.raises(PermissionError):
        read_trusted(file)
    monkeypatch.setenv("PADLESS_CACHE_SHARED", "*")
    assert read_trusted(file) == b"code"


def test_files_are_for_others_where_they_are_shared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("PADLESS_CACHE_SHARED", "somebody")
    write_atomically(file, b"other")
    assert file.stat().st_mode & 0o777 == 0o644
    assert read_trusted(file) == b"other"


def test_a_name_for_every_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PADLESS_CACHE_DIR")
    assert disk_cache.cache_dir() == tmp_path / "xdg" / "padless"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.cache_dir() == Path.home() / ".cache" / "padless"


def test_a_process_that_holds_a_kernel_for_long_delays_the_others_only(file: Path) -> None:
    with shared_cache.alone("kernel"):
        start = time.monotonic()
        with shared_cache.alone("kernel", 0.3), shared_cache.alone("another", 60.0):
            waited = time.monotonic() - start
    assert 0.25 < waited < 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(file: Path) -> None:
    """It has the open file, too; others waited until it ended, or for a minute."""
    script = """
import os, threading, time
from padless.runtime.shared_cache import alone
inside, forked = threading.Event(), threading.Event()
def compile():
    with alone("kernel"):
        inside.set()
        forked.wait()
thread = threading.Thread(target=compile)
thread.start()
inside.wait()
if (child := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
forked.set()
thread.join()
start = time.monotonic()
with alone("kernel"):
    print(time.monotonic() - start)
os.kill(child, 9)
"""
    path = str(Path(shared_cache.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 10


def test_those_that_waited_enter_together(file: Path) -> None:
    """Each in a thread, since a lock belongs to an open file."""
    inside, together = threading.Barrier(3), []

    def enter() -> None:
        with shared_cache.alone("kernel"):
            inside.wait(30)  # broken where one is alone
            together.append(True)

    threads = [threading.Thread(target=enter) for _ in range(3)]
    with shared_cache.alone("kernel"):
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert not together
    for thread in threads:
        thread.join()
    assert len(together) == 3
