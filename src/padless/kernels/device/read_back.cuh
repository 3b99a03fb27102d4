// What the host reads back from every compiled module: included behind SharedStorage, NUM_THREADS and STAGES.
#pragma once

static_assert(STAGES >= 2 && sizeof(SharedStorage) <= SHARED_LIMIT, "does not fit in shared memory");

extern "C" __device__ const int padless_shared_bytes = sizeof(SharedStorage);
extern "C" __device__ const int padless_num_threads = NUM_THREADS;
extern "C" __device__ const int padless_num_stages = STAGES;
