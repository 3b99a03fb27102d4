// Position in a ring of shared-memory stages. The producer and every consumer walk the same ring, each with a
// copy of its own.
#pragma once

template <int STAGES>
struct Pipeline {
    int stage = 0;
    uint32_t phase = 0;  // parity of the fill that `stage` is on

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

constexpr int SHARED_LIMIT = 227 * 1024;  // bytes that a CTA of Hopper or Blackwell can have

// The deepest ring with which Storage<stages> fits in shared memory, of at most MOST stages.
template <template <int> class Storage, int MOST, int STAGES = 1>
constexpr int stages_that_fit() {
    if constexpr (STAGES < MOST && sizeof(Storage<STAGES + 1>) <= SHARED_LIMIT)
        return stages_that_fit<Storage, MOST, STAGES + 1>();
    else
        return STAGES;
}
