"""Host side of sm90_moe_decode.cu: which layers it takes, its scratch, the launch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.launch import load_kernel
from padless.kernels.remembered import Prepared
from padless.kernels.sm90_moe_decode.choice import Choice
from padless.kernels.sm90_moe_decode.config import MOST_SHARES, LayerShape, MoeDecodeConfig
from padless.runtime.devices import is_capturing
from padless.runtime.driver import Argument, ByAddress, Driver, LaunchShape
from padless.runtime.locks import ProcessLock
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_128B, TensorMapSpec

KERNEL = "sm90_moe_decode/sm90_moe_decode.cu"
_UNIT_OUTPUTS, _UNIT_ROWS, _RUN = 8, 16, 32


def shape_of(choice: Choice, w2: BlockScaledTensor) -> LayerShape:
    """The sizes of a layer, of its T tokens' k experts and w2 (E, H, I)."""
    (tokens, top_k), (experts, h, i) = choice.sizes, w2.data.shape
    return LayerShape(tokens, top_k, experts, h, i)


def takes(
    x: torch.Tensor, choice: Choice, w13: BlockScaledTensor, w2: BlockScaledTensor, shared: torch.Tensor | None
) -> bool:
    """Whether the kernel can compute the layer of these operands: FP8_BLOCK weights, all that it reads contiguous, x and
    shared in bfloat16, sizes that fit.
    """
    shape = shape_of(choice, w2)
    read = [x, *choice.tensors, w13.data, w13.scale, w2.data, w2.scale, shared]
    return (
        shape.fits
        and w13.format == w2.format == FP8_BLOCK
        and w13.scale_layout == w2.scale_layout == "plain"
        and x.dtype == torch.bfloat16
        and (shared is None or shared.dtype == torch.bfloat16)
        and choice.fits
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read if t is not None)
    )


def prepare(
    driver: Driver,
    x: torch.Tensor,
    choice: Choice,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
    *,
    interleaved: bool,
    spin_limit: int = 0,
) -> Prepared:
    """Packs the launch for operands that `takes` takes.

    out: (T, H) bfloat16. scratch: of `scratch_for`. interleaved: gate and up are runs of 32 rows of w13, else halves.
    """
    device = out.device.index or 0
    shape = shape_of(choice, w2)
    config = MoeDecodeConfig(shape.most_tokens, spin_limit, choice.logits_room)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    run = _RUN // _UNIT_OUTPUTS if interleaved else shape.i // _UNIT_OUTPUTS
    pointers = (w13.scale, w2.scale, x, shared, *choice.tensors, out)
    integers = (
        *(shape.tokens, shape.top_k, shape.experts, shape.h, shape.i, run),
        *(*choice.types, shape.stages, room_of(scratch)),
    )
    arguments: list[Argument] = [driver.encode(_gate_up_map(w13.data, run)), driver.encode(_stripe_map(w2.data))]
    arguments += [(0 if t is None else t.data_ptr(), 8) for t in pointers]
    arguments += [(ByAddress(scratch.data_ptr(), out.data_ptr(), partial(scratch_at, out.device, shape)), 8)]
    arguments += [*((value, 4) for value in integers), *choice.rule_arguments]
    grid = LaunchShape(min(driver.num_sms(device), MOST_SHARES), kernel.num_threads, 1, programmatic=True)
    tensors = [t for t in (w13.data, w2.data, *pointers, scratch) if t is not None]
    return Prepared(driver.prepare(function, kernel, grid, arguments, tensors))


def _gate_up_map(w13: torch.Tensor, run: int) -> TensorMapSpec:
    """w13 (E, 2 I, H) by K, 8 rows, gate or up, units of a run, runs: a copy is 8 rows of gate, then 8 of up."""
    experts, rows, h = w13.shape
    run_rows = run * _UNIT_OUTPUTS
    dims = (h, _UNIT_OUTPUTS, 2, run, experts * rows // (2 * run_rows))
    strides = (h, run_rows * h, _UNIT_OUTPUTS * h, 2 * run_rows * h)
    box = (128, _UNIT_OUTPUTS, 2, 1, 1)
    return TensorMapSpec(DATA_TYPES[w13.dtype][0], w13.data_ptr(), dims, strides, box, SWIZZLE_128B)


def _stripe_map(w2: torch.Tensor) -> TensorMapSpec:
    """w2 (E, H, I): a copy is 16 rows."""
    experts, h, i = w2.shape
    box = (128, _UNIT_ROWS, 1)
    return TensorMapSpec(DATA_TYPES[w2.dtype][0], w2.data_ptr(), (i, h, experts), (i, h * i), box, SWIZZLE_128B)


# -------------------------------------------------------------------------------------------------- scratch

_CONTROL_WORDS = 32
_CHUNK_WORDS = 1 << 23
_MOST_CHUNKS = 8
_CHUNKS: dict[torch.device, list[torch.Tensor]] = {}
_USED: dict[torch.device, int] = {}  # words of the last chunk
_NEXT: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
_SCRATCH: dict[tuple[torch.device, int, int], torch.Tensor] = {}
_FULL: set[torch.device] = set()
_GUARD = ProcessLock()


class HasHiddenRows(Protocol):
    """The sizes of a layer, of which the words of its hidden rows count here."""

    @property
    def hidden_words(self) -> int: ...


def is_full(device: torch.device) -> bool:
    """Whether some launch found no scratch: eager calls then go without, since they would only sometimes find it."""
    return device in _FULL and not is_capturing(device)


def scratch_for(device: torch.device, address: int, shape: HasHiddenRows) -> torch.Tensor | None:
    """The scratch, int32, of launches that write to ``address``; None where there is no more of it.

    As of tile counters (``kernels/launch.py``): launches that run at the same time need scratch of their own, those that
    write to one address cannot, and what an address was given stays its own, since a CUDA graph may replay an old launch
    at any time. It is cut from chunks that are cleared once, never while a graph is captured, and stay. The next one is
    cleared when half of the last is taken, so that no call but a device's first waits for that.
    """
    room = max(1 << (shape.hidden_words - 1).bit_length(), 1 << 12)
    key = (device, address, room)
    found = _SCRATCH.get(key)
    if found is not None:
        return found
    words = _CONTROL_WORDS + 2 * room
    with _GUARD.lock:
        chunks = _CHUNKS.setdefault(device, [])
        if not chunks or _USED[device] + words > _CHUNK_WORDS:
            if is_capturing(device):
                return None
            if len(chunks) == _MOST_CHUNKS or words > _CHUNK_WORDS:
                _FULL.add(device)
                return None
            if device not in _NEXT:
                _NEXT[device] = _cleared_chunk(device)
            chunk, is_cleared = _NEXT[device]
            if is_cleared is not None:  # other streams may be the next to use it
                is_cleared.synchronize()
            del _NEXT[device]
            chunks.append(chunk)
            _USED[device] = 0
        at = _USED[device]
        _USED[device] = at + words
        if at > _CHUNK_WORDS // 2 and device not in _NEXT and len(chunks) < _MOST_CHUNKS and not is_capturing(device):
            with suppress(torch.OutOfMemoryError):  # there may be some when it is needed
                _NEXT[device] = _cleared_chunk(device)
        return _SCRATCH.setdefault(key, chunks[-1][at : at + words])


def _cleared_chunk(device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Zeros, and the event behind their writes on a GPU's current stream."""
    chunk = torch.zeros(_CHUNK_WORDS, dtype=torch.int32, device=device)
    return chunk, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def scratch_at(device: torch.device, shape: HasHiddenRows, address: int) -> int:
    """The place of scratch for launches that write to ``address``. Raises LookupError where there is no more."""
    scratch = scratch_for(device, address, shape)
    if scratch is None:
        raise LookupError("all scratch is taken")
    return scratch.data_ptr()


def room_of(scratch: torch.Tensor) -> int:
    """Words of a buffer. It does not follow from one launch's sizes: the next one may have others."""
    return (scratch.numel() - _CONTROL_WORDS) // 2
