// Rows of values to FP8_BLOCK's codes and scales in shared memory, where products read them: x of all tokens, and hidden
// rows. The consumer warps do this, all of them, before they multiply. Bits are those of quantize: device/quant_rules.cuh.
#pragma once

// K block `kb`, row `row` of `rows`: where byte `byte` of its 128 is.
__device__ __forceinline__ uint32_t code_address(uint32_t codes, int rows, int kb, int row, int byte) {
    return codes + kb * rows * BLOCK_K + swizzle_128b(row, byte / 16) + byte % 16;
}

// Lanes that share a block of 128, LANES of them, have COUNT neighbours each: its scale, the same in all of them, and
// their own codes.
template <int COUNT, int LANES>
__device__ __forceinline__ float quantize_block(const float (&v)[COUNT], uint32_t (&words)[COUNT / 4]) {
    float amax = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < COUNT; ++i) amax = max_nan_abs(amax, v[i]);
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2)
        amax = max_nan_abs(amax, __shfl_xor_sync(0xffffffff, amax, distance));
    const Fp8Block format;
    const float scale = format.scale(amax), multiplier = format.multiplier(scale);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const uint32_t low = format.codes(__fmul_rn(v[i], multiplier), __fmul_rn(v[i + 1], multiplier));
        const uint32_t high = format.codes(__fmul_rn(v[i + 2], multiplier), __fmul_rn(v[i + 3], multiplier));
        words[i / 4] = low | high << 16;
    }
    return scale;
}

constexpr int X_IN_FLIGHT = 4;  // loads of 16 bytes that a thread waits for together

// Half a warp has a block of a token.
__device__ __forceinline__ void quantize_x(const Problem& p, const Layout& layout, int warp, int lane) {
    const int of_token = p.h / 8, pieces = p.tokens * of_token;
    for (int first = warp * 32; first < pieces; first += X_IN_FLIGHT * NUM_CONSUMERS) {
        uint4 loaded[X_IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < X_IN_FLIGHT; ++n) {
            const int piece = first + n * NUM_CONSUMERS + lane;
            loaded[n] = make_uint4(0, 0, 0, 0);
            if (piece < pieces) loaded[n] = reinterpret_cast<const uint4*>(p.x)[piece];
        }
#pragma unroll
        for (int n = 0; n < X_IN_FLIGHT; ++n) {
            const int piece = first + n * NUM_CONSUMERS + lane;
            if (piece - lane >= pieces) break;
            const uint32_t pairs[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
            float v[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[2 * i] = __uint_as_float(pairs[i] << 16);
                v[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000);
            }
            uint32_t words[2];
            const float scale = quantize_block<8, 16>(v, words);
            if (piece >= pieces) continue;
            const int token = piece / of_token, column = piece % of_token * 8, kb = column / BLOCK_K;
            st_shared_v2_b32(code_address(layout.codes, MOST_TOKENS, kb, token, column % BLOCK_K), words[0],
                             words[1]);
            if (lane % 16 == 0) st_shared_f32(layout.scales + (kb * MOST_TOKENS + token) * 4, scale);
        }
    }
    // Rows of no token: products read them, nothing reads what they give.
    const int missing = MOST_TOKENS - p.tokens, chunks = missing * BLOCK_K / 16;
#pragma unroll 1
    for (int n = warp * 32 + lane; n < chunks * p.h_blocks(); n += NUM_CONSUMERS) {
        const int kb = n / chunks, at = n % chunks * 16;
        st_shared_v4_b32(layout.codes + (kb * MOST_TOKENS + p.tokens) * BLOCK_K + at, 0, 0, 0, 0);
    }
#pragma unroll 1
    for (int n = warp * 32 + lane; n < missing * p.h_blocks(); n += NUM_CONSUMERS)
        st_shared_f32(layout.scales + (n / missing * MOST_TOKENS + p.tokens + n % missing) * 4, 0.0f);
}

constexpr int QUAD_BLOCKS = 4;      // blocks of hidden rows that a warp reads together: eight lanes have one
constexpr int QUADS_IN_FLIGHT = 4;  // that it waits for together
constexpr int LANES_OF_BLOCK = 32 / QUAD_BLOCKS, WORDS_OF_LANE_AND_QUAD = BLOCK_K / LANES_OF_BLOCK;

// Warp: waits until a word of every block that this warp reads has been written. The others of a block are likely there too: so
// waiting takes little of memory's time, and a round trip of it is for 32 blocks.
__device__ __forceinline__ void wait_for_hidden(const uint32_t* hidden, int blocks, int warp, int lane) {
    constexpr int QUADS = 32 / QUAD_BLOCKS;
#pragma unroll 1
    for (int quad = warp; quad * QUAD_BLOCKS < blocks; quad += QUADS * NUM_CONSUMER_WARPS) {
        const int block = (quad + lane / QUAD_BLOCKS * NUM_CONSUMER_WARPS) * QUAD_BLOCKS + lane % QUAD_BLOCKS;
        Patience patience;
        while (block < blocks && ld_relaxed_gpu(hidden + block * BLOCK_K + lane * 4) == 0) patience.wait();
    }
    __syncwarp();
}

// Words that are 0 have not been written: they are read again.
__device__ __forceinline__ void quantize_hidden(SharedStorage& shared, const Problem& p, const Layout& layout,
                                                int warp, int lane) {
    const uint32_t* hidden = p.hidden(shared.launches);
    const int k_blocks = p.i_blocks(), room = p.room_for_rows();
    const int rows = shared.first_row[shared.num_hit], blocks = rows * k_blocks;
    const int of_quad = lane / LANES_OF_BLOCK, part = lane % LANES_OF_BLOCK * 4;
    wait_for_hidden(hidden, blocks, warp, lane);
    for (int first = warp; first * QUAD_BLOCKS < blocks; first += QUADS_IN_FLIGHT * NUM_CONSUMER_WARPS) {
        uint32_t words[QUADS_IN_FLIGHT][WORDS_OF_LANE_AND_QUAD / 4][4];
        Patience patience;
        for (;;) {
            bool is_whole = true;
#pragma unroll
            for (int n = 0; n < QUADS_IN_FLIGHT; ++n) {
                const int block = (first + n * NUM_CONSUMER_WARPS) * QUAD_BLOCKS + of_quad;
                if (block - of_quad >= blocks) break;
#pragma unroll
                for (int i = 0; i < WORDS_OF_LANE_AND_QUAD / 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) words[n][i][j] = ~0u;
                    if (block < blocks)
                        ld_relaxed_gpu_v4(hidden + block * BLOCK_K + i * (4 * LANES_OF_BLOCK) + part,
                                          words[n][i]);
                }
            }
#pragma unroll
            for (int n = 0; n < QUADS_IN_FLIGHT; ++n) {
                if ((first + n * NUM_CONSUMER_WARPS) * QUAD_BLOCKS >= blocks) break;
#pragma unroll
                for (int i = 0; i < WORDS_OF_LANE_AND_QUAD / 4; ++i)
                    is_whole &= words[n][i][0] != 0 && words[n][i][1] != 0 && words[n][i][2] != 0 &&
                                words[n][i][3] != 0;
            }
            if (__all_sync(0xffffffff, is_whole)) break;
            patience.wait();
        }
#pragma unroll
        for (int n = 0; n < QUADS_IN_FLIGHT; ++n) {
            const int block = (first + n * NUM_CONSUMER_WARPS) * QUAD_BLOCKS + of_quad;
            if (block - of_quad >= blocks) break;
            float v[WORDS_OF_LANE_AND_QUAD];
#pragma unroll
            for (int i = 0; i < WORDS_OF_LANE_AND_QUAD; ++i) v[i] = __uint_as_float(~words[n][i / 4][i % 4]);
            uint32_t codes[WORDS_OF_LANE_AND_QUAD / 4];
            const float scale = quantize_block<WORDS_OF_LANE_AND_QUAD, LANES_OF_BLOCK>(v, codes);
            if (block >= blocks) continue;
            const int row = block / k_blocks, kb = block % k_blocks;
#pragma unroll
            for (int i = 0; i < WORDS_OF_LANE_AND_QUAD / 4; ++i)
                st_shared_b32(code_address(layout.codes, room, kb, row, i * (4 * LANES_OF_BLOCK) + part),
                              codes[i]);
            if (part == 0) st_shared_f32(layout.scales + (kb * room + row) * 4, scale);
        }
    }
    const int missing = (rows + 7) / 8 * 8 - rows, chunks = missing * BLOCK_K / 16;
#pragma unroll 1
    for (int n = warp * 32 + lane; n < chunks * k_blocks; n += NUM_CONSUMERS)
        st_shared_v4_b32(layout.codes + (n / chunks * room + rows) * BLOCK_K + n % chunks * 16, 0, 0, 0, 0);
#pragma unroll 1
    for (int n = warp * 32 + lane; n < missing * k_blocks; n += NUM_CONSUMERS)
        st_shared_f32(layout.scales + (n / missing * room + rows + n % missing) * 4, 0.0f);
}
