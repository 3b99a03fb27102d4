"""Reasons why mutants of this library's kernels that nothing notices change nothing, by instruction, change and place.

The first rule that fits a survivor counts. A place is a regular expression on the source position, inlining included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reason:
    """Regular expressions that begin at the start of instruction and change, and are found anywhere in the place."""

    instruction: str
    change: str
    place: str
    text: str

    def fits(self, survivor: dict[str, Any]) -> bool:
        return (
            re.match(self.instruction, survivor["instruction"]) is not None
            and re.match(self.change, survivor["change"]) is not None
            and re.search(self.place, survivor["source"]) is not None
        )


REASONS = (
    Reason(
        r"mbarrier\.arrive\.expect_tx",
        r"\.release relaxed",
        "",
        "It announces bytes and has nothing of its own to publish: what the copy writes is published by the "
        "copy's completion.",
    ),
    Reason(
        r"mbarrier\.arrive\.release",
        r"\.release relaxed",
        r"tile_queue\.cuh:52\b",
        "The first tile's slot is read behind a barrier of the CTA or the cluster, or by the warp that filled it.",
    ),
    Reason(
        r"mbarrier\.arrive\.release",
        r"\.release relaxed",
        r"wgrad/load\.cuh|plain/load\.cuh",
        "It asks the scheduler for the next tile and hands no data over.",
    ),
    Reason(
        r"mbarrier\.arrive\.release",
        r"\.cluster narrowed",
        r"tile_queue\.cuh:79\b",
        "The loop over the CTAs is unrolled, and this is the arrival in the CTA's own barrier.",
    ),
    Reason(
        r"mbarrier\.arrive\.release",
        r"\.(release relaxed|cluster narrowed)",
        r"multiply\.cuh|tile_queue\.cuh:15[79]\b|storage\.cuh|promote\.cuh|piece_store\.cuh:116\b|sm100_mxfp8_gemm\.cu:2\d\d\b|"
        r"sm100_grouped_gemm\.cu:29\d\b",
        "It gives back what was only read: an arrival says that reads are over, and asynchronous operations "
        "that were waited for, whatever its order.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"not waited for|\.acquire relaxed|\.cluster narrowed",
        r"tile_queue\.cuh:6[13]\b",
        "Before a slot of the queue is written its barrier is waited for twice, in front of the draw and "
        "behind it: either wait is enough, and it follows reads alone.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"not waited for|\.acquire relaxed|\.cluster narrowed",
        r"tile_queue\.cuh:1(68|70)\b",
        "The tile is known to be there: a first one, which the warp queued itself or a barrier of the CTA "
        "followed, or that of a store warp, to which the consumers hand over pieces after they have waited "
        "for the next tile.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"\.acquire relaxed",
        r"tile_queue\.cuh:104\b",
        "It is told that a tile is wanted and takes no data over.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"\.acquire relaxed",
        r"multiply\.cuh:(27|14)\b|bf16_plain_grouped_gemm\.cu",
        "A warpgroup without a row keeps step with the ring; it reads nothing of the stage.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        "not waited for",
        r"sm90_fp8/multiply\.cuh:27\b",
        "A warpgroup without a row keeps step with the ring, and one wait of an unrolled four is left out: "
        "its neighbours keep it within the phase.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"\.(acquire relaxed|cluster narrowed)",
        r"sm100_grouped/(sm100_grouped_gemm\.cu|promote)|sm100_mxfp8_gemm\.cu:[23]\d\d\b|sm100_mxfp8_wgrad\.cu:124\b",
        "Tensor memory behind it is ordered by tcgen05.fence::after_thread_sync, which the ISA lets follow a "
        "relaxed wait.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"\.acquire relaxed",
        r"sm100_mxfp8_gemm\.cu:179\b",
        "It waits for the other CTA's last signals before the end and takes no data over.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"not waited for|\.acquire relaxed",
        r"sm100_grouped/load\.cuh:110\b",
        "The last waits of a loader, so that nothing arrives at a CTA that is gone: the store warps wait for the last "
        "tile's commit, which comes after those of its stages, and a barrier of the CTA or the pair follows.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        "not waited for",
        r"sm100_grouped/load\.cuh:129\b",
        "The second of a warp's two waits for the same phase, where it lays down the scales of both operands.",
    ),
    Reason(
        r"mbarrier\.try_wait",
        r"\.(acquire relaxed|cluster narrowed)",
        r"load\.cuh|tokens\.cuh|piece_store\.cuh:54\b|sm100_mxfp8_gemm\.cu:140\b|sm100_mxfp8_wgrad\.cu:(50|80)\b",
        "It waits to write over what was only read: an arrival says that reads are over, whatever the order "
        "of either side.",
    ),
    Reason(
        r"fence\.mbarrier_init",
        "deleted",
        r"queue_start\.cuh|sm100_grouped_gemm\.cu:393\b",
        "The queue's barriers are used by threads of the CTA alone, behind a barrier of the CTA; the fence is"
        " for the async proxy and other CTAs.",
    ),
    Reason(
        r"fence\.mbarrier_init",
        "deleted",
        "sm90_mxfp8",
        "The same thread executes fence.proxy.async behind it (next line but few), which serves as well.",
    ),
    Reason(
        r"fence\.proxy\.async",
        "deleted",
        "sm90_mxfp8_grouped_gemm",
        "Behind the barrier of the CTA the scale warps execute fence.proxy.async before the products that "
        "read these bytes: a proxy fence anywhere on the way counts.",
    ),
    Reason(
        r"fence\.proxy\.async",
        "deleted",
        r"piece_store\.cuh",
        "The copy of the code for no tile, with which the consumers begin: its buffers are never stored.",
    ),
    Reason(
        r"wgmma\.fence",
        "deleted",
        r"bf16_multiply\.cuh:(54|60)\b|fp8_wgrad/multiply\.cuh:(66|74)\b",
        "Between products of one shape that add to the same registers, which nothing touches in between, the "
        "ISA orders by itself, and behind the last of them none is needed; the compiler puts these fences in where "
        "they are not written.",
    ),
    Reason(
        r"wgmma\.(commit|wait)_group",
        "deleted|waits for one",
        r"sm90_bf16/multiply\.cuh:(71|88)\b",
        "In the middle of a stage: these products are waited for with those behind them, before their tokens are "
        "given back. The fragments made meanwhile are other registers in PTX, and ptxas keeps those of products under "
        "way.",
    ),
    Reason(
        r"tcgen05\.fence::after",
        "deleted",
        r"sm100_mxfp8_gemm\.cu:2\d\d\b|sm100_grouped_gemm\.cu:24[18]\b",
        "Another one follows before the first product of the tile; behind a wait for a stage of shared memory"
        " none is needed.",
    ),
    Reason(
        r"tcgen05\.fence::after",
        "deleted",
        r"sm100_mxfp8_wgrad\.cu:96\b",
        "Behind a wait for a stage of shared memory none is needed: until the tile is done this thread's copies and "
        "products alone use tensor memory.",
    ),
    Reason(
        r"tcgen05\.commit",
        "deleted",
        r"sm100_mxfp8_wgrad\.cu:114\b",
        "That of a last, odd block of tokens: a CTA has one tile, so that its stage is not filled again, and the commit "
        "that says that the tile is done covers these products.",
    ),
    Reason(
        r"tcgen05\.fence",
        "deleted",
        r"sm100_mxfp8_gemm\.cu:(378|384)\b|sm100_grouped_gemm\.cu:44[06]\b|sm100_mxfp8_wgrad\.cu:17[57]\b",
        "The fences at the kernel's start: no tensor memory has been touched yet.",
    ),
    Reason(
        r"tcgen05\.fence",
        "deleted",
        r"sm100_mxfp8_gemm\.cu:(397|404)\b|sm100_grouped_gemm\.cu:47[17]\b|sm100_mxfp8_wgrad\.cu:19[47]\b",
        "They stand around the barrier before tensor memory is freed, which is no asynchronous operation: loads were "
        "waited for by their warps, products by the store warps.",
    ),
    Reason(
        r"griddepcontrol\.wait",
        "deleted",
        "",
        "The warp that loads has waited, and a barrier of the CTA follows before anybody else touches global "
        "memory: what the wait makes visible is visible to the grid.",
    ),
    Reason(
        r"bar\.sync",
        "deleted",
        r"sm90_\w+_grouped_gemm\.cu",
        "It publishes a table for outputs whose scales begin a tile with every group, which this epilogue "
        "does not have; with such an output the mutant is killed (race).",
    ),
    Reason(
        r"bar\.sync",
        "deleted",
        "",
        "Another barrier of all threads, or of the cluster, stands between what was written in front of it and "
        "whoever reads that.",
    ),
    Reason(
        r"barrier\.cluster\.arrive",
        "relaxed",
        "",
        "It publishes mbarriers, for which fence.mbarrier_init and a relaxed arrival are enough.",
    ),
    Reason(
        r"cp\.async\.bulk\.wait_group",
        "deleted|waits for one",
        r"sm90_bf16_grouped_gemm\.cu:192\b",
        "With NVFP4 rows for an output the kernel has no bulk store: there is nothing to wait for.",
    ),
    Reason(
        r"cp\.async\.bulk\.wait_group",
        "waits for reads",
        "",
        "The last one of a CTA: what the copies write is visible when the grid has ended; only the reads of "
        "shared memory have to be over before.",
    ),
    Reason(
        r"cp\.async\.wait_group",
        "",
        "",
        "The last one of a CTA: nobody reads what these copies bring, which are those of a tile that is not there.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        r"tile_queue\.cuh:51\b",
        "A barrier of the CTA or the cluster follows before the tile is read.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        r"queue_start\.cuh:30\b|sm100_grouped_gemm\.cu:(395|422)\b|sm90_fp8_grouped_gemm\.cu:175\b|"
        r"sm90_bf16_grouped_gemm\.cu:253\b|sm90_mxfp8_grouped_gemm\.cu:157\b|sm100_mxfp8_gemm\.cu:373\b|"
        r"sm100_mxfp8_wgrad\.cu:170\b",
        "One lane has made barriers or prefetched in front of it. The barriers are used behind a barrier of the CTA, or "
        "by the warp itself behind another bar.warp.sync.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        r"multiply\.cuh|storage\.cuh|sm100_(grouped|mxfp8)_gemm\.cu:2\d\d",
        "It stands between the warp's reads and lane 0's arrival. The warp has executed an instruction "
        "together since those reads, so that they are over: a warp issues in order.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        r"token_tiles\.cuh",
        "A vote of the warp, or a barrier of the CTA, does the same between these accesses.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        r"quant_(store|values)\.cuh",
        "One of two between the same accesses, of which either is enough; or no memory passes from lane to lane.",
    ),
    Reason(
        r"bar\.warp\.sync",
        "deleted",
        "",
        "No memory passes from lane to lane: it brings lanes together that a branch has parted. The emulator "
        "lets them meet where their ways join, as the code that ptxas makes does.",
    ),
)


# Of two ranks' launches as one. In another pair the part that a receiver has here is the sender's, and the reverse.
EXCHANGE_REASONS = (
    Reason(
        r"atom\.global\.sys\.release\.exch",
        r"\.release relaxed|\.sys narrowed",
        r"cells\.py:154, receiver",
        "Not observable here: no launch of the pair waits for it. The same signal to another rank is killed in the pair "
        "in which this kernel is the sender.",
    ),
    Reason(
        r"atom\.global\.sys\.acquire\.add|bar\.sync",
        r"\.acquire relaxed|deleted",
        r"cells\.py:109, sender",
        "Not observable here: what a sender waits for has come before the launch. The same wait is killed in the pair "
        "in which this kernel is the receiver.",
    ),
    Reason(
        r"bar\.sync",
        "deleted",
        r"cells\.py:129",
        "The poll hands what it acquired to all threads through shared memory and a barrier, which orders them "
        "already.",
    ),
    Reason(
        r"bar\.sync|atom\.global\.sys\.acq_rel\.add",
        r"deleted|\.acq_rel relaxed",
        r"cells\.py:139, receiver",
        "Not observable here: it orders this launch before a signal that no launch of the pair waits for. It is killed "
        "in the pair in which this kernel is the sender.",
    ),
    Reason(
        r"bar\.sync",
        "deleted",
        r"cells\.py:139, sender",
        "Not observable here: barriers between the stores of ids and of weights order the ids as well, and no launch of "
        "the pair reads weights. The same barrier is killed in the pairs of `publish`.",
    ),
)


def reason_of(survivor: dict[str, Any], rules: tuple[Reason, ...] = REASONS) -> Reason | None:
    """The first that fits, None for a survivor that nothing explains."""
    return next((reason for reason in rules if reason.fits(survivor)), None)
