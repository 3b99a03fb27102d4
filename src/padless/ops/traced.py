"""Products as torch.library operators `padless::*_`: what a call becomes while it is compiled or exported.

A traced call checks types, shapes and strides, makes its outputs, and ends in an operator that writes into them. When
the program runs, the operator makes the whole call: all checks, those of addresses and values too, and the launch.
One-byte types are bytes in the schemas, as torch copies and compares no others; configurations and epilogues are text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import torch

import padless
from padless.epilogue import Epilogue, EpilogueTensors, GateRule
from padless.formats import FORMAT_BY_NAME, BlockScaledFormat, BlockScaledTensor
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.kernels.table import PLAIN_ROUTES, ROUTES
from padless.row_groups import GroupedColumns
from padless.runtime.choices import BackendName
from padless.runtime.operators import register_operator


def _operator(schema: str, run: Callable[..., None]) -> Callable[..., None]:
    """An operator without a result: its fake does nothing."""
    made: Callable[..., None] = register_operator(f"{schema} -> ()", run, lambda *arguments: None)
    return made


# --- arguments of operators --------------------------------------------------------------------------------


def _carried(t: torch.Tensor | None) -> Any:
    return t.view(torch.uint8) if t is not None and t.element_size() == 1 else t


def _parts(t: BlockScaledTensor | torch.Tensor) -> tuple[list[torch.Tensor | None], list[str]]:
    """The tensors of an operand, and its format and layout; of a plain tensor itself."""
    if isinstance(t, torch.Tensor):
        return [t], []
    return [_carried(t.data), _carried(t.scale), t.global_scale, t.offs], [t.format.name, t.scale_layout]


def _joined(parts: Sequence[Any], kind: Sequence[str]) -> Any:
    """The operand that `_parts` took apart."""
    if not kind:
        return parts[0]
    format, (data, scale, global_scale, offs) = FORMAT_BY_NAME[kind[0]], parts
    data, scale = data.view(format.data_dtype), scale.view(format.scale_dtype)
    return BlockScaledTensor(data, scale, format, global_scale, kind[1], offs)


def _columns_parts(t: GroupedColumns) -> tuple[list[torch.Tensor], list[int]]:
    return [_carried(t.data), t.scale, t.offs, t.starts, t.block_starts], [*t.block, t.alignment]


def _columns(parts: Sequence[torch.Tensor], block: Sequence[int]) -> GroupedColumns:
    data, scale, offs, starts, block_starts = parts
    codes = data.view(torch.float8_e4m3fn)
    return GroupedColumns(codes, scale, offs, starts, block_starts, (block[0], block[1]), block[2])


def text_of(settings: Any) -> str | None:
    """A configuration, the class of one or an epilogue as text: "Name", or "Name(field=value, ..)"; None of None."""
    if settings is None or isinstance(settings, type):
        return None if settings is None else settings.__name__
    given = [f"{field.name}={_word(getattr(settings, field.name))}" for field in fields(settings)]
    return f"{type(settings).__name__}({', '.join(given)})"


def _word(value: Any) -> str:
    if isinstance(value, BlockScaledFormat):
        return value.name
    if isinstance(value, GateRule):
        return str(text_of(value))
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def from_text(text: str | None) -> Any:
    """The value of a text of ``text_of``."""
    if text is None:
        return None
    classes: list[Any] = [route.config_class for route in (*ROUTES, *PLAIN_ROUTES)]
    classes += [WgradConfig, Bf16WgradConfig, Epilogue, GateRule]
    by_name = {found.__name__: found for found in classes}
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.Call):
        return by_name[text]
    return by_name[ast.unparse(tree.func)](**{str(given.arg): _value(given.value) for given in tree.keywords})


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(torch, node.attr)
    if isinstance(node, ast.Call):
        return from_text(ast.unparse(node))
    return FORMAT_BY_NAME[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)


# --- products ----------------------------------------------------------------------------------------------

_OPERANDS = "Tensor?[] a, str[] a_kind, Tensor?[] b, str[] b_kind"


def product(
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor | torch.Tensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    backend: BackendName | None,
    check_offs: bool,
    config: Any,
) -> torch.Tensor:
    """`padless.grouped_gemm` into ``out`` when the program runs; `padless.gemm` where offs is None. ``out``."""
    _grouped_gemm(out, *_parts(a), *_parts(b), offs, backend, check_offs, text_of(config))
    return out


def _run_product(
    out: torch.Tensor, a: Any, a_kind: Any, b: Any, b_kind: Any, offs: torch.Tensor | None, backend: BackendName | None,
    check_offs: bool, config: str | None,
) -> None:  # fmt: skip
    operands, how = (_joined(a, a_kind), _joined(b, b_kind)), {"backend": backend, "config": from_text(config)}
    if offs is None:
        padless.gemm(*operands, out=out, **how)
    else:
        padless.grouped_gemm(*operands, offs, out=out, check_offs=check_offs, **how)


_grouped_gemm = _operator(
    f"grouped_gemm_(Tensor(a!) out, {_OPERANDS}, Tensor? offs, str? backend, bool check_offs, str? config)",
    _run_product,
)


def products(
    a: Sequence[BlockScaledTensor],
    b: Sequence[BlockScaledTensor],
    out: list[torch.Tensor],
    alpha: torch.Tensor | None,
    backend: BackendName | None,
    config: Any,
) -> list[torch.Tensor]:
    """`padless.grouped_gemm_list` into ``out`` when the program runs; ``out``."""
    parts = [[_parts(t) for t in operands] for operands in (a, b)]
    lists = [list(chain.from_iterable(found for found, _ in of)) for of in parts]
    kinds = [list(chain.from_iterable(kind for _, kind in of)) for of in parts]
    _grouped_gemm_list(out, lists[0], kinds[0], lists[1], kinds[1], alpha, backend, text_of(config))
    return out


def _run_products(
    out: list[torch.Tensor], a: Any, a_kind: Any, b: Any, b_kind: Any, alpha: torch.Tensor | None,
    backend: BackendName | None, config: str | None,
) -> None:  # fmt: skip
    operands = [
        [_joined(parts[4 * i : 4 * i + 4], kind[2 * i : 2 * i + 2]) for i in range(len(out))]
        for parts, kind in ((a, a_kind), (b, b_kind))
    ]
    padless.grouped_gemm_list(*operands, out=out, alpha=alpha, backend=backend, config=from_text(config))


_grouped_gemm_list = _operator(
    f"grouped_gemm_list_(Tensor(a!)[] out, {_OPERANDS}, Tensor? alpha, str? backend, str? config)", _run_products
)


# --- products with an epilogue -----------------------------------------------------------------------------

_NUMBERS = ("alpha", "bias", "prob", "norm_const", "global_scale")
_OUTPUTS = ("d", "amax", "row_codes", "row_scale", "column_codes", "column_scale")


def product_with_epilogue(
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    backend: BackendName | None,
    config: Any,
    m_aligned: int,
    check_offs: bool,
) -> None:
    """`padless.grouped_gemm_epilogue` into ``tensors``, which has every output, when the program runs."""
    outputs = [name for name in _OUTPUTS if getattr(tensors, name) is not None]
    _grouped_gemm_epilogue(
        [_carried(getattr(tensors, name)) for name in outputs], outputs, *_parts(a), *_parts(b), offs,
        [getattr(tensors, name) for name in _NUMBERS], tensors.column_tiles, text_of(epilogue), m_aligned, backend,
        text_of(config), check_offs,
    )  # fmt: skip


def _run_epilogue(
    out: list[torch.Tensor], names: list[str], a: Any, a_kind: Any, b: Any, b_kind: Any, offs: torch.Tensor,
    numbers: list[torch.Tensor | None], column_tiles: int, epilogue: str, m_aligned: int, backend: BackendName | None,
    config: str | None, check_offs: bool,
) -> None:  # fmt: skip
    made = from_text(epilogue)
    format = made.format
    outputs = dict(zip(names, out, strict=True))
    for name, t in outputs.items():
        if name.endswith("_codes"):
            outputs[name] = t.view(format.data_dtype)
        elif name.endswith("_scale"):
            outputs[name] = t.view(format.scale_dtype)
    given = dict(zip(_NUMBERS, numbers, strict=True))
    tensors = EpilogueTensors(**given, **outputs, column_tiles=column_tiles)
    how: dict[str, Any] = {"m_aligned": m_aligned, "backend": backend, "check_offs": check_offs}
    operands = _joined(a, a_kind), _joined(b, b_kind), offs
    padless.grouped_gemm_epilogue(*operands, made, tensors, config=from_text(config), **how)


_grouped_gemm_epilogue = _operator(
    f"grouped_gemm_epilogue_(Tensor(a!)[] out, str[] names, {_OPERANDS}, Tensor offs, Tensor?[] numbers, "
    "int column_tiles, str epilogue, int m_aligned, str? backend, str? config, bool check_offs)",
    _run_epilogue,
)


# --- weight gradients --------------------------------------------------------------------------------------


def wgrad_of_columns(
    dy: GroupedColumns, x: GroupedColumns, out: torch.Tensor, accumulate: bool, backend: BackendName | None, config: Any
) -> torch.Tensor:
    """`padless.grouped_gemm_wgrad` of copies into ``out`` when the program runs; ``out``."""
    _wgrad_of_columns(out, *_columns_parts(dy), *_columns_parts(x), accumulate, backend, text_of(config))
    return out


def _run_columns(
    out: torch.Tensor, dy: Any, dy_block: Any, x: Any, x_block: Any, accumulate: bool, backend: BackendName | None,
    config: str | None,
) -> None:  # fmt: skip
    how = {"accumulate": accumulate, "backend": backend, "config": from_text(config)}
    padless.grouped_gemm_wgrad(_columns(dy, dy_block), _columns(x, x_block), out=out, **how)


_wgrad_of_columns = _operator(
    "grouped_gemm_wgrad_of_columns_(Tensor(a!) out, Tensor[] dy, int[] dy_block, Tensor[] x, int[] x_block, "
    "bool accumulate, str? backend, str? config)",
    _run_columns,
)


def wgrad_of_rows(
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
    backend: BackendName | None,
    config: Any,
) -> torch.Tensor:
    """`padless.grouped_gemm_wgrad` of rows into ``out`` when the program runs; ``out``."""
    _wgrad_of_rows(out, dy, x, offs, accumulate, backend, text_of(config))
    return out


def _run_rows(
    out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, accumulate: bool,
    backend: BackendName | None, config: str | None,
) -> None:  # fmt: skip
    how = {"accumulate": accumulate, "backend": backend, "config": from_text(config)}
    padless.grouped_gemm_wgrad(dy, x, offs=offs, out=out, **how)


_wgrad_of_rows = _operator(
    "grouped_gemm_wgrad_of_rows_(Tensor(a!) out, Tensor dy, Tensor x, Tensor offs, bool accumulate, str? backend, "
    "str? config)",
    _run_rows,
)
