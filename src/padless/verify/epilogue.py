"""Every route with a quantising epilogue on this GPU: the reference's bits from the GPU's sums, the emulator's bits,
nothing written anywhere else.

Without an activation every byte has to be right. SwiGLU's exponential is approximate, so a call with one is made twice:
once for its float32 values, which are judged by the error that the exponential may have, and once as it is, whose
outputs have to be exactly the reference's for those values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from padless.epilogue import Epilogue
from padless.kernels.table import Route
from padless.ops.grouped_gemm import grouped_gemm
from padless.reference.epilogue import epilogue_reference
from padless.runtime.choices import BackendName
from padless.runtime.driver import cuda_driver
from padless.testing.operands import moved
from padless.testing.processes import in_order, worker_pool
from padless.verify.checks import Check, Comparison
from padless.verify.emulator.kernels import backend_of, emulation_cost
from padless.verify.fuzz.place import Place
from padless.verify.problems.epilogue import (
    FENCE,
    EpilogueProblem,
    GuardedOutputs,
    Outputs,
    epilogue_tensors,
    gated_problems,
    quant_routes,
    random_epilogue_problem,
    run_problem,
)

PROBLEMS = 54
_TILE_BYTES = 512  # of the 32x4x4 layout
# The exponential within 2^-21, of which the sigmoid takes at most all, and four roundings of 2^-24; and what
# subnormals on the way lose.
_RELATIVE, _ABSOLUTE = 2.0**-21 + 2.0**-22, 2.0**-140
# Beside the emulator, whose exponential is exactly rounded: a part of the bytes of codes, of one-byte scales and of
# 16-bit values may be others, and of few bytes a whole block of codes, which moves with its scale.
_MOST_MOVED, _MOST_MOVED_OF_FEW = 0.01, 128


def _on_gpu(problem: EpilogueProblem) -> Outputs:
    return run_problem(problem, "cuda", None)


def _sums(problem: EpilogueProblem, device: str, backend: BackendName | None) -> torch.Tensor:
    """The float32 GEMM by the kernel that the quantising call takes."""
    a, b, offs = (moved(t, device) for t in (problem.a, problem.b, problem.offs))
    chosen = problem.options.get("config")
    kernel = None if chosen is None else type(chosen)  # its tile may be one that only an epilogue has
    return grouped_gemm(a, b, offs, out_dtype=torch.float32, backend=backend, config=kernel)


# --- judging ---------------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """Bytes that the reference wrote and the kernel wrote alike; SwiGLU's values, and those that are not exact."""

    bytes: int = 0
    values: int = 0
    inexact: int = 0
    worst: float = 0.0  # relative error of a value


def judge(problem: EpilogueProblem, sums: torch.Tensor, got: Outputs, values: Outputs | None = None) -> Judgement:
    """Raises AssertionError unless ``got`` is, byte for byte, what the reference makes of the float32 ``sums`` (M, N).

    Args:
        values: outputs of ``problem.for_values()``; needed where there is an activation.
    """
    epilogue, found, count = got.epilogue, Judgement(), 0
    if epilogue.is_glu:
        assert values is not None
        found = _judge_values(problem, sums, values)
        sums = inside(problem, values)["d"]
        plain: dict[str, Any] = {"activation": "none", "gate_rule": None, "gate_up": "concatenated"}
        epilogue = replace(epilogue, alpha=False, bias=False, prob=False, **plain)
    wanted, before = _reference(problem, sums, got.epilogue, epilogue), GuardedOutputs(problem, got.epilogue)
    for name, buffer in got.bytes.items():
        wrong = buffer != wanted.buffers[name]
        if name == "d":  # a NaN is a NaN; amax and scales have one
            wrong &= ~_both_nan(buffer, wanted.buffers[name], before.tensors[name])
        if wrong.any() and name.endswith("scale") and "blocked" in getattr(epilogue, name.replace("scale", "layout")):
            exist = _reference(problem, sums, got.epilogue, epilogue, complement=True).buffers[name]
            wrong &= ~_allowed_zeros(buffer, wanted.buffers[name] == exist)
        if wrong.any():
            raise AssertionError(f"{problem}: {name}: {_where(wrong)}")
        count += int((wanted.buffers[name] != before.buffers[name]).sum())
    return found._replace(bytes=count)


def _reference(
    problem: EpilogueProblem, sums: torch.Tensor, shaped_by: Epilogue, epilogue: Epilogue, complement: bool = False
) -> GuardedOutputs:
    outputs = GuardedOutputs(problem, shaped_by, complement=complement)
    epilogue_reference(sums, problem.offs, epilogue, epilogue_tensors(problem, outputs))
    return outputs


def _judge_values(problem: EpilogueProblem, sums: torch.Tensor, values: Outputs) -> Judgement:
    valid = problem.valid_rows
    wanted = _reference(problem, sums, values.epilogue, values.epilogue)
    before = GuardedOutputs(problem, values.epilogue)
    exact = wanted.tensors["d"][:valid].double()
    computed = inside(problem, values)["d"][:valid].double()
    error = (computed - exact).abs()
    same = (computed == exact) | (computed.isnan() & exact.isnan())
    wrong = ~(same | (error <= exact.abs() * _RELATIVE + _ABSOLUTE))
    if wrong.any():
        row, column = (int(i) for i in torch.nonzero(wrong)[0])
        raise AssertionError(
            f"{problem}: {int(wrong.sum())} of {wrong.numel()} values are further off than exp explains, the first in "
            f"row {row}, column {column}: {float(computed[row, column])!r}, not {float(exact[row, column])!r}"
        )
    stray = (values.bytes["d"] != before.buffers["d"]) & (wanted.buffers["d"] == before.buffers["d"])
    stray[FENCE : FENCE + 4 * exact.numel()] = False
    if stray.any():
        raise AssertionError(f"{problem}: values: {_where(stray)}")
    normal = ~same & (exact.abs() > 2.0**-100) & exact.isfinite()
    worst = float((error[normal] / exact[normal].abs()).max()) if normal.any() else 0.0
    return Judgement(0, exact.numel(), int((~same).sum()), worst)


def inside(problem: EpilogueProblem, outputs: Outputs) -> dict[str, torch.Tensor]:
    """The outputs as tensors, without their fences."""
    likes = GuardedOutputs(problem, outputs.epilogue).tensors
    buffers = {name: (_inner(buffer, likes[name].dtype), likes[name]) for name, buffer in outputs.bytes.items()}
    return {name: values.as_strided(like.shape, like.stride(), 0) for name, (values, like) in buffers.items()}


def _inner(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer[FENCE:-FENCE].clone().view(dtype)


def _both_nan(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """By byte of a buffer: whether both have a NaN there."""
    nan = torch.zeros(x.shape, dtype=torch.bool)
    both = _inner(x, like.dtype).isnan() & _inner(y, like.dtype).isnan()
    nan[FENCE:-FENCE] = both.repeat_interleave(like.element_size())
    return nan


def _allowed_zeros(buffer: torch.Tensor, exist: torch.Tensor) -> torch.Tensor:
    """By byte: zeros in padding of a 32x4x4 tile that also has scales (``exist``: bytes that the reference wrote)."""
    allowed, tiles = torch.zeros_like(exist), exist[FENCE:-FENCE].clone().view(-1, _TILE_BYTES)
    allowed[FENCE:-FENCE] = (tiles.any(dim=1, keepdim=True) & ~tiles).flatten()
    return allowed & (buffer == 0)


def _where(wrong: torch.Tensor) -> str:
    first, last = torch.nonzero(wrong).flatten()[[0, -1]].tolist()
    outside = int(wrong[:FENCE].sum() + wrong[-FENCE:].sum())
    text = f"{int(wrong.sum())} of {wrong.numel() - 2 * FENCE} bytes are wrong, from {first - FENCE} to {last - FENCE}"
    return text + (f"; {outside} of them outside of the output, in its fences" if outside else "")


# --- beside the emulator ---------------------------------------------------------------------------------


def emulate_epilogue(route: Route, seed: int) -> tuple[dict[str, bytes], bytes] | None:
    """All bytes of every output by the emulator; and of SwiGLU's float32 values, else none. None for a refused call."""
    problem, backend = random_epilogue_problem(route, seed), backend_of(route.arch)
    values = b""
    try:
        outputs = run_problem(problem, "cpu", backend).bytes
        if problem.gate_up is not None:
            values = run_problem(problem.for_values(), "cpu", backend).bytes["d"].numpy().tobytes()
    except ValueError:
        return None
    return {name: t.numpy().tobytes() for name, t in outputs.items()}, values


def _cost(route: Route, seed: int) -> float:
    problem = random_epilogue_problem(route, seed)
    groups, n, k = problem.b.shape
    calls = 1 if problem.gate_up is None else 2
    return calls * emulation_cost(problem.valid_rows, groups, n, k)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _compare(problem: EpilogueProblem, emulated: tuple[dict[str, bytes], bytes]) -> tuple[int, int]:
    """(bytes compared, bytes that SwiGLU's exponential moved); AssertionError for a difference of any other kind."""
    got = _on_gpu(problem)
    wanted = {name: _tensor(data) for name, data in emulated[0].items()}
    assert got.bytes.keys() == wanted.keys()
    exact = problem.gate_up is None
    if not exact:
        values = _on_gpu(problem.for_values())
        theirs = Outputs(values.epilogue, {"d": _tensor(emulated[1])})
        exact = torch.equal(values.bytes["d"], theirs.bytes["d"])
        x, y = (inside(problem, v)["d"][: problem.valid_rows].double() for v in (values, theirs))
        close = (x - y).abs() <= 2 * (y.abs() * _RELATIVE + _ABSOLUTE)
        far = ~(close | (x == y) | (x.isnan() & y.isnan()))
        assert not far.any(), f"{problem}: {int(far.sum())} of {far.numel()} values are not the emulator's"
    count = moved_bytes = 0
    for name, buffer in got.bytes.items():
        count += buffer.numel() - 2 * FENCE
        differs = buffer != wanted[name]
        inexact = not exact and not (differs[:FENCE].any() or differs[-FENCE:].any())
        is_float = inside(problem, got)[name].dtype == torch.float32
        limit = differs.numel() if is_float else max(_MOST_MOVED_OF_FEW, _MOST_MOVED * differs.numel())
        if differs.sum() > (limit if inexact else 0):
            raise AssertionError(f"{problem}: {name}, beside the emulator: {_where(differs)}")
        if inexact and is_float:
            _assert_close(f"{problem}: {name}", buffer, wanted[name])
        moved_bytes += int(differs.sum())
    return count, moved_bytes


def _assert_close(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """float32 outputs that follow from SwiGLU's values: values, amax and scales, twice the values' bound apart."""
    x, y = (_inner(t, torch.float32) for t in (got, wanted))
    differ = x.view(torch.int32) != y.view(torch.int32)  # random bytes that both left alone are the same
    x, y = x[differ].double(), y[differ].double()
    near = ((x - y).abs() <= 2 * (y.abs() * (_RELATIVE + 2.0**-23) + _ABSOLUTE)) | (x.isnan() & y.isnan())
    assert near.all(), f"{what}: {int((~near).sum())} of {differ.numel()} are not the emulator's"


# --- checks ----------------------------------------------------------------------------------------------


def problems_of(arch: str, problems: int = PROBLEMS, first_seed: int = 0) -> list[tuple[Route, int]]:
    """Problems of both checks, routes in turn, each with a seed of its own."""
    routes = quant_routes(arch)
    return [(routes[i % len(routes)], first_seed + i) for i in range(problems)] if routes else []


def _checked(jobs: list[tuple[Route, int]], refused: int) -> str:
    """The number of problems; AssertionError where too many were refused."""
    assert refused <= len(jobs) // 3, f"{refused} of {len(jobs)} problems were refused: what was checked then?"
    return f"{len(jobs) - refused} problems of {len({route for route, _ in jobs})} routes ({refused} refused)"


def check_epilogue(place: Place) -> None:
    """Every output is what the reference makes of the GPU's own float32 GEMM."""
    jobs, refused = place.some(problems_of(place.arch)), 0
    for route, seed in jobs:
        try:
            _check(place, random_epilogue_problem(route, seed))
        except ValueError:  # a kernel says what it cannot do; the emulator's refuses the same
            refused += 1
    place.judge.wrong(
        f"{refused} of {len(jobs)} problems were refused: what was checked then?", refused > len(jobs) // 3
    )


def check_gates(place: Place) -> None:
    """The same of SwiGLUs with a rule, of which no kernel refuses one."""
    for problem in gated_problems(place.arch):
        _check(place, problem)


def _check(place: Place, problem: EpilogueProblem) -> None:
    device, backend = str(place.device), place.backend
    outputs = run_problem(problem, device, backend)
    values = None if problem.gate_up is None else run_problem(problem.for_values(), device, backend)
    sums = _sums(problem, device, backend)
    place.judge.ask(lambda: judge(problem, sums.cpu(), outputs, values).bytes)


def check_epilogue_against_emulator(problems: int = PROBLEMS, first_seed: int = 0, workers: int | None = None) -> str:
    """Raises AssertionError with the problems whose outputs differ between the GPU and the emulator."""
    jobs = problems_of(cuda_driver().arch, problems, first_seed)
    if not jobs:
        return "0 problems: no route has a quantising epilogue here"
    count, inexact, refused = 0, 0, 0
    wrong: list[str] = []
    with worker_pool(workers) as pool:
        emulated = in_order(pool, emulate_epilogue, jobs, _cost)
        for (route, seed), outputs in zip(jobs, emulated, strict=True):
            if outputs is None:
                refused += 1
                continue
            try:
                compared, differ = _compare(random_epilogue_problem(route, seed), outputs)
                count, inexact = count + compared, inexact + differ
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(jobs)} problems: " + "; ".join(wrong[:8])
    return f"{_checked(jobs, refused)}, {count} bytes the same, but {inexact} that SwiGLU's exponential moved"


CHECK, GATES = Check(check_epilogue, 8), Check(check_gates)
COMPARISONS = {
    "emulator agrees on epilogues": Comparison(check_epilogue_against_emulator, problems_of, emulate_epilogue)
}
