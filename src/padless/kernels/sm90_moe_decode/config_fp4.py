"""Configuration of the decoding layer's kernel of MXFP4 weights, and how deep its rings are."""

from __future__ import annotations

from dataclasses import dataclass

from padless.epilogue import GateRule
from padless.formats import round_up
from padless.kernels.config import cpp_constants, fields_of, requirement_of
from padless.kernels.epilogue_gate import gate_constants
from padless.kernels.sm90_moe_decode.choice import LOGITS_ROOMS
from padless.kernels.sm90_moe_decode.config import MOST_EXPERTS, MOST_TOP_K

# The same numbers as in fp4/storage.cuh.
POOL_BYTES = 220 * 1024
MOST_STAGES = 8
MOST_TOKENS = 8
STAGE_K = 256
_WARPS, _STAGE_BYTES, _UNIT_ROWS = 16, 16 * 128 + 2 * 256, 16
LEAST_STAGES = 2


@dataclass(frozen=True)
class MoeDecodeFp4Config:
    """One compiled kernel. No size of the layer is among its constants.

    Attributes:
        gate_rule: of a SwiGLU that is not the plain one; None for that.
        spin_limit: turns after which a wait for other CTAs traps; 0 is none. For finding hangs.
        logits_room: experts there is room for where they are chosen by logits; 0 where ids are given.
        repacked: whether the weights are MXFP4_REPACKED.
    """

    gate_rule: GateRule | None = None
    spin_limit: int = 0
    logits_room: int = 0
    repacked: bool = False

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.spin_limit >= 0, "spin_limit", "0 or more")
        require(self.logits_room in (0, *LOGITS_ROOMS), "logits_room", f"0 or one of {LOGITS_ROOMS}")

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = {"MOST_TOKENS": MOST_TOKENS, **fields_of(self, "spin_limit")}
        macros = fields_of(self, "logits_room") if self.logits_room else {}
        return cpp_constants(constants, fields_of(self, "repacked"), macros) + "".join(
            f"{line}\n" for line in gate_constants(self.gate_rule)
        )


def _row_bytes(k: int) -> int:
    return 2 * round_up(k, STAGE_K) + 64


@dataclass(frozen=True)
class Fp4LayerShape:
    """tokens x top_k slots, `experts` experts of `h` inputs and outputs and `i` activated columns; `shares`: CTAs."""

    tokens: int
    top_k: int
    experts: int
    h: int
    i: int
    shares: int

    @property
    def hidden_words(self) -> int:
        """Room for the hidden rows."""
        return self.tokens * self.top_k * (round_up(self.i, 128) // 2)

    @property
    def stages(self) -> int:
        """Stages of a warp's ring that fit next to rows and results (fp4/storage.cuh, Layout)."""
        slots = self.tokens * self.top_k
        rows = max(self.tokens * _row_bytes(self.h), slots * _row_bytes(self.i))
        stripes = -(-(self.h // (8 if self.tokens <= 4 else _UNIT_ROWS)) // self.shares)
        left = POOL_BYTES - rows - stripes * slots * _UNIT_ROWS * 2
        return min(left // (_WARPS * _STAGE_BYTES), MOST_STAGES)

    @property
    def fits(self) -> bool:
        """Whether the kernel can have such a layer."""
        return (
            1 <= self.tokens <= MOST_TOKENS
            and 1 <= self.top_k <= MOST_TOP_K
            and 1 <= self.experts <= MOST_EXPERTS
            and min(self.h, self.i) > 0
            and self.h % 32 == 0
            and self.i % 32 == 0
            and self.stages >= LEAST_STAGES
        )
