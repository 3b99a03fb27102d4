// The products of a tile of sm90_bf16_grouped_gemm.cu.
#pragma once

// The sums of ROWS tokens of an m64: the first of those that a lane has room for.
template <int ROWS>
using Sums = float[ROWS / 2];

// Consumer: until the weights of a stage have come, and the converters have looked at its scales.
__device__ __forceinline__ void await_weights(SharedStorage& shared, const Pipeline<STAGES>& pipeline) {
    mbarrier_wait(
        shared_address(BEGINS_IN_F16 ? &shared.checked[pipeline.stage] : &shared.full[pipeline.stage]),
        pipeline.phase);
}

// Consumer: d = this warpgroup's m64s of a tile of at most ROWS tokens, before global scales, to the last stage of K, or, where a
// tile begins in f16, to one that wants bf16: returns which. Registers as in wgmma_m64k16.cuh.
//
// A stage is given back behind the first products of its last codes, not behind the loads of these: an arrival on an mbarrier
// does not wait for the values of earlier loads, and a copy, which writes through the async proxy, can be there before them. On
// an H200 so many calls were wrong that gave it back behind the loads (docs/kernels/sm90_bf16/ladder.md). A product cannot be
// issued without its values.
//
// The products of one round run while the fragments of the next are made: two sets of fragments, by the round's parity.
// The set for round 0 of the next K block is carried round the loop. (Making it at the top of the loop, with products of
// the last round under way, has ptxas serialise all of them: C7513.)
template <int ROWS>
__device__ __forceinline__ int multiply_stages(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                               const Problem& problem, const Tile& tile,
                                               const WeightLane& weights, int lane,
                                               Pipeline<STAGES>& pipeline, Pipeline<TOKEN_STAGES>& ring) {
    const int k_stages = problem.k_stages();
    constexpr bool F16 = IS_F16 || BEGINS_IN_F16;
    // A stage has one load of codes, or two, before the octets 0 and LAST_PART: FP4's two K blocks or FP8's half K blocks.
    constexpr int STAGE_OCTETS = 4 * STAGE_BLOCKS;
    constexpr int LAST_PART = STAGE_OCTETS - OCTETS;
    static_assert(LAST_PART == 0 || LAST_PART == OCTETS, "no more than two loads");
    // The shuffle tells the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t tokens_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.tokens[0])), 0);
    float sums[M64S][BLOCK_M / 2];  // of 128 of K, where they are promoted
    if constexpr (PROMOTE || BEGINS_IN_F16) {
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) d[u][i] = 0.0f;
        }
    }

    WeightSection<F16> section;
    Fragments fragments[2];
    int used = 0;  // stage of the tokens before
    const float* weight_scales = HAS_WEIGHT_SCALES ? weights.first_scale(problem, tile) : nullptr;
    float weight_scale = HAS_WEIGHT_SCALES ? __ldg(weight_scales) : 0.0f;  // on its way meanwhile
    await_weights(shared, pipeline);
    section.load_scales(weights, pipeline.stage, 0, 0, k_stages);
    section.load_codes(weights, pipeline.stage, 0, 0);
    bool ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage, lane);  // before this stage
    section.make_fragments(fragments[0], 0);

    int ks = 0;
    for (; ks < k_stages && !ends; ++ks) {
        const int stage = pipeline.stage, from = ring.stage;
        const uint32_t tokens = tokens_stage_0 + from * (STAGE_BLOCKS * 2 * TOKEN_HALF_BYTES / 16);
        mbarrier_wait(shared_address(&shared.tokens_full[from]), ring.phase);
#pragma unroll
        for (int round = 0; round < STAGE_BLOCKS * ROUNDS; ++round) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2 * ROUND_OCTETS; ++i) {
                const int step = round * 2 * ROUND_OCTETS + i;
                const uint64_t descriptor = k_major_128b_descriptor(
                    tokens + step / 4 * (TOKEN_HALF_BYTES / 16) + step % 4 * (32 / 16));
#pragma unroll
                for (int u = 0; u < M64S; ++u) {
                    Sums<ROWS>& target = reinterpret_cast<Sums<ROWS>&>(PROMOTE ? sums[u] : d[u]);
                    wgmma_m64k16<ROWS, F16>(target, fragments[round % 2][i / 2][u][i % 2], descriptor,
                                            step != 0 || BEGINS_IN_F16 || (!PROMOTE && ks != 0));
                }
            }
            wgmma_commit_group();
            if (round * ROUND_OCTETS == LAST_PART) arrive_warp(shared.empty[stage], lane);

            const int next_octet = (round + 1) * ROUND_OCTETS;
            if (next_octet == STAGE_OCTETS) {
                pipeline.advance();
                if (ks + 1 < k_stages) {  // else the last fragments are of old codes, and not used
                    await_weights(shared, pipeline);
                    section.load_scales(weights, pipeline.stage, 0, ks + 1, k_stages);
                    section.load_codes(weights, pipeline.stage, 0, 0);
                    ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage, lane);
                }
            } else if (next_octet == LAST_PART) {
                if (STAGE_BLOCKS == 2) section.load_scales(weights, stage, 1, ks, k_stages);
                section.load_codes(weights, stage, STAGE_BLOCKS - 1, LAST_PART % 4 / OCTETS);
            }
            wgmma_wait_group<1>();                  // the last round's fragments have been read
            if (!PROMOTE && round == 0 && ks != 0)  // and with it, all tokens of the last stage
                arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[used], lane);
            section.make_fragments(fragments[(round + 1) % 2], (round + 1) % ROUNDS);
        }

        if constexpr (PROMOTE) {
            wgmma_wait_group<0>();
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) pin_register(sums[u][i]);
            }
            const float of_weights = weight_scale;
            if constexpr (HAS_WEIGHT_SCALES) {
                weight_scales += problem.scales_k_stride;
                if (ks + 1 < k_stages) weight_scale = __ldg(weight_scales);
            }
#pragma unroll
            for (int i = 0; i < ROWS / 8; ++i) {  // tokens 8 i + 2 quad and the next
                float scale[2] = {of_weights, of_weights};
                if constexpr (!HAS_WEIGHT_SCALES)
                    ld_shared_f32x2(shared_address(&shared.token_scales[from][8 * i + 2 * (lane % 4)]),
                                    scale[0], scale[1]);
#pragma unroll
                for (int u = 0; u < M64S; ++u) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        d[u][4 * i + j] = fmaf(sums[u][4 * i + j], scale[j % 2], d[u][4 * i + j]);
                }
            }
            arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[from], lane);
        }
        used = from;
        ring.advance();
    }

    if constexpr (!PROMOTE) {
        wgmma_wait_group<0>();
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) pin_register(d[u][i]);
        }
        if (!BEGINS_IN_F16 || ks != 0) arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[used], lane);
    }
    return ks;
}

// Consumer: what multiply_stages left, the stages from `begin` on, in bf16. That is rare, and so each round's products are waited
// for: a second loop like the other would exceed the registers.
template <int ROWS>
__device__ __forceinline__ void multiply_rest_in_bf16(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                                      int begin, int k_stages, const WeightLane& weights,
                                                      int lane, Pipeline<STAGES>& pipeline,
                                                      Pipeline<TOKEN_STAGES>& ring) {
    const uint32_t tokens_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.tokens[0])), 0);
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) d[u][i] *= F16_UNSHIFT;
    }
    for (int ks = begin; ks < k_stages; ++ks) {
        const uint32_t tokens = tokens_stage_0 + ring.stage * (STAGE_BLOCKS * 2 * TOKEN_HALF_BYTES / 16);
        await_weights(shared, pipeline);
        mbarrier_wait(shared_address(&shared.tokens_full[ring.stage]), ring.phase);
#pragma unroll 1
        for (int octet = 0; octet < 4 * STAGE_BLOCKS; ++octet) {
            WeightSection<false> section;
            section.load_scales(weights, pipeline.stage, octet / 4, ks, k_stages);
            section.load_octet(weights, pipeline.stage, octet);
            uint32_t fragments[M64S][2][4];
            section.make_fragments(fragments, 0);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint64_t descriptor = k_major_128b_descriptor(
                    tokens + octet / 2 * (TOKEN_HALF_BYTES / 16) + (octet % 2 * 2 + i) * (32 / 16));
#pragma unroll
                for (int u = 0; u < M64S; ++u)
                    wgmma_m64k16<ROWS, false>(reinterpret_cast<Sums<ROWS>&>(d[u]), fragments[u][i],
                                              descriptor, true);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) pin_register(d[u][i]);
            }
        }
        arrive_warp(shared.empty[pipeline.stage], lane);
        arrive_warp(shared.tokens_empty[ring.stage], lane);
        pipeline.advance();
        ring.advance();
    }
}

// Consumer: d = this warpgroup's m64s of a tile of at most ROWS tokens, before global scales, over a factor that is returned.
template <int ROWS>
__device__ __forceinline__ float multiply_tile(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                               const Problem& problem, const Tile& tile,
                                               const WeightLane& weights, int lane,
                                               Pipeline<STAGES>& pipeline, Pipeline<TOKEN_STAGES>& ring) {
    const int done = multiply_stages<ROWS>(d, shared, problem, tile, weights, lane, pipeline, ring);
    if constexpr (BEGINS_IN_F16) {
        const int k_stages = problem.k_stages();
        if (done < k_stages)
            multiply_rest_in_bf16<ROWS>(d, shared, done, k_stages, weights, lane, pipeline, ring);
        return done == k_stages ? F16_UNSHIFT : 1.0f;
    }
    return 1.0f;
}
