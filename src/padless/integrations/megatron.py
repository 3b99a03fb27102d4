"""Experts of Megatron-Core trained in block-scaled FP8: `PadlessExperts`, for the experts of its `MoELayer`.

    submodules = MoESubmodules(experts=experts_spec(recipe="fp8"), ..)  # Megatron-Core 0.16 and newer

Rows arrive permuted by expert from any of Megatron's dispatchers, with counts on the host or on the device, and go to
`padless.nn.experts_of_rows`. docs/frameworks.md describes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

try:
    import megatron.core as _megatron_core  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("megatron", "megatron.core"):
        raise
    raise ImportError(
        "padless.integrations.megatron needs Megatron-Core 0.16 or newer: pip install 'padless[megatron]'"
    ) from error

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec

from padless.nn.recipe import Recipe, as_recipe
from padless.nn.rows_function import experts_of_rows
from padless.nn.weight_gradient import DelayedWgrad

__all__ = ["PadlessExperts", "experts_spec"]


def experts_spec(recipe: Recipe | str = "fp8") -> Any:
    """`PadlessExperts` of a recipe as `MoESubmodules` takes it: a ModuleSpec, or where Megatron calls it, a builder."""
    as_recipe(recipe)
    if hasattr(moe_layer, "ExpertsBuilder"):
        return partial(PadlessExperts, recipe=recipe)
    return ModuleSpec(module=PadlessExperts, params={"recipe": recipe})


class PadlessExperts(nn.Module):
    """The experts of a rank: ``w13`` (E, 2 I, H), gate above up as Megatron has them, and ``w2`` (E, H, I).

    num_local_experts, config, pg_collection, name: as Megatron's `MoELayer` gives them. Expert tensor parallelism is 1,
        experts are SwiGLU without biases, and ``config.fp8`` and what pads tokens for it are off: rows are not padded.
    recipe: a `padless.nn.Recipe` or the name of one.

    ``main_grad`` is added to in the product's launch. With ``config.delay_wgrad_compute`` weight gradients wait for
    `backward_dw`. Raises ValueError for a configuration that it does not compute.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        *,
        pg_collection: Any = None,
        name: str | None = None,
        recipe: Recipe | str = "fp8",
    ) -> None:
        super().__init__()
        _check(config, pg_collection)
        self.config, self.num_local_experts, self.recipe = config, num_local_experts, as_recipe(recipe)
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        self.delayed_wgrad = DelayedWgrad() if config.delay_wgrad_compute else None
        self._hooks: list[Any] = []
        h, i = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for weight, shape, draw in (
            ("w13", (num_local_experts, 2 * i, h), config.init_method),
            ("w2", (num_local_experts, h, i), config.output_layer_init_method),
        ):
            made = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            if config.perform_initialization:
                _draw(made, draw, config.use_cpu_initialization)
            made.allreduce = self.ep_group.size() == 1  # type: ignore[attr-defined]
            if self.delayed_wgrad is not None:
                made.skip_backward_post_hook = True  # type: ignore[attr-defined]
            self.register_parameter(weight, made)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """(out (R, H), None) of rows (R, H) sorted by expert, their counts (E,) on any device, and probabilities (R,).

        Rows behind the last expert's, as a dispatcher with a static capacity has them, are in nothing.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        offs = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0).to(torch.int32)
        weights: torch.Tensor | None = probs.reshape(-1)
        if self.config.moe_apply_probs_on_input:
            x, weights = (probs.reshape(-1, 1) * x).to(x.dtype), None
        out = experts_of_rows(x, offs, self.w13, self.w2, weights, self.recipe, delayed_wgrad=self.delayed_wgrad)
        return out, None

    def backward_dw(self, *_: Any, **__: Any) -> None:
        """Computes the weight gradients that backward passes left, and calls data parallelism's hooks."""
        if self.delayed_wgrad is None:
            return
        self.delayed_wgrad.flush()
        for weight in (self.w13, self.w2):
            if getattr(weight, "grad_added_to_main_grad", False) and weight.grad is None:
                weight.grad = torch.empty_like(weight)  # the hooks ask that there is one, and do not read it
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Keeps a hook of Megatron's data parallelism for the end of `backward_dw`."""
        self._hooks.append(hook)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Tensors by the names and in the parts that Megatron's own experts have, so that checkpoints interchange."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError("metadata has singleton_local_shards; padless' experts are saved in one tensor a product")
        first, experts = self.ep_group.rank() * self.num_local_experts, self.ep_group.size() * self.num_local_experts
        replica = (0, 0, self.dp_group.rank())

        def factory(name: str, weight: torch.Tensor, parts: int) -> ShardedTensorFactory:
            def split(key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> list[ShardedTensor]:
                return [
                    ShardedTensor.from_rank_offsets(
                        key, part, *sharded_offsets, (len(sharded_offsets), first + e, experts),
                        (len(sharded_offsets) + 1, p, parts), replica_id=replica_id,
                        prepend_axis_num=len(sharded_offsets) + 1,
                    )
                    for e in range(self.num_local_experts)
                    for p, part in enumerate(t[e].chunk(parts))
                ]  # fmt: skip

            def join(found: list[torch.Tensor]) -> torch.Tensor:
                return torch.cat(found).view(weight.shape)

            key = f"{prefix}experts.{name}.weight"
            return ShardedTensorFactory(key, weight, split, join, replica_id=replica)

        return {f"{prefix}w13": factory("linear_fc1", self.w13, 2), f"{prefix}w2": factory("linear_fc2", self.w2, 1)}

    w13: nn.Parameter
    w2: nn.Parameter


def _draw(weight: torch.Tensor, draw: Any, on_cpu: bool) -> None:
    """Draws each expert's matrix by itself, on a GPU from the generator of this rank's experts."""
    with torch.no_grad():
        if on_cpu:
            for matrix in weight:
                draw(matrix)
            return
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for matrix in weight:
                draw(matrix)


def _check(config: Any, pg_collection: Any) -> None:
    """Raises ValueError for experts that padless does not compute."""
    silu = getattr(config.activation_func, "__name__", "") in ("silu", "swish")
    refused = {
        "expert tensor parallelism is not 1": pg_collection is None or pg_collection.expt_tp.size() != 1,
        "add_bias_linear is set": config.add_bias_linear,
        "experts are not SwiGLU": not (config.gated_linear_unit and silu),
        "activation_func_clamp_value is set": getattr(config, "activation_func_clamp_value", None) is not None,
        "glu_linear_offset is set": getattr(config, "glu_linear_offset", 0.0) != 0.0,
        "moe_latent_size is set": getattr(config, "moe_latent_size", None) is not None,
        "overlap_dispatch_backward_with_experts_wgrad is set": getattr(
            config, "overlap_dispatch_backward_with_experts_wgrad", False
        ),
        "fp8 or fp4 is set, with which Megatron pads rows": bool(config.fp8 or getattr(config, "fp4", None)),
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"{reason}; padless.integrations.megatron computes SwiGLU experts without biases, whole")
