// Rows that products read, in shared memory: x of all tokens, and hidden rows as soon as other CTAs have written them. The consumer
// warps do this, all of them, before they multiply.
#pragma once

constexpr int ROWS_IN_FLIGHT = 4;  // octets that a thread waits for together

// Number `index` of the octets of `rows` rows with `stages` stages of K, in the order in which they lie.
struct PlaceOfOctet {
    int octet, row;
    __device__ __forceinline__ PlaceOfOctet(int index, int rows) {
        const int step = index / (4 * rows), rest = index % (4 * rows);
        octet = step / 4 * 16 + rest % 4 * 4 + step % 4;
        row = rest / 4;
    }
};

__device__ __forceinline__ void fill_x(const Problem& p, const Layout& layout, int thread) {
    const int octets = p.h / 8, all = p.tokens * p.h_stages() * (STAGE_K / 8);
    for (int first = thread; first < all; first += ROWS_IN_FLIGHT * NUM_CONSUMERS) {
        uint4 loaded[ROWS_IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < ROWS_IN_FLIGHT; ++n) {
            const int index = first + n * NUM_CONSUMERS;
            const PlaceOfOctet at(index, p.tokens);
            loaded[n] = make_uint4(0, 0, 0, 0);  // past the end of K
            if (index < all && at.octet < octets)
                loaded[n] = reinterpret_cast<const uint4*>(p.x)[at.row * octets + at.octet];
        }
#pragma unroll
        for (int n = 0; n < ROWS_IN_FLIGHT; ++n) {
            const int index = first + n * NUM_CONSUMERS;
            if (index >= all) break;
            const uint32_t from[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
            uint32_t to[4];
            expand_octet<FORMAT_BF16, false, false>(to, from);
            st_shared_v4_b32(layout.rows + index * 16, to[0], to[1], to[2], to[3]);
        }
    }
}

// Words that are 0 have not been written: they are read again.
__device__ __forceinline__ void fill_hidden(const SharedStorage& shared, const Problem& p,
                                            const Layout& layout, int thread) {
    const uint32_t* hidden = p.hidden(shared.launches);
    const int rows = shared.first_row[shared.num_hit];
    const int octets = p.i / 8, all = rows * p.i_stages() * (STAGE_K / 8);
    for (int first = thread; first < all; first += ROWS_IN_FLIGHT * NUM_CONSUMERS) {
        uint32_t words[ROWS_IN_FLIGHT][4];
        const auto load = [&](int n) {
            const int index = first + n * NUM_CONSUMERS;
#pragma unroll
            for (int i = 0; i < 4; ++i) words[n][i] = ~0u;  // past the end of K
            if (index < all && PlaceOfOctet(index, rows).octet < octets)
                ld_relaxed_gpu_v4(hidden + index * 4, words[n]);
        };
#pragma unroll
        for (int n = 0; n < ROWS_IN_FLIGHT; ++n) load(n);
        Patience patience;
#pragma unroll
        for (int n = 0; n < ROWS_IN_FLIGHT; ++n) {
            while (words[n][0] == 0 || words[n][1] == 0 || words[n][2] == 0 || words[n][3] == 0) {
                patience.wait();
                load(n);
            }
            const int index = first + n * NUM_CONSUMERS;
            if (index < all)
                st_shared_v4_b32(layout.rows + index * 16, ~words[n][0], ~words[n][1], ~words[n][2],
                                 ~words[n][3]);
        }
    }
}
