"""The Triton quantisers against the torch ones, bit for bit, on any device.

`test_quantize_triton.py` runs every case on a GPU where there is one, and everywhere in Triton's interpreter.
That needs TRITON_INTERPRET=1 before triton is imported, so a process of its own: this file as a program,
which prints one JSON object, case -> error or null.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

import torch

Case = Callable[[str], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add `function`, called with a device, to CASES."""
    CASES[function.__name__] = function
    return function


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of t, row-major, on the CPU: NaN equals NaN and 0 does not equal -0."""
    out = torch.empty(t.shape, dtype=t.dtype)
    return out.copy_(t).view(torch.uint8)


def assert_same(got: object, want: object, x: torch.Tensor) -> None:
    """Two BlockScaledTensors of x agree in every bit of codes and scales, and in layout."""
    assert got.data.shape == want.data.shape
    assert got.data.dtype == want.data.dtype
    assert got.scale.stride() == want.scale.stride()
    wrong = torch.nonzero(bits(got.scale).view(-1) != bits(want.scale).view(-1))
    assert wrong.numel() == 0, f"{len(wrong)} scale bytes differ, the first at {wrong[0].item()}"
    wrong = torch.nonzero(bits(got.data) != bits(want.data))
    if wrong.numel() > 0:
        where = tuple(wrong[0].tolist())
        pair = bits(got.data)[where].item(), bits(want.data)[where].item()
        raise AssertionError(
            f"{len(wrong)} code bytes differ, the first at {where}: got, want {pair}; row {x[where[:-1]]}"
        )


def awkward(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Blocks of very different sizes with zeros, subnormals, NaN of both signs and Inf among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = (*shape[:-1], 1)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-20, 14, rows, generator=generator)
    chance = torch.rand(shape, generator=generator)
    x[chance < 0.02] = -0.0
    x[(chance > 0.02) & (chance < 0.03)] = 1e-42
    special = torch.rand(rows, generator=generator).expand(shape)
    x[special < 0.1] = 0.0
    x[(special > 0.1) & (special < 0.15)] *= 1e-38
    x[(special > 0.15) & (special < 0.3) & (chance > 0.99)] = float("nan")
    x[(special > 0.3) & (special < 0.35) & (chance > 0.99)] = -float("inf")
    x[(special > 0.35) & (special < 0.4) & (chance > 0.99)] = -float("nan")
    return x.to(dtype)


def code_boundaries(max_value: float, dtype: torch.dtype) -> torch.Tensor:
    """Every code's value, every midpoint of neighbours and the float32 numbers next to them, of both signs.
    
    """
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    values = codes[codes.isfinite() & (codes >= 0)].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    infinity = torch.full_like(points, float("inf"))
    points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    points = points[points <= max_value]
    return torch.cat([points, -points])


def in_rows(values: torch.Tensor, columns: int, first: float) -> torch.Tensor:
    """values in rows of `columns`, each starting with `first` (to be the row's amax), the rest zero."""
    per_row = columns - 1
    rows = -(-values.numel() // per_row)
    body = torch.zeros(rows * per_row)
    body[: values.numel()] = values
    return torch.cat([torch.full((rows, 1), first), body.view(rows, per_row)], dim=1)


def fp8_block_pair(x: torch.Tensor, kind: str, scale_major: str, device: str) -> None:
    from padless.formats import FP8_BLOCK
    from padless.quantize import quantize
    from padless.quantize_triton import fp8_block

    assert_same(
        fp8_block(x.to(device), kind, scale_major),
        quantize(x, FP8_BLOCK, kind=kind, scale_major=scale_major),
        x,
    )


@case
def fp8_block_activations(device: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for shape in ((0, 128), (1, 1), (1, 129), (5, 16), (67, 144), (129, 257)):
            for scale_major in ("mn", "k"):
                fp8_block_pair(awkward(shape, dtype, seed), "activation", scale_major, device)


@case
def fp8_block_weights(device: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for shape in ((1, 1), (130, 144), (2, 127, 257), (3, 128, 128)):
            fp8_block_pair(awkward(shape, dtype, seed), "weight", "k", device)


@case
def fp8_block_code_boundaries(device: str) -> None:
    """A block with amax 448 has scale 1: its codes are the cast alone, at every rounding decision."""
    values = code_boundaries(448.0, torch.float8_e4m3fn)
    fp8_block_pair(in_rows(values, 128, 448.0), "activation", "k", device)


@case
def fp8_block_amax_floor(device: str) -> None:
    """amax at and next to the floor, and next to the float32 limits."""
    floor = torch.tensor(1e-4)
    amax = torch.stack(
        [
            floor,
            torch.nextafter(floor, torch.tensor(1.0)),
            torch.nextafter(floor, torch.tensor(0.0)),
            torch.tensor(torch.finfo(torch.float32).max),
            torch.tensor(1e-45),
        ]
    )
    x = torch.linspace(-1, 1, 128) * amax[:, None]
    fp8_block_pair(x, "activation", "mn", device)


@case
def fp8_block_strides(device: str) -> None:
    """Rows further apart than K, and columns that are not adjacent (copied first)."""
    wide = awkward((9, 320), torch.bfloat16, 7).to(device)
    for x in (wide[:, :272], wide.t()[:256], wide[:, ::2]):
        fp8_block_pair(x.cpu(), "activation", "mn", device)
        from padless.formats import FP8_BLOCK
        from padless.quantize import quantize
        from padless.quantize_triton import fp8_block

        assert_same(fp8_block(x, "activation", "mn"), quantize(x.cpu().contiguous(), FP8_BLOCK), x.cpu())


def run_all() -> dict[str, str | None]:
    """Every case in the interpreter: its traceback, or None."""
    results: dict[str, str | None] = {}
    for name, function in CASES.items():
        try:
            function("cpu")
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc(limit=-3)
    return results


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    print(json.dumps(run_all()))
