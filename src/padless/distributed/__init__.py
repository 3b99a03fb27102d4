"""Expert parallelism: tokens to the ranks of their experts and back, without padding."""

from padless.distributed.expert_parallel import ExpertParallel
from padless.distributed.layer import expert_parallel_moe
from padless.distributed.plan import ExpertPlan

__all__ = ["ExpertParallel", "ExpertPlan", "expert_parallel_moe"]
