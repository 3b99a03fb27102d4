"""The Triton kernels of `padless.nn` against their definitions in torch, bit for bit, on any device.

A GPU runs the cases directly, Triton's interpreter in a process of its own. Memory that kernels allocate is poisoned.
"""

from __future__ import annotations

import torch

from support.interpreter import Cases, main
from support.training_quantizer_cases import offs_of, poisoned_memory
from support.triton_cases import awkward, bits

CASES = Cases()
case = CASES.add
SIZES = (3, 0, 34, 1)  # of 45 rows


def assert_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Every bit but those of a NaN."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: other values are NaN"
    assert torch.equal(bits(got.nan_to_num(0.5)), bits(want.nan_to_num(0.5))), name


@case
def zeros_behind_the_last_group(device: str) -> None:
    from padless.nn.triton import rows

    for dtype in (torch.bfloat16, torch.float32):
        for ends, columns in ((SIZES, 530), ((45,), 16), ((0, 0), 512), ((32,), 40)):
            t = torch.full((45, columns), float("nan"), dtype=dtype, device=device)
            rows.zero_tail(t, offs_of(ends, device))
            end = sum(ends)
            assert t[:end].isnan().all()
            assert (t[end:] == 0).all()
            assert torch.equal(bits(t[end:].cpu()), bits(torch.zeros(45 - end, columns, dtype=dtype)))


@case
def decoded_rows(device: str) -> None:
    """Every code at every scale of a block, and values with NaN."""
    from padless import FP8_BLOCK, layouts, quantize
    from padless.nn import rows as definition
    from padless.nn.triton import rows

    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(5, 1).view(torch.float8_e4m3fn)
    scale = layouts.to_mn_major(torch.rand(5, 2) * torch.tensor([[1e-30], [1e-3], [1.0], [3e4], [1e36]]))
    x = quantize(awkward((67, 272), torch.bfloat16, 3), FP8_BLOCK)
    for data, of_blocks in ((codes, scale), (x.data, x.scale)):
        want = definition.dequantize(data, of_blocks)
        there = layouts.to_mn_major(of_blocks.contiguous().to(device))
        with poisoned_memory():
            got = rows.dequantize(data.to(device), there)
        assert_bits("decoded", got, want)


@case
def slots_and_rows(device: str) -> None:
    from padless.moe import slots as definition
    from padless.moe import twins
    from padless.moe.triton import slots

    for tokens, top_k in ((1, 1), (37, 3), (300, 2)):
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, 6, (tokens, top_k), generator=g)
        inverse = twins.route(ids, 5)[2]
        values = torch.randn(tokens, top_k, generator=g)
        there = inverse.to(device)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with poisoned_memory():
                by_row = slots.slots_to_rows(values.to(device, dtype), there)
                by_slot = slots.rows_to_slots(values.flatten().to(device), there, dtype)
            assert_bits("rows", by_row, definition.slots_to_rows(values.to(dtype), inverse))
            assert_bits("slots", by_slot, definition.rows_to_slots(values.flatten(), inverse, dtype))
            assert (by_slot.cpu()[inverse < 0] == 0).all()


@case
def swiglu_backward(device: str) -> None:
    from padless.nn import rows as definition
    from padless.nn.triton import swiglu

    offs = offs_of(SIZES, "cpu")
    for seed, (gate_up, columns, dtype) in enumerate(
        (
            ("concatenated", 144, torch.bfloat16),
            ("concatenated", 256, torch.float32),
            ("interleaved", 160, torch.bfloat16),
            ("interleaved", 128, torch.float16),
        )
    ):
        dh, z = awkward((45, columns), dtype, seed), awkward((45, 2 * columns), dtype, seed + 9)
        prob = torch.rand(45, generator=torch.Generator().manual_seed(seed))
        want = definition.swiglu_backward(dh, z, offs, prob, gate_up)
        with poisoned_memory():
            got = swiglu.swiglu_backward(dh.to(device), z.to(device), offs.to(device), prob.to(device), gate_up)
        for name, one, other in zip(("dz", "h", "dprob"), got, want, strict=True):
            assert_bits(f"{name}, {gate_up}, {columns} columns of {dtype}", one, other)
        assert (got[2][38:] == 0).all()


if __name__ == "__main__":
    main(CASES)
