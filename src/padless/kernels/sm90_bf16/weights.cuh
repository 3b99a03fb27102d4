// The weights of a consumer lane of sm90_bf16_grouped_gemm.cu, from shared memory to the registers that its products read.
#pragma once

constexpr int M64S = M64S_OF_WARPGROUP;
constexpr int CODE_WORDS = is_fp4(B_FORMAT) ? 1 : 2;  // of an octet
constexpr int OCTETS = 4 / CODE_WORDS;                // in 16 bytes

// Octets whose products are issued together. The first product of a round waits until all four warps of the warpgroup have
// got there, so few rounds are better; with many tokens the sums leave no registers for more fragments.
constexpr int ROUND_OCTETS = BLOCK_M <= 64 ? 2 : 1;
constexpr int ROUNDS = 4 / ROUND_OCTETS;  // to a K block

using Fragments = uint32_t[ROUND_OCTETS][M64S][2][4];

// What a consumer lane's rows are in every stage: rows `first_row` and + 8 of each of its m64s (+ 64).
struct WeightLane {
    int first_row, quad;
    uint32_t codes;     // address in stage 0 of the first row's codes; FP8: of the row
    uint32_t scales;    // and of its scales
    uint32_t counting;  // which bits of scales count in the last stage: 16 for each K block

    __device__ __forceinline__ WeightLane(const SharedStorage& shared, const Problem& problem, int warpgroup,
                                          int warp, int lane)
        : first_row(warpgroup * M64S * WGMMA_M + warp * 16 + lane / 4), quad(lane % 4) {
        static_assert(M64S <= 2, "the m64s of a warpgroup lie in 128 rows");
        if constexpr (B_IS_REPACKED)
            codes = shared_address(shared.b) + first_row / 16 * 16 * row_bytes(B_FORMAT) +
                    quad / 2 * TILE_CODE_BYTES + in_code_tile(first_row % 16, quad);
        else
            codes = shared_address(shared.b) + first_row * row_bytes(B_FORMAT) +
                    (is_fp4(B_FORMAT) ? quad * 16 : 0);
        scales = shared_address(shared.sfb) + scales_of_row(first_row, quad);
        counting = ALL_COUNT;
        if constexpr (SFB_IS_BLOCKED) {
            constexpr int OF_BLOCK = scales_of_128(B_FORMAT);
            const int left = problem.sfb_columns() - (problem.k_stages() - 1) * STAGE_BLOCKS * OF_BLOCK -
                             quad * (OF_BLOCK / 4);
            // The shuffle changes nothing. Without it the compiler works the masks out again for every block.
            counting =
                __shfl_sync(0xffffffff, Scales::mask(left) | Scales::mask(left - OF_BLOCK) << 16, lane);
        }
    }

    // FP8_BLOCK: the float32 scale of these rows, which lie in one block of 128, for the first 128 of K. Rows past N have
    // the last block's.
    __device__ __forceinline__ const float* first_scale(const Problem& problem, const Tile& tile) const {
        const int blocks = (problem.n + 127) / 128;
        const int block = min((tile.column + first_row) / 128, blocks - 1);
        return problem.scales +
               (static_cast<long long>(tile.group) * blocks + block) * problem.scales_row_stride;
    }

    using Scales = SectionScales<B_FORMAT, IS_F16>;
    static constexpr uint32_t ALL_COUNT = B_FORMAT == FORMAT_NVFP4 ? 0x7F7F7F7F : 0x00FF00FF;
};

// A consumer lane's codes and scales of 128 of K.
template <bool F16>
struct WeightSection {
    static constexpr bool MAY_BE_LARGE = B_FORMAT == FORMAT_MXFP4 && !F16;

    SectionScales<B_FORMAT, F16> scales[M64S][2];
    uint32_t scale_bytes;  // MXFP4: of all rows,
    bool second;           // and whether any lane of the warp has one with a second factor: hardly ever
    uint32_t codes[M64S][2][4];

    // Of block `block` of the stage, which is number `ks` of the tile.
    __device__ __forceinline__ void load_scales(const WeightLane& lane, int stage, int block, int ks,
                                                int k_stages) {
        uint32_t first = lane.scales + stage * SFB_BYTES;
        if constexpr (SFB_IS_BLOCKED)
            first += block * SFB_BLOCK_BYTES;
        else
            first += scale_offset<B_FORMAT>(ks * STAGE_BLOCKS) + block * scales_of_128(B_FORMAT);
        uint32_t bytes[M64S][2];
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // 8 rows on are another of the 32 rows of a 32x4x4 tile, 64 rows on another of its four columns of 32.
                const int at = SFB_IS_BLOCKED ? h * 128 + u * 8 : (u * WGMMA_M + h * 8) * SCALE_ROW_BYTES;
                bytes[u][h] = scales[u][h].read(first + at);
            }
        }
        if constexpr (SFB_IS_BLOCKED || B_FORMAT == FORMAT_NVFP4) {
            const uint32_t counting =
                SFB_IS_BLOCKED && ks + 1 == k_stages ? lane.counting : WeightLane::ALL_COUNT;
            const uint32_t mask = counting >> (16 * block);
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int h = 0; h < 2; ++h) bytes[u][h] &= mask;
            }
        }
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) scales[u][h].set(bytes[u][h]);
        }
        if constexpr (MAY_BE_LARGE) {
            scale_bytes = 0;
#pragma unroll
            for (int u = 0; u < M64S; ++u) scale_bytes |= (bytes[u][0] | bytes[u][1] << 8) << (16 * u);
            // A branch more in the loop of what is rarely left for bf16 would exceed the registers.
            second = BEGINS_IN_F16 || __any_sync(0xffffffff, mxfp4_is_large(scale_bytes));
        }
    }

    // 16 bytes of codes a row, of block `block` of the stage: the octets from OCTETS * part.
    __device__ __forceinline__ void load_codes(const WeightLane& lane, int stage, int block, int part) {
        uint32_t first = lane.codes + (stage * STAGE_BLOCKS + block) * B_BYTES;
        if constexpr (!is_fp4(B_FORMAT))
            first += swizzle_128b(lane.first_row % 8, lane.quad * 2 + part) - lane.first_row % 8 * 128;
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // Eight rows on in the same tile, of two along K, where they are repacked.
                const uint32_t at = first + u * WGMMA_M * row_bytes(B_FORMAT) +
                                    h * 8 * (B_IS_REPACKED ? 32 : row_bytes(B_FORMAT));
                ld_shared_v4_u32(at, codes[u][h][0], codes[u][h][1], codes[u][h][2], codes[u][h][3]);
            }
        }
    }

    // FP4: one octet of each row instead, number `octet` of the stage, to make_fragments of octet 0.
    __device__ __forceinline__ void load_octet(const WeightLane& lane, int stage, int octet) {
        const uint32_t first = lane.codes + (stage * STAGE_BLOCKS + octet / 4) * B_BYTES + octet % 4 * 4;
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                codes[u][h][0] = ld_shared_u32(first + (u * WGMMA_M + h * 8) * row_bytes(B_FORMAT));
        }
    }

    // The A operands of a round's instructions.
    __device__ __forceinline__ void make_fragments(Fragments& fragments, int round) const {
#pragma unroll
        for (int o = 0; o < ROUND_OCTETS; ++o) make_fragments(fragments[o], round * ROUND_OCTETS + o);
    }

    // The A operands of the two instructions of an octet.
    __device__ __forceinline__ void make_fragments(uint32_t (&fragments)[M64S][2][4], int octet) const {
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t raw[CODE_WORDS], words[4];
#pragma unroll
                for (int w = 0; w < CODE_WORDS; ++w) raw[w] = codes[u][h][octet % OCTETS * CODE_WORDS + w];
                expand_octet<B_FORMAT, F16, PAIRS_ARE_ADJACENT, B_IS_REPACKED>(words, raw);
                scales[u][h].apply(words, octet);
#pragma unroll
                for (int w = 0; w < 4; ++w) fragments[u][w / 2][w % 2 * 2 + h] = words[w];
            }
        }
        if (MAY_BE_LARGE && second) {
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const uint32_t factor = mxfp4_second_factor(scale_bytes >> (16 * u + i % 2 * 8) & 0xFF);
                    fragments[u][i / 4][i % 4] = mul_bf16x2(fragments[u][i / 4][i % 4], factor);
                }
            }
        }
    }
};
