"""Defaults of torch in the caller's process, dtype and device, which change nothing of a call, also at the import.

Loaders of models set both: transformers the dtype of a checkpoint, vLLM its dtype and the GPU, others meta.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, NVFP4, Epilogue, EpilogueTensors, dequantize, moe, nn, quantize
from padless.ops.epilogue_run import with_outputs
from support.public_calls import PUBLIC, replaced, same

DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype to be made torch's own; the one of before is again behind the test."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def tensors_of(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    value = (dict(value), getattr(value, "row", None)) if hasattr(value, "keys") else value
    replaced(value, lambda t: (found.append(t.clone()), t)[1])
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_public_calls(name: str, dtype: torch.dtype) -> None:
    call, results = PUBLIC[name], []
    for default in (torch.float32, dtype):
        given = call.arguments()
        torch.set_default_dtype(default)
        found = call.function(**given)
        torch.set_default_dtype(torch.float32)
        results.append(tensors_of(given if found is None else found))
    assert len(results[0]) == len(results[1])
    assert all(same(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_calls_where_tensors_are_made_elsewhere(name: str) -> None:
    call, results = PUBLIC[name], []
    for default in ("cpu", "meta"):
        given = call.arguments()
        with torch.device(default):
            found = call.function(**given)
        results.append(tensors_of(given if found is None else found))
    assert len(results[0]) == len(results[1])
    assert all(one.device == other.device and same(one, other) for one, other in zip(*results, strict=True))


def test_layers_where_tensors_are_made_elsewhere() -> None:
    """The layer, also of kernels in the emulator, and a step of experts."""
    generator = torch.Generator().manual_seed(0)
    x, module = torch.randn(8, 128, generator=generator).bfloat16(), nn.MoE(128, 32, 4, 2)
    ids, prob = torch.randint(0, 4, (8, 2), generator=generator), torch.rand(8, 2, generator=generator)
    w13, w2 = (quantize(torch.randn(4, 128, 128, generator=generator), FP8_BLOCK, kind="weight") for _ in range(2))
    w2 = quantize(dequantize(w2)[..., :64], FP8_BLOCK, kind="weight")
    results = []
    for default in ("cpu", "meta"):
        module.zero_grad()
        with torch.device(default):
            module(x).sum().backward()
            outputs = [moe.moe(x, ids, prob, w13, w2, backend=backend) for backend in ("reference", "emulator")]
        results.append([*outputs, module.experts.w13.grad, module.experts.w2.grad])
    assert all(same(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=lambda fmt: fmt.name)
def test_a_layer(fmt: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 128, generator=generator).bfloat16()
    ids, prob = torch.randint(0, 4, (8, 2), generator=generator), torch.rand(8, 2, generator=generator)
    w13, w2 = (quantize(torch.randn(4, n, 128, generator=generator), fmt, kind="weight") for n in (256, 128))
    want = moe.moe(x, ids, prob, w13, w2), dequantize(w13)
    torch.set_default_dtype(dtype)
    got = moe.moe(x, ids, prob, w13, w2), dequantize(w13)
    assert all(same(one, other) for one, other in zip(got, want, strict=True))


def test_a_new_amax_is_float32_as_the_kernel_writes_it(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    epilogue = Epilogue(amax=True, d_dtype=torch.bfloat16)
    made = with_outputs(epilogue, EpilogueTensors(), 8, 64, 3, torch.device("cpu"))
    assert made.amax is not None
    assert made.amax.dtype == torch.float32


IMPORTED = """
import sys, torch
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    import padless.autograd, padless.compat.cudnn.calls, padless.distributed, padless.moe, padless.nn, padless.ops
kept = [(name, key, value) for name, module in list(sys.modules.items()) if name.startswith("padless")
        for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
print([(name, key) for name, key, value in kept if value.is_meta or value.dtype == torch.bfloat16])
"""


def test_what_modules_hold_is_of_the_cpu_and_float32() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
