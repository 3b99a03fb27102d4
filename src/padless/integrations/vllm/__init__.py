"""Experts of vLLM computed by `padless.moe`: the plug-in behind `--quantization padless`.

    vllm serve Qwen/Qwen3-30B-A3B-FP8 --quantization padless

vLLM finds `register` by the entry point group `vllm.general_plugins` of the installed package. docs/frameworks.md
describes what is computed and what has been run.
"""

from __future__ import annotations

from importlib.util import find_spec

from padless.integrations import NAME
from padless.integrations.engines import VLLM

if find_spec("vllm") is None:
    raise ImportError("padless.integrations.vllm needs vLLM 0.33: pip install 'padless[vllm]'")

__all__ = ["NAME", "register"]


def register() -> None:
    """Registers the quantization "padless" for FP8 and MXFP4 checkpoints, in this process; again changes nothing.

    vLLM calls it in each process, with any model. Where its internals are others it logs one line and vLLM goes on; in
    versions that are not served the quantization is a name that raises and says so.
    """
    VLLM.open(_register, others=True)


def _register() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from padless.integrations.vllm.config import PadlessConfig

    register_quantization_config(NAME)(PadlessConfig)
