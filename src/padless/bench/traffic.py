"""Times of moving as many bytes as a call: a copy and a read, timed in turns with the calls of decoding.

The ceiling of a 1 GiB copy is out of reach for a call of ten microseconds, whatever it does: the first bytes take a
microsecond to arrive and the last ones find most of the GPU idle. Two calls without arithmetic of the same size say
what is within reach:

* a copy whose reads and writes together are the call's bytes. Half of its traffic are writes, and where these fit into
  L2 it may end before they are in memory: a small call that has to read all its bytes cannot be expected to be as fast.
* a read of all of them, as decoding reads (weights are nearly all of its traffic): torch's sum of every row of an int64
  matrix. Rows of 4 KiB are short enough for torch to add up one in a warp (its Reduce.cuh): one launch of many blocks,
  one for every 2 GiB. A sum of everything clears semaphores first and then waits for its last block, microseconds that
  are no reading. What is written is one word a row, 0.2% of what is read.

Neither is a GEMM and neither counts as a peer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from padless.bench.peers import Contender
from padless.bench.results import COPY, READ
from padless.formats import ceil_div

ROW_WORDS = 512  # int64 words of a row that is summed: 4 KiB


class Traffic(NamedTuple):
    """Memory that is moved.

    source, target: uint8, (ceil(bytes / 2),) each; copied from one to the other.
    words: int64, (rows, ROW_WORDS), the fewest rows that hold all bytes. source is its beginning.
    sums: int64, (rows,), receives the sum of each row.
    """

    source: torch.Tensor
    target: torch.Tensor
    words: torch.Tensor
    sums: torch.Tensor


def make_traffic(bytes_: int, seed: int, device: str | torch.device) -> Traffic:
    """Random memory for a call that moves `bytes_` bytes; takes one and a half times as much."""
    if bytes_ < 1:
        raise ValueError(f"bytes_ must be at least 1, got {bytes_}")
    rows = ceil_div(bytes_, 8 * ROW_WORDS)
    words = torch.empty(rows, ROW_WORDS, dtype=torch.int64, device=device)
    words.random_(generator=torch.Generator(device=device).manual_seed(seed))
    source = words.view(-1).view(torch.uint8)[: ceil_div(bytes_, 2)]
    sums = torch.empty(rows, dtype=torch.int64, device=device)
    return Traffic(source, torch.empty_like(source), words, sums)


def traffic_contenders(traffic: Traffic) -> list[Contender]:
    """The copy, which reads half the bytes and writes the other half, and the read of all, those that fill up the last
    row too. They have no result to check and are timed on the GPU only.
    """
    source, target, words, sums = traffic
    return [
        Contender(COPY, lambda: target.copy_(source), whole=False),
        Contender(READ, lambda: torch.sum(words, 1, out=sums), whole=False),
    ]
