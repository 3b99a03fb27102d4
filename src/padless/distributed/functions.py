"""Gradients of dispatch and combine. Each is the other's transpose, by the same plan."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch

from padless.distributed.checks import check_rows
from padless.distributed.plan import ExpertPlan
from padless.gradients import once_differentiable


def tracked(t: torch.Tensor) -> torch.Tensor:
    """t, or with grad mode on an alias of it that requires grad, a copy of what inference mode made.

    A rank has rows and sums of other ranks, which may require gradients where its own tokens and weights do not. So with
    grad mode on every call is one of autograd's, on every rank, and the backward pass makes the same exchanges on all.
    """
    if t.requires_grad or not torch.is_grad_enabled():
        return t
    return (t.clone() if t.is_inference() else t.detach()).requires_grad_()


class Dispatch(torch.autograd.Function):
    """(rows, *plan) of tokens and weights; plan.prob carries the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, backend: Any, tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor):
        rows, plan = backend.dispatch(tokens.detach(), ids, weights.detach(), None)
        ctx.backend, ctx.dtypes = backend, (tokens.dtype, weights.dtype)
        ctx.save_for_backward(plan.offs, plan.inverse, plan.ids, plan.overflow)
        ctx.mark_non_differentiable(plan.offs, plan.inverse, plan.ids, plan.overflow)
        return rows, *plan[:5]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: torch.Tensor, _offs: Any, dprob: torch.Tensor, *_: Any):
        """dtokens = the sum of a token's rows of drows, as combine sums; dweights = dprob of each slot's row."""
        offs, inverse, ids, overflow = ctx.saved_tensors
        plan = ExpertPlan(offs, dprob, inverse, ids, overflow)
        dtokens, dweights = ctx.backend.combine(drows.contiguous(), plan, None, dprob.contiguous())
        return None, dtokens.to(ctx.dtypes[0]), dweights.to(ctx.dtypes[1]), None


class Combine(torch.autograd.Function):
    """out of rows, each times plan.prob where it is weighted; plus shared, where sums are of slots."""

    @staticmethod
    def forward(
        ctx: Any, backend: Any, rows: torch.Tensor, weighted: bool, shared: torch.Tensor | None,
        *plan: torch.Tensor | None,
    ):  # fmt: skip
        p = ExpertPlan(*(None if t is None else t.detach() for t in plan))  # type: ignore[arg-type]
        ctx.backend, ctx.weighted, ctx.shared_dtype = backend, weighted, None if shared is None else shared.dtype
        # Without the router weights, which may be inference mode's.
        ctx.save_for_backward(rows if weighted else None, *p[:5])
        return backend.combine(rows.detach(), p, p.prob if weighted else None, None, shared)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor):
        """drows[r] = prob * dout of the row's token; dprob[r] = rows[r] . dout of the row's token, in float32."""
        rows, *saved = ctx.saved_tensors
        plan = ExpertPlan(*saved)
        drows = ctx.backend.redispatch(dout.contiguous(), plan)
        dprob = None
        if ctx.weighted:
            of_token = drows.to(torch.float32)
            dprob = (rows.to(torch.float32) * of_token).sum(dim=1)
            drows = (plan.prob[:, None] * of_token).to(drows.dtype)
        dshared = dout.to(ctx.shared_dtype) if ctx.needs_input_grad[3] else None
        return None, drows, None, dshared, None, dprob, None, None, None, None


def summed(
    ep: Any, rows: torch.Tensor, plan: ExpertPlan, shared: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """The weighted sums of a combine, plus shared (T, H), in out_dtype; not followed by autograd. A collective call.

    Sums of slots are rounded once, shared included; sums of ranks are rounded to the rows' type before it is added.
    """
    backend = ep._backend
    backend.check()
    check_rows(ep.settings, ep.device, rows, plan)
    if ep.settings.sums == "slots":
        return backend.combine(rows, plan, plan.prob, None, shared, out_dtype)[0]  # type: ignore[no-any-return]
    out: torch.Tensor = backend.combine(rows, plan, plan.prob, None)[0]
    if shared is not None:
        out = out.to(torch.float32) + shared.to(torch.float32)
    return out.to(out_dtype)


def gradients_of_rows(ep: Any, dout: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
    """dout (T, H) of every row's token, unweighted: (C, H). A collective call."""
    rows: torch.Tensor = ep._backend.redispatch(dout.to(ep.settings.partial).contiguous(), plan)
    return rows


def gradients_of_dispatch(
    ep: Any, drows: torch.Tensor, dprob: torch.Tensor, plan: ExpertPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dtokens (T, H), dweights (T, k) float32) of gradients of rows (C, H) and weights (C,). A collective call."""
    dtokens, dweights = ep._backend.combine(drows, plan, None, dprob)
    return dtokens, dweights
