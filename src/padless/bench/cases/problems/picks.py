"""Drawn problems of Hopper's kernels: products of ten models' experts, their operands, and every legal configuration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from padless.bench.cases.problems.decoding import MODELS
from padless.bench.cases.problems.wgrad import make_columns
from padless.epilogue import EpilogueTensors
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_bf16.config import select_config as select_bf16
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_plain.config import select_config as select_plain
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig, Bf16WgradProblem
from padless.kernels.sm90_bf16_wgrad.config import select_config as select_bf16_wgrad
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config
from padless.kernels.sm90_fp8.config import select_config as select_fp8
from padless.kernels.sm90_fp8.host_quant import select_tile as select_fp8_swiglu
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig, WgradProblem
from padless.kernels.sm90_fp8_wgrad.config import select_config as select_fp8_wgrad
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm90_mxfp8.config import select_config as select_mxfp8
from padless.moe.fused import epilogue_of
from padless.ops.epilogue_run import compute, with_outputs
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.testing.operands import quantized

BF16 = "BF16"
SWIGLU = epilogue_of("concatenated", False, FP8_BLOCK)
TOKENS = tuple(2**i for i in range(15))
WGRAD_TOKENS = TOKENS[9:]
ROUTINGS = {"even": None, "drawn": 0.5, "skewed": 1.5}  # spread of the experts' popularity, as of cases.problems.layer

# What a configuration is chosen by: every field that the kernel's choice sets, or should, and its values.
AXES: dict[type[Any], dict[str, tuple[int, ...]]] = {
    Sm90Fp8Config: {
        "few_rows": (False, True),
        "block_m": (8, 16, 32, 64, 128, 256),
        "block_n": (64, 128, 192, 256),
        "cluster_n": (1, 2),
        "raster_m": (8, 16),
    },
    Sm90Bf16Config: {
        "block_m": (8, 16, 32, 64, 128),
        "block_n": (128, 256),
        "num_warpgroups": (2, 4),
        "stage_blocks": (1, 2),
    },
    Bf16PlainConfig: {"block_n": (128, 256), "piece_slabs": (1, 2), "raster_m": (8, 16)},
    Sm90Mxfp8Config: {"block_m": (64, 128), "block_n": (64, 128)},
    WgradConfig: {"block_m": (128, 256), "cluster_n": (1, 2), "raster_m": (2, 8), "reduced_pieces": (0, 1, 2, 3)},
    Bf16WgradConfig: {"block_n": (128, 256), "block_t": (32, 64), "piece_slabs": (1, 2), "raster_m": (2, 8)},
}


class Kind(NamedTuple):
    """A kernel with formats. wgrad: "" for products, else "1d2d", "1d1d" or "rows". adds: to float32 outputs.

    draws: problems of each model. swiglu: with SwiGLU and quantization to FP8_BLOCK in the launch, as a first product.
    """

    a: str
    b: str
    draws: int
    wgrad: str = ""
    adds: bool = False
    swiglu: bool = False


KINDS: dict[str, Kind] = {
    "fp8": Kind("FP8_BLOCK", "FP8_BLOCK", 8),
    "fp8 swiglu": Kind("FP8_BLOCK", "FP8_BLOCK", 4, swiglu=True),
    "mxfp8": Kind("MXFP8", "MXFP8", 3),
    "bf16": Kind(BF16, BF16, 4),
    "bf16 x mxfp4": Kind(BF16, "MXFP4", 4),
    "fp8 x mxfp4": Kind("FP8_BLOCK", "MXFP4", 3),
    "bf16 x fp8": Kind(BF16, "FP8_BLOCK", 2),
    "mxfp4": Kind("MXFP4", "MXFP4", 2),
    "nvfp4": Kind("NVFP4", "NVFP4", 2),
    "wgrad fp8": Kind("FP8_BLOCK", "FP8_BLOCK", 2, "1d2d"),
    "wgrad fp8 +=": Kind("FP8_BLOCK", "FP8_BLOCK", 2, "1d2d", True),
    "wgrad fp8 1d1d +=": Kind("FP8_BLOCK", "FP8_BLOCK", 1, "1d1d", True),
    "wgrad bf16": Kind(BF16, BF16, 2, "rows"),
    "wgrad bf16 +=": Kind(BF16, BF16, 1, "rows", True),
}


@dataclass(frozen=True)
class PicksPoint:
    """A problem: ``rows`` = tokens * k rows in groups of uneven sizes, (groups, n, k) weights or gradients.

    kind: of KINDS. routing: of ROUTINGS. draw: one of several with equal fields has other sizes.
    """

    kind: str
    model: str
    tokens: int
    routing: str
    rows: int
    n: int
    k: int
    groups: int
    top_k: int
    draw: int

    @property
    def part(self) -> str:
        """Of the benchmark, which can be run by itself."""
        return self.kind


def grid(seed: int) -> list[PicksPoint]:
    """400 problems: of every model the same numbers of each kind."""
    found = []
    for model, (experts, top_k, hidden, intermediate, _) in MODELS.items():
        for name, kind in KINDS.items():
            for draw in range(kind.draws):
                pick = random.Random(f"{seed}:{model}:{name}:{draw}")
                tokens = pick.choice(WGRAD_TOKENS if kind.wgrad else TOKENS)
                first, second = (2 * intermediate, hidden), (hidden, intermediate)
                n, k = first if kind.swiglu else pick.choice([first, second])
                routing = pick.choice(list(ROUTINGS))
                found.append(PicksPoint(name, model, tokens, routing, tokens * top_k, n, k, experts, top_k, draw))
    return found


def sizes_of(point: PicksPoint, seed: int) -> list[int]:
    """Rows of each group: as equal as can be, or of tokens that each choose top_k experts."""
    spread = ROUTINGS[point.routing]
    if spread is None:
        return [point.rows // point.groups + (g < point.rows % point.groups) for g in range(point.groups)]
    generator = torch.Generator().manual_seed(random.Random(f"{seed}:{point!r}").getrandbits(31))
    popularity = spread * torch.randn(point.groups, generator=generator)
    logits = popularity + torch.randn((point.tokens, point.groups), generator=generator)
    ids = logits.topk(point.top_k, dim=1).indices
    return torch.bincount(ids.flatten(), minlength=point.groups).tolist()


# --- configurations --------------------------------------------------------------------------------------


def picked(point: PicksPoint, tokens: int, num_sms: int) -> Any:
    """The configuration that a call takes. tokens: of the copies that a weight gradient reads, else unused."""
    kind, p = KINDS[point.kind], point
    dtype = torch.float32 if kind.adds else torch.bfloat16
    if kind.wgrad == "rows":
        return select_bf16_wgrad(Bf16WgradProblem(p.n, p.k, p.rows, p.groups, dtype, num_sms, kind.adds))
    if kind.wgrad:
        return select_fp8_wgrad(WgradProblem(p.n, p.k, tokens, p.groups, kind.wgrad, dtype, num_sms, kind.adds))
    if (kind.a, kind.b) == (BF16, BF16):
        return select_plain(p.rows, p.n, p.k, p.groups, num_sms=num_sms)
    if (kind.a, kind.b) == ("FP8_BLOCK", "FP8_BLOCK"):
        problem = Problem(p.rows, p.n, p.k, p.groups, num_sms=num_sms)
        return select_fp8_swiglu(problem, SWIGLU) if kind.swiglu else select_fp8(problem)
    if kind.a == "MXFP8":
        return select_mxfp8(p.rows, p.n, p.groups, num_sms)
    return select_bf16(kind.a, kind.b, p.rows, p.n, p.groups, num_sms=num_sms)


def legal(config: Any) -> dict[str, Any]:
    """Every configuration that may take the place of one, by name, and itself first; each kernel once."""
    axes = AXES[type(config)]
    found = {config.prelude(): config}
    for values in itertools.product(*axes.values()):
        try:
            other = replace(config, **dict(zip(axes, values, strict=True)))
        except ValueError:
            continue
        found.setdefault(other.prelude(), other)
    return {name_of(other): other for other in found.values()}


def name_of(config: Any) -> str:
    """The fields that are chosen: "block_m 128, block_n 192, .."."""
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    own["stage_blocks"] = getattr(config, "blocks_of_stage", 0)  # chosen where the field is 0
    return ", ".join(f"{axis} {own[axis]}" for axis in AXES[type(config)])


# --- operands --------------------------------------------------------------------------------------------


class PicksProblem(NamedTuple):
    """run: the call with a configuration, or that which is picked, into out. tokens: as of `picked`."""

    point: PicksPoint
    sizes: list[int]
    out: torch.Tensor
    run: Callable[..., torch.Tensor]
    tokens: int


def make_problem(
    point: PicksPoint, seed: int, device: str, backend: BackendName | None = None, sizes: Sequence[int] | None = None
) -> PicksProblem:
    """Random operands. sizes: of the groups, instead of the point's."""
    p, kind = point, KINDS[point.kind]
    rows_of = list(sizes_of(point, seed) if sizes is None else sizes)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    if kind.wgrad:
        out = torch.empty((p.groups, p.n, p.k), dtype=torch.float32 if kind.adds else torch.bfloat16, device=device)
        given: dict[str, Any] = {"out": out, "accumulate": kind.adds, "backend": backend}
        if kind.wgrad == "rows":
            given["offs"] = group_offsets(torch.tensor(rows_of, device=device))
            run = partial(grouped_gemm_wgrad, normal(sum(rows_of), p.n), normal(sum(rows_of), p.k), **given)
            return PicksProblem(p, rows_of, out, run, sum(rows_of))
        block = (1 if kind.wgrad == "1d1d" else 128, 128)
        dy = make_columns(rows_of, p.n, (1, 128), 128, seed, device)
        x = make_columns(rows_of, p.k, block, 128, seed + 1, device)
        return PicksProblem(p, rows_of, out, partial(grouped_gemm_wgrad, dy, x, **given), x.data.shape[1])
    values = normal(p.groups, p.n, p.k)
    b = values if kind.b == BF16 else quantize(values, FORMAT_BY_NAME[kind.b], kind="weight")
    major = "mn" if kind.a == FP8_BLOCK.name else None
    a = quantized(normal(sum(rows_of), p.k), kind.a, "activation", scale_major=major)
    offs = group_offsets(torch.tensor(rows_of, device=device))
    if kind.swiglu:
        outputs = with_outputs(SWIGLU, EpilogueTensors(), sum(rows_of), p.n, p.groups, torch.device(device))
        assert isinstance(b, BlockScaledTensor)
        assert outputs.row_codes is not None
        return PicksProblem(p, rows_of, outputs.row_codes, partial(swiglu, a, b, offs, outputs, backend), 0)
    out = torch.empty((sum(rows_of), p.n), dtype=torch.bfloat16, device=device)
    return PicksProblem(p, rows_of, out, partial(grouped_gemm, a, b, offs, out=out, backend=backend), 0)


def swiglu(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    outputs: EpilogueTensors,
    backend: BackendName | None,
    config: Sm90Fp8Config | None = None,
) -> torch.Tensor:
    """The codes of SWIGLU of a product."""
    compute(a, b, offs, SWIGLU, outputs, backend, config)
    assert outputs.row_codes is not None
    return outputs.row_codes


def rehearse(kind: str, groups: int, num_sms: int) -> None:
    """Calls every configuration on a small problem on the CPU, for `padless.testing.compile_ahead`."""
    point = PicksPoint(kind, "any", groups, "even", groups, 256, 128, groups, 1, 0)
    problem = make_problem(point, 0, "cpu", "emulator")
    for config in legal(picked(point, problem.tokens, num_sms)).values():
        try:
            problem.run(config=config)
        except ValueError:  # it does not fit; the measurement says so
            continue
