// The converters of sm90_bf16_grouped_gemm.cu: tokens to bf16 or f16, in shared memory.
#pragma once

// The scales of quad `quad` of weight row `row` of the tile, in bytes from the stage's first.
__device__ __forceinline__ uint32_t scales_of_row(int row, int quad) {
    if constexpr (SFB_IS_BLOCKED) {
        const uint32_t in_tile = (row % 32) * 16 + (row % 128) / 32 * 4;
        const uint32_t tile = (row / 128) * SCALE_BLOCK_BYTES;
        return B_FORMAT == FORMAT_NVFP4 ? tile + quad / 2 * 512 + in_tile + quad % 2 * 2
                                        : tile + in_tile + quad;
    } else {
        return row * SCALE_ROW_BYTES + quad * (scales_of_128(B_FORMAT) / 4);
    }
}

// What a converter lane holds of 128 of K of its token: one of 8 tokens from `row`, a multiple of 8. Lane l has quad l % 4
// of token l / 4, in chunks of 16 bytes.
//
// Of a token's place in swizzled rows only row * 128 differs between eights: a constant distance where they are unrolled.
template <bool F16>
struct TokenSection {
    static constexpr int WORDS = A_FORMAT == FORMAT_BF16 ? 4 : is_fp4(A_FORMAT) ? 1 : 2;  // of an octet
    static constexpr int OCTETS = 4 / WORDS;                                              // in 16 bytes
    static constexpr int CHUNKS = 4 / OCTETS;

    SectionScales<A_FORMAT, F16> scales;
    uint32_t scale_bytes;
    uint32_t codes[4];  // of one chunk

    // The first octet of chunk i. Of bf16, quads 0, 1 and 2, 3 read different tiles: the latter take their octets in
    // another order, for the banks.
    static __device__ __forceinline__ int first_octet(int i, int quad) {
        return A_FORMAT == FORMAT_BF16 ? i ^ (quad & 2) : i * OCTETS;
    }

    __device__ __forceinline__ void load_scales(uint32_t sfa, int row, int lane) {
        scale_bytes =
            scales.read(sfa + (row + lane / 4) * SCALE_ROW_BYTES + lane % 4 * (scales_of_128(A_FORMAT) / 4));
    }

    __device__ __forceinline__ void load_chunk(uint32_t a, int i, int row, int lane) {
        const int in_eight = lane / 4, quad = lane % 4;
        uint32_t at;
        if constexpr (is_fp4(A_FORMAT))
            at = a + row * 64 + in_eight * 64 + quad * 16;
        else if constexpr (A_FORMAT == FORMAT_BF16)
            at = a + row * 128 + (quad / 2) * TOKEN_HALF_BYTES +
                 swizzle_128b(in_eight, quad % 2 * 4 + first_octet(i, quad));
        else
            at = a + row * 128 + swizzle_128b(in_eight, quad * 2 + i);
        ld_shared_v4_u32(at, codes[0], codes[1], codes[2], codes[3]);
    }

    // The words of octet s land in 16-byte chunks 4 s .. 4 s + 3 of the token, quad q's at word q: where instruction
    // 2 s + i / 2 looks for the operand of quad q that goes with the weights' registers i % 2. Example: octet 1 of quad 2,
    // word 3, is at byte (4 * 1 + 3) * 16 + 2 * 4 = 120 of the token's first 128, before the swizzle.
    __device__ __forceinline__ void store_chunk(uint32_t tokens, int i, int row, int lane) {
        const int in_eight = lane / 4, quad = lane % 4;
        if (i == 0) scales.set(A_FORMAT == FORMAT_NVFP4 ? scale_bytes & 0x7F7F : scale_bytes);
        const bool second =
            A_FORMAT == FORMAT_MXFP4 && !F16 && __any_sync(0xffffffff, mxfp4_is_large(scale_bytes));
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
            uint32_t from[WORDS], to[4];
#pragma unroll
            for (int w = 0; w < WORDS; ++w) from[w] = codes[o * WORDS + w];
            expand_octet<A_FORMAT, F16, PAIRS_ARE_ADJACENT>(to, from);
            scales.apply(to, i * OCTETS + o);
            if (A_FORMAT == FORMAT_MXFP4 && !F16 && second) {
#pragma unroll
                for (int w = 0; w < 4; ++w) to[w] = mul_bf16x2(to[w], mxfp4_second_factor(scale_bytes));
            }
            const int octet = first_octet(i, quad) + o;
            const uint32_t half = tokens + row * 128 + (octet / 2) * TOKEN_HALF_BYTES + quad * 4;
#pragma unroll
            for (int w = 0; w < 4; ++w)
                st_shared_u32(half + swizzle_128b(in_eight, octet % 2 * 4 + w), to[w]);
        }
    }
};

// Converter, a warp: its eights of the boxes that hold the tile's `rows` tokens. Codes of FP4 are read while those of the eight
// before are converted; others would need more registers than there are.
template <bool F16>
__device__ __forceinline__ void convert_tokens(uint32_t tokens, uint32_t a, uint32_t sfa, int rows, int warp,
                                               int lane) {
    constexpr int STEP = NUM_CONVERTER_WARPS * 8;
    constexpr bool AHEAD = is_fp4(A_FORMAT);
    if (BLOCK_M < STEP && warp * 8 >= BLOCK_M) return;
    const auto has = [&](int row) { return row < BOX_ROWS || (row < BLOCK_M && rows > BOX_ROWS); };
    using Section = TokenSection<F16>;
    Section sections[2];
    if (AHEAD) {
        sections[0].load_scales(sfa, warp * 8, lane);
        sections[0].load_chunk(a, 0, warp * 8, lane);
    }
#pragma unroll
    for (int first = 0; first < BLOCK_M; first += STEP) {
        if (!has(first)) break;
        const int row = first + warp * 8;
        Section& section = sections[first / STEP % 2];
        if constexpr (AHEAD) {
            if (has(first + STEP)) {
                Section& next = sections[(first / STEP + 1) % 2];
                next.load_scales(sfa, row + STEP, lane);
                next.load_chunk(a, 0, row + STEP, lane);
            }
            section.store_chunk(tokens, 0, row, lane);
        } else {
            section.load_scales(sfa, row, lane);
#pragma unroll
            for (int i = 0; i < Section::CHUNKS; ++i) {
                section.load_chunk(a, i, row, lane);
                section.store_chunk(tokens, i, row, lane);
            }
        }
    }
}

template <bool F16>
__device__ __forceinline__ void convert_stage(SharedStorage& shared, int rows, int ks, int stage, int to,
                                              int warp, int lane) {
    const uint32_t sfa = shared_address(shared.sfa[stage]) + scale_offset<A_FORMAT>(ks * STAGE_BLOCKS);
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j)
        convert_tokens<F16>(shared_address(shared.tokens[to][j]), shared_address(shared.a[stage][j]),
                            sfa + j * scales_of_128(A_FORMAT), rows, warp, lane);
}

// Scales of four blocks of a row, which may be beyond f16, with one that is not for every 0 whose 32 codes are all zero: what
// quantisers say of zeros. `codes`: address of the row's 64 bytes.
__device__ __forceinline__ uint32_t excuse_zeros(uint32_t scales, uint32_t codes) {
#pragma unroll 1
    for (int quad = 0; quad < 4; ++quad) {
        uint32_t words[4];
        ld_shared_v4_u32(codes + quad * 16, words[0], words[1], words[2], words[3]);
        const bool zero = ((words[0] | words[1] | words[2] | words[3]) & 0x77777777) == 0;
        if (zero && (scales >> (8 * quad) & 0xFF) == 0) scales |= 0x70u << (8 * quad);
    }
    return scales;
}

// Checker, a warp: which bits of its share of the scales of stage `ks` are beyond f16, in each lane those of its rows. Scales
// that do not exist, past the ends of K, N or the group, do not count: what is made of them is dropped or meets zero codes.
// With EXCUSE_ZEROS zeros do not count either.
template <bool EXCUSE_ZEROS>
__device__ __forceinline__ uint32_t scales_beyond_f16(const SharedStorage& shared, const Problem& problem,
                                                      const Tile& tile, int ks, int stage, int warp,
                                                      int lane) {
    const uint32_t sfb =
        shared_address(shared.sfb[stage]) + (SFB_IS_BLOCKED ? 0 : scale_offset<B_FORMAT>(ks * STAGE_BLOCKS));
    const uint32_t sfa = shared_address(shared.sfa[stage]) + scale_offset<A_FORMAT>(ks * STAGE_BLOCKS);
    const auto of_row = [](uint32_t scales, const uint8_t* codes, int row) {
        return mxfp4_beyond_f16(EXCUSE_ZEROS ? excuse_zeros(scales, shared_address(codes) + row * 64)
                                             : scales);
    };
    constexpr int UNROLLED = EXCUSE_ZEROS ? 1 : 16;  // what is rarely done is short
    uint32_t beyond = 0;
#pragma unroll UNROLLED
    for (int j = 0; j < STAGE_BLOCKS; ++j) {
        const int columns = problem.sfb_columns() - (ks * STAGE_BLOCKS + j) * 4;
        const uint32_t counting = columns >= 4 ? 0xffffffff : columns <= 0 ? 0 : (1u << 8 * columns) - 1;
        uint32_t of_block = 0;
#pragma unroll UNROLLED
        for (int first = 0; first < BLOCK_N; first += NUM_CHECKER_WARPS * 32) {
            const int row = first + warp * 32 + lane;
            const uint32_t block = j * (SFB_IS_BLOCKED ? SFB_BLOCK_BYTES : scales_of_128(B_FORMAT));
            const uint32_t word = ld_shared_u32(sfb + block + scales_of_row(row, 0));
            if (row < BLOCK_N && weights_exist(problem, tile.column, row))
                of_block |= of_row(word, shared.b[stage][j], row);
        }
#pragma unroll UNROLLED
        for (int first = 0; first < BLOCK_M; first += NUM_CHECKER_WARPS * 32) {
            const int row = first + warp * 32 + lane;
            if (row < tile.rows) {
                const uint32_t word =
                    ld_shared_u32(sfa + j * scales_of_128(A_FORMAT) + row * SCALE_ROW_BYTES);
                of_block |= of_row(word, shared.a[stage][j], row);
            }
        }
        beyond |= of_block & counting & 0xF0F0F0F0;
    }
    return beyond;
}

// Whether any of the warp's share of stage `ks` is beyond f16. Zeros are looked for only where something is: a branch at every
// row would have its loads wait for each other.
__device__ __forceinline__ bool any_beyond_f16(const SharedStorage& shared, const Problem& problem,
                                               const Tile& tile, int ks, int stage, int warp, int lane) {
    if (!__any_sync(0xffffffff, scales_beyond_f16<false>(shared, problem, tile, ks, stage, warp, lane) != 0))
        return false;
    return __any_sync(0xffffffff, scales_beyond_f16<true>(shared, problem, tile, ks, stage, warp, lane) != 0);
}

// Checker, a warp: looks at its share of a stage and says what it found.
__device__ __forceinline__ void check_stage(SharedStorage& shared, const Problem& problem, const Tile& tile,
                                            int ks, const Pipeline<STAGES>& pipeline, int warp, int lane) {
    const int stage = pipeline.stage;
    // Whoever read the last fill's flags has given the stage back: implied by `full`, through the copies.
    mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
    mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
    const bool beyond = any_beyond_f16(shared, problem, tile, ks, stage, warp, lane);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 4; i += NUM_CHECKER_WARPS) shared.beyond_f16[stage][warp + i] = beyond;
    }
    arrive_warp(shared.checked[stage], lane);
}

// Checkers that are apart from the converters.
__device__ __forceinline__ void check_tiles(SharedStorage& shared, const Problem& problem, int warp,
                                            int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile{};
    while (reader.next(tile, lane)) {
        for (int ks = 0; ks < problem.k_stages(); ++ks) {
            check_stage(shared, problem, tile, ks, pipeline, warp, lane);
            arrive_warp(shared.empty[pipeline.stage], lane);
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}

// What the checkers found in a stage, the same for all lanes. Lane 0 alone reads it: it is the one that gives the stage
// back, and so one thread's own order says that it has been read.
__device__ __forceinline__ bool wants_bf16(const SharedStorage& shared, int stage, int lane) {
    const uint32_t found = lane == 0 ? ld_shared_u32(shared_address(shared.beyond_f16[stage])) : 0;
    return __shfl_sync(0xffffffff, found, 0) != 0;
}

// Converters.
__device__ __forceinline__ void convert_tiles(SharedStorage& shared, const Problem& problem, int warp,
                                              int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<TOKEN_STAGES> ring;
    const int k_stages = problem.k_stages();
    const int token = warp * 32 + lane;  // whose float32 scale this thread passes on
    Tile tile{};
    while (reader.next(tile, lane)) {
        const float* sfa = problem.scales;
        bool exists = false, in_f16 = BEGINS_IN_F16;
        float scale = 0.0f;
        if constexpr (HAS_TOKEN_SCALES) {
            exists = token < BLOCK_M && tile.row + token < problem.m;
            sfa += (tile.row + token) * problem.scales_row_stride;
            scale = exists ? __ldg(sfa) : 0.0f;
        }
        for (int ks = 0; ks < k_stages; ++ks) {
            float ahead = 0.0f;
            if constexpr (HAS_TOKEN_SCALES) {
                sfa += problem.scales_k_stride;
                ahead = exists && ks + 1 < k_stages ? __ldg(sfa) : 0.0f;
            }
            const int stage = pipeline.stage, to = ring.stage;
            if constexpr (BEGINS_IN_F16) {
                if constexpr (!CHECKERS_APART) check_stage(shared, problem, tile, ks, pipeline, warp, lane);
                mbarrier_wait(shared_address(&shared.tokens_empty[to]), ring.phase ^ 1);
                mbarrier_wait(shared_address(&shared.checked[stage]), pipeline.phase);
                in_f16 = in_f16 && !wants_bf16(shared, stage, lane);
                if (in_f16)
                    convert_stage<true>(shared, tile.rows, ks, stage, to, warp, lane);
                else
                    convert_stage<false>(shared, tile.rows, ks, stage, to, warp, lane);
            } else {
                mbarrier_wait(shared_address(&shared.tokens_empty[to]), ring.phase ^ 1);
                mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
                convert_stage<IS_F16>(shared, tile.rows, ks, stage, to, warp, lane);
            }
            if constexpr (HAS_TOKEN_SCALES) {
                if (token < BLOCK_M) shared.token_scales[to][token] = scale;
                scale = ahead;
            }
            fence_proxy_async_shared();  // the tensor core reads what was written here
            arrive_warp<TOKEN_ARRIVALS>(shared.tokens_full[to], lane);
            arrive_warp(shared.empty[stage], lane);
            pipeline.advance();
            ring.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
