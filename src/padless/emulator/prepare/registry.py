"""The table of instructions: one emitter per opcode, filled by the decorator in each module of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter

EMITTERS: dict[str, Callable[[Emitter], None]] = {}
HELPERS: dict[str, Any] = {}  # functions that generated code calls by name
TYPES = frozenset(
    [
        *(f"{k}{n}" for k in "bus" for n in (8, 16, 32, 64, 128)),
        "f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f64", "f32x2", "pred", "u16x2", "s16x2",
        "e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "e4m3x4", "e5m2x4", "e2m1x4",
    ]
)  # fmt: skip
# name -> width in bytes
SPECIAL_REGISTERS: dict[str, int] = {
    **{
        f"%{base}.{axis}": 4
        for base in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    },
    **dict.fromkeys(
        ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%cluster_ctarank", "%cluster_nctarank",
         "%is_explicit_cluster", "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt",
         "%clock", "%clock_hi", "%dynamic_smem_size", "%total_smem_size", "%globaltimer_lo", "%globaltimer_hi"], 4,
    ),
    "%clock64": 8, "%globaltimer": 8, "%gridid": 8,
}  # fmt: skip
SPECIAL_REGISTERS["%is_explicit_cluster"] = 0


def instruction(*opcodes: str) -> Callable[[Callable[[Emitter], None]], Callable[[Emitter], None]]:
    """Register the emitter of one or more opcodes."""

    def register(function: Callable[[Emitter], None]) -> Callable[[Emitter], None]:
        for opcode in opcodes:
            assert opcode not in EMITTERS, opcode
            EMITTERS[opcode] = function
        return function

    return register


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from generated code under its own name."""
    HELPERS[function.__name__] = function
    return function
