"""Experts whose weights are frozen codes, with low-rank adapters that train: `LoraExperts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from padless.arguments import check_type
from padless.distributed import ExpertParallel
from padless.formats import BlockScaledFormat, BlockScaledTensor
from padless.moe.activation import Activation
from padless.moe.checks import MAX_EXPERTS, check_matrix
from padless.moe.fused import fuses
from padless.moe.gather import route_quantize
from padless.moe.layer import moe
from padless.moe.routing import Routing, check_ids, route
from padless.nn.calls import call
from padless.nn.experts import checking
from padless.nn.lora import inside, low_rank
from padless.nn.lora.base import AdaptedModule, check_activations, check_weights, format_of_rows, rows_as_multiplied
from padless.nn.lora.frozen import Frozen, activated_product, adapted_product, added_product
from padless.nn.lora.looked_up import looked_up_experts, looks_up
from padless.nn.lora.low_rank import LowRank
from padless.nn.lora.tokens import activated, combined, gathered_rows
from padless.nn.weight_codes import has_backward
from padless.ops.checks import describe

_FEW_SLOTS = 1024  # up to here slots look their adapters up, where nothing is trained


def routed(
    x: torch.Tensor, ids: torch.Tensor, num_groups: int, frozen: Frozen
) -> tuple[Routing, BlockScaledTensor | torch.Tensor | None]:
    """The routing of ids (T, k), and rows as they are multiplied where that takes more than gathering them."""
    format, scale = frozen.how
    if format is None:
        return route(ids, num_groups), None
    return route_quantize(x.detach(), ids, num_groups, format, global_scale=scale)


def adapted_experts(
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    read: BlockScaledTensor | torch.Tensor | None,
    top_k_weights: torch.Tensor,
    shared: torch.Tensor | None,
    frozen: Frozen,
    low13: LowRank | None,
    low2: LowRank | None,
) -> torch.Tensor:
    """The layer of frozen experts with low-rank adapters of each projection, under autograd; (T, H).

    routing: ends of the groups (E,), tokens and inverse, and read: what `routed` gives. low13, low2: what is
    added before the activation, and to the second projection; None for nothing. The others are those of `LoraExperts`.
    """
    offs, tokens, inverse = routing
    if low13 is not None and low2 is not None and not _keeps_rows(frozen, low13, low2, x, top_k_weights, shared):
        x16 = x.to(torch.bfloat16)
        read = x16.index_select(0, tokens) if read is None else read
        y = inferred_rows(x16, tokens, read, offs, frozen, low13, low2)
    else:
        rows = gathered_rows(x, tokens, inverse)
        read = rows.detach().to(torch.bfloat16) if read is None else read
        y = adapted_rows(rows, read, offs, frozen, low13, low2)
    out = combined(y, inverse, top_k_weights, x.dtype if shared is None else torch.float32)
    return out if shared is None else (out + shared.to(torch.float32)).to(x.dtype)


def adapted_rows(
    rows: torch.Tensor,
    read: BlockScaledTensor | torch.Tensor,
    offs: torch.Tensor,
    frozen: Frozen,
    low13: LowRank | None,
    low2: LowRank | None,
) -> torch.Tensor:
    """Both projections of rows (M, H) by expert; (M, H) bfloat16.

    read: the rows as they are multiplied.
    """
    h = adapted_product(rows, read, frozen.w13, frozen.bias13, offs, low13)
    hidden, operand = activated(h, frozen.activation, *frozen.how)
    return adapted_product(hidden, operand, frozen.w2, frozen.bias2, offs, low2)


def inferred_rows(
    x: torch.Tensor,
    tokens: torch.Tensor,
    read: BlockScaledTensor | torch.Tensor,
    offs: torch.Tensor,
    frozen: Frozen,
    low13: LowRank,
    low2: LowRank,
) -> torch.Tensor:
    """`adapted_rows` of x[tokens], bit for bit, outside of autograd and without dropout; x: (T, H) bfloat16."""
    t = low_rank.applied(x, low13, tokens)
    of, activation = low13.factors, frozen.activation
    operand: BlockScaledTensor | torch.Tensor
    if inside.adds_inside(read, frozen.w13, low13) and fuses(frozen.w13, activation, frozen.how[0]):
        assert isinstance(read, BlockScaledTensor)
        hidden, operand = inside.swiglu(read, frozen.w13, frozen.bias13, offs, t, of.b[0], of.scaling, activation)
    else:
        hidden, operand = activated_product(read, frozen.w13, frozen.bias13, offs, t, low13, activation, frozen.how)
    return added_product(operand, frozen.w2, frozen.bias2, offs, low_rank.applied(hidden, low2), low2)


def _keeps_rows(frozen: Frozen, low13: LowRank, low2: LowRank, *others: torch.Tensor | None) -> bool:
    """Whether autograd follows the layer, or dropout changes what A reads."""
    factors = (*low13.factors.a, *low13.factors.b, *low2.factors.a, *low2.factors.b)
    return low13.dropout > 0.0 or has_backward(*others, frozen.bias13, frozen.bias2, *factors)


class LoraExperts(AdaptedModule):
    """Frozen experts with low-rank adapters: y = W x + bias + scaling * B (A x) in both projections of every expert.

    w13: (E, 2 I, H), (E, I, H) for an activation without a gate, and w2: (E, H, I): FP8_BLOCK, MXFP8, MXFP4 or NVFP4
        codes of kind "weight". They are constants, in no state dict, and never dequantized as a whole but as
        `padless.nn.lora.frozen.input_gradient` says.
    bias13, bias2: (E, 2 I) or (E, I), and (E, H), or None. nn.Parameters among them are trained.
    activation: a `padless.moe.Activation`; the default is silu(gate) * up of concatenated halves.
    activations: format of the rows, as in `padless.moe.moe`.
    rank: r, from 1 to 256, of every adapter. alpha: scaling is alpha / r, alpha / sqrt(r) with ``rslora``.
    dropout: of the rows that A reads, in training mode; every slot of a token draws its own.
    adapters: their names, in the order that adapter_ids count.
    dtype: of the parameters, bfloat16 or float32; products are computed in bfloat16.
    ep: a `padless.distributed.ExpertParallel` with rows in bfloat16 or float32. Codes, biases and adapters are then
        those of this rank's experts, and calls are collective, as are their backward passes. Where adapter_ids are to
        choose, it is one of all pairs (expert, adapter or none): of E (adapters + 1) "experts", an expert's in a run.

    Parameters, by an adapter's name: ``a13[name]`` (E, r, H), ``b13[name]`` (E, 2 I, r), ``a2[name]`` (E, r, I),
    ``b2[name]`` (E, H, r). A is drawn as torch.nn.Linear's weight is, B is zero. ``active``: the adapter of all tokens
    where no adapter_ids are given, None for none; it may be assigned. Raises ValueError.
    """

    _codes = ("w13", "w2")
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(
        self,
        w13: BlockScaledTensor,
        w2: BlockScaledTensor,
        *,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        activation: Activation | None = None,
        activations: BlockScaledFormat | torch.dtype | None = None,
        rank: int = 16,
        alpha: float = 32.0,
        rslora: bool = False,
        dropout: float = 0.0,
        adapters: Sequence[str] = ("default",),
        dtype: torch.dtype = torch.bfloat16,
        ep: ExpertParallel | None = None,
    ) -> None:
        super().__init__(rank, alpha, rslora, dropout, adapters, dtype)
        for name, w in (("w13", w13), ("w2", w2)):
            check_weights(name, w)
        check_type("activation", activation, Activation)
        self.w13, self.w2 = w13, w2
        self.num_experts, self.intermediate, n = w13.data.shape[0], w2.logical_shape[2], w13.logical_shape[1]
        self.hidden = w13.logical_shape[2]
        self.activation = Activation() if activation is None else activation
        wanted = (self.num_experts, self.hidden, self.activation.out_columns(n))
        if w2.logical_shape != wanted:
            raise ValueError(f"w2 must be (E, H, I) = {wanted}, got {w2.logical_shape}")
        self._add_bias("bias13", bias13, (self.num_experts, n))
        self._add_bias("bias2", bias2, (self.num_experts, self.hidden))
        check_activations(activations)
        self.activations = activations
        self.ep = ep
        if ep is not None:
            self._check_exchange(ep)
        self.a13, self.b13 = self._factors(w13)
        self.a2, self.b2 = self._factors(w2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every A uniformly from +- 1 / sqrt(K) and sets every B to zero."""
        self._reset(self.a13, self.b13)
        self._reset(self.a2, self.b2)

    def forward(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        *,
        adapter_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t]), plus shared[t]; (T, H).

        x: (T, H) bfloat16, float16 or float32. top_k_index, top_k_weights: (T, k), shared: (T, H), as in
        `padless.moe.moe`.
        adapter_ids: (T,) int32 or int64, the place in ``adapters`` of each token's; others, such as -1, are none. Then
            experts times (adapters + 1) may be 4096 at most. None: all tokens have ``active``.

        A token without an adapter has the bits of `padless.moe.moe`. Differentiable, once, for x, top_k_weights, shared,
        the adapters and biases that are parameters. No synchronization; safe in CUDA graphs. Raises ValueError.
        """
        if adapter_ids is None:
            with checking(self.ep):
                self._check_active()
        has_adapter = adapter_ids is not None or self.active is not None
        if self.ep is None:
            is_followed = has_backward(x, top_k_weights, shared, self.bias13, self.bias2)
        else:
            is_followed = torch.is_grad_enabled()  # other ranks' tokens may require grad
        if not (has_adapter or self._sends_pairs or is_followed):
            return self._without_adapters(x, top_k_index, top_k_weights, shared)
        with checking(self.ep):
            self._check_tokens(x, top_k_index, top_k_weights, shared)
            if self.ep is not None and adapter_ids is not None and not self._sends_pairs:
                raise ValueError(
                    f"adapter_ids are given and ep is of {self.ep.settings.num_experts} experts; make it of the "
                    f"{self.ep.settings.num_experts * (len(self.adapters) + 1)} pairs with an adapter or none"
                )
        if self.ep is not None:
            return self._over_ranks(self.ep, x, top_k_index, top_k_weights, shared, adapter_ids)
        frozen = self._frozen()
        if adapter_ids is None:
            (offs, tokens, inverse), read = routed(x, top_k_index, self.num_experts, frozen)
            low = self._both_low_rank(offs, self._active_names(), by_pairs=False)
        elif self._looks_up(frozen, x, top_k_index, top_k_weights, shared):
            self._num_pairs()
            self._check_adapter_ids(top_k_index, adapter_ids)
            of = [self._of_names(a, b, self.adapters, False) for a, b in ((self.a13, self.b13), (self.a2, self.b2))]
            return looked_up_experts(x, top_k_index, top_k_weights, shared, adapter_ids, frozen, *of)
        else:
            pairs_of_slots = self._pairs(top_k_index, adapter_ids)
            (pairs, tokens, inverse), read = routed(x, pairs_of_slots, self._num_pairs(), frozen)
            offs = self._ends_of_experts(pairs)
            low = self._both_low_rank(pairs, self.adapters, by_pairs=True)
        return adapted_experts(x, (offs, tokens, inverse), read, top_k_weights, shared, frozen, *low)

    def _over_ranks(
        self,
        ep: ExpertParallel,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        adapter_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same of this rank's tokens; rows are quantized where their experts are, and weighted in the sum."""
        trained = self._active_names() if adapter_ids is None else self.adapters
        if self._sends_pairs:
            if adapter_ids is None:
                chosen = -1 if self.active is None else self.adapters.index(self.active)
                adapter_ids = torch.full(x.shape[:1], chosen, dtype=torch.int64, device=x.device)
            with ep.checking():
                ids = self._pairs(ids, adapter_ids)
        rows, plan = ep._dispatch(x, ids, weights)
        assert isinstance(rows, torch.Tensor)
        offs, names = plan.offs, trained
        if self._sends_pairs:
            offs, names = self._ends_of_experts(plan.offs), self.adapters
        low = self._both_low_rank(plan.offs, names, by_pairs=self._sends_pairs, trained=trained)
        frozen = self._frozen()
        y = adapted_rows(rows, rows_as_multiplied(rows, *frozen.how), offs, frozen, *low)
        return ep._combine(y.to(ep.settings.partial), plan, True, shared)

    @property
    def _sends_pairs(self) -> bool:
        """Whether the exchange is one of pairs (expert, adapter or none)."""
        return self.ep is not None and len(self.ep.local_experts) != self.num_experts

    @property
    def _all_experts(self) -> int:
        """Those of all ranks."""
        if self.ep is None:
            return self.num_experts
        return self.ep.settings.num_experts // (len(self.adapters) + 1 if self._sends_pairs else 1)

    def _check_exchange(self, ep: ExpertParallel) -> None:
        check_type("ep", ep, ExpertParallel)
        s, here, each = ep.settings, list(ep.local_experts), len(self.adapters) + 1
        first = here[::each]
        in_runs = here == [e + j for e in first for j in range(each)] and all(e % each == 0 for e in first)
        fits = len(here) == self.num_experts or (len(here) == self.num_experts * each and in_runs)
        if not fits or s.hidden != self.hidden or not s.row_format.is_plain:
            raise ValueError(
                f"ep has {len(here)} experts here and {s.hidden} columns in {s.row_format.format}; it must have "
                f"{self.num_experts}, or {self.num_experts * each} pairs with an adapter or none in runs of {each}, and "
                f"{self.hidden} in torch.bfloat16 or torch.float32, make it with fmt="
            )

    def _check_tokens(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> None:
        check_ids(ids, self._all_experts)
        check_matrix("x", x, ids.shape[0], self.hidden, self.w13.device)
        check_matrix("top_k_weights", weights, ids.shape[0], ids.shape[1], x.device)
        if shared is not None:
            check_matrix("shared", shared, x.shape[0], x.shape[1], x.device)
        if self.ep is not None and x.dtype != self.ep.settings.row_format.format:
            raise ValueError(f"x is {x.dtype} and ep's rows are {self.ep.settings.row_format.format}; convert x")

    def _frozen(self) -> Frozen:
        how = format_of_rows(self.activations, self.w13)
        return Frozen(self.w13, self.w2, self.bias13, self.bias2, self.activation, how)

    def _both_low_rank(
        self, groups: torch.Tensor, names: tuple[str, ...], *, by_pairs: bool, trained: tuple[str, ...] | None = None
    ) -> tuple[LowRank | None, LowRank | None]:
        """Of both projections; groups: their ends, of experts or of pairs (expert, adapter or none).

        trained: adapters that get gradients, None for all. An optimizer takes a gradient of zeros for one.
        """

        def of(factors: torch.nn.ParameterDict) -> dict[str, torch.Tensor]:
            return {
                name: factors[name] if trained is None or name in trained else factors[name].detach() for name in names
            }

        low13, low2 = (
            self._low_rank(self._of_names(of(a), of(b), names, by_pairs), groups) if names else None
            for a, b in ((self.a13, self.b13), (self.a2, self.b2))
        )
        return low13, low2

    def _ends_of_experts(self, pairs: torch.Tensor) -> torch.Tensor:
        return pairs[len(self.adapters) :: len(self.adapters) + 1].contiguous()

    def _without_adapters(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        act = self.activation
        return moe(
            x, ids, weights, self.w13, self.w2, activation=act.kind, gate_up=act.gate_up, alpha=act.alpha,
            limit=act.limit, up_offset=act.up_offset, bias13=self.bias13, bias2=self.bias2, shared=shared,
            activations=self.activations, ep=self.ep,
        )  # fmt: skip

    def _num_pairs(self) -> int:
        """Groups of (expert, adapter or none)."""
        pairs = self.num_experts * (len(self.adapters) + 1)
        if pairs > MAX_EXPERTS:
            raise ValueError(
                f"adapter_ids choose among {len(self.adapters)} adapters of {self.num_experts} experts, which are "
                f"{pairs} groups with those of no adapter; at most {MAX_EXPERTS} are allowed"
            )
        return pairs

    def _looks_up(
        self, frozen: Frozen, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> bool:
        """Whether `looked_up_experts` computes a call: not where autograd follows it or dropout changes what A reads."""
        if not 0 < ids.numel() <= _FEW_SLOTS or not looks_up(frozen.how[0], self.activation, [*self.b13.values()]):
            return False
        is_trained = (self.training and self.dropout > 0.0) or has_backward(x, weights, shared, *self.parameters())
        return not is_trained

    def _pairs(self, ids: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
        """(T, k) ids of (expert, adapter), none being the last of an expert; -1 for no expert."""
        self._check_adapter_ids(ids, adapter_ids)
        pairs: torch.Tensor = call("adapter_pairs", ids, adapter_ids, self._all_experts, len(self.adapters))
        return pairs

    def _check_adapter_ids(self, ids: torch.Tensor, adapter_ids: torch.Tensor) -> None:
        if (
            not isinstance(adapter_ids, torch.Tensor)
            or adapter_ids.dtype not in (torch.int32, torch.int64)
            or tuple(adapter_ids.shape) != (ids.shape[0],)
            or adapter_ids.device != ids.device
        ):
            raise ValueError(
                f"adapter_ids must be ({ids.shape[0]},) int32 or int64 on {ids.device}, got {describe(adapter_ids)}"
            )

    def extra_repr(self) -> str:
        sizes = f"{self.hidden}, {self.intermediate}, {self.num_experts}, {self.w13.format.name}"
        return f"{sizes}, rank={self.rank}, scaling={self.scaling}, adapters={self.adapters}"
