// Lesson 1, for sm_90a: the copy engine (TMA) brings a tile into shared memory, 128 threads double it, the copy engine
// takes it back. The text is tma_copy.md; "break" lines are what `python tma_copy.py --break NAME` puts in place of the
// line below them.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"

constexpr int ROWS = 16, COLUMNS = 32, THREADS = 128;
constexpr uint32_t TILE_BYTES = ROWS * COLUMNS * sizeof(float);

struct alignas(128) Shared {
    float tile[ROWS * COLUMNS];
    uint64_t full;
};

__device__ uint32_t address_of(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

extern "C" __global__ void __launch_bounds__(THREADS) lesson(const __grid_constant__ TensorMap source,
                                                             const __grid_constant__ TensorMap target) {
    __shared__ Shared shared;
    const uint32_t tile = address_of(shared.tile), full = address_of(&shared.full);
    const int first_row = blockIdx.x * ROWS;

    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);  // one arrival ends a phase, once the announced bytes are there
        // break no-init-fence:
        fence_mbarrier_init();  // the copy engine sees the initialised barrier
    }
    // break no-init-sync:
    __syncthreads();  // and so do the other threads

    if (threadIdx.x == 0) {
        // break too-few-bytes: mbarrier_arrive_expect_tx(full, TILE_BYTES / 2);
        // break too-many-bytes: mbarrier_arrive_expect_tx(full, TILE_BYTES * 2);
        mbarrier_arrive_expect_tx(full, TILE_BYTES);  // the arrival, and what is still to come
        tma_load_2d(source, tile, full, 0, first_row);
    }
    // break no-wait:
    // break wrong-parity: mbarrier_wait(full, 1);
    mbarrier_wait(full, 0);  // phase 0 has ended: all bytes are in shared memory, for every thread

    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) shared.tile[i] *= 2.0f;

    // break no-proxy-fence:
    fence_proxy_async_shared();  // each thread: my ordinary writes come before what the copy engine reads
    // break no-sync:
    __syncthreads();  // all of them are done

    if (threadIdx.x == 0) {
        tma_store_2d(target, tile, 0, first_row);
        // break no-commit:
        cp_async_bulk_commit_group();
        // break no-store-wait:
        cp_async_bulk_wait_group_read_all();  // shared memory is this CTA's until it ends, so the store reads first
    }
}
