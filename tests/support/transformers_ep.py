"""A rank of transformers' own expert parallelism with padless' experts: `torch.distributed.run` starts two of these.

The argument is the folder of an FP8 checkpoint. Prints the relative error of the logits against those of one process,
as it is and with the experts of rank 1 silenced.
"""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import padless.integrations.transformers  # noqa: F401  registers "padless"
from support.hub_checkpoints import VOCABULARY, error, experts_of, load


def main() -> None:
    folder, (rank, ranks) = sys.argv[1], (dist.get_rank(), dist.get_world_size())
    ids = torch.randint(0, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    # From 5.20 on the number of ranks with experts of their own has a name.
    newer = "ep_size" in signature(DistributedConfig).parameters
    how: dict[str, Any] = {"ep_size": ranks, "tp_plan": "auto"} if newer else {"enable_expert_parallel": True}
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        experts_implementation="padless",
        distributed_config=DistributedConfig(tp_size=ranks, **how),
    ).eval()
    with torch.no_grad():
        want = load(folder, experts_implementation="padless")(ids).logits
        errors = [error(model(ids).logits, want)]
        for experts in experts_of(model):
            assert experts.num_experts == 8 // ranks
            if rank == 1:
                experts.down_proj_scale_inv.to_local().zero_()
        errors.append(error(model(ids).logits, want))
    if rank == 0:
        print(f"errors: {errors[0]:.5f} {errors[1]:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
