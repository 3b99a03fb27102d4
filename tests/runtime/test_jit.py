"""Compiling and the disk cache: once per configuration, whatever happens to the files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config, select_config
from padless.kernels.sm90_fp8.host import KERNEL
from padless.runtime import jit, nvrtc

ARCH = "sm_90a"
PRELUDE = Sm90Fp8Config().prelude()
# The kernel that compiles fastest, for what is the same for all.
SMALL = "wgmma_probe/wgmma_probe.cu"
SMALL_PRELUDE = '#define KINDS "e4m3.e4m3"\n#define WGMMA_K "32"\n#define TRANSPOSES ""\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on disk and in memory."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit, "_in_memory", {})
    monkeypatch.setattr(jit, "_locks", {})
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVRTC was asked to compile from here on."""
    calls: list[str] = []
    compile_text = nvrtc.compile_text

    def counted(text: str, name: str, headers: Any, options: list[str], kinds: Any) -> Any:
        calls.append(" ".join(options))
        return compile_text(text, name, headers, options, kinds)

    monkeypatch.setattr(nvrtc, "compile_text", counted)
    return calls


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would find it: nothing in memory."""
    monkeypatch.setattr(jit, "_in_memory", {})


def files(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_file()}


def same(one: jit.CompiledKernel, other: jit.CompiledKernel) -> bool:
    """Equal in all but the log, which tells how long the compiler took."""
    return dataclasses.replace(one, log="") == dataclasses.replace(other, log="")


# --- what a kernel says of itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Sm90Fp8Config(),
        Sm90Fp8Config(block_n=192, cluster_n=2),
        Sm90Fp8Config(block_m=64, block_n=64, num_stages=3),
        Sm90Fp8Config(scales="k", scale_window_k_blocks=56, out_dtype=torch.float32, max_groups=1024),
    ],
    ids=lambda config: f"{config.block_m}x{config.block_n}-{config.scales}",
)
def test_the_cubin_and_the_ptx_have_the_same_constants(cache: Path, config: Sm90Fp8Config) -> None:
    """Two readers of two formats: the ELF symbol table and PTX text."""
    cubin = jit.compile_kernel(KERNEL, config.prelude(), ARCH, "cubin")
    ptx = jit.compile_kernel(KERNEL, config.prelude(), ARCH, "ptx")
    assert cubin.image.startswith(b"\x7fELF")
    assert f".target {ARCH}" in ptx.image.decode()
    assert ".entry padless_sm90_fp8_grouped_gemm" in ptx.image.decode()
    assert cubin.entry == ptx.entry == "padless_sm90_fp8_grouped_gemm"
    for field in ("shared_bytes", "num_threads", "num_stages"):
        assert getattr(cubin, field) == getattr(ptx, field) > 0, field
    if config.num_stages:
        assert cubin.num_stages == config.num_stages
    assert 0 < cubin.registers <= 255
    assert (cubin.kind, ptx.kind) == ("cubin", "ptx")


def test_a_constant_that_is_not_there_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cubin", "ptx"):
        with monkeypatch.context() as patch:
            sources = dict(jit.sources())
            where = "device/read_back.cuh"
            sources[where] = sources[where].replace("padless_num_stages", "renamed_num_stages")
            patch.setattr(jit, "sources", lambda sources=sources: sources)
            with pytest.raises(jit.CompileError, match="has no constant padless_num_stages"):
                jit.compile_kernel(KERNEL, PRELUDE, ARCH, kind)


def test_a_compile_error_carries_the_compilers_log(cache: Path) -> None:
    with pytest.raises(jit.CompileError, match=r"does not compile for sm_90a(.|\n)*no_such_thing"):
        jit.compile_kernel(KERNEL, PRELUDE + "constexpr int X = no_such_thing;\n", ARCH)
    assert not cache.exists() or files(cache) == set()


def test_lines_are_those_of_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In line information and in errors, however many constants stand in front."""
    lines = jit.sources()[KERNEL].splitlines()
    (entry,) = (number for number, line in enumerate(lines, 1) if "padless_sm90_fp8_grouped_gemm(" in line)
    for more in ("", "constexpr int ONE_MORE = 1;\n"):
        text = jit.compile_kernel(KERNEL, PRELUDE + more, ARCH, "ptx").image.decode()
        files = dict(re.findall(r'\.file\s+(\d+) "(?:.*/)?(\w+/\w+\.cu)"', text))
        assert list(files.values()) == [KERNEL]
        first = re.search(rf"\.loc\s+{next(iter(files))} (\d+)", text)
        assert first is not None
        assert int(first[1]) == entry
    broken = {**jit.sources(), KERNEL: "no_such_thing;\n" + jit.sources()[KERNEL]}
    monkeypatch.setattr(jit, "sources", lambda: broken)
    with pytest.raises(jit.CompileError, match=rf"{KERNEL}\(1\): error"):
        jit.compile_kernel(KERNEL, PRELUDE + "constexpr int ANOTHER = 1;\n", ARCH, "ptx")


# --- once ------------------------------------------------------------------------------------------------


def test_m_never_makes_another_kernel(cache: Path, compilations: list[str]) -> None:
    """However many M there are, what is compiled are the few tiles to choose from."""
    kernels, tiles = set(), set()
    for m in (*range(300), *range(1000, 10**5, 1111), 10**6):
        config = select_config(Problem(m, 4096, 7168, 8))
        tiles.add((config.block_m, config.block_n, config.cluster_n))
        kernels.add(id(jit.compile_kernel(KERNEL, config.prelude(), ARCH)))
    assert len(kernels) == len(compilations) == len(tiles) <= 5


def test_a_second_process_does_not_compile(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH) is first
    assert len(compilations) == 1
    forget(monkeypatch)
    second = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert second is not first
    assert same(second, first)
    assert len(compilations) == 1


def test_another_configuration_source_target_or_compiler_is_compiled(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that can change the kernel changes its name on disk: each step below has to compile."""

    def compiles(prelude: str = PRELUDE, arch: str = ARCH, kind: str = "cubin") -> None:
        forget(monkeypatch)
        before = len(compilations)
        jit.compile_kernel(KERNEL, prelude, arch, kind)
        assert len(compilations) == before + 1

    compiles()
    compiles(prelude=Sm90Fp8Config(raster_m=7).prelude())
    compiles(kind="ptx")
    compiles(arch="sm_90", kind="ptx")
    for name in (KERNEL, "device/scheduler.cuh", "device/ptx/wgmma.cuh"):
        with monkeypatch.context() as patch:
            sources = dict(jit.sources())
            sources[name] += "// changed\n"
            patch.setattr(jit, "sources", lambda sources=sources: sources)
            compiles()
    with monkeypatch.context() as patch:
        patch.setattr(jit, "nvrtc_version", lambda: "13.99")
        compiles()
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_OPTIONS", (*jit._OPTIONS, "-DNOTHING"))
        compiles()
    # A file that the kernel does not include changes nothing, and nothing was forgotten on the way.
    unrelated = {"another_kernel.cu": "// new\n", "another.cuh": "// new\n"}
    with_others = {**jit.sources(), **unrelated}
    monkeypatch.setattr(jit, "sources", lambda: with_others)
    forget(monkeypatch)
    before = len(compilations)
    jit.compile_kernel(KERNEL, PRELUDE, ARCH)
    assert len(compilations) == before


def test_threads_that_start_together_compile_once(cache: Path, compilations: list[str]) -> None:
    start = threading.Barrier(8)
    kernels: list[jit.CompiledKernel] = []

    def ask() -> None:
        start.wait()
        kernels.append(jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len({id(kernel) for kernel in kernels}) == 1
    assert len(compilations) == 1


FORKED = """
import os, signal, threading
from padless.runtime import jit

parent, inside, may_end = os.getpid(), threading.Event(), threading.Event()

def compiled(source, *others):
    if os.getpid() == parent:
        inside.set()
        may_end.wait()
    return source

jit._load_or_compile = compiled
thread = threading.Thread(target=jit.compile_kernel, args=("kernel", "", "sm_90a"))
thread.start()
inside.wait()
if (child := os.fork()) == 0:
    signal.alarm(10)
    os._exit(0 if jit.compile_kernel("kernel", "", "sm_90a") == "kernel" else 1)
print(os.waitpid(child, 0)[1])
may_end.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_is_forked_during_a_compilation_compiles() -> None:
    """Its parent's thread, which would let go of the lock, is not there."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("0\n", "")


# --- files that are not what they should be --------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def another_kernels_image(path: Path) -> None:
    other = jit.compile_kernel(SMALL, SMALL_PRELUDE.replace("e4m3.", "e5m2."), ARCH)
    path.write_bytes(other.image)


def without_a_field(path: Path) -> None:
    described = json.loads(path.read_text())
    del described["log"]
    path.write_text(json.dumps(described))


def with_an_unknown_field(path: Path) -> None:
    described = json.loads(path.read_text())
    described["from_the_future"] = 1
    path.write_text(json.dumps(described))


def a_list(path: Path) -> None:
    path.write_text("[]")


def null(path: Path) -> None:
    path.write_text("null")


DAMAGE = [
    *((".cubin", damage) for damage in (truncate, empty, flip_a_bit, garbage, another_kernels_image, Path.unlink)),
    *((".json", damage) for damage in (truncate, empty, garbage, Path.unlink)),
    *((".json", damage) for damage in (without_a_field, with_an_unknown_field, a_list, null)),
]


@pytest.mark.parametrize(("suffix", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_file_is_compiled_again(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, suffix: str, damage: Callable[[Path], None]
) -> None:
    good = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    (path,) = cache.glob(f"*{suffix}")
    damage(path)
    forget(monkeypatch)
    before = len(compilations)
    again = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert len(compilations) == before + 1
    assert same(again, good)
    # And the files are whole again.
    forget(monkeypatch)
    assert same(jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH), good)
    assert len(compilations) == before + 1


def half_an_image(described: dict[str, Any], image: bytes) -> bytes:
    return image[: len(image) // 2]


def no_constants(described: dict[str, Any], image: bytes) -> bytes:
    """What a launch takes is read from the image alone: no file beside it can say less shared memory."""
    described["shared_bytes"] = 1
    return image.replace(b"padless_shared_bytes", b"padless_shared_sizes")


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize("change", [half_an_image, no_constants])
def test_a_wrong_entry_is_noticed_with_its_own_checksum_too(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, change: Any, with_checksum: bool
) -> None:
    good = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    (path,), (image_path,) = cache.glob("*.json"), cache.glob("*.cubin")
    described = json.loads(path.read_text())
    checksum = described.pop("sha256")
    image = change(described, image_path.read_bytes())
    image_path.write_bytes(image)
    path.write_text(json.dumps(described | {"sha256": jit._checksum(image, described) if with_checksum else checksum}))
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="is no kernel of padless") if with_checksum else nullcontext():
        again = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert same(again, good)
    assert len(compilations) == 2


def test_a_foreign_kernel_is_compiled_again(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    for path in cache.glob("*.cubin"):
        path.chmod(0o666)
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="has mode 666 and may be written by others; chmod go-w it: the kernel is"):
        assert same(jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH), good)
    forget(monkeypatch)
    assert same(jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH), good)  # the file is this user's again
    assert len(compilations) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder would have to be made inside a file: that fails for everyone, for root as well."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    kernel = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert kernel.shared_bytes > 0
    assert jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH) is kernel  # from memory
    assert len(compilations) == 1
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_costs_time_only(cache: Path, compilations: list[str]) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    assert jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH).shared_bytes > 0
    assert len(compilations) == 1
    assert files(cache) == set()


def test_a_full_disk_leaves_no_half_written_file(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        kernel = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert files(cache) == set()
    forget(monkeypatch)
    assert same(jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH), kernel)
    assert len(compilations) == 2
    assert len(files(cache)) == 2


# --- several processes -----------------------------------------------------------------------------------

CHILD = """
import hashlib, sys, time
from padless.runtime import jit
compiled, run = [], jit._run_nvrtc
jit._run_nvrtc = lambda *args: compiled.append(args) or run(*args)
jit.sources()
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
kernel = jit.compile_kernel({kernel!r}, {prelude!r}, {arch!r})
print(kernel.shared_bytes, kernel.num_threads, kernel.spill_bytes, hashlib.sha256(kernel.image).hexdigest())
print(len(compiled))
"""


def test_processes_that_start_together_all_get_the_kernel(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = CHILD.format(kernel=SMALL, prelude=SMALL_PRELUDE, arch=ARCH)
    children = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for child in children:  # all imported and waiting, so that they collide
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    both = [child.communicate(timeout=120)[0].splitlines() for child in children]
    answers = [answer for answer, _ in both]
    assert sorted(int(count) for _, count in both) == [0, 0, 0, 1]  # the others found it on disk
    assert [child.returncode for child in children] == [0, 0, 0, 0]
    assert len(set(answers)) == 1
    assert {Path(name).suffix for name in files(cache)} == {".cubin", ".json"}
    assert len(files(cache)) == 2, "temporary files were left behind"
    kernel = jit.compile_kernel(SMALL, SMALL_PRELUDE, ARCH)
    assert compilations == [], "what they left on disk was not used"
    assert answers[0].split()[0] == str(kernel.shared_bytes)
