// The plain store of the kernels that make their product transposed, weight rows on the rows of an accumulator and tokens on its
// columns. Included behind BLOCK_M, OUT_TYPE, SLAB_BYTES, SLAB_COLUMNS and NUM_SLABS.
#pragma once

// Consumer: an m64's accumulators, 64 columns of D by BLOCK_M tokens, transposed into slabs of token rows x 128 bytes with
// the 128-byte swizzle. d[4 i + j] is column 16 * warp + lane / 4 + 8 * (j / 2), token 8 i + 2 * (lane % 4) + j % 2.
__device__ __forceinline__ void stage_transposed(const float (&d)[BLOCK_M / 2], uint32_t slabs, int warp,
                                                 int lane) {
    if constexpr (OUT_TYPE == OUT_F32) {
        // 32 columns to a slab. The lanes of one store have 8 columns of 4 tokens: all banks once.
        const int column = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int token = 8 * i + lane % 4 * 2 + j % 2, c = column + j / 2 * 8;
                const uint32_t slab = slabs + c / 32 * SLAB_BYTES;
                st_shared_float(slab + swizzle_128b(token, c % 32 / 4) + c % 4 * 4, d[4 * i + j]);
            }
        }
    } else {
        // 64 columns to a slab. Matrices of 8 columns x 8 tokens, stored with a row for every token.
        uint32_t words[BLOCK_M / 4];
#pragma unroll
        for (int i = 0; i < BLOCK_M / 4; ++i)
            words[i] =
                OUT_TYPE == OUT_BF16 ? cvt_bf16x2(d[2 * i], d[2 * i + 1]) : cvt_f16x2(d[2 * i], d[2 * i + 1]);
        const uint32_t chunk = warp * 2 + lane / 8 % 2;
        if constexpr (BLOCK_M == 8) {
            stmatrix_x2_trans(slabs + swizzle_128b(lane % 8, chunk), words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 8; i += 2)
                stmatrix_x4_trans(slabs + swizzle_128b(8 * (i + lane / 16) + lane % 8, chunk), words[2 * i],
                                  words[2 * i + 1], words[2 * i + 2], words[2 * i + 3]);
        }
    }
}

// Consumer: what becomes of an m64 of D in float32, 64 columns from `column` of the tile's tokens. This is the place for
// another epilogue: it is called by a whole warpgroup, has `staging` to itself, and must write rows of the tile alone.
__device__ __forceinline__ void store_m64(const float (&d)[BLOCK_M / 2], uint8_t* staging, int n,
                                          const TensorMap& map_d, const Tile& tile, int column, int warpgroup,
                                          int warp, int lane) {
    const bool issuer = warp == 0 && lane == 0;
    if (issuer) cp_async_bulk_wait_group_read_all();  // the last m64's store has left this memory
    bar_sync(1 + warpgroup, 128);
    stage_transposed(d, shared_address(staging), warp, lane);
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);
    if (issuer) {
        for (int s = 0; s < NUM_SLABS && column + s * SLAB_COLUMNS < n; ++s)
            store_slab_ragged(map_d, shared_address(staging) + s * SLAB_BYTES, column + s * SLAB_COLUMNS,
                              tile.row, tile.row + tile.rows);
        cp_async_bulk_commit_group();
    }
}
