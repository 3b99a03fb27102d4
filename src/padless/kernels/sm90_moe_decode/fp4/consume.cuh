// A consumer warp: units of the first product, whose activated rows go to global memory for all CTAs; then units of the second
// product, 16 columns of the result with an expert, which the CTA adds up for every token.
#pragma once

struct Consumer {
    SharedStorage& shared;
    const Problem& p;
    const Layout& layout;
    WeightLoader& loader;
    int warp, lane;
    RingPosition position;

    // What the lane reads of rows from `first` on, of which there are `count`; more than those give what nothing reads.
    __device__ __forceinline__ uint32_t rows_from(int first, int count) const {
        const int row = first + min(lane / 4, count - 1);
        return layout.rows + (row * 4 + lane % 4) * 16;
    }
};

// Activated values of a column of two tokens, in each lane; stored with the columns four before or after, which the lane next to it
// has, as words of an octet: one of them each.
__device__ __forceinline__ void store_hidden(const Consumer& c, const float (&v)[2], int number, int column) {
    const int lane = c.lane, upper = lane / 4 % 2;
    const float given = upper ? v[0] : v[1], kept = upper ? v[1] : v[0];
    const float taken = __shfl_xor_sync(0xffffffff, given, 4);
    const uint32_t pair = upper ? cvt_bf16x2(taken, kept) : cvt_bf16x2(kept, taken);
    const int row =
        row_of_token(c.shared.tokens_of[number], c.shared.first_row[number], lane % 4 * 2 + upper);
    const int place = place_of_octet(column / 8, row, c.shared.first_row[c.shared.num_hit]);
    if (row >= 0) st_relaxed_gpu(c.p.hidden(c.shared.launches) + place * 4 + lane / 8, ~pair);
}

__device__ __forceinline__ void first_product(Consumer& c) {
    const Problem& p = c.p;
    const int row = row_of_lane(c.lane);
    for (int n = 0;; ++n) {
        const int share = share_at(c.shared, n, c.lane);
        if (share < 0) return;
        const Range range = first_units(c.shared, p, share);
        for (int unit = range.begin + c.warp; unit < range.end; unit += NUM_CONSUMER_WARPS) {
            const int number = unit / p.units_of_expert(), column = unit % p.units_of_expert() * UNIT_OUTPUTS;
            const UnitLane lanes(c.lane, unit % p.units_of_expert(), 2 * row, 2 * row + 1);
            float2 bias{0.0f, 0.0f};
            if (p.bias13 != nullptr)
                bias = __ldg(reinterpret_cast<const float2*>(p.bias13) +
                             static_cast<long long>(c.shared.experts[number]) * p.i + column + row);
            float d[4];
            multiply(d, c.shared, p, c.layout, c.loader, lanes, p.h_stages(), p.h / 32,
                     c.rows_from(0, p.tokens), p.tokens * 64, c.warp, c.lane, c.position);
            float gate[2] = {__fadd_rn(d[0], bias.x), __fadd_rn(d[1], bias.x)};
            const float up[2] = {__fadd_rn(d[2], bias.y), __fadd_rn(d[3], bias.y)};
            activate(gate, up);
            store_hidden(c, gate, number, column);
        }
    }
}

__device__ __forceinline__ void second_product(Consumer& c) {
    const Problem& p = c.p;
    const Tables& tables = c.shared;
    const int hit = tables.num_hit, rows = tables.first_row[hit], row = row_of_lane(c.lane);
    for (int n = 0;; ++n) {
        const int share = share_at(c.shared, n, c.lane);
        if (share < 0) return;
        const int stripes = p.stripes_of(share);
        for (int unit = c.warp; unit < stripes * hit; unit += NUM_CONSUMER_WARPS) {
            const int number = unit % hit, place = unit / hit;
            const int column = (share + place * static_cast<int>(gridDim.x)) * UNIT_ROWS + row;
            const int first = tables.first_row[number], count = tables.first_row[number + 1] - first;
            const UnitLane lanes(c.lane, column / UNIT_ROWS, row, row + 8);
            float bias[2] = {0.0f, 0.0f};
            if (p.bias2 != nullptr) {
                const float* of_column =
                    p.bias2 + static_cast<long long>(tables.experts[number]) * p.h + column;
                bias[0] = __ldg(of_column);
                bias[1] = __ldg(of_column + 8);
            }
            float d[4];
            multiply(d, c.shared, p, c.layout, c.loader, lanes, p.i_stages(), p.i / 32,
                     c.rows_from(first, count), rows * 64, c.warp, c.lane, c.position);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int in_expert = c.lane % 4 * 2 + j;
                if (in_expert >= count) continue;
                const uint32_t pair = cvt_bf16x2(__fadd_rn(d[j], bias[0]), __fadd_rn(d[2 + j], bias[1]));
                const uint32_t at = c.layout.result(place, rows, first + in_expert, row);
                st_shared_u16(at, static_cast<uint16_t>(pair));
                st_shared_u16(at + 16, static_cast<uint16_t>(pair >> 16));
            }
        }
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);
        const int outputs = stripes * p.tokens * UNIT_ROWS;
        for (int index = c.warp * 32 + c.lane; index < outputs; index += NUM_CONSUMERS) {
            const int column = index % UNIT_ROWS, token = index / UNIT_ROWS % p.tokens,
                      place = index / UNIT_ROWS / p.tokens;
            const int at = token * p.h + (share + place * static_cast<int>(gridDim.x)) * UNIT_ROWS + column;
            const float of_all = p.shared == nullptr ? 0.0f : cvt_f32_bf16(p.shared[at]);
            const float sum = sum_of_slots(tables, p, c.layout.result(place, rows, 0, column), token, of_all);
            p.out[at] = static_cast<uint16_t>(cvt_bf16x2(sum, 0.0f));
        }
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // results are read no more
    }
}
