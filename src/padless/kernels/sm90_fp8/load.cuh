// The producer of sm90_fp8_grouped_gemm.cu: one thread keeps the ring of stages full.
#pragma once

// Boxes of A, `step` rows apart. The CTAs of a cluster take turns at fetching one and give it to both.
template <int UNROLL>
__device__ __forceinline__ void load_boxes(const TensorMap& map_a, uint8_t* a, uint32_t full, int k, int row,
                                           int boxes, int step) {
#pragma unroll UNROLL
    for (int i = CLUSTER_N == 1 ? 0 : cluster_cta_rank(); i < boxes; i += CLUSTER_N) {
        const uint32_t to = shared_address(a) + i * step * BLOCK_K;
        if constexpr (CLUSTER_N == 1)
            tma_load_2d(map_a, to, full, k, row + i * step);
        else
            tma_load_2d_multicast(map_a, to, full, k, row + i * step, (1 << CLUSTER_N) - 1);
    }
}

// What every K block of a tile brings. BY_M64S: a box for every m64, 64 rows apart (of fewer rows where one holds all rows
// there are). Where the compiler does not know that, a stage is refilled later, and 128 x 192 takes 1% longer.
template <bool BY_M64S>
struct StageLoads {
    int column, step, boxes, sfa_copies;  // step: rows from box to box
    uint32_t bytes;

    __device__ __forceinline__ StageLoads(const Problem& problem, const Tile& tile) {
        const int m64s = m64s_of(tile.rows);
        column = cta_column(tile);
        step = BY_M64S ? WGMMA_M : problem.row_box();
        boxes = BY_M64S || step != FEW_ROWS_BOX ? m64s : (tile.rows + FEW_ROWS_BOX - 1) / FEW_ROWS_BOX;
        sfa_copies = SCALES_K_MAJOR   ? 0
                     : BLOCK_M <= 128 ? 1
                                      : (m64s * WGMMA_M + 3 + SFA_COPY_FLOATS - 1) / SFA_COPY_FLOATS;
        bytes = boxes * problem.row_box() * BLOCK_K + B_BYTES + sfa_copies * SFA_COPY_FLOATS * 4;
    }
};

// Producer, one thread: begins to fill a stage that is empty, with the weights of K block `kb`.
template <bool BY_M64S>
__device__ __forceinline__ void load_weights(SharedStorage& shared, const Problem& problem,
                                             const TensorMap& map_b, const Tile& tile,
                                             const StageLoads<BY_M64S>& loads, int kb, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]);
    mbarrier_arrive_expect_tx(full, loads.bytes);
    if constexpr (COLUMNS_ARE_INTERLEAVED) {  // see device/sm90/wgmma_fragment.cuh
        constexpr int COPIES = GATE_AND_UP_APART ? 4 : 2;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int first = GATE_AND_UP_APART ? (loads.column + c / 2 * problem.n) / 2 : loads.column;
            tma_load_4d(map_b, shared_address(shared.b[stage] + c * (B_BYTES / COPIES)), full, kb * BLOCK_K,
                        c % 2 * 2, first / 4, tile.group);
        }
    } else {
        tma_load_3d(map_b, shared_address(shared.b[stage]), full, kb * BLOCK_K, loads.column, tile.group);
    }
}

// Producer, one thread: fills the stage up, with the rows and their scales.
template <bool BY_M64S>
__device__ __forceinline__ void load_rows(SharedStorage& shared, const TensorMap& map_a,
                                          const TensorMap& map_sfa, const Tile& tile,
                                          const StageLoads<BY_M64S>& loads, int kb, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]);
    load_boxes<BY_M64S ? 4 : 1>(map_a, shared.a[stage], full, kb * BLOCK_K, tile.row, loads.boxes,
                                loads.step);
    for (int i = 0; i < loads.sfa_copies; ++i)
        tma_load_2d(map_sfa, shared_address(shared.sfa[stage] + i * SFA_COPY_FLOATS), full,
                    (tile.row & ~3) + i * SFA_COPY_FLOATS, kb);
}

template <bool BY_M64S>
__device__ __forceinline__ void load_stage(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const Tile& tile,
                                           const StageLoads<BY_M64S>& loads, int kb, int stage) {
    load_weights(shared, problem, map_b, tile, loads, kb, stage);
    load_rows(shared, map_a, map_sfa, tile, loads, kb, stage);
}

#if LOW_RANK_STEPS > 0
// Producer, one thread: fills a stage that is empty with the tile's rows of t and the factor's. 64 columns of bfloat16, zeros from
// the rank on, are as many bytes as a K block, and have no scales.
template <bool BY_M64S>
__device__ __forceinline__ void load_low_rank(SharedStorage& shared, const Problem& problem,
                                              const TensorMap& map_sfa, const Tile& tile,
                                              StageLoads<BY_M64S> loads, int stage) {
    loads.bytes -= loads.sfa_copies * SFA_COPY_FLOATS * 4;
    loads.sfa_copies = 0;
    load_stage(shared, problem, *problem.map_t, *problem.map_factor, map_sfa, tile, loads, 0, stage);
}
#endif

// Whether the first stages are filled before the roles part: on the way to load_tiles 1500 cycles pass (in a cluster, where
// the CTAs have to meet first, it makes no difference).
constexpr bool LOADS_AHEAD = CLUSTER_N == 1 && !SCALES_K_MAJOR;

// Producer, one thread, when the kernel begins and all stages are empty: the first K blocks of the first tile. Returns how
// many. With `is_ready` the kernels ahead may still be writing the rows, and are waited for behind the weights.
__device__ __forceinline__ int load_first_stages(SharedStorage& shared, const Problem& problem,
                                                 const TensorMap& map_a, const TensorMap& map_b,
                                                 const TensorMap& map_sfa, const Tile& tile, bool is_ready) {
    if (tile.rows == 0) return 0;
    const StageLoads<false> loads(problem, tile);
    const int count = problem.k_blocks() < STAGES ? problem.k_blocks() : STAGES;
#pragma unroll 1
    for (int kb = 0; kb < count; ++kb) {
        load_weights(shared, problem, map_b, tile, loads, kb, kb);
        if (!is_ready) load_rows(shared, map_a, map_sfa, tile, loads, kb, kb);
    }
    if (is_ready) {
        griddepcontrol_wait();
#pragma unroll 1
        for (int kb = 0; kb < count; ++kb) load_rows(shared, map_a, map_sfa, tile, loads, kb, kb);
    }
    return count;
}

// Producer, one thread. `ahead`: how many K blocks of the first tile have been loaded.
template <bool BY_M64S>
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, int ahead) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    uint32_t window_phase = 0;
    const int k_blocks = problem.k_blocks();
    const int ask_at = CLUSTER_N > 1 && cluster_cta_rank() != 0 ? -1  // the first CTA asks for both
                       : k_blocks > K_BLOCKS_AHEAD              ? k_blocks - K_BLOCKS_AHEAD
                                                                : 0;
    if constexpr (LOADS_AHEAD) pipeline = {ahead == STAGES ? 0 : ahead, ahead == STAGES};
    Tile tile;
    while (reader.next(tile)) {
        const StageLoads<BY_M64S> loads(problem, tile);
        if (LOADS_AHEAD && TAKES_LATE && ask_at < ahead)
            mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        for (int kb = LOADS_AHEAD ? ahead : 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            load_stage(shared, problem, map_a, map_b, map_sfa, tile, loads, kb, stage);
            pipeline.advance();
            if (TAKES_LATE && kb == ask_at) mbarrier_arrive(shared_address(&shared.next_tile_wanted));

            // The window of this tile may be fetched once the last tile's has been read: not before this tile's first
            // stages are on their way, or they would wait for it too.
            if constexpr (SCALES_K_MAJOR) {
                const int after = STAGES - 1 < k_blocks ? STAGES - 2 : k_blocks - 1;
                if (kb == after) {
                    const uint32_t window_full = shared_address(&shared.window_full);
                    const int first = tile.row * k_blocks & ~3;
                    const int last = (tile.row + tile.rows) * k_blocks;  // one past
                    const int copies = (last - first + WINDOW_COPY_FLOATS - 1) / WINDOW_COPY_FLOATS;
                    mbarrier_wait(shared_address(&shared.window_empty), window_phase ^ 1);
                    mbarrier_arrive_expect_tx(window_full, copies * WINDOW_COPY_FLOATS * 4);
                    for (int i = 0; i < copies; ++i)
                        tma_load_1d(map_sfa, shared_address(shared.sfa_window + i * WINDOW_COPY_FLOATS),
                                    window_full, first + i * WINDOW_COPY_FLOATS);
                    window_phase ^= 1;
                }
            }
        }
#if LOW_RANK_STEPS > 0
        mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);
        load_low_rank(shared, problem, map_sfa, tile, loads, pipeline.stage);
        pipeline.advance();
#endif
        ahead = 0;
        reader.release();
        reader.advance();
    }
}
