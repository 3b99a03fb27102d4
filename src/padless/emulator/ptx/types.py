"""Names of PTX types and special registers, and their sizes."""

from __future__ import annotations

import re

from padless.emulator.errors import PtxSyntaxError

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
         "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%clock", "%clock_hi",
         "%dynamic_smem_size", "%total_smem_size", "%globaltimer_lo", "%globaltimer_hi"], 4,
    ),
    "%clock64": 8, "%globaltimer": 8, "%gridid": 8, "%is_explicit_cluster": 0,
}  # fmt: skip
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def type_size(name: str) -> int:
    """Bytes of a PTX type name without its dot ("b32", "f64", "f16x2"); 0 for pred."""
    if name == "pred":
        return 0
    found = re.match(r"(?:bf|tf|[busf])(\d+)(x2)?", name)
    if not found:
        raise PtxSyntaxError(f"unknown type .{name}")
    return _SIZES[found[1]] * (2 if found[2] else 1)
