// The store of sm90_fp8_swapped_grouped_gemm.cu: a warpgroup's registers are converted, transposed by stmatrix into slabs of 64
// weights (128 bytes) for every token, and written by TMA, clipped behind the tile's last token.
#pragma once

// One m64 of d: the 8 x 8 matrix of weights 8 r .. of the warp and tokens 8 i .. is stored by columns, so that a token's 8 weights
// are 16 bytes.
template <int COLUMNS>
__device__ __forceinline__ void stage_m64(const float (&d)[COLUMNS / 2], uint32_t slab, int warp, int lane) {
    const auto packed = [&](int at) {
        return OUT_TYPE == OUT_BF16 ? cvt_bf16x2(d[at], d[at + 1]) : cvt_f16x2(d[at], d[at + 1]);
    };
    // Lane l has row l % 8 of matrix l / 8, the second of which is 8 weights and the third 8 tokens further.
    const uint32_t at = slab + lane / 16 * 1024 + swizzle_128b(lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int i = 0; i + 1 < COLUMNS / 8; i += 2)
        stmatrix_x4_transposed(at + i * 1024, packed(4 * i), packed(4 * i + 2), packed(4 * i + 4),
                               packed(4 * i + 6));
    if constexpr (COLUMNS % 16 != 0) {
        constexpr int LAST = COLUMNS / 8 - 1;
        stmatrix_x2_transposed(at - lane / 16 * 1024 + LAST * 1024, packed(4 * LAST), packed(4 * LAST + 2));
    }
}

struct StoreMaps {
    const TensorMap &d, &last_d;  // boxes of 64 tokens, of STEP_M
};

// Consumer: writes the tokens that exist of its `m64s` m64s.
template <int COLUMNS>
__device__ __forceinline__ void store_tile(const float (&d)[WAVES][COLUMNS / 2], SharedStorage& shared,
                                           const StoreMaps& maps, const Tile& tile, int m64s, int warpgroup,
                                           int warp, int lane) {
    const bool issuer = warp == 0 && lane == 0;
#pragma unroll
    for (int w = 0; w < WAVES; ++w) {
        if (w < m64s) {
            const uint32_t slab = shared_address(shared.d[warpgroup][w % NUM_D]);
            if (w % NUM_D == 0) {  // the stores before have left this memory
                if (issuer) cp_async_bulk_wait_group_read_all();
                bar_sync(1 + warpgroup, 128);
            }
            stage_m64<COLUMNS>(d[w], slab, warp, lane);
            if (w % NUM_D == NUM_D - 1 || w == m64s - 1) {
                fence_proxy_async_shared();
                bar_sync(1 + warpgroup, 128);
                if (issuer) {
                    const int end = tile.row + tile.rows;
                    for (int v = w - w % NUM_D; v <= w; ++v) {
                        const uint32_t from = shared_address(shared.d[warpgroup][v % NUM_D]);
                        const int column = tile.column + m64_of(warpgroup, v) * WGMMA_M;
                        int row = 0;
                        for (; row + 64 <= COLUMNS; row += 64)
                            store_slab_ragged(maps.d, from + row * 128, column, tile.row + row, end);
                        for (; row < COLUMNS; row += STEP_M)
                            store_slab_ragged(maps.last_d, from + row * 128, column, tile.row + row, end);
                    }
                    cp_async_bulk_commit_group();
                }
            }
        }
    }
}
