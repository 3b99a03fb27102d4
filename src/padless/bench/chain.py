"""Calls one after the other in a CUDA graph, as a model that decodes makes them.

A call by itself says nothing about what happens between two of them. Here n products run in one graph, each with weights
of its own layer, so that they come from memory, and each with an output of its own. Contenders of a point:

    padless                          grouped_gemm as it is called: a kernel may begin while the one ahead is ending
    padless, ordinary launches       the same kernels; each waits until the one ahead of it has ended
    deepgemm_masked                  DeepGEMM's masked GEMM with ordinary launches
    deepgemm_masked, programmatic    the same after deep_gemm.set_pdl(True)
    mlp                              n times an expert's two projections: grouped_gemm_swiglu_quant with these weights,
                                     then grouped_gemm of its quantised rows, back to K columns
    mlp, ordinary launches           the same kernels with ordinary launches

The time of a contender is that of one replay divided by n: of one product, or of one pair for "mlp".

Outputs are poisoned with NaN and compared with float64 before anything is timed and again after it. Both ways to launch
must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from padless.bench.chain_problem import ChainProblem, grid, make_chain
from padless.bench.chain_report import MLP, MLP_ORDINARY, ORDINARY, PADLESS, PROGRAMMATIC, print_chain
from padless.bench.group_sizes import DecodePoint
from padless.bench.measure import check
from padless.bench.paper import BenchResult, resolve_peers
from padless.bench.peers import Contender, Peer
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.problem import (
    GroupedProblem,
    SampledReference,
    same_bits,
)
from padless.bench.results import Record, sessions_of
from padless.bench.session import DEFAULT_OUT_DIR, DEFAULT_SETTINGS, RunSettings, open_session, run_points
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.ops import launch_cache
from padless.runtime.driver import Driver
from padless.testing import machine
from padless.testing.timing import Timer, Timing, capture

REPEATS = 5
PEERS = ("deepgemm",)
# Row error of an expert's MLP. Between its projections values are rounded to e4m3, in the reference from other sums than
# in the kernel: one near the middle of two codes gets the other code, an eighth away. That moved rows by up to 1.6%.
MLP_TOLERANCE = 0.03
_SAME_BITS = ((PADLESS, ORDINARY), (MLP, MLP_ORDINARY))


# --- contenders ----------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """A contender: the parts' calls in order, as one CUDA graph, which is captured when it is run first.

    setting: entered for the capture.
    """

    name: str
    parts: list[Contender]
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    graph: torch.cuda.CUDAGraph | None = None

    def call_all(self) -> None:
        """Every call in order, without a graph."""
        for part in self.parts:
            part.call()

    def replay(self) -> None:
        """The graph's calls, as they are timed."""
        assert self.graph is not None, "a chain is run before it is timed"
        self.graph.replay()

    def run(self) -> None:
        """Poisons every output that is known and replays the graph."""
        if self.graph is None:
            with self.setting():
                self.graph = capture(self.call_all)
        for part in self.parts:
            if part.buffer is not None:
                part.buffer.fill_(float("nan"))
        self.replay()

    def output(self) -> torch.Tensor:
        """A copy of the outputs of all calls on top of each other, (calls * M, columns)."""
        return torch.cat([part.output() for part in self.parts if part.output is not None])

    def contender(self) -> Contender:
        """The chain as something to be checked."""
        has_output = all(part.output is not None for part in self.parts)
        tolerance = max(part.tolerance for part in self.parts)
        return Contender(self.name, self.run, self.output if has_output else None, tolerance)


def gemm_chains(problem: ChainProblem, ordinary: Driver) -> list[Chain]:
    """The products as called, and with the launches of the driver `ordinary`."""
    from padless.ops.grouped_gemm import grouped_gemm

    def launched(a: Any, b: Any, offs: Any, out: torch.Tensor) -> Any:
        return grouped_gemm(a, b, offs, out=out)

    chains = []
    for name, gemm in ((PADLESS, launched), (ORDINARY, partial(gemm_of_driver, ordinary))):
        parts = []
        for layer in problem.order:
            p = problem.layers[layer]
            out = p.empty_out()
            parts.append(_part(name, partial(gemm, p.a, p.b, p.offs, out), out))
        chains.append(Chain(name, parts))
    return chains


def mlp_chains(problem: ChainProblem, ordinary: Driver | None) -> list[Chain]:
    """The expert MLPs as called and, where it is given, with the launches of the driver `ordinary`."""
    pairs: list[tuple[str, Callable[..., Any]]] = [(MLP, mlp)]
    if ordinary is not None:
        pairs.append((MLP_ORDINARY, partial(mlp_of_driver, ordinary)))
    chains = []
    for name, call in pairs:
        parts = []
        for layer in problem.order:
            first, second = problem.layers[layer], problem.second[layer]
            out = second.empty_out()
            parts.append(_part(name, partial(call, first, second, out), out, MLP_TOLERANCE))
        chains.append(Chain(name, parts))
    return chains


def _part(
    name: str, call: Callable[[], Any], out: torch.Tensor, tolerance: float = Contender.tolerance
) -> Contender:
    return Contender(name, call, lambda: out, tolerance, buffer=out)


def peer_chains(problem: ChainProblem, peer: Peer) -> list[Chain]:
    """Chains of what a peer has for groups of few rows; DeepGEMM's with both kinds of launches if it has the switch."""
    calls = [peer.decode(problem.layers[layer]) for layer in problem.order]
    chains = [Chain(parts[0].name, list(parts)) for parts in zip(*calls, strict=True)]
    if not isinstance(peer, DeepGemm) or not peer.has_programmatic_launches:
        return chains
    return [
        Chain(chain.name + suffix, chain.parts, partial(peer.programmatic_launches, on))
        for chain in chains
        for suffix, on in (("", False), (PROGRAMMATIC, True))
    ]


def gemm_of_driver(
    driver: Driver, a: BlockScaledTensor, b: BlockScaledTensor, offs: torch.Tensor, out: torch.Tensor
) -> None:
    """What grouped_gemm launches, by another driver than the process's."""
    from padless.kernels.table import find_route, format_name

    route = find_route("grouped_gemm", driver.arch, format_name(a), b.format.name)
    route.load().prepare(driver, a, b, offs, out, None).launch(launch_cache.stream_of(out))


def swiglu_of_driver(
    driver: Driver, a: BlockScaledTensor, b: BlockScaledTensor, offs: torch.Tensor
) -> BlockScaledTensor:
    """What grouped_gemm_swiglu_quant launches for FP8_BLOCK rows alone, by another driver than the process's."""
    from padless.kernels.table import QUANT, find_route, format_name
    from padless.ops.grouped_gemm_epilogue import default_row_layout, row_tensor, with_outputs

    epilogue = Epilogue(
        activation="swiglu_concatenated", row_format=FP8_BLOCK, row_layout=default_row_layout(FP8_BLOCK)
    )
    m, (groups, n, _) = a.shape[0], b.data.shape
    tensors = with_outputs(epilogue, EpilogueTensors(), m, n, groups, a.device)
    route = find_route(QUANT, driver.arch, format_name(a), b.format.name)
    prepared = route.load_quant().prepare(driver, a, b, offs, tensors, None, epilogue=epilogue)
    prepared.launch(launch_cache.stream_of(a.data))
    row = row_tensor(epilogue, tensors, offs)
    assert row is not None
    return row


def mlp(first: GroupedProblem, second: GroupedProblem, out: torch.Tensor, backend: str | None = None) -> None:
    """An expert's MLP of the public calls: gate, up and SwiGLU, quantised, in one launch, and the way back."""
    from padless.compat.cudnn.calls import grouped_gemm_swiglu_quant
    from padless.ops.grouped_gemm import grouped_gemm

    hidden = grouped_gemm_swiglu_quant(
        gate_up="concatenated",
        a_tensor=first.a,
        b_tensor=first.b,
        padded_offsets=first.offs,
        d_format=FP8_BLOCK,
        column_output=False,
        backend=backend,
    ).row
    assert hidden is not None
    grouped_gemm(hidden, second.b, first.offs, out=out, backend=backend)


def mlp_of_driver(driver: Driver, first: GroupedProblem, second: GroupedProblem, out: torch.Tensor) -> None:
    """What `mlp` launches, by another driver than the process's."""
    hidden = swiglu_of_driver(driver, first.a, first.b, first.offs)
    gemm_of_driver(driver, hidden, second.b, first.offs, out)


# --- measuring -----------------------------------------------------------------------------------------------


@dataclass
class _Judged:
    """Chains that are right so far, each with the reference of its product, and what was found out about all."""

    chains: list[tuple[list[Chain], SampledReference]]
    row_error: dict[str, float | None]
    wrong: dict[str, str]
    errors: dict[str, str]

    def check(self) -> None:
        """Runs every chain once on poisoned outputs; those that raise or are wrong are left out from here on."""
        kept = []
        for chains, reference in self.chains:
            right, record = check([chain.contender() for chain in chains], reference, self.errors)
            names = {contender.name for contender in right}
            kept.append(([chain for chain in chains if chain.name in names], reference))
            self.row_error |= record["row_error"]
            self.wrong |= record["wrong"]
        self.chains = kept

    @property
    def by_name(self) -> dict[str, Chain]:
        return {chain.name: chain for chains, _ in self.chains for chain in chains}


def measure_chain(problem: ChainProblem, peers: Sequence[Peer], timer: Timer, ordinary: Driver) -> Record:
    """Record of one point: checks, and microseconds a call of every chain that is right before and after."""
    products = gemm_chains(problem, ordinary)
    errors: dict[str, str] = {}
    for peer in peers:
        try:
            products += peer_chains(problem, peer)
        except Exception as error:
            errors[peer.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    of_products, of_mlps = problem.references()
    judged = _Judged([(products, of_products), (mlp_chains(problem, ordinary), of_mlps)], {}, {}, errors)
    judged.check()
    times = timer.gpu({name: chain.replay for name, chain in judged.by_name.items()})
    clocks = machine.clocks()
    judged.check()
    right = judged.by_name
    for name, other in _SAME_BITS:
        if name in right and other in right and not same_bits(right[name].output(), right[other].output()):
            judged.wrong[name] = f"is wrong: its bits are not those of {other!r}"
            del right[name]
    point = problem.layers[0].point
    return {
        "sizes": problem.layers[0].sizes,
        "flops": point.flops,
        "bytes": point.bytes,
        "layers": len(problem.layers),
        "calls": problem.calls,
        "row_error": judged.row_error,
        "wrong": judged.wrong,
        "errors": judged.errors,
        "gpu": {name: _a_call(times[name], problem.calls).as_dict() for name in right},
        "clocks": clocks,
    }


def _a_call(replay: Timing, calls: int) -> Timing:
    return Timing(tuple(us / calls for us in replay.samples_us))


def run_chain(
    points: Sequence[DecodePoint] | None = None,
    peers: Sequence[Peer] | Sequence[str] | None = None,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Measures every point (None: the quick grid); writes chain.jsonl and prints the tables.

    peers: peers or their names; None for DeepGEMM.

    Raises ValueError without a CUDA GPU, and where the environment turns programmatic launches off.
    """
    machine.require_gpu("padless bench chain")
    from padless.runtime.driver import CudaDriver, cuda_driver

    if not cuda_driver().programmatic:
        raise ValueError("PADLESS_PROGRAMMATIC_LAUNCH is 0; unset it: both ways to launch are compared here")
    chosen = resolve_peers(PEERS if peers is None else peers, settings.peers_dir)
    wanted = grid(full=False) if points is None else list(points)
    session = open_session("chain", out_dir, chosen, settings, compile_ahead=wanted)
    ordinary = CudaDriver(programmatic=False)

    def measure(point: DecodePoint) -> Record:
        problem = make_chain(point, settings.seed, "cuda")
        record = measure_chain(problem, session.peers, session.timer, ordinary)
        return record | {"floor_us": session.floor_us(record["flops"], record["bytes"])}

    records = run_points(session, "chain", wanted, measure)
    print_chain(session.console, records, sessions_of(session.file.records))
    return BenchResult(records, session.file.path)
