"""The planted bugs of the NVFP4 weight-gradient kernel: each an edit of its source, and what must be found."""

from __future__ import annotations

from support.planted_bugs import Bug

FOLDER = "sm100_nvfp4_wgrad/"
MAIN, STORAGE = FOLDER + "sm100_nvfp4_wgrad.cu", FOLDER + "storage.cuh"
GRADIENT = "device/sm100/gradient.cuh"


BUGS: tuple[Bug, ...] = (
    # ---- what is multiplied
    Bug("the next group's tokens are multiplied", "",
        (STORAGE, "return left < STEPS ? left : STEPS;", "return STEPS;"), quick=True),
    Bug("a product too few", "", (STORAGE, "last > first ? last - first : 0", "last > first ? last - first - 1 : 0")),
    Bug("groups begin with the one before", "", (STORAGE, "first * MMA_T,", "0,")),
    Bug("the codes of the first step for all", "", (STORAGE, "STEP_BYTES = MMA_T / 2", "STEP_BYTES = 0")),
    Bug("steps of 32 tokens", "", (STORAGE, "STEP_BYTES = MMA_T / 2", "STEP_BYTES = MMA_T / 4")),
    Bug("the scales of the first step for all", "", (MAIN,
        "scale_atom_descriptor(sfa + step * (SCALE_ATOM_BYTES / 16))", "scale_atom_descriptor(sfa)"), quick=True),
    Bug("scales of A for B", "", (MAIN, "SHAPE, to_a, to_b,", "SHAPE, to_a, to_a,"), quick=True),
    Bug("scales of the tile of features before", "",
        (MAIN, "full, 0, token / MMA_T, tile.column / TILE", "full, 0, token / MMA_T, tile.column / TILE / 2")),
    Bug("scales of the product before", "",
        (MAIN, "full, 0, token / MMA_T, tile.row / TILE", "full, 0, token / MMA_T - 1, tile.row / TILE")),
    Bug("first products added to what was there", "uninitialised-tensor-memory",
        (MAIN, "block != 0 || step != 0", "true")),
    Bug("every stage begins anew", "", (MAIN, "block != 0 || step != 0", "step != 0")),
    # ---- what is stored
    Bug("one global scale for both", "",
        (MAIN, "__ldg(global_a), __ldg(global_b)", "__ldg(global_a), __ldg(global_a)")),
    Bug("columns of another tile", "", (STORAGE, "in_group % across * TILE", "0 * TILE")),
    Bug("a later microbatch stores", "", (GRADIENT, "if constexpr (ACCUMULATE)", "if constexpr (false)"), onto=True),
    Bug("empty groups get zeros added", "", (MAIN, "} else if (ACCUMULATE) {", "} else if (false) {"), onto=True),
    Bug("empty groups are not stored", "", (MAIN, "} else if (ACCUMULATE) {", "} else if (true) {")),
    # ---- waits, arrivals and fences
    Bug("full barrier not waited for", "race",
        (MAIN, "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);", ""), quick=True),
    Bug("empty barrier not waited for", "race mbarrier",
        (MAIN, "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);", "")),
    Bug("stage never released", "deadlock", (MAIN, "tcgen05_commit(shared_address(&shared.empty[stage]));", "")),
    Bug("store does not wait", "race tensor-memory uninitialised-tensor-memory",
        (MAIN, "mbarrier_wait(shared_address(&shared.done), 0);", "")),
    Bug("loads from tensor memory not waited for", "register-in-flight", (MAIN, "tcgen05_wait_ld();", "")),
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init", (MAIN, "fence_mbarrier_init();", "")),
    Bug("expect_tx forgets the scales", "race mbarrier deadlock",
        (MAIN, "2 * (OPERAND_BYTES + SCALE_BYTES)", "2 * OPERAND_BYTES")),
    Bug("tensor memory is not freed", "tensor-memory", (MAIN, "tcgen05_dealloc<1, TMEM_COLUMNS>(tmem);", "")),
)  # fmt: skip
