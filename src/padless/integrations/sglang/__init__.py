"""Experts of SGLang computed by `padless.moe`: the plug-in behind `--moe-runner-backend padless`.

    python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B-FP8 --moe-runner-backend padless

SGLang finds `register` by the entry point group `sglang.srt.plugins` of the installed package. docs/frameworks.md
describes what is computed and what has been run.
"""

from __future__ import annotations

from importlib.util import find_spec

from padless.integrations import NAME
from padless.integrations.engines import SGLANG

if find_spec("sglang") is None:
    raise ImportError("padless.integrations.sglang needs SGLang 0.5.23: pip install 'padless[sglang]'")

__all__ = ["NAME", "register"]

_METHOD = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod"
_registered = False


def register() -> None:
    """Names the runner "padless" on SGLang's command line and hooks its FP8 experts; calling it again changes nothing.

    SGLang calls it in each process, with any model, and applies the hooks when all plug-ins are loaded. Layers of other
    runners go through them unchanged. Where SGLang's internals are others it logs one line and registers nothing.
    """
    global _registered
    if not _registered:
        _registered = True
        SGLANG.open(_register)


def _register() -> None:
    from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from padless.integrations.sglang import hooks

    register_moe_runner_core(NAME, hooks.runner_core)
    add_moe_runner_backend_choices([NAME])
    HookRegistry.register(f"{_METHOD}.create_moe_runner", hooks.create_moe_runner, HookType.AROUND)
    HookRegistry.register(f"{_METHOD}.apply", hooks.apply, HookType.AROUND)
