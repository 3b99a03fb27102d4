"""A grouped linear layer whose weights are frozen codes, with low-rank adapters that train: `LoraGroupedLinear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from padless.arguments import check_tensor_type
from padless.formats import BlockScaledFormat, BlockScaledTensor
from padless.nn.lora.base import AdaptedModule, check_activations, check_weights, format_of_rows, rows_as_multiplied
from padless.nn.lora.frozen import adapted_product
from padless.ops.checks import describe
from padless.quantization.rows_columns import checked_offs


class LoraGroupedLinear(AdaptedModule):
    """y[rows of g] = W[g] x + bias[g] + scaling * B[g] (A[g] x), one projection of `LoraExperts` for rows by group.

    weight: (G, N, K) FP8_BLOCK, MXFP8, MXFP4 or NVFP4 codes of kind "weight"; constants, in no state dict.
    bias: (G, N) or None; trained where it is an nn.Parameter.
    activations: format of the rows, or torch.bfloat16; None for the one that `padless.moe.moe` takes with the weights.
    rank, alpha, rslora, dropout, adapters, dtype: as for `LoraExperts`.

    Parameters, by an adapter's name: ``a[name]`` (G, r, K) and ``b[name]`` (G, N, r). ``active``: the adapter of all
    rows, None for none; it may be assigned. Raises ValueError.
    """

    _codes = ("weight",)
    bias: torch.Tensor | None

    def __init__(
        self,
        weight: BlockScaledTensor,
        *,
        bias: torch.Tensor | None = None,
        activations: BlockScaledFormat | torch.dtype | None = None,
        rank: int = 16,
        alpha: float = 32.0,
        rslora: bool = False,
        dropout: float = 0.0,
        adapters: Sequence[str] = ("default",),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(rank, alpha, rslora, dropout, adapters, dtype)
        check_weights("weight", weight)
        check_activations(activations)
        self.weight, self.activations = weight, activations
        self.num_groups, self.out_features, self.in_features = weight.logical_shape
        self._add_bias("bias", bias, (self.num_groups, self.out_features))
        self.a, self.b = self._factors(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every A uniformly from +- 1 / sqrt(K) and sets every B to zero."""
        self._reset(self.a, self.b)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """(M, N) bfloat16 of x (M, K), bfloat16, float16 or float32, and offs (G,) int32, ends of the groups' rows.

        Rows from offs[-1] on hold anything, and have zeros in the gradient of x. Without an adapter it has the bits of
        `padless.grouped_gemm` of the quantized rows. Differentiable, once, for x, the active adapter and a bias that is
        a parameter. No synchronization. Raises ValueError.
        """
        self._check_active()
        check_tensor_type("x", x)
        if x.dim() != 2 or x.shape[1] != self.in_features or x.device != self.weight.device:
            raise ValueError(f"x must be (M, {self.in_features}) on {self.weight.device}, got {describe(x)}")
        offs = checked_offs(offs, x, "x")
        if offs.shape[0] != self.num_groups:
            raise ValueError(f"offs has {offs.shape[0]} groups and weight {self.num_groups}; they must be as many")
        format, scale = format_of_rows(self.activations, self.weight)
        names = self._active_names()
        low = self._low_rank(self._of_names(self.a, self.b, names, False), offs) if names else None
        return adapted_product(
            x, rows_as_multiplied(x, format, scale), self.weight, self.bias, offs, low, zero_tail=True
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_groups}, {self.in_features}, {self.out_features}, {self.weight.format.name}"
        return f"{sizes}, rank={self.rank}, scaling={self.scaling}, adapters={self.adapters}"
