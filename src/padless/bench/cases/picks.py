"""Comparison of the configuration that is picked with all legal ones, of Hopper's kernels on drawn problems.

A problem is a product of one of ten models' experts, or its weight gradient, of 1 to 16384 tokens that are routed
evenly, as drawn, or to few experts. Every legal configuration is called once over NaN and must give the bits of the
picked one; two timed calls in turns leave those that are no more than HOPELESS slower than the fastest, and the picked
one, and further calls in turns give their times. Medians have an error (of five calls of 30 us 1%, of 200 us 0.5%), and
the least of many medians is one with a large error: where the pick is not the fastest, it and the fastest few are called
again, more often, and only these calls say how far behind it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from padless.bench.cases.problems import picks as problems
from padless.bench.cases.problems.picks import KINDS, PicksPoint, PicksProblem, legal, make_problem, name_of, picked
from padless.bench.report import table
from padless.bench.results import Record, time_us
from padless.bench.session import Session, missing_points
from padless.kernels.config import room_for_groups
from padless.runtime.architecture import HOPPER
from padless.runtime.driver import cuda_driver
from padless.runtime.jit import CompileError
from padless.testing import machine
from padless.testing.compile_ahead import Gpu, Rehearsal, compile_ahead
from padless.testing.judge import describe
from padless.testing.timing import Call, Timer

HOPELESS = 1.25  # over the fastest of the first calls: no longer timed
FIRST_CALLS = 2
FINALISTS, FINAL_CALLS = 3, 15
GOOD, ALLOWED = 1.03, 1.08  # times of the fastest: a pick that is as good, and the worst that is right


def measure(problem: PicksProblem, timer: Timer, num_sms: int, unfit: dict[str, str]) -> Record:
    """One problem's record: microseconds of the picked configuration and of those that are not hopeless.

    first: all that run, by the first calls. gpu: those that are not hopeless. final: the pick and the FINALISTS fastest,
    by further calls; empty where the pick is the fastest. left_out: those that do not compile, with the reason.
    unfit: these reasons by prelude, kept from problem to problem: what does not compile is compiled anew each time.
    """
    pick = picked(problem.point, problem.tokens, num_sms)
    record: Record = {"picked": name_of(pick), "wrong": {}, "errors": {}, "left_out": {}}
    calls: dict[str, Call] = {}
    expected: torch.Tensor | None = None
    for name, config in legal(pick).items():
        fresh(problem)
        try:
            if config.prelude() in unfit:
                raise CompileError(unfit[config.prelude()])
            bits = problem.run(config=config).view(torch.uint8)
        except CompileError as error:  # it needs more shared memory or registers than there are, which no pick may
            unfit[config.prelude()] = str(error)
            record["errors" if config is pick else "left_out"][name] = describe(error)
            continue
        except ValueError as error:  # its stages do not fit
            record["errors" if config is pick else "left_out"][name] = describe(error)
            continue
        except Exception as error:
            record["errors"][name] = describe(error)
            continue
        expected = bits.clone() if expected is None else expected
        if torch.equal(bits, expected):
            calls[name] = partial(problem.run, config=config)
        else:
            record["wrong"][name] = "gives other bits than the picked configuration"
    first = {name: timing.median_us for name, timing in with_repeats(timer, FIRST_CALLS).gpu(calls).items()}
    least = min(first.values(), default=0.0)
    left = {name: call for name, call in calls.items() if name == name_of(pick) or first[name] <= HOPELESS * least}
    gpu = timer.gpu(left)
    fastest = sorted(gpu, key=lambda name: gpu[name].median_us)[:FINALISTS]
    finalists = {name: calls[name] for name in {name_of(pick): None, **dict.fromkeys(fastest)} if name in gpu}
    is_fastest = not fastest or fastest[0] == name_of(pick)
    final = {} if is_fastest else with_repeats(timer, FINAL_CALLS).gpu(finalists)
    return record | {
        "sizes": problem.sizes,
        "first": {name: round(us, 2) for name, us in first.items()},
        "gpu": {name: timing.as_dict() for name, timing in gpu.items()},
        "final": {name: timing.as_dict() for name, timing in final.items()},
    }


def fresh(problem: PicksProblem) -> None:
    """Fills an output with NaN, or with zeros where it is added to."""
    problem.out.fill_(0.0 if KINDS[problem.point.kind].adds else float("nan"))


def with_repeats(timer: Timer, repeats: int) -> Timer:
    """The same timer for so many calls."""
    other = copy.copy(timer)
    other.repeats = repeats
    return other


def grid(name: str, seed: int) -> list[PicksPoint]:
    """400 problems."""
    return problems.grid(seed)


def start(session: Session) -> Callable[[PicksPoint], Record]:
    """The function that measures a problem; first compiles what the missing ones need, on all cores."""
    driver = cuda_driver()
    sms, seed, console = driver.num_sms(torch.cuda.current_device()), session.settings.seed, session.console
    wanted = missing_points(session.file, "picks", session.points, seed)
    needed = dict.fromkeys((point.kind, room_for_groups(point.groups)) for point in wanted)
    with console.status("compiling every configuration"):
        rehearsals = [Rehearsal(partial(problems.rehearse, kind, room, sms)) for kind, room in needed]
        ahead = compile_ahead(rehearsals, Gpu(driver.arch, sms))
    console.print(f"{len(ahead.kernels)} kernels, {len(ahead.problems)} could not be compiled", highlight=False)

    unfit: dict[str, str] = {}

    def at(point: PicksPoint) -> Record:
        record = measure(make_problem(point, seed, "cuda"), session.timer, sms, unfit)
        return record | {"clocks": machine.clocks()}

    return at


def require_hopper() -> None:
    """Raises ValueError on another GPU."""
    if cuda_driver().arch != HOPPER.name:
        raise ValueError(f"bench picks measures Hopper's kernels, and this GPU is {cuda_driver().arch}")


# --- showing ---------------------------------------------------------------------------------------------


def over_best(record: Record) -> float | None:
    """The picked configuration's time over that of the fastest."""
    own = time_us(record, clock_of(record), record["picked"])
    return own / min(timing["us"] for timing in record[clock_of(record)].values()) if own else None


def best_of(record: Record) -> str:
    """The fastest configuration."""
    times = record[clock_of(record)]
    return min(times, key=lambda name: times[name]["us"])


def clock_of(record: Record) -> str:
    """The calls by which a pick counts: "final", or "gpu" where there are none (in older records, too)."""
    return "final" if record.get("final") else "gpu"


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a kernel: how many picks are as good as allowed; and the worst picks."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(record["point"]["kind"], []).append(record)

    def ratios(part: table.Records) -> list[float]:
        return [found for record in part if (found := over_best(record)) is not None]

    def share(most: float) -> Callable[[table.Records], list[float]]:
        return lambda part: [100 * sum(x <= most for x in ratios(part)) / max(len(ratios(part)), 1)]

    columns = [
        table.Column("kernel", text=lambda part: part[0]["point"]["kind"], left=True),
        table.POINTS,
        table.Column("within 3%", share(GOOD), 0, "%"),
        table.Column("within 8%", share(ALLOWED), 0, "%"),
        table.Column("picked / fastest", ratios, 3),
        table.Column("worst", ratios, 3, average=max),
    ]
    shown = [table.table_of("Picked configurations over the fastest", columns, [*parts.values()], 1)]
    if len(parts) > 1:
        everything = table.Column("kernel", text=lambda part: "all", left=True)
        shown[0].rows.append([column.cell(records) for column in (everything, *columns[1:])])
    missed = [record for record in records if (over_best(record) or 0.0) > GOOD]
    worst = sorted(missed, key=lambda record: -(over_best(record) or 0.0))[:WORST]

    def of(text: Callable[[Record], Any]) -> Callable[[table.Records], str]:
        return lambda part: str(text(part[0]))

    named = [
        table.Column("kernel", text=of(lambda r: r["point"]["kind"]), left=True, width=12),
        table.Column("model", text=of(lambda r: r["point"]["model"]), left=True, width=15),
        *table.axes("tokens", "routing", "n", "k"),
        table.Column("picked", text=of(lambda r: short(r["picked"])), width=12),
        table.Column("fastest", text=of(lambda r: short(best_of(r))), width=12),
        table.Column("ratio", ratios, 3),
    ]
    return [*shown, table.table_of("Worst picks", named, table.by_point(worst), 1)] if worst else shown


WORST = 30  # picks that are listed


def short(name: str) -> str:
    """The values of a configuration's name."""
    return " ".join(part.split()[-1] for part in name.split(", "))
