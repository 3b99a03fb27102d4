"""A token's experts as a launch of the decoding layer is told: ids and weights, or a router's logits."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from padless.runtime.driver import Argument

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in common.cuh
LOGITS_ROOMS = (128, 256, 512, 1024)  # experts that a kernel of choose.cuh is compiled for
MOST_GROUPS = 32  # a lane each


class Rule(Protocol):
    """The fields of a `padless.moe.Router`."""

    @property
    def k(self) -> int: ...
    @property
    def scoring(self) -> str: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def scaling_factor(self) -> float: ...
    @property
    def num_expert_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Given:
    """ids (T, k) int32 or int64, weights (T, k)."""

    ids: torch.Tensor
    weights: torch.Tensor

    logits_room: ClassVar[int] = 0
    facts: ClassVar[tuple[object, ...]] = ()
    rule_arguments: ClassVar[tuple[Argument, ...]] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """(T, k)."""
        return self.ids.shape[0], self.ids.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs of the launch, in the order of its parameters."""
        return self.ids, self.weights

    @property
    def types(self) -> tuple[int, int]:
        """Of ``tensors``, as the kernel numbers them."""
        return self.ids.element_size(), TYPES[self.weights.dtype]

    @property
    def fits(self) -> bool:
        return self.weights.dtype in TYPES


@dataclass(frozen=True, eq=False)
class ByLogits:
    """Those that `padless.moe.topk` chooses: logits (T, E), bias (E,) or None, and the rule, checked."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    rule: Rule

    @property
    def logits_room(self) -> int:
        """Of the kernel's configuration."""
        return next((room for room in LOGITS_ROOMS if self.logits.shape[1] <= room), 0)

    @property
    def sizes(self) -> tuple[int, int]:
        """(T, k)."""
        return self.logits.shape[0], self.rule.k

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Inputs of the launch, in the order of its parameters."""
        return self.logits, self.bias

    @property
    def types(self) -> tuple[int, int]:
        """Of ``tensors``, as the kernel numbers them."""
        return TYPES[self.logits.dtype], 0 if self.bias is None else TYPES[self.bias.dtype]

    @property
    def facts(self) -> tuple[object, ...]:
        """Values that the launch depends on next to ``tensors``."""
        return (self.rule,)

    @property
    def fits(self) -> bool:
        """Whether the launch can choose by them."""
        return (
            self.logits_room > 0
            and (self.rule.num_expert_groups <= MOST_GROUPS or not self._has_groups)
            and all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in self.tensors)
        )

    @property
    def _has_groups(self) -> bool:
        return self.rule.top_groups < self.rule.num_expert_groups

    @property
    def rule_arguments(self) -> tuple[Argument, ...]:
        """The rule, as parameters behind all others (common.cuh, Rule)."""
        rule = self.rule
        (scaling,) = struct.unpack("<I", struct.pack("<f", rule.scaling_factor))
        groups = (rule.num_expert_groups, rule.top_groups) if self._has_groups else (1, 1)
        return tuple((int(value), 4) for value in (scaling, *groups, rule.scoring == "sigmoid", rule.renormalize))


Choice = Given | ByLogits
