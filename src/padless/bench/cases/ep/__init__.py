"""Expert parallelism over the GPUs of this host: dispatch, combine and the whole layer, against NCCL's all_to_all.

Contenders of a point; times are those of the slowest rank, in microseconds, from a barrier of the devices on:

    dispatch, combine, layer          padless, replayed from CUDA graphs: bfloat16 tokens to rows in FP8_BLOCK as the
                                      GEMM takes them; its rows to (T, H); `padless.moe.moe` with ep=, which is both
                                      and the two projections between
    .. eager                          the same, called from Python
    combine of slots                  combine with sums="slots": rows of slots travel unsummed
    gradients, gradients in FP8       dout (T, H) to the rows of all ranks by a plan, bfloat16 before and behind
    step, nccl step                   forward and backward pass of `padless.nn.Experts` in the recipe "fp8" from 1024
                                      tokens on, called from Python; over symmetric memory and over NCCL's all_to_all
    nccl dispatch, combine, layer     all_to_all of bfloat16 rows, with sorting, permuting, quantizing and summing
    titan dispatch, combine, layer    torchtitan's MinimalAsyncEP, with counting and quantizing, replayed from CUDA
                                      graphs; where its files are in the folder of peers, `async_ep.FOLDER`
    deepep dispatch, combine, layer   DeepEP's first version with the passes that it leaves to its caller, in the
                                      fastest of `deepep.SMS` and `deepep.CHUNKS`, replayed; where `deepep.FOLDER`
                                      is

and the parts of padless' exchange alone: publish; sort (ids of all ranks to an order of rows) and fan_out, or both as
receive; send_back; finish. Next to them stands what `padless.distributed.planning` says of a machine with the rates of
a copy and of a dense product that were measured first.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from padless.bench.cases.ep import async_ep, deepep
from padless.bench.cases.ep.problem import EpPoint, EpProblem, NcclExchange
from padless.bench.cases.ep.problem import points as points_of
from padless.bench.peers.find import resolve_folder
from padless.bench.report import table
from padless.bench.results import Record
from padless.bench.session import Session
from padless.distributed import ExpertParallel, planning
from padless.distributed.functions import gradients_of_rows
from padless.distributed.symm import SymmBackend
from padless.formats import FP8_BLOCK
from padless.moe import moe
from padless.nn import Experts
from padless.testing import machine
from padless.testing.judge import row_errors, worst
from padless.testing.ranks import Rank, RankPool, first_error
from padless.testing.timing import WARM_UP_CALLS, Call

SECONDS = 90.0  # of a point, its kernels' compilation included
FLUSH_BYTES = 256 << 20
SLEEP_CYCLES = 6_000_000  # three milliseconds, in which the host issues a call
PROBE = (16, 2048, 768, 64, 8)  # T, H, I, experts, k
STEP_TOKENS = 1024  # from which on a training step is timed
STEP_SLEEP_CYCLES = 12_000_000
PREDICTED = ("dispatch", "combine", "layer", "step")
STEPS = ("publish", "sort", "fan_out", "send_back", "finish")
TOLERANCE = 0.1  # of a token, between a layer whose rows were quantized before they were sent and one after
SUM_TOLERANCE = 0.01  # of a token, between two sums of the same rows in bfloat16


def require_gpus() -> None:
    """ValueError where there are not two GPUs."""
    if torch.cuda.device_count() < 2:
        raise ValueError(f"padless bench ep needs two GPUs, and torch sees {torch.cuda.device_count()} here")


def grid(name: str, seed: int) -> list[EpPoint]:
    """Eighteen points ("full") or three, for all GPUs there are."""
    return points_of(torch.cuda.device_count(), full=name == "full")


def start(session: Session) -> Callable[[EpPoint], Record]:
    """A point, on processes that stay, one for each GPU. One that fails has the error for a record."""
    pool = RankPool(torch.cuda.device_count(), cuda=True, backend="symm")
    folder = resolve_folder(session.settings.peers_dir)
    rates = session.ceilings
    gpu = planning.Machine(memory=rates.copy_bytes_per_s * 1e-9)
    if rates.dense_flops_per_s is not None:
        gpu = replace(gpu, products=rates.dense_flops_per_s * 1e-12)

    usable, errors = probed(pool, folder)

    def measure(point: EpPoint) -> Record:
        arguments = (point, session.settings.seed, session.settings.repeats, None, folder, usable)
        found = pool.call(measure_point, *arguments, timeout_s=SECONDS)
        failed = first_error(found)
        if failed is not None:
            return {"gpu": {}, "errors": errors | {"padless": failed[-400:]}}
        record: Record = found[0]
        return record | {"clocks": machine.clocks(), "predicted": predicted(point, gpu), "errors": errors}

    return measure


def probed(pool: RankPool, folder: Path | None) -> tuple[list[str], dict[str, str]]:
    """(libraries in their folder that get through a small point, errors of the others): one that fails would end a
    point's other contenders too.
    """
    usable, errors = list[str](), dict[str, str]()
    tiny = EpPoint("probe", torch.cuda.device_count(), *PROBE)
    for name, peer in (("titan", async_ep), ("deepep", deepep)):
        if folder is None or not (folder / peer.FOLDER).is_dir():
            continue
        found = pool.call(measure_point, tiny, 0, 2, None, folder, (name,), timeout_s=SECONDS)
        failed = first_error(found)
        if failed is None:
            usable.append(name)
        else:
            errors[name] = failed[-400:]
    return usable, errors


def predicted(point: EpPoint, gpu: planning.Machine) -> Record:
    """Microseconds of contenders, from a point's sizes and rates of one GPU."""
    e = planning.Exchange(point.ranks, point.tokens, point.hidden, point.experts, point.top_k)
    exchange, layer = planning.predict(e, gpu), planning.predict_layer(e, point.intermediate, gpu)
    found = (exchange.dispatch, exchange.combine, layer.layer, layer.step)
    return {name: round(us, 1) for name, us in zip(PREDICTED, found, strict=True)}


def measure_point(
    rank: Rank,
    point: EpPoint,
    seed: int,
    repeats: int,
    programs: int | None,
    folder: Path | None = None,
    names: Sequence[str] = (),
) -> Record:
    """The record of a point, on every rank of a group of GPUs. names: of peers in a folder, NCCL not among them."""
    p = EpProblem(rank, point, seed, programs)
    nccl = NcclExchange(p)
    rows, plan = p.ep.dispatch(p.x, p.ids, p.weights)
    y = p.products(rows, plan.offs)

    def layer() -> torch.Tensor:
        return moe(p.x, p.ids, p.weights, p.w13, p.w2, activations=FP8_BLOCK, ep=p.ep)

    error = worst(row_errors(layer().cpu(), nccl.layer().cpu().double()))
    assert error < TOLERANCE, f"a token of the layer is off by {error} from that over NCCL"
    nccl_rows, nccl_offs = nccl.dispatch()
    nccl_y = p.products(nccl_rows, nccl_offs)
    eager: dict[str, Call] = {
        "dispatch": lambda: p.ep.dispatch(p.x, p.ids, p.weights),
        "combine": lambda: p.ep.combine(y, plan, weighted=True),
        "layer": layer,
    }
    # Kept until all is timed, as peers are: a graph keeps addresses and no tensors.
    gradients = gradient_calls(p)
    of_slots = slots_calls(p, y, eager["combine"]())
    calls: dict[str, Call] = {name: replayed(call) for name, call in (eager | of_slots | gradients).items()}
    calls |= {f"{name}, eager": call for name, call in eager.items()}
    calls |= {"nccl dispatch": nccl.dispatch, "nccl combine": lambda: nccl.combine(nccl_y), "nccl layer": nccl.layer}
    peers, config = peer_calls(p, folder, names, rows, plan, y)
    calls |= {name: replayed(call) for name, call in peers.items()}
    times = timed(rank, calls, repeats)
    if point.tokens >= STEP_TOKENS:
        times |= timed(rank, step_calls(p), repeats, STEP_SLEEP_CYCLES)
    times |= timed_steps(rank, p, y, repeats)
    p.ep.check()
    torch.cuda.empty_cache()
    link = max(gathered(rank, p.link_rows()))
    code_bytes = p.ep.settings.row_format.code_bytes  # scales travel before the fan-out
    return {
        "gpu": times,
        "row_error": float(error),
        "link_bytes": {
            "fan_out": link * code_bytes,
            "send_back": link * point.hidden * 2,
            "combine of slots": max(gathered(rank, p.link_slots())) * point.hidden * 2,
        },
        "programs": programs,
        "deepep": config,
    }


def gradient_calls(p: EpProblem) -> dict[str, Call]:
    """Gradients as they travel back through a combine, as they are and in FP8_BLOCK."""
    calls = dict[str, Call]()
    for name, fmt in (("gradients", None), ("gradients in FP8", FP8_BLOCK)):
        ep = p.exchange(fmt=torch.bfloat16, gradient_fmt=fmt)
        plan = ep.dispatch(p.x, p.ids, p.weights)[1]
        calls[name] = partial(gradients_of_rows, ep, p.x, plan)
    return calls


def slots_calls(p: EpProblem, y: torch.Tensor, sums: torch.Tensor) -> dict[str, Call]:
    """The same combine with sums of slots, which gives nearly these sums."""
    ep = p.exchange(sums="slots")
    plan = ep.dispatch(p.x, p.ids, p.weights)[1]
    error = worst(row_errors(ep.combine(y, plan, weighted=True).cpu(), sums.cpu().double()))
    assert error < SUM_TOLERANCE, f"a sum of slots is off by {error} from that of ranks"
    return {"combine of slots": lambda: ep.combine(y, plan, weighted=True)}


def step_calls(p: EpProblem) -> dict[str, Call]:
    """Training steps of the same experts over symmetric memory and over NCCL, which give nearly the same."""
    q, dout = p.point, torch.randn(p.x.shape, device=p.x.device).to(torch.bfloat16)

    def step_over(ep: ExpertParallel) -> Callable[[], list[torch.Tensor]]:
        torch.manual_seed(p.rank.rank)
        experts = Experts(q.hidden, q.intermediate, q.experts, ep=ep, dtype=torch.bfloat16, device=p.x.device)

        def step() -> list[torch.Tensor]:
            experts.zero_grad()
            x, weights = p.x.detach().requires_grad_(), p.weights.detach().requires_grad_()
            out = experts(x, p.ids, weights)
            out.backward(dout)
            found = (out.detach(), x.grad, weights.grad, experts.w13.grad, experts.w2.grad)
            return [t for t in found if t is not None]

        return step

    ours = step_over(p.exchange(fmt=torch.bfloat16))
    nccl = step_over(p.exchange(fmt=torch.bfloat16, backend="collective", capacity="exact"))
    for what, mine, other in zip(("out", "x", "weights", "w13", "w2"), ours(), nccl(), strict=True):
        error = float((mine - other).float().norm() / other.float().norm())
        assert error < SUM_TOLERANCE, f"{what} of a step is off by {error} from that over NCCL"
    return {"step": ours, "nccl step": nccl}


def peer_calls(
    p: EpProblem, folder: Path | None, names: Sequence[str], rows: Any, plan: Any, y: torch.Tensor
) -> tuple[dict[str, Call], Record]:
    """(contenders of these other libraries in their folder, what was chosen for DeepEP)."""
    calls, config = dict[str, Call](), Record()
    if folder is not None and "titan" in names:
        calls |= titan_calls(p, folder, rows, used=int(plan.offs[-1]))
    if folder is not None and "deepep" in names:
        peer = deepep.DeepEpExchange(p, deepep.load(folder))
        config = choose_config(p.rank, peer, y[: int(plan.offs[-1])])
        calls |= deepep_calls(peer, rows, plan, y)
    return calls, config


def titan_calls(p: EpProblem, folder: Path, rows: Any, used: int) -> dict[str, Call]:
    """MinimalAsyncEP's contenders; its rows are those of padless, bit for bit."""
    titan = async_ep.AsyncEpExchange(p, folder)
    its_rows, offs = titan.dispatch()
    assert torch.equal(its_rows.data.view(torch.uint8), rows.data[:used].view(torch.uint8)), "rows of MinimalAsyncEP"
    y, plan = p.products(its_rows, offs), titan.plan  # those of capturing a dispatch have no values before a replay
    return {
        "titan dispatch": titan.dispatch,
        "titan combine": lambda: titan.combine(y, plan),
        "titan layer": titan.layer,
    }


def choose_config(rank: Rank, peer: deepep.DeepEpExchange, y: torch.Tensor, repeats: int = 3) -> Record:
    """Sets the fastest numbers of SMs and of tokens a chunk, those of both directions together, on all ranks."""
    found = []
    for sms in deepep.SMS:
        peer.sms = sms
        peer.dispatch()
        calls: dict[str, Call] = {f"dispatch {c}": partial(peer.dispatch, c) for c in deepep.CHUNKS}
        calls |= {f"combine {c}": partial(peer.combine, y, peer.plan, c) for c in deepep.CHUNKS}
        times = {name: time["us"] for name, time in timed(rank, calls, repeats).items()}
        send, send_chunk = min((times[f"dispatch {c}"], c) for c in deepep.CHUNKS)
        back, back_chunk = min((times[f"combine {c}"], c) for c in deepep.CHUNKS)
        found.append((send + back, sms, (send_chunk, back_chunk)))
    _, peer.sms, peer.chunks = min(found)
    return {"sms": peer.sms, "chunks": list(peer.chunks)}


def deepep_calls(peer: deepep.DeepEpExchange, rows: Any, plan: Any, y: torch.Tensor) -> dict[str, Call]:
    """DeepEP's contenders; its rows are those of padless, bit for bit, and its sums but for a rounding."""
    its_rows, offs = peer.dispatch()
    used = int(offs[-1])
    assert torch.equal(offs, plan.offs), "offs of DeepEP"
    assert torch.equal(its_rows.data[:used].view(torch.uint8), rows.data[:used].view(torch.uint8)), "rows of DeepEP"
    assert torch.equal(its_rows.scale[:used], rows.scale[:used]), "scales of DeepEP"
    its_y, its_plan = y[:used].contiguous(), peer.plan
    sums = peer.p.ep.combine(y, plan, weighted=True)
    error = worst(row_errors(peer.combine(its_y, its_plan).cpu(), sums.cpu().double()))
    assert error < SUM_TOLERANCE, f"a token of DeepEP's combine is off by {error}"
    return {
        "deepep dispatch": peer.dispatch,
        "deepep combine": lambda: peer.combine(its_y, its_plan),
        "deepep layer": peer.layer,
    }


def replayed(call: Call) -> Call:
    """The replay of a CUDA graph of a call. NCCL's own thread may ask for events meanwhile."""
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def gathered(rank: Rank, value: Any) -> list[Any]:
    """The value of every rank."""
    every: list[Any] = [None] * rank.size
    dist.all_gather_object(every, value)
    return every


def timed(rank: Rank, calls: dict[str, Call], repeats: int, sleep: int = SLEEP_CYCLES) -> Record:
    """Times of calls in turns, each begun on all devices together; of the slowest rank."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=rank.device)
    tiny = torch.zeros(1, device=rank.device)
    for i in range(repeats + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(sleep)
            dist.all_reduce(tiny)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                samples[name].append(1e3 * begin.elapsed_time(end))
    return slowest(rank, samples)


def timed_steps(rank: Rank, p: EpProblem, y: torch.Tensor, repeats: int) -> Record:
    """Times of padless' steps, those of each direction one after the other behind a sleep that covers their launches.

    "sort" and "fan_out" where they are separate launches, else "receive".
    """
    backend = p.ep._backend
    assert isinstance(backend, SymmBackend)
    few = backend.is_few
    names = ("publish", "receive", "send_back", "finish") if few else STEPS
    samples: dict[str, list[float]] = {name: [] for name in names}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=rank.device)
    tiny = torch.zeros(1, device=rank.device)
    for i in range(repeats + 2):
        events: list[tuple[str, torch.cuda.Event]] = []

        def mark(name: str, events: list[tuple[str, torch.cuda.Event]] = events) -> None:
            events.append((name, torch.cuda.Event(enable_timing=True)))
            events[-1][1].record()

        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(tiny)
        mark("begin")
        ids = backend.publish(p.x, p.ids, p.weights, None)
        mark("publish")
        if few:
            _, plan = backend.receive(ids, None)
            mark("receive")
        else:
            found = backend.sort()
            mark("sort")
            backend.wait_for_rows()
            _, plan = backend.fan_out(ids, found, None)
            mark("fan_out")
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(tiny)
        mark("between")
        backend.send_back(y, plan, plan.prob, None)
        mark("send_back")
        backend.finish(plan, with_slots=False)
        mark("finish")
        torch.cuda.synchronize()
        if i >= 2:
            for (_, first), (name, last) in itertools.pairwise(events):
                if name in samples:
                    samples[name].append(1e3 * first.elapsed_time(last))
    return slowest(rank, samples)


def slowest(rank: Rank, samples: dict[str, list[float]]) -> Record:
    """For each name the median and quartiles' distance of the largest times over ranks, and by how much the slowest rank
    is over the mean of all, each by its median.
    """
    every = gathered(rank, samples)
    found = {}
    for name in samples:
        largest = [max(times) for times in zip(*(s[name] for s in every), strict=True)]
        median = statistics.median(largest)
        first, _, third = statistics.quantiles(largest, n=4, method="inclusive") if len(largest) > 1 else (0, 0, 0)
        medians = [statistics.median(s[name]) for s in every]
        found[name] = {
            "us": round(median, 2),
            "spread_percent": round(100 * (third - first) / median, 1),
            "over_mean_percent": round(100 * (max(medians) / statistics.fmean(medians) - 1), 1),
        }
    return found


# --- showing ---------------------------------------------------------------------------------------------


def link_rate(record: Record, step: str) -> float | None:
    """GB/s over the link in one direction during a step."""
    us = record["gpu"].get(step, {}).get("us")
    return record["link_bytes"][step] / us * 1e-3 if us else None


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """Times next to the peers', predictions, and the exchange's parts with the link's rate."""
    point = [
        table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=11),
        table.Column("ranks", text=lambda part: str(part[0]["point"]["ranks"])),
        table.Column("T", text=lambda part: str(part[0]["point"]["tokens"])),
    ]
    rows = table.by_point(records)
    against = []
    for name in table.measured(records, list(PREDICTED)):
        columns = [table.time(name)]
        for peer in table.measured(records, [f"{who} {name}" for who in ("nccl", "titan", "deepep")]):
            columns += [table.time(peer), table.ratio(f"{peer} / padless", peer, name, 1, unit="x")]
        against.append(
            table.table_of(f"Expert parallelism: {name}, the slowest rank (us)", [*point, *columns], rows, 1)
        )
    said = [name for name in PREDICTED if any(name in r.get("predicted", {}) and name in r["gpu"] for r in records)]
    if said:
        columns = [column for name in said for column in (_predicted_column(name), _over_mean_column(name))]
        title = "Predicted (us, and percent from what was measured), and percent of the slowest rank over the mean"
        against.append(table.table_of(title, [*point, *columns], rows, 1))
    steps = [table.time(name) for name in ("publish", "receive", *STEPS[1:])]
    sent = [table.time("gradients", "grads"), table.time("gradients in FP8", "in FP8")]
    for name in table.measured(records, ["combine of slots"]):
        sent += [table.time(name, "of slots"), table.ratio("/ combine", name, "combine", 2)]
    sent += [_rate_column(step) for step in ("fan_out", "send_back", *table.measured(records, ["combine of slots"]))]
    return [
        *against,
        table.table_of("Steps (us)", [*point, *steps], rows, 1),
        table.table_of("Gradients, slots (us), and GB/s over the link in one direction", [*point, *sent], rows, 1),
    ]


def _predicted_column(name: str) -> table.Column:
    """A prediction, and how much it is from what was measured."""

    def text(part: table.Records) -> str:
        us, said = part[0]["gpu"].get(name, {}).get("us"), part[0].get("predicted", {}).get(name)
        return f"{said:.1f} {100 * (said / us - 1):+.0f}%" if us and said else "-"

    return table.Column(name, text=text)


def _over_mean_column(name: str) -> table.Column:
    return table.Column(
        "rank", text=lambda part: table.number(part[0]["gpu"].get(name, {}).get("over_mean_percent"), 1, "+")
    )


def _rate_column(step: str) -> table.Column:
    def text(part: table.Records) -> str:
        return table.number(link_rate(part[0], step), 0)

    return table.Column(f"{step.removeprefix('combine ')} GB/s", text=text)
