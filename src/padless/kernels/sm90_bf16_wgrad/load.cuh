// The producer of sm90_bf16_wgrad.cu: one thread keeps the ring of stages full.
#pragma once

constexpr uint32_t STAGE_BYTES = A_BYTES + B_BYTES;

// The number of the next tile is drawn when the producer begins with the last so many blocks of a tile: the later, the better
// it is known who is free first, and two blocks take longer than an atomic.
constexpr int BLOCKS_AHEAD = 512 / BLOCK_T;

// One operand, rows of tokens: the plain map, and the ragged one, which ends at any token (device/sm90/output.cuh).
struct Rows {
    const TensorMap& plain;
    const TensorMap& ragged;
};

// A block of BLOCK_T tokens from `token` on, CHUNKS times 64 features. Those behind `end`, the next group's, come as zeros: a
// product takes 16 tokens, and 0 * NaN is NaN. The ragged map alone would do; it has two dimensions more to compute.
template <int CHUNKS>
__device__ __forceinline__ void load_rows(const Rows& rows, uint8_t* stage, uint32_t full, int feature,
                                          int token, int end) {
    const uint32_t destination = shared_address(stage);
    if (end - token >= BLOCK_T) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            tma_load_2d(rows.plain, destination + i * CHUNK_BYTES, full, feature + i * CHUNK_FEATURES, token);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            tma_load_4d(rows.ragged, destination + i * CHUNK_BYTES, full, feature + i * CHUNK_FEATURES,
                        RAGGED_B - (end - token), end, RAGGED_B);
    }
}

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Rows& a, const Rows& b) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile;
    while (reader.next(tile)) {
        const int tokens = shared.groups.rows(tile.group), end = shared.groups.ends[tile.group];
        const int blocks = token_blocks(tokens);
        const int draw_at = blocks > BLOCKS_AHEAD ? blocks - BLOCKS_AHEAD : 0;
        if (blocks == 0) mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        for (int block = 0; block < blocks; ++block) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            const int token = end - tokens + block * BLOCK_T;
            load_rows<B_CHUNKS>(b, shared.b[stage], full, tile.column, token, end);
            load_rows<A_CHUNKS>(a, shared.a[stage], full, tile.row, token, end);
            pipeline.advance();
            if (block == draw_at) mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        }
        reader.release();
        reader.advance();
    }
}
