"""Calls one after the other in a CUDA graph, as a model that decodes makes them.

A call by itself says nothing about what happens between two of them. Here n products run in one graph, each with weights
of another layer, so that they come from memory, and each with its own output. Contenders of a point:

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from padless.bench.cases.problems import chain as chain_problem
from padless.bench.cases.problems.chain import ChainProblem, make_chain
from padless.bench.group_sizes import DecodePoint
from padless.bench.measure import facts, gather
from padless.bench.peers import Contender, Peer
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.problem import GroupedProblem
from padless.bench.report import table
from padless.bench.results import Record, time_us
from padless.bench.session import Session
from padless.compat.cudnn.calls import grouped_gemm_swiglu_quant
from padless.formats import FP8_BLOCK
from padless.ops.grouped_gemm import grouped_gemm
from padless.runtime.driver import cuda_driver
from padless.testing import machine
from padless.testing.bits import same_bits
from padless.testing.judge import SampledReference, check
from padless.testing.timing import Timer, Timing, capture

PADLESS = "padless"
ORDINARY = "padless, ordinary launches"
PROGRAMMATIC = ", programmatic"
DEEPGEMM = "deepgemm_masked"
MLP = "mlp"
MLP_ORDINARY = "mlp, ordinary launches"
# Row error of an expert's MLP. Between its projections values are rounded to e4m3, in the reference from other sums than
# in the kernel: one near the middle of two codes gets the other code, an eighth away. That moved rows by up to 1.6%.
MLP_TOLERANCE = 0.03
_SAME_BITS = ((PADLESS, ORDINARY), (MLP, MLP_ORDINARY))
Setting = Callable[[], AbstractContextManager[None]]


# --- contenders ----------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """A contender: the parts' calls in order, as one CUDA graph, which is captured when it is run first.

    setting: entered for the capture.
    """

    name: str
    parts: list[Contender]
    setting: Setting = nullcontext
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


def own_chains(
    name: str,
    problem: ChainProblem,
    outs: Sequence[GroupedProblem],
    call: Callable[[int, torch.Tensor], Any],
    ordinary: Setting | None,
    tolerance: float = Contender.tolerance,
) -> list[Chain]:
    """A call of every layer, given its number and an output as those of ``outs``: as it is made and, where ``ordinary``
    is given, in that setting.
    """

    def part(title: str, layer: int) -> Contender:
        out = outs[layer].empty_out()
        return Contender(title, partial(call, layer, out), lambda: out, tolerance, buffer=out)

    settings: dict[str, Setting] = {name: nullcontext} | ({f"{name}, ordinary launches": ordinary} if ordinary else {})
    return [Chain(title, [part(title, i) for i in problem.order], setting) for title, setting in settings.items()]


def gemm_chains(problem: ChainProblem, ordinary: Setting) -> list[Chain]:
    """The products."""

    def gemm(layer: int, out: torch.Tensor) -> None:
        p = problem.layers[layer]
        grouped_gemm(p.a, p.b, p.offs, out=out)

    return own_chains(PADLESS, problem, problem.layers, gemm, ordinary)


def mlp_chains(problem: ChainProblem, ordinary: Setting | None) -> list[Chain]:
    """An expert's MLPs of the public calls: gate, up and SwiGLU, quantised, in one launch, and the way back."""

    def mlp(layer: int, out: torch.Tensor) -> None:
        first, second = problem.layers[layer], problem.second[layer]
        hidden = grouped_gemm_swiglu_quant(
            gate_up="concatenated",
            a_tensor=first.a,
            b_tensor=first.b,
            padded_offsets=first.offs,
            d_format=FP8_BLOCK,
            column_output=False,
        ).row
        assert hidden is not None
        grouped_gemm(hidden, second.b, first.offs, out=out)

    return own_chains(MLP, problem, problem.second, mlp, ordinary, MLP_TOLERANCE)


@contextmanager
def ordinary_launches() -> Iterator[None]:
    """A setting in which launches are packed to wait until the kernel ahead has ended. Packed launches are remembered
    by their output's address, so what is packed here is for outputs that nothing outside has.
    """
    driver = cuda_driver()
    driver.programmatic = False
    try:
        yield
    finally:
        driver.programmatic = True


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


# --- measuring -----------------------------------------------------------------------------------------------


def _check(groups: list[tuple[list[Chain], SampledReference]], found: Record) -> dict[str, Chain]:
    """Runs every chain once on poisoned outputs, chains of one product next to its reference: those that are right, by
    name. Those that raise or are wrong go from ``groups``, and what was found out about all into ``found``.
    """
    for chains, reference in groups:
        right, record = check([chain.contender() for chain in chains], reference, found["errors"])
        names = {contender.name for contender in right}
        chains[:] = [chain for chain in chains if chain.name in names]
        found["row_error"] |= record["row_error"]
        found["wrong"] |= record["wrong"]
    return {chain.name: chain for chains, _ in groups for chain in chains}


def measure_chain(problem: ChainProblem, peers: Sequence[Peer], timer: Timer, ordinary: Setting) -> Record:
    """Record of one point: checks, and microseconds a call of every chain that is right before and after."""
    products, errors = gather(gemm_chains(problem, ordinary), peers, partial(peer_chains, problem))
    found: Record = {"row_error": {}, "wrong": {}, "errors": errors}
    of_products, of_mlps = problem.references()
    groups = [(products, of_products), (mlp_chains(problem, ordinary), of_mlps)]
    times = timer.gpu({name: chain.replay for name, chain in _check(groups, found).items()})
    clocks = machine.clocks()
    right = _check(groups, found)
    for name, other in _SAME_BITS:
        if name in right and other in right and not same_bits(right[name].output(), right[other].output()):
            found["wrong"][name] = f"is wrong: its bits are not those of {other!r}"
            del right[name]
    samples = {name: tuple(us / problem.calls for us in times[name].samples_us) for name in right}
    gpu = {name: Timing(of_a_call).as_dict() for name, of_a_call in samples.items()}
    counts = {"layers": len(problem.layers), "calls": problem.calls}
    return facts(problem.layers[0]) | counts | found | {"gpu": gpu, "clocks": clocks}


def grid(name: str, seed: int) -> list[DecodePoint]:
    """36 points ("full") or six."""
    return chain_problem.grid(full=name == "full")


def require_programmatic_launches() -> None:
    """ValueError where the environment turns them off."""
    if not cuda_driver().programmatic:
        raise ValueError("PADLESS_PROGRAMMATIC_LAUNCH is 0; unset it: both ways to launch are compared here")


def measure_at(session: Session, point: DecodePoint) -> Record:
    """Every chain at a point."""
    problem = make_chain(point, session.settings.seed, "cuda")
    return session.with_floor(measure_chain(problem, session.peers, session.timer, ordinary_launches))


# --- tables --------------------------------------------------------------------------------------------------

_TIMES = (
    (PADLESS, "padless"),
    (ORDINARY, "ordinary\nlaunches"),
    (DEEPGEMM, "deepgemm\nmasked"),
    (DEEPGEMM + PROGRAMMATIC, "the same,\nprogramm."),
    (MLP, "mlp"),
    (MLP_ORDINARY, "mlp, ord.\nlaunches"),
    ("floor", "floor"),
)


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point; a line for each number of groups and size of the weights, and one for all."""
    columns = [*table.axes("groups", "rows", "N", "K"), table.Column("calls", text=lambda part: str(part[0]["calls"]))]
    columns += [table.time(name, heading) for name, heading in _TIMES]
    columns.append(table.ratio("ordinary\n/ padless", ORDINARY))
    title = "Chains of calls in a CUDA graph: GPU time (us) of a call, of a pair for mlp"
    points = table.table_of(title, columns, table.by_point(records), 1)
    return [points, replace(_by_weights(records), caption=table.caption(records, sessions))]


def _by_weights(records: table.Records) -> table.Table:
    """By groups and megabytes of weight codes of a call: padless's time, what ordinary launches cost a call, ratios."""
    columns = [
        *table.axes("groups"),
        table.Column("MB", text=lambda part: f"{_weight_mb(part[0]):.0f}"),
        table.POINTS,
        table.time(PADLESS, "padless\nus"),
        table.Column("ordinary\n+ us", _more, 2, average=fmean),
        *table.with_least(
            (
                table.ratio("ordinary\n/ padless", ORDINARY),
                table.ratio("deepgemm\n/ padless", DEEPGEMM),
                table.ratio("the same,\nprogramm.", DEEPGEMM + PROGRAMMATIC),
                table.ratio("mlp, ord.\n/ mlp", MLP_ORDINARY, MLP),
            ),
            "least",
        ),
    ]
    parts: dict[tuple[int, float], list[Record]] = {}
    for record in records:
        parts.setdefault((record["point"]["groups"], _weight_mb(record)), []).append(record)
    title = "By groups and MB of weights a call (geomean, and the least)"
    found = table.table_of(title, columns, [parts[key] for key in sorted(parts)], 1)
    found.rows.append(["all", "", *(column.cell(records) for column in columns[2:])])
    return found


def _weight_mb(record: Record) -> float:
    point = record["point"]
    return float(point["groups"] * point["N"] * point["K"] / 1e6)


def _more(part: table.Records) -> list[float]:
    """Microseconds that ordinary launches cost a call."""
    pairs = ((time_us(r, "gpu", PADLESS), time_us(r, "gpu", ORDINARY)) for r in part)
    return [other - us for us, other in pairs if us is not None and other is not None]
