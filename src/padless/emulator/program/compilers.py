"""Changes to modules that a program imports, so that what they compile can be run: NVRTC's cubins, Triton's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.emulator.program.device_time import DeviceTime

Remember = Callable[[bytes, str], None]


class _After(importlib.abc.Loader):
    """A module's own loader, and a change to the module once it is there."""

    def __init__(self, loader: Any, change: Callable[[ModuleType], None]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)


class Changes(importlib.abc.MetaPathFinder):
    """Changes modules by name as they are imported, those that are imported already at once."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.changes = dict(changes)
        for name in [name for name in self.changes if name in sys.modules]:
            self.changes.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        change = self.changes.pop(name, None)
        if change is None:
            return None
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            found.loader = _After(found.loader, change)
        return found


def remember_cubins(remember: Remember) -> Callable[[ModuleType], None]:
    """A change of cuda.bindings.nvrtc: the PTX of every cubin that is fetched is remembered."""

    def change(nvrtc: ModuleType) -> None:
        original = nvrtc.nvrtcGetCUBIN

        def fetched(program: Any, cubin: Any) -> Any:
            result = original(program, cubin)
            _, size = nvrtc.nvrtcGetPTXSize(program)
            ptx = b" " * size
            nvrtc.nvrtcGetPTX(program, ptx)
            remember(bytes(cubin), ptx.rstrip(b"\0").decode())
            return result

        nvrtc.nvrtcGetCUBIN = fetched  # type: ignore[attr-defined]

    return change


def remember_compiled(remember: Remember) -> Callable[[ModuleType], None]:
    """A change of padless.runtime.nvrtc: the PTX of every cubin that is compiled is remembered."""

    def change(nvrtc: ModuleType) -> None:
        original = nvrtc.compile_text

        def compiled(text: str, name: str, headers: Any, options: Any, kinds: Any) -> Any:
            images, log = original(text, name, headers, options, [*kinds, "ptx"])
            ptx = images.pop().rstrip(b"\0").decode()
            for image, kind in zip(images, kinds, strict=True):
                if kind == "cubin":
                    remember(image, ptx)
            return images, log

        nvrtc.compile_text = compiled  # type: ignore[attr-defined]

    return change


def leave_ptx(compiler: ModuleType) -> None:
    """A change of Triton's compiler: the binary that it keeps is the PTX."""
    compiler.CUDABackend.make_cubin = lambda self, ptx, metadata, *rest: ptx.encode()  # type: ignore[attr-defined]


def one_run_a_benchmark(device: DeviceTime, say: Callable[[str], None]) -> Callable[[ModuleType], None]:
    """A change of triton.testing: a benchmark is one call on the device's time; sweeps are left out."""

    def change(testing: ModuleType) -> None:
        def do_bench(
            fn: Callable[[], Any], *_: Any, quantiles: Any = None, return_mode: str = "mean", **__: Any
        ) -> Any:
            found = [device.bench(fn)]
            return testing._summarize_statistics(found, quantiles, return_mode)

        def run(mark: Any, *_: Any, **__: Any) -> None:
            marks = mark.benchmarks if isinstance(mark.benchmarks, list | tuple) else [mark.benchmarks]
            points = sum(len(m.x_vals) * len(m.line_vals) for m in marks)
            say(f"left out: {getattr(mark.fn, '__name__', 'a benchmark')}, a sweep of {points} measurements of speed")

        vars(testing).update(do_bench=do_bench, do_bench_cudagraph=do_bench)
        testing.Mark.run = run

    return change


def private_folders(folder: Path) -> None:
    """Caches of this run alone, since what is compiled here is for no GPU, and Triton's way to the stand-in."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["PADLESS_CACHE_DIR"] = str(folder / "padless")
    os.environ["PADLESS_CUBINS"] = "0"  # there is no PTX of those
