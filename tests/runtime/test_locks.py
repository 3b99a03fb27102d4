"""Locks of a process, and processes that are forked while a thread holds one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import padless

FORKED = """
import os, signal, threading
import torch
from padless.integrations import weights
from padless.kernels import launch
from padless.kernels.sm90_moe_decode import host
from padless.kernels.sm90_moe_decode.config import LayerShape, MoeDecodeConfig
from padless.runtime import jit

jit._load_or_compile = lambda source, *others: source
CALLS = {
    "compile": (jit._locks_guard, lambda: jit.compile_kernel("kernel", "", "sm_90a")),
    "counter": (launch._COUNTERS_GUARD, lambda: launch.tile_counter(MoeDecodeConfig(8), 0, 16)),
    "scratch": (host._GUARD, lambda: host.scratch_for(torch.device("cpu"), 16, LayerShape(1, 8, 4, 128, 512))),
    "weights": (weights._KEPT_GUARD, lambda: weights.WeightCache("")),
}

def hold(guard, inside, may_end):
    with guard.lock:
        inside.set()
        may_end.wait()

for name, (guard, call) in CALLS.items():
    inside, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold, args=(guard, inside, may_end))
    thread.start()
    inside.wait()
    if (child := os.fork()) == 0:
        signal.alarm(10)
        call()
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
    may_end.set()
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_is_forked_while_a_thread_holds_a_lock_waits_for_none() -> None:
    """Its parent's thread, which would let go of the lock, is not there."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("compile 0\ncounter 0\nscratch 0\nweights 0\n", "")


def test_no_other_locks_guard_what_a_process_keeps() -> None:
    root = Path(padless.__file__).parent
    makes_one = re.compile(r"\b(R?Lock|Condition|Semaphore)\(")
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if makes_one.search(path.read_text())}
    assert found == {"runtime/locks.py"}


IMPORTS = """
import sys, threading, time
import torch
inside = threading.Event()
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "padless.nn.codes":
            inside.set()
            time.sleep(1)
sys.meta_path.insert(0, Slow())
failed = []
threading.excepthook = lambda found: failed.append(found.exc_value)
def whole(): import padless.nn
def parts():
    inside.wait()
    import padless.autograd
threads = [threading.Thread(target=each) for each in (whole, parts)]
for each in threads: each.start()
for each in threads: each.join()
print(failed)
"""


def test_threads_may_import_a_package_and_what_is_made_of_its_parts_at_once() -> None:
    """One held a part and waited for the package, the other one held the package and found half of the part."""
    path = str(Path(padless.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr
