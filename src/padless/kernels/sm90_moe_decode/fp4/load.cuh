// Weights of a consumer warp into its ring, stage by stage, in the order in which it multiplies them: units of the first product of
// all shares, then units of the second. The warp asks for a stage when it has the values of the one that was there, so that no
// barrier says that a stage is empty.
#pragma once

// The units of the first product of a share. Shares with a stripe more of the second product have no fewer: hidden rows are
// waited for by all CTAs, so the longest first product counts.
__device__ __forceinline__ Range first_units(const Tables& shared, const Problem& p, int share) {
    return range_of(shared.num_hit * p.units_of_expert(), share, gridDim.x);
}

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

    // Warp: asks for the next stage, into the place of the oldest. All lanes have the values of what is there.
    __device__ __forceinline__ void load_stage() {
        if (share_ < 0) return;
        if (elect_one()) {
            const int slot = warp_ * p_.stages + position_.stage;
            const uint32_t full = shared_address(&shared_.full[warp_][position_.stage]);
            const TensorMap& codes = is_second_ ? maps_.w2 : maps_.w13;
            const TensorMap& scales = is_second_ ? maps_.w2_scale : maps_.w13_scale;
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            tma_load_5d_evict_first(codes, layout_.codes + slot * CODE_BYTES, full, k_ * (STAGE_K / 2), 0, 0,
                                    place_, expert_);
            tma_load_4d(scales, layout_.scales + slot * SCALE_BYTES, full, 0, place_ % 2, k_ * STAGE_BLOCKS,
                        tile_);
        }
        position_.advance(p_.stages);
        if (++k_ == k_stages_) next_unit();
    }

  private:
    __device__ __forceinline__ void next_unit() {
        unit_ += NUM_CONSUMER_WARPS;
        if (unit_ < end_) {
            aim();
        } else {
            ++number_;
            find_unit();
        }
    }

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

    // All lanes know the same; the shuffles tell the compiler.
    __device__ __forceinline__ void aim() {
        const int of_one = is_second_ ? shared_.num_hit : p_.units_of_expert();
        const int quotient = unit_ / of_one, rest = unit_ - quotient * of_one;
        const int number = is_second_ ? rest : quotient;
        const int place = is_second_ ? share_ + quotient * static_cast<int>(gridDim.x) : rest;
        const int rows = is_second_ ? p_.h : 2 * p_.i;
        expert_ = __shfl_sync(0xffffffff, shared_.experts[number], 0);
        place_ = __shfl_sync(0xffffffff, place, 0);
        tile_ = expert_ * ((rows + 127) / 128) + place_ / 8;
        k_ = 0;
        k_stages_ = is_second_ ? p_.i_stages() : p_.h_stages();
    }

    SharedStorage& shared_;
    const Problem& p_;
    const Layout& layout_;
    const WeightMaps& maps_;
    const int warp_, lane_;
    bool is_second_ = false;
    int number_ = 0, share_ = NO_SHARE, unit_ = 0, end_ = 0;
    int expert_ = 0, place_ = 0;  // of w13's or w2's rows in sixteens
    int tile_ = 0;                // of scales: 128 rows
    int k_ = 0, k_stages_ = 0;
    RingPosition position_;
};
