"""The rule by which a router's logits choose experts: `Router`."""

from __future__ import annotations

from dataclasses import dataclass

from padless.arguments import check_flag, check_integer, check_number, is_one_of, shown
from padless.runtime.choices import Score

SCORINGS = ("softmax", "sigmoid")
MAX_CHOSEN = 64
ID_BITS = 12  # of a rank: those of an expert's id
MAX_LOGITS = 1 << ID_BITS


@dataclass(frozen=True)
class Router:
    """A rule that chooses k experts of a token by its logits and weighs them.

    k: experts of a token, from 1 to 64.
    scoring: "softmax" over all experts' logits, or the "sigmoid" of each.
    renormalize: whether the chosen experts' scores are divided by their sum. For "softmax" that is the softmax over the
        chosen logits alone, and is computed so; for "sigmoid" 1e-20 is added to the sum.
    scaling_factor: what the weights are multiplied by at last.
    num_expert_groups, top_groups: experts are taken from the top_groups best of so many groups of adjacent experts, each
        of two experts or more. A group's score is the sum of its two best experts', biased.

    Of models in use: Mixtral, Qwen3-MoE and gpt-oss have Router(k); DeepSeek-V3 Router(8, "sigmoid", scaling_factor=2.5,
    num_expert_groups=8, top_groups=4) and a correction bias; Kimi-K2 and GLM-4.5 the same without groups.
    Raises ValueError for what does not go together.
    """

    k: int
    scoring: Score = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_expert_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        check_integer("k", self.k, 1, MAX_CHOSEN)
        if not is_one_of(self.scoring, SCORINGS):
            raise ValueError(f"scoring is {shown(self.scoring)}; allowed: {', '.join(map(repr, SCORINGS))}")
        check_flag("renormalize", self.renormalize)
        check_number("scaling_factor", self.scaling_factor)
        check_integer("num_expert_groups", self.num_expert_groups, 1, MAX_LOGITS // 2)
        check_integer("top_groups", self.top_groups, 1, self.num_expert_groups)

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError unless the rule can be applied to so many experts."""
        groups = self.num_expert_groups
        if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
            raise ValueError(
                f"num_expert_groups is {groups} and there are {num_experts} experts; each group must have as many, and "
                "two at least"
            )
        among = num_experts // groups * self.top_groups
        if self.k > among:
            raise ValueError(
                f"k is {self.k} and a token chooses among {among} experts ({self.top_groups} of {groups} groups of "
                f"{num_experts}); it must be at most as many"
            )
