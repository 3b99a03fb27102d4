"""Host side of sm90_moe_decode_fp4.cu: which layers it takes, and the launch. Its scratch is that of host.py."""

from __future__ import annotations

from functools import partial

import torch

from padless.epilogue import GateRule
from padless.formats import MXFP4, MXFP4_REPACKED, TILE_BYTES, BlockScaledTensor, ceil_div
from padless.kernels.launch import load_kernel
from padless.kernels.remembered import Prepared
from padless.kernels.sm90_moe_decode.choice import Choice
from padless.kernels.sm90_moe_decode.config import MOST_SHARES
from padless.kernels.sm90_moe_decode.config_fp4 import STAGE_K, Fp4LayerShape, MoeDecodeFp4Config
from padless.kernels.sm90_moe_decode.host import room_of, scratch_at
from padless.runtime.driver import Argument, ByAddress, Driver, LaunchShape
from padless.runtime.tensor_map import SWIZZLE_128B, TensorMapSpec, code_tiles

KERNEL = "sm90_moe_decode/sm90_moe_decode_fp4.cu"
MOST_LOGITS_ROOM = 512  # with more the kernel spills
_UINT8 = 0  # CUtensorMapDataType


def shape_of(choice: Choice, w2: BlockScaledTensor, num_sms: int) -> Fp4LayerShape:
    """The sizes of a layer, of its T tokens' k experts and w2 (E, H, I), on a device of so many multiprocessors."""
    (tokens, top_k), (experts, h, i) = choice.sizes, w2.logical_shape
    return Fp4LayerShape(tokens, top_k, experts, h, i, min(num_sms, MOST_SHARES))


def takes(
    x: torch.Tensor,
    choice: Choice,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> bool:
    """Whether the kernel can compute a layer of these operands that fits: MXFP4 weights, repacked or not, with blocked
    scales, all that it reads contiguous, x and shared in bfloat16, biases in float32.
    """
    read = [x, *choice.tensors, w13.data, w13.scale, w2.data, w2.scale, bias13, bias2, shared]
    return (
        w13.format == w2.format
        and w13.format in (MXFP4, MXFP4_REPACKED)
        and w13.scale_layout == w2.scale_layout == "blocked"
        and x.dtype == torch.bfloat16
        and (shared is None or shared.dtype == torch.bfloat16)
        and all(bias is None or bias.dtype == torch.float32 for bias in (bias13, bias2))
        and choice.fits
        and choice.logits_room <= MOST_LOGITS_ROOM
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read if t is not None)
    )


def prepare(
    driver: Driver,
    x: torch.Tensor,
    choice: Choice,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    bias13: torch.Tensor | None,
    bias2: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
    *,
    gate_rule: GateRule | None,
    spin_limit: int = 0,
) -> Prepared:
    """Packs the launch for operands that `takes` takes, gate and up being rows of w13 in turn.

    out: (T, H) bfloat16. scratch: of `host.scratch_for`. gate_rule: None for the plain SwiGLU.
    """
    device = out.device.index or 0
    shape = shape_of(choice, w2, driver.num_sms(device))
    config = MoeDecodeFp4Config(gate_rule, spin_limit, choice.logits_room, w13.format == MXFP4_REPACKED)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    pointers = (bias13, bias2, x, shared, *choice.tensors, out)
    integers = (
        *(shape.tokens, shape.top_k, shape.experts, shape.h, shape.i),
        *(*choice.types, shape.stages, room_of(scratch)),
    )
    maps = (_code_map(w13, 16), _code_map(w2, 8), _scale_map(w13, 16), _scale_map(w2, 8))
    arguments: list[Argument] = [driver.encode(spec) for spec in maps]
    arguments += [(0 if t is None else t.data_ptr(), 8) for t in pointers]
    arguments += [(ByAddress(scratch.data_ptr(), out.data_ptr(), partial(scratch_at, out.device, shape)), 8)]
    arguments += [*((value, 4) for value in integers), *choice.rule_arguments]
    grid = LaunchShape(shape.shares, kernel.num_threads, 1, programmatic=True)
    tensors = [t for t in (w13.data, w13.scale, w2.data, w2.scale, *pointers, scratch) if t is not None]
    return Prepared(driver.prepare(function, kernel, grid, arguments, tensors))


def _code_map(weights: BlockScaledTensor, of_copy: int) -> TensorMapSpec:
    """Weights (E, rows, K) by K and rows of all experts: a copy is so many rows."""
    codes = weights.data
    if weights.format == MXFP4_REPACKED:
        return code_tiles(codes.flatten(0, 1)[None], of_copy, STAGE_K)
    experts, rows, row_bytes = codes.shape
    dims, box = (row_bytes, experts * rows), (STAGE_K // 2, of_copy)
    return TensorMapSpec(_UINT8, codes.data_ptr(), dims, (row_bytes,), box, SWIZZLE_128B)


def _scale_map(weights: BlockScaledTensor, of_copy: int) -> TensorMapSpec:
    """Blocked scales by byte of a tile, and tiles, along K and then along rows: a copy is those of so many rows, and
    of the rows 32, 64 and 96 further.
    """
    experts, rows, k = weights.logical_shape
    tiles = experts * ceil_div(rows, 128) * ceil_div(k, 128)
    box = (of_copy * 16, STAGE_K // 128)
    return TensorMapSpec(_UINT8, weights.scale.data_ptr(), (TILE_BYTES, tiles), (TILE_BYTES,), box)
