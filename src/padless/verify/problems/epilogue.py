"""Random calls of grouped_gemm_quant and grouped_gemm_swiglu_quant, run with every output between fences.

A call is a function of its route and seed alone, so the GPU, the emulator in another process and the judge see the same.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from padless.compat.cudnn.request import D_DTYPES, FORMAT_OF_DTYPE, CudnnRequest, SwigluRequest
from padless.epilogue import COLUMN_FORMATS, Epilogue, EpilogueTensors, GateRule
from padless.formats import FORMAT_BY_NAME, FORMATS, FP8_BLOCK, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import QUANT, ROUTES, Route, kernels_arch
from padless.ops.epilogue_run import with_outputs
from padless.ops.grouped_gemm import group_offsets
from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
from padless.runtime.choices import BackendName
from padless.testing.operands import moved, quantized

FENCE = 4096
GATE_UP = (None, "interleaved", "concatenated")
OUT_FORMATS: tuple[BlockScaledFormat | None, ...] = (None, *FORMATS)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_N_MULTIPLE = {None: 32, "interleaved": 64, "concatenated": 128}
_DTYPE_OF = {fmt: dtype for dtype, fmt in FORMAT_OF_DTYPE.items()}


def quant_routes(arch: str) -> list[Route]:
    """The routes of an architecture with a quantising epilogue."""
    return [route for route in ROUTES if (route.operation, route.arch) == (QUANT, kernels_arch(arch))]


@dataclass(frozen=True, eq=False)
class EpilogueProblem:
    """One call: operands on the CPU, ``gate_up`` None for grouped_gemm_quant, the other options as keywords.

    rule, alternating: of a SwiGLU, for which those calls have no keywords.
    """

    a: BlockScaledTensor | torch.Tensor
    b: BlockScaledTensor
    offs: torch.Tensor
    gate_up: str | None
    options: dict[str, Any]
    seed: int
    rule: GateRule | None = None
    alternating: bool = False

    @property
    def valid_rows(self) -> int:
        return int(self.offs[-1])

    def __str__(self) -> str:
        given = {
            k: getattr(v, "name", tuple(v.shape) if isinstance(v, torch.Tensor) else v)
            for k, v in self.options.items()
            if v is not None
        }
        return f"problem {self.seed} of {tuple(self.a.shape)} x {tuple(self.b.shape)}, {self.gate_up}, {given}"

    def for_values(self) -> EpilogueProblem:
        """The same call for the float32 values that this one rounds or quantises."""
        kept = ("alpha_tensor", "bias_tensor", "prob_tensor", "semantics", "m_aligned", "config")
        values = {k: v for k, v in self.options.items() if k in kept}
        return replace(self, options=values | {"d_dtype": torch.float32, "return_amax": False})


# --- drawing ---------------------------------------------------------------------------------------------


def random_epilogue_problem(route: Route, seed: int) -> EpilogueProblem:
    """A function of the route and the seed. Eighteen seeds in a row have each activation with each output format."""
    draw = random.Random(f"{route.module} {route.a} {route.b} {seed}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    gate_up, out_format = GATE_UP[seed % 3], OUT_FORMATS[seed // 3 % 6]
    m_aligned = draw.choice((1, 1, 1, 128))
    small = (0, 1, 5, 63, 64, 65, 127, 129, draw.randrange(150))
    sizes = [draw.choice(small if m_aligned == 1 else (0, 128, 128, 256)) for _ in range(draw.randint(1, 4))]
    m, groups = sum(sizes) + draw.randrange(4), len(sizes)
    n, k = _columns(draw, gate_up, out_format), (16 if route.a == route.b == "FP8_BLOCK" else 32)
    k *= draw.randint(1, 20)
    special = draw.randrange(6) == 0
    a, b = operands(route, m, n, k, groups, generator, special)
    options = _outputs(draw, generator, out_format, groups) | {"m_aligned": m_aligned}
    options |= _numbers(draw, generator, m, n, groups, special)
    options["semantics"] = draw.choice(("implementation", "documented"))
    problem = EpilogueProblem(a, b, group_offsets(sizes), gate_up, options, seed)
    options["config"] = draw.choice(_configs(route, problem))
    return problem


def _columns(draw: random.Random, gate_up: str | None, out_format: BlockScaledFormat | None) -> int:
    """N: tails of the 128-column tile, in the steps that 16 bytes a row of the output allow."""
    if gate_up is not None:
        multiple = _N_MULTIPLE[gate_up]
        return multiple * draw.randint(1, 512 // multiple)
    multiple = 8 if out_format is None else 16 * out_format.codes_per_byte
    return multiple * draw.randint(1, 352 // multiple)


def operands(
    route: Route, m: int, n: int, k: int, groups: int, generator: torch.Generator, special: bool
) -> tuple[BlockScaledTensor | torch.Tensor, BlockScaledTensor]:
    x = torch.randn((m, k), generator=generator)
    x *= torch.exp2(torch.randint(-4, 5, (m, 1), generator=generator).float())
    if special and m > 3:
        x[m // 2] = 0
        x[m // 3] *= 2.0**-100  # sums below every format's smallest scale
        x[m // 4] *= 30  # gates beyond the exponential's range
    w = torch.randn((groups, n, k), generator=generator)
    return quantized(x, route.a, "activation"), quantized(w, route.b, "weight")


def _outputs(
    draw: random.Random, generator: torch.Generator, fmt: BlockScaledFormat | None, groups: int
) -> dict[str, Any]:
    options: dict[str, Any] = {"return_amax": draw.choice((None, True, False))}
    if fmt is None:
        return options | {"d_dtype": draw.choice(D_DTYPES)}
    by_dtype = fmt in _DTYPE_OF and draw.random() < 0.5
    options |= {"d_dtype": _DTYPE_OF[fmt]} if by_dtype else {"d_format": fmt}
    options["row_output"], options["column_output"] = True, None
    if fmt in COLUMN_FORMATS:
        options["row_output"], options["column_output"] = draw.choice(((True, None), (True, False), (False, True)))
    if fmt == FP8_BLOCK:
        return options | {"row_layout": draw.choice((None, "plain", "plain_mn"))}
    options["row_layout"] = draw.choice((None, "plain", "blocked", "blocked_groups"))
    if fmt in COLUMN_FORMATS and options["column_output"] is not False:
        options["column_layout"] = draw.choice((None, "plain", "blocked", "blocked_groups"))
        options["discrete_col_sfd"] = draw.random() < 0.5
    if fmt == NVFP4:
        count = draw.choice((1, groups))
        return options | {"global_scale_tensor": torch.rand(count, generator=generator) * 0.1 + 0.001}
    if draw.random() < 0.5:
        return options | {"norm_const_tensor": torch.rand(1, generator=generator) + 0.01}
    return options | {"scale_rule": draw.choice((None, "rceil", "floor"))}


def _numbers(
    draw: random.Random, generator: torch.Generator, m: int, n: int, groups: int, special: bool
) -> dict[str, Any]:
    alpha = torch.randn(groups, generator=generator)
    bias = torch.randn((groups, n), generator=generator) * 3
    prob = torch.rand(m, generator=generator) * 2 - 0.5
    if special and m > 3:
        prob[m // 5], prob[m // 2] = draw.choice((math.inf, math.nan)), 0.0
    numbers: dict[str, Any] = {}
    for name, t in (("alpha", alpha), ("bias", bias), ("prob", prob)):
        if draw.random() < 0.6:
            numbers[f"{name}_tensor"] = t.to(draw.choice(_NUMBERS))
    if "prob_tensor" in numbers and draw.random() < 0.5:
        numbers["prob_tensor"] = numbers["prob_tensor"].view(m, 1, 1)
    return numbers


def _configs(route: Route, problem: EpilogueProblem) -> list[Any]:
    """None and, on Hopper, every tile that can do this epilogue."""
    if route.config_class is not Sm90Fp8Config:
        return [None]
    fmt = problem.options.get("d_format") or FORMAT_OF_DTYPE.get(problem.options.get("d_dtype", torch.bfloat16))
    columns = fmt in COLUMN_FORMATS and problem.options["column_output"] is not False
    heights = [128]
    if fmt is not None or problem.options["d_dtype"] != torch.float32 or problem.gate_up is not None:
        heights.append(256)  # twice the shared memory for float32 values leaves too few stages
    if fmt != FP8_BLOCK or not columns:
        heights.append(64)
    swaps = problem.gate_up is not None and fmt == FP8_BLOCK and problem.options["row_output"]
    return [None] + [Sm90Fp8Config(block_m=m, cluster_n=c) for m in heights for c in ((2,) if swaps else (1, 2))]


# --- SwiGLUs with a rule, such as gpt-oss' --------------------------------------------------------------

_RULES = (GateRule(1.702, 7.0, 1.0), GateRule(limit=0.75))
# Activations, weights, output ("BF16" for bfloat16), order of gate and up.
_GATED = {
    "sm_90a": (
        ("BF16", "MXFP4", "BF16", "alternating"),
        ("FP8_BLOCK", "MXFP4", "FP8_BLOCK", "alternating"),
        ("NVFP4", "NVFP4", "NVFP4", "alternating"),
        ("FP8_BLOCK", "FP8_BLOCK", "FP8_BLOCK", "concatenated"),
        ("MXFP8", "MXFP8", "MXFP8", "interleaved"),
    ),
    "sm_100a": (
        ("FP8_BLOCK", "FP8_BLOCK", "FP8_BLOCK", "concatenated"),
        ("MXFP8", "MXFP4", "MXFP8", "interleaved"),
        ("NVFP4", "NVFP4", "NVFP4", "concatenated"),
    ),
}


def gated_problems(arch: str) -> Iterator[EpilogueProblem]:
    """Products of every kernel that stores a layer's SwiGLU, few rows a group as in decoding and many as in prefill."""
    for (seed, (a, b, out, order)), sizes in itertools.product(
        enumerate(_GATED[kernels_arch(arch)]), ((1, 0, 9, 2), (200, 0, 130, 7))
    ):
        generator, groups, n, k = torch.Generator().manual_seed(seed), len(sizes), 384, 256
        x = 2 * torch.randn(sum(sizes) + 3, k, generator=generator)
        w = torch.randn(groups, n, k, generator=generator) / k**0.5
        bias = torch.randn(groups, n, generator=generator)
        options: dict[str, Any] = {"bias_tensor": bias, "m_aligned": 1, "return_amax": False}
        if out == "BF16":
            options |= {"d_dtype": torch.bfloat16}
        else:
            layout = "plain_mn" if out == FP8_BLOCK.name else "plain"
            options |= {"d_format": FORMAT_BY_NAME[out], "column_output": False, "row_layout": layout}
            options |= {"scale_rule": "rceil"} if out == "MXFP8" else {}
            options |= {"global_scale_tensor": torch.full((1,), 0.02)} if out == "NVFP4" else {}
        alternating, rule = order == "alternating", _RULES[seed % 2]
        operands = quantized(x, a, "activation"), quantized(w, b, "weight")
        gate_up = "concatenated" if alternating else order
        yield EpilogueProblem(*operands, group_offsets(sizes), gate_up, options, seed, rule, alternating)


# --- running ---------------------------------------------------------------------------------------------


class GuardedOutputs:
    """The outputs of an epilogue as the call allocates them, but among random bytes: the same at every use.

    tensors: the outputs by their names in EpilogueTensors, and column_tiles. buffers: all their bytes, by name.
    """

    def __init__(
        self, problem: EpilogueProblem, epilogue: Epilogue, device: str = "cpu", complement: bool = False
    ) -> None:
        draw = torch.Generator().manual_seed(problem.seed)
        (groups, n), m = problem.b.shape[:2], problem.a.shape[0]
        m_aligned = problem.options["m_aligned"]
        like = with_outputs(epilogue, EpilogueTensors(), m, n, groups, torch.device("cpu"), m_aligned)
        self.tensors: dict[str, Any] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, t in vars(like).items():
            if not isinstance(t, torch.Tensor):
                continue
            size = t.untyped_storage().nbytes()
            noise = torch.randint(0, 256, (FENCE + size + FENCE,), dtype=torch.uint8, generator=draw)
            self.buffers[name] = (~noise if complement else noise).to(device)
            inside = self.buffers[name][FENCE : FENCE + size].view(t.dtype)
            self.tensors[name] = inside.as_strided(t.shape, t.stride())
            if name == "amax":
                self.tensors[name].fill_(-math.inf)
        if like.column_scale is not None:
            self.tensors["column_tiles"] = like.column_tiles


@dataclass(frozen=True)
class Outputs:
    """Outputs of a call: all bytes of each, guards included, on the CPU."""

    epilogue: Epilogue
    bytes: dict[str, torch.Tensor]


def run_problem(problem: EpilogueProblem, device: str, backend: BackendName | None) -> Outputs:
    """The call as its arguments resolve to it, into guarded outputs."""
    options: dict[str, Any] = {k: moved(v, device) for k, v in problem.options.items()}
    if problem.gate_up is not None:
        options["gate_up"] = problem.gate_up
    request = (CudnnRequest if problem.gate_up is None else SwigluRequest)(
        a_tensor=moved(problem.a, device),
        b_tensor=moved(problem.b, device),
        padded_offsets=problem.offs.to(device),
        **options,
    )
    call = request.resolve()
    order: dict[str, Any] = {"gate_up": "alternating"} if problem.alternating else {}
    epilogue = replace(call.epilogue, gate_rule=problem.rule, **order)
    guarded = GuardedOutputs(problem, epilogue, device)
    grouped_gemm_epilogue(
        call.operands.a,
        call.operands.b,
        call.operands.offs,
        epilogue,
        replace(call.tensors, **guarded.tensors),
        m_aligned=request.m_aligned,
        backend=backend,
        config=request.config,
    )
    if device == "cuda":
        torch.cuda.synchronize()
    return Outputs(epilogue, {name: t.cpu() for name, t in guarded.buffers.items()})


def epilogue_tensors(problem: EpilogueProblem, outputs: GuardedOutputs) -> EpilogueTensors:
    """Operands of the problem and outputs to write, for the reference."""
    names = ("alpha", "bias", "prob", "norm_const", "global_scale")
    given = {name: t.float() for name in names if (t := problem.options.get(f"{name}_tensor")) is not None}
    if "prob" in given:
        given["prob"] = given["prob"].reshape(-1)
    return EpilogueTensors(**given, **outputs.tensors)
