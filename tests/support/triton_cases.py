"""The Triton quantisers against the torch ones, bit for bit, on any device.

`test_triton.py` runs every case on a GPU where there is one, and everywhere in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from support.interpreter import Cases, main

CASES = Cases()
case = CASES.add


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of t, row-major, on the CPU: NaN equals NaN and 0 does not equal -0."""
    out = torch.empty(t.shape, dtype=t.dtype)
    return out.copy_(t).view(torch.uint8)


def assert_same(got: object, want: object) -> None:
    """Two BlockScaledTensors agree in every bit of codes and scales, and in layout."""
    assert got.data.shape == want.data.shape
    assert got.data.dtype == want.data.dtype
    assert got.scale.stride() == want.scale.stride()
    if got.scale_major == "mn":
        rows, columns = got.scale.shape
        size, strides = (got.scale.stride(1), columns), got.scale.stride()
        padding = [bits(torch.as_strided(t.scale, size, strides)[rows:]) for t in (got, want)]
        assert torch.equal(*padding), "padding of MN-major scales"
    wrong = torch.nonzero(bits(got.scale).view(-1) != bits(want.scale).view(-1))
    assert wrong.numel() == 0, f"{len(wrong)} scale bytes differ, the first at {wrong[0].item()}"
    wrong = torch.nonzero(bits(got.data) != bits(want.data))
    if wrong.numel() > 0:
        where = tuple(wrong[0].tolist())
        pair = bits(got.data)[where].item(), bits(want.data)[where].item()
        raise AssertionError(f"{len(wrong)} code bytes differ, the first at {where}: got, want {pair}")


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


def around(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Non-negative values, midpoints of neighbours and the float32 numbers beside all, both signs."""
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    infinity = torch.full_like(points, float("inf"))
    points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    points = points[(points >= 0) & (points <= largest)]
    return torch.cat([points, -points])


def code_boundaries(max_value: float, dtype: torch.dtype) -> torch.Tensor:
    """`around` all the values of a float8 dtype."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    return around(codes[codes.isfinite() & (codes >= 0)].unique(), max_value)


def in_rows(values: torch.Tensor, columns: int, first: float) -> torch.Tensor:
    """values in rows of `columns`, each starting with `first` (to be the row's amax), the rest zero."""
    per_row = columns - 1
    rows = -(-values.numel() // per_row)
    body = torch.zeros(rows * per_row)
    body[: values.numel()] = values
    return torch.cat([torch.full((rows, 1), first), body.view(rows, per_row)], dim=1)


def fp8_block_pair(x: torch.Tensor, kind: str, scale_major: str, device: str) -> None:
    from padless.formats import FP8_BLOCK
    from padless.quantization.quantize import quantize
    from padless.quantization.triton.fp8_block import fp8_block

    want = quantize(x, FP8_BLOCK, kind=kind, scale_major=scale_major)
    assert_same(fp8_block(x.to(device), kind, scale_major), want)


@case
def fp8_block_activations(device: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for shape in ((0, 128), (1, 1), (1, 129), (5, 16), (67, 144), (33, 257)):
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
    above, below = (torch.nextafter(floor, torch.tensor(d)) for d in (1.0, 0.0))
    largest = torch.tensor(torch.finfo(torch.float32).max)
    amax = torch.stack([floor, above, below, largest, torch.tensor(1e-45)])
    fp8_block_pair(torch.linspace(-1, 1, 128) * amax[:, None], "activation", "mn", device)


@case
def fp8_block_strides(device: str) -> None:
    """Rows further apart than K, and columns that are not adjacent (copied first)."""
    from padless.formats import FP8_BLOCK
    from padless.quantization.quantize import quantize
    from padless.quantization.triton.fp8_block import fp8_block

    wide = awkward((9, 320), torch.bfloat16, 7).to(device)
    for x in (wide[:, :272], wide.t()[:256], wide[:, ::2]):
        assert_same(fp8_block(x, "activation", "mn"), quantize(x.cpu().contiguous(), FP8_BLOCK))


# --- the formats whose blocks lie in one row -------------------------------------------------------------

ROW_FORMATS = ("MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4")


def row_blocks_pair(x: torch.Tensor, name: str, scale_rule: str, device: str, **options: object) -> None:
    """quantize through the Triton kernels, global scale and all, and on the CPU in torch."""
    from padless import formats
    from padless.quantization.quantize import _nvfp4_global, quantize
    from padless.quantization.triton import row_blocks as quantize_triton_rows

    fmt = getattr(formats, name)
    want = quantize(x.cpu(), fmt, scale_rule=scale_rule, **options)
    x = x.to(device)
    layout, offs = options.get("scale_layout", "plain"), options.get("offs")
    offs = None if offs is None else offs.to(device)
    global_scale, factors = None, None
    if name == "NVFP4":
        global_scale, factors = _nvfp4_global(x, scale_rule, options.get("global_scale"), offs, True)
        assert torch.equal(bits(global_scale.view(-1)), bits(want.global_scale.view(-1))), "global scale"
    data, scale = quantize_triton_rows.row_blocks(x, fmt, scale_rule, layout, offs, factors)
    assert_same(formats.BlockScaledTensor(data, scale, fmt, global_scale, layout), want)


def rules(name: str) -> tuple[str, ...]:
    return ("te", "torchao") if name == "NVFP4" else ("rceil", "floor")


def add_row_cases(name: str, rule: str) -> None:
    """One case for each format and scale rule: shapes, dtypes and layouts."""

    def shapes(device: str) -> None:
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            for shape in ((0, 32), (1, 2), (5, 16), (35, 162), (2, 288)):
                row_blocks_pair(awkward(shape, dtype, seed), name, rule, device)
        for layout in ("plain", "blocked"):
            x = awkward((2, 131, 84), torch.bfloat16, 11)
            row_blocks_pair(x, name, rule, device, kind="weight", scale_layout=layout)
            row_blocks_pair(x[0], name, rule, device, scale_layout=layout)
        offs = torch.tensor([40, 40, 41, 129], dtype=torch.int32)
        x = awkward((131, 160), torch.bfloat16, 12)
        row_blocks_pair(x, name, rule, device, scale_layout="blocked_groups", offs=offs)

    shapes.__name__ = f"{name.lower()}_{rule}"
    case(shapes)


for name_ in ROW_FORMATS:
    for rule_ in rules(name_):
        add_row_cases(name_, rule_)


@case
def mx_code_boundaries(device: str) -> None:
    """A block with amax max_value has scale 1 under both rules: the casts at every rounding decision."""
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name, largest, values in (
        ("MXFP8", 448.0, code_boundaries(448.0, torch.float8_e4m3fn)),
        ("MXFP8_E5M2", 57344.0, code_boundaries(57344.0, torch.float8_e5m2)),
        ("MXFP4", 6.0, around(e2m1, 6.0)),
    ):
        for rule in ("rceil", "floor"):
            row_blocks_pair(in_rows(values, 32, largest), name, rule, device)
    # Beyond the largest code, where "floor" saturates.
    for name, emax in (("MXFP8", 8), ("MXFP8_E5M2", 15), ("MXFP4", 2)):
        values = torch.linspace(1.4, 1.9999, 620) * 2.0**emax
        row_blocks_pair(in_rows(torch.cat([values, -values]), 32, values[-1].item()), name, "floor", device)


@case
def mx_scale_boundaries(device: str) -> None:
    """amax at and next to powers of two and the largest code times them, down to subnormals."""
    for name, largest in (("MXFP8", 448.0), ("MXFP8_E5M2", 57344.0), ("MXFP4", 6.0)):
        powers = torch.tensor(2.0, dtype=torch.float64) ** torch.arange(-149, 128)
        points = torch.cat([powers, powers * largest]).float()
        points = points[points.isfinite()]
        infinity = torch.full_like(points, float("inf"))
        points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
        points = torch.nn.functional.pad(points, (0, -points.numel() % 4)).view(-1, 4)
        x = torch.zeros(points.shape[0], 4, 32)
        x[:, :, 3], x[:, :, 4] = points, points * -0.37
        for rule in ("rceil", "floor"):
            row_blocks_pair(x.flatten(1), name, rule, device)


@case
def nvfp4_global_scales(device: str) -> None:
    """Given, per weight and per group of rows; tensors of tiny, huge and no magnitude."""
    offs = torch.tensor([7, 7, 30], dtype=torch.int32)
    for rule in ("te", "torchao"):
        x = awkward((33, 64), torch.bfloat16, 13)
        row_blocks_pair(x, "NVFP4", rule, device, offs=offs)
        row_blocks_pair(x, "NVFP4", rule, device, global_scale=0.003)
        weights = torch.stack([x * 0.01, x * 100, x * 0])
        row_blocks_pair(weights, "NVFP4", rule, device, kind="weight", scale_layout="plain")
        for exponent in (-149, -140, -120, -30, 100, 120):
            size = torch.tensor(2.0, dtype=torch.float64) ** exponent
            x = (awkward((9, 48), torch.float32, 14).clamp(-4, 4) * size).float()
            row_blocks_pair(x, "NVFP4", rule, device)


@case
def nvfp4_ends_of_the_range(device: str) -> None:
    """bf16 and fp16 where a block's multiplier is next to the largest or the smallest float32, and saturation."""
    for rule in ("te", "torchao"):
        for exponent in (-120, -112, 112, 118, 122, 125):
            x = awkward((9, 96), torch.float32, 16 + exponent).clamp(-7, 7) * 2.0**exponent
            row_blocks_pair(x.bfloat16(), "NVFP4", rule, device)
        x = awkward((33, 64), torch.bfloat16, 17)
        x[5, 3], x[7, 40] = 3.3e38, -2.9e38
        for global_scale in (2.0**-126, 1e-30, 0.001, 1e30, 2.0**126):
            row_blocks_pair(x, "NVFP4", rule, device, global_scale=global_scale)
            row_blocks_pair(x.clamp(-6e4, 6e4).half(), "NVFP4", rule, device, global_scale=global_scale)
        offs = torch.tensor([7, 7, 30], dtype=torch.int32)
        row_blocks_pair(x, "NVFP4", rule, device, offs=offs)


@case
def global_scales(device: str) -> None:
    """The largest finite magnitudes next to Inf and NaN, of tensors, of groups of rows and of weights, and no values."""
    from padless.quantization.quantize import _nvfp4_global
    from padless.quantization.triton.global_scale import global_scale

    offs = torch.tensor([7, 7, 30], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = awkward((64, 322), dtype, 18)
        x[3, 200], x[41, 5] = -torch.finfo(dtype).max, float("-inf")
        nothing = torch.full_like(x, float("nan"))
        nothing[:, ::2] = float("inf")
        nothing[5, 6] = -0.0
        subnormal = torch.full_like(x, 3e-45 if dtype == torch.float32 else 1e-39)
        weights = torch.stack([x, nothing, x * 1e-4])
        for values in (x, x * 1e-4, x[7:30], nothing, subnormal, x[:, 1:301], x[:0], weights, weights[:, :37]):
            for groups in (None, offs) if values.dim() == 2 else (None,):
                for rule in ("te", "torchao"):
                    want = _nvfp4_global(values, rule, None, groups, False)
                    got = global_scale(values.to(device), rule, groups if groups is None else groups.to(device))
                    for a, b in zip(got, want, strict=True):
                        assert a.shape == b.shape
                        assert torch.equal(bits(a.reshape(-1)), bits(b.reshape(-1)))


@case
def given_global_scales(device: str) -> None:
    """The factors of known scales, one or one for each group, from the smallest float32 to the largest."""
    from padless.quantization.rules import nvfp4_factors
    from padless.quantization.triton.global_scale import given_factors

    edges = [2.0**-149, 2.0**-127, 2.0**-126, 1e-30, 0.01, 1 / 3, 1.0, 2688.0, 2.0**126, 3.4028234663852886e38]
    generator = torch.Generator().manual_seed(20)
    some = torch.exp2(240 * torch.rand(1050, generator=generator) - 120)
    scales = torch.cat([torch.tensor(edges), some * (1 + torch.rand(1050, generator=generator))])
    for rule in ("te", "torchao"):
        for given in (scales, scales[:7], scales[4], scales[3:4], scales[:0], scales[::3]):
            got = given_factors(given.to(device), rule)
            want = nvfp4_factors(rule, given, None)
            assert got.shape == want.shape
            assert torch.equal(bits(got.cpu()), bits(want))


@case
def whole_tiles_of_scales(device: str) -> None:
    """All bytes of tiles without padding are written: bytes that are allocated are set to 255 first."""
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        t = original(*args, **options)
        return t.fill_(255) if t.dtype == torch.uint8 else t

    x = awkward((2, 128, 256), torch.bfloat16, 19)
    with mock.patch.object(torch, "empty", empty):
        for name, rule in (("MXFP8", "rceil"), ("MXFP4", "floor"), ("NVFP4", "te")):
            row_blocks_pair(x, name, rule, device, kind="weight", scale_layout="blocked")
            for part in (x[0], x[0, :, :130], x[0, :127]):
                row_blocks_pair(part, name, rule, device, scale_layout="blocked")


@case
def fp4_alignments(device: str) -> None:
    """Rows that start on an odd 16-bit element, further apart than K, or whose columns are not adjacent."""
    for dtype in (torch.bfloat16, torch.float16):
        wide = awkward((9, 323), dtype, 15).to(device)
        for x in (wide[:, :272], wide[:, 1:273], wide.t()[:256, :8], wide[:, :322:2][:, :160]):
            for name, rule in (("MXFP4", "rceil"), ("NVFP4", "te")):
                row_blocks_pair(x, name, rule, device)


# --- NaN of both signs, quiet and signalling -------------------------------------------------------------

# Without the sign. Inf last.
PATTERNS = {
    torch.float32: (0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FBFFFFF, 0x7FC12345, 0x7F800000),
    torch.bfloat16: (0x7FC0, 0x7FFF, 0x7F81, 0x7FBF, 0x7FD2, 0x7F80),
    torch.float16: (0x7E00, 0x7FFF, 0x7C01, 0x7DFF, 0x7E43, 0x7C00),
}


def with_nans(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Ordinary numbers; in all rows but the first a NaN or an Inf of either sign, some alone in a row and some not."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator).to(dtype)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    sign = torch.tensor(-(1 << 31) if dtype == torch.float32 else -(1 << 15), dtype=word)
    patterns = torch.tensor(PATTERNS[dtype], dtype=word)
    patterns = torch.cat([patterns, patterns | sign])
    for row in range(1, rows):
        for _ in range(1 + row % 3):
            column = int(torch.randint(columns, (), generator=generator))
            x.view(word)[row, column] = patterns[(row + int(torch.randint(2, (), generator=generator))) % len(patterns)]
    return x


@case
def fp8_block_nans(device: str) -> None:
    for seed, dtype in enumerate(PATTERNS):
        x = with_nans(27, 257, dtype, 30 + seed)
        fp8_block_pair(x, "activation", "mn", device)
        fp8_block_pair(x.t(), "activation", "k", device)
        fp8_block_pair(x, "weight", "k", device)


def nans_of_row_blocks(name: str, dtype: torch.dtype, device: str, some_rules: tuple[str, ...]) -> None:
    """Two calls a rule: rows of 16-byte loads, and a transposed x whose rows start on odd elements where copied."""
    x = with_nans(29, 160, dtype, 33)
    for rule in some_rules:
        row_blocks_pair(x, name, rule, device)
        row_blocks_pair(x[:, 1:].t()[:, :28], name, rule, device)


@case
def row_block_nans(device: str) -> None:
    for name in ROW_FORMATS:
        for dtype in PATTERNS:
            nans_of_row_blocks(name, dtype, device, rules(name))
            x = with_nans(30, 161, dtype, 36).to(device)  # rows further apart, which start on odd elements
            row_blocks_pair(x[::2, 1:], name, rules(name)[0], device)


# --- speed -----------------------------------------------------------------------------------------------

SPEEDS = ("FP8_BLOCK", "FP8_BLOCK weight", "MXFP8", "MXFP4", "NVFP4")


def microseconds(call: Callable[[], object]) -> float:
    """Median time of call() on the GPU, in a CUDA graph of 20 calls so that launching costs nothing."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 20)
    return sorted(times)[7]


def bandwidth(name: str, rows: int = 16384, K: int = 7168) -> tuple[float, float]:
    """Bytes read and written a second by quantising bf16, and by torch's copy of as many; TB/s each.

    NVFP4 is given its global scale: without it the input is read twice.
    """
    from padless import formats
    from padless.quantization.quantize import quantize

    fmt = getattr(formats, name.split()[0])
    kind = "weight" if name.endswith("weight") else "activation"
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    options = {"global_scale": torch.ones((), device="cuda")} if name == "NVFP4" else {}
    t = quantize(x, fmt, kind=kind, **options)
    moved = x.nbytes + t.data.nbytes + t.scale.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    quantized = moved / microseconds(lambda: quantize(x, fmt, kind=kind, **options))
    return quantized / 1e6, 2 * source.nbytes / microseconds(lambda: target.copy_(source)) / 1e6


if __name__ == "__main__":
    main(CASES)
