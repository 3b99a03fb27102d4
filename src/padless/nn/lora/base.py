"""Settings and factors that modules with adapters share: `AdaptedModule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from padless.arguments import check_flag, check_integer, check_number, check_tensor_type, is_one_of, shown
from padless.formats import FORMAT_NAMES, MXFP4_REPACKED, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.moe.layer import ACTIVATIONS
from padless.nn.lora.low_rank import Factors, LowRank
from padless.ops.checks import describe
from padless.quantization.quantize import quantize

MAX_RANK = 256
_DTYPES = (torch.bfloat16, torch.float32)


def scaling_of(rank: int, alpha: float, rslora: bool) -> float:
    """The factor that B A is multiplied by."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def check_activations(activations: object) -> None:
    """Raises ValueError for what names no format of rows."""
    named = isinstance(activations, BlockScaledFormat) and activations.name in FORMAT_NAMES
    if activations is not None and activations is not torch.bfloat16 and not named:
        allowed = ", ".join(FORMAT_NAMES)
        raise ValueError(f"activations is {shown(activations)}; allowed: None, torch.bfloat16, {allowed}")


def _can_name(adapter: object) -> bool:
    """Whether torch can keep parameters under this name."""
    return isinstance(adapter, str) and adapter != "" and "." not in adapter and not hasattr(nn.ParameterDict, adapter)


def format_of_rows(
    activations: BlockScaledFormat | torch.dtype | None, weights: BlockScaledTensor
) -> tuple[BlockScaledFormat | None, torch.Tensor | None]:
    """The format of quantized rows, None for bfloat16, and NVFP4's global scale of them, 1."""
    check_activations(activations)
    format = activations if isinstance(activations, BlockScaledFormat) else None
    if activations is None:
        format = ACTIVATIONS[weights.format]
    return format, torch.ones((), dtype=torch.float32, device=weights.device) if format == NVFP4 else None


def rows_as_multiplied(
    rows: torch.Tensor, format: BlockScaledFormat | None, scale: torch.Tensor | None
) -> BlockScaledTensor | torch.Tensor:
    """Rows in bfloat16, or quantized, with what `format_of_rows` says; outside of autograd."""
    if format is None:
        return rows.detach().to(torch.bfloat16)
    return quantize(rows.detach(), format, global_scale=scale)


def check_weights(name: str, w: BlockScaledTensor) -> None:
    """Raises ValueError for what is no (E, N, K) codes of weights."""
    if not isinstance(w, BlockScaledTensor) or w.data.dim() != 3 or not w.is_weight:
        raise ValueError(f"{name} must be a (E, N, K) BlockScaledTensor of kind 'weight', got {describe(w)}")
    if w.format == MXFP4_REPACKED:
        raise ValueError(
            f"{name} is {w.format.name}, whose gradients no kernel computes: padless.layouts.from_repacked"
        )


class AdaptedModule(nn.Module):
    """The settings of `padless.nn.LoraExperts`, checked, with ``active`` the first adapter."""

    _codes: ClassVar[tuple[str, ...]]  # attributes that hold frozen weights

    def __init__(
        self, rank: int, alpha: float, rslora: bool, dropout: float, adapters: Sequence[str], dtype: torch.dtype
    ) -> None:
        super().__init__()
        check_integer("rank", rank, 1, MAX_RANK)
        check_flag("rslora", rslora)
        if not is_one_of(dtype, _DTYPES):
            raise ValueError(f"dtype is {shown(dtype)}; allowed: torch.bfloat16, torch.float32")
        check_number("alpha", alpha)
        check_number("dropout", dropout)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be from 0 to below 1")
        names = tuple(adapters) if isinstance(adapters, Sequence) and not isinstance(adapters, str) else ()
        if not names or len(set(names)) != len(names) or not all(map(_can_name, names)):
            allowed = "a sequence of different names, without a dot and none of torch.nn.ParameterDict's attributes"
            raise ValueError(f"adapters is {shown(adapters)}; it must be {allowed}")
        self.rank, self.dropout, self.adapters = rank, dropout, names
        self.alpha, self.rslora, self._dtype = alpha, rslora, dtype
        self.scaling = scaling_of(rank, alpha, rslora)
        self.active: str | None = names[0]

    def _add_bias(self, name: str, bias: torch.Tensor | None, shape: tuple[int, int]) -> None:
        """A parameter stays one; another tensor becomes a buffer that is in no state dict."""
        if bias is not None:
            check_tensor_type(name, bias)
            if tuple(bias.shape) != shape or not bias.is_floating_point():
                raise ValueError(f"{name} must be {shape} of floating point, got {describe(bias)}")
        if isinstance(bias, nn.Parameter) or bias is None:
            self.register_parameter(name, bias)
        else:
            self.register_buffer(name, bias, persistent=False)

    def _factors(self, weights: BlockScaledTensor) -> tuple[nn.ParameterDict, nn.ParameterDict]:
        """A (E, r, K) and B (E, N, r) of every adapter of these weights, without values."""
        experts, n, k = weights.logical_shape

        def made(*shape: int) -> nn.ParameterDict:
            return nn.ParameterDict(
                {
                    name: nn.Parameter(torch.empty(shape, dtype=self._dtype, device=weights.device))
                    for name in self.adapters
                }
            )

        return made(experts, self.rank, k), made(experts, n, self.rank)

    def _reset(self, a: nn.ParameterDict, b: nn.ParameterDict) -> None:
        """Draws every A uniformly from +- 1 / sqrt(K) and sets every B to zero."""
        for name in self.adapters:
            bound = 1 / math.sqrt(a[name].shape[2])
            nn.init.uniform_(a[name], -bound, bound)
            nn.init.zeros_(b[name])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Moves the codes along with the parameters; their types stay."""
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        if device.type != "meta":
            for name in self._codes:
                setattr(self, name, getattr(self, name).to(device))
        return self

    def _check_active(self) -> None:
        if self.active is not None and self.active not in self.adapters:
            raise ValueError(f"active is {shown(self.active)}; it must be None or one of {self.adapters}")

    def _active_names(self) -> tuple[str, ...]:
        return () if self.active is None else (self.active,)

    def _low_rank(self, factors: Factors, groups: torch.Tensor) -> LowRank:
        """The sum that factors add to rows whose groups (expert, adapter) end at `groups`."""
        return LowRank(factors, groups, self.dropout if self.training else 0.0)

    def _of_names(
        self,
        a: Mapping[str, torch.Tensor] | nn.ParameterDict,
        b: Mapping[str, torch.Tensor] | nn.ParameterDict,
        names: tuple[str, ...],
        with_none: bool,
    ) -> Factors:
        """The factors of adapters of these names; with_none: an expert has a group without an adapter too."""
        down, up = (tuple(p[name] for name in names) for p in (a, b))
        # Times 1: with dynamic=True Dynamo cannot take a module's own float into two functions of autograd.
        return Factors(down, up, len(names) + with_none, self.scaling * 1.0)
