"""Epilogues: from float32 sums of a grouped GEMM to stored outputs. `Epilogue`, and the tensors that it writes.

The arithmetic, element by element, all of it float32 and every operation that is written rounded once to nearest even
(a fused multiply-add where fma() is written and nowhere else, subnormals kept). fl() marks the rounding.

    acc   the GEMM's float32 sum, global scales of the operands included: what grouped_gemm(out_dtype=float32) stores
 1. x  =  fl(acc * alpha[g])                                        alpha without bias; with neither acc
 2. x  =  fma(acc, alpha[g], bias')                                  bias; without alpha fl(acc + bias')
      bias_rule "gated_sum"    bias' = bias[g, n]                   n counts B's rows, gate and up alike
      bias_rule "gated_bias"   bias' = fl(bias[g, n] * prob[m])     step 4 is then left out; no activation
 3. activation "swiglu", on pairs of columns:
      h  =  fl(fl(gate * s) * up),  s = fl(1 / fl(1 + fl(exp(-gate))))
      With a GateRule gate is first at most limit and up between -limit and limit (NaN stays), up becomes
      fl(up + up_offset), and s is of fl(gate * alpha) in the place of gate.
      The exponential is the one operation that is not exactly rounded: a GPU's is off by up to 2^-21 of its value. Where
      the sum is above 2^126, from gates of -87.34 down, s would be subnormal and is 0.
      With gate_in_bf16 gate and up are first rounded to bfloat16, and s is that of `quantization.swiglu_rules` for
      max(gate, -87.25), a polynomial: exact in every bit, what a separate pass makes of a bfloat16 product.
 4. x  =  fl(h * prob[m])                                           prob
    x is from here on D, (M, N_out). Rows in no group, and rows and columns that do not exist, are in none of
    what follows and nothing is stored for them.
 5. amax[g] = max |D| over the rows of g, the one NaN 0x7FC00000 if one of them is NaN; what the buffer held before joins
    in unless its sign bit is set (it starts at -inf: a group without rows keeps -inf, a group of zeros has 0).
 6. d      = D rounded to d_dtype (out of range: Inf; NaN: some NaN)
 7. row_codes, row_scale: blocks of 1 x block along N, the last one short
 8. column_codes, column_scale: blocks of `block` x 1 along M, counted from the first row of the group, see below

A block of largest magnitude b (NaN if it holds one) gets a scale and a multiplier, and every code is
element(fl(D * multiplier)), nearest even, saturating. By format and scale_rule:

 FP8_BLOCK                scale = fl(max(b, fl(1e-4)) / 448)        multiplier = fl(1 / scale)
 MX* "rceil", "floor"     byte and 2^(127 - byte) of `padless.quantize`: the quantized output is quantize(D) to the bit
 MX* "cudnn"              t = fl(fl(b * fl(1 / q)) * norm_const)    q = 448 (e4m3), 128 (e5m2), 6 (e2m1)
 MX* "cudnn_documented"   t = fl(fl(b * norm_const) * fl(1 / q))    q = 448 (e4m3), 57344 (e5m2), 6 (e2m1)
                          byte = t rounded up to a power of two: exponent field, plus 1 if a mantissa bit is set (field
                          0: plus 1 only above 2^-127), at most 254; multiplier = min(fl(norm_const * 2^(127 - byte)),
                          FLT_MAX), so D ~ code * 2^(byte - 127) / norm_const
 NVFP4 "te"               scale and multiplier of `padless.quantize` with a given global_scale
 Any of them              b or t is Inf or NaN: what `padless.quantize` stores (MX byte 255 and codes 0x7F, or 0 for
                          e2m1; NVFP4 0x7F and 0; FP8_BLOCK as the formula falls out, with the one NaN 0x7FC00000)

Column blocks where groups are ragged. Rows of different groups never share a block, so every group starts a new one;
and every group starts a new TILE of 128 rows, as in the 32x4x4 layout's other grouped forms. With

    tile(g) = sum over h < g of ceil(M_h / 128)        first tile of group g; empty groups take none

row m of group g, which starts at row s, is in block  tile(g) * (128 / block) + (m - s) // block.  Example: groups of
130, 0 and 40 rows, block 32:

    rows     0..31 32..63 64..95 96..127 | 128..129   -      -      -   | 130..161 162..169   -      -
    block      0     1      2      3     |    4      (5)    (6)    (7)  |    8        9      (10)   (11)
    tile                0                |            1                 |             2

Blocks in brackets have no rows: nothing is stored for them. Where every group is a multiple of 128 rows, the block is
m // 32 and this is the layout of cuDNN. `column_tiles` says how many tiles a buffer must have for unknown offsets.

Layouts of scales: row_layout
    "plain"           (M, C) row-major, C = ceil(N_out / block); float32 (FP8_BLOCK) or one byte
    "plain_mn"        FP8_BLOCK: (M, C) with strides (1, ld), ld = M rounded up to 4: what grouped_gemm reads
    "blocked"         one byte: 32x4x4 tiles of the (M, C) matrix, blocked_size(M, C) bytes; groups are not looked at
    "blocked_groups"  one byte: every group starts on a tile of 128 rows (padless.layouts.to_blocked_groups)
column_layout, with T tiles and S = T * 128 / block
    "plain"           (S, N_out) row-major: row s has the scales of block s. float32 (FP8_BLOCK) or one byte
    "blocked"         one byte: 32x4x4 tiles of the transposed (N_out, S) matrix, T tiles wide
    "blocked_groups"  one byte (cuDNN's discrete_col_sfd): each group's transposed matrix (N_out, ceil(M_g / 32)) in
                      32x4x4 tiles of its own, one group after the other; group g starts at byte
                      tile(g) * ceil(N_out / 128) * 512
A kernel may store zeros in padding that shares a tile with scales that exist, and nothing anywhere else. Tiles at or
past T, which only offsets that break the promise of `column_tiles` lead to, are not stored.

How a kernel is called: `kernels.table.ROUTES` has rows with operation "grouped_gemm_quant", whose module is a
`kernels.table.QuantHost`: its prepare gets `EpilogueTensors` in the place of ``out``. amax holds -inf when the
launch starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from padless.arguments import check_flag, check_number, is_one_of
from padless.deprecation import warn_of
from padless.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    OUT_DTYPES,
    TILE_ROWS,
    BlockScaledFormat,
    blocked_size,
    ceil_div,
)
from padless.layouts import blocked_groups_rows

# Activations, and whether each is of pairs of columns, gate and up. A name is that of a function in
# kernels/device/activation.cuh, and of its twin in reference/activation.py.
ACTIVATIONS = {"swiglu": True}
GATE_UP = ("interleaved", "concatenated", "alternating")
_IN_ONE_WORD = {f"swiglu_{order}": order for order in GATE_UP}  # kind and order: leaves
BIAS_RULES = ("gated_sum", "gated_bias")
MX_FORMATS = (MXFP8, MXFP8_E5M2, MXFP4)
ROW_FORMATS = (FP8_BLOCK, *MX_FORMATS, NVFP4)
COLUMN_FORMATS = (FP8_BLOCK, MXFP8, MXFP8_E5M2)
ROW_LAYOUTS = ("plain", "plain_mn", "blocked", "blocked_groups")
COLUMN_LAYOUTS = ("plain", "blocked", "blocked_groups")
NORM_CONST_RULES = ("cudnn", "cudnn_documented")
SCALE_RULES: dict[BlockScaledFormat, tuple[str, ...]] = {
    FP8_BLOCK: ("",),
    **dict.fromkeys(MX_FORMATS, ("rceil", "floor", *NORM_CONST_RULES)),
    NVFP4: ("te",),
}

# Columns of gate, then as many of up, in "interleaved".
INTERLEAVE = 32

# q of NORM_CONST_RULES: what the largest magnitude of a block is scaled to.
SCALED_MAX: dict[tuple[str, BlockScaledFormat], float] = {
    ("cudnn", MXFP8): 448.0,
    ("cudnn", MXFP8_E5M2): 128.0,
    ("cudnn", MXFP4): 6.0,
    ("cudnn_documented", MXFP8): 448.0,
    ("cudnn_documented", MXFP8_E5M2): 57344.0,
    ("cudnn_documented", MXFP4): 6.0,
}


@dataclass(frozen=True)
class GateRule:
    """Parameters of SwiGLU beside gate * sigmoid(gate) * up: gpt-oss has GateRule(1.702, 7.0, 1.0). None: no limit."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit", "up_offset"):
            if (value := getattr(self, name)) is not None or name != "limit":
                check_number(f"GateRule.{name}", value)


@dataclass(frozen=True)
class Epilogue:
    """Everything that an epilogue does; no sizes and no addresses, so one compiled kernel serves every M and G.

    Attributes:
        alpha, bias, prob: whether sums are multiplied by a number per group, a row vector per group is added, and
            rows are multiplied by a number each.
        bias_rule: "gated_sum", (acc * alpha + bias) * prob, or "gated_bias", acc * alpha + bias * prob. The same
            without prob. "gated_bias" is what cuDNN's GEMM + Quant kernel computes, to the bit of float32 sums that
            are equal (`grouped_gemm_quant.py` of its frontend 1.32), and has no activation.
        activation: "none" or a name of ACTIVATIONS. Of one with a gate N_out = N / 2.
        gate_up: which columns are gate and which are up: "interleaved", 32 of gate, 32 of up, 32 of gate, ..;
            "concatenated", gate in the first N / 2 and up in the others; "alternating", one of gate, one of up, ...
            Without a gate it has no effect.
        gate_rule: of a gate that is not the plain one; None for that.
        gate_in_bf16: whether what is activated is rounded to bfloat16 first, as `padless.moe` does; cuDNN does not.
        amax: whether the largest magnitude of each group is wanted.
        d_dtype: bfloat16, float16 or float32 of the unquantized output, None for none.
        row_format: format of the output quantized along N, None for none.
        row_layout: where its scales lie, one of ROW_LAYOUTS.
        column_format: format of the output quantized along M (MXFP8, MXFP8_E5M2 or FP8_BLOCK), None for none.
        column_layout: where its scales lie, one of COLUMN_LAYOUTS.
        scale_rule: of the MX formats "rceil", "floor", "cudnn" or "cudnn_documented"; "te" for NVFP4 and "" for
            FP8_BLOCK and for no quantized output. One for rows and columns.

    Raises ValueError for what does not go together.
    """

    alpha: bool = False
    bias: bool = False
    prob: bool = False
    bias_rule: str = "gated_sum"
    activation: str = "none"
    gate_up: str = field(default="concatenated", kw_only=True)
    gate_rule: GateRule | None = None
    gate_in_bf16: bool = False
    amax: bool = False
    d_dtype: torch.dtype | None = None
    row_format: BlockScaledFormat | None = None
    row_layout: str = "plain"
    column_format: BlockScaledFormat | None = None
    column_layout: str = "plain"
    scale_rule: str = ""

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, allowed: str) -> None:
            if not ok:
                value = getattr(self, field)
                raise ValueError(f"Epilogue.{field} is {getattr(value, 'name', value)!r:.80}; allowed: {allowed}")

        for name in ("alpha", "bias", "prob", "amax", "gate_in_bf16"):
            check_flag(f"Epilogue.{name}", getattr(self, name))
        row, column = self.row_format, self.column_format
        if is_one_of(self.activation, tuple(_IN_ONE_WORD)):
            warn_of(f'Epilogue(activation="{self.activation}")')
            object.__setattr__(self, "gate_up", _IN_ONE_WORD[self.activation])
            object.__setattr__(self, "activation", "swiglu")
        names = ("none", *ACTIVATIONS)
        require(is_one_of(self.activation, names), "activation", ", ".join(names))
        require(is_one_of(self.gate_up, GATE_UP), "gate_up", ", ".join(GATE_UP))
        require(is_one_of(self.bias_rule, BIAS_RULES), "bias_rule", " or ".join(BIAS_RULES))
        require(self.bias_rule == "gated_sum" or self.activation == "none", "bias_rule", "gated_sum with an activation")
        require(self.gate_rule is None or self.is_glu, "gate_rule", "None without a gate")
        is_free = self.activation != "none" or not self.gate_in_bf16
        require(is_free, "gate_in_bf16", "False without an activation")
        require(
            is_one_of(self.d_dtype, (None, *OUT_DTYPES)),
            "d_dtype",
            "None, torch.bfloat16, torch.float16 or torch.float32",
        )
        rows, columns = (", ".join(f.name for f in allowed) + " or None" for allowed in (ROW_FORMATS, COLUMN_FORMATS))
        require(is_one_of(row, (None, *ROW_FORMATS)), "row_format", rows)
        require(is_one_of(column, (None, *COLUMN_FORMATS)), "column_format", columns)
        require(row is None or column is None or row == column, "column_format", "that of the rows, or only one")
        is_empty = self.format is None and self.d_dtype is None and not self.amax
        require(not is_empty, "d_dtype", "not None when nothing else is wanted")
        rules = ("",) if self.format is None else SCALE_RULES[self.format]
        require(is_one_of(self.scale_rule, rules), "scale_rule", " or ".join(map(repr, rules)))
        require(is_one_of(self.row_layout, ROW_LAYOUTS), "row_layout", ", ".join(ROW_LAYOUTS))
        require(is_one_of(self.column_layout, COLUMN_LAYOUTS), "column_layout", ", ".join(COLUMN_LAYOUTS))
        if self.format == FP8_BLOCK:
            require(self.row_layout in ("plain", "plain_mn"), "row_layout", "plain or plain_mn for FP8_BLOCK")
            require(self.column_layout == "plain", "column_layout", "plain for FP8_BLOCK")
        else:
            is_plain_mn = self.row_layout == "plain_mn"
            require(not is_plain_mn, "row_layout", "plain, blocked or blocked_groups except for FP8_BLOCK")

    @property
    def format(self) -> BlockScaledFormat | None:
        """The format of the quantized outputs, None where there are none."""
        return self.row_format or self.column_format

    @property
    def norm_const(self) -> bool:
        """Whether scales are multiplied by a constant, as in cuDNN."""
        return self.scale_rule in NORM_CONST_RULES

    @property
    def is_glu(self) -> bool:
        """Whether pairs of columns become one."""
        return ACTIVATIONS.get(self.activation, False)

    @property
    def order(self) -> str:
        """Order of gate and up; "none" where there is no gate."""
        return self.gate_up if self.is_glu else "none"

    @property
    def gate_and_up_apart(self) -> bool:
        """Whether gate and up are halves of the columns, of which a tile takes runs in turn."""
        return self.order == "concatenated"

    def out_columns(self, n: int) -> int:
        """N_out for B with n rows."""
        return n // 2 if self.is_glu else n


@dataclass(frozen=True, eq=False)
class EpilogueTensors:
    """Operands and outputs of an Epilogue, on one device; None where it has no use for them.

    Operands:
        alpha: (G,) float32.
        bias: (G, N) float32, contiguous.
        prob: (M,) float32, contiguous.
        norm_const: (1,) float32, positive.
        global_scale: NVFP4's decode scale of the output, (1,) or (G,) float32.
    Outputs:
        d: (M, N_out) of d_dtype.
        amax: (G,) float32, contiguous.
        row_codes, column_codes: (M, N_out) of the format's data dtype, with two codes a byte along N (M, N_out / 2).
            N_out is contiguous.
        row_scale, column_scale: of the format's scale dtype, shapes and strides as the Epilogue's layouts say; the
            "blocked" ones 1-D and contiguous.
        column_tiles: tiles of 128 rows that column_scale has room for.
    """

    alpha: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    prob: torch.Tensor | None = None
    norm_const: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    d: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    row_codes: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    column_codes: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None
    column_tiles: int = 0


def column_tiles(m: int, num_groups: int, m_aligned: int = 1) -> int:
    """Tiles of 128 rows that any split of m rows into groups can need when every group starts a tile.

    m_aligned: what every end offset is promised to be a multiple of. A multiple of 128 makes it ceil(m / 128).
    Example: 300 rows in at most 4 groups need no more than (300 + 4 * 127) // 128 = 6.
    """
    if m_aligned % TILE_ROWS == 0:
        return ceil_div(m, TILE_ROWS)
    return blocked_groups_rows(m, num_groups) // TILE_ROWS


def row_scale_shape(epilogue: Epilogue, m: int, n_out: int, num_groups: int) -> tuple[int, ...]:
    """Shape of EpilogueTensors.row_scale."""
    assert epilogue.row_format is not None
    columns = ceil_div(n_out, epilogue.row_format.block_k)
    if epilogue.row_layout == "blocked":
        return (blocked_size(m, columns),)
    if epilogue.row_layout == "blocked_groups":
        return (blocked_size(blocked_groups_rows(m, num_groups), columns),)
    return (m, columns)


def column_scale_shape(epilogue: Epilogue, n_out: int, tiles: int) -> tuple[int, ...]:
    """Shape of EpilogueTensors.column_scale for `tiles` tiles of 128 rows."""
    assert epilogue.column_format is not None
    if epilogue.column_layout == "plain":
        return (tiles * TILE_ROWS // epilogue.column_format.block_k, n_out)
    return (blocked_size(n_out, 4 * tiles),)
