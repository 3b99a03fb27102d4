"""The Triton kernels of the Mixture-of-Experts layer against their torch twins, bit for bit, on any device.

`test_moe_triton.py` runs every case on a GPU where there is one, and everywhere in Triton's interpreter.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from padless.moe import Activation
from support.interpreter import Cases, main
from support.triton_cases import assert_same, awkward, bits

CASES = Cases()
case = CASES.add

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw_ids(tokens: int, top_k: int, num_experts: int, seed: int, *, distinct: bool = False) -> torch.Tensor:
    """(T, k) int64 ids, some of them below 0 and from num_experts on; distinct: without those, and without repeats."""
    generator = torch.Generator().manual_seed(seed)
    if distinct:
        return torch.rand((tokens, num_experts), generator=generator).argsort(dim=1)[:, :top_k]
    ids = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    chance = torch.rand(ids.shape, generator=generator)
    ids[chance < 0.05] = num_experts
    ids[(chance > 0.05) & (chance < 0.08)] = -1
    ids[(chance > 0.08) & (chance < 0.1)] = 2**31 + 7
    return ids


def same_values(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal in every bit, but that a NaN is any NaN."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    got = got.cpu()
    nan = got.isnan()
    assert torch.equal(nan, want.isnan()), "other values are NaN"
    wrong = (bits(got) != bits(want)).view(*want.shape, -1).any(-1) & ~nan
    assert not wrong.any(), f"{int(wrong.sum())} values differ, the first at {wrong.nonzero()[0].tolist()}"


# --- route -----------------------------------------------------------------------------------------------


def route_pair(ids: torch.Tensor, num_experts: int, device: str) -> None:
    from padless.moe import twins
    from padless.moe.triton import route

    want = twins.route(ids, num_experts)
    got = route.route(ids.to(device).contiguous(), num_experts)
    for name, one, other in zip(("offs", "tokens", "inverse"), got, want, strict=True):
        assert one.dtype == other.dtype == torch.int32
        assert torch.equal(one.cpu(), other), name


@case
def route_few(device: str) -> None:
    """One launch: from one slot to a thousand, k from 1 to 16."""
    for seed, (tokens, top_k, experts) in enumerate(((1, 1, 1), (3, 16, 33), (66, 8, 20))):
        ids = draw_ids(tokens, top_k, experts, seed)
        route_pair(ids, experts, device)
    route_pair(ids.clamp(-5, 2**30).to(torch.int32), experts, device)


@case
def route_many_experts(device: str) -> None:
    """One launch, and three: 8192 bins."""
    route_pair(draw_ids(9, 4, 1025, 1), 1025, device)
    ids = draw_ids(2050, 2, 4096, 3)
    ids[:3] = torch.tensor([[4095, 1023], [4096, 1024], [2048, 4095]])
    route_pair(ids, 4096, device)


@case
def route_all_to_one(device: str) -> None:
    for expert in (0, 2, -1, 9):
        route_pair(torch.full((65, 2), expert), 3, device)


@case
def route_many(device: str) -> None:
    """Three launches; 512 experts; counts of tiles at once, and in several steps."""
    from padless.moe.triton import route

    assert route.FEW_SLOTS < 513 * 8
    route_pair(draw_ids(513, 8, 512, 50), 512, device)
    with mock.patch.object(route, "SCANNED", 8):
        route_pair(draw_ids(1031, 4, 3, 51), 3, device)


@case
def route_large(device: str) -> None:
    """Sizes that the interpreter takes long for."""
    if device == "cpu":
        return
    for seed, (tokens, top_k, experts) in enumerate(
        ((64, 8, 512), (512, 8, 256), (4097, 1, 512), (8192, 8, 128), (65536, 8, 256), (300000, 1, 1000))
    ):
        route_pair(draw_ids(tokens, top_k, experts, 60 + seed), experts, device)
    route_pair(torch.full((8192, 8), 3), 128, device)


# --- quantization ----------------------------------------------------------------------------------------

FORMATS = ("FP8_BLOCK", "MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4")


def rules(name: str) -> tuple[str, ...]:
    from padless import formats
    from padless.quantization.quantize import SCALE_RULES

    return SCALE_RULES[getattr(formats, name)] or ("",)


def quantized(x: torch.Tensor, name: str, rule: str, layout: str, **how: object) -> object:
    """The Triton kernel's BlockScaledTensor; how: as its function has it, with `given`, a global scale."""
    from padless import formats
    from padless.moe.triton.quantize_rows import quantize_rows
    from padless.quantization.triton.global_scale import given_factors

    given = how.pop("given", None)
    factors = None if given is None else given_factors(given.to(x.device), rule)
    moved = {key: v.to(x.device) if isinstance(v, torch.Tensor) else v for key, v in how.items()}
    fmt = getattr(formats, name)
    data, scale = quantize_rows(x, fmt, scale_rule=rule, scale_layout=layout, factors=factors, **moved)
    return formats.BlockScaledTensor(data, scale, fmt, None if given is None else given.to(x.device), layout)


def gathered_by_kernel(
    x: torch.Tensor,
    name: str,
    rule: str,
    layout: str,
    rows: torch.Tensor,
    given: torch.Tensor | None,
    offs: torch.Tensor | None = None,
) -> object:
    """The quantizers' own kernels with the rows of x to read."""
    from padless import formats
    from padless.quantization.triton.fp8_block import fp8_block
    from padless.quantization.triton.global_scale import given_factors
    from padless.quantization.triton.row_blocks import row_blocks

    rows = rows.to(x.device)
    if name == "FP8_BLOCK":
        return fp8_block(x, "activation", "mn", rows)
    given = None if given is None else given.to(x.device)
    factors = None if given is None else given_factors(given, rule)
    offs = None if offs is None else offs.to(x.device)
    fmt = getattr(formats, name)
    data, scale = row_blocks(x, fmt, rule, layout, offs, factors, rows)
    return formats.BlockScaledTensor(data, scale, fmt, given, layout)


def layouts_of(name: str) -> tuple[str, ...]:
    return ("plain",) if name == "FP8_BLOCK" else ("plain", "blocked")


def given_scale(name: str) -> torch.Tensor | None:
    return torch.tensor(0.003) if name == "NVFP4" else None


def add_gather_cases(name: str) -> None:
    """Gathered by rows, and scattered by inverse, against quantize of the gathered rows."""

    def gathered(device: str) -> None:
        from padless import formats
        from padless.quantization.quantize import quantize
        from padless.quantization.triton.fp8_block import fp8_block

        fmt = getattr(formats, name)
        for seed, (dtype, rule) in enumerate(zip(DTYPES, rules(name) * 3, strict=False)):
            x = awkward((19, 290 if seed == 0 else 144), dtype, seed)
            rows = torch.randint(-3, 25, (37,), generator=torch.Generator().manual_seed(seed))
            inside = rows.clamp(0, 18)
            for layout in layouts_of(name):
                options = {"scale_rule": rule or None, "scale_layout": layout, "global_scale": given_scale(name)}
                want = quantize(x[inside], fmt, **options)
                got = gathered_by_kernel(x.to(device), name, rule, layout, rows.int(), given_scale(name))
                assert_same(got, want)
                assert_same(quantize(x, fmt, rows=rows, **options), want)
            if name == "FP8_BLOCK":
                got = fp8_block(x.to(device), "activation", "k", rows.to(device))
                assert_same(got, quantize(x[inside], fmt, scale_major="k"))
        offs = torch.tensor([4, 4, 20, 30], dtype=torch.int32)
        x, rows = awkward((19, 290), torch.bfloat16, 20), torch.arange(37) % 19
        if name == "NVFP4":
            given = torch.tensor([0.01, 1.0, 0.0004, 3.0])
            want = quantize(x[rows], fmt, global_scale=given, offs=offs)
            got = gathered_by_kernel(x.to(device), name, "te", "plain", rows, given, offs)
            assert_same(got, want)
        if name != "FP8_BLOCK":
            options = {"scale_layout": "blocked_groups", "offs": offs, "global_scale": given_scale(name)}
            want = quantize(x[rows], fmt, **options)
            rule = rules(name)[0]
            given = given_scale(name)
            got = gathered_by_kernel(x.to(device), name, rule, "blocked_groups", rows, given, offs)
            assert_same(got, want)

    def scattered(device: str) -> None:
        from padless import formats
        from padless.moe import twins
        from padless.quantization.quantize import quantize

        fmt = getattr(formats, name)
        for seed, (dtype, tokens, top_k, k) in enumerate(
            (
                (torch.bfloat16, 1, 1, 32),
                (torch.bfloat16, 9, 3, 290),
                (torch.float16, 2, 16, 144),
                (torch.float32, 7, 2, 144),
            )
        ):
            x = awkward((tokens, k), dtype, seed)
            _, rows, inverse = twins.route(draw_ids(tokens, top_k, 5, seed), 5)
            for rule in rules(name)[seed % len(rules(name)) :][:1]:
                for layout in layouts_of(name):
                    options = {"scale_rule": rule or None, "scale_layout": layout, "global_scale": given_scale(name)}
                    want = quantize(x[rows.long()], fmt, **options)
                    got = quantized(x.to(device), name, rule, layout, inverse=inverse, given=given_scale(name))
                    assert_same(got, want)

    gathered.__name__ = f"gathered_{name.lower()}"
    scattered.__name__ = f"scattered_{name.lower()}"
    case(gathered)
    case(scattered)


for name_ in FORMATS:
    add_gather_cases(name_)


@case
def placed_scales(device: str) -> None:
    """Scales by a launch of their own: more rows than a tile of them, slots of no expert, columns left over."""
    from unittest import mock

    from padless import FP8_BLOCK
    from padless.moe import twins
    from padless.moe.triton import quantize_rows
    from padless.quantization.quantize import quantize
    from support.training_quantizer_cases import poisoned_memory

    for seed, (tokens, top_k, k) in enumerate(((45, 3, 672), (50, 5, 2304))):
        x = awkward((tokens, k), torch.bfloat16, seed)
        _, rows, inverse = twins.route(draw_ids(tokens, top_k, 5, seed), 5)
        want = quantize(x[rows.long()], FP8_BLOCK)
        with mock.patch.object(quantize_rows, "PLACED_SCALES", 1), poisoned_memory():
            known = rows if seed else None
            assert_same(quantized(x.to(device), "FP8_BLOCK", "", "plain", inverse=inverse, tokens=known), want)


@case
def transposed_codes(device: str) -> None:
    """One tile, several, and sizes that are no multiple of a tile; every byte occurs."""
    from padless.moe.triton.transpose import transpose
    from support.training_quantizer_cases import poisoned_memory

    for groups, n, k in ((1, 1, 1), (3, 128, 256), (2, 176, 400), (2, 33, 130)):
        x = torch.randint(0, 256, (groups, n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        with poisoned_memory():
            got = transpose(x.to(device))
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), x.transpose(1, 2)), (groups, n, k)


@case
def routed_rows(device: str) -> None:
    """Sorting and quantizing in one launch."""
    from padless import formats
    from padless.moe import twins
    from padless.moe.triton.quantize_rows import route_quantize
    from padless.quantization.quantize import quantize
    from padless.quantization.triton.global_scale import given_factors

    for seed, (tokens, top_k, experts, k, name) in enumerate(
        ((1, 1, 1, 128, "FP8_BLOCK"), (7, 3, 5, 656, "FP8_BLOCK"), (3, 8, 600, 544, "MXFP8"), (2, 16, 20, 96, "NVFP4"))
    ):
        ids, x, fmt = (
            draw_ids(tokens, top_k, experts, seed),
            awkward((tokens, k), DTYPES[seed % 3], seed),
            getattr(formats, name),
        )
        rule, given = rules(name)[0], given_scale(name)
        factors = None if given is None else given_factors(given.to(device), rule)
        got, data, scale = route_quantize(
            x.to(device), ids.to(device), experts, fmt, scale_rule=rule, scale_layout="plain", factors=factors
        )
        want = twins.route(ids, experts)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one.cpu(), other)
        given_there = None if given is None else given.to(device)
        quantized_rows = quantize(x[want[1].long()], fmt, global_scale=given)
        assert_same(formats.BlockScaledTensor(data, scale, fmt, given_there), quantized_rows)


def activations() -> list[object]:
    return [
        *(Activation("swiglu", gate_up) for gate_up in ("concatenated", "interleaved", "alternating")),
        Activation("swiglu", "alternating", alpha=1.702, limit=7.0, up_offset=1.0),
        Activation("geglu", "concatenated", limit=3.0),
        Activation("relu2"),
        Activation("gelu"),
        Activation("silu"),
    ]


def assert_activated(
    a: object, x: torch.Tensor, names: tuple[str, ...], device: str, row_weights: torch.Tensor | None = None
) -> None:
    """Every format in `names`, and bfloat16."""
    from padless import formats
    from padless.moe import twins
    from padless.moe.triton.quantize_rows import quantize_rows
    from padless.quantization.quantize import quantize

    there = None if row_weights is None else row_weights.to(device)
    data, _ = quantize_rows(x.to(device), None, activation=a, row_weights=there)
    same_values(data, twins.activated(x, a, row_weights, in_bfloat16=True))
    values = twins.activated(x, a, row_weights, in_bfloat16=False)
    for name in names:
        for layout in layouts_of(name):
            given, rule = given_scale(name), rules(name)[0]
            want = quantize(values, getattr(formats, name), scale_layout=layout, global_scale=given)
            written = torch.full(values.shape, 7.0, dtype=torch.bfloat16, device=device)
            how = {"activation": a, "row_weights": row_weights, "values": written if layout == "plain" else None}
            assert_same(quantized(x.to(device), name, rule, layout, given=given, **how), want)
            if layout == "plain":
                same_values(written, twins.activated(x, a, row_weights, in_bfloat16=True))


@case
def activated_rows(device: str) -> None:
    """Every activation, formats in turn; magnitudes from nothing to beyond the exponential's range."""
    for i, a in enumerate(activations()):
        for dtype, rows in ((torch.bfloat16, 5), (torch.float32, 3)):
            x = awkward((rows, 320), torch.float32, i).clamp(-3e4, 3e4)
            x[:, ::2] = torch.randn(x[:, ::2].shape, generator=torch.Generator().manual_seed(i)) * 5
            names = (FORMATS[i % 5], FORMATS[(i + 2) % 5])
            assert_activated(a, x.to(dtype), names if dtype == torch.bfloat16 else names[:1], device)


@case
def weighted_rows(device: str) -> None:
    """Activated rows times a number each: of both signs, zeros, tiny and large ones and NaN."""
    weights = torch.tensor([0.3, -1.7, 0.0, -0.0, 1e-30, 3e8, float("nan"), 1.0, 2.0**-126])
    for i, a in enumerate(activations()):
        x = awkward((len(weights), 320), torch.float32, i).clamp(-3e4, 3e4)
        x[:, ::2] = torch.randn(x[:, ::2].shape, generator=torch.Generator().manual_seed(i)) * 5
        assert_activated(a, x.bfloat16(), (FORMATS[i % 5],), device, weights)


@case
def activation_range(device: str) -> None:
    """The exponential over all magnitudes, Inf, NaN and both zeros, in bfloat16 and exactly by FP8_BLOCK's scales."""
    edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 87.0, -87.0, 88.5, -88.5, 1e-45])
    x = torch.cat([edges, torch.linspace(-100, 100, 1270)]).view(-1, 128)
    for kind in ("silu", "gelu", "relu2"):
        assert_activated(Activation(kind), x, ("FP8_BLOCK",), device)


# --- combine ---------------------------------------------------------------------------------------------


def combine_problem(
    tokens: int, top_k: int, n: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, inverse, weights, shared); rows and weights of slots that are dropped hold NaN."""
    from padless.moe import twins

    generator = torch.Generator().manual_seed(seed)
    _, _, inverse = twins.route(draw_ids(tokens, top_k, 5, seed), 5)
    y = awkward((tokens * top_k, n), torch.float32, seed).nan_to_num(0.5, 3.0, -3.0).clamp(-1e4, 1e4)
    dropped = inverse < 0
    y[-1 - inverse[dropped].long()] = float("nan")
    weights = torch.rand((tokens, top_k), generator=generator)
    weights[dropped] = float("nan")
    return y.to(dtype), inverse, weights, torch.randn((tokens, n), generator=generator)


PROBLEMS = ((1, 1, 8), (5, 3, 130), (9, 8, 264), (2, 16, 1100))


@case
def combined(device: str) -> None:
    from padless.moe import twins
    from padless.moe.triton import combine

    for seed, (tokens, top_k, n) in enumerate(PROBLEMS):
        for i, dtype in enumerate(DTYPES):
            for weights_dtype in (torch.float32, torch.bfloat16, None)[seed % 2 * i :][: 3 if seed == 1 else 1]:
                y, inverse, weights, shared = combine_problem(tokens, top_k, n, dtype, seed)
                weights = None if weights_dtype is None else weights.to(weights_dtype)
                shared = shared.to(dtype) if seed % 2 else None
                for out_dtype in (dtype, torch.float32) if seed == 1 else (dtype,):
                    want = twins.combine(y, inverse, weights, shared, out_dtype)
                    assert want.isfinite().all()
                    out = torch.full_like(want, float("nan"), device=device)
                    given = [None if t is None else t.to(device) for t in (y, inverse, weights, shared)]
                    combine.combine(*given, out)
                    same_values(out, want)


@case
def combined_infinities(device: str) -> None:
    """A kept NaN or Inf shows, in its column of its token alone."""
    from padless.moe import twins
    from padless.moe.triton import combine

    y, inverse, weights, _ = combine_problem(9, 4, 140, torch.bfloat16, 3)
    inverse = inverse.clone()
    y[inverse[2, 1].clamp(min=0), 5] = float("nan")
    y[inverse[3, 0].clamp(min=0), 7] = float("inf")
    want = twins.combine(y, inverse, weights, None, torch.bfloat16)
    assert want[2].isnan().sum() <= 1
    out = torch.empty_like(want, device=device)
    combine.combine(y.to(device), inverse.to(device), weights.to(device), None, out)
    same_values(out, want)


@case
def combine_gradients(device: str) -> None:
    from padless.moe import twins
    from padless.moe.triton import combine

    for seed, (tokens, top_k, n) in enumerate(PROBLEMS):
        for dtype in DTYPES if seed < 2 else DTYPES[:1]:
            y, inverse, weights, dout = combine_problem(tokens, top_k, n, dtype, 10 + seed)
            dout = dout.to(dtype)
            want = twins.combine_backward(dout, y, inverse, weights)
            assert all(t.isfinite().all() for t in want)
            dy = torch.full_like(want[0], float("nan"), device=device)
            dweights = torch.full_like(want[1], float("nan"), device=device)
            given = [t.to(device) for t in (dout, y, inverse, weights)]
            combine.combine_backward(*given, dy, dweights)
            same_values(dy, want[0])
            same_values(dweights, want[1])


# --- rows that there are not -----------------------------------------------------------------------------


def judge_strayed(call: str, device: str, layout: str | None = None) -> None:
    """The problems of `padless verify` with rows and tokens that there are not, of a few tokens, by the kernels."""
    from padless.moe import ops
    from padless.verify.fuzz.subjects import SUBJECTS
    from padless.verify.lines import check_of

    def strayed(arch: str) -> list[dict[str, object]]:
        every = [o for o in SUBJECTS[call].lines(arch) if o.get("hostile") and o.get("layout") == layout]
        return [o | {"tokens": min(o["tokens"], 7)} for o in every]

    assert strayed("")
    with mock.patch.object(ops, "runs_triton", return_value=True):
        check_of(call, strayed).on("cuda" if device == "cuda" else "reference")


@case
def sums_of_rows_that_there_are_not(device: str) -> None:
    judge_strayed("moe.combine", device)


@case
def gathered_rows_that_there_are_not(device: str) -> None:
    """Scales stored with the codes, and placed by a launch of their own."""
    from padless.moe.triton import quantize_rows

    judge_strayed("moe.gather_quantize", device, "blocked")
    judge_strayed("moe.gather_quantize", device, "plain")
    with mock.patch.object(quantize_rows, "PLACED_SCALES", 1):
        judge_strayed("moe.gather_quantize", device, "plain")


@case
def scales_of_items_that_there_are_not(device: str) -> None:
    """They are zeros, whatever lies beside the items' scales."""
    from padless import layouts
    from padless.moe.triton import place_scales
    from padless.testing.guarded import guarded_memory
    from padless.verify.fuzz.layers import strayed
    from padless.verify.fuzz.place import place_of

    place = place_of("cuda" if device == "cuda" else "reference")
    right = torch.arange(37, dtype=torch.int32, device=device) % 9
    items, known = strayed(right, 9, place, 1)
    assert known.any()
    assert not known.all()
    for are_known in (False, True):
        with guarded_memory() as changed:
            of_items = torch.empty((9, 16), dtype=torch.float32, device=device)
            out = layouts.empty_mn_major(37, 5, torch.device(device))
            of_items.copy_(torch.rand(of_items.shape, generator=place.generator(2), device=device))
            place_scales.place(place_scales.Placed(of_items, items), out, are_known=are_known)
        assert torch.equal(out, torch.where(known[:, None], of_items[right.long(), :5], 0.0))
        assert not changed()


@case
def a_bound_that_is_too_large_is_noticed(device: str) -> None:
    """By 201 rows: what is read and written around the tensors shows."""
    from padless.moe.triton import combine, place_scales, quantize_rows

    outside, gather = "memory around the tensors was written", partial(judge_strayed, "moe.gather_quantize", device)
    for module, number, judged, said in (
        (combine, "rows", partial(sums_of_rows_that_there_are_not, device), (outside, "sum", "gradients 1")),
        (quantize_rows, "out_rows", partial(gather, "plain"), (outside,)),
        (quantize_rows, "out_rows", partial(gather, "blocked"), (outside,)),
        (place_scales, "items", partial(scales_of_items_that_there_are_not, device), ()),
    ):

        def launch(kernel: Any, programs: int, right: Any = module.launch, number: str = number) -> Any:
            at = kernel.arg_names.index(number)
            return lambda *a, **how: right(kernel, programs)(*a[:at], a[at] + 201, *a[at + 1 :], **how)

        with mock.patch.object(module, "launch", launch), pytest.raises(AssertionError) as raised:
            judged()
        assert all(words in str(raised.value) for words in said)


if __name__ == "__main__":
    main(CASES)
