"""The planted bugs of the MXFP8 weight-gradient kernel: each an edit of its source, and what must be found."""

from __future__ import annotations

from support.planted_bugs import Bug

FOLDER = "sm100_mxfp8_wgrad/"
MAIN, STORAGE = FOLDER + "sm100_mxfp8_wgrad.cu", FOLDER + "storage.cuh"
GRADIENT = "device/sm100/gradient.cuh"
WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
SCALES_WAIT = "mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);"


BUGS: tuple[Bug, ...] = (
    # ---- what is multiplied
    Bug(
        "the next group's tokens are multiplied",
        (),
        ((STORAGE, "if (end - token >= BLOCK_T)", "if (true)"),),
        quick=True,
    ),
    Bug(
        "the ragged map ends a token late",
        (),
        ((STORAGE, "RAGGED_B - (end - token), end, RAGGED_B", "RAGGED_B - (end - token) - 1, end + 1, RAGGED_B"),),
    ),
    Bug(
        "a K step too few",
        (),
        (
            (
                STORAGE,
                "(tokens - block * BLOCK_T + MMA_T - 1) / MMA_T",
                "(tokens - block * BLOCK_T + MMA_T - 2) / MMA_T",
            ),
        ),
    ),
    Bug("A is read K-major", (), ((STORAGE, "A_IS_MN_MAJOR = 1u << 15", "A_IS_MN_MAJOR = 0"),), quick=True),
    Bug("B is read K-major", (), ((STORAGE, "B_IS_MN_MAJOR = 1u << 16", "B_IS_MN_MAJOR = 0"),)),
    Bug("steps of 16 tokens", (), ((STORAGE, "STEP_BYTES = MMA_T * TILE", "STEP_BYTES = MMA_T / 2 * TILE"),)),
    Bug("the scales of the first step for all", (), ((MAIN, "SHAPE | scale_ids(step)", "SHAPE | scale_ids(0)"),)),
    Bug(
        "scales counted from the tokens of all groups before",
        (),
        ((STORAGE, "first_scales = before * STEPS", "first_scales = start / MMA_T"),),
        quick=True,
    ),
    Bug("scales of A for B", (), ((MAIN, "sfb, n_columns, tile.column", "sfa, n_columns, tile.column"),)),
    Bug(
        "scales of the block before", (), ((MAIN, "feature + lane, block + 1, exist", "feature + lane, block, exist"),)
    ),
    Bug("the first 32 features' scales for all", (), ((MAIN, "feature + 32 * j", "feature"),)),
    Bug(
        "the last step's scales for all",
        (),
        ((MAIN, "number = block * STEPS + step < exist", "number = block * STEPS + step < 1"),),
    ),
    Bug(
        "features 32 apart in the wrong order",
        (),
        ((MAIN, "words[0], words[1], words[2], words[3]", "words[1], words[0], words[2], words[3]"),),
    ),
    Bug(
        "first products added to what was there",
        ("uninitialised-tensor-memory",),
        ((MAIN, "block != 0 || step != 0", "true"),),
    ),
    Bug("every stage begins anew", (), ((MAIN, "block != 0 || step != 0", "step != 0"),)),
    # ---- what is stored
    Bug("columns of another tile", (), ((STORAGE, "in_group % across * TILE", "0 * TILE"),)),
    Bug("first microbatch accumulating", (), ((GRADIENT, "if constexpr (ACCUMULATE)", "if constexpr (true)"),)),
    Bug("a later microbatch stores", (), ((GRADIENT, "if constexpr (ACCUMULATE)", "if constexpr (false)"),), onto=True),
    Bug("empty groups get zeros added", (), ((MAIN, "} else if (ACCUMULATE) {", "} else if (false) {"),), onto=True),
    Bug("empty groups are not stored", (), ((MAIN, "} else if (ACCUMULATE) {", "} else if (true) {"),)),
    Bug("rows of the next group are stored", (), ((GRADIENT, "if (row >= d.n_rows) return;", ""),)),
    # ---- waits, arrivals and fences
    Bug(
        "full barrier not waited for",
        ("race",),
        ((MAIN, "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);", ""),),
        quick=True,
    ),
    Bug("empty barrier not waited for", ("race", "mbarrier"), ((MAIN, WAIT_EMPTY, ""),)),
    Bug("scales written before they were read", ("race", "mbarrier"), ((MAIN, SCALES_WAIT, ""),)),
    Bug(
        "no proxy fence behind the scales",
        ("missing-proxy-fence",),
        ((MAIN, "fence_proxy_async_shared();", ""),),
        quick=True,
    ),
    Bug(
        "scales arrive before all lanes have stored",
        ("race", "missing-proxy-fence"),
        ((MAIN, "__syncwarp(); if (lane == 0)", "if (lane == 0)"),),
    ),
    Bug("stage never released", ("deadlock",), ((MAIN, "tcgen05_commit(shared_address(&shared.empty[stage]));", ""),)),
    Bug(
        "store does not wait",
        ("race", "tensor-memory", "uninitialised-tensor-memory"),
        ((MAIN, "mbarrier_wait(shared_address(&shared.done), 0);", ""),),
    ),
    Bug("loads from tensor memory not waited for", ("register-in-flight",), ((MAIN, "tcgen05_wait_ld();", ""),)),
    Bug("no fence after mbarrier init", ("mbarrier", "mbarrier-init"), ((MAIN, "fence_mbarrier_init();", ""),)),
    Bug(
        "expect_tx forgets B",
        ("race", "mbarrier", "deadlock"),
        ((MAIN, "full, 2 * OPERAND_BYTES", "full, OPERAND_BYTES"),),
    ),
    Bug("tensor memory is not freed", ("tensor-memory",), ((MAIN, "tcgen05_dealloc<1, TMEM_COLUMNS>(tmem);", ""),)),
)
