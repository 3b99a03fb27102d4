"""Checks of operands by dtype, shape, stride and address; no value is read."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from padless.arguments import MOST_ROWS, is_one_of, shown
from padless.formats import OUT_DTYPES, TILE_ROWS, BlockScaledTensor, blocked_size, ceil_div
from padless.kernels.config import MAX_GROUPS
from padless.kernels.table import BF16, ROUTES, format_name
from padless.row_groups import clamped_ends, is_readable, is_traced, row_groups_of

Activation = BlockScaledTensor | torch.Tensor

# Of each operation, (format of a, format of b) of its products; a dictionary keeps the order that errors name them in.
_PAIRS = {
    operation: dict.fromkeys((route.a, route.b) for route in ROUTES if route.operation == operation)
    for operation in dict.fromkeys(route.operation for route in ROUTES)
}
# K in values has to be a multiple of: rows of 16 bytes for TMA, and whole blocks of the MX formats.
_K_MULTIPLE = {"FP8_BLOCK": 16, "MXFP8": 32, "MXFP8_E5M2": 32, "MXFP4": 32, "NVFP4": 32, "MXFP4_REPACKED": 32, BF16: 8}


def data_of(t: Activation) -> torch.Tensor:
    """The codes of a block-scaled tensor; a plain tensor itself."""
    return t.data if isinstance(t, BlockScaledTensor) else t


def describe(value: object) -> str:
    """A value in a message: shape, dtype and device of a tensor, else the type."""
    if isinstance(value, BlockScaledTensor):
        value = value.data
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        kind = "" if value.layout is torch.strided else f"{value.layout} "
        return f"{kind}{tuple(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def check_operands(operation: str, a: Activation, b: BlockScaledTensor, offs: torch.Tensor | None) -> None:
    """Raises ValueError for what can be checked without reading values, whatever computes the product."""
    _check_kinds(operation, a, b)
    (m, k) = a.logical_shape if isinstance(a, BlockScaledTensor) else a.shape
    num_groups, n, b_k = b.logical_shape
    if k != b_k:
        raise ValueError(about_k((m, k), (num_groups, n, b_k)))
    multiple = math.lcm(_K_MULTIPLE[format_name(a)], _K_MULTIPLE[b.format.name])
    if k == 0 or k % multiple != 0:
        raise ValueError(f"K is {k}; it must be a positive multiple of {multiple} (quantize a zero-filled tail)")
    if isinstance(a, BlockScaledTensor) and not a.is_activation:
        raise ValueError(f"a has scales of shape {tuple(a.scale.shape)}; quantize it with kind='activation'")
    if not b.is_weight:
        raise ValueError(f"b has scales of shape {tuple(b.scale.shape)}; quantize it with kind='weight'")
    if b.device != a.device:
        raise ValueError(f"b is on {b.device} and a on {a.device}; they must be on one device")
    if num_groups > MAX_GROUPS:
        raise ValueError(
            f"b has {num_groups} groups; at most {MAX_GROUPS} are supported: multiply by b[:{MAX_GROUPS}] and so on, "
            "each with its own offs"
        )
    if operation == "grouped_gemm":
        check_ends(offs, num_groups, "a", a.device)
    if isinstance(a, BlockScaledTensor):
        _check_row_groups(a, offs, num_groups)
    _check_global_scales("b", b, num_groups)
    check_rows(_name_of_data(a), data_of(a))
    check_rows("b.data", b.data)
    check_counts(m, n, k)
    if isinstance(a, BlockScaledTensor) and a.scale.numel() >= 2**31 - 2**20:
        blocks = f"ceil(K / {a.format.block_k})"
        raise ValueError(f"M is {m} and K is {k}; M * {blocks} must be below 2^31")


def check_counts(m: int, n: int, k: int) -> None:
    """Raises ValueError for sizes of a product that kernels do not count in 32 bits."""
    if m >= MOST_ROWS or n >= MOST_ROWS or k >= MOST_ROWS:
        raise ValueError(f"M is {m}, N is {n} and K is {k}; each must be below 2^30")


def about_k(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """The sentence for shapes (M, K) and (G, N, K) of different K."""
    remedy = "; b seems to be (G, K, N), of which .mT.contiguous() makes (G, N, K)" if a[1] == b[1] else ""
    return f"a is (M, K) = {a} and b is (G, N, K) = {b}: K must be the same{remedy}"


def tensors_of(name: str, t: Activation) -> list[tuple[str, torch.Tensor | None]]:
    """The tensors that a product reads of an operand, with the names that messages have for them."""
    if isinstance(t, torch.Tensor):
        return [(name, t)]
    return [(f"{name}.data", t.data), (f"{name}.scale", t.scale), (f"{name}.global_scale", t.global_scale)]


def check_operands_of_kernel(a: Activation, b: BlockScaledTensor) -> None:
    """Raises ValueError for checked operands that the kernels cannot read, where the reference could."""
    check_alignment(_name_of_data(a), data_of(a))
    check_alignment("b.data", b.data)
    if isinstance(a, BlockScaledTensor):
        check_address("a.scale", a.scale)


def _name_of_data(a: Activation) -> str:
    return "a.data" if isinstance(a, BlockScaledTensor) else "a"


def as_one_group(b: object) -> BlockScaledTensor:
    """The weights (N, K) of a dense product as (1, N, K). Raises ValueError for what are none."""
    if not isinstance(b, BlockScaledTensor) or b.data.dim() != 2:
        raise ValueError(f"b must be a BlockScaledTensor of rank 2, (N, K), got {describe(b)}")
    if not b.is_weight:
        raise ValueError(f"b has scales of shape {tuple(b.scale.shape)}; quantize it with kind='weight'")
    _check_global_scales("b", b, 1)
    return BlockScaledTensor(b.data[None], b.scale[None], b.format, b.global_scale, b.scale_layout)


def _check_row_groups(a: BlockScaledTensor, offs: torch.Tensor | None, num_groups: int) -> None:
    """Raises ValueError for scales of ``a`` that were made for other groups, as far as the host can know."""
    rows = a.data.shape[0]
    if (groups := row_groups_of(a)) is not None:
        groups.check("a", offs, rows, num_groups, "b")
    elif a.scale_layout == "blocked_groups" and offs is not None and is_readable(offs):
        ends = clamped_ends(offs.tolist(), rows)
        needed = sum(ceil_div(end - start, TILE_ROWS) for start, end in itertools.pairwise([0, *ends]))
        tiles = a.scale.numel() // blocked_size(1, a.scale_columns)
        if needed > tiles:
            raise ValueError(
                f"a.scale has {tiles} tiles of {TILE_ROWS} rows and the groups of offs need {needed}; "
                "quantize a with the offs of this call"
            )
    _check_global_scales("a", a, num_groups)


def _check_global_scales(name: str, t: BlockScaledTensor, num_groups: int) -> None:
    count = 1 if t.global_scale is None else t.global_scale.numel()
    if count not in (1, num_groups):
        raise ValueError(
            f"{name}.global_scale has {count} values and b {_groups(num_groups)}; it must have one value, or one for "
            "each group"
        )


def _groups(num_groups: int) -> str:
    return "1 group" if num_groups == 1 else f"{num_groups} groups"


def as_int32(a: Activation, offs: torch.Tensor) -> tuple[Activation, torch.Tensor]:
    """``offs`` as int32 on its device, where it is int64, and ``a`` as an operand of those: a cast, and no wait.

    What does not fit counts as the nearest end that does, which is past every M. Raises ValueError where ``a`` has
    scales for other groups.
    """
    if not isinstance(offs, torch.Tensor) or offs.dtype != torch.int64 or offs.dim() != 1:
        return a, offs
    ends = offs.clamp(-1, 2**31 - 1).to(torch.int32)
    if isinstance(a, BlockScaledTensor) and a.offs is not None:
        if (groups := row_groups_of(a)) is not None:
            groups.check("a", offs, a.shape[0], len(offs), "offs")
        a = replace(a, offs=ends)
    return a, ends


def check_ends(offs: torch.Tensor | None, num_groups: int | None, name: str, device: torch.device) -> None:
    """Raises ValueError unless offs is contiguous int32 end rows on ``device``.

    num_groups: how many groups b has; None allows any number. name: of the operand that has the rows.
    """
    if offs is None:
        has = "" if num_groups is None else f" and b has {_groups(num_groups)}"
        raise ValueError(f"offs is None{has}; pass the end row of each group (see padless.group_offsets)")
    if not isinstance(offs, torch.Tensor) or offs.dtype != torch.int32 or offs.dim() != 1:
        raise ValueError(f"offs must be a 1-D int32 or int64 tensor (see padless.group_offsets), got {describe(offs)}")
    if num_groups is not None and offs.shape[0] != num_groups:
        remedy = "; padless.layouts.offs_from_indptr drops a leading 0" if offs.shape[0] == num_groups + 1 else ""
        raise ValueError(f"offs has {offs.shape[0]} entries and b {num_groups} groups; they must be as many{remedy}")
    if offs.device != device:
        raise ValueError(f"offs is on {offs.device} and {name} on {device}; they must be on one device")
    if not offs.is_contiguous():
        raise ValueError(f"offs must be contiguous, got stride {offs.stride(0)}; call .contiguous()")


def _check_kinds(operation: str, a: Activation, b: BlockScaledTensor) -> None:
    """Types, ranks and the pair of formats."""
    for name, t, rank, shape in (("a", a, 2, "(M, K)"), ("b", b, 3, "(G, N, K)")):
        plain = name == "a" and isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16
        if not plain and not isinstance(t, BlockScaledTensor):
            raise ValueError(f"{name} must be a BlockScaledTensor (see padless.quantize), got {describe(t)}")
        if data_of(t).dim() != rank:
            raise ValueError(f"{name} must have rank {rank}, {shape}, got {describe(t)}")
    check_pair(operation, a=format_name(a), b=b.format.name)


def check_pair(operation: str, **formats: str) -> None:
    """Raises ValueError unless there is a product of these two formats, given by the names of their arguments."""
    (a, b), pairs = formats.items(), _PAIRS[operation]
    if (a[1], b[1]) not in pairs:
        supported = ", ".join(f"{x} x {y}" for x, y in pairs)
        raise ValueError(f"{a[0]} has format {a[1]} and {b[0]} has format {b[1]}; supported: {supported}")


def output(
    a: Activation, b: BlockScaledTensor | torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype, *,
    any_n: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``out`` if it will do, or a new tensor. Raises ValueError.

    any_n: the rows of the result may start anywhere, not on 16 bytes alone.
    """
    m, n = a.shape[0], b.shape[1]
    if out is None:
        if not is_one_of(out_dtype, OUT_DTYPES):
            raise ValueError(f"out_dtype is {shown(out_dtype)}; allowed: torch.bfloat16, torch.float16, torch.float32")
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    else:
        if not isinstance(out, torch.Tensor) or out.dtype not in OUT_DTYPES:
            raise ValueError(f"out must be a bfloat16, float16 or float32 tensor, got {describe(out)}")
        if tuple(out.shape) != (m, n) or out.device != a.device:
            raise ValueError(f"out must be (M, N) = {(m, n)} on {a.device}, got {describe(out)}")
    if not any_n and not _has_whole_pieces(out):
        raise ValueError(f"N is {n}; it must be a multiple of {16 // out.element_size()} for {out.dtype} output")
    check_rows("out", out)
    return out


def check_output_of_kernel(out: torch.Tensor) -> None:
    """Raises ValueError for a checked output that the kernels cannot write: rows of whole 16 bytes lie on such."""
    if _has_whole_pieces(out):
        check_alignment("out", out)


def _has_whole_pieces(out: torch.Tensor) -> bool:
    return out.shape[1] * out.element_size() % 16 == 0


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the rows of ``tensor`` are contiguous and lie apart."""
    rows_overlap = tensor.shape[-2] > 1 and tensor.stride(-2) < tensor.shape[-1]
    if tensor.numel() > 0 and (tensor.stride(-1) != 1 or rows_overlap):
        raise ValueError(_about_strides(name, tensor))


def check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless TMA can address the rows of ``tensor``: they start on 16 bytes."""
    if tensor.numel() == 0:
        return
    size = tensor.element_size()
    outer = [s for s, length in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if length > 1]
    if any(s * size % 16 for s in outer):
        raise ValueError(_about_strides(name, tensor))
    check_address(name, tensor)


def check_address(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless ``tensor`` starts on a multiple of 16 bytes."""
    if tensor.data_ptr() % 16 != 0:
        raise ValueError(f"{name} is at address {tensor.data_ptr():#x}; it must be 16-byte aligned; clone() it")


def _about_strides(name: str, tensor: torch.Tensor) -> str:
    return (
        f"{name} has strides {tensor.stride()} elements; the last must be 1 and the others multiples of 16 bytes; "
        "call .contiguous()"
    )


def check_offs_values(offs: torch.Tensor, m: int) -> None:
    """Raises ValueError for end offsets that are no partition of rows [0, M). Waits for the device; traced ones pass."""
    ends = [] if is_traced(offs) else [0, *offs.tolist()]
    for g, (before, end) in enumerate(itertools.pairwise(ends)):
        if end < before or end > m:
            raise ValueError(
                f"offs[{g}] is {end}; offs must not be negative nor decrease (the entry before is {before}) "
                f"nor pass M = {m}; of sizes padless.group_offsets makes ends"
            )


def check_offs_aligned(offs: torch.Tensor, m_aligned: int, name: str = "offs") -> None:
    """Raises ValueError for an end offset that is no multiple of m_aligned. Waits for the device; traced ones pass."""
    for group, end in enumerate([] if is_traced(offs) else offs.tolist()):
        if end % m_aligned != 0:
            raise ValueError(f"{name}[{group}] is {end}, which is no multiple of m_aligned = {m_aligned}; use 1")
