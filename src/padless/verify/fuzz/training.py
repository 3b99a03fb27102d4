"""Calls of training under judgement: swiglu_backward_quantize and grouped_gemm_wgrad."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch

from padless.formats import FP8_BLOCK
from padless.kernels.sm90_fp8_wgrad.config import MODES, WgradConfig, blocks_m
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.columns_rules import num_scale_rows, padded_tokens, scale_columns
from padless.quantization.swiglu_backward import swiglu_backward_quantize
from padless.verify.fuzz import exact
from padless.verify.fuzz.operands import spans
from padless.verify.fuzz.place import Guarded, Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.quantizers import STRIDES, strided
from padless.verify.problems.wgrad import block_of

# FP8 tensor cores keep 13 fractional bits of the largest of 32 products and of the sum.
_FP8_SUM, _FLOAT32_SUM = 2.0**-8, 2.0**-17
_UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
_E4M3_STEP = 2.0**-4  # half of the distance of neighbours, relative


# --- SwiGLU's backward -----------------------------------------------------------------------------------


def swiglu_constants(draw: Draw) -> Options:
    return {
        "dtype": draw.one(tuple(DTYPES)),
        "z_dtype": draw.one(tuple(DTYPES)),
        "strides": draw.one(STRIDES),
        "gate_up": draw.one(("concatenated", "interleaved")),
        "block": draw.one(((1, 128), (128, 128))),
        "alignment": draw.one((None, 32, 128)),
        "prob": draw.maybe(0.6),
    }


def swiglu_rest(draw: Draw, fixed: Options) -> Options:
    sizes = draw.sizes(3)
    step = 32 if fixed["gate_up"] == "interleaved" else draw.one((1, 16, 128))
    return {
        "sizes": sizes,
        "past": draw.past(),
        "i": draw.multiple(step, draw.limits.n),
        "hostile": draw.hostile_ends(len(sizes), sum(sizes)) if draw.maybe(0.05) else [],
        "seed": draw.data_seed(),
    }


def judge_swiglu_backward(o: Options, place: Place) -> None:
    rows, i = sum(o["sizes"]) + o["past"], o["i"]
    generator = place.generator(o["seed"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator)

    dh = strided(place, normal(rows, i).to(DTYPES[o["dtype"]]), o["strides"])
    z = strided(place, (normal(rows, 2 * i) * 3).to(DTYPES[o["z_dtype"]]), o["strides"])
    prob = normal(rows) if o["prob"] else None
    ends = o["hostile"] or [sum(o["sizes"][: g + 1]) for g in range(len(o["sizes"]))]
    got = swiglu_backward_quantize(
        dh, z, place.ends(ends), prob, gate_up=o["gate_up"], hidden_block=o["block"], alignment=o["alignment"]
    )
    dz, dz_size, hidden, dprob = _exact_backward(dh.double(), z.double(), prob, o["gate_up"])
    judge = place.judge
    codes, scale = got.dz_rows.data.view(torch.uint8), got.dz_rows.scale
    _near_codes(place, "dZ's rows", codes, scale, dz, dz_size, "activation")
    _near_columns(place, "dZ's columns", got.dz_columns, dz, dz_size, ends)
    _near_columns(place, "H's columns", got.hidden_columns, hidden, hidden.abs(), ends)
    judge.wrong("dprob is there, or not, against the call", (got.dprob is None) == o["prob"])
    if got.dprob is not None:
        valid = max((end for _, end in spans(ends, rows)), default=0)
        wanted = dprob.clone()
        wanted[valid:] = 0
        sums = _sums_of_dprob(dh.double(), z.double(), o["gate_up"])
        judge.near("dprob's float64", got.dprob, wanted, sums * 2.0**-17 + 2.0**-120, math.inf)


def _halves(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up == "concatenated":
        half = z.shape[1] // 2
        return z[:, :half], z[:, half:]
    runs = z.unflatten(1, (-1, 2, 32))
    return runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)


def _exact_backward(
    dh: torch.Tensor, z: torch.Tensor, prob: torch.Tensor | None, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dZ, sums of the magnitudes that dZ is the sum of, H, dprob) in float64."""
    gate, up = _halves(z, gate_up)
    s = torch.sigmoid(gate)
    silu = gate * s
    weight = 1.0 if prob is None else prob.double()[:, None]
    d_up = dh * weight * silu
    d_gate = dh * weight * up * (s + silu * (1 - s))
    gate_size = (dh * weight * up).abs() * (s + (silu * (1 - s)).abs())
    hidden = silu * up
    dz, size = (_merged(x, y, gate_up) for x, y in ((d_gate, d_up), (gate_size, d_up.abs())))
    return dz, size, hidden * weight, (hidden * dh).sum(1)


def _merged(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    if gate_up == "concatenated":
        return torch.cat([gate, up], 1)
    return torch.stack([t.unflatten(1, (-1, 32)) for t in (gate, up)], 2).flatten(1)


def _sums_of_dprob(dh: torch.Tensor, z: torch.Tensor, gate_up: str) -> torch.Tensor:
    gate, up = _halves(z, gate_up)
    return (gate * torch.sigmoid(gate) * up * dh).abs().sum(1)


def _near_codes(
    place: Place,
    name: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    wanted: torch.Tensor,
    size: torch.Tensor,
    kind: str,
) -> None:
    """FP8_BLOCK codes and scales are nearest to ``wanted`` (float64), but for float32's roundings, of ``size``."""
    if wanted.numel() == 0:
        return
    _, exact_scale = exact.quantized(wanted.float(), FP8_BLOCK, kind)
    _, largest_size = exact.quantized(size.float(), FP8_BLOCK, kind)
    judge, shape = place.judge, tuple(wanted.shape)
    judge.near(f"{name}: scales", scale, exact_scale.double(), largest_size.double() * 2.0**-17, math.inf)
    each = exact.spread(scale.double(), FP8_BLOCK, kind, shape)
    values = exact.decoded(codes, FP8_BLOCK) * each
    tolerance = wanted.abs() * (_E4M3_STEP + 2.0**-12) + each * 2.0**-9 + size * 2.0**-17
    judge.near(f"{name}: float64", values, wanted, tolerance, math.inf)


def _near_columns(
    place: Place, name: str, c: GroupedColumns, wanted: torch.Tensor, sizes: torch.Tensor, ends: list[int]
) -> None:
    codes = c.data.view(torch.uint8)
    kind = "activation" if c.block[0] == 1 else "weight"
    slack = torch.ones_like(codes, dtype=torch.bool)
    column = block = 0
    for start, end in spans(ends, wanted.shape[0]):
        tokens = end - start
        if tokens:
            blocks = -(-tokens // 128)
            part = codes[:, column : column + tokens]
            scale = c.scale[block : block + blocks].t()
            _near_codes(place, name, part, scale, wanted[start:end].t(), sizes[start:end].t(), kind)
            slack[:, column : column + tokens] = False
        column += -(-tokens // c.alignment) * c.alignment
        block += -(-tokens // 128)
    place.judge.wrong(f"{name}: slack is not zero", (slack & (codes != 0)).any())
    place.judge.wrong(f"{name}: scales of no block are not zero", (c.scale[block:] != 0).any())


# --- weight gradients ------------------------------------------------------------------------------------


def wgrad_constants(draw: Draw) -> Options:
    mode, out = draw.one(MODES), draw.one(("bfloat16", "float32"))
    return {
        "mode": mode,
        "out": out,
        "accumulate": out == "float32" and draw.maybe(0.5),
        "tile": draw.one((0, *blocks_m(mode, DTYPES[out]))),
    }


def wgrad_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "sizes": draw.sizes(5),
        "past": draw.past(),
        "n": draw.multiple(16, draw.limits.n),
        "k": draw.multiple(16, min(draw.limits.k, 2 * draw.limits.n)),
        "alignments": [draw.one((32, 128)), draw.one((32, 128))],
        "gap": 16 * draw.one((0, 0, 1, 3)),
        "nan_group": draw.randrange(5) if draw.maybe(0.1) else -1,
        "seed": draw.data_seed(),
    }


def _columns(
    place: Place, o: Options, features: int, block: tuple[int, int], alignment: int, generator: torch.Generator
) -> tuple[GroupedColumns, torch.Tensor]:
    """(operand, float64 values (rows of groups, features)): any codes, slack of zeros, NaN in the codes of a group and
    behind all of them."""
    sizes, rows = o["sizes"], sum(o["sizes"]) + o["past"]
    groups, device = len(sizes), place.device
    width = padded_tokens(rows, groups, alignment)
    data = torch.randint(0, 256, (features, width), dtype=torch.uint8, device=device, generator=generator)
    data = torch.where((data & 0x7F) == 0x7F, data & 0xF0, data)
    shape = (num_scale_rows(rows, groups), scale_columns(features, block))
    scale = torch.exp2(torch.rand(shape, device=device, generator=generator) * 8 - 12)
    starts, blocks, values = [], [], []
    column = row = 0
    for group, size in enumerate(sizes):
        starts.append(column)
        blocks.append(row)
        end, count = column + -(-size // 32) * 32, -(-size // 128)
        data[:, column + size : end] = 0
        last = column + -(-size // alignment) * alignment
        data[:, end:last] = 0x7F  # past a multiple of 32 tokens nothing is read, or taken for one of the group
        if group == o["nan_group"] and size:
            data[features // 2, column + size // 2].fill_(0x7F)
        if size:
            own = scale[row : row + count].double().t()
            if block[0] > 1:
                own = own.repeat_interleave(block[0], dim=0)[:features]
            own = own.repeat_interleave(128, dim=1)[:, :size]
            part = exact.decoded(data[:, column : column + size], FP8_BLOCK) * own
            values.append(part.t())
        column, row = last, row + count
    data[:, column:] = 0x7F
    scale[row:] = math.nan
    ends = [sum(sizes[: g + 1]) for g in range(groups)]
    operand = GroupedColumns(
        data.view(torch.float8_e4m3fn),
        scale,
        place.ends(ends),
        place.ends(starts),
        place.ends(blocks),
        block,
        alignment,
    )
    empty = torch.zeros((0, features), dtype=torch.float64, device=device)
    return operand, torch.cat(values) if values else empty


def judge_wgrad(o: Options, place: Place) -> None:
    generator = place.generator(o["seed"])
    dtype, groups = DTYPES[o["out"]], len(o["sizes"])
    dy, dy_values = _columns(place, o, o["n"], (1, 128), o["alignments"][0], generator)
    x, x_values = _columns(place, o | {"nan_group": -1}, o["k"], block_of(o["mode"]), o["alignments"][1], generator)
    config = None
    if o["tile"] and place.has_kernels:
        config = WgradConfig(block_m=o["tile"], mode=o["mode"], out_dtype=dtype)
    n, k = o["n"], o["k"]
    guarded = Guarded(place, groups * n, k, dtype, o["gap"], guard=16)
    out = guarded.out.unflatten(0, (groups, n))
    before = None
    if o["accumulate"]:
        before = torch.randn((groups, n, k), device=place.device, generator=generator)
        out.copy_(before)
    call: dict[str, Any] = {"backend": place.backend, "config": config}
    grouped_gemm_wgrad(dy, x, out=out, accumulate=o["accumulate"], **call)
    judge = place.judge
    guarded.check(judge, "fences", groups * n)
    fresh = out
    if before is not None:
        fresh = grouped_gemm_wgrad(dy, x, out_dtype=torch.float32, **call)
        filled = place.ends([int(size > 0) for size in o["sizes"]])[:, None, None] > 0
        judge.same("accumulated is one addition", out, torch.where(filled, before + fresh, before))
    first = 0
    for group, size in enumerate(o["sizes"]):
        a, b = dy_values[first : first + size].t(), x_values[first : first + size]
        wanted, sums = a @ b, a.abs() @ b.abs()
        of_sum = (_FP8_SUM if place.has_kernels else _FLOAT32_SUM) * sums
        tolerance = (wanted.abs() * _UNIT[dtype] * 1.01 + of_sum + 2.0**-126).nan_to_num(0.0)
        judge.near("float64", fresh[group], wanted, tolerance, 3e38)
        first += size
    _judge_group_alone(o, place, dy, x, fresh, call)


def _judge_group_alone(
    o: Options, place: Place, dy: GroupedColumns, x: GroupedColumns, fresh: torch.Tensor, call: dict[str, Any]
) -> None:
    """One group by itself: its tokens copied to the front."""
    filled = [g for g, size in enumerate(o["sizes"]) if size]
    if not filled:
        return
    group = random.Random(o["seed"]).choice(filled)
    size = o["sizes"][group]
    parts = []
    for operand in (dy, x):
        start = sum(-(-s // operand.alignment) * operand.alignment for s in o["sizes"][:group])
        block = sum(-(-s // 128) for s in o["sizes"][:group])
        width = padded_tokens(size, 1, operand.alignment)
        data = torch.zeros((operand.features, width), dtype=torch.uint8, device=place.device)
        data[:, :size] = operand.data.view(torch.uint8)[:, start : start + size]
        scale = torch.full((num_scale_rows(size, 1), operand.scale.shape[1]), math.nan, device=place.device)
        count = -(-size // 128)
        scale[:count] = operand.scale[block : block + count]
        zero = place.ends([0])
        parts.append(
            replace(
                operand,
                data=data.view(torch.float8_e4m3fn),
                scale=scale,
                offs=place.ends([size]),
                starts=zero,
                block_starts=zero.clone(),
            )
        )
    alone = grouped_gemm_wgrad(parts[0], parts[1], out_dtype=fresh.dtype, **call)
    place.judge.same("a group alone", alone[0], fresh[group])
