"""Two GPUs in one process: what is launched for tensors of the second one while the first is current."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from padless.kernels.table import kernels_arch
from padless.runtime.driver import cuda_driver
from padless.verify import small, wgrad
from padless.verify.bf16 import forward as bf16_forward
from padless.verify.bf16 import wgrad as bf16_wgrad
from padless.verify.training.graphs import check_graphed_layer

SECOND = "cuda:1"


def parts_of(arch: str) -> dict[str, Callable[[], object]]:
    """Judged launches on the second GPU, by name: of every kernel, and steps of a layer, as calls and in CUDA graphs."""
    parts: dict[str, Callable[[], object]] = {"kernels": partial(small.small_launches, SECOND, "cuda", arch)}
    if kernels_arch(arch) == "sm_90a":
        for module in (wgrad, bf16_wgrad, bf16_forward):
            parts[module.__name__.removeprefix("padless.verify.")] = partial(
                module.check_bits, module.SHAPES[:1], SECOND
            )
        parts["layer in graphs"] = partial(check_graphed_layer, SECOND)
    return parts


def check_two_devices() -> str:
    """Everything of ``parts_of``, twice: the second time launches are remembered. Raises AssertionError."""
    if torch.cuda.device_count() < 2:
        return "this process sees one GPU"
    parts = parts_of(cuda_driver(1).arch)
    torch.cuda.set_device(0)
    for name, part in parts.items():
        for _ in range(2):
            part()
            now = torch.cuda.current_device()
            torch.cuda.set_device(0)
            assert now == 0, f"{name}: cuda:{now} was current afterwards, and cuda:0 before"
    return f"{', '.join(parts)}: on {SECOND} while cuda:0 was current, which it stayed"
