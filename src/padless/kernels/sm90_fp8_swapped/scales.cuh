// The scales of sm90_fp8_swapped_grouped_gemm.cu: a warp beside the producer multiplies, for every stage, the tokens' scales by
// those of the tile's 128-weight blocks, and lays the products out as the consumers read them.
//
// A consumer's thread has two neighbouring tokens of every eight, 8 i + 2 q and 8 i + 2 q + 1 with q = lane % 4. The products of
// i and i + 1 lie beside each other, so one load of 16 bytes brings four scales:
//
//      token     0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15
//      float     0  1  4  5  8  9 12 13 |  2  3  6  7 10 11 14 15
#pragma once

__device__ __forceinline__ int place_of_scale(int token) {
    return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

__device__ __forceinline__ void write_scales(SharedStorage& shared, const Problem& problem, int lane) {
    constexpr int PER_LANE = (BLOCK_M + 31) / 32;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    const int place = place_of_scale(lane);  // tokens 32 further are 32 floats further
    Tile tile{};
    while (reader.next(tile, lane)) {
        const float* rows[SCALE_BLOCKS];
        float sfb[SCALE_BLOCKS], ahead[SCALE_BLOCKS];
        const auto load = [&](int kb, float (&to)[SCALE_BLOCKS]) {
#pragma unroll
            for (int j = 0; j < SCALE_BLOCKS; ++j) to[j] = kb < k_blocks ? __ldg(rows[j] + kb) : 0.0f;
        };
#pragma unroll
        for (int j = 0; j < SCALE_BLOCKS; ++j) {
            const int last = problem.sfb_rows() - 1, wanted = tile.column / 128 + j;
            const long long row =
                static_cast<long long>(tile.group) * (last + 1) + (wanted < last ? wanted : last);
            rows[j] = problem.sfb + row * k_blocks;
        }
        load(lane, ahead);
        const int first = (tile.row & 3) + lane, columns = columns_of(tile);
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            if (kb % 32 == 0) {
#pragma unroll
                for (int j = 0; j < SCALE_BLOCKS; ++j) sfb[j] = ahead[j];
                load(kb + 32 + lane, ahead);
            }
            float of_block[SCALE_BLOCKS];
#pragma unroll
            for (int j = 0; j < SCALE_BLOCKS; ++j) of_block[j] = __shfl_sync(0xffffffff, sfb[j], kb % 32);
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            float sfa[PER_LANE];
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                sfa[i] = 32 * i + lane < columns ? shared.sfa[stage][first + 32 * i] : 0.0f;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                if (32 * i + lane < SCALE_FLOATS) {
#pragma unroll
                    for (int j = 0; j < SCALE_BLOCKS; ++j)
                        shared.scales[stage][j][place + 32 * i] = __fmul_rn(sfa[i], of_block[j]);
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.scaled[stage]));
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
