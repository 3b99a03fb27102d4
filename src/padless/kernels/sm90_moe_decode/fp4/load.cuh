// Weights of a consumer warp into its ring, stage by stage, in the order in which it multiplies them: units of the first product of
// all shares, then units of the second. The warp asks for a stage when it has read the one that was there, so that no barrier
// says that a stage is empty.
#pragma once

// The units of the first product of a share. They are fewer where the share has a stripe more of the second product, so that
// all shares have as many weights to read.
__device__ __forceinline__ Range first_units(const Tables& shared, const Problem& p, int share) {
    const int shares = gridDim.x, units = shared.num_hit * p.units_of_expert();
    const int longer = p.stripes() % shares;  // that have a stripe more
    const int stripe = shared.num_hit * p.i_stages() / p.h_stages();
    const int even = units - (shares - longer) * stripe;
    if (longer == 0 || even < 0) return range_of(units, share, shares);
    const Range range = range_of(even, share, shares);
    return {range.begin + stripe * max(share - longer, 0), range.end + stripe * max(share + 1 - longer, 0)};
}

// Where a row's scales are in tiles of 32x4x4: the tile of 128 rows, the half of its 32 rows of 16 bytes, and the word of
// those bytes.
struct ScaleRows {
    int tile, half, word;
    __device__ __forceinline__ explicit ScaleRows(int first_row)
        : tile(first_row / 128), half(first_row / 16 % 2), word(first_row / 32 % 4) {}
};

struct WeightMaps {
    const TensorMap &w13, &w2, &w13_scale, &w2_scale;
};

class WeightLoader {
  public:
    __device__ __forceinline__ WeightLoader(SharedStorage& shared, const Problem& p, const Layout& layout,
                                            const WeightMaps& maps, int warp, int lane)
        : shared_(shared), p_(p), layout_(layout), maps_(maps), warp_(warp), lane_(lane) {
        find_unit();
    }

    // Warp: asks for the next stage, into the place of the oldest. All lanes have read what is there.
    __device__ __forceinline__ void load_stage() {
        if (share_ < 0) return;
        const int slot = warp_ * p_.stages + position_.stage;
        if (lane_ == 0) {
            const uint32_t full = shared_address(&shared_.full[warp_][position_.stage]);
            const uint32_t codes = layout_.codes + slot * CODE_BYTES,
                           scales = layout_.scales + slot * SCALE_BYTES;
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            const ScaleRows rows(is_second_ ? row_ : row_ * 2);
            if (is_second_) {
                tma_load_3d_evict_first(maps_.w2, codes, full, k_ * (STAGE_K / 2), row_, expert_);
                tma_load_4d(maps_.w2_scale, scales, full, 0, rows.half, k_ * STAGE_BLOCKS,
                            expert_ * ((p_.h + 127) / 128) + rows.tile);
            } else {
                tma_load_5d_evict_first(maps_.w13, codes, full, k_ * (STAGE_K / 2), 0, 0, row_ / UNIT_OUTPUTS,
                                        expert_);
                tma_load_4d(maps_.w13_scale, scales, full, 0, rows.half, k_ * STAGE_BLOCKS,
                            expert_ * ((2 * p_.i + 127) / 128) + rows.tile);
            }
        }
        position_.advance(p_.stages);
        if (++k_ < (is_second_ ? p_.i_stages() : p_.h_stages())) return;
        k_ = 0;
        unit_ += NUM_CONSUMER_WARPS;
        if (unit_ < end_)
            aim();
        else {
            ++number_;
            find_unit();
        }
    }

  private:
    // The first unit of share `number_` or a later one, of this product or the next.
    __device__ __forceinline__ void find_unit() {
        for (;; ++number_) {
            share_ = share_at(shared_, number_, lane_);
            if (share_ < 0) {
                if (is_second_) return;
                is_second_ = true;
                number_ = -1;
                continue;
            }
            const Range range = is_second_ ? Range{0, p_.stripes_of(share_) * shared_.num_hit}
                                           : first_units(shared_, p_, share_);
            unit_ = range.begin + warp_;
            end_ = range.end;
            if (unit_ < end_) break;
        }
        aim();
    }

    __device__ __forceinline__ void aim() {
        if (is_second_) {
            expert_ = shared_.experts[unit_ % shared_.num_hit];
            row_ = (share_ + unit_ / shared_.num_hit * static_cast<int>(gridDim.x)) * UNIT_ROWS;
        } else {
            expert_ = shared_.experts[unit_ / p_.units_of_expert()];
            row_ = unit_ % p_.units_of_expert() * UNIT_OUTPUTS;
        }
    }

    SharedStorage& shared_;
    const Problem& p_;
    const Layout& layout_;
    const WeightMaps& maps_;
    const int warp_, lane_;
    bool is_second_ = false;
    int number_ = 0, share_ = NO_SHARE, unit_ = 0, end_ = 0, k_ = 0;
    int expert_ = 0, row_ = 0;  // the first activated column, or the first column of the result
    RingPosition position_;
};
