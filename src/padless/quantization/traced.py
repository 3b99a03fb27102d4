"""`padless.quantize` as a torch.library operator: what a call becomes while it is compiled or exported."""

from __future__ import annotations

from typing import Any

import torch

import padless
from padless import layouts
from padless.formats import FORMAT_BY_NAME, NVFP4, BlockScaledFormat, BlockScaledTensor, blocked_size
from padless.runtime.operators import register_operator


def float32_scale(global_scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """A global scale that was given, float32 on ``device``; of a number without a copy from the host."""
    if isinstance(global_scale, torch.Tensor):
        if global_scale.is_meta and device.type != "meta":
            raise ValueError(f"global_scale is on meta and x on {device}; they must be on one device")
        return global_scale.detach().to(dtype=torch.float32, device=device)
    return torch.full((), global_scale * 1.0, dtype=torch.float32, device=device)


def quantized(
    x: torch.Tensor,
    format: BlockScaledFormat,
    kind: str,
    scale_major: str,
    scale_rule: str,
    scale_layout: str,
    global_scale: torch.Tensor | float | None,
    offs: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> BlockScaledTensor:
    """The result of a call whose arguments were checked; its codes and scales exist when the program runs."""
    given = None if global_scale is None else float32_scale(global_scale, x.device)
    data, scale, found = _operator(x, format.name, kind, scale_major, scale_rule, scale_layout, given, offs, rows)
    if format == NVFP4 and given is None:
        given = found
    data, scale = data.view(format.data_dtype), scale.view(format.scale_dtype)
    return BlockScaledTensor(data, scale, format, given, scale_layout, offs)


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _run(
    x: torch.Tensor, format: str, kind: str, scale_major: str, scale_rule: str, scale_layout: str,
    global_scale: torch.Tensor | None, offs: torch.Tensor | None, rows: torch.Tensor | None,
) -> _Tensors:  # fmt: skip
    quantize: Any = padless.quantize  # strings are of types that a schema has not
    t = quantize(
        x, FORMAT_BY_NAME[format], kind=kind, scale_major=scale_major, scale_rule=scale_rule or None,
        scale_layout=scale_layout, global_scale=global_scale, offs=offs, rows=rows,
    )  # fmt: skip
    scale = t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
    found = t.global_scale if global_scale is None else None
    return t.data.view(torch.uint8), scale, x.new_empty(0, dtype=torch.float32) if found is None else found


def _fake(
    x: torch.Tensor, format: str, kind: str, scale_major: str, scale_rule: str, scale_layout: str,
    global_scale: torch.Tensor | None, offs: torch.Tensor | None, rows: torch.Tensor | None,
) -> _Tensors:  # fmt: skip
    fmt, shape = FORMAT_BY_NAME[format], x.shape if rows is None else (rows.shape[0], x.shape[1])
    data = x.new_empty((*shape[:-1], shape[-1] // fmt.codes_per_byte), dtype=torch.uint8)
    blocks = fmt.scale_shape(tuple(shape), kind)
    if fmt.scale_dtype == torch.float32:
        is_mn = kind == "activation" and scale_major == "mn"
        scale = x.new_empty(blocks, dtype=torch.float32)
        if is_mn:
            scale = layouts.empty_mn_major(blocks[0], blocks[1], x.device)
    else:
        if scale_layout == "blocked":
            blocks = (*blocks[:-2], blocked_size(blocks[-2], blocks[-1]))
        elif scale_layout == "blocked_groups":
            assert offs is not None
            blocks = (blocked_size(layouts.blocked_groups_rows(blocks[0], offs.shape[0]), blocks[1]),)
        scale = x.new_empty(blocks, dtype=torch.uint8)
    groups = (x.shape[0],) if x.dim() == 3 else () if offs is None else (offs.shape[0],)
    is_found = fmt == NVFP4 and global_scale is None
    return data, scale, x.new_empty(groups if is_found else 0, dtype=torch.float32)


_operator = register_operator(
    "quantize(Tensor x, str format, str kind, str scale_major, str scale_rule, str scale_layout, Tensor? global_scale, "
    "Tensor? offs, Tensor? rows) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
