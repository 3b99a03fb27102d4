// Lesson 3, for sm_90a: warp specialisation. A producer warp fills a ring of two stages by the copy engine; two consumer
// warps empty it and add up the rows of a matrix, 32 columns at a time. The text is ring.md.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"

constexpr int ROWS = 64, COLUMNS = 32, STAGES = 2;
constexpr int CONSUMER_WARPS = ROWS / 32, THREADS = 32 * (CONSUMER_WARPS + 1);
constexpr uint32_t STAGE_BYTES = ROWS * COLUMNS * sizeof(float);

struct alignas(128) Shared {
    float tile[STAGES][ROWS * COLUMNS];
    uint64_t full[STAGES], empty[STAGES];
};

__device__ uint32_t address_of(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

extern "C" __global__ void __launch_bounds__(THREADS) lesson(const __grid_constant__ TensorMap matrix,
                                                             float* sums, int blocks) {
    __shared__ Shared shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(address_of(&shared.full[s]), 1);  // the producer's arrival, and the bytes
            // break low-count: mbarrier_init(address_of(&shared.empty[s]), 1);
            mbarrier_init(address_of(&shared.empty[s]), CONSUMER_WARPS);  // one arrival from each
        }
        fence_mbarrier_init();
    }
    __syncthreads();  // the last time that all warps meet

    if (warp == CONSUMER_WARPS) {
        if (lane == 0) {
            for (int i = 0; i < blocks; ++i) {
                const int stage = i % STAGES, round = i / STAGES;
                const uint32_t full = address_of(&shared.full[stage]),
                               empty = address_of(&shared.empty[stage]);
                // break no-empty-wait:
                // break wrong-parity: mbarrier_wait(empty, round & 1);
                mbarrier_wait(empty, (round & 1) ^ 1);  // round 0 passes at once
                // break no-expect: mbarrier_arrive(full);
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                tma_load_2d(matrix, address_of(shared.tile[stage]), full, i * COLUMNS, 0);
            }
        }
    } else {
        float sum = 0;
        for (int i = 0; i < blocks; ++i) {
            const int stage = i % STAGES, round = i / STAGES;
            const uint32_t full = address_of(&shared.full[stage]), empty = address_of(&shared.empty[stage]);
            // break no-full-wait:
            // break same-parity: mbarrier_wait(full, 0);
            // break early-arrive: mbarrier_wait(full, round & 1); if (lane == 0) mbarrier_arrive(empty);
            mbarrier_wait(full, round & 1);  // the stage's bytes of this round are there
            const float* row = shared.tile[stage] + threadIdx.x * COLUMNS;
            // Lane l begins with column l, so that the 32 lanes read 32 different banks.
            for (int c = 0; c < COLUMNS; ++c) sum += row[(c + lane) % COLUMNS];
            // break no-syncwarp:
            __syncwarp();  // all lanes have read
            // break no-arrive:
            // break early-arrive:
            if (lane == 0) mbarrier_arrive(empty);
        }
        sums[threadIdx.x] = sum;
    }
}
