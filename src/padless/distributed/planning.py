"""Prediction of dispatch and combine on more GPUs than there are here: `python -m padless.distributed.planning`.

Tokens are drawn and sent to ranks as the exchange sends them, once for each rank; to another host once, and on from
there over NVLink, as DeepEP does; sums come back once a rank. The slowest rank decides. Rates are those measured on two
and on four H200s: the link with both directions busy, and copies in memory. What is not modelled: contention inside of
the NVLink switch and of the network, and skew between ranks.

`predict_layer` has the experts' products and a training step too, by rates measured on one H200.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from padless.distributed.symm_state import HALVED_BYTES, is_few

SAMPLES = 20_000
WEIGHTS_RATE = 1.06  # of a copy's, at which the products of few rows read weights
LAST_EXPERTS = 1.7  # whose bytes are as long on their way as the last tiles leave SMs without work
EXPERT_US = 0.33  # of an expert that is read, on top of its bytes
OUTPUT_US = 4.0e-7  # of a value of a product's result, on top of its multiplications
TOGETHER = 1.5  # exponent by which the times of multiplications and of weights' bytes add up
STEP_PRODUCTS = 3.0  # products of a training step in those of a forward pass: forward, rows' gradients, weights'
STEP_WEIGHT_BYTES = 5.4  # a weight's bytes in a step: read in bfloat16, codes of both layouts, its gradient
STEP_US = 40.0  # of a step's further launches
STEP_ROW_BYTES = 10.0  # a value's bytes of a row (H + 3 I) in a step's passes


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s of a GPU, one way, and times in us.

    link: NVLink inside of a host, into which rows are pushed. pull: the same for rows that are read, each as if it had
        `pull_bytes` more.
    network: to other hosts; an assumption, of a 400 Gb/s adapter for each GPU.
    memory: bytes read and written.
    products: of FP8, TFLOP/s of a large dense product.
    fixed_dispatch, fixed_combine: launches and signals, whatever the number of ranks, whose signals leave together.
    slot: of a dispatch, for each of up to `FEW_SLOTS` slots of all ranks. fixed_sort: what more of them, or more than
        `FEW_TOKENS` tokens, add in their place, which are sorted before rows move.
    fixed_read: what more than `HALVED_BYTES` of sums add, of which the last must have been read before others are
        stored.
    unhidden_sum: share of reading rows again for the sum that takes time on top of the transfer.
    """

    link: float = 350.0
    pull: float = 331.0
    pull_bytes: float = 224.0
    network: float = 45.0
    memory: float = 4200.0
    products: float = 1460.0
    ranks_per_host: int = 8
    fixed_dispatch: float = 14.2
    slot: float = 0.0012
    fixed_sort: float = 11.0
    fixed_combine: float = 13.6
    fixed_read: float = 5.7
    unhidden_sum: float = 0.05


@dataclass(frozen=True)
class Exchange:
    """tokens: of a rank. skew: exponent s of the experts' popularity 1 / place^s, experts being spread over ranks at
    random; 0 is uniform. quantized: whether rows are sent in FP8_BLOCK, or in bfloat16. row_bytes: of a dispatched row;
    FP8_BLOCK's is hidden + hidden / 32.
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    skew: float = 0.0
    quantized: bool = True

    @property
    def row_bytes(self) -> int:
        return self.hidden + 4 * -(-self.hidden // 128) if self.quantized else 2 * self.hidden


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


def most_experts(e: Exchange, seed: int = 0) -> float:
    """Experts with a token at the rank that has the most of them, on average over draws of all ranks' tokens."""
    tokens = min(e.ranks * e.tokens, SAMPLES)
    draws = SAMPLES // tokens
    ids = draw_ids(e, draws * tokens, seed).view(draws, -1)
    met = torch.zeros((draws, e.experts), dtype=torch.bool).scatter_(1, ids, True)
    return float(met.view(draws, e.ranks, -1).sum(dim=2).amax(dim=1).double().mean())


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

    def transfer(row_bytes: int, over_link: float, link: float, over_network: float) -> float:
        return max(over_link / link, over_network / m.network) * row_bytes * 1e-3

    forwarded = (e.ranks - len(to_host)) * most  # all but what comes from the same place on each host
    entering = (len(to_host) - 1) * float(to_host.max()) * e.tokens
    pull = m.pull * e.row_bytes / (e.row_bytes + m.pull_bytes)
    tokens = e.ranks * e.tokens
    sort = tokens * e.top_k * m.slot if is_few(tokens, e.top_k) else m.fixed_sort
    read_before = m.fixed_read if tokens * 2 * e.hidden > HALVED_BYTES else 0.0
    quantize = e.tokens * (2 * e.hidden + e.row_bytes) / m.memory * 1e-3
    copies = float(share.sum())
    last_sum = e.tokens * (copies + 1) * 2 * e.hidden / m.memory * 1e-3
    read = rows * 2 * e.hidden / m.memory * 1e-3
    return Prediction(
        copies,
        float(to_host.sum()),
        (near + far) * most,
        rows,
        m.fixed_dispatch + sort + quantize + transfer(e.row_bytes, forwarded, pull, entering),
        m.fixed_combine
        + read_before
        + transfer(2 * e.hidden, near * most, m.link, far * most)
        + m.unhidden_sum * read
        + last_sum,
    )


@dataclass(frozen=True)
class LayerPrediction:
    """Of a layer of experts and, with rows in bfloat16, of a training step: us, of the slowest rank. products: both
    projections with quantized weights.
    """

    products: float
    layer: float
    step: float


def predict_layer(e: Exchange, intermediate: int, machine: Machine | None = None) -> LayerPrediction:
    """A layer of gated experts of `intermediate` columns in FP8_BLOCK between a dispatch and a combine.

    Rates are of docs/measured: products 2026-11-30-h200-layer.jsonl, step 2026-11-29-h200-train.jsonl, each on one GPU.
    """
    m = machine or Machine()
    served, trained = predict(e, m), predict(replace(e, quantized=False), m)
    local, rows, weights = e.experts // e.ranks, served.rows, 3 * e.hidden * intermediate
    multiplied = rows * (2 * weights / m.products * 1e-6 + (2 * intermediate + e.hidden) * OUTPUT_US)
    met = most_experts(e)
    read = (met + LAST_EXPERTS) * weights / (WEIGHTS_RATE * m.memory) * 1e-3 + met * EXPERT_US
    products = (multiplied**TOGETHER + read**TOGETHER) ** (1 / TOGETHER)  # whose launches are covered
    passes = local * weights * STEP_WEIGHT_BYTES + rows * (e.hidden + 3 * intermediate) * STEP_ROW_BYTES
    step = STEP_US + STEP_PRODUCTS * products + passes / m.memory * 1e-3 + 2 * (trained.dispatch + trained.combine)
    return LayerPrediction(products, served.dispatch + products + served.combine, step)


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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 64, 512])
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
