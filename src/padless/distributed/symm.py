"""Exchange by kernels over symmetric memory: GPUs of one NVLink host, no synchronization with the host.

A dispatch is `publish` (quantize into the own buffer, ids and weights to all ranks, signal), and `receive` (wait for
all signals, sort the slots, pull every token that has rows here and store it to all of them). A combine is
`send_back` (sum a token's rows, store the sum at its origin, signal) and `finish` (wait, add the ranks' sums in
order), or with sums of slots each row is stored at the origin and added there. No step waits for a later step of
another rank, so on one device virtual ranks can run step by step, each step for all of them. A launch of few slots, of
a combine or of a wait may begin while the one ahead of it still runs, which it waits for first of all.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from padless.distributed.placement import Placement
from padless.distributed.plan import ExpertPlan, Sorted, sort_slots
from padless.distributed.row_format import RowFormat, Rows, as_bytes
from padless.distributed.settings import Settings
from padless.distributed.symm_state import FEW_SLOTS, IDS, LATE, OVERFLOW, ROWS, SUMS, WRONG_ID, State, is_few
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.kernels import ahead
from padless.layouts import empty_mn_major

PROGRAMS_PER_SM = 8
WARPS = 4  # of a program
SHARE_OF_PUBLISH = 3 / 8  # of these programs, so that there is room for the concurrent sort
SHARE_OF_FINISH = 2
MOST_POLLING = 2112  # warps of a launch that wait for ranks: on an H200 a quarter, which leaves room for other streams
LOCALIZE_BLOCK = 1024
IDS_AT_ONCE = 1024  # of `publish_ids`
SLOTS_OF_FOUR_WARPS = 2048  # of `receive_few`
COLUMNS = 1024  # of a row that a program sums together
ITEMS_OF_TWO_WARPS = 32  # of them that a program has at least where two warps sum faster than four
VIRTUAL_PROGRAMS = 3
VIRTUAL_POLLS = 3


class SymmBackend:
    """Dispatch and combine of checked arguments over a `State`."""

    name = "symm"

    def __init__(
        self,
        state: State,
        settings: Settings,
        placement: Placement,
        polls: int = VIRTUAL_POLLS,
        few_slots: int = FEW_SLOTS,
        most_polling: int = MOST_POLLING,
    ) -> None:
        """polls: how often to look for a rank where there is no clock. few_slots: up to which a dispatch is two
        launches, if it has few tokens as well. most_polling: warps of a launch that wait for ranks themselves.
        """
        self.is_few = is_few(settings.num_ranks * settings.max_tokens, settings.top_k, few_slots)
        self._state, self._settings, self._placement = state, settings, placement
        self._device = state.buffer.device
        on_gpu = self._device.type == "cuda"
        self._limit = int(settings.timeout * 1e9) if on_gpu else polls
        self._most_polling = most_polling
        self._programs = settings.programs
        if not self._programs and on_gpu:
            sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._programs = PROGRAMS_PER_SM * sms
        self._programs = self._programs or VIRTUAL_PROGRAMS
        self._side = torch.cuda.Stream(self._device, priority=-1) if on_gpu else None

    # --- calls ---------------------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        problem: str | None = None,
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        if problem is not None:
            raise ValueError(problem)
        assert tokens is not None
        assert ids is not None
        assert weights is not None
        if self.is_few or self._side is None:
            return self.receive(self.publish(tokens, ids, weights, global_scale), global_scale)
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):  # concurrent with the quantization of the rows
            kept_ids = self.publish_ids(ids, weights)
            found = self.sort()
        self.publish_rows(tokens, global_scale)
        self.wait_for_rows()
        main.wait_stream(self._side)
        return self.fan_out(kept_ids, found, global_scale)

    def redispatch(self, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        self.publish_again(x)
        return self.receive_again(x, plan)

    def combine(
        self,
        rows: torch.Tensor,
        plan: ExpertPlan,
        prob: torch.Tensor | None,
        dprob: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.send_back(rows, plan, prob, dprob)
        weighted = prob is not None
        return self.finish(plan, with_slots=dprob is not None, weighted=weighted, shared=shared, out_dtype=out_dtype)

    def check(self) -> None:
        status = self._state.status
        if int(status[LATE]):
            raise RuntimeError(
                f"rank {int(status[LATE]) - 1} did not answer rank {self._settings.rank} or another within "
                f"{self._settings.timeout} seconds; results since then are wrong, start the group anew"
            )
        if int(status[OVERFLOW]):
            needed, status[OVERFLOW] = int(status[OVERFLOW]), 0
            raise RuntimeError(
                f"capacity is {self._settings.capacity} rows and rank {self._settings.rank} received {needed} more in "
                "an earlier dispatch, whose results are wrong; give a larger capacity or None"
            )
        if int(status[WRONG_ID]):
            source, status[WRONG_ID] = int(status[WRONG_ID]) - 1, 0
            raise RuntimeError(
                f"ids of rank {source} held a value that is no expert in an earlier dispatch; they must be below "
                f"{self._settings.num_experts}, or negative for none"
            )

    # --- steps ---------------------------------------------------------------------------------------------

    def publish(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, global_scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Quantizes and publishes tokens; the plan's copy of ids (T, k) int32."""
        if not self.is_few:
            kept_ids = self.publish_ids(ids, weights)
            self.publish_rows(tokens, global_scale)
            return kept_ids
        kept_ids = self._empty(*ids.shape, dtype=torch.int32)
        self._publish_tokens(tokens, global_scale, ids.contiguous(), weights.contiguous(), kept_ids)
        return kept_ids

    def publish_ids(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Publishes ids and weights; the plan's copy of ids (T, k) int32."""
        from padless.distributed.triton import publish

        s, state, layout = self._settings, self._state, self._state.layout
        kept_ids = self._empty(*ids.shape, dtype=torch.int32)
        self._launch(
            publish.publish_ids, self._grid(s.num_ranks * ceil_div(s.max_tokens * s.top_k, IDS_AT_ONCE)),
            state.pointers, state.counters, ids.contiguous(), weights.contiguous(), kept_ids,
            s.rank, ids.shape[0], s.num_experts, s.max_tokens * s.top_k, layout.listed, layout.ids, layout.weights,
            R=s.num_ranks, TOP_K=s.top_k, num_warps=WARPS,
        )  # fmt: skip
        return kept_ids

    def publish_rows(self, tokens: torch.Tensor, global_scale: torch.Tensor | None) -> None:
        """Quantizes and publishes tokens."""
        self._publish_tokens(tokens, global_scale, None, None, None)

    def publish_again(self, x: torch.Tensor) -> None:
        """Publishes x (T, H), as it is or in the gradients' format, for the plan of an earlier dispatch."""
        row_format = self._settings.gradient_rows(x)
        plain = row_format.is_plain
        self._publish(as_bytes(x) if plain else x, None, None, None, None, row_format, not plain)

    def receive(
        self, kept_ids: torch.Tensor, global_scale: torch.Tensor | None
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """Rows and plan of what all ranks have published."""
        if self.is_few:
            return self._receive_few(kept_ids, global_scale)
        found = self.sort()
        self.wait_for_rows()
        return self.fan_out(kept_ids, found, global_scale)

    def sort(self) -> Sorted:
        """Waits for all ranks and sorts their slots by local expert."""
        from padless.distributed.triton import receive

        s, state, layout = self._settings, self._state, self._state.layout
        table = s.max_tokens * s.top_k
        locals_ = self._empty(s.num_ranks * s.max_tokens, s.top_k, dtype=torch.int32)
        programs = self._grid(s.num_ranks * ceil_div(table, LOCALIZE_BLOCK))
        polls = self._wait(programs, WARPS, layout.listed, IDS)
        self._launch(
            receive.localize, programs,
            state.pointers, state.counters, state.status, self._placement.local_index, locals_,
            s.rank, s.num_experts, table, layout.listed, layout.aborted, layout.ids, self._limit,
            R=s.num_ranks, CLOCK=self._has_clock, POLLS=polls, BLOCK=LOCALIZE_BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return sort_slots(locals_, len(self._placement.local_experts))

    def wait_for_rows(self) -> None:
        """Waits for what all ranks publish, unless the launch that moves it does."""
        self._wait(self._programs_of_rows, WARPS, self._state.layout.published, ROWS)

    def fan_out(
        self, kept_ids: torch.Tensor, found: Sorted, global_scale: torch.Tensor | None
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """Rows and plan of sorted slots, after `wait_for_rows`."""
        plan = self._empty_plan(kept_ids, found.inverse)
        return self._fan_out(self._settings.row_format, plan, found, global_scale), plan

    def _receive_few(
        self, kept_ids: torch.Tensor, global_scale: torch.Tensor | None
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """`receive` in one launch."""
        from padless.distributed.triton import receive_few

        s, state, layout = self._settings, self._state, self._state.layout
        plan = self._empty_plan(kept_ids, self._empty(s.num_ranks * s.max_tokens, s.top_k, dtype=torch.int32))
        rows = self._empty_rows(s.row_format, plan.prob.shape[0])
        lanes, slots = max(power_of_2(s.top_k), 4), max(power_of_2(s.num_slots), 128)
        programs = s.num_ranks * s.max_tokens + max(ceil_div(len(plan.offs), lanes), 1)
        warps = 8 if slots > SLOTS_OF_FOUR_WARPS else 4
        polls = self._wait(programs, warps, layout.published, ROWS)
        self._launch(
            receive_few.receive_few, programs,
            state.pointers, state.counters, state.status, self._placement.local_index, plan.inverse, plan.offs,
            plan.overflow, plan.prob, rows.data, rows.integers,
            s.rank, s.num_experts, len(plan.offs), s.max_tokens, plan.prob.shape[0], *rows.scale_strides,
            layout.published, layout.aborted, layout.ids, layout.weights, layout.x, layout.record_bytes, self._limit,
            R=s.num_ranks, TOP_K=s.top_k, CODE_BYTES=s.row_format.code_bytes, SCALES=s.row_format.scale_columns,
            SCALE_BYTES=s.row_format.scale_itemsize, LANES=lanes, SLOTS=slots, CLOCK=self._has_clock,
            POLLS=polls, **self._how(), num_warps=warps,
        )  # fmt: skip
        return rows.tensor(s.row_format, global_scale), plan

    def receive_again(self, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """Rows of what all ranks have published again, by an earlier plan."""
        self.wait_for_rows()
        row_format = self._settings.gradient_rows(x)
        if not row_format.is_plain:
            return self._fan_out_gradients(plan)
        rows = self._fan_out(row_format, plan, None, None)
        assert isinstance(rows, torch.Tensor)
        return rows

    def send_back(
        self, rows: torch.Tensor, plan: ExpertPlan, prob: torch.Tensor | None, dprob: torch.Tensor | None
    ) -> None:
        """Stores the sum of every token's rows here, or each of these rows, at the token's origin."""
        from padless.distributed.triton import send_back

        s, state, layout = self._settings, self._state, self._state.layout
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        items = s.num_ranks * s.max_tokens * ceil_div(s.hidden, COLUMNS)
        warps = 2 if items > ITEMS_OF_TWO_WARPS * self._programs else 4
        programs = self._grid(items)
        polls = layout.halves == 2 or self._wait(programs, warps, layout.finished, SUMS, halves=1)
        self._launch(
            send_back.fan_in, programs,
            state.pointers, state.counters, state.status, plan.inverse, rows,
            None if s.sums == "slots" else prob, dprob,
            s.rank, s.max_tokens, plan.prob.shape[0], rows.stride(0),
            layout.summed, layout.finished, layout.aborted, layout.slots, layout.part, self._limit,
            R=s.num_ranks, TOP_K=s.top_k, H=s.hidden, PART=self._part, PART_BYTES=s.partial.itemsize,
            BY_SLOT=s.sums == "slots", HALVES=layout.halves, CLOCK=self._has_clock,
            POLLS=polls, BLOCK=COLUMNS, **self._how(early=not polls or ahead.current() is not None),
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip

    def finish(
        self,
        plan: ExpertPlan,
        *,
        with_slots: bool,
        weighted: bool = False,
        shared: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums of what all ranks have sent back, and values by slot.

        weighted, shared, out_dtype: of sums of slots, which are weighted here.
        """
        from padless.distributed.triton import send_back
        from padless.moe.triton.combine import DTYPES

        s, state, layout = self._settings, self._state, self._state.layout
        tokens, by_slot = plan.ids.shape[0], s.sums == "slots"
        dtype = out_dtype or s.partial
        out = self._empty(tokens, s.hidden, dtype=dtype)
        weights = plan.weights.contiguous() if by_slot and weighted and plan.weights is not None else None
        if shared is not None and shared.stride(1) != 1:
            shared = shared.contiguous()
        slots = self._empty(tokens, s.top_k, dtype=torch.float32) if with_slots else None
        programs = self._grid(tokens * ceil_div(s.hidden, COLUMNS), SHARE_OF_FINISH)
        polls = self._wait(programs, WARPS, layout.summed, SUMS, halves=layout.halves)
        self._launch(
            send_back.finish, programs,
            state.pointers, state.counters, state.status, plan.ids, self._placement.rank_of, weights, shared,
            out, slots, s.rank, tokens, s.max_tokens, s.num_experts, 0 if shared is None else shared.stride(0),
            layout.summed, layout.finished, layout.aborted, layout.slots, layout.part, self._limit,
            R=s.num_ranks, TOP_K=s.top_k, H=s.hidden, PART=self._part, PART_BYTES=s.partial.itemsize,
            OUT=DTYPES[dtype], BY_SLOT=by_slot, HALVES=layout.halves, CLOCK=self._has_clock,
            POLLS=polls, BLOCK=COLUMNS, **self._how(), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return out, slots

    # --- parts ---------------------------------------------------------------------------------------------

    def _publish_tokens(
        self,
        tokens: torch.Tensor,
        global_scale: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        kept_ids: torch.Tensor | None,
    ) -> None:
        row_format = self._settings.row_format
        if row_format.format == FP8_BLOCK:
            x = tokens if tokens.stride(1) == 1 else tokens.contiguous()
            self._publish(x, None, ids, weights, kept_ids, row_format, True)
        else:
            x, scale = row_format.parts(tokens, global_scale)
            self._publish(x, scale, ids, weights, kept_ids, row_format, False)

    def _publish(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        kept_ids: torch.Tensor | None,
        row_format: RowFormat,
        quantizes: bool,
    ) -> None:
        from padless.distributed.triton.publish import publish
        from padless.quantization.triton import casts

        s, state, layout = self._settings, self._state, self._state.layout
        scale_bytes = 0 if scale is None else scale.shape[1]
        self._launch(
            publish, self._grid(max(x.shape[0], s.num_ranks), SHARE_OF_PUBLISH),
            state.pointers, state.counters, x, scale if scale_bytes else None, ids, weights, kept_ids,
            s.rank, x.shape[0], x.stride(0), s.num_experts, s.max_tokens * s.top_k, s.max_tokens,
            layout.published, layout.ids, layout.weights, layout.scales, layout.x, layout.record_bytes,
            R=s.num_ranks, TOP_K=s.top_k, H=s.hidden, QUANTIZE=quantizes, LIFT=row_format.lift,
            PUSH_SCALES=quantizes and ids is None and row_format.placed_columns > 0,
            CODE_BYTES=row_format.code_bytes, SCALE_BYTES=scale_bytes,
            HARDWARE_CAST=casts.casts_in_hardware(self._device), num_warps=WARPS,
            **(self._how() if self.is_few else {"PROGRAMMATIC": 0}),
        )  # fmt: skip

    def _fan_out(
        self, row_format: RowFormat, plan: ExpertPlan, found: Sorted | None, global_scale: torch.Tensor | None
    ) -> BlockScaledTensor | torch.Tensor:
        """Rows by the plan; with sorted slots, the plan's offs, prob and overflow too."""
        from padless.distributed.triton import receive

        s, state, layout = self._settings, self._state, self._state.layout
        rows = self._empty_rows(row_format, plan.prob.shape[0])
        placed = row_format.placed_columns
        all_offs, tokens = (None, None) if found is None else (found.offs, found.tokens)
        self._launch(
            receive.fan_out, self._programs_of_rows,
            state.pointers, state.counters, state.status, plan.inverse, all_offs, plan.offs,
            plan.overflow, plan.prob, rows.data, rows.integers, tokens if placed else None,
            s.rank, s.max_tokens, plan.prob.shape[0], len(plan.offs), *rows.scale_strides,
            layout.published, layout.aborted, layout.weights, layout.scales, layout.x, layout.record_bytes,
            self._limit, R=s.num_ranks, TOP_K=s.top_k, CODE_BYTES=row_format.code_bytes,
            SCALES=0 if placed else row_format.scale_columns, PLACED=placed,
            SCALE_BYTES=row_format.scale_itemsize, GROUPS=self._groups, CLOCK=self._has_clock,
            POLLS=self._polls(self._programs_of_rows), num_warps=WARPS,
        )  # fmt: skip
        return rows.tensor(row_format, global_scale)

    def _fan_out_gradients(self, plan: ExpertPlan) -> torch.Tensor:
        from padless.distributed.triton.receive_gradients import fan_out_gradients
        from padless.quantization.triton import casts

        s, state, layout = self._settings, self._state, self._state.layout
        rows = self._empty(plan.prob.shape[0], s.hidden, dtype=s.partial)
        self._launch(
            fan_out_gradients, self._programs_of_rows,
            state.pointers, state.counters, state.status, plan.inverse, rows,
            s.rank, s.max_tokens, len(rows), layout.published, layout.aborted, layout.x, layout.record_bytes,
            self._limit, R=s.num_ranks, TOP_K=s.top_k, H=s.hidden, OUT=self._part,
            HARDWARE_CAST=casts.casts_in_hardware(self._device), CLOCK=self._has_clock,
            POLLS=self._polls(self._programs_of_rows), num_warps=WARPS,
        )  # fmt: skip
        return rows

    def _wait(self, programs: int, warps: int, cells: int, counter: int, *, halves: int = 2) -> bool:
        """Whether so many programs wait for all ranks themselves; a launch of one that does goes ahead of more."""
        from padless.distributed.triton.cells import await_ranks

        s, state, layout = self._settings, self._state, self._state.layout
        polls = self._polls(programs, warps)
        if not polls:
            self._launch(
                await_ranks, 1,
                state.pointers, state.counters, state.status, s.rank, cells, layout.aborted, self._limit,
                R=s.num_ranks, COUNTER=counter, HALVES=halves, CLOCK=self._has_clock, **self._how(), num_warps=1,
            )  # fmt: skip
        return polls

    def _polls(self, programs: int, warps: int = WARPS) -> bool:
        return programs * warps <= self._most_polling

    def _empty_plan(self, kept_ids: torch.Tensor, inverse: torch.Tensor) -> ExpertPlan:
        capacity = int(self._settings.capacity)
        return ExpertPlan(
            self._empty(len(self._placement.local_experts), dtype=torch.int32),
            self._empty(capacity, dtype=torch.float32),
            inverse,
            kept_ids,
            self._empty(dtype=torch.int32),
        )

    def _empty_rows(self, row_format: RowFormat, capacity: int) -> Rows:
        data = self._empty(capacity, row_format.code_bytes, dtype=torch.uint8)
        columns = row_format.scale_columns
        if row_format.is_plain:
            return Rows(data, None)
        if row_format.scale_major == "mn":
            return Rows(data, empty_mn_major(capacity, columns, self._device))
        dtype = torch.uint8 if row_format.scale_itemsize == 1 else torch.float32
        return Rows(data, self._empty(capacity, columns, dtype=dtype))

    @property
    def _programs_of_rows(self) -> int:
        return self._grid(self._settings.num_ranks * self._settings.max_tokens)

    @property
    def _groups(self) -> int:
        return power_of_2(len(self._placement.local_experts))

    def _grid(self, items: int, times: float = 1) -> int:
        """Programs for so many pieces of work: no more than there are pieces, at least one, which signals."""
        return max(min(items, int(times * self._programs)), 1)

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        from padless.quantization.triton.launches import launch

        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            launch(kernel, programs)(*arguments, **options)

    def _how(self, *, early: bool = True) -> dict[str, int]:
        """Options of a launch that may begin before the kernel ahead has ended."""
        from padless.quantization.triton.launches import programmatic

        return programmatic(self._device, early=early)

    @property
    def _has_clock(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _part(self) -> Any:
        import triton.language as tl

        return tl.float32 if self._settings.partial == torch.float32 else tl.bfloat16

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def power_of_2(value: int) -> int:
    """Smallest power of two that is not below value."""
    return 1 << max(value - 1, 0).bit_length()
