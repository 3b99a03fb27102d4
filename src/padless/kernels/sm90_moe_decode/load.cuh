// The producer warp of a pipeline: weights of its tiles into its ring, in the order in which its consumers take them. A lane
// of the first four has the tile's unit of the same number; a unit that there is not is read as zeros, from outside the tensor.
#pragma once

constexpr int NOWHERE = 1 << 30;

struct UnitDivisors {
    Divisor workers, of_expert, run;
    int runs_of_expert;

    __device__ __forceinline__ explicit UnitDivisors(const Problem& p)
        : workers(PIPELINES * gridDim.x),
          of_expert(p.units_of_expert()),
          run(p.run),
          runs_of_expert(run.quotient(p.units_of_expert())) {}
};

template <class Copy>
__device__ __forceinline__ void load_tile(SharedStorage& shared, const Problem& p, uint32_t ring,
                                          int pipeline, int k_blocks, int lane, RingPosition& position,
                                          const Copy& copy) {
#pragma unroll 1
    for (int kb = 0; kb < k_blocks; ++kb) {
        const uint32_t full = shared_address(&shared.full[pipeline][position.stage]);
        if (lane == 0) {
            mbarrier_wait(shared_address(&shared.empty[pipeline][position.stage]), position.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        }
        __syncwarp();
        if (lane < TILE_UNITS)
            copy(ring + position.stage * STAGE_BYTES + lane * UNIT_BYTES, full, kb * BLOCK_K);
        position.advance(p.stages);
    }
}

__device__ __forceinline__ void load_weights(SharedStorage& shared, const Problem& p,
                                             const TensorMap& map_w13, const TensorMap& map_w2,
                                             const UnitDivisors& by, int pipeline, int lane) {
    const uint32_t ring = Layout(shared, p).ring + pipeline * p.stages * STAGE_BYTES;
    const int of_expert = p.units_of_expert(), hit = shared.num_hit;
    RingPosition position;
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) break;
        const uint32_t units = hit * of_expert, worker = PIPELINES * share + pipeline;
        const int end = by.workers.quotient(units * (worker + 1));  // range_of
#pragma unroll 1
        for (int unit = by.workers.quotient(units * worker); unit < end; unit += TILE_UNITS) {
            const int mine = unit + lane, number = by.of_expert.quotient(mine);
            const int place = mine - number * of_expert, run_of_expert = by.run.quotient(place);
            const bool is_there = lane < TILE_UNITS && mine < end;
            const int in_run = place - run_of_expert * p.run;
            const int run = is_there ? shared.experts[number] * by.runs_of_expert + run_of_expert : NOWHERE;
            load_tile(shared, p, ring, pipeline, p.h_blocks(), lane, position,
                      [&](uint32_t to, uint32_t full, int k) {
                          tma_load_5d_evict_first(map_w13, to, full, k, 0, 0, in_run, run);
                      });
        }
    }
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) break;
        for (int stripe = share; stripe < p.stripes(); stripe += gridDim.x) {
#pragma unroll 1
            for (int first = pipeline * TILE_UNITS; first < hit; first += PIPELINES * TILE_UNITS) {
                const int number = first + lane;
                const int expert = lane < TILE_UNITS && number < hit ? shared.experts[number] : NOWHERE;
                load_tile(shared, p, ring, pipeline, p.i_blocks(), lane, position,
                          [&](uint32_t to, uint32_t full, int k) {
                              tma_load_3d_evict_first(map_w2, to, full, k, stripe * UNIT_ROWS, expert);
                          });
            }
        }
    }
}
