"""Prediction of dispatch and combine on more GPUs than there are here: `python -m padless.distributed.planning`.

Tokens are drawn and sent to ranks as the exchange sends them, once for each rank; to another host once, and on from
there over NVLink, as DeepEP does; sums come back once a rank. The slowest rank decides. Rates are those measured on two
H200s: the link with both directions busy, copies in memory, and how much of the local work the link does not hide. What
is not modelled: contention inside of the NVLink switch and of the network, and skew between ranks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

SAMPLES = 20_000


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s of a GPU, one way, and times in us.

    link: NVLink inside of a host.
    network: to other hosts; an assumption, of a 400 Gb/s adapter for each GPU.
    memory: bytes read and written.
    fixed_dispatch, fixed_combine: launches and signals.
    unhidden_store, unhidden_sum: share of storing rows by expert, and of reading them again for the sum, that takes time
        on top of the transfer.
    """

    link: float = 350.0
    network: float = 45.0
    memory: float = 4200.0
    ranks_per_host: int = 8
    fixed_dispatch: float = 12.0
    fixed_combine: float = 10.0
    unhidden_store: float = 0.45
    unhidden_sum: float = 0.25


@dataclass(frozen=True)
class Exchange:
    """tokens: of a rank. row_bytes: of a dispatched row; FP8_BLOCK's is hidden + hidden / 32. skew: exponent s of the
    experts' popularity 1 / place^s, experts being spread over ranks at random; 0 is uniform.
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    skew: float = 0.0

    @property
    def row_bytes(self) -> int:
        return self.hidden + 4 * -(-self.hidden // 128)


@dataclass(frozen=True)
class Prediction:
    """copies, hosts: ranks and hosts that a token goes to, on average. received: tokens that the slowest rank receives
    from others. rows: its rows. dispatch, combine: us.
    """

    copies: float
    hosts: float
    received: float
    rows: float
    dispatch: float
    combine: float


def draw_ids(e: Exchange, samples: int, seed: int = 0) -> torch.Tensor:
    """(samples, k) distinct experts of tokens, by popularity."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, e.experts + 1, dtype=torch.float64).pow(-e.skew)
    popularity = popularity[torch.randperm(e.experts, generator=generator)]
    exponential = torch.empty((samples, e.experts), dtype=torch.float64).exponential_(generator=generator)
    return (exponential / popularity).topk(e.top_k, dim=1, largest=False).indices


def predict(e: Exchange, machine: Machine | None = None, seed: int = 0) -> Prediction:
    """The slowest rank's times of one exchange. Raises ValueError where experts are no multiple of ranks."""
    if e.experts % e.ranks != 0:
        raise ValueError(f"experts is {e.experts} and ranks {e.ranks}; it must be a multiple")
    m = machine or Machine()
    ranks = draw_ids(e, SAMPLES, seed) // (e.experts // e.ranks)
    hits = torch.zeros((SAMPLES, e.ranks), dtype=torch.float64)
    hits.scatter_add_(1, ranks, torch.ones_like(ranks, dtype=torch.float64))
    share = (hits > 0).double().mean(dim=0)  # of all tokens that go to each rank
    slots = hits.mean(dim=0)
    per_host = min(m.ranks_per_host, e.ranks)
    to_host = torch.stack([part.any(dim=1) for part in (hits > 0).split(per_host, dim=1)]).double().mean(dim=1)
    if e.skew == 0:  # all ranks are alike, and what differs here is how few were drawn
        share, slots = share.mean().expand(e.ranks), slots.mean().expand(e.ranks)
        to_host = to_host.mean().expand(len(to_host))
    near = per_host - 1
    far = e.ranks - 1 - near
    most, rows = float(share.max()) * e.tokens, float(slots.max()) * e.tokens * e.ranks

    def transfer(row_bytes: int, over_link: float, over_network: float) -> float:
        return max(over_link * row_bytes / m.link, over_network * row_bytes / m.network) * 1e-3

    forwarded = (e.ranks - len(to_host)) * most  # all but what comes from the same place on each host
    entering = (len(to_host) - 1) * float(to_host.max()) * e.tokens
    quantize = e.tokens * (2 * e.hidden + e.row_bytes) / m.memory * 1e-3
    store = rows * e.row_bytes / m.memory * 1e-3
    copies = float(share.sum())
    last_sum = e.tokens * (copies + 1) * 2 * e.hidden / m.memory * 1e-3
    read = rows * 2 * e.hidden / m.memory * 1e-3
    return Prediction(
        copies,
        float(to_host.sum()),
        (near + far) * most,
        rows,
        m.fixed_dispatch + quantize + transfer(e.row_bytes, forwarded, entering) + m.unhidden_store * store,
        m.fixed_combine + transfer(2 * e.hidden, near * most, far * most) + m.unhidden_sum * read + last_sum,
    )


def table(ranks: list[int], tokens: int, hidden: int, experts: int, top_k: int, skew: float, machine: Machine) -> str:
    """A Markdown table of a line for each number of ranks."""
    lines = ["| GPUs | experts a GPU | ranks a token goes to | hosts | tokens in | rows | dispatch us | combine us |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in ranks:
        p = predict(Exchange(r, tokens, hidden, experts, top_k, skew), machine)
        lines.append(
            f"| {r} | {experts // r} | {p.copies:.2f} | {p.hosts:.2f} | {p.received:.0f} | {p.rows:.0f} "
            f"| {p.dispatch:.0f} | {p.combine:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m padless.distributed.planning", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512])
    for name, default in (("tokens", 4096), ("hidden", 7168), ("experts", 512), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of the experts' popularity")
    parser.add_argument("--link", type=float, default=Machine.link, help="GB/s inside of a host, one way")
    parser.add_argument("--network", type=float, default=Machine.network, help="GB/s of a GPU to other hosts")
    a = parser.parse_args()
    machine = Machine(link=a.link, network=a.network)
    print(table(a.ranks, a.tokens, a.hidden, a.experts, a.top_k, a.skew, machine))


if __name__ == "__main__":
    main()
