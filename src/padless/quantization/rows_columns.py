"""Quantizes rows of ragged groups twice in one read: along their features, and along the tokens of every group."""

from __future__ import annotations

import torch

from padless.arguments import check_flag, check_readable, check_sizes, is_one_of, refuse_kinds, shown
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.layouts import ALIGNMENTS, GroupedColumns, empty_mn_major, to_mn_major
from padless.quantization import columns_rules
from padless.quantization import rules as quantize_rules
from padless.quantization.quantize import INPUT_DTYPES, has_triton
from padless.runtime.devices import hopper_driver, on_device_of
from padless.runtime.operators import register_operator

COLUMN_BLOCKS = ((1, 128), (128, 128))  # (features, tokens)

# Tokens a group, on average, from which groups are aligned to 128 tokens: the slack is then at most an eighth of the
# codes, and a product along the tokens reads whole lines (3 to 4.5% of its time).
ALIGN_TO_LINES_FROM = 1024


def quantize_rows_columns(
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    column_block: tuple[int, int] = (1, 128),
    alignment: int | None = None,
    rows: bool = True,
    tokens: torch.Tensor | None = None,
) -> tuple[BlockScaledTensor | None, GroupedColumns]:
    """FP8_BLOCK codes of x along its features (an operand of a product along them) and along the tokens of every group.

    x: (M, features) bfloat16, float16 or float32, any strides; read once.
    offs: (G,) int32 or int64 cumulative END rows of the groups, on x's device, never read by the host. Rows past the
        last group are quantized as rows and are in no column. Ends that descend or leave 0 .. M are made ascending and
        in range.
    column_block: (features, tokens) that share a scale of the columns, (1, 128) or (128, 128); tokens are counted from
        the first of the group.
    alignment: tokens at whose multiples groups start in the columns, 32 or 128. None: 128 where M / G is at least
        ``ALIGN_TO_LINES_FROM``, else 32.
    rows: False leaves the rows out.
    tokens: (M,) int32 or int64, rows of an x (T, features): x[tokens] is quantized, to the bit, and on Hopper read
        from where its rows are, never made. Every one must be in 0 .. T - 1. None: the rows are x's.

    Returns (rows, columns). rows: ``quantize(x, FP8_BLOCK)`` to the bit, scales MN-major; None where left out. columns:
        scale and code of a block as in ``quantize``: scale = max(amax, 1e-4) / 448, code = e4m3(x * (1 / scale)). Slack
        columns are zero codes, scales of blocks without tokens are 0. A NaN or an Inf breaks its own blocks only.

    One or two launches on a GPU, no synchronisation. Raises ValueError for what is not allowed above.
    """
    check_readable(x=x, offs=offs, tokens=tokens)
    check_flag("rows", rows)
    check_values("x", x, "(M, features)")
    offs = checked_offs(offs, x, "x")
    check_column_block("column_block", column_block)
    if tokens is not None:
        tokens = _checked_indices("tokens", tokens, x, "x").contiguous()
    alignment = chosen_alignment(alignment, num_rows(x, tokens), offs.shape[0])
    row_codes, row_scale, codes, scale, starts, block_starts = _operator(
        x, offs, list(column_block), alignment, rows, tokens
    )
    block = (column_block[0], column_block[1])
    columns = GroupedColumns(codes.view(torch.float8_e4m3fn), scale, offs, starts, block_starts, block, alignment)
    if not rows:
        return None, columns
    return BlockScaledTensor(row_codes.view(torch.float8_e4m3fn), row_scale, FP8_BLOCK), columns


# --- what the quantizers of groups share -----------------------------------------------------------------


def check_values(name: str, x: torch.Tensor, wanted: str) -> None:
    """Raise ValueError unless x is 2-D, of a dtype that is quantized, with columns."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} must be {wanted} with at least one column, got shape {tuple(x.shape)}")
    check_sizes(name, x)


def checked_offs(offs: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """offs as int32. Raises ValueError unless it is (G,) int32 or int64 on x's device, G >= 1."""
    refuse_kinds(offs=offs)
    wanted = " of at least one end row (padless.group_offsets)"
    if isinstance(offs, torch.Tensor) and offs.shape == (0,):
        raise ValueError(f"offs must be a 1-D int32 or int64 tensor{wanted}, got {offs.dtype} (0,)")
    return _checked_indices("offs", offs, x, name, wanted)


def _checked_indices(name: str, t: torch.Tensor, x: torch.Tensor, of: str, wanted: str = "") -> torch.Tensor:
    """t as int32. Raises ValueError unless it is (M,) int32 or int64 on the device of x, which is called ``of``."""
    refuse_kinds(**{name: t})
    if not isinstance(t, torch.Tensor) or t.dtype not in (torch.int32, torch.int64) or t.dim() != 1:
        got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a 1-D int32 or int64 tensor{wanted}, got {got}")
    if t.device != x.device:
        raise ValueError(f"{name} must be on {of}'s device {x.device}, got {t.device}")
    return t if t.dtype == torch.int32 else t.clamp(-1, 2**31 - 1).to(torch.int32)


def num_rows(x: torch.Tensor, tokens: torch.Tensor | None) -> int:
    """Rows of x, or of x[tokens]."""
    return x.shape[0] if tokens is None else tokens.shape[0]


def check_column_block(name: str, block: tuple[int, int]) -> None:
    """Raise ValueError unless block is one of COLUMN_BLOCKS."""
    if not isinstance(block, (tuple, list)) or not is_one_of(tuple(block), COLUMN_BLOCKS):
        raise ValueError(f"{name} must be one of {COLUMN_BLOCKS} (features, tokens), got {shown(block)}")


def chosen_alignment(alignment: int | None, num_rows: int, num_groups: int) -> int:
    """alignment, or for None the one for so many rows and groups. Raises ValueError for another number."""
    if alignment is None:
        return ALIGNMENTS[1] if num_rows >= ALIGN_TO_LINES_FROM * num_groups else ALIGNMENTS[0]
    if not is_one_of(alignment, ALIGNMENTS):
        raise ValueError(f"alignment must be one of {ALIGNMENTS} tokens or None, got {shown(alignment)}")
    return alignment


# --- the operator ----------------------------------------------------------------------------------------

_Tensors = tuple[torch.Tensor, ...]


def _run(
    x: torch.Tensor,
    offs: torch.Tensor,
    block: list[int],
    alignment: int,
    rows: bool,
    tokens: torch.Tensor | None = None,
) -> _Tensors:
    on_gpu = x.is_cuda and has_triton()
    with on_device_of(x):
        if on_gpu:
            from padless.quantization.triton import rows_columns

            driver = hopper_driver(x)
            return rows_columns.rows_columns(x, offs, (block[0], block[1]), alignment, rows, driver, tokens)
        gathered = x if tokens is None else x.index_select(0, tokens)
        return rows_columns_torch(gathered, offs, (block[0], block[1]), alignment, rows)


def rows_columns_torch(
    x: torch.Tensor, offs: torch.Tensor, block: tuple[int, int], alignment: int, rows: bool
) -> _Tensors:
    """The Triton kernel's outputs, in plain torch."""
    row_codes, row_scale = quantize_rules.fp8_block(x if rows else x[:0], "activation")
    return (row_codes, to_mn_major(row_scale), *columns_rules.columns(x, offs, block, alignment))


def _fake(
    x: torch.Tensor,
    offs: torch.Tensor,
    block: list[int],
    alignment: int,
    rows: bool,
    tokens: torch.Tensor | None = None,
) -> _Tensors:
    if tokens is not None:
        x = x.new_empty((tokens.shape[0], x.shape[1]))
    kept_rows = x.shape[0] if rows else 0
    row_codes = x.new_empty((kept_rows, x.shape[1]), dtype=torch.uint8)
    row_scale = empty_mn_major(kept_rows, ceil_div(x.shape[1], 128), x.device)
    return (row_codes, row_scale, *fake_columns(x, offs, x.shape[1], (block[0], block[1]), alignment))


def fake_columns(
    x: torch.Tensor, offs: torch.Tensor, features: int, block: tuple[int, int], alignment: int
) -> _Tensors:
    """Empty (codes, scale, starts, block_starts) for the columns of x's rows."""
    num_rows, num_groups = x.shape[0], offs.shape[0]
    codes = x.new_empty((features, columns_rules.padded_tokens(num_rows, num_groups, alignment)), dtype=torch.uint8)
    scales = (columns_rules.num_scale_rows(num_rows, num_groups), columns_rules.scale_columns(features, block))
    scale = x.new_empty(scales, dtype=torch.float32)
    return codes, scale, torch.empty_like(offs), torch.empty_like(offs)


_operator = register_operator(
    "quantize_rows_columns(Tensor x, Tensor offs, int[] block, int alignment, bool rows, "
    "Tensor? tokens=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
