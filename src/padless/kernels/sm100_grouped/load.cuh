// The roles of sm100_grouped_gemm.cu that fill the stages of its ring: copies of A and of B by one thread each, and the
// warps that gather scales which do not lie as the tensor core wants them. Included by it after its types.
#pragma once

// First row of B of a tile; where gate and up are apart the others of its rows are up's, n / 2 further.
__device__ __forceinline__ int first_weight(const Tile& tile) {
    return GATE_AND_UP_APART ? tile.column / 2 : tile.column;
}

// First scale row of this CTA's part of the tile. The left operand's scales are of this CTA's own rows, the right one's of
// all MMA_N rows, which both CTAs need.
template <bool IS_A>
__device__ __forceinline__ int scale_row(const SharedStorage& shared, const Operands& operands,
                                         const Tile& tile) {
    constexpr bool IS_LEFT = IS_A != TOKENS_ON_N;
    constexpr int SOURCE = IS_A ? SCALES_A : SCALES_B;
    int row = IS_LEFT ? pair_rank() * LANE_ROWS : 0;
    if constexpr (IS_A) {
        row += tile.row + (GROUPS_ON_TILES ? shared.scale_shifts[tile.group] : 0);
    } else {
        const int rows_of_a_group = SOURCE == SCALES_PLAIN ? operands.n : (operands.n + 127) / 128 * 128;
        row += first_weight(tile) + group_in_operands(tile) * rows_of_a_group;
    }
    return row;
}

// A box to this CTA, or to all of `receivers` where they share it; IS_PADDED: a window of FP4 codes that is spread.
template <int SHARES, bool IS_PADDED = false>
__device__ __forceinline__ void load(const TensorMap& map, uint32_t destination, uint32_t barrier, int c0,
                                     int c1, int c2, uint64_t policy, uint16_t receivers) {
    if constexpr (IS_PADDED)
        tma_load_4d_hint<CTA_GROUP>(map, destination, barrier, 0, c0 / WINDOW_STEP, c1, c2, policy);
    else if constexpr (SHARES == 1)
        tma_load_3d_hint<CTA_GROUP>(map, destination, barrier, c0, c1, c2, policy);
    else
        tma_load_3d_hint_multicast<CTA_GROUP>(map, destination, barrier, c0, c1, c2, policy, receivers);
}

// One thread: this CTA's part of one operand, with its scales where they are tiled. Of the tokens, which the CTAs with the
// same part of every worker need, each of these loads a share for all, and the first their scales.
template <bool IS_A>
__device__ __forceinline__ void load_operand(SharedStorage& shared, const Problem& problem) {
    constexpr bool IS_LEFT = IS_A != TOKENS_ON_N;
    constexpr int ROWS = IS_LEFT ? LANE_ROWS : RIGHT_ROWS;
    // A pair's product of one unit takes neighbouring rows from both CTAs: each loads its part of every unit.
    constexpr bool BY_UNITS = !IS_LEFT && UNITS > 1 && CTA_GROUP == 2;
    constexpr bool LOADS_SCALES = !PROMOTES && !(IS_A ? GATHERS_A : GATHERS_B);
    constexpr uint32_t BYTES = IS_LEFT ? LEFT_LOADED : RIGHT_LOADED;
    constexpr uint64_t POLICY = IS_A ? POLICY_A : POLICY_B;
    // Gate and up are loaded each by its own copy, or by one CTA of the pair each.
    constexpr bool APART = !IS_A && GATE_AND_UP_APART;
    constexpr int PIECES = BY_UNITS || (APART && CTA_GROUP == 1) ? 2 : 1, SCALE_PIECES = APART ? 2 : 1;
    constexpr int SHARES = IS_A ? MULTICAST : 1, SHARE = ROWS / SHARES / (BY_UNITS ? PIECES : 1);
    // Tokens of a tile that may be short come in boxes, and scales in atoms of 128 rows, as many as it has.
    constexpr bool SHORT = IS_A && SHORT_TILES;
    constexpr int BOX = COLUMN_STEP / CTA_GROUP;
    const uint16_t receivers = SHARES == 1 ? 0 : SAME_PART << pair_rank();
    const int share = SHARES == 1 ? 0 : worker_rank() * SHARE;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile;
    while (reader.next(tile)) {
        const Operands& operands = problem.of(tile.group);
        const TensorMap& map = IS_A ? operands.map_a : operands.map_b;
        const TensorMap& map_scales = IS_A ? operands.map_sfa : operands.map_sfb;
        if constexpr (PROBLEM_LIST) {  // maps that the host left in global memory
            fence_tensormap_acquire(map);
            if constexpr (LOADS_SCALES) fence_tensormap_acquire(map_scales);
        }
        const int to_up = APART ? operands.n / 2 : 0;
        const int boxes = columns_of(tile) / COLUMN_STEP, atoms = (columns_of(tile) + 127) / 128;
        const int own_rows = SHORT ? boxes * BOX : ROWS;
        const int to_next = APART ? to_up : UNIT_N;  // from a piece to the next
        const int row = (IS_A ? tile.row : first_weight(tile)) + pair_rank() * (BY_UNITS ? ROWS / PIECES
                                                                                : APART  ? to_up
                                                                                         : own_rows);
        const uint32_t bytes =
            SHORT ? own_rows * BLOCK_K + (LOADS_SCALES ? atoms * LEFT_SCALE_BYTES : 0) : BYTES;
        const int group = IS_A ? 0 : group_in_operands(tile);
        const int scale_tile = LOADS_SCALES ? scale_row<IS_A>(shared, operands, tile) / 128 : 0;
        const int k_blocks = operands.k_blocks();
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            if (pair_rank() == 0) mbarrier_arrive_expect_tx(full, CTA_GROUP * bytes);
            if constexpr (CTA_GROUP == 2) full = pair_even_address(full);
            const uint32_t data = shared_address(IS_LEFT ? shared.left[stage] : shared.right[stage]);
            if constexpr (SHORT)
                for (int box = 0; box < boxes; ++box)
                    load<1>(map, data + box * BOX * BLOCK_K, full, operands.first_of_stage(kb),
                            row + box * BOX, group, POLICY, 0);
#pragma unroll
            for (int piece = 0; piece < (SHORT ? 0 : PIECES); ++piece)
                load<SHARES, !IS_A && PADDED_B>(
                    map, data + share * BLOCK_K + piece * (ROWS / PIECES * BLOCK_K), full,
                    operands.first_of_stage(kb), row + share + piece * to_next, group, POLICY, receivers);
            if (LOADS_SCALES && (SHARES == 1 || worker_rank() == 0)) {
                const uint32_t scales =
                    shared_address(IS_LEFT ? shared.left_scales[stage] : shared.right_scales[stage]);
                for (int atom = 0; SHORT && atom < atoms; ++atom)
                    load<1>(map_scales, scales + atom * LEFT_SCALE_BYTES, full, 0, kb * ATOMS,
                            scale_tile + atom, POLICY, 0);
#pragma unroll
                for (int piece = 0; piece < (SHORT ? 0 : SCALE_PIECES); ++piece)
                    load<SHARES>(map_scales, scales + piece * LEFT_SCALE_BYTES, full, 0, kb * ATOMS,
                                 scale_tile + piece * (to_up / 128), POLICY, receivers);
            }
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
    for (int s = 0; s < STAGES; ++s) {  // nothing may arrive here once the CTA is gone
        mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);
        pipeline.advance();
    }
}

// A warp's share of one operand's scales in a stage, fetched before the stage is free and laid down after.
template <bool IS_A>
__device__ __forceinline__ void gather_operand(SharedStorage& shared, const Operands& operands, int row,
                                               int kb, int stage, uint32_t empty_phase, int lane) {
    constexpr bool IS_LEFT = IS_A != TOKENS_ON_N;
    constexpr int PARTS = IS_LEFT ? 1 : RIGHT_ATOMS;
    const ScaleSource& source = IS_A ? operands.sfa : operands.sfb;
    const uint32_t at = shared_address(IS_LEFT ? shared.left_scales[stage] : shared.right_scales[stage]);
    const int left = (source.columns + 3) / 4 - kb * ATOMS;
    const int to_next = !IS_A && GATE_AND_UP_APART ? operands.n / 2 : 128;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        uint32_t words[ATOMS][4];
        load_scales<IS_A ? SCALES_A : SCALES_B, ATOMS>(words, source, row + part * to_next, kb * ATOMS, lane);
        if (part == 0) mbarrier_wait(shared_address(&shared.empty[stage]), empty_phase);
        store_scales<ATOMS>(words, at + part * LEFT_SCALE_BYTES, left < ATOMS ? left : ATOMS, lane);
    }
}

// One of NUM_GATHER_WARPS warps, which share out the stages. A stage stays with one warp, whose own order is then all that
// keeps one fill after the other.
__device__ __forceinline__ void gather_tiles(SharedStorage& shared, const Problem& problem, int gatherer,
                                             int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile{};
    while (reader.next(tile, lane)) {
        const Operands& operands = problem.of(tile.group);
        const int row_a = GATHERS_A ? scale_row<true>(shared, operands, tile) : 0;
        const int row_b = GATHERS_B ? scale_row<false>(shared, operands, tile) : 0;
        const int k_blocks = operands.k_blocks();
        for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
            const int stage = pipeline.stage;
            if (stage % (NUM_GATHER_WARPS + (NUM_GATHER_WARPS == 0)) != gatherer) continue;
            const uint32_t phase = pipeline.phase ^ 1;
            if constexpr (GATHERS_A) gather_operand<true>(shared, operands, row_a, kb, stage, phase, lane);
            if constexpr (GATHERS_B) gather_operand<false>(shared, operands, row_b, kb, stage, phase, lane);
            fence_proxy_async_shared();  // the tensor core's copy reads what this lane wrote
            __syncwarp();
            if (lane == 0) {
                const uint32_t full = shared_address(&shared.full[stage]);
                if constexpr (CTA_GROUP == 1)
                    mbarrier_arrive(full);
                else
                    mbarrier_arrive_release_cluster(full, even_rank());
            }
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
