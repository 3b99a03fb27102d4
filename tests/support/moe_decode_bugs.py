"""The planted bugs of the decoding layer's kernel: each an edit of its source, and what must be found when it runs."""

from __future__ import annotations

from padless.emulator.run.machine import Machine
from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
from support.planted_bugs import Bug

FOLDER = "sm90_moe_decode/"
MAIN, COMMON, ROUTE, SHARE, LOAD, CODES, MULTIPLY, CONSUME = (
    FOLDER + name
    for name in (
        "sm90_moe_decode.cu", "common.cuh", "route.cuh", "share.cuh", "load.cuh", "codes.cuh", "multiply.cuh",
        "consume.cuh",
    )
)  # fmt: skip

WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[pipeline][at[n].stage]), at[n].phase);"
WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[pipeline][position.stage]), position.phase ^ 1);"
BAR = "bar_sync(CODES_BARRIER, NUM_CONSUMERS);"
FENCE = "fence_proxy_async_shared();"
COUNTED = "fence_acq_rel_gpu();  // what this CTA"

# Waits that do not end trap. Without it the emulator has to go on until it is sure of that.
IMPATIENT = MoeDecodeConfig(spin_limit=200_000)


class Held(Machine):
    """Where another kernel holds the other multiprocessors: no more CTAs run at once than the schedule says."""

    def _may_start(self) -> bool:
        return len(self.clusters) < self.schedule.resident


BUGS: tuple[Bug, ...] = (
    # ---- from CTA to CTA, and from launch to launch
    Bug("hidden rows are not waited for", "", (CODES, "if (__all_sync(0xffffffff, is_whole)) break;", "break;", CODES,
        "wait_for_hidden(hidden, blocks, warp, lane);", ""), seeds=8),
    Bug("a word is no complement", "",
        (CONSUME, "word = ~__float_as_uint(gate[n]);", "word = __float_as_uint(gate[n]);")),
    Bug("no share of another is taken", "deadlock fault", (SHARE, "if (looks < PATIENCE)", "if (true)")),
    Bug("old words stay", "", (SHARE, "= make_uint4(0, 0, 0, 0);", ".x += 0;"), quick=True),
    Bug("some old words stay", "", (SHARE, "shared.old_words / 4;", "shared.old_words / 8;")),
    Bug("launches are not counted", "", (SHARE, "&control.launches, launches + 1", "&control.launches, launches")),
    Bug("shares are not put back", "", (SHARE, "st_relaxed_gpu(&control.shares, 0);", "")),
    Bug("no fence before being counted", "race", (SHARE, COUNTED, "//"), seeds=8),
    Bug("a fence of the CTA before being counted", "race",
        (SHARE, COUNTED, 'asm volatile("fence.acq_rel.cta;" ::: "memory");  //'), seeds=8),
    Bug("the first to finish puts shares back", "", (SHARE, "== shares - 1)", "== 0)")),
    Bug("the buffers' distance is this launch's", "",
        (COMMON, "(launch & 1) * room;", "(launch & 1) * (slots() * i);")),
    Bug("no griddepcontrol.wait", "grid-dependency", (MAIN, "griddepcontrol_wait();", ""), quick=True),
    # ---- inside of a CTA
    Bug("no proxy fence behind codes of x", "missing-proxy-fence", (MAIN, FENCE, ""), quick=True),
    Bug("no proxy fence behind codes of hidden rows", "missing-proxy-fence", (MAIN, FENCE, ""), nth=1),
    Bug("codes of x are not waited for", "race missing-proxy-fence uninitialised-shared", (MAIN, BAR, "")),
    Bug("codes of hidden rows over those of x", "race", (MAIN, BAR, ""), nth=1),
    Bug("results of a stripe are not waited for", "race uninitialised-shared", (CONSUME, BAR, "")),
    Bug("results in one place", "race", (CONSUME, "parity ^= 1;", ""), seeds=8),
    Bug("a stage is not waited for", "race", (MULTIPLY, WAIT_FULL, "")),
    Bug("a stage is loaded while it is read", "race", (LOAD, WAIT_EMPTY, "")),
    Bug("routing is not waited for by consumers", "race uninitialised-shared",
        (MAIN, "mbarrier_wait(routed, 0); first_product", "first_product")),
    Bug("routing is not waited for by producers", "race uninitialised-shared",
        (MAIN, "mbarrier_wait(routed, 0); load_weights", "load_weights")),
    Bug("a stage is given back too early", "race", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    # ---- arithmetic
    Bug("amax over half of a block", "", (CODES, "distance < LANES;", "distance < LANES / 2;"), quick=True),
    Bug("up with gate's scales", "", (CONSUME, "(blocks + up) *", "(blocks + gate) *")),
    Bug("slots in another order", "",
        (COMMON, "slot = token * p.top_k + first + j;", "slot = token * p.top_k + p.top_k - 1 - first - j;")),
    Bug("shared first", "", (COMMON, "float total = 0.0f;", "float total = shared_value; shared_value = 0.0f;")),
    Bug("a fused sum of slots", "",
        (COMMON, "__fadd_rn(total, __fmul_rn(weight[j], y[j]));", "fmaf(weight[j], y[j], total);")),
    Bug("ids beyond the experts", "", (ROUTE, "id >= 0 && id < p.experts ?", "id >= 0 ?")),
    Bug("a row for all tokens of an expert", "",
        (ROUTE, "__popc(shared.tokens_of[first + lane])", "min(1, __popc(shared.tokens_of[first + lane]))")),
    Bug("the scales of the K block before", "", (MULTIPLY, "of_lane = (kb + n) % 32;", "of_lane = kb % 32;")),
)  # fmt: skip
