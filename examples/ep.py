"""A Mixture-of-Experts layer over ranks: inference in FP8, and a training step in bfloat16.

    torchrun --nproc-per-node 2 examples/ep.py

uses NCCL and a GPU for each process where there are enough, else gloo and CPUs. By itself it is one rank.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise

import torch
import torch.distributed as dist

import padless
from padless.distributed import ExpertParallel, expert_parallel_moe

EXPERTS, TOP_K = 8, 2


def experts_fn(w13: torch.Tensor, w2: torch.Tensor):
    """SwiGLU experts as a differentiable function of rows and their end offsets, in plain torch."""

    def function(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ends = [0, *offs.tolist()]  # on a GPU this waits; padless' own products do not
        parts = []
        for g, (first, last) in enumerate(pairwise(ends)):
            gate, up = (rows[first:last] @ w13[g].T).chunk(2, dim=-1)
            parts.append((torch.nn.functional.silu(gate) * up) @ w2[g].T)
        return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])

    return function


def main() -> None:
    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    rank = dist.get_rank()
    tokens, hidden, intermediate = (4096, 2048, 1024) if on_gpus else (48, 256, 128)

    torch.manual_seed(0)  # the same experts everywhere; each rank keeps its own
    w13 = torch.randn(EXPERTS, 2 * intermediate, hidden) / hidden**0.5
    w2 = torch.randn(EXPERTS, hidden, intermediate) / intermediate**0.5
    torch.manual_seed(1 + rank)  # other tokens everywhere, and not as many
    count = tokens - rank
    x = torch.randn(count, hidden).to(device, torch.bfloat16)
    weights, ids = torch.randn(count, EXPERTS).softmax(-1).topk(TOP_K)
    weights, ids = weights.to(device), ids.to(device)

    # Inference: rows arrive in FP8, as the grouped GEMM takes them.
    ep = ExpertParallel(None, EXPERTS, hidden, TOP_K, tokens, padless.FP8_BLOCK)
    mine = list(ep.local_experts)
    quantized = [padless.quantize(w[mine].to(device), padless.FP8_BLOCK, kind="weight") for w in (w13, w2)]
    out = padless.moe.moe(x, ids, weights, *quantized, ep=ep)
    start = time.perf_counter()
    out = padless.moe.moe(x, ids, weights, *quantized, ep=ep)
    if on_gpus:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    # Training: rows travel in bfloat16 and the gradients the same way back.
    training = ExpertParallel(None, EXPERTS, hidden, TOP_K, tokens, torch.bfloat16)
    own = [w[mine].to(device, torch.bfloat16).requires_grad_() for w in (w13, w2)]
    leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    trained = expert_parallel_moe(leaf, ids, leaf_weights, training, experts_fn=experts_fn(*own))
    trained.float().square().mean().backward()

    difference = (out.float() - trained.detach().float()).norm() / trained.detach().float().norm()
    for r in range(size):
        dist.barrier()
        if r == rank:
            print(
                f"rank {rank}: {count} tokens, experts {mine}, backend {ep.backend}, {1e3 * seconds:.2f} ms, FP8 "
                f"against bfloat16 {float(difference):.3f}, |dx| {float(leaf.grad.float().norm()):.4f}, "
                f"|dweights| {float(leaf_weights.grad.norm()):.4f}",
                flush=True,
            )
    ep.check()
    training.check()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
