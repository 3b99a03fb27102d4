"""The code published with the paper (github.com/sukoncon/TMA-Adaptive-FP8-Grouped-GEMM): padding-free, eight
descriptors.

Its package calls itself deep_gemm, so it is loaded from its folder under another name. The public function
computes helper tensors with about a dozen small kernels before its GEMM; the GEMM alone is measured by
replaying the launch that the public function made, with the very same arguments.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from padless.bench.peers import Contender, Peer, hopper_or_reason, point_at_cuda_toolkit, returning
from padless.bench.problem import GroupedProblem

_ALIAS = "padless_peer_tma_adaptive"
_FUNCTION = "m_grouped_TMA_adaptive_gemm_fp8_fp8_bf16_nt_contiguous"
_MODULE = "jit_kernels.m_grouped_gemm_TMA_adaptive"
_OUT_ARGUMENT = 4  # of the kernel launcher: lhs, lhs_scales, rhs, rhs_scales, out, ...


class TmaAdaptive(Peer):
    """The adapter; the code lies in `folder`/tma_adaptive, with the CUTLASS headers in deep_gemm/include."""

    name = "tma_adaptive"
    licence = "MIT"
    needs = (_FUNCTION,)

    def _package(self) -> Path | None:
        package = None if self._folder is None else self._folder / "tma_adaptive" / "deep_gemm"
        return package if package is not None and (package / "__init__.py").exists() else None

    def obstacle(self) -> str:
        missing = "" if self._package() else "no folder tma_adaptive/deep_gemm among the peers"
        return hopper_or_reason() or point_at_cuda_toolkit() or missing

    def load(self) -> Any:
        package = self._package()
        assert package is not None
        return load_renamed(package, _ALIAS)

    def version(self) -> str:
        return "arXiv 2508.16584"

    def grouped(self, problem: GroupedProblem) -> list[Contender]:
        function = getattr(self._library, _FUNCTION)
        sizes = torch.tensor(problem.sizes, dtype=torch.int64, device=problem.device)
        a, b = (problem.a.data, problem.a.scale), (problem.b.data, problem.b.scale)
        public = returning("tma_adaptive", lambda: function(a, b, sizes))
        module: Any = sys.modules[f"{_ALIAS}.{_MODULE}"]
        tuner, launches = module.jit_tuner, []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            runtime = tuner.compile_and_tune(*args, **kwargs)
            launches.append((runtime, tuple(kwargs["args"])))
            return runtime

        module.jit_tuner = SimpleNamespace(compile_and_tune=recorded)  # in the tuner's place for one call
        try:
            public.call()
        finally:
            module.jit_tuner = tuner
        runtime, arguments = launches[-1]
        kernel = partial(runtime, *arguments)
        return [public, Contender("tma_adaptive_kernel", kernel, lambda: arguments[_OUT_ARGUMENT], whole=False)]


def load_renamed(package: Path, alias: str) -> ModuleType:
    """The package in folder `package`, imported under the name `alias`; its own imports must be relative."""
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(
        alias, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in [name for name in sys.modules if name == alias or name.startswith(alias + ".")]:
            del sys.modules[name]
        raise
    return module
