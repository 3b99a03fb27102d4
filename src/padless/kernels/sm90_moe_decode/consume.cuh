// A consumer warpgroup: tiles of the first product, whose activated rows go to global memory for all CTAs; then stripes of 16
// columns of the second product with all experts, which the two warpgroups of a CTA add up for every token.
#pragma once

// A warp's unit of the first product: 8 activated columns of an expert.
struct FirstUnit {
    uint32_t tokens = 0;  // none: there is no such unit
    int first_row = 0, column = 0;
    const float *gate_scales = nullptr, *up_scales = nullptr;

    __device__ __forceinline__ FirstUnit(const SharedStorage& shared, const Problem& p, int unit, int end) {
        if (unit >= end) return;
        const int number = unit / p.units_of_expert();
        column = unit % p.units_of_expert() * UNIT_OUTPUTS;
        tokens = shared.tokens_of[number];
        first_row = shared.first_row[number];
        const bool is_apart =
            p.run == p.units_of_expert();  // gate above up; else runs of 32, a 64 within one block
        const int gate = is_apart ? column / 128 : column / 64, up = is_apart ? (p.i + column) / 128 : gate;
        const long long blocks = static_cast<long long>(shared.experts[number]) * (2 * p.i / 128);
        gate_scales = p.w13_scale + (blocks + gate) * p.h_blocks();
        up_scales = p.w13_scale + (blocks + up) * p.h_blocks();
    }
};

__device__ __forceinline__ void store_hidden(const Problem& p, const FirstUnit& unit, uint32_t launches,
                                             const float (&d)[MOST_TOKENS / 2], int lane) {
    float gate[MOST_TOKENS / 4], up[MOST_TOKENS / 4];
#pragma unroll
    for (int n = 0; n < MOST_TOKENS / 4; ++n) {
        gate[n] = d[n / 2 * 4 + n % 2];
        up[n] = d[n / 2 * 4 + 2 + n % 2];
    }
    activate(gate, up);
    uint32_t* hidden = p.hidden(launches) + unit.column + lane / 4;
#pragma unroll
    for (int n = 0; n < MOST_TOKENS / 4; ++n) {
        const int row = row_of_token(unit.tokens, unit.first_row, n / 2 * 8 + lane % 4 * 2 + n % 2);
        const uint32_t word = ~__float_as_uint(gate[n]);
        if (row >= 0)
            st_relaxed_gpu(hidden + row * p.i, word == 0 ? ~0x7FFFFFFFu : word);  // 0 would be a NaN
    }
}

__device__ __forceinline__ void first_product(SharedStorage& shared, const Problem& p, const Layout& layout,
                                              uint32_t ring, int pipeline, int warp, int lane,
                                              RingPosition& position) {
    const CodeRows rows{layout.codes, MOST_TOKENS * BLOCK_K, layout.scales, MOST_TOKENS * 4};
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) return;
        const Range range = range_of(shared.num_hit * p.units_of_expert(), PIPELINES * share + pipeline,
                                     PIPELINES * gridDim.x);
        FirstUnit next(shared, p, range.begin + warp, range.end);
        WeightScales scales = load_scales(next.gate_scales, next.up_scales, p.h_blocks(), lane);
        for (int tile = range.begin; tile < range.end; tile += TILE_UNITS) {
            const FirstUnit unit = next;
            const WeightScales here = scales;
            next = FirstUnit(shared, p, tile + TILE_UNITS + warp, range.end);
            scales = load_scales(next.gate_scales, next.up_scales, p.h_blocks(), lane);
            float d[MOST_TOKENS / 2];
            multiply<MOST_TOKENS>(d, shared, p, ring, pipeline, p.h_blocks(), rows, here, lane, position);
            store_hidden(p, unit, shared.launches, d, lane);
        }
    }
}

__device__ __forceinline__ const float* stripe_scales(const SharedStorage& shared, const Problem& p,
                                                      int stripe, int number) {
    if (number >= shared.num_hit || stripe >= p.stripes()) return nullptr;
    const long long blocks = static_cast<long long>(shared.experts[number]) * (p.h / 128);
    return p.w2_scale + (blocks + stripe * UNIT_ROWS / 128) * p.i_blocks();
}

// A warp's unit of the second product: the columns of a stripe with an expert, of which a tile has four.
struct StripeUnit {
    int eight = 0, eights = 1;  // the tile's rows in eights
    int begin = 0, end = 0;     // the expert's; none: there is no such unit
    WeightScales scales;

    // Of the tile with the experts from number `first` on.
    __device__ __forceinline__ StripeUnit(const SharedStorage& shared, const Problem& p, int stripe,
                                          int first, int warp, int lane) {
        const int hit = shared.num_hit, number = first + warp;
        const float* of_expert = nullptr;
        if (stripe < p.stripes() && first < hit) {
            eight = shared.first_row[first] / 8;
            eights = (shared.first_row[min(first + TILE_UNITS, hit)] + 7) / 8 - eight;
            if (number < hit) {
                begin = shared.first_row[number];
                end = shared.first_row[number + 1];
                of_expert = stripe_scales(shared, p, stripe, number);
            }
        }
        scales = load_scales(of_expert, of_expert, p.i_blocks(), lane);
    }
};

// Results of a unit to shared memory, rounded. Rows are in eights, N of them.
template <int N>
__device__ __forceinline__ void stripe_tile(SharedStorage& shared, const Problem& p, const Layout& layout,
                                            uint32_t ring, int pipeline, int parity, const StripeUnit& unit,
                                            int lane, RingPosition& position) {
    const int room = p.room_for_rows();
    const CodeRows rows{layout.codes + unit.eight * 8 * BLOCK_K, static_cast<uint32_t>(room * BLOCK_K),
                        layout.scales + unit.eight * 32, static_cast<uint32_t>(room * 4)};
    float d[N / 2];
    multiply<N>(d, shared, p, ring, pipeline, p.i_blocks(), rows, unit.scales, lane, position);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = 8 * (unit.eight + i) + lane % 4 * 2 + j;
            if (row < unit.begin || row >= unit.end) continue;
            const uint32_t pair = cvt_bf16x2(d[4 * i + j], d[4 * i + 2 + j]);
            st_shared_u16(layout.result(p, parity, row, lane / 4), static_cast<uint16_t>(pair));
            st_shared_u16(layout.result(p, parity, row, lane / 4 + 8), static_cast<uint16_t>(pair >> 16));
        }
    }
}

// Calls stripe_tile for `eights` times 8 rows.
template <int EIGHTS, class... Arguments>
__device__ __forceinline__ void stripe_tile_of(int eights, Arguments&... arguments) {
    constexpr int MOST =
        MOST_TOKENS / 2 + 1;  // four experts have 4 MOST_TOKENS rows at most, from any row on
    if constexpr (EIGHTS <= MOST) {
        if (eights <= EIGHTS)
            stripe_tile<8 * EIGHTS>(arguments...);
        else
            stripe_tile_of<EIGHTS + 1>(eights, arguments...);
    }
}

// Router warp: the weights' scales of all of this CTA's stripes on their way to L2. Consumers ask for a tile's scales one tile
// ahead only, and memory may take longer than that tile.
__device__ __forceinline__ void prefetch_stripe_scales(SharedStorage& shared, const Problem& p, int lane) {
    constexpr int SECTOR = 8;  // floats
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) return;
        for (int stripe = share; stripe < p.stripes(); stripe += gridDim.x) {
            for (int number = lane; number < shared.num_hit; number += 32) {
                const float* scales = stripe_scales(shared, p, stripe, number);
                for (int kb = 0; kb < p.i_blocks(); kb += SECTOR) prefetch_global_l2(scales + kb);
                prefetch_global_l2(scales + p.i_blocks() - 1);
            }
        }
    }
}

// The first unit of a warp in its CTA's first share.
__device__ __forceinline__ StripeUnit first_stripe_unit(SharedStorage& shared, const Problem& p, int pipeline,
                                                        int warp, int lane) {
    const int share = share_at(shared, 0, lane);
    return StripeUnit(shared, p, share < 0 ? p.stripes() : share, pipeline * TILE_UNITS, warp, lane);
}

// `next`: first_stripe_unit.
__device__ __forceinline__ void second_product(SharedStorage& shared, const Problem& p, const Layout& layout,
                                               uint32_t ring, int pipeline, int warp, int lane,
                                               StripeUnit next, RingPosition& position) {
    constexpr int STEP = PIPELINES * TILE_UNITS;
    const int thread = pipeline * 128 + warp * 32 + lane, token = thread / UNIT_ROWS,
              column = thread % UNIT_ROWS;
    const int hit = shared.num_hit;
    int parity = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) return;
        if (n > 0) next = StripeUnit(shared, p, share, pipeline * TILE_UNITS, warp, lane);
#pragma unroll 1
        for (int stripe = share; stripe < p.stripes(); stripe += gridDim.x) {
            const int at = token * p.h + stripe * UNIT_ROWS + column;
            float shared_value = 0.0f;
            if (p.shared != nullptr && token < p.tokens) shared_value = cvt_f32_bf16(p.shared[at]);
#pragma unroll 1
            for (int first = pipeline * TILE_UNITS; first < hit; first += STEP) {
                const StripeUnit unit = next;
                const bool is_last = first + STEP >= hit;
                next = StripeUnit(shared, p, is_last ? stripe + gridDim.x : stripe,
                                  is_last ? pipeline * TILE_UNITS : first + STEP, warp, lane);
                stripe_tile_of<1>(unit.eights, shared, p, layout, ring, pipeline, parity, unit, lane,
                                  position);
            }
            bar_sync(CODES_BARRIER, NUM_CONSUMERS);
            if (token < p.tokens) {
                const float sum =
                    sum_of_slots(shared, p, layout.result(p, parity, 0, column), token, shared_value);
                p.out[at] = static_cast<uint16_t>(cvt_bf16x2(sum, 0.0f));
            }
            parity ^= 1;
        }
    }
}
