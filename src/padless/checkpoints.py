"""Quantized weights of other people's checkpoints as BlockScaledTensors. Nothing is requantized: codes and
scales are taken as they are, and only their layout, their shape or the direction of a global scale changes.

    with Checkpoint("model/") as checkpoint:  # a folder, a .safetensors file or a dictionary of tensors
        down = checkpoint.experts("model.layers.3.mlp.experts.{}.down_proj", 64)  # (64, N, K)

What is recognised under a name, by the tensors that are there (all shapes are one weight's; a leading number
of experts is allowed everywhere):

DeepSeek            NAME.weight e4m3 (N, K), NAME.weight_scale_inv (ceil(N/128), ceil(K/128)); also NAME and
                    NAME_scale_inv. The scales, float32, bf16 or e8m0, multiply the codes in spite of the
                    name.
compressed-tensors  NAME.weight e4m3 (N, K), NAME.weight_scale (ceil(N/128), ceil(K/128)) float32, bf16 or fp16,
                    which multiplies: FP8 by blocks. Or
                    NAME.weight_packed uint8 (N, K/2), NAME.weight_scale e4m3 (N, K/16) and
                    NAME.weight_global_scale, which DIVIDES: the decode scale is its reciprocal. With uint8 or
                    e8m0 scales (N, K/32) and no global scale it is MXFP4.
ModelOpt, torch     NAME.weight uint8 or float4_e2m1fn_x2 (N, K/2), NAME.weight_scale e4m3, plain or in 32x4x4
                    tiles, and NAME.weight_scale_2, which multiplies, or none.
torchao             NAME._weight_qdata, NAME._weight_scale, NAME._weight_per_tensor_scale (multiplies), as
                    torchao flattens an NVFP4Tensor or an MXTensor into a safetensors file; also
                    PARENT._LEAF_qdata and so on for NAME = PARENT.LEAF.
GPT-OSS             NAME_blocks uint8 (.., N, K/32, 16), NAME_scales uint8 (.., N, K/32): MXFP4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from padless.arguments import check_readable, check_tensor_type, shown
from padless.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
    blocked_size,
    ceil_div,
)
from padless.layouts import _with_kernel_scales, from_blocked, plain_scale
from padless.row_groups import checked_equal, is_readable
from padless.runtime.weight_index import check_complete, index_of, indexed_files

_BLOCK_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

# --- one convention each ---------------------------------------------------------------------------------


def from_deepseek(weight: torch.Tensor, scale_inv: torch.Tensor) -> BlockScaledTensor:
    """FP8_BLOCK weights of e4m3 (.., N, K) and one decode scale per 128 x 128, float32, bf16 or e8m0."""
    _check_tensors(weight=weight, scale_inv=scale_inv)
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight must be float8_e4m3fn, got {shown(weight)}")
    if scale_inv.dtype not in _BLOCK_SCALES:
        allowed = "float32, bfloat16, float16 or float8_e8m0fnu"
        raise ValueError(f"scale_inv must be {allowed}, got {scale_inv.dtype} {tuple(scale_inv.shape)}")
    return BlockScaledTensor(weight.contiguous(), scale_inv.to(torch.float32).contiguous(), FP8_BLOCK)


def from_compressed_tensors(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None = None
) -> BlockScaledTensor:
    """NVFP4 or MXFP4 weights of `weight_packed`, `weight_scale` and `weight_global_scale`.

    The global scale is an encode scale, 2688 / amax; the decode scale kept is its float32 reciprocal. On a CPU its
    values are looked at: they must be positive and finite.
    """
    _check_tensors(packed=packed, scale=scale, global_scale=global_scale)
    if global_scale is None:
        return _fp4(packed, scale, None)
    if is_readable(global_scale) and not bool((global_scale.isfinite() & (global_scale > 0)).all()):
        raise ValueError(
            f"global_scale is {global_scale.flatten().tolist()[:4]}; an encode scale must be positive and finite"
        )
    return _fp4(packed, scale, 1.0 / global_scale.to(torch.float32))


def from_torch(data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None = None) -> BlockScaledTensor:
    """Weights as torch's scaled matrix products, ModelOpt and torchao keep them.

    data: FP4 as uint8 or float4_e2m1fn_x2 (.., N, K / 2), even elements in the low half of a byte, or float8
        (.., N, K).
    scale: e4m3 per 16 (NVFP4) or e8m0 per 32 (MXFP4, MXFP8, MXFP8_E5M2), plain or in 32x4x4 tiles, flat or 32 rows of
        16 bytes a tile; or, for e4m3 data, float32, bf16 or fp16 per 128 x 128 (FP8_BLOCK).
    global_scale: NVFP4's decode scale, one or one per weight.
    """
    _check_tensors(data=data, scale=scale, global_scale=global_scale)
    if data.dtype == torch.float8_e4m3fn and scale.is_floating_point() and scale.dtype.itemsize > 1:
        return _fp8_block(data, scale, global_scale)
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        fmt = MXFP8 if data.dtype == torch.float8_e4m3fn else MXFP8_E5M2
        return BlockScaledTensor(data.contiguous(), _plain(scale, data, fmt), fmt, global_scale)
    return _fp4(data, scale, global_scale, "data")


def from_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor) -> BlockScaledTensor:
    """MXFP4 weights of uint8 blocks (.., N, K / 32, 16) and uint8 scales (.., N, K / 32)."""
    _check_tensors(blocks=blocks, scales=scales)
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"scales must be uint8 (.., N, K / 32), got {shown(scales)}")
    if blocks.dtype != torch.uint8 or blocks.dim() < 3 or blocks.shape[-1] != 16:
        raise ValueError(f"blocks must be uint8 (.., N, K / 32, 16), got {blocks.dtype} {tuple(blocks.shape)}")
    return _fp4(blocks.flatten(-2), scales, None)


def _check_tensors(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError for what is no tensor that can be read; a global scale may be None."""
    for name, t in tensors.items():
        if t is not None or name != "global_scale":
            check_tensor_type(name, t)
        if name == "global_scale" and t is not None and (not t.is_floating_point() or t.numel() == 0):
            raise ValueError(f"global_scale must be float32, one or one for each weight, got {shown(t)}")
    check_readable(**tensors)


def _fp8_block(data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None) -> BlockScaledTensor:
    """e4m3 weights with scales of 16 or 32 bits, which are per block in the one case that is multiplied here."""
    wanted = FP8_BLOCK.scale_shape(tuple(data.shape), "weight") if data.dim() in (2, 3) else None
    if tuple(scale.shape) != wanted or global_scale is not None:
        raise ValueError(
            f"scale is {scale.dtype} {tuple(scale.shape)} beside e4m3 of shape {tuple(data.shape)}; allowed: one for "
            f"each 128 x 128, {wanted}, and no global_scale; a scale of a tensor or of a row is not supported"
        )
    return from_deepseek(data, scale)


def _fp4(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, name: str = "packed"
) -> BlockScaledTensor:
    if packed.dtype not in (torch.uint8, torch.float4_e2m1fn_x2) or packed.dim() not in (2, 3):
        raise ValueError(
            f"{name} must be uint8 or float4_e2m1fn_x2, (N, K / 2) or (G, N, K / 2), "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    if scale.dtype not in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8):
        raise ValueError(f"scale must be float8_e4m3fn, float8_e8m0fnu or uint8, got {scale.dtype}")
    fmt = NVFP4 if scale.dtype == torch.float8_e4m3fn else MXFP4
    if global_scale is not None:
        if fmt is MXFP4:
            raise ValueError("global_scale must be None beside power-of-two scales, which make it MXFP4")
        global_scale = global_scale.to(torch.float32).reshape(-1).contiguous()
        if packed.dim() == 2:
            if global_scale.numel() != 1:
                raise ValueError(f"global_scale must be one value for one weight, got {shown(global_scale)}")
            global_scale = global_scale.reshape(())
    data = packed.contiguous().view(torch.float4_e2m1fn_x2)
    return BlockScaledTensor(data, _plain(scale, data, fmt).view(fmt.scale_dtype), fmt, global_scale)


def _plain(scale: torch.Tensor, data: torch.Tensor, fmt: BlockScaledFormat) -> torch.Tensor:
    """Scales in their logical shape; tiles are told by their shape, (32 a tile row, 16 a tile column) or
    flat.
    """
    *batch, rows, stored = data.shape
    columns = ceil_div(stored * fmt.codes_per_byte, fmt.block_k)
    if tuple(scale.shape) == (*batch, rows, columns):
        return scale.contiguous()
    size = blocked_size(rows, columns)
    groups = batch[0] if batch else 1
    tall, wide = 32 * ceil_div(rows, 128), 16 * ceil_div(columns, 4)
    allowed = ((*batch, size), (*batch, tall, wide), (groups * size,))
    if tuple(scale.shape) not in allowed:
        raise ValueError(
            f"scale must have shape {(*batch, rows, columns)}, or be 32x4x4 tiles of shape {allowed[0]} or "
            f"{allowed[1]}, got {tuple(scale.shape)}"
        )
    tiles = scale.contiguous().view(groups, size)
    return from_blocked(tiles, rows, columns).view(*batch, rows, columns)


# --- weights put together --------------------------------------------------------------------------------


def stack_experts(weights: Sequence[BlockScaledTensor]) -> BlockScaledTensor:
    """Weights (N, K) of one format and shape as one (G, N, K); global scales become (G,).

    The scales get the layout that kernels read (`padless.layouts.of_weight_scales`).
    """
    first = _same_format(weights)
    for g, t in enumerate(weights):
        if t.data.dim() != 2 or t.shape != first.shape:
            raise ValueError(f"weights must all be {tuple(first.shape)}, weights[{g}] is {tuple(t.shape)}")
    shared = [t.global_scale.reshape(()) for t in weights if t.global_scale is not None]
    return _join(weights, torch.stack, torch.stack(shared) if shared else None)


def concatenate_rows(weights: Sequence[BlockScaledTensor]) -> BlockScaledTensor:
    """Weights (.., N_i, K) under each other, (.., sum N_i, K), such as a gate and an up projection.

    FP8_BLOCK parts other than the last need N % 128 == 0, so that no block holds rows of two. Parts of NVFP4
    must have the same global scales: scales that differ cannot be joined without requantizing. The scales get the layout
    that kernels read (`padless.layouts.of_weight_scales`).
    """
    first = _same_format(weights)
    shared = first.global_scale
    for i, t in enumerate(weights):
        if t.shape[:-2] != first.shape[:-2] or t.shape[-1] != first.shape[-1]:
            raise ValueError(f"weights must agree in K and in experts: {tuple(first.shape)}, {tuple(t.shape)}")
        if i + 1 < len(weights) and t.shape[-2] % t.format.weight_block[0] != 0:
            raise ValueError(
                f"weights[{i}] has N = {t.shape[-2]}; before another one it must be a multiple of "
                f"{t.format.weight_block[0]}"
            )
        if shared is not None:
            differs = f"weights[{i}] has another global_scale than weights[0]: keep them apart"
            shared = checked_equal(shared, cast("torch.Tensor", t.global_scale), differs)
    return _join(weights, partial(torch.cat, dim=-2), shared)


def _same_format(weights: Sequence[BlockScaledTensor]) -> BlockScaledTensor:
    check_readable(weights=weights)
    if not isinstance(weights, Sequence) or not all(isinstance(t, BlockScaledTensor) for t in weights):
        raise ValueError(f"weights must be a list of BlockScaledTensors, got {shown(weights)}")
    if not weights:
        raise ValueError("weights must not be empty")
    for i, t in enumerate(weights):
        if t.format != weights[0].format or t.scale_layout == "blocked_groups":
            raise ValueError(
                f"weights must be {weights[0].format.name} with scales of weights, "
                f"weights[{i}] is {t.format.name} with {t.scale_layout} ones"
            )
        if (t.global_scale is None) != (weights[0].global_scale is None):
            raise ValueError(f"weights must all have a global_scale or none, weights[{i}] differs")
    return weights[0]


def _join(
    weights: Sequence[BlockScaledTensor], how: Callable[..., torch.Tensor], global_scale: torch.Tensor | None
) -> BlockScaledTensor:
    fmt = weights[0].format
    data = how([t.data.view(torch.uint8) for t in weights]).view(fmt.data_dtype)
    scale = how([plain_scale(t).view(torch.uint8) for t in weights]).view(fmt.scale_dtype)
    return _with_kernel_scales(BlockScaledTensor(data, scale, fmt, global_scale))


# --- files -----------------------------------------------------------------------------------------------


class Checkpoint:
    """Tensors by name, in a .safetensors file, a folder of them or a mapping; read when asked for.

    A folder with a ``*.safetensors.index.json`` has the tensors that it lists, each in the file that it says; one
    without has those of all its .safetensors files, whose names must differ. `weight` and `experts` find out which of
    the conventions above holds for a name. Use it in a with statement.

    Raises ValueError for files that cannot be read, do not hold what the index says or are outside of the folder.
    """

    def __init__(self, source: str | Path | Mapping[str, torch.Tensor], device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        self._metadata: dict[str, str] = {}
        if isinstance(source, Mapping):
            for name, tensor in source.items():
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(f"source[{name!r}] must be a torch.Tensor, got {type(tensor).__name__}")
            self._where = dict(source)
            return
        try:
            self._open_all(Path(source))
        except BaseException:
            self._files.close()
            raise

    def _open_all(self, source: Path) -> None:
        """Opens the files of ``source`` and finds out which has which tensor."""
        index = None if source.is_file() else index_of(source)
        paths = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
        if index is not None:
            paths = indexed_files(source, index)
        if not paths:
            raise ValueError(f"source must be a .safetensors file or a folder of them, got {str(source)!r}")
        homes: dict[str, Path] = {}
        for path in paths:
            file = self._files.enter_context(_open(path, self._device))
            self._metadata.update(file.metadata() or {})
            for name in list(file.keys()):
                if index is not None and index.get(name) != path.name:
                    continue  # what the index does not have here is left over from something else
                if name in homes:
                    raise ValueError(
                        f"source has {name!r} in both {homes[name].name} and {path.name}, and no index.json that says "
                        "which; remove one"
                    )
                homes[name] = path
                self._where[name] = file
        if index is not None:
            check_complete(index, homes)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called name, as it is stored."""
        if name not in self._where:
            raise ValueError(f"name must be a tensor of the checkpoint, which has no {name!r}")
        found = self._where[name]
        return found.to(self._device) if isinstance(found, torch.Tensor) else found.get_tensor(name)

    def weight(self, name: str) -> BlockScaledTensor:
        """The quantized weight of module (or stacked parameter) `name`."""
        parent, _, leaf = name.rpartition(".")
        conventions: tuple[tuple[Callable[..., BlockScaledTensor], tuple[str, ...]], ...] = (
            (from_deepseek, (f"{name}.weight", f"{name}.weight_scale_inv")),
            (from_deepseek, (name, f"{name}_scale_inv")),
            (from_compressed_tensors, _keys(name, ".weight_packed", ".weight_scale", ".weight_global_scale?")),
            (from_gpt_oss, (f"{name}_blocks", f"{name}_scales")),
            (from_torch, _keys(f"{name}._weight", "_qdata", "_scale", "_per_tensor_scale?")),
            (from_torch, _keys(f"{parent}._{leaf}", "_qdata", "_scale", "_per_tensor_scale?")),
            (from_torch, _keys(name, ".weight", ".weight_scale", ".weight_scale_2?")),
        )
        for convert, keys in conventions:
            parts = self._find(keys)
            if parts is not None:
                self._check_torchao(name)
                return convert(*parts)
        near = [key for key in self._where if key.startswith(name)][:6]
        raise ValueError(f"name must be a quantized weight in a known convention; under {name!r} there is {near}")

    def experts(self, pattern: str, num_experts: int) -> BlockScaledTensor:
        """Weights pattern.format(0), .. pattern.format(num_experts - 1) as one (G, N, K)."""
        try:
            names = [pattern.format(g) for g in range(num_experts)]
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(f"pattern is {pattern!r}; it must have one {{}}, for the expert: {error}") from None
        return stack_experts([self.weight(name) for name in names])

    def _find(self, keys: Sequence[str]) -> list[torch.Tensor | None] | None:
        """The tensors of all keys, or None; one that ends in a question mark may be absent, then None."""
        needed = [key for key in keys if not key.endswith("?")]
        if not all(key in self._where for key in needed):
            return None
        names = [key.rstrip("?") for key in keys]
        return [self.tensor(name) if name in self._where else None for name in names]

    def _check_torchao(self, name: str) -> None:
        """torchao's metadata, where it is there, must say a kind of tensor that from_torch reads."""
        described = self._metadata.get(f"{name}.weight", self._metadata.get(name))
        if described is None:
            return
        try:
            content = json.loads(described)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ValueError(f"name is {name!r}, whose metadata must be a JSON object, got {described[:60]!r}")
        kind = content.get("_type")
        if kind not in ("NVFP4Tensor", "MXTensor", "Tensor"):
            raise ValueError(f"name must be an NVFP4Tensor or MXTensor of torchao, {name!r} is a {kind}")


def _keys(stem: str, *endings: str) -> tuple[str, ...]:
    return tuple(stem + ending for ending in endings)


def _open(path: Path, device: torch.device) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading checkpoints needs safetensors: pip install safetensors") from error
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"source has {path.name}, which is no whole .safetensors file: {error}") from None
