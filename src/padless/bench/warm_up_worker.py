"""One process of `padless.bench.warm_up`: reads a job from standard input and calls its contenders once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from padless.bench.cases.chain import mlp_chains
from padless.bench.cases.problems.chain import ChainProblem, second_projection
from padless.bench.group_sizes import DecodePoint, Point, group_sizes
from padless.bench.measure import gather, own_contender, own_contenders
from padless.bench.peers import Contender, Peer
from padless.bench.peers.find import find_peers
from padless.bench.problem import make_decode, make_grouped


def _contenders(kind: str, fields: dict[str, int], peers: Sequence[Peer], seed: int) -> list[Contender]:
    """All contenders of one point, on uninitialised operands."""
    if kind == "paper":
        point = Point(**fields)
        problem = make_grouped(point, group_sizes(point, seed), None, "cuda")
        return gather(own_contenders(problem), peers, lambda peer: peer.grouped(problem))[0]
    problem = make_decode(DecodePoint(**fields), seed, "cuda", values=False)
    own = [own_contender(problem)]
    if kind == "chain":
        one_call = ChainProblem([problem], [second_projection(problem, None)], calls=1)
        own += mlp_chains(one_call, None)[0].parts
    return gather(own, peers, lambda peer: peer.decode(problem))[0]


def _call_all(kind: str, fields: dict[str, int], peers: Sequence[Peer], seed: int) -> None:
    """Calls every contender of one point; nothing of it stays in memory."""
    try:
        contenders = _contenders(kind, fields, peers, seed)
    except torch.cuda.OutOfMemoryError as error:
        print(f"{fields}: {error}", file=sys.stderr)
        return
    for contender in contenders:
        try:
            contender.call()
        except Exception as error:
            print(f"{fields} {contender.name}: {type(error).__name__}: {error}", file=sys.stderr)
    torch.cuda.synchronize()


def main() -> None:
    """A worker: reads its job from standard input."""
    job = json.load(sys.stdin)
    peers = [peer for peer in find_peers(job["folder"], job["names"]) if peer.available().usable]
    for fields in job["points"]:
        _call_all(job["kind"], fields, peers, job["seed"])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
