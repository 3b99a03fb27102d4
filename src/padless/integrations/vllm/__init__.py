"""Experts of vLLM computed by `padless.moe`: the plug-in behind `--quantization padless`.

    vllm serve Qwen/Qwen3-30B-A3B-FP8 --quantization padless

vLLM finds `register` by the entry point group `vllm.general_plugins` of the installed package. docs/frameworks.md
describes what is computed and what has been run.
"""

from __future__ import annotations

from importlib.util import find_spec

from padless.integrations import NAME

if find_spec("vllm") is None:
    raise ImportError("padless.integrations.vllm needs vLLM 0.33: pip install 'padless[vllm]'")

__all__ = ["NAME", "register"]


def register() -> None:
    """Registers the quantization "padless" for FP8 and MXFP4 checkpoints, in this process; again changes nothing."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
        register_quantization_config,
    )

    from padless.integrations.vllm.quantization import PadlessConfig

    if NAME not in QUANTIZATION_METHODS or get_quantization_config(NAME) is not PadlessConfig:
        register_quantization_config(NAME)(PadlessConfig)
