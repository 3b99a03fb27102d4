"""`ExpertParallel`: dispatch of tokens to the ranks of their experts, and the sum of what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from padless.distributed import checks
from padless.distributed.backend import BACKENDS, choose_backend, packages
from padless.distributed.functions import Combine, Dispatch, tracked
from padless.distributed.layer import QuantizedExperts, moe_over_ranks
from padless.distributed.placement import place
from padless.distributed.plan import ExpertPlan
from padless.distributed.row_format import RowFormat
from padless.distributed.settings import Settings, agree
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.runtime.choices import Exchange, ScaleMajor, ScaleRule, Sums


class ExpertParallel:
    """Exchange of tokens between ranks that each have some of the experts.

    A token is sent once to a rank, however many of its experts are there, and what a rank's experts give for a token is
    summed there and sent back once. Nothing but the (T, k) ids and weights is exchanged ahead of the rows; every rank
    derives the order of its rows from them, and no atomic decides an order.

    Args:
        group_or_mesh: ProcessGroup or one-dimensional DeviceMesh of R ranks; None is the default group.
        num_experts: E.
        hidden: H, a multiple of 32.
        top_k: k, 1 to 16.
        max_tokens: most tokens of a rank in a call, Tmax.
        fmt: what rows are dispatched in: a block-scaled format, or torch.bfloat16 or torch.float32 for values as they
            are, which alone can be differentiated.
        backend: "symm" (kernels over torch's symmetric memory, GPUs of one NVLink host), "deepep" (DeepEP 2, GPUs of
            several hosts), "collective" (gloo and NCCL, the reference: the same bits, but it reads sizes on the host),
            or "auto", the first of them that the ranks have what it needs for.
        capacity: C, rows that a rank can receive. None is R * Tmax * min(k, its experts), which only ids that occur
            twice for a token can exceed. More rows than fit are an error, never a silent drop: "collective" raises on
            all ranks; else `ExpertPlan.overflow` is not 0 and the next call, or `check`, raises. "exact" is as many rows
            as there are, read on the host, but for "symm".
        expert_map: (E,) ranks, where each expert is; None is runs of E / R experts, for which E must be a multiple of R.
        scale_major: of FP8_BLOCK's scales, "mn" (default) or "k".
        scale_rule: as in `padless.quantize`.
        device: of the tensors; None is the current GPU where the group has NCCL, else the CPU.
        gradient_fmt: None, or FP8_BLOCK: what the gradient of `combine`'s result travels in, half the bytes of bfloat16.
            It is quantized where it is made, in blocks of 1 x 128 and 2^60 times as large (it may be 2^67), and rows are
            its decoded values. Sums on the way back stay in bfloat16. For rows that are not quantized.
        sums: what comes back of a token. "ranks", the sum of its rows on each rank, once a rank; "slots", its rows as
            they are, which are summed at home: more bytes cross, and a token has the bits of one process with all
            experts, for every number of ranks and every expert_map, in the backward pass too. Not with "deepep".
        timeout: seconds after which a rank that does not answer is an error ("symm" and "deepep"; "collective" has the
            group's).
        programs: CTAs of a kernel that moves rows ("symm"); None is eight for every SM.

    All arguments must be the same on all ranks, and so the type of the device and whether a backend's package is there:
    they are compared once, here, and what is wrong on any rank is the same ValueError on all. Only group_or_mesh is
    checked by each rank alone. Calls are collective: all ranks make the same ones in the same order, and those of one
    object follow one another, on one stream or on streams that wait for each other. Raises ValueError.

    With rows that are not quantized and grad mode on, what `dispatch` and `combine` return requires grad on every rank,
    whatever requires it there, since tokens and experts of other ranks may; so all ranks make the same exchanges in the
    backward pass, also those without tokens, rows or anything to train. Grad mode must be the same on all ranks, as must
    be whether a result is differentiated. Call under torch.no_grad() where there is no backward pass.
    """

    def __init__(
        self,
        group_or_mesh: Any,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        fmt: BlockScaledFormat | torch.dtype = FP8_BLOCK,
        backend: Exchange = "auto",
        capacity: int | str | None = None,
        *,
        expert_map: Sequence[int] | None = None,
        scale_major: ScaleMajor | None = None,
        scale_rule: ScaleRule | None = None,
        device: torch.device | str | None = None,
        timeout: float = 100.0,
        programs: int | None = None,
        gradient_fmt: BlockScaledFormat | None = None,
        sums: Sums = "ranks",
    ) -> None:
        group = process_group(group_or_mesh)
        with suppress(Exception):  # None, and what is no sequence of integers, stays
            expert_map = [index(r) for r in expert_map]  # type: ignore[union-attr]
        given = {
            "num_experts": num_experts, "hidden": hidden, "top_k": top_k, "max_tokens": max_tokens,
            "fmt": getattr(fmt, "name", fmt), "backend": backend, "capacity": capacity,
            "expert_map": expert_map, "scale_major": scale_major, "scale_rule": scale_rule, "timeout": timeout,
            "programs": programs, "gradient_fmt": getattr(gradient_fmt, "name", gradient_fmt), "sums": sums,
        }  # fmt: skip
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        problem, facts = None, {}
        try:
            if backend not in BACKENDS:
                raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
            major = checks.check_settings(
                num_experts, hidden, top_k, max_tokens, fmt, scale_major, scale_rule, timeout, programs
            )
            checks.check_gradient_format(gradient_fmt, fmt)
            checks.check_sums(sums)
            self.device = checks.device_of(group, device)
            facts = {"device": self.device.type} | packages(backend)
            placement = place(num_experts, self.num_ranks, self.rank, expert_map)
            most = max(torch.bincount(placement.rank_of.long(), minlength=self.num_ranks).tolist())
            default = self.num_ranks * max_tokens * min(top_k, most)
            self.settings = Settings(
                self.rank, self.num_ranks, num_experts, hidden, top_k, max_tokens,
                RowFormat(fmt, hidden, major, scale_rule),
                checks.check_capacity(capacity, backend, default),
                torch.float32 if fmt == torch.float32 else torch.bfloat16,
                timeout, programs or 0, gradient_fmt, sums,
            )  # fmt: skip
            on_device = placement.to(self.device)
        except Exception as error:  # whatever it is, the other ranks wait for this one
            problem = str(error)
        agree(group, given, problem, facts)
        self.expert_map: tuple[int, ...] = tuple(placement.rank_of.tolist())
        self.local_experts = placement.local_experts
        self._backend = choose_backend(backend, group, self.device, self.settings, on_device)

    def __copy__(self) -> ExpertParallel:
        """Itself, as a deep copy: copies of a layer share its exchange."""
        return self

    def __deepcopy__(self, memo: Any) -> ExpertParallel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "an ExpertParallel belongs to a process group and cannot be pickled; save the layer's state_dict(), and "
            "load it into a layer that is made with an ExpertParallel of the new processes"
        )

    @property
    def backend(self) -> str:
        """Name of the backend: "collective", "symm" or "deepep"."""
        return self._backend.name

    def dispatch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """The rows of this rank's experts from the tokens of all ranks, and the plan.

        Args:
            tokens: (T, H) bfloat16, float16 or float32; T from 0 to max_tokens, it may differ by rank.
            ids: (T, k) int32 or int64 experts. Negative ids are no row; an id that occurs twice for a token is two rows.
            weights: (T, k) bfloat16, float16 or float32 router weights.
            global_scale: NVFP4's decode scale, one float32 value, the same on all ranks.

        Returns (rows, plan). rows: (C, H) in the object's format, FP8_BLOCK with MN-major scales as `grouped_gemm` takes
        them, in the order of (expert, source rank, token, slot), the bits of `padless.quantize` of the token. Rows from
        plan.offs[-1] on are undefined. plan: `ExpertPlan`.

        A collective call. Without "collective": no synchronization with the host; with "symm" safe in CUDA graphs,
        replayed with other tokens, ids and weights. Raises ValueError for wrong arguments, on all ranks with
        "collective"; ids from E on are else found by the device, count as none, and the next call raises.
        """
        rows, plan = self._dispatch(tokens, ids, weights, global_scale=global_scale)
        if self.settings.sums == "slots":  # whose `combine` reads them: the caller's may be another batch's by then
            assert plan.weights is not None
            plan = plan._replace(weights=plan.weights.clone())
        return rows, plan

    def _dispatch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """`dispatch` for a combine in the same call: plan.weights is the caller's memory."""
        self._backend.check()
        with self.checking():
            checks.check_tokens(self.settings, self.device, tokens, ids, weights, global_scale)
        if not (torch.is_grad_enabled() and self.settings.row_format.is_plain):
            found, its = self._backend.dispatch(tokens.detach(), ids, weights.detach(), global_scale)
            return found, its._replace(weights=weights.detach())
        rows, *plan = Dispatch.apply(self._backend, tracked(tokens), weights, ids)  # type: ignore[no-untyped-call]
        return rows, ExpertPlan(*plan)._replace(weights=weights.detach())

    def combine(self, rows: torch.Tensor, plan: ExpertPlan, *, weighted: bool = False) -> torch.Tensor:
        """Sums, at the ranks that the tokens came from, of what the experts gave for them; (T, H).

        rows: (C, H) bfloat16 (float32 where the object's format is), rows as `dispatch` gave them; those from
            plan.offs[-1] on are not read.
        weighted: whether each row is multiplied by plan.prob here. Leave it False where the weights went in before, such
            as with SwiGLU.

        out[t] = bf16(sum over ranks in order, float32, of bf16(sum over the token's slots there in order, float32, of
        rows[slot])), a weighted row being fl(prob * row), without fused multiply-add; float32 throughout for float32
        rows. The own rank's sum is rounded too. So a token's bits depend on its rows and on where its experts are, not
        on T, other tokens, its place, or timing. A token without experts is 0. A collective call. Raises ValueError.

        With sums="slots": out[t] = bf16(sum over the token's slots in order, float32, of rows[slot]), as
        `padless.moe.combine` of all its rows: it does not depend on where its experts are either. Rows are then
        multiplied at home, by plan.weights, and another plan.prob is not read.
        """
        return self._combine(rows, plan, weighted, None)

    def _combine(
        self, rows: torch.Tensor, plan: ExpertPlan, weighted: bool, shared: torch.Tensor | None
    ) -> torch.Tensor:
        """`combine`, plus shared (T, H): see `summed`."""
        self._backend.check()
        checks.check_rows(self.settings, self.device, rows, plan)
        if self.settings.row_format.is_plain:
            rows = tracked(rows)
        at_home = shared if self.settings.sums == "slots" else None
        if torch.is_grad_enabled() and (rows.requires_grad or (weighted and plan.prob.requires_grad)):
            out: torch.Tensor = Combine.apply(self._backend, rows, weighted, at_home, *plan)  # type: ignore[no-untyped-call]
        else:
            prob = plan.prob.detach() if weighted else None
            out = self._backend.combine(rows.detach(), plan, prob, None, at_home)[0]
        return out if shared is None or at_home is not None else (out.float() + shared.float()).to(out.dtype)

    def _moe(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: tuple[Any, ...],
        shared: torch.Tensor | None,
        out_dtype: torch.dtype,
        num_experts: int | None,
    ) -> torch.Tensor:
        """`padless.moe.moe` with ep, of arguments that it has checked. experts: fields of `QuantizedExperts`."""
        return moe_over_ranks(self, x, ids, weights, QuantizedExperts(*experts), shared, out_dtype, num_experts)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """A block of checks in front of a dispatch, whose error is told to the ranks that wait for this one."""
        try:
            yield
        except Exception as error:
            with suppress(ValueError):  # the backend raises it, too
                self._backend.dispatch(None, None, None, None, str(error))
            raise

    def check(self) -> None:
        """Raises RuntimeError for what a device found out in calls that have ended: a rank that did not answer within
        the timeout, more rows than the capacity, ids that are no expert. It reads host memory and waits for nothing;
        call it after a synchronization to learn of everything before. Every dispatch and combine calls it first.
        """
        self._backend.check()


def process_group(group_or_mesh: Any) -> dist.ProcessGroup:
    """The ProcessGroup of an argument. Raises ValueError."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
    if group_or_mesh is None:
        group = dist.group.WORLD
        assert group is not None
        return group
    if isinstance(group_or_mesh, dist.ProcessGroup):
        return group_or_mesh
    is_mesh = hasattr(group_or_mesh, "get_group") and getattr(group_or_mesh, "ndim", 0) == 1
    if group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER or (is_mesh and group_or_mesh.get_coordinate() is None):
        raise ValueError("group_or_mesh is of other ranks than this one; make the object on its ranks alone")
    if is_mesh:
        found: dist.ProcessGroup = group_or_mesh.get_group()
        return found
    raise ValueError(
        f"group_or_mesh must be a ProcessGroup, a one-dimensional DeviceMesh or None, got "
        f"{type(group_or_mesh).__name__}; "
        'give mesh["ep"] of a larger mesh'
    )
