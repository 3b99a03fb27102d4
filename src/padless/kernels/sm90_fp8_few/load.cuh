// The producer of sm90_fp8_few_grouped_gemm.cu: one thread keeps the ring of stages full.
#pragma once

__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    while (reader.next(tile)) {
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            const uint32_t b = shared_address(shared.b[stage]);
            if constexpr (GATE_AND_UP_APART) {
#pragma unroll
                for (int run = 0; run < BLOCK_N / 32; ++run)
                    tma_load_3d(map_b, b + run * (32 * BLOCK_K), full, kb * BLOCK_K,
                                run_of_weights(problem, tile.column, run), tile.group);
            } else {
                tma_load_3d(map_b, b, full, kb * BLOCK_K, tile.column, tile.group);
            }
            tma_load_2d(map_a, shared_address(shared.a[stage]), full, kb * BLOCK_K, tile.row);
            tma_load_2d(map_sfa, shared_address(shared.sfa[stage]), full, tile.row & ~3, kb);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}
