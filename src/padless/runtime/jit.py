"""Compiles device code with NVRTC, once per configuration, and keeps the result on disk.

A compiled kernel is found by the hash of everything that can change it: sources, constants, target, compiler. Files
are written under another name and moved into place, so any number of processes may start together; one compiles.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from padless.runtime import elf, nvrtc, operand_reuse, shipped
from padless.runtime.architecture import family_of
from padless.runtime.disk_cache import cache_dir, write_atomically
from padless.runtime.locks import ProcessLock
from padless.runtime.nvrtc import CompileError as CompileError
from padless.runtime.shared_cache import alone, distrust, read_trusted
from padless.runtime.triton_sources import own_digests, triton_digests

KERNELS = Path(__file__).parents[1] / "kernels"
_ENTRY = re.compile(r'extern "C" __global__[^;{]*?\b(padless_\w+)\(')
_OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v", "--device-as-default-execution-space")


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel file.

    Attributes:
        image: cubin or PTX bytes.
        kind: "cubin" or "ptx".
        entry: name of the entry function.
        shared_bytes: dynamic shared memory of a launch.
        num_threads: threads of a CTA.
        num_stages: depth of the pipeline.
        registers: registers a thread at entry, as ptxas reports (cubin only, else 0).
        spill_bytes: bytes spilled to local memory, stores and loads together.
        stack_bytes: local stack frame.
        log: what the compiler said.
    """

    image: bytes
    kind: str
    entry: str
    shared_bytes: int
    num_threads: int
    num_stages: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str


class Kernel(NamedTuple):
    """The arguments of `compile_kernel`."""

    source: str
    prelude: str
    arch: str
    kind: str


_locks: dict[Kernel, ProcessLock] = {}
_locks_guard = ProcessLock()
_in_memory: dict[Kernel, CompiledKernel] = {}
_thread = threading.local()  # asked: where this thread's `compile_kernel` lists what it is asked for


def compile_kernel(source: str, prelude: str, arch: str, kind: str = "cubin") -> CompiledKernel:
    """The kernel of ``kernels/<source>`` behind the constants of ``prelude``, compiled for ``arch`` ("sm_90a").

    ``kind`` is "cubin" for a GPU or "ptx" for the emulator. Compiles at most once per process and, the disk cache
    permitting, per machine. Raises CompileError with the compiler's log.
    """
    key = Kernel(source, prelude, arch, kind)
    if (asked := getattr(_thread, "asked", None)) is not None:
        asked[key] = None
        return CompiledKernel(b"", kind, entry_of(source), 0, 128, 1, 0, 0, 0, "")
    if (kernel := _in_memory.get(key)) is not None:
        return kernel
    with _locks_guard.lock:
        guard = _locks.setdefault(key, ProcessLock())
    with guard.lock:
        if (kernel := _in_memory.get(key)) is None:
            kernel = _load_or_compile(source, prelude, arch, kind)
            _in_memory[key] = kernel
    return kernel


@contextmanager
def listing() -> Iterator[dict[Kernel, None]]:
    """In this block `compile_kernel` compiles nothing in this thread: what it is asked for comes into the yielded set,
    in order, and the image that it returns is empty.
    """
    before, _thread.asked = getattr(_thread, "asked", None), {}
    try:
        yield _thread.asked
    finally:
        _thread.asked = before


def _load_or_compile(source: str, prelude: str, arch: str, kind: str) -> CompiledKernel:
    if kind == "cubin" and (kernel := _shipped(source, prelude, arch)) is not None:
        return kernel
    name = cache_name(nvrtc_version(), Kernel(source, prelude, arch, kind))
    stem = cache_dir() / name
    if (kernel := _read_cache(stem, kind, entry_of(source))) is not None:
        return kernel
    with alone(name):
        if (kernel := _read_cache(stem, kind, entry_of(source))) is None:
            kernel = _compile(source, _front(source, prelude) + sources()[source], arch, kind)
            _write_cache(stem, kernel)
    return kernel


def _front(source: str, prelude: str) -> str:
    return f'{prelude}#line 1 "{source}"\n'  # line numbers are the file's own


def cache_name(compiler: str, kernel: Kernel) -> str:
    """Name of a kernel's files, which holds the hash of everything that can change its image."""
    source, prelude, arch, kind = kernel
    digest = hashlib.sha256()
    front = _front(source, prelude)
    for part in (compiler, operand_reuse.VERSION, arch, kind, *_OPTIONS, front, *_used_sources(source)):
        digest.update(part.encode())
        digest.update(b"\0")
    return f"{Path(source).stem}-{arch}-{digest.hexdigest()[:24]}"


def _shipped(source: str, prelude: str, arch: str) -> CompiledKernel | None:
    """The kernel as padless-cubins has it, for ``arch`` or its family; NVRTC is not even loaded."""
    if (found := shipped.shipped()) is None:
        return None
    for target in (arch, family_of(arch)):
        if target and (read := found.read(cache_name(found.compiler, Kernel(source, prelude, target, "cubin")))):
            return _describe(read[0], "cubin", read[1]["log"], entry_of(source))
    return None


def _compile(source: str, text: str, arch: str, kind: str) -> CompiledKernel:
    image, log = _run_nvrtc(text, source, arch, kind)
    if kind == "cubin":  # a kernel asks for it by naming how long a run pays
        run = elf.constant(image, "padless_reuse_run") or 0
        image = operand_reuse.keep_shared_operands(image, entry_of(source), run)
    return _describe(image, kind, log, entry_of(source))


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Every device source file, by its path under ``kernels/``."""
    files = sorted(p for p in KERNELS.rglob("*") if p.suffix in (".cu", ".cuh"))
    return {str(p.relative_to(KERNELS)): p.read_text() for p in files}


def entry_of(source: str) -> str:
    """The name of the one kernel function of ``kernels/<source>``. Raises CompileError where there is not one."""
    found = _ENTRY.findall(sources()[source])
    if len(found) != 1:
        raise CompileError(f"{source} has {len(found)} kernel functions named padless_..; it must have one")
    entry: str = found[0]
    return entry


def _used_sources(source: str, texts: Mapping[str, str] | None = None) -> list[str]:
    """Name and text of ``source`` and of every header that it includes, directly or through another."""
    texts = sources() if texts is None else texts
    used, waiting = dict[str, str](), [source]
    while waiting:
        name = waiting.pop()
        if name in used:
            continue
        used[name] = texts[name]
        for included in re.findall(r'^\s*#include "([^"]+)"', texts[name], re.MULTILINE):
            beside = str(Path(name).parent / included)
            waiting.append(included if included in texts else beside)
    return [part for item in sorted(used.items()) for part in item]


# What a constant above 0 adds to a kernel, and what a kernel with it is called.
_PARTS = {"LOW_RANK_STEPS": "low rank"}


def _without(text: str, constant: str) -> str:
    """Source without what ``constant`` above 0 adds: the lines of ``#if CONSTANT > 0``, and its own definition as 0."""
    text = re.sub(rf"#ifndef {constant}\n#define {constant} 0\n#endif\n", "", text)
    kept, inside = (
        [],
        list[bool | None](),
    )  # of each #if around: whether it is a part's, and then whether its lines count
    for line in text.splitlines():
        word = line.strip()
        if word.startswith("#if"):
            inside.append(False if word == f"#if {constant} > 0" else None)
            is_line = inside[-1] is None
        elif word == "#endif":
            is_line = inside.pop() is None
        elif word == "#else" and inside[-1] is not None:
            inside[-1], is_line = not inside[-1], False
        else:
            is_line = True
        if is_line and False not in inside:
            kept.append(line)
    return "\n".join(kept)


def source_digests(texts: Mapping[str, str] | None = None) -> dict[str, str]:
    """A hash of each kernel's sources without comments and layout, by the kernel's name, for records.

    A part that a constant adds is in the hash of "<kernel>, <part>" alone: without it the kernel is what it was. Kernels
    of Triton have a hash for each module, "moe/route" (`triton_digests`).

    texts: device source files by their path under ``kernels/`` and modules by theirs under ``padless/``, those of this
        package where none are given.
    """
    of_triton = own_digests() if texts is None else triton_digests(texts)
    texts = sources() if texts is None else {name: text for name, text in texts.items() if not name.endswith(".py")}
    plain = texts
    for constant in _PARTS:
        plain = {name: _without(text, constant) for name, text in plain.items()}
    digests = {}
    for source in sorted(name for name in texts if name.endswith(".cu")):
        name, used = Path(source).stem, _used_sources(source, texts)
        digests[name] = _digest(_used_sources(source, plain))
        for constant, part in _PARTS.items():
            if any(f"#if {constant} > 0" in text for text in used[1::2]):
                digests[f"{name}, {part}"] = _digest(used)
    return digests | of_triton


def _digest(used: Sequence[str]) -> str:
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(used[1::2]), flags=re.DOTALL)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()[:12]


def nvrtc_version() -> str:
    """The compiler's version, such as "13.0". Raises OSError or CompileError when there is none."""
    return nvrtc.version()


def _run_nvrtc(text: str, name: str, arch: str, kind: str) -> tuple[bytes, str]:
    headers = {path: content for path, content in sources().items() if path.endswith(".cuh")}
    target = arch if kind == "cubin" else arch.replace("sm_", "compute_")
    (image,), log = nvrtc.compile_text(text, name, headers, [f"--gpu-architecture={target}", *_OPTIONS], [kind])
    return image, log


def _describe(image: bytes, kind: str, log: str, entry: str) -> CompiledKernel:
    def from_log(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return CompiledKernel(
        image=image,
        kind=kind,
        entry=entry,
        shared_bytes=_constant(image, kind, "padless_shared_bytes"),
        num_threads=_constant(image, kind, "padless_num_threads"),
        num_stages=_constant(image, kind, "padless_num_stages"),
        registers=from_log(r"Used (\d+) registers"),
        spill_bytes=from_log(r"(\d+) bytes spill stores") + from_log(r"(\d+) bytes spill loads"),
        stack_bytes=from_log(r"(\d+) bytes stack frame"),
        log=log,
    )


def _constant(image: bytes, kind: str, name: str) -> int:
    """The value of ``extern "C" __device__ const int name``, in a cubin or in PTX text."""
    if kind == "cubin":
        value = elf.constant(image, name)
    else:
        match = re.search(rf"\b{name}\b\s*=\s*(\d+)", image.decode())
        value = None if match is None else int(match[1])
    if value is None:
        raise CompileError(f"the {kind} has no constant {name}")
    return value


def _read_cache(stem: Path, kind: str, entry: str) -> CompiledKernel | None:
    """The kernel as the file's own image describes it; next to the image lies what the compiler said."""
    try:
        image = read_trusted(stem.with_suffix("." + kind))
        said = json.loads(read_trusted(stem.with_suffix(".json")))
        if said.pop("sha256") != _checksum(image, said):
            return None  # two halves of different writes, or damage: compile again
        log = said["log"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    try:
        return _describe(image, kind, log, entry)
    except Exception:  # whatever parsing an image that is none raises
        distrust(stem.with_suffix("." + kind), "is no kernel of padless")
        return None


def _checksum(image: bytes, said: dict[str, Any]) -> str:
    return hashlib.sha256(image + json.dumps(said, sort_keys=True).encode()).hexdigest()


def _write_cache(stem: Path, kernel: CompiledKernel) -> None:
    said: dict[str, Any] = {"log": kernel.log}
    said["sha256"] = _checksum(kernel.image, said)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stem.with_suffix("." + kernel.kind), kernel.image)
        write_atomically(stem.with_suffix(".json"), json.dumps(said, indent=1).encode())
    except OSError:
        return  # a cache that cannot be written costs time, not correctness
