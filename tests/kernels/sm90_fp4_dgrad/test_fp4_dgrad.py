"""Gradients through FP4 weights: the kernel in the emulator bit for bit, and what the call leaves to others.

What would convince a sceptic:

* values of the weights from a table of E2M1 and the bytes of the scales, not from this package's conversions;
* every row and every group within its rounding of the product in float64, not a norm over all of them;
* the bits of the tensor core's sums, with empty groups, groups of one row, tails of N and of K, rows past the last
  group, in every tile and with few stages, scales of the smallest and the largest size, on many schedules;
* nothing written but those rows (poison around and behind them), and NaN in all other rows without influence;
* planted bugs (test_fp4_dgrad_bugs.py), each of which one of these tests, or a report of the emulator, has to find.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless import MXFP8, grouped_gemm, quantize
from padless.formats import BlockScaledTensor
from padless.kernels.sm90_fp4_dgrad.config import BLOCKS_M, Fp4DgradConfig
from padless.nn.lora import frozen
from padless.ops.fp4_input_gradient import fp4_input_gradient, reads_codes
from padless.quantization.quantize import dequantize
from padless.reference.fp4_input_gradient import fp4_input_gradient_reference
from padless.runtime.devices import backend_on_cpu
from padless.testing.bits import same_bits
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify.checks import Check
from padless.verify.fuzz import input_gradients
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import check_of
from padless.verify.run import jobs_of
from support.bf16_problems import Shape
from support.fp4_dgrad_problems import EMULATOR, SCALES, Problem, launched, random_problem

FORMATS, CALL = ("MXFP4", "NVFP4"), "fp4_input_gradient"
# An empty group, one of two tiles, one of one row; the second tile of columns has some for one warpgroup alone.
SHAPE = Shape((33, 0, 130, 1), 3, 136, 352)
SMALL = Shape((5, 0, 17, 1), 2, 72, 96)
# Row-major scales of whole 16 bytes, which are read where they are; others are copied into tiles.
WHOLE = {"MXFP4": Shape((5, 0, 17, 1), 2, 136, 512), "NVFP4": Shape((5, 0, 17, 1), 2, 72, 512)}


def errors(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """Of each row, the largest error over what rounding explains: half a bfloat16 ulp, and the sums' truncations."""
    exact = problem.exact()
    steps = problem.dy.shape[1] / 16 + 2
    allowed = exact.abs() * 2.0**-8 + problem.sizes() * steps * 2.0**-23 + 2.0**-134
    return ((out.double() - exact).abs() / allowed).amax(1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block_m", [pytest.param(m, marks=() if m == 128 else pytest.mark.slow) for m in BLOCKS_M])
def test_bits_are_the_tensor_cores(format: str, block_m: int) -> None:
    problem = random_problem(format, SHAPE, globals_each=True)
    out = launched(problem, Fp4DgradConfig(format, block_m=block_m))
    assert same_bits(out, problem.wanted())
    assert bool((errors(problem, out) <= 1.0).all())


@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_all_sizes(scales: str) -> None:
    problem = random_problem(scales if scales == "NVFP4" else "MXFP4", SMALL, 1, scales=scales)
    out = launched(problem)
    assert same_bits(out, problem.wanted())
    assert bool((errors(problem, out) <= 1.0).all())


@pytest.mark.parametrize("format", FORMATS)
def test_scales_in_rows_and_in_tiles(format: str) -> None:
    for shape in (WHOLE[format], SMALL):
        problem = random_problem(format, shape, 2)
        assert same_bits(launched(problem), problem.wanted())
        assert same_bits(launched(problem.blocked()), problem.wanted())


@pytest.mark.parametrize("format", FORMATS)
def test_a_scale_that_is_nan_makes_its_columns_nan(format: str) -> None:
    problem = random_problem(format, SMALL, 3)
    block = 96 // problem.weights.scale.shape[2]
    problem.weights.scale.view(torch.uint8)[2, 70, 1] = 0x7F if format == "NVFP4" else 0xFF
    is_nan = torch.zeros(23, 96, dtype=torch.bool)
    is_nan[5:22, block : 2 * block] = True
    assert torch.equal(launched(problem).isnan(), is_nan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_bits_in_random_problems(seed: int) -> None:
    """Sizes, N, K, scales, tile, stages and schedule at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    format = FORMATS[seed % 2]
    sizes = (draw(1, 150), *(draw(0, 200) * draw(0, 2) for _ in range(draw(0, 4))))
    k = 512 * draw(1, 3) if draw(0, 2) else 32 * draw(1, 20)
    shape = Shape(sizes, draw(0, 20), 8 * draw(1, 40), k)
    scales = format if format == "NVFP4" or draw(0, 2) else "largest"
    problem = random_problem(format, shape, seed, scales=scales, globals_each=bool(draw(0, 2)))
    problem = problem.blocked() if draw(0, 2) else problem
    config = Fp4DgradConfig(format, block_m=BLOCKS_M[seed % 3], num_stages=draw(2, 5), raster_m=draw(1, 5))
    out = launched(problem, config, seed=seed, num_sms=draw(1, 5))
    assert same_bits(out, problem.wanted())
    assert bool((errors(problem, out) <= 1.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_no_report_on_sixteen_schedules(format: str) -> None:
    problem = random_problem(format, Shape((130, 0, 40), 3, 200, 352), 6)
    wanted = None
    for seed in range(16):
        config = Fp4DgradConfig(format, block_m=BLOCKS_M[seed % 3], num_stages=2 + seed % 2)
        out = launched(problem, config, seed=seed, num_sms=1 + seed % 3, arithmetic="fast")
        wanted = out if wanted is None else wanted
        assert same_bits(out, wanted)


def test_other_rows_have_no_influence() -> None:
    """NaN in all rows but one group's; and the group alone."""
    problem = random_problem("MXFP4", SMALL, 4)
    out = launched(problem)
    start, end = problem.groups[2]
    dy = torch.full_like(problem.dy, float("nan"))
    dy[start:end] = problem.dy[start:end]
    others = launched(replace(problem, dy=dy))
    assert same_bits(others[start:end], out[start:end])
    assert bool(others[:start].isnan().all())
    ends = torch.tensor([end - start], dtype=torch.int32)
    alone = fp4_input_gradient(dy[start:end], problem.weights[2:3], ends, backend=EMULATOR)
    assert same_bits(alone, out[start:end])


@pytest.mark.parametrize("offs", [[100, 10, -5, 70], [2**31 - 1] * 4])
def test_wrong_offsets_stay_inside(offs: list[int]) -> None:
    problem = replace(random_problem("NVFP4", SMALL, 7), offs=torch.tensor(offs, dtype=torch.int32))
    assert same_bits(launched(problem), problem.wanted())


@pytest.mark.slow
def test_more_groups_than_lanes_and_threads() -> None:
    problem = random_problem("MXFP4", Shape(tuple(int(g % 13 == 5) for g in range(390)), 0, 16, 32), 9)
    assert same_bits(launched(problem), problem.wanted())


@pytest.fixture
def one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of `padless verify` on one fixed problem of one kernel."""
    one = {"b": "NVFP4", "b_layout": "plain", "tile": 1, "properties": ["near", "bits", "changes"]}
    lines = [o for o in input_gradients.lines("sm_90a") if one.items() <= o.items() and len(o["sizes"]) == 4][:1]
    lines = [o | {"sizes": [5, 0, 17, 1], "n": 96, "k": 72, "properties": ["near", "bits"]} for o in lines]
    monkeypatch.setitem(SUBJECTS, CALL, replace(SUBJECTS[CALL], lines=lambda arch: lines))


@pytest.mark.slow
@pytest.mark.usefixtures("one_problem")
def test_the_check_of_a_gpu_passes_in_the_emulator() -> None:
    assert "elements" in check_of(CALL).on(EMULATOR)


@pytest.mark.usefixtures("one_problem")
def test_an_element_that_is_a_bit_off_fails_the_check_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp4_input_gradient

    def off(dy: torch.Tensor, *operands: Any, out: torch.Tensor, **how: Any) -> Any:
        made = right(dy, *operands, out=out, **how)
        if dy.shape[0] > 1:
            out.view(torch.int16)[1, 2] ^= 1
        return made

    monkeypatch.setattr(input_gradients, "fp4_input_gradient", off)
    with pytest.raises(AssertionError, match=r"sizes=\[5, 0, 17, 1\].* the reference's bits"):
        check_of(CALL).on(EMULATOR)


@pytest.mark.slow
def test_all_kernels_of_the_check_are_compiled_ahead() -> None:
    jobs, sanitized = jobs_of("sm_90a")
    assert f"padless.verify.lines {CALL}" in sanitized
    check = jobs["FP4 input gradients"]
    assert isinstance(check, Check)
    asked, problems = kernels_of(check.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert not problems
    wanted = {
        Fp4DgradConfig(f, block_m=m, blocked=b).prelude() for f in FORMATS for m in BLOCKS_M for b in (False, True)
    }
    assert wanted <= {kernel.prelude for kernel in asked}


# ------------------------------------------------------------------------------------------------ the call


def test_mxfp4_has_the_bits_of_the_product_with_dequantized_weights() -> None:
    problem = random_problem("MXFP4", SMALL, 10)
    values = dequantize(problem.weights, torch.bfloat16).transpose(1, 2)
    dequantized = grouped_gemm(problem.dy, values, problem.offs, backend=EMULATOR)
    assert same_bits(launched(problem), dequantized[: problem.last])


@pytest.mark.parametrize("format", FORMATS)
def test_on_the_cpu_it_is_the_reference(format: str) -> None:
    problem = random_problem(format, SMALL, 16, globals_each=True)
    for each in (problem, problem.blocked()):
        out = fp4_input_gradient(each.dy, each.weights, each.offs)[: problem.last]
        assert bool((errors(problem, out) <= 1.0).all())
        bits = fp4_input_gradient_reference(each.dy, each.weights, each.offs, accumulation="tensor_core")
        assert same_bits(bits[: problem.last], problem.wanted())


@pytest.mark.parametrize("format", FORMATS)
def test_frozen_experts_take_it_on_hopper_alone(format: str) -> None:
    problem = random_problem(format, SMALL, 11)
    operands = (problem.dy, problem.weights)
    assert reads_codes(*operands, EMULATOR)
    with backend_on_cpu(EMULATOR):
        assert same_bits(frozen.input_gradient(*operands, problem.offs)[: problem.last], problem.wanted())
    assert not any(reads_codes(*operands, backend) for backend in (None, "reference", "emulator:sm_100a"))
    with pytest.raises(ValueError, match=rf"no kernel reads the codes of weights {format} \(4, 72, 96\) .* for sm_90a"):
        fp4_input_gradient(*operands, problem.offs, backend="emulator:sm_100a")
    right = frozen.dequantized_input_gradient(*operands, problem.offs)
    assert same_bits(frozen.input_gradient(*operands, problem.offs)[: problem.last], right[: problem.last])


def test_what_the_kernel_does_not_read_is_left_to_others() -> None:
    problem = random_problem("MXFP4", SMALL, 12)

    def is_read(dy: torch.Tensor, weights: BlockScaledTensor = problem.weights) -> bool:
        return reads_codes(dy, weights, EMULATOR)

    dy = problem.dy
    assert is_read(dy)
    assert is_read(torch.cat([dy, dy], 1)[:, 72:]), "rows of twice the length, on 16 bytes"
    assert not is_read(torch.cat([dy[:, :4], dy], 1)[:, 4:]), "address and strides of dy"
    assert not is_read(dy[:, :68].contiguous(), _first_rows(problem.weights, 68)), "N"
    odd = random_problem("NVFP4", Shape((5,), 0, 16, 48))
    assert not is_read(odd.dy, odd.weights), "rows of 24 bytes"
    mxfp8 = quantize(torch.randn(4, 72, 96), MXFP8, kind="weight")
    assert not is_read(dy, mxfp8), "MXFP8"


def _first_rows(weights: BlockScaledTensor, rows: int) -> BlockScaledTensor:
    data, scale = weights.data[:, :rows].contiguous(), weights.scale[:, :rows].contiguous()
    return BlockScaledTensor(data, scale, weights.format, weights.global_scale)


def test_without_rows_or_groups_nothing_is_written() -> None:
    problem = random_problem("MXFP4", SMALL, 13)
    out = torch.full((25, 96), -7.5, dtype=torch.bfloat16)
    for rows, groups in ((0, 4), (25, 0)):
        weights, offs = problem.weights[:groups], torch.zeros(groups, dtype=torch.int32)
        given = out[:rows]
        assert fp4_input_gradient(problem.dy[:rows], weights, offs, out=given, backend=EMULATOR) is given
    assert bool((out == -7.5).all())


@pytest.mark.parametrize(
    "out",
    [torch.empty(25, 96), torch.empty(24, 96, dtype=torch.bfloat16), torch.empty(96, 25, dtype=torch.bfloat16).t()],
)
def test_an_output_that_is_not_allowed_is_named(out: torch.Tensor) -> None:
    problem = random_problem("MXFP4", SMALL, 14)
    with pytest.raises(ValueError, match=r"out must be \(M, K\) = \(25, 96\) bfloat16, contiguous along K"):
        fp4_input_gradient(problem.dy, problem.weights, problem.offs, out=out, backend=EMULATOR)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_stage_is_read_before_it_is_filled_again(format: str) -> None:
    """1,000 calls with two stages, where the next fill follows soonest, have the bits of one with as many as fit."""
    sizes = tuple(97 + 5 * (g % 31) for g in range(64))
    problem = random_problem(format, Shape(sizes, 0, 1536, 2048), 15)
    dy, weights, offs = problem.dy.cuda(), problem.weights.to("cuda"), problem.offs.cuda()
    out = torch.empty((problem.last, 2048), dtype=torch.bfloat16, device="cuda")
    want = fp4_input_gradient(dy, weights, offs)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out.fill_(float("nan"))
        fp4_input_gradient(dy, weights, offs, out=out, config=Fp4DgradConfig(format, num_stages=2))
        wrong += (out.view(torch.int16) != want.view(torch.int16)).any()
    assert wrong.item() == 0, f"{wrong.item()} of 1000 calls"
