// Weights of a consumer warp into its ring, stage by stage, in the order in which it multiplies them: units of the first product of
// all shares, then units of the second. The warp asks for a stage when it has the values of the one that was there, so that no
// barrier says that a stage is empty.
#pragma once

struct UnitDivisors {
    Divisor shares, of_expert;

    __device__ __forceinline__ explicit UnitDivisors(const Problem& p)
        : shares(gridDim.x), of_expert(p.units_of_expert()) {}
};

// The units of the first product of a share. Shares with a stripe more of the second product have no fewer: hidden rows are
// waited for by all CTAs, so the longest first product counts.
__device__ __forceinline__ Range first_units(const Tables& shared, const Problem& p, const UnitDivisors& by,
                                             int share) {
    const uint32_t units = shared.num_hit * p.units_of_expert();
    return {static_cast<int>(by.shares.quotient(units * share)),
            static_cast<int>(by.shares.quotient(units * (share + 1)))};  // range_of
}

struct WeightMaps {
    const TensorMap &w13, &w2, &w13_scale, &w2_scale;
};

// Where a stage of a warp's ring is.
struct Stage {
    uint32_t full, codes, scales;
};

// A warp's ring, and where in it the warp reads.
class Ring {
  public:
    __device__ __forceinline__ Ring(SharedStorage& shared, const Problem& p, const Layout& layout, int warp)
        : first_{shared_address(&shared.full[warp][0]), layout.codes + warp * p.stages * CODE_BYTES,
                 layout.scales + warp * p.stages * SCALE_BYTES} {}

    __device__ __forceinline__ Stage stage(int number) const {
        return {first_.full + number * 8, first_.codes + number * CODE_BYTES,
                first_.scales + number * SCALE_BYTES};
    }
    // The next stage, when it is there.
    __device__ __forceinline__ Stage await_stage(const Problem& p) {
        const Stage next = stage(position_.stage);
        mbarrier_wait(next.full, position_.phase);
        position_.advance(p.stages);
        return next;
    }

  private:
    Stage first_;
    RingPosition position_;
};

// Units of a warp in a share: `quotient` and `rest` of their numbers by `divisor`.
struct UnitNumber {
    int quotient, rest, divisor;

    __device__ __forceinline__ UnitNumber(int unit, int quotient, int divisor)
        : quotient(quotient), rest(unit - quotient * divisor), divisor(divisor) {}
    __device__ __forceinline__ void next() {
        rest += NUM_CONSUMER_WARPS;
#pragma unroll 1
        for (; rest >= divisor; rest -= divisor) ++quotient;
    }
};

// A unit of the second product: two groups of 8 columns, neighbours of one expert or the same of two.
struct SecondUnit {
    int stripe, number;  // the first expert's among those hit
    bool is_paired;

    __device__ __forceinline__ SecondUnit(const Problem& p, int stripe, int team)
        : stripe(stripe), number(p.is_paired() ? 2 * team : team), is_paired(p.is_paired()) {}

    // Group `n`'s number among those hit, its expert or -1 where there is none, its first column.
    __device__ __forceinline__ int number_of(int n) const { return number + (is_paired ? n : 0); }
    __device__ __forceinline__ int expert(const Tables& shared, int n) const {
        return number_of(n) < shared.num_hit ? shared.experts[number_of(n)] : -1;
    }
    __device__ __forceinline__ int column(int n) const {
        return is_paired ? stripe * 8 : stripe * UNIT_ROWS + n * 8;
    }
};

class WeightLoader {
    static constexpr int NEVER = -1, NOWHERE = 1 << 30;

  public:
    __device__ __forceinline__ WeightLoader(SharedStorage& shared, const Problem& p, const UnitDivisors& by,
                                            const WeightMaps& maps, int warp, int lane)
        : shared_(shared), p_(p), by_(by), maps_(maps), warp_(warp), lane_(lane) {
        find_unit();
    }

    // Warp: asks for what comes next, into a stage. All lanes have the values of what is there.
    __device__ __forceinline__ void load_stage(const Stage& stage) {
        if (is_loading_ && elect_one()) {
            const TensorMap& codes = is_second_ ? maps_.w2 : maps_.w13;
            const TensorMap& scales = is_second_ ? maps_.w2_scale : maps_.w13_scale;
            mbarrier_arrive_expect_tx(stage.full, STAGE_BYTES);
            load_codes(codes, stage.codes, stage.full, row_[0]);
            tma_load_2d(scales, stage.scales, stage.full, in_tile_[0], tile_[0]);
            if (is_second_) {
                load_codes(codes, stage.codes + CODE_BYTES / 2, stage.full, row_[1]);
                tma_load_2d(scales, stage.scales + SCALE_BYTES / 2, stage.full, in_tile_[1], tile_[1]);
            }
        }
        tile_[0] += STAGE_BLOCKS;
        tile_[1] += STAGE_BLOCKS;
        k_ += STAGE_K / 2;
        if (k_ == k_end_) next_unit();
    }

  private:
    // 16 rows, or 8 of the second product, of all experts' from `row` on.
    __device__ __forceinline__ void load_codes(const TensorMap& codes, uint32_t to, uint32_t full,
                                               int row) const {
        if constexpr (REPACKED)
            tma_load_5d_evict_first(codes, to, full, 0, row % TILE_CODE_ROWS / 4, k_ * 2 / TILE_K,
                                    row / TILE_CODE_ROWS, 0);
        else
            tma_load_2d_evict_first(codes, to, full, k_, row);
    }
    __device__ __forceinline__ void next_unit() {
        if (--left_ > 0) {
            number_.next();
            aim();
        } else {
            ++index_;
            find_unit();
        }
    }

    // The first unit of share `index_` or a later one, of this product or the next.
    __device__ __forceinline__ void find_unit() {
        for (;; ++index_) {
            share_ = share_at(shared_, index_, lane_);
            if (share_ < 0) {
                if (is_second_) {
                    is_loading_ = false;
                    k_end_ = NEVER;
                    return;
                }
                is_second_ = true;
                index_ = -1;
                continue;
            }
            const int teams = p_.teams(shared_.num_hit);
            const Range range =
                is_second_ ? Range{0, p_.stripes_of(share_) * teams} : first_units(shared_, p_, by_, share_);
            const int unit = range.begin + warp_;
            left_ = (range.end - unit + NUM_CONSUMER_WARPS - 1) / NUM_CONSUMER_WARPS;
            if (unit >= range.end) continue;
            number_ = is_second_ ? UnitNumber(unit, unit / teams, teams)
                                 : UnitNumber(unit, by_.of_expert.quotient(unit), p_.units_of_expert());
            break;
        }
        aim();
    }

    __device__ __forceinline__ void aim() {
        k_ = 0;
        if (!is_second_) {
            aim_at(0, shared_.experts[number_.quotient], number_.rest * UNIT_ROWS, 2 * p_.i, p_.h);
            k_end_ = p_.h_stages() * (STAGE_K / 2);
            return;
        }
        const SecondUnit unit(p_, share_ + number_.quotient * static_cast<int>(gridDim.x), number_.rest);
#pragma unroll
        for (int n = 0; n < 2; ++n) aim_at(n, unit.expert(shared_, n), unit.column(n), p_.h, p_.i);
        k_end_ = p_.i_stages() * (STAGE_K / 2);
    }
    // All lanes know the same; the shuffles tell the compiler.
    __device__ __forceinline__ void aim_at(int n, int expert, int row, int rows, int k) {
        const int tile = (expert * ((rows + 127) / 128) + row / 128) * ((k + 127) / 128);
        row_[n] = __shfl_sync(0xffffffff, expert < 0 ? NOWHERE : expert * rows + row, 0);
        tile_[n] = __shfl_sync(0xffffffff, expert < 0 ? NOWHERE : tile, 0);
        in_tile_[n] = __shfl_sync(0xffffffff, row % 32 * 16, 0);
    }

    SharedStorage& shared_;
    const Problem& p_;
    const UnitDivisors& by_;
    const WeightMaps& maps_;
    const int warp_, lane_;
    bool is_second_ = false;
    int index_ = 0, share_ = NO_SHARE, left_ = 0;
    UnitNumber number_{0, 0, 0};
    int row_[2] = {}, k_ = 0, k_end_ = 0;  // of w13 or w2, which comes in halves; bytes of K
    int in_tile_[2] = {}, tile_[2] = {};   // of scales: bytes of a tile, tiles of 128 rows by 128 of K
    bool is_loading_ = true;
};
