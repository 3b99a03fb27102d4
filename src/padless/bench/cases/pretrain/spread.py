"""The model over the GPUs of a host: experts over the ranks, all else sharded by FSDP2, times of the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from padless.bench.cases.pretrain.decoder import Decoder, DecoderSize
from padless.distributed import ExpertParallel
from padless.testing.ranks import Rank
from padless.testing.timing import Call, Timer, Timing

CAPACITY = 1.25  # rows that a rank has room for, times those of even routing: more than what drawn experts ever need
_SLEEP_US = 10_000.0  # in which the host issues most of a layer's experts
# Bytes of a GPU that a step takes, by which layers are chosen: of a parameter with its gradient and the optimizer's
# states, of a token in a layer, and of what is no layer. Those of one GPU (12 layers, 16384 tokens: 91 GB) and room.
_PARAMETER_BYTES, _TOKEN_BYTES, _OTHER_BYTES, _SHARE = 8, 150_000, 12e9, 0.85


def layers_that_fit(size: DecoderSize, ranks: int, tokens: int, memory_bytes: int) -> int:
    """Layers of which a step of so many tokens a rank fits into so much memory of each, one at least."""
    experts = 3 * size.experts * size.hidden * size.intermediate
    dense = size.hidden * size.width * 2 * (size.heads + size.groups)
    layer = _PARAMETER_BYTES * (experts + dense) / ranks + _TOKEN_BYTES * tokens
    return max(1, int((_SHARE * memory_bytes - _OTHER_BYTES) / layer))


def make_model(rank: Rank, size: DecoderSize, tokens: int, drawn: int | None, *, compiled: bool) -> Decoder:
    """The decoder of a rank with that many tokens in a microbatch. Every rank has all drawn parameters, in parts.

    drawn: as of `Passes`; on GPUs there is room for the rows of drawn experts only. Gradients are sums over ranks, of
    experts and of all else. Collective.
    """
    capacity = int(CAPACITY * tokens * size.top_k) if rank.device.type == "cuda" else None
    ep = ExpertParallel(
        None, size.experts, size.hidden, size.top_k, tokens, torch.bfloat16, rank.backend, capacity,
        device=rank.device, timeout=60.0,
    )  # fmt: skip
    model = Decoder(size, device=str(rank.device), compiled=compiled, ep=ep, drawn=drawn)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    experts = set(model.weights_of_experts())
    for module in (*model.layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=experts)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return model


class RanksTimer(Timer):
    """A `Timer` of calls that all ranks make: each begins behind a barrier, a time is that of the slowest rank."""

    def __init__(self, rank: Rank, repeats: int) -> None:
        super().__init__(repeats)
        self._rank, self._tiny = rank, torch.zeros(1, device=rank.device)

    def gpu(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """GPU time of each call. The sleep in front is as long on all ranks: no rank repeats a call alone."""
        return self._in_turns(calls, lambda name, last_us: self._one_gpu_time(calls[name], last_us, _SLEEP_US)[0])

    def _in_turns(self, calls: Mapping[str, Call], one: Callable[[str, float], float]) -> dict[str, Timing]:
        own = super()._in_turns(calls, one)
        found = {}
        for name, timing in own.items():
            samples = torch.tensor(timing.samples_us, dtype=torch.float64, device=self._rank.device)
            dist.all_reduce(samples, dist.ReduceOp.MAX)
            found[name] = Timing(tuple(samples.tolist()))
        return found

    def _pause(self, last_us: float) -> None:
        super()._pause(last_us / 2)  # as long as the last call
        dist.all_reduce(self._tiny)


def largest(rank: Rank, value: int) -> int:
    """Over ranks."""
    found = torch.tensor(value, device=rank.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
