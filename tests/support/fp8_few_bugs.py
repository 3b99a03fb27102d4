"""The planted bugs of sm90_fp8_few: each an edit of its source that a run must find."""

from __future__ import annotations

from dataclasses import replace

from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from support.emulator_bugs import WAIT_EMPTY, WAIT_FULL, Bug

FOLDER = "sm90_fp8_few/"
MAIN = FOLDER + "sm90_fp8_few_grouped_gemm.cu"
LOAD, MULTIPLY, STORAGE = FOLDER + "load.cuh", FOLDER + "multiply.cuh", FOLDER + "storage.cuh"
STORE = "device/sm90/transposed_store.cuh"
NARROW = Sm90Fp8Config(block_m=16, block_n=128, num_stages=3, few_rows=True)
WIDE = replace(NARROW, block_m=32, block_n=256)
TALL = replace(WIDE, block_m=64)  # one K block at a time: its sums leave no registers for a second
SIZES = (5, 0, 39, 1)  # rows that start at no multiple of 4, none, three tiles, one
RELEASE = "if (lane < blocks) mbarrier_arrive("
WAIT_READ = "if (issuer) cp_async_bulk_wait_group_read_all();"


def _bug(
    name: str, reports: str, file: str, old: str, new: str = "", config: Sm90Fp8Config = NARROW, nth: int = 0
) -> Bug:
    return Bug(name, reports, (file, old, new), config, SIZES, 200, 560, nth=nth)  # 5 K blocks


BUGS: tuple[Bug, ...] = (
    # ---- waits and fences
    _bug("full barrier not waited for", "race", MULTIPLY, WAIT_FULL),
    _bug("the second K block's full barrier not waited for", "race", MULTIPLY, WAIT_FULL, "if (b == 0) " + WAIT_FULL),
    _bug("empty barrier not waited for", "race mbarrier", LOAD, WAIT_EMPTY),
    _bug("no wgmma.fence", "missing-wgmma-fence", MULTIPLY, "wgmma_fence();"),
    _bug("products not waited for", "register-in-flight", MULTIPLY, "wgmma_wait_group<0>();"),
    _bug("the second K block's products not waited for", "register-in-flight", MULTIPLY, "wait_group<0>",
        "wait_group<1>"),
    _bug("no fence after mbarrier init", "mbarrier mbarrier-init", "device/queue_start.cuh", "fence_mbarrier_init();"),
    _bug("no proxy fence before the store", "missing-proxy-fence", STORE, "fence_proxy_async_shared();"),
    _bug("no barrier before the store", "race missing-proxy-fence", STORE, "bar_sync(1 + warpgroup, 128);", nth=1),
    _bug("staging written while the last store reads it", "race", STORE, WAIT_READ),
    _bug("CTA ends before its stores have read", "exit", MAIN, "cp_async_bulk_wait_group_all();", ";"),
    # ---- the ring
    _bug("a stage given back before its scales are read", "race", MULTIPLY, "__syncwarp();"),
    _bug("a stage given back before its products", "race", MULTIPLY, "wgmma_commit_group();",
        "if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[stage])); wgmma_commit_group();", config=TALL),
    _bug("the second stage is not given back", "deadlock", MULTIPLY, RELEASE, "if (lane < 1) mbarrier_arrive("),
    _bug("the first stage is given back twice", "race deadlock mbarrier", MULTIPLY,
        "lane == 0 ? stages[0] : stages[AT_ONCE - 1]", "stages[0]"),
    _bug("an odd last K block gives back two stages", "race deadlock mbarrier", MULTIPLY, RELEASE,
        "if (lane < AT_ONCE) mbarrier_arrive("),
    _bug("more bytes awaited than loaded", "deadlock", STORAGE, "+ SFA_COPY_FLOATS * 4;", "+ SFA_STAGE_FLOATS * 4;"),
    # ---- arithmetic: the output alone tells
    _bug("scales of the tokens before", "", MULTIPLY, "(tile.row & 3) + lane % 4 * 2", "lane % 4 * 2"),
    _bug("scale of a pair's other token", "", MULTIPLY, "[i / 4 * 2 + i % 2]", "[i / 4 * 2 + 1 - i % 2]"),
    _bug("scales of the weights' first block", "", MULTIPLY, "tile.column + row;", "row;"),
    _bug("scale of the K block before", "", MULTIPLY, "now[u], of_lane)", "now[u], of_lane & ~1)"),
    _bug("scales of another group", "", MULTIPLY, "static_cast<long long>(tile.group)", "static_cast<long long>(0)"),
    _bug("sums not promoted from zero", "", MULTIPLY, "k != 0);", "true);"),
    _bug("the second m64 multiplied with the first's weights", "", MULTIPLY, "weights + u * (WGMMA_M * BLOCK_K / 16)",
        "weights", config=WIDE),
    _bug("columns of the other warpgroup", "", MAIN, "(warpgroup * M64S + u) * WGMMA_M",
        "((1 - warpgroup) * M64S + u) * WGMMA_M"),
    _bug("a group's rows stored past its end", "", STORE, "tile.row + tile.rows);", "tile.row + BLOCK_M);"),
)  # fmt: skip
