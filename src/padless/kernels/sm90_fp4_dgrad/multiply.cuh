// The products of a tile of sm90_fp4_dgrad.cu, and its store.
#pragma once

// The A operands of a round, 32 of N: of its instructions of 16, by the m64.
using Fragments = uint32_t[ROUND_N / 16][M64S][4];

// What a consumer lane reads in every stage.
struct CodeLane {
    uint32_t codes;    // address in stage 0 of the row of 16 bytes that it gives to ldmatrix
    uint32_t factors;  // and of its factors

    __device__ __forceinline__ CodeLane(const SharedStorage& shared, int warpgroup, int warp, int lane) {
        const int chunk = warpgroup * 4 + warp;  // 32 columns
        codes = shared_address(shared.codes) + swizzle_128b(lane, chunk);
        const int column = chunk * (32 / SCALE_BLOCK) + lane / 4 * 4 / SCALE_BLOCK;
        factors = shared_address(&shared.factors[0][column][lane % 4 * 4]);
    }

    __device__ __forceinline__ uint32_t second_factors() const {
        return factors + sizeof(SharedStorage::factors);
    }
};

constexpr int STAGE_FACTOR_BYTES = SCALE_COLUMNS * FACTOR_WORDS * 4;

// A lane's codes and factors of a round: word j is four codes of row 8 j + 2 (lane % 4) and the same four of the next.
struct Codes {
    uint32_t words[ROUND_N / 8], factors[ROUND_N / 8];
    bool has_second;  // whether second factors count

    __device__ __forceinline__ void load(const CodeLane& lane, const SharedStorage& shared, int stage,
                                         int round) {
        ldmatrix_x4_trans(lane.codes + stage * CODE_BYTES + round * (ROUND_N * 128), words);
        const uint32_t at = stage * STAGE_FACTOR_BYTES + round * (ROUND_N / 2 * 4);
        ld_shared_v4_u32(lane.factors + at, factors[0], factors[1], factors[2], factors[3]);
        has_second = MAY_BE_LARGE && ld_shared_b32(shared_address(&shared.is_large[stage][round])) != 0;
    }

    // Codes i of both rows of a word become word i of the A operands: row 16 warp + lane / 4 + 8 (i % 2) of m64 i / 2.
    __device__ __forceinline__ void make_fragments(Fragments& fragments, const CodeLane& lane, int stage,
                                                   int round) const {
#pragma unroll
        for (int j = 0; j < ROUND_N / 8; ++j) {
            uint32_t values[4];
            const uint32_t octet[1] = {words[j]};
            expand_octet<FORMAT, false, false>(values, octet);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                fragments[j / 2][i / 2][j % 2 * 2 + i % 2] = mul_bf16x2(values[i], factors[j]);
        }
        if (MAY_BE_LARGE && has_second) {
            const uint32_t at = stage * STAGE_FACTOR_BYTES + round * (ROUND_N / 2 * 4);
            uint32_t second[ROUND_N / 8];
            ld_shared_v4_u32(lane.second_factors() + at, second[0], second[1], second[2], second[3]);
#pragma unroll
            for (int j = 0; j < ROUND_N / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t& word = fragments[j / 2][i / 2][j % 2 * 2 + i % 2];
                    word = mul_bf16x2(word, second[j]);
                }
            }
        }
    }
};

// Every lane says for itself that it has read the stage: no lane waits for its warp.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage) {
    mbarrier_arrive(shared_address(&shared.empty[stage]));
}

// Consumer: d = this warpgroup's columns of a tile of at most ROWS rows, before the global scale. The products of a round run
// while the fragments of the next are made: two sets of them. The first set of a stage is made at the end of the one before.
// (Making it at the top of the loop, with products under way, has ptxas serialise all of them: C7513.)
template <int ROWS>
__device__ __forceinline__ void multiply_tile(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                              const CodeLane& code_lane, int stages,
                                              Pipeline<STAGES>& pipeline) {
    // The shuffle tells the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t rows_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.rows)), 0);
    using Sums = float (&)[ROWS / 2];
    Codes codes;
    Fragments fragments[2];
    static_assert(ROUNDS == 2, "a set of fragments to each");
    const auto wait = [&] {
        mbarrier_wait(shared_address(&shared.has_factors[pipeline.stage]), pipeline.phase);
    };
    wait();
    codes.load(code_lane, shared, pipeline.stage, 0);
    codes.make_fragments(fragments[0], code_lane, pipeline.stage, 0);
    int before = -1;  // the stage before, whose products may still run
#pragma unroll 1
    for (int step = 0; step < stages; ++step) {
        const int stage = pipeline.stage;
        const uint32_t rows = rows_stage_0 + stage * (ROWS_BYTES / 16);
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < ROUND_N / 16; ++i) {
                const uint64_t descriptor =
                    k_major_128b_descriptor(rows + (round * (ROUND_N / 16) + i) * (32 / 16));
#pragma unroll
                for (int u = 0; u < M64S; ++u)
                    wgmma_m64k16<ROWS, false>(reinterpret_cast<Sums>(d[u]), fragments[round][i][u],
                                              descriptor, step != 0 || round != 0 || i != 0);
            }
            wgmma_commit_group();
            if (round + 1 < ROUNDS) {
                codes.load(code_lane, shared, stage, round + 1);
            } else {
                pipeline.advance();
                if (step + 1 < stages) {
                    wait();
                    codes.load(code_lane, shared, pipeline.stage, 0);
                } else {  // the last fragments are of old codes, and not used
                    codes.has_second = false;
                }
            }
            wgmma_wait_group<1>();  // the last round's fragments have been read
            if (round == 0 && step != 0) release_stage(shared, before);
            codes.make_fragments(fragments[(round + 1) % ROUNDS], code_lane, pipeline.stage,
                                 (round + 1) % ROUNDS);
        }
        before = stage;
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) pin_register(d[u][i]);
    }
    release_stage(shared, before);
}

// Consumer: a tile that has no column of this warpgroup.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, int stages, Pipeline<STAGES>& pipeline) {
    for (int step = 0; step < stages; ++step) {
        mbarrier_wait(shared_address(&shared.has_factors[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage);
        pipeline.advance();
    }
}

// Consumer: the sums as bf16 rows of D in slabs with the 128-byte swizzle. A lane has four neighbouring columns of a row:
// d[2 * c / 4 ..], c being the code of its word that they were multiplied with.
template <int ROWS>
__device__ __forceinline__ void stage_tile(const float (&d)[M64S][BLOCK_M / 2], uint32_t slabs, int warp,
                                           int lane) {
    const uint32_t slab = slabs + warp / 2 * SLAB_BYTES + lane / 4 % 2 * 8;
    const uint32_t chunk = warp % 2 * 4 + lane / 8;
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
            st_shared_v2_b32(slab + swizzle_128b(8 * i + lane % 4 * 2 + j, chunk),
                             cvt_bf16x2(d[0][4 * i + j], d[0][4 * i + 2 + j]),
                             cvt_bf16x2(d[1][4 * i + j], d[1][4 * i + 2 + j]));
    }
}

template <int ROWS>
__device__ __forceinline__ void store_tile(const float (&d)[M64S][BLOCK_M / 2], uint8_t* slabs, int k,
                                           const TensorMap& map_d, const Tile& tile, int warpgroup, int warp,
                                           int lane) {
    const bool issuer = warp == 0 && lane == 0;
    if (issuer) cp_async_bulk_wait_group_read_all();  // the last tile's store has left this memory
    bar_sync(1 + warpgroup, 128);
    stage_tile<ROWS>(d, shared_address(slabs), warp, lane);
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);
    if (!issuer) return;
    const int column = tile.column + warpgroup * WARPGROUP_COLUMNS;
    for (int s = 0; s < NUM_SLABS && column + s * SLAB_COLUMNS < k; ++s) {
        for (int row = 0; row < tile.rows; row += BOX_ROWS)
            store_slab_ragged(map_d, shared_address(slabs) + s * SLAB_BYTES + row * 128,
                              column + s * SLAB_COLUMNS, tile.row + row, tile.row + tile.rows);
    }
    cp_async_bulk_commit_group();
}
