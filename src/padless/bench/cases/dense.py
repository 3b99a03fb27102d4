"""Dense products: padless against DeepGEMM and cuBLASLt with the same scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padless.bench.group_sizes import DENSE_SHAPES, DenseShape
from padless.bench.measure import measure_dense
from padless.bench.problem import make_dense
from padless.bench.report.bounds import UNITS, bounds_tables
from padless.bench.report.table import Records, Sessions, Table, caption, points_table, summary_table
from padless.bench.results import Record
from padless.bench.session import Session

_QUICK = 2


def grid(name: str, seed: int) -> list[DenseShape]:
    """Five shapes ("full") or two."""
    return list(DENSE_SHAPES if name == "full" else DENSE_SHAPES[:_QUICK])


def measure_at(session: Session, point: DenseShape) -> Record:
    """padless and peers."""
    problem = make_dense(point, session.settings.seed, "cuda")
    return session.with_floor(measure_dense(problem, session.peers, session.timer))


def tables(records: Records, sessions: Sessions, width: int) -> Sequence[Table]:
    """One line a shape, the comparisons and what limits allow."""
    names = ("padless", "deepgemm", "cublaslt_block", "cublaslt_tensor", "floor")
    shown = points_table("Dense products: GPU time (us)", records, names, ("floor",), rate=True)
    shown = replace(shown, caption=caption(records, sessions))
    return [shown, summary_table(records), *bounds_tables(records, ("floor", UNITS), sessions)]
