"""Hooks around SGLang's FP8 experts, which make runners for SGLang's names alone.

With another `--moe-runner-backend` they call what they wrap, with whatever arguments SGLang gives, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend

from padless.integrations import NAME
from padless.integrations.engines import SGLANG

_RUNNER = "padless.integrations.sglang.runner"
_REMEDY = "choose another --moe-runner-backend"


def runner_core(config: Any) -> Any:
    """PadlessRunnerCore(config). Raises ValueError in an SGLang that it cannot be made of."""
    return SGLANG.load(_RUNNER).PadlessRunnerCore(config)


def create_moe_runner(original: Callable[..., Any], method: Any, *arguments: Any, **named: Any) -> Any:
    """Fp8MoEMethod.create_moe_runner. Raises ValueError for a layer that padless does not compute."""
    make = _make_runner if _is_padless(get_moe_runner_backend()) else original
    return make(method, *arguments, **named)


def apply(original: Callable[..., Any], method: Any, *arguments: Any, **named: Any) -> Any:
    """Fp8MoEMethod.apply: the weights go to the runner as they are for SGLang's Triton kernels."""
    mine = _is_padless(getattr(getattr(method, "runner", None), "runner_backend", None))
    return (_apply if mine else original)(method, *arguments, **named)


def _is_padless(backend: Any) -> bool:
    return getattr(backend, "value", None) == NAME


def _make_runner(method: Any, layer: Any, moe_runner_config: Any) -> None:
    _check(method, moe_runner_config)
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)
    method._owns_moe_runner = True


def _apply(method: Any, layer: Any, dispatch_output: Any) -> Any:
    return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))


def _check(method: Any, config: Any) -> None:
    if method.use_mxfp8 or method.is_fp4_expert or method.weight_block_size != [128, 128]:
        raise ValueError(
            f"weight_block_size is {method.weight_block_size} (MXFP8: {method.use_mxfp8}, FP4: {method.is_fp4_expert}); "
            f"the runner padless takes FP8 in [128, 128]: {_REMEDY}"
        )
    if not get_moe_a2a_backend().is_none():
        raise ValueError(
            f"moe_a2a_backend is {get_moe_a2a_backend().value!r}; the runner padless takes 'none': {_REMEDY}"
        )
    if config.no_combine:
        raise ValueError(f"no_combine is set; the runner padless sums the experts of a token: {_REMEDY}")
    SGLANG.load(_RUNNER).activation_arguments(config)
