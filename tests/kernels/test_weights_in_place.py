"""No product copies the scales or codes of weights that `quantize(kind="weight")` made: for every route, K and G."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.kernels.launch import Prepared
from padless.kernels.table import BF16, QUANT, ROUTES, Route
from padless.layouts import to_blocked
from padless.ops.epilogue_run import with_outputs
from padless.quantization.quantize import quantize
from padless.runtime import jit
from padless.testing.compile_ahead import RecordingDevice

M, N = 24, 64
K_OF_ANY = (32, 96, 160, 256, 1408, 2880)
K_OF_BLOCKS = (16, 48, 144, 2880)  # FP8_BLOCK on both sides
GROUPS = (1, 3)

# What is copied all the same, as docs/supported.md says: scales for the dense kernel on Blackwell, which reads 32x4x4
# tiles alone, and FP4 codes beside 8-bit activations there that the copy engine cannot spread.
TILES_ALONE = {"sm100_mxfp8_gemm"}


def is_copied(route: Route, k: int) -> bool:
    if route.name in TILES_ALONE:
        return True
    spread = route.arch == "sm_100a" and route.b == "MXFP4" and route.a != "MXFP4"
    return spread and (k % 64 != 0 or k < 128)


@cache
def activations(name: str, k: int) -> BlockScaledTensor | torch.Tensor:
    """Rows whose scales lie as a weight's, so that what is copied is of weights."""
    x = torch.randn(M, k, generator=torch.Generator().manual_seed(k))
    if name == BF16:
        return x.bfloat16()
    if name == FP8_BLOCK.name:
        return quantize(x, FP8_BLOCK)
    return quantize(x, FORMAT_BY_NAME[name], kind="weight")


@cache
def weights(name: str, groups: int, k: int) -> BlockScaledTensor:
    w = torch.randn(groups, N, k, generator=torch.Generator().manual_seed(k + groups))
    return quantize(w, FORMAT_BY_NAME[name], kind="weight")


def prepared(route: Route, b: BlockScaledTensor, k: int) -> Prepared:
    a, driver = activations(route.a, k), RecordingDevice(route.arch, "cubin", 132)
    offs = torch.tensor([M] * b.shape[0], dtype=torch.int32)
    with jit.listing():
        if route.operation == QUANT:
            epilogue = Epilogue(bias=False, d_dtype=torch.bfloat16)
            tensors = with_outputs(epilogue, EpilogueTensors(), M, N, b.shape[0], b.device)
            return route.load_quant().prepare(driver, a, b, offs, tensors, None, epilogue=epilogue)
        out = torch.empty(M, N, dtype=torch.bfloat16)
        ends = None if route.operation == "gemm" else offs
        return route.load().prepare(driver, a, b, ends, out, None)


def name_of(route: Route) -> str:
    return f"{route.operation} {route.arch} {route.a} x {route.b} {route.module}"


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_weights_are_read_where_they_are(route: Route) -> None:
    both = {route.a, route.b} == {FP8_BLOCK.name}
    copied, expected = [], []
    for k in K_OF_BLOCKS if both else K_OF_ANY:
        for groups in GROUPS if route.operation != "gemm" else (1,):
            found = prepared(route, weights(route.b, groups, k), k).copies
            copied += [(k, groups)] if found else []
            expected += [(k, groups)] if is_copied(route, k) else []
    assert copied == expected


@pytest.mark.parametrize("route", [r for r in ROUTES if r.b != FP8_BLOCK.name], ids=name_of)
def test_contiguous_and_tiled_scales_are_still_taken(route: Route) -> None:
    """Contiguous scales, copied where their rows are no multiple of 16 or 4 bytes, and tiles, which are not."""
    k = 320  # 10 or 20 scales a row
    t = weights(route.b, 1 if route.operation == "gemm" else 3, k)
    plain = t.scale.view(torch.uint8).contiguous().view(t.scale.dtype)
    prepared(route, BlockScaledTensor(t.data, plain, t.format, t.global_scale), k)
    tiles = BlockScaledTensor(t.data, to_blocked(t.scale), t.format, t.global_scale, "blocked")
    found = prepared(route, tiles, k).copies
    assert bool(found) == (route.name in TILES_ALONE)  # of a's, which lie in rows
