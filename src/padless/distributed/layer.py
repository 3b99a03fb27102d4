"""A Mixture-of-Experts layer over ranks: dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from padless.distributed.expert_parallel import ExpertParallel
from padless.formats import BlockScaledFormat, BlockScaledTensor
from padless.moe.activation import Activation
from padless.moe.layer import Projection

Rows = BlockScaledTensor | torch.Tensor
ExpertsFunction = Callable[[Rows, torch.Tensor], torch.Tensor]


def expert_parallel_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    ep: ExpertParallel,
    *,
    experts_fn: ExpertsFunction | None = None,
    w13: BlockScaledTensor | None = None,
    w2: BlockScaledTensor | None = None,
    activation: Activation | None = None,
    global_scale1: torch.Tensor | None = None,
    global_scale2: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * expert(ids[t, j], x[t]), the experts being spread over ranks; (T, H).

    Args:
        x: (T, H) this rank's tokens, as `ExpertParallel.dispatch` takes them; T up to max_tokens.
        ids: (T, k) experts.
        weights: (T, k) router weights.
        ep: the exchange.
        experts_fn: (rows, offs) -> (C, H) in bfloat16 (float32 where ep's format is): this rank's experts, rows of
            group g by its expert ep.local_experts[g]. With it the layer is differentiable where ep's format is bfloat16
            or float32 and the function is.
        w13: instead of it, with w2, this rank's (Eloc, 2 I, H) weights, for inference: the products and the activation
            of `padless.moe.moe`, rows of ep's format.
        w2: (Eloc, H, I).
        activation: of the layer with w13 and w2; None is SwiGLU, gate above up.
        global_scale1: NVFP4's decode scale of x, one float32 value.
        global_scale2: the same for the activated rows.
        backend: of the products, as in `padless.grouped_gemm`.

    Rows are weighted when they are summed, see `ExpertParallel.combine`. A collective call. Raises ValueError.
    """
    if (experts_fn is None) == (w13 is None or w2 is None):
        raise ValueError("experts_fn or both w13 and w2 must be given, and not both; give one of them")
    if experts_fn is not None:
        rows, plan = ep.dispatch(x, ids, weights, global_scale=global_scale1)
        return ep.combine(experts_fn(rows, plan.offs), plan, weighted=True)
    assert w13 is not None
    assert w2 is not None
    for name, w in (("w13", w13), ("w2", w2)):
        if w.data.dim() != 3 or w.data.shape[0] != len(ep.local_experts):
            raise ValueError(
                f"{name} must be (Eloc, N, K) weights of this rank's {len(ep.local_experts)} experts, got shape "
                f"{tuple(w.data.shape)}"
            )
    rows, plan = ep.dispatch(x, ids, weights, global_scale=global_scale1)
    fmt = ep.settings.row_format.format
    hidden_format = fmt if isinstance(fmt, BlockScaledFormat) else None
    first, second = Projection(w13, None, backend), Projection(w2, None, backend)
    hidden = first.activated(rows, plan.offs, activation or Activation(), hidden_format, global_scale2)
    return ep.combine(second.product(hidden, plan.offs), plan, weighted=True)
