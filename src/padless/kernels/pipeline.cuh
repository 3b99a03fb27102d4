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
