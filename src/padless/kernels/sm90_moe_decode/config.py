"""Configuration of the decoding layer's kernel, and how deep its rings are."""

from __future__ import annotations

from dataclasses import dataclass

from padless.formats import round_up
from padless.kernels.config import cpp_constants, fields_of, requirement_of
from padless.kernels.sm90_moe_decode.choice import LOGITS_ROOMS

# The same numbers as in storage.cuh.
POOL_BYTES = 218 * 1024
MOST_STAGES = 12
MOST_SHARES = 255
MOST_EXPERTS = 4096
MOST_TOP_K = 16
MOST_TOKENS = 16
MOST_K = 64 * 128
_PIPELINES, _STAGE_BYTES, _STRIPE_BYTES = 2, 64 * 128, 16 * 2
# With fewer stages the rings hold less than memory has under way.
LEAST_STAGES = 4


@dataclass(frozen=True)
class MoeDecodeConfig:
    """One compiled kernel. No size of the layer is among its constants, and of the tokens only this bound.

    Attributes:
        most_tokens: rows of x that the first product multiplies, 8 or 16.
        spin_limit: turns after which a wait for other CTAs traps; 0 is none. For finding hangs.
        logits_room: experts there is room for where they are chosen by logits; 0 where ids are given.
    """

    most_tokens: int = 8
    spin_limit: int = 0
    logits_room: int = 0

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.most_tokens in (8, 16), "most_tokens", "8 or 16")
        require(self.spin_limit >= 0, "spin_limit", "0 or more")
        require(self.logits_room in (0, *LOGITS_ROOMS), "logits_room", f"0 or one of {LOGITS_ROOMS}")

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        macros = fields_of(self, "logits_room") if self.logits_room else {}
        return cpp_constants(fields_of(self, "most_tokens", "spin_limit"), macros=macros)


@dataclass(frozen=True)
class LayerShape:
    """tokens x top_k slots, `experts` experts of `h` inputs and outputs and `i` activated columns."""

    tokens: int
    top_k: int
    experts: int
    h: int
    i: int

    @property
    def most_tokens(self) -> int:
        """Of the configuration."""
        return 8 if self.tokens <= 8 else 16

    @property
    def hidden_words(self) -> int:
        """Room for the hidden rows."""
        return self.tokens * self.top_k * self.i

    @property
    def stages(self) -> int:
        """Stages of a ring that fit next to codes, scales and results (storage.cuh, Layout)."""
        rows = round_up(self.tokens * self.top_k, 8)
        codes = max(self.most_tokens * self.h, rows * self.i)
        left = POOL_BYTES - codes - codes // 128 * 4 - 2 * rows * _STRIPE_BYTES
        return min(left // (_PIPELINES * _STAGE_BYTES), MOST_STAGES)

    @property
    def fits(self) -> bool:
        """Whether the kernel can have such a layer."""
        return (
            1 <= self.tokens <= MOST_TOKENS
            and 1 <= self.top_k <= MOST_TOP_K
            and 1 <= self.experts <= MOST_EXPERTS
            and self.h % 128 == 0
            and self.i % 128 == 0
            and min(self.h, self.i) > 0
            and max(self.h, self.i) <= MOST_K
            and self.stages >= LEAST_STAGES
        )
