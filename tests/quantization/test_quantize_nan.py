"""A block with a NaN or an Inf decodes to NaN and no other block notices, whatever the bits and the place of the NaN.

torch's maximum over a NaN is some NaN: which sign and payload it has depends on strides, shapes and the CPU. What
decides here is only whether it is one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from padless.formats import FORMATS, FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat
from padless.layouts import from_blocked, unpack_fp4
from padless.quantization.quantize import SCALE_RULES, dequantize, quantize
from padless.quantization.rules import ELEMENT_EMAX, MX_SCALE_RULES, fp8_block, nvfp4, nvfp4_factors
from padless.reference.epilogue import nearest_code

# Quiet and signalling NaN of both signs, what GPUs and x86 make, all bits set; and the two Inf.
NANS = (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC12345, 0xFFA00000)
SPECIALS: dict[torch.dtype, tuple[int, ...]] = {
    torch.float32: (*NANS, 0x7F800000, 0xFF800000),
    torch.bfloat16: (0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0x7F81, 0xFF81, 0x7F80, 0xFF80),
    torch.float16: (0x7E00, 0xFE00, 0x7FFF, 0xFFFF, 0x7C01, 0xFC01, 0x7C00, 0xFC00),
}
WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

# The same numbers with other strides.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
    "every other column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "columns of a wider tensor": lambda x: torch.nn.functional.pad(x, (3, 5), value=7.0)[..., 3:-5],
    "rows of a transposed tensor": lambda x: torch.nn.functional.pad(x.mT, (1, 2)).mT[..., 1:-2, :],
}
RULES = [(fmt, rule) for fmt in FORMATS for rule in SCALE_RULES[fmt] or (None,)]


def name_of(value: object) -> str:
    return value.name if isinstance(value, BlockScaledFormat) else str(value)


def of_bits(pattern: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The number with these bits, ()."""
    size = 32 if dtype == torch.float32 else 16
    signed = pattern - (1 << size) if pattern >> (size - 1) else pattern
    return torch.tensor(signed, dtype=WORD[dtype]).view(dtype)


def put(x: torch.Tensor, where: tuple[int, ...], pattern: int) -> None:
    """Writes the bits themselves: a conversion would make a signalling NaN a quiet one."""
    x.view(WORD[x.dtype])[where] = of_bits(pattern, x.dtype).view(WORD[x.dtype])


def is_nan(pattern: int, dtype: torch.dtype) -> bool:
    return bool(of_bits(pattern, dtype).isnan())


def codes_of(t) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return unpack_fp4(t.data) if t.format.codes_per_byte == 2 else t.data.view(torch.uint8)


def scale_bits(t) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Scales in their logical shape, as integers."""
    if t.scale_layout == "blocked":
        return from_blocked(t.scale, t.data.shape[-2], t.scale_columns).view(torch.uint8)
    return t.scale.contiguous().view(torch.int32 if t.format == FP8_BLOCK else torch.uint8)


def check_broken_blocks(
    x: torch.Tensor, specials: dict[tuple[int, ...], int], kind: str, format: BlockScaledFormat, **options: object
) -> None:
    """x with specials (one a block) against x with zeros there: the blocks of them are broken, the rest is the same.

    Zeros, because what is not finite is not in NVFP4's global scale.
    """
    bad, good = x, x.clone()
    for where, pattern in specials.items():
        put(bad, where, pattern)
        good[where] = 0.0
    got = quantize(bad, format, kind=kind, **options)  # type: ignore[arg-type]
    clean = quantize(good, format, kind=kind, **options)  # type: ignore[arg-type]

    block_rows, block_k = format.block(kind)
    values, codes, other_codes = dequantize(got), codes_of(got), codes_of(clean)
    scales, other_scales = scale_bits(got), scale_bits(clean)
    untouched = torch.ones(x.shape, dtype=torch.bool)
    untouched_scales = torch.ones(scales.shape, dtype=torch.bool)
    for where, pattern in specials.items():
        *batch, row, column = where
        block = (*batch, row // block_rows, column // block_k)
        rows = slice(block[-2] * block_rows, (block[-2] + 1) * block_rows)
        columns = slice(block[-1] * block_k, (block[-1] + 1) * block_k)
        inside = (*batch, rows, columns)
        what = f"{pattern:#x} at {where}"
        nan = is_nan(pattern, x.dtype)
        assert values[inside].isnan().all(), f"{what}: its block decodes to a number"
        if format == FP8_BLOCK:
            assert scales[block] == (0x7FC00000 if nan else 0x7F800000), what
            own = torch.full_like(codes, 0)
            own[where] = 0x7F
            wanted = torch.full_like(codes[inside], 0x7F) if nan else own[inside]
            is_zero = (codes[inside] & 0x7F == 0) & (wanted == 0)  # of either sign
            assert ((codes[inside] == wanted) | is_zero).all(), what
        else:
            assert scales[block] == (0x7F if format == NVFP4 else 0xFF), what
            assert (codes[inside] == (0 if format.codes_per_byte == 2 else 0x7F)).all(), what
        untouched[inside] = False
        untouched_scales[block] = False
    assert torch.equal(scales[untouched_scales], other_scales[untouched_scales]), "another block's scale"
    assert torch.equal(codes[untouched], other_codes[untouched]), "another block's codes"
    if got.global_scale is not None:
        assert torch.equal(got.global_scale, clean.global_scale)
    assert values[untouched].isfinite().all()


def draw_specials(
    shape: tuple[int, ...], format: BlockScaledFormat, kind: str, dtype: torch.dtype, draw: torch.Generator
) -> dict[tuple[int, ...], int]:
    """Every special bit pattern once, at random places of random blocks; at least one block stays whole."""
    block_rows, block_k = format.block(kind)
    counts = [*shape[:-2], -(-shape[-2] // block_rows), -(-shape[-1] // block_k)]
    total = int(torch.Size(counts).numel())
    chosen = torch.randperm(total, generator=draw)[: min(len(SPECIALS[dtype]), total - 1)].tolist()
    patterns = torch.randperm(len(SPECIALS[dtype]), generator=draw).tolist()
    specials = {}
    for index, number in zip(chosen, patterns, strict=False):
        *batch, row_block, column_block = (int(i) for i in torch.unravel_index(torch.tensor(index), counts))
        rows = range(row_block * block_rows, min((row_block + 1) * block_rows, shape[-2]))
        columns = range(column_block * block_k, min((column_block + 1) * block_k, shape[-1]))
        row = rows[int(torch.randint(len(rows), (), generator=draw))]
        column = columns[int(torch.randint(len(columns), (), generator=draw))]
        specials[(*batch, row, column)] = SPECIALS[dtype][number]
    return specials


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("format", "rule"), RULES, ids=name_of)
def test_any_nan_breaks_its_block_and_no_other(format: BlockScaledFormat, rule: str | None, layout: str) -> None:
    """Every dtype, kind and bit pattern, with and without a short last block; shapes take torch's different loops."""
    draw = torch.Generator().manual_seed(FORMATS.index(format) * 100 + list(LAYOUTS).index(layout))
    for dtype in SPECIALS:
        for kind, shape in (
            ("activation", (33, 32)),
            ("activation", (19, 274)),
            ("weight", (259, 400)),
            ("weight", (3, 130, 144)),
        ):
            x = LAYOUTS[layout](torch.randn(shape, generator=draw).to(dtype))
            specials = draw_specials(shape, format, kind, dtype, draw)
            check_broken_blocks(x, specials, kind, format, scale_rule=rule)


@pytest.mark.parametrize(("format", "rule"), RULES, ids=name_of)
def test_a_nan_of_a_transposed_x(format: BlockScaledFormat, rule: str | None) -> None:
    """The maximum along rows that are not contiguous, where x86 makes a NaN of all bits."""
    for pattern in (0x7FC00000, 0xFFC00000):
        x = torch.randn((32, 33), generator=torch.Generator().manual_seed(1)).t()
        check_broken_blocks(x, {(3, 5): pattern}, "activation", format, scale_rule=rule)


OPTIONS: list[tuple[BlockScaledFormat, str, dict[str, object]]] = [
    (fmt, rule, options)
    for fmt in FORMATS
    for rule in SCALE_RULES[fmt]
    for options in ({"scale_layout": "blocked"}, {"global_scale": 0.01})
    if fmt == NVFP4 or "global_scale" not in options
]


@pytest.mark.parametrize(("format", "rule", "options"), OPTIONS, ids=name_of)
def test_other_options(format: BlockScaledFormat, rule: str, options: dict[str, object]) -> None:
    draw = torch.Generator().manual_seed(9)
    x = LAYOUTS["transposed"](torch.randn((131, 96), generator=draw))
    specials = draw_specials((131, 96), format, "activation", torch.float32, draw)
    check_broken_blocks(x, specials, "activation", format, scale_rule=rule, **options)


def test_global_scales_of_groups_leave_out_what_is_not_finite() -> None:
    """A group's global scale is that of its finite values, and a group of nothing else has 1."""
    draw = torch.Generator().manual_seed(10)
    x = torch.randn((9, 32), generator=draw)
    clean = x.clone()
    offs = torch.tensor([4, 7, 9], dtype=torch.int32)
    for i, pattern in enumerate(SPECIALS[torch.float32]):
        put(x, (1, 3 * i), pattern)
        clean[1, 3 * i] = 0.0
        put(x, (7, i), pattern)
    x[7:], clean[7:] = of_bits(0xFFFFFFFF), 0.0
    got = quantize(x, NVFP4, offs=offs).global_scale
    wanted = quantize(clean, NVFP4, offs=offs).global_scale
    assert got is not None
    assert wanted is not None
    assert torch.equal(got, wanted)
    assert got[2] == 1.0


# --- the rules themselves, given any NaN as the largest magnitude ----------------------------------------


@pytest.mark.parametrize("format", [MXFP8, MXFP8_E5M2, MXFP4], ids=name_of)
@pytest.mark.parametrize("rule", MX_SCALE_RULES)
def test_any_nan_amax_has_byte_255(rule: str, format: BlockScaledFormat) -> None:
    amax = torch.stack([of_bits(p) for p in (*NANS, 0x7F800000)])
    assert (MX_SCALE_RULES[rule](amax, format) == 0xFF).all()
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert MX_SCALE_RULES[rule](largest, format) == 254 - ELEMENT_EMAX[format] + (rule == "rceil")


def test_any_nan_amax_of_the_other_formats() -> None:
    for pattern in NANS:
        x = torch.ones(1, 16)
        put(x, (0, 0), pattern)
        for rule in SCALE_RULES[NVFP4]:
            factors = nvfp4_factors(rule, torch.tensor(0.1), None).reshape(1, 1, 2)
            codes, scale = nvfp4(x, rule, factors)
            assert scale.item() == 0x7F
            assert not codes.any()
        codes, scale = fp8_block(x, "activation")
        assert scale.view(torch.int32).item() == 0x7FC00000
        assert (codes == 0x7F).all()


def test_a_nan_code_has_no_sign() -> None:
    """The reference of the epilogues: 0x7F and, for e2m1, 0."""
    x = torch.stack([of_bits(p) for p in NANS])
    for format in FORMATS:
        assert (nearest_code(x, format) == (0 if format.codes_per_byte == 2 else 0x7F)).all()


def test_a_global_scale_that_is_no_number_decodes_to_nan() -> None:
    x = torch.randn((3, 32), generator=torch.Generator().manual_seed(2))
    for pattern in (*NANS, 0x7F800000):
        for rule in SCALE_RULES[NVFP4]:
            t = quantize(x, NVFP4, global_scale=of_bits(pattern), scale_rule=rule)
            assert dequantize(t).isnan().all(), f"{rule} {pattern:#x}"
