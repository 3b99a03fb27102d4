"""Hooks around SGLang's FP8 experts, which make runners for names of its own alone.

With another `--moe-runner-backend` they call what they wrap and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend

from padless.integrations import NAME
from padless.integrations.sglang.runner import REMEDY, activation_arguments


def create_moe_runner(original: Callable[..., Any], method: Any, layer: Any, moe_runner_config: Any) -> None:
    """Fp8MoEMethod.create_moe_runner. Raises ValueError for a layer that padless does not compute."""
    backend = get_moe_runner_backend()
    if backend.value != NAME:
        original(method, layer, moe_runner_config)
        return
    _check(method, moe_runner_config)
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(backend, moe_runner_config)
    method._owns_moe_runner = True


def apply(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Fp8MoEMethod.apply: the weights go to the runner as they are for SGLang's Triton kernels."""
    runner = getattr(method, "runner", None)
    if runner is None or runner.runner_backend.value != NAME:
        return original(method, layer, dispatch_output)
    return runner.run(dispatch_output, method.get_triton_quant_info(layer))


def _check(method: Any, config: Any) -> None:
    if method.use_mxfp8 or method.is_fp4_expert or method.weight_block_size != [128, 128]:
        raise ValueError(
            f"weight_block_size is {method.weight_block_size} (MXFP8: {method.use_mxfp8}, FP4: {method.is_fp4_expert}); "
            f"the runner padless takes FP8 in [128, 128]: {REMEDY}"
        )
    if not get_moe_a2a_backend().is_none():
        raise ValueError(
            f"moe_a2a_backend is {get_moe_a2a_backend().value!r}; the runner padless takes 'none': {REMEDY}"
        )
    if config.no_combine:
        raise ValueError(f"no_combine is set; the runner padless sums the experts of a token: {REMEDY}")
    activation_arguments(config)
