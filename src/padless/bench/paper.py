"""Earlier names of what `padless.bench.results` and `.peers` have, for benchmarks that are no `Case` yet."""

from padless.bench.peers import resolve_peers
from padless.bench.results import BenchResult

__all__ = ["BenchResult", "resolve_peers"]
