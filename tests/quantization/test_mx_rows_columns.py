"""MXFP8 rows and columns in one read: the bits of public calls group by group, in torch and as machine code.

What would convince: rows are `padless.quantize`'s; columns are those of every group quantized alone, transposed, by the
same public call; scales in tiles are what a product reads; and columns quantized with a neighbouring group's rows, or
scales a tile further on, are seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import MXFP8, grouped_gemm, quantize
from padless.layouts import to_blocked_groups
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.quantization import columns_rules
from padless.quantization import mx_rows_columns as both
from support.mxfp8_wgrad import columns_of

SIZES = ((0, 0), (1, 0, 127, 129), (33, 128, 0, 64), (300,))


def drawn(sizes: tuple[int, ...], features: int, behind: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of many sizes, with a NaN, an Inf and numbers that are subnormal, and rows of no group."""
    g = torch.Generator().manual_seed(sum(sizes) + features)
    x = torch.randn(sum(sizes) + behind, features, generator=g)
    x *= torch.exp2(torch.randint(-20, 21, (len(x), 1), generator=g).float())
    if len(x) > 40:
        x[7, 3], x[40, features - 1], x[20] = float("nan"), -float("inf"), x[20] * 2.0**-130
    return x.bfloat16(), torch.tensor(sizes).cumsum(0).to(torch.int32)


def check(found: Any, x: torch.Tensor, offs: torch.Tensor, sizes: tuple[int, ...], layout: str) -> None:
    row_codes, row_scale, codes, scale = found
    rows = quantize(x, MXFP8)
    assert torch.equal(row_codes, rows.data.view(torch.uint8))
    of_rows = rows.scale if layout == "plain" else to_blocked_groups(rows.scale, offs)
    assert torch.equal(row_scale, of_rows.view(torch.uint8))
    end, first = sum(sizes), 0
    want_codes, want_scale = (t.view(torch.uint8) for t in columns_of(x.float(), sizes))
    assert torch.equal(codes[:end], want_codes[:end])
    assert not codes[end:].any()
    used = torch.zeros(len(scale), dtype=torch.bool)
    for size in sizes:
        used[first : first + -(-size // 32)] = True
        first += 4 * -(-size // 128)
    assert torch.equal(scale[used], want_scale[: len(scale)][used])
    assert not scale[~used].any()


@pytest.mark.parametrize("layout", both.LAYOUTS)
@pytest.mark.parametrize("features", [32, 176])
@pytest.mark.parametrize("sizes", SIZES)
def test_in_torch(sizes: tuple[int, ...], features: int, layout: str) -> None:
    x, offs = drawn(sizes, features)
    check(both.by_torch(x, offs, True, layout), x, offs, sizes, layout)


@pytest.mark.parametrize("layout", both.LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES[:3])
def test_as_machine_code(sizes: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from padless.quantization.triton import casts, group_tiles, mx_rows_columns
    from support.emulated_triton import EmulatedKernel

    monkeypatch.setattr(casts, "casts_in_hardware", lambda device: True)
    for module, name in ((group_tiles, "_group_tiles"), (mx_rows_columns, "_mx_rows_columns")):
        monkeypatch.setattr(module, name, EmulatedKernel(getattr(module, name)))
    x, offs = drawn(sizes, 176)
    made = both.empty(x, len(sizes), True, layout)
    for t in made:
        t.fill_(0x5A)
    mx_rows_columns.mx_rows_columns(x, offs, *made, rows=True, tiled=layout == "blocked_groups")
    check(made, x, offs, sizes, layout)
    only = both.empty(x, len(sizes), False, layout)
    mx_rows_columns.mx_rows_columns(x, offs, *only, rows=False, tiled=layout == "blocked_groups")
    assert torch.equal(only[2], made[2])
    assert torch.equal(only[3], made[3])


def test_blackwells_products_read_them() -> None:
    """In the emulator: rows with scales in tiles, and columns, next to the reference's product of plain ones."""
    g = torch.Generator().manual_seed(3)
    x, dy = torch.randn(70, 64, generator=g), torch.randn(70, 96, generator=g)
    offs = torch.tensor([33, 33, 66], dtype=torch.int32)
    w = quantize(torch.randn(3, 96, 64, generator=g), MXFP8, kind="weight")
    tiled, of_x = both.quantize_mx_rows_columns(x, offs, scale_layout="blocked_groups")
    plain, of_dy = both.quantize_mx_rows_columns(x, offs)[0], both.quantize_mx_rows_columns(dy, offs, rows=False)[1]
    assert tiled is not None
    assert plain is not None
    got = grouped_gemm(tiled, w, offs, backend="emulator:sm_100a")[:66]
    assert torch.equal(got, grouped_gemm(plain, w, offs, backend="emulator:sm_100a")[:66])
    assert torch.equal(got, grouped_gemm(plain, w, offs, backend="reference")[:66])
    dw = grouped_gemm_wgrad_mxfp8(of_dy, of_x, offs, out_dtype=torch.float32, backend="emulator:sm_100a")
    values = [both.values_of_columns(t, offs).double() for t in (of_dy, of_x)]
    spans = ((0, 33), (33, 33), (33, 66))
    want = torch.stack([values[0][a:b].T @ values[1][a:b] for a, b in spans])
    assert (dw - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("bug", ["rows of the group before", "scales a tile on"])
def test_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES[1]
    x, offs = drawn(sizes, 32)
    if bug == "rows of the group before":
        right = columns_rules.group_starts
        monkeypatch.setattr(columns_rules, "group_starts", lambda offs, *rest: right(offs - 1, *rest))
        found = both.by_torch(x, offs, True, "plain")
    else:
        *others, scale = both.by_torch(x, offs, True, "plain")
        found = (*others, scale.roll(4, 0))
    with pytest.raises(AssertionError):
        check(found, x, offs, sizes, "plain")
