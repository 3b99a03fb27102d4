// A consumer warp: units of the first product, whose activated rows go to global memory for all CTAs; then units of the second
// product, columns of the result with an expert or two, which the CTA adds up for every token.
#pragma once

struct Consumer {
    SharedStorage& shared;
    const Problem& p;
    const UnitDivisors& by;
    const Layout& layout;
    WeightLoader& loader;
    Ring& ring;
    int warp, lane;

    // What the lane reads of a row. Of rows that there are not it reads another: what they give is read by nobody.
    __device__ __forceinline__ uint32_t row_address(int row, int k_stages) const {
        return layout.rows + row * layout.row_bytes(k_stages) + lane % 4 * 16;
    }
};

// Activated values of a column of two tokens, in each lane; stored with the columns four before or after, which another lane has, as
// words of an octet: one of them each.
__device__ __forceinline__ void store_hidden(const Consumer& c, const float (&v)[2], int number, int column) {
    const int lane = c.lane, in_octet = pair_of_lane(lane), upper = in_octet / 4;
    const float given = upper ? v[0] : v[1], kept = upper ? v[1] : v[0];
    const float taken = __shfl_xor_sync(0xffffffff, given, OF_FOURTH_PAIR);
    const uint32_t pair = upper ? cvt_bf16x2(taken, kept) : cvt_bf16x2(kept, taken);
    const int row =
        row_of_token(c.shared.tokens_of[number], c.shared.first_row[number], lane % 4 * 2 + upper);
    const int place = place_of_octet(column / 8, row, c.shared.first_row[c.shared.num_hit]);
    if (row >= 0) st_relaxed_gpu(c.p.hidden(c.shared.launches) + place * 4 + in_octet % 4, ~pair);
}

__device__ __forceinline__ void first_product(Consumer& c) {
    const Problem& p = c.p;
    const int output = pair_of_lane(c.lane);
    for (int n = 0;; ++n) {
        const int share = share_at(c.shared, n, c.lane);
        if (share < 0) return;
        const Range range = first_units(c.shared, p, c.by, share);
        const int begin = range.begin + c.warp;
        UnitNumber at(begin, c.by.of_expert.quotient(begin), p.units_of_expert());
#pragma unroll 1
        for (int unit = begin; unit < range.end; unit += NUM_CONSUMER_WARPS, at.next()) {
            const int number = at.quotient, column = at.rest * UNIT_OUTPUTS;
            const UnitLane<false> lanes(c.lane, at.rest * UNIT_ROWS);
            float2 bias{0.0f, 0.0f};
            if (p.bias13 != nullptr)
                bias = __ldg(reinterpret_cast<const float2*>(p.bias13) +
                             static_cast<long long>(c.shared.experts[number]) * p.i + column + output);
            float d[4];
            multiply(d, c.shared, p, c.ring, c.loader, lanes, p.h_stages(), p.h / 32,
                     c.row_address(min(c.lane / 4, p.tokens - 1), p.h_stages()), c.lane);
            float gate[2] = {__fadd_rn(d[0], bias.x), __fadd_rn(d[1], bias.x)};
            const float up[2] = {__fadd_rn(d[2], bias.y), __fadd_rn(d[3], bias.y)};
            activate(gate, up);
            store_hidden(c, gate, number, column);
        }
    }
}

// What a lane reads of the rows of a unit's experts: those of the second, if there is one, from the fifth on.
__device__ __forceinline__ uint32_t rows_of(const Consumer& c, const SecondUnit& unit) {
    const int n = c.lane / 4, group = unit.is_paired ? n / 4 : 0;
    const int number = min(unit.number_of(group), c.shared.num_hit - 1), first = c.shared.first_row[number];
    return c.row_address(min(first + n - 4 * group, c.shared.first_row[number + 1] - 1), c.p.i_stages());
}

__device__ __forceinline__ void second_product(Consumer& c) {
    const Problem& p = c.p;
    const Tables& tables = c.shared;
    const int hit = tables.num_hit, rows = tables.first_row[hit], teams = p.teams(hit),
              of_stripe = p.columns();
    for (int n = 0;; ++n) {
        const int share = share_at(c.shared, n, c.lane);
        if (share < 0) return;
        const int stripes = p.stripes_of(share);
        UnitNumber at(c.warp, c.warp / max(teams, 1), teams);
#pragma unroll 1
        for (int index = c.warp; index < stripes * teams; index += NUM_CONSUMER_WARPS, at.next()) {
            const int place = at.quotient, in_group = weight_row_of_lane(c.lane);
            const SecondUnit unit(p, share + place * static_cast<int>(gridDim.x), at.rest);
            float bias[2] = {};
            if (p.bias2 != nullptr) {
#pragma unroll
                for (int g = 0; g < 2; ++g)
                    bias[g] = __ldg(p.bias2 + static_cast<long long>(max(unit.expert(tables, g), 0)) * p.h +
                                    unit.column(g) + in_group);
            }
            const UnitLane<true> lanes(c.lane, unit.column(0));
            float d[4];
            multiply(d, c.shared, p, c.ring, c.loader, lanes, p.i_stages(), p.i / 32, rows_of(c, unit),
                     c.lane);
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                if (unit.number_of(g) >= hit) continue;
                const int first = tables.first_row[unit.number_of(g)],
                          end = tables.first_row[unit.number_of(g) + 1];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int in_expert = c.lane % 4 * 2 + j - (unit.is_paired ? 4 * g : 0);
                    if (in_expert < 0 || first + in_expert >= end) continue;
                    const uint32_t value = cvt_bf16x2(__fadd_rn(d[2 * g + j], bias[g]), 0.0f);
                    st_shared_u16(c.layout.result(place, rows, first + in_expert,
                                                  in_group + (unit.is_paired ? 0 : 8 * g)),
                                  static_cast<uint16_t>(value));
                }
            }
        }
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);
        const int outputs = stripes * p.tokens * of_stripe;
        for (int index = c.warp * 32 + c.lane; index < outputs; index += NUM_CONSUMERS) {
            const int column = index % of_stripe, token = index / of_stripe % p.tokens,
                      place = index / of_stripe / p.tokens;
            const int at_output =
                token * p.h + (share + place * static_cast<int>(gridDim.x)) * of_stripe + column;
            const float of_all = p.shared == nullptr ? 0.0f : cvt_f32_bf16(p.shared[at_output]);
            const float sum = sum_of_slots(tables, p, c.layout.result(place, rows, 0, column), token, of_all);
            p.out[at_output] = static_cast<uint16_t>(cvt_bf16x2(sum, 0.0f));
        }
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // results are read no more
    }
}
