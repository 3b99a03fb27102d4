"""Quantising calls under judgement: grouped_gemm_quant, grouped_gemm_swiglu_quant and grouped_gemm_epilogue.

Sums come from grouped_gemm in float32, which has problems of its own; every step behind them is made again here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant, grouped_gemm_swiglu_quant
from padless.epilogue import COLUMN_FORMATS, INTERLEAVE, Epilogue, EpilogueTensors, column_tiles
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, NVFP4, BlockScaledFormat, round_up
from padless.kernels.launch import KernelChoice
from padless.kernels.table import QUANT
from padless.ops.epilogue_run import with_outputs
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
from padless.testing.guarded import GuardedOutput
from padless.verify.fuzz import exact, operands
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.products import Product, arch_of, k_multiple, shape
from padless.verify.tiles import config_of, routes_of

# SwiGLU: the exponential within 2^-21, of which the sigmoid takes at most all, and four roundings of 2^-24.
_GLU_RELATIVE, _GLU_ABSOLUTE = 2.0**-21 + 2.0**-22, 2.0**-140
_N_MULTIPLE = {None: 32, "interleaved": 64, "concatenated": 128}


def constants(gate_ups: tuple[str | None, ...], draw: Draw) -> Options:
    """Options that a kernel is compiled for."""
    route = draw.one(routes_of(arch_of(draw), QUANT))
    gate_up = draw.one(gate_ups)
    name = draw.one((None, *FORMAT_BY_NAME))
    format = None if name is None else FORMAT_BY_NAME[name]
    columns = format in COLUMN_FORMATS and draw.maybe(0.4)
    layouts = ("plain", "plain_mn") if format == FP8_BLOCK else ("plain", "blocked", "blocked_groups")
    column_layouts = ("plain",) if format == FP8_BLOCK else ("plain", "blocked", "blocked_groups")
    rows = not columns or draw.maybe(0.7)
    if gate_up is not None and format == FP8_BLOCK and rows and route.module == "sm90_mxfp8_quant":
        rows, columns = False, True  # what this kernel refuses, and the next one
    if gate_up is not None and format == FP8_BLOCK and rows and route.module == "sm90_bf16_quant":
        columns = False
    blocked = route.b != "FP8_BLOCK" and gate_up != "concatenated" and draw.maybe(0.3)
    rules = {None: ("",), "FP8_BLOCK": ("",), "NVFP4": ("te",)}.get(name, ("rceil", "floor"))
    return {
        "a": route.a,
        "b": route.b,
        "module": route.module if arch_of(draw) else "",
        "b_layout": "blocked" if blocked else "plain",
        "gate_up": gate_up,
        "format": name,
        "out": draw.one(tuple(DTYPES)),
        "rows": rows,
        "columns": columns,
        "row_layout": draw.one(layouts) if format is not None else "plain",
        "column_layout": draw.one(column_layouts),
        "rule": draw.one(rules),
        "alpha": draw.maybe(0.5),
        "bias": draw.maybe(0.5),
        "prob": draw.maybe(0.5),
        "amax": draw.maybe(0.5),
        "semantics": "documented" if gate_up is not None else draw.one(("implementation", "documented")),
    }


def rest(draw: Draw, fixed: Options) -> Options:
    found = shape(draw, fixed)
    groups = min(len(found["sizes"]), 5)
    multiple = _N_MULTIPLE[fixed["gate_up"]]
    return found | {
        "sizes": found["sizes"][:groups],
        "n": draw.multiple(multiple, max(draw.limits.n, multiple)),
        "k": draw.multiple(k_multiple(fixed["a"], fixed["b"]), min(draw.limits.k, 512)),
        "globals": draw.one((0, 1, groups)),
        "b_globals": draw.one((0, 1, groups)),
        "d_globals": draw.one((1, groups)),
        "nan_row": -1 if found["nan_row"] >= sum(found["sizes"][:groups]) else found["nan_row"],
        "nan_group": -1 if found["nan_group"] >= groups else found["nan_group"],
        "hostile": [] if not found["hostile"] else found["hostile"][:groups],
        "m_aligned": 1,
    }


@dataclass
class _Numbers:
    """alpha (G,), bias (G, N), prob (M,), global_scale (1,) or (G,): float32, None where the call has none."""

    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    prob: torch.Tensor | None
    global_scale: torch.Tensor | None


def _numbers(o: Options, p: Product) -> _Numbers:
    generator, device = p.place.generator(o["seed"] + 1), p.place.device

    def normal(wanted: bool, *shape: int) -> torch.Tensor | None:
        return torch.randn(shape, device=device, generator=generator) if wanted else None

    shared = None
    if o["format"] == NVFP4.name:
        count = 1 if o["d_globals"] == 1 else p.groups
        shared = torch.rand(count, device=device, generator=generator) * 0.1 + 0.001
    return _Numbers(
        normal(o["alpha"], p.groups), normal(o["bias"], p.groups, o["n"]), normal(o["prob"], p.rows), shared
    )


def _keywords(o: Options, p: Product, numbers: _Numbers, config: KernelChoice | None) -> dict[str, Any]:
    """The arguments of grouped_gemm_quant but for its output."""
    return {
        "a_tensor": p.a.given,
        "b_tensor": p.b.given,
        "padded_offsets": p.offs,
        "alpha_tensor": numbers.alpha,
        "bias_tensor": numbers.bias,
        "prob_tensor": numbers.prob,
        "return_amax": o["amax"],
        "semantics": o["semantics"],
        "backend": p.place.backend,
        "config": config,
        **({} if o["gate_up"] is None else {"gate_up": o["gate_up"]}),
    }


def _call(o: Options, keywords: dict[str, Any]) -> Any:
    return (grouped_gemm_quant if o["gate_up"] is None else grouped_gemm_swiglu_quant)(**keywords)


def _outputs(o: Options, numbers: _Numbers) -> dict[str, Any]:
    if o["format"] is None:
        return {"d_dtype": DTYPES[o["out"]]}
    given: dict[str, Any] = {"d_format": FORMAT_BY_NAME[o["format"]], "row_output": o["rows"]}
    given |= {"column_output": o["columns"], "global_scale_tensor": numbers.global_scale}
    given |= {"scale_rule": o["rule"] if o["rule"] in ("rceil", "floor") else None}
    if o["rows"]:
        given["row_layout"] = o["row_layout"]
    if o["columns"]:
        given["column_layout"] = o["column_layout"]
    return given


def judge_quant(o: Options, place: Place) -> None:
    """grouped_gemm_quant and grouped_gemm_swiglu_quant."""
    p = Product(o | {"out": "float32"}, place)
    config = config_of(place, o, QUANT)
    numbers = _numbers(o, p)
    keywords = _keywords(o, p, numbers, config)
    made = _call(o, keywords | _outputs(o, numbers))
    if o["hostile"]:
        return
    values = _values(o, p, numbers, keywords, config)
    judge_amax(place.judge, o, p, made["amax_tensor"], values)
    if o["format"] is None:
        judge_values(place.judge, o, p, made["d_tensor"], values)
        return
    format = FORMAT_BY_NAME[o["format"]]
    if o["rows"]:
        scale = made.row.scale
        judge_rows(place.judge, o, p, made["d_tensor"], scale, values, numbers.global_scale, format)
    if o["columns"]:
        storage = made["sfd_col_tensor"]
        tiles = column_tiles(p.rows, p.groups, o["m_aligned"])
        if o["column_layout"] != "plain":
            storage = _flat(storage)
        judge_columns(place.judge, o, p, made["d_col_tensor"], storage, values, format, tiles)


def _flat(view: torch.Tensor) -> torch.Tensor:
    """The bytes under cuDNN's 6-D view, in order."""
    return view.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(-1)


# --- D ---------------------------------------------------------------------------------------------------


def _values(
    o: Options, p: Product, numbers: _Numbers, keywords: dict[str, Any], config: KernelChoice | None
) -> torch.Tensor:
    """D of the valid rows, (valid, N_out) float32: exact without SwiGLU; with it the call's own float32 values, which
    are held against float64 here."""
    kernel = None if config is None else (config if isinstance(config, type) else type(config))
    sums = grouped_gemm(
        p.a.given,
        p.b.given,
        p.offs,
        out_dtype=torch.float32,
        backend=p.place.backend,
        config=kernel,  # type: ignore[arg-type]
    )[: p.valid]
    group = torch.repeat_interleave(
        torch.arange(p.groups, device=p.place.device), p.place.ends(p.sizes).long(), output_size=p.valid
    )
    prob = None if numbers.prob is None else numbers.prob[: p.valid, None]
    gates_bias = numbers.bias is not None and o["gate_up"] is None and o["semantics"] == "implementation"
    alpha = None if numbers.alpha is None else numbers.alpha[group][:, None]
    if numbers.bias is None:
        x = sums if alpha is None else sums * alpha
    else:
        bias = numbers.bias[group]
        bias = bias * prob if gates_bias and prob is not None else bias
        x = sums + bias if alpha is None else exact.fused(sums, alpha, bias)
    if o["gate_up"] is None:
        return x if prob is None or gates_bias else x * prob
    own = {"d_dtype": torch.float32, "return_amax": False}
    values: torch.Tensor = _call(o, keywords | own)["d_tensor"][: p.valid]
    gate, up = _gate_and_up(x.double(), o["gate_up"])
    wanted = gate * torch.sigmoid(gate) * up * (1.0 if prob is None else prob.double())
    # Where the sigmoid would be subnormal it counts as 0.
    floor = gate.abs() * up.abs() * 2.0**-125 * (1.0 if prob is None else prob.double().abs())
    tolerance = (wanted.abs() * _GLU_RELATIVE + _GLU_ABSOLUTE + floor).nan_to_num(0.0)
    p.place.judge.near("SwiGLU's float64", values, wanted, tolerance, 3e38)
    return values


def _gate_and_up(x: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up == "concatenated":
        half = x.shape[1] // 2
        return x[:, :half], x[:, half:]
    runs = x.unflatten(1, (-1, 2, INTERLEAVE))
    return runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)


def judge_values(judge: Judge, o: Options, p: Product, d: torch.Tensor, values: torch.Tensor) -> None:
    judge.same("values are not the steps behind the sums", d[: p.valid], values.to(DTYPES[o["out"]]))


def judge_amax(judge: Judge, o: Options, p: Product, amax: torch.Tensor | None, values: torch.Tensor) -> None:
    judge.wrong("amax is there, or not, against the call", (amax is None) == o["amax"])
    if amax is None:
        return
    for group, (start, end) in enumerate(operands.spans(p.ends, p.rows)):
        found = amax.flatten()[group]
        want = values[start:end].abs().max() if start < end else torch.full_like(found, float("-inf"))
        judge.same("amax", found, want)


# --- codes -----------------------------------------------------------------------------------------------


def _factors(shared: torch.Tensor, group: int) -> torch.Tensor:
    one = shared[group if shared.numel() > 1 else 0]
    return exact.nvfp4_factors("te", one, None)


def judge_rows(
    judge: Judge,
    o: Options,
    p: Product,
    codes: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    shared: torch.Tensor | None,
    format: BlockScaledFormat,
) -> None:
    """Codes and scales of the rows are those of the values; scale: as it lies in memory."""
    parts = []
    for group, (start, end) in enumerate(operands.spans(p.ends, p.rows)):
        if shared is not None and start < end:
            parts.append(exact.quantized(values[start:end], format, "activation", "te", _factors(shared, group)))
    if shared is None:
        wanted, wanted_scale = exact.quantized(values, format, "activation", o["rule"])
    elif parts:
        wanted, wanted_scale = (torch.cat(both) for both in zip(*parts, strict=True))
    else:
        return
    judge.same("row codes", codes.view(torch.uint8)[: p.valid], exact.packed(wanted, format))
    layout = o["row_layout"]
    if layout in ("plain", "plain_mn"):
        judge.same("row scales", scale[: p.valid], wanted_scale.view(scale.dtype))
        return
    first = 0
    bytes_ = scale.contiguous().view(torch.uint8).flatten()
    columns = wanted_scale.shape[1]
    width = -(-columns // 4) * 512
    if layout == "blocked":
        _same_tiles(judge, "row scales in tiles", bytes_, wanted_scale)
        return
    for start, end in operands.spans(p.ends, p.rows):
        tiles = -(-(end - start) // 128)
        _same_tiles(judge, "row scales in groups' tiles", bytes_[first:], wanted_scale[start:end])
        first += tiles * width


def _same_tiles(judge: Judge, name: str, stored: torch.Tensor, scale: torch.Tensor) -> None:
    """The scales (R, C) in 32x4x4 tiles; what else is in the tiles may be anything."""
    if scale.numel() == 0:
        return
    wanted = exact.tiled(scale)
    there = exact.tiled(torch.ones_like(scale)) == 1
    got = stored[: wanted.numel()]
    judge.same(name, torch.where(there, got, 0), torch.where(there, wanted, 0))


def judge_columns(
    judge: Judge,
    o: Options,
    p: Product,
    codes: torch.Tensor,
    scale: torch.Tensor,
    values: torch.Tensor,
    format: BlockScaledFormat,
    tiles: int,
) -> None:
    """Codes and scales along the rows of every group."""
    per_tile = 128 // format.block_k
    n_out = values.shape[1]
    tile = 0
    for start, end in operands.spans(p.ends, p.rows):
        if start == end:
            continue
        wanted, wanted_scale = exact.quantized(values[start:end].t(), format, "activation", o["rule"])
        judge.same("column codes", codes.view(torch.uint8)[start:end], wanted.t())
        blocks, own = wanted_scale.shape[1], -(-(end - start) // 128)
        first = tile * per_tile
        if o["column_layout"] == "plain":
            judge.same("column scales", scale[first : first + blocks], wanted_scale.t().contiguous().view(scale.dtype))
        elif o["column_layout"] == "blocked":
            whole = exact.tiled(_placed(wanted_scale, first, tiles * per_tile))
            there = exact.tiled(_placed(torch.ones_like(wanted_scale), first, tiles * per_tile)) == 1
            judge.same("column scales in tiles", torch.where(there, scale, 0), torch.where(there, whole, 0))
        else:
            padded = _placed(wanted_scale, 0, own * per_tile)
            there = exact.tiled(_placed(torch.ones_like(wanted_scale), 0, own * per_tile)) == 1
            got = scale[tile * -(-n_out // 128) * 512 :][: there.numel()]
            want = torch.where(there, exact.tiled(padded), 0)
            judge.same("column scales in groups' tiles", torch.where(there, got, 0), want)
        tile += own


def _placed(scale: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """scale (R, C) among zeros, from column ``first`` of ``columns`` on."""
    return torch.nn.functional.pad(scale, (first, columns - first - scale.shape[1]))


# --- into given outputs ----------------------------------------------------------------------------------


def _epilogue(o: Options, numbers: _Numbers) -> Epilogue:
    format = None if o["format"] is None else FORMAT_BY_NAME[o["format"]]
    gated_bias = o["gate_up"] is None and o["semantics"] == "implementation"
    return Epilogue(
        alpha=numbers.alpha is not None,
        bias=numbers.bias is not None,
        prob=numbers.prob is not None,
        bias_rule="gated_bias" if gated_bias else "gated_sum",
        activation="none" if o["gate_up"] is None else f"swiglu_{o['gate_up']}",
        amax=o["amax"],
        d_dtype=DTYPES[o["out"]] if format is None else None,
        row_format=format if o["rows"] else None,
        row_layout=o["row_layout"] if format is not None and o["rows"] else "plain",
        column_format=format if o["columns"] else None,
        column_layout=o["column_layout"] if o["columns"] else "plain",
        scale_rule=o["rule"],
    )


def judge_epilogue(o: Options, place: Place) -> None:
    """grouped_gemm_epilogue into guarded outputs: nothing else is written, and they are judged as the other call's."""
    p = Product(o | {"out": "float32"}, place)
    config = config_of(place, o, QUANT)
    numbers = _numbers(o, p)
    epilogue = _epilogue(o, numbers)
    like = with_outputs(epilogue, EpilogueTensors(), p.rows, o["n"], p.groups, torch.device("cpu"), o["m_aligned"])
    fences: dict[str, GuardedOutput] = {}
    given: dict[str, Any] = {"column_tiles": like.column_tiles}
    for name in ("d", "row_codes", "column_codes"):
        t = getattr(like, name)
        if t is not None:
            fences[name] = place.output(t.shape[0], t.shape[1], t.dtype, o["gaps"][2])
            given[name] = fences[name].out
    for name in ("row_scale", "column_scale"):
        t = getattr(like, name)
        if t is not None:
            size = t.untyped_storage().nbytes()
            fences[name] = flat = place.output(1, size, torch.uint8, round_up(size + 1, 256) - size, guard=1)
            given[name] = _as(flat.out, t)
    if like.amax is not None:
        given["amax"] = torch.full((p.groups,), float("-inf"), device=place.device)
    tensors = EpilogueTensors(
        alpha=numbers.alpha, bias=numbers.bias, prob=numbers.prob, global_scale=numbers.global_scale, **given
    )
    a, b = p.a.given, p.b.given
    made = grouped_gemm_epilogue(a, b, p.offs, epilogue, tensors, backend=place.backend, config=config)
    for name, guarded in fences.items():
        anything = bool(o["hostile"]) or name.endswith("scale")
        valid = p.rows if o["hostile"] else (1 if name.endswith("scale") else p.valid)
        place.judge.written(f"fences of {name}", guarded, valid, anything=anything)
    if o["hostile"]:
        return
    values = _values(o, p, numbers, _keywords(o, p, numbers, config), config)
    judge_amax(place.judge, o, p, made.amax, values)
    if made.d is not None:
        judge_values(place.judge, o, p, made.d, values)
    if epilogue.row_format is not None:
        assert made.row_codes is not None
        assert made.row_scale is not None
        row = (made.row_codes, made.row_scale, values, numbers.global_scale, epilogue.row_format)
        judge_rows(place.judge, o, p, *row)
    if epilogue.column_format is not None:
        assert made.column_codes is not None
        assert made.column_scale is not None
        scale = made.column_scale
        scale = scale if o["column_layout"] == "plain" else scale.view(torch.uint8)
        judge_columns(place.judge, o, p, made.column_codes, scale, values, epilogue.column_format, made.column_tiles)


def _as(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory of flat (1, bytes) with the shape and strides of ``like``."""
    typed = flat.view(like.dtype)
    return typed.as_strided(like.shape, like.stride(), typed.storage_offset())
