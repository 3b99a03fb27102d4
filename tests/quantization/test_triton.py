"""The Triton quantisers: equal to the torch ones in the interpreter and on a GPU, well compiled, and fast."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
import pytest
import torch

from support import triton_cases
from support.interpreter import interpreted

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from padless.quantization.triton import casts  # noqa: E402


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every case in Triton's interpreter, from one process of its own."""
    return interpreted("triton_cases.py")


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", triton_cases.CASES)
def test_on_the_gpu(name: str) -> None:
    triton_cases.CASES[name]("cuda")


@pytest.mark.gpu
def test_quantize_uses_triton_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from padless import formats
    from padless.quantization.quantize import quantize
    from padless.quantization.triton import fp8_block as quantize_triton
    from padless.quantization.triton import row_blocks as quantize_triton_rows

    called = []

    def spy(module: object, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: called.append(name) or original(*args))

    spy(quantize_triton, "fp8_block")
    spy(quantize_triton_rows, "row_blocks")
    x = torch.randn(33, 256, device="cuda")
    for fmt in formats.FORMATS:
        triton_cases.assert_same(quantize(x, fmt), quantize(x.cpu(), fmt))
    assert called == ["fp8_block"] + ["row_blocks"] * 4


@pytest.mark.gpu
def test_software_casts_are_the_hardware_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integer casts that older GPUs and the interpreter use, on the GPU."""
    from padless.quantization.triton import casts as triton_casts

    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: False)
    triton_cases.fp8_block_code_boundaries("cuda")
    triton_cases.fp8_block_weights("cuda")
    triton_cases.mx_code_boundaries("cuda")
    triton_cases.CASES["nvfp4_te"]("cuda")


@triton.jit
def usual_reciprocals(x_ptr, y_ptr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y_ptr + i, casts.usual_reciprocal(tl.load(x_ptr + i)))


@pytest.mark.gpu
def test_usual_reciprocals() -> None:
    """Every float32 from 2^-126 to below 2^126: one step of Newton from the approximation is the rounded reciprocal."""
    mantissas = torch.arange(1 << 23, device="cuda", dtype=torch.int32)
    one = torch.ones((), device="cuda")  # torch divides by a number with its reciprocal
    for exponent in range(1, 253):
        x = (mantissas + (exponent << 23)).view(torch.float32)
        y = torch.empty_like(x)
        usual_reciprocals[(1 << 13,)](x, y)
        assert torch.equal(y, one / x), exponent


@pytest.mark.gpu
def test_torch_definitions_are_the_same_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `quantize` does for CUDA tensors where Triton is missing."""

    from padless import formats

    module = sys.modules["padless.quantization.quantize"]
    x = triton_cases.awkward((70, 160), torch.bfloat16, 3)
    want = [module.quantize(x, fmt) for fmt in formats.FORMATS]
    monkeypatch.setattr(module, "has_triton", lambda: False)
    for fmt, expected in zip(formats.FORMATS, want, strict=True):
        triton_cases.assert_same(module.quantize(x.cuda(), fmt), expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", triton_cases.SPEEDS)
def test_at_least_85_percent_of_a_copy(name: str) -> None:
    quantized, copied = triton_cases.bandwidth(name)
    assert quantized >= 0.85 * copied, f"{quantized:.2f} TB/s, where a copy makes {copied:.2f}"


# --- the packing of e2m1 codes, whose instructions no interpreter runs -----------------------------------


def run_ptx(lines: list[str], operands: dict[str, np.ndarray]) -> np.ndarray:
    """The few instructions of triton_casts' packing on arrays of 32-bit registers."""
    registers = {k: v if v.dtype == np.uint32 else v.astype(np.float32).view(np.uint32) for k, v in operands.items()}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    def number(name: str) -> np.ndarray:
        return value(name).view(np.float32).astype(np.float64)

    def bits(x: np.ndarray) -> np.ndarray:
        return np.asarray(x, dtype=np.float64).astype(np.float32).view(np.uint32)

    def saturated(x: np.ndarray) -> np.ndarray:
        return np.clip(np.nan_to_num(x.astype(np.float32), nan=0.0), 0.0, 1.0)

    def permuted(a: str, b: str, selector: str) -> np.ndarray:
        pool = value(a).astype(np.uint64) | value(b).astype(np.uint64) << np.uint64(32)
        picks = [int(selector, 16) >> 4 * i & 7 for i in range(4)]
        taken = [(pool >> np.uint64(8 * pick) & np.uint64(0xFF)) << np.uint64(8 * i) for i, pick in enumerate(picks)]
        return sum(taken).astype(np.uint32)

    logic = {"0xF8": lambda a, b, c: a | (b & c), "0xE4": lambda a, b, c: (a & c) | (b & ~c)}
    # Sums and products here are exact in float64, so that converting to float32 is the one rounding.
    meaning = {
        "mov.b32": value,
        "abs.f32": lambda a: bits(abs(number(a))),
        "add.rn.f32": lambda a, b: bits(number(a) + number(b)),
        "add.rn.sat.f32": lambda a, b: bits(saturated(number(a) + number(b))),
        "fma.rn.f32": lambda a, b, c: bits(number(a) * number(b) + number(c)),
        "mad.lo.u32": lambda a, b, c: value(a) * value(b) + value(c),
        "sub.u32": lambda a, b: value(a) - value(b),
        "shf.l.wrap.b32": lambda a, b, c: (value(b) << value(c)) | (value(a) >> (np.uint32(32) - value(c))),
        "lop3.b32": lambda a, b, c, table: logic[table](value(a), value(b), value(c)),
        "mul.rn.sat.f32": lambda a, b: bits(saturated(number(a) * number(b))),
        "min.s32": lambda a, b: np.minimum(value(a).view(np.int32), value(b).view(np.int32)).view(np.uint32),
        "shl.b32": lambda a, b: value(a) << value(b),
        "shr.u32": lambda a, b: value(a) >> value(b),
        "and.b32": lambda a, b: value(a) & value(b),
        "prmt.b32": permuted,
    }
    for line in lines:
        operation, rest = line.rstrip(";").split(" ", 1)
        if operation != ".reg":
            target, *sources = [word.strip() for word in rest.split(",")]
            with np.errstate(invalid="ignore"):
                registers[target] = np.asarray(meaning[operation](*sources), dtype=np.uint32)
    return registers["$0"]


def test_e2m1_instructions_round_and_pack() -> None:
    """All decision points, their float32 neighbours, huge values and NaN, in each of the eight places."""
    from padless import layouts
    from padless.quantization import rules as quantize_rules
    from padless.quantization.triton import casts as triton_casts

    values = triton_cases.around(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]), 7.0)
    generator = torch.Generator().manual_seed(1)
    many = [values, torch.tensor([6.5, -1e38, float("inf"), 1e-45, -1e-45, float("nan")])]
    many.append(torch.randn(20000, generator=generator) * 3)
    values = torch.cat(many)
    values = values[torch.randint(values.numel(), (8, 30000), generator=generator)]
    lines = triton_casts._e2m1_asm().strip("{}").split("\n")
    packed = run_ptx(lines, {f"${1 + i}": (values[i] / 2).numpy() for i in range(8)})
    # $1..$4 are the low nibbles of bytes 0..3, $5..$8 the high ones.
    in_memory = values[[0, 4, 1, 5, 2, 6, 3, 7]].t().contiguous()
    want = layouts.pack_fp4(quantize_rules.to_e2m1(in_memory)).view(torch.uint8)
    assert packed.astype("<u4").view(np.uint8).reshape(-1, 4).tolist() == want.tolist()


def test_scaled_words_round_and_pack() -> None:
    """The same points as products of a power of two in bf16 and a float32, in each of the eight places; and no signs."""
    from padless import layouts
    from padless.quantization import rules as quantize_rules
    from padless.quantization.triton import casts as triton_casts

    points = triton_cases.around(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]), 7.0).abs()
    generator = torch.Generator().manual_seed(2)
    many = [points, torch.tensor([6.5, 8.0, 1e4, 1e38, float("inf"), 1e-36, float("nan")])]
    many.append((torch.randn(20000, generator=generator) * 3).abs())
    multipliers = torch.cat(many)
    multipliers = multipliers[torch.randint(multipliers.numel(), (4, 40000), generator=generator)]
    powers = torch.tensor([1.0, -1.0, 2.0, -0.5, 1.5, -1.25, 0.0, -0.0])
    x = powers[torch.randint(8, (4, 2, 40000), generator=generator)]
    words = x.bfloat16().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
    operands = {f"${1 + i}": words[i, 0] | words[i, 1] << np.uint32(16) for i in range(4)}
    operands |= {f"${5 + i}": (multipliers[i] / 8).numpy() for i in range(4)}
    lines = triton_casts._e2m1_scaled_words_asm("bf16").strip("{}").split("\n")
    products = (x * multipliers[:, None]).reshape(8, -1).t().contiguous()
    signless = quantize_rules.to_e2m1(products.abs())  # a NaN has code 0, with the sign of x where the mask lets it
    signs = x.reshape(8, -1).t().signbit().to(torch.uint8) << 3
    for word in range(4):  # and the signs of one word masked out
        masks = {f"${9 + i}": np.full(40000, 0 if i == word else 0x88888888, np.uint32) for i in range(4)}
        packed = run_ptx(lines, operands | masks)
        kept = signs.clone()
        kept[:, 2 * word : 2 * word + 2] = 0
        want = layouts.pack_fp4((signless | kept).contiguous()).view(torch.uint8)
        assert packed.astype("<u4").view(np.uint8).reshape(-1, 4).tolist() == want.tolist()


# --- what the compiler makes of them, without a GPU ------------------------------------------------------


def compile_for_sm90(kernel: object, types: dict[str, str], constants: dict[str, object], num_warps: int) -> set[str]:
    """Mnemonics in the PTX of a kernel whose pointers and integers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    return set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE))


def assert_ieee_and_wide(instructions: set[str]) -> None:
    """No division but correctly rounded ones, subnormals kept, 16-byte loads."""
    assert not [i for i in instructions if ".ftz" in i or i.startswith(("div.full", "div.approx", "rcp.approx"))]
    assert "ld.global.v4.b32" in instructions


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("input_type", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_compiled_fp8_block(kind: str, input_type: str) -> None:
    from padless.quantization.triton import fp8_block as quantize_triton

    if kind == "activation":
        kernel = quantize_triton._fp8_block_activation
        types = dict.fromkeys(["M", "K", "x_stride", "scale_rows", "scale_stride_m", "scale_stride_k"], "i32")
        types["x_rows"] = "i32"
        constants = {
            "BLOCK_M": 64 if input_type == "bf16" else 32,
            "FACTOR": 1.0,
            "HARDWARE_CAST": True,
            "rows_ptr": None,
        }
    else:
        kernel = quantize_triton._fp8_block_weight
        types = dict.fromkeys(["N", "K", "x_stride_g", "x_stride_n"], "i32")
        constants = {"HARDWARE_CAST": True}
    types |= {"x_ptr": f"*{input_type}", "codes_ptr": "*u8", "scale_ptr": "*fp32"}
    instructions = compile_for_sm90(kernel, types, constants, 4 if kind == "activation" else 8)
    assert_ieee_and_wide(instructions)
    assert "cvt.rn.satfinite.e4m3x2.f32" in instructions
    assert "st.global.v4.b32" in instructions
    assert not [i for i in instructions if i.startswith("fma")]


ROWS_TYPES = {
    **dict.fromkeys(["codes_ptr", "scale_ptr"], "*u8"),
    "factors_ptr": "*fp32",
    **dict.fromkeys(["group_ptr", "scale_row_ptr"], "*i64"),
    **dict.fromkeys(
        ["rows", "K", "x_stride", "scale_columns", "rows_per_group", "scale_rows_per_group", "x_rows"], "i32"
    ),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("element", "block", "rule", "words", "x_type", "cast"),
    [
        ("e4m3", 32, "rceil", "none", "*bf16", "cvt.rn.satfinite.e4m3x2.f32"),
        ("e5m2", 32, "rceil", "none", "*fp32", "cvt.rn.satfinite.e5m2x2.f32"),
        ("e2m1", 32, "rceil", "bf16", "*i32", "fma.rn.relu.bf16x2"),
        ("e2m1", 32, "rceil", "fp16", "*i32", "mul.rn.sat.f32"),
        ("e2m1", 16, "te", "bf16", "*i32", "mul.rn.sat.f32"),
        ("e2m1", 16, "torchao", "none", "*fp32", "add.rn.sat.f32"),
    ],
)
def test_compiled_row_blocks(element: str, block: int, rule: str, words: str, x_type: str, cast: str) -> None:
    from padless.quantization.triton import row_blocks as quantize_triton_rows

    constants = {
        "rows_ptr": None,
        "ELEMENT": element,
        "BLOCK": block,
        "WORDS": words,
        "RULE": rule,
        "EMAX": 2,
        "MAX_MANTISSA": 0x400000,
        "FACTORS": "one",
        "SCALE_LAYOUT": "plain",
        "HARDWARE_CAST": True,
        "BLOCK_M": 32 if x_type == "*fp32" else 64,
        "BLOCK_K": 128,
    }
    types = {"x_ptr": x_type, **ROWS_TYPES}
    instructions = compile_for_sm90(quantize_triton_rows._row_blocks, types, constants, 4)
    if rule == "te":
        instructions.remove("rcp.approx.ftz.f32")  # made correct: test_usual_reciprocals
    assert_ieee_and_wide(instructions)
    assert cast in instructions
    # Contracting value * multiplier into the next operation would round once where the definition rounds
    # twice.
    assert not [i for i in instructions if i.startswith("fma") and element != "e2m1"]
