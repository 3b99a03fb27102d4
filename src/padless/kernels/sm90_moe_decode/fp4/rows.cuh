// Rows that products read, in shared memory: x of all tokens, and hidden rows as soon as other CTAs have written them. The consumer
// warps do this, all of them, before they multiply: a warp has a step of all rows at a time.
#pragma once

constexpr int STEPS_IN_FLIGHT = 6;  // octets that a lane waits for together

// Calls load(n, octet, row) for octets that exist and skip(n) for others, STEPS_IN_FLIGHT of them, then store(n, address) for each.
// `octets`: of a row; rows are padded to whole stages.
template <class Load, class Skip, class Store>
__device__ __forceinline__ void fill_rows(const Layout& layout, int rows, int stages, int octets, int warp,
                                          int lane, const Load& load, const Skip& skip, const Store& store) {
    const int steps = stages * STEPS_OF_STAGE;
    for (int index = lane; index < 4 * rows; index += 32) {
        for (int first = warp; first < steps; first += STEPS_IN_FLIGHT * NUM_CONSUMER_WARPS) {
#pragma unroll
            for (int n = 0; n < STEPS_IN_FLIGHT; ++n) {
                const int octet = octet_of(first + n * NUM_CONSUMER_WARPS, index % 4);
                if (octet < octets)
                    load(n, octet, index / 4);
                else
                    skip(n);
            }
#pragma unroll
            for (int n = 0; n < STEPS_IN_FLIGHT; ++n) {
                const int step = first + n * NUM_CONSUMER_WARPS;
                if (step < steps) store(n, layout.rows + (step * 4 * rows + index) * 16);
            }
        }
    }
}

__device__ __forceinline__ void fill_x(const Problem& p, const Layout& layout, int warp, int lane) {
    const int octets = p.h / 8;
    uint4 loaded[STEPS_IN_FLIGHT];
    fill_rows(
        layout, p.tokens, p.h_stages(), octets, warp, lane,
        [&](int n, int octet, int row) {
            loaded[n] = reinterpret_cast<const uint4*>(p.x)[row * octets + octet];
        },
        [&](int n) { loaded[n] = make_uint4(0, 0, 0, 0); },
        [&](int n, uint32_t address) {
            const uint32_t from[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
            uint32_t to[4];
            expand_octet<FORMAT_BF16, false, false>(to, from);
            st_shared_v4_b32(address, to[0], to[1], to[2], to[3]);
        });
}

// Words that are 0 have not been written: they are read again.
__device__ __forceinline__ void fill_hidden(const SharedStorage& shared, const Problem& p,
                                            const Layout& layout, int warp, int lane) {
    const int rows = shared.first_row[shared.num_hit];
    const uint32_t* hidden = p.hidden(shared.launches);
    uint32_t words[STEPS_IN_FLIGHT][4];
    const uint32_t* from[STEPS_IN_FLIGHT];
    fill_rows(
        layout, rows, p.i_stages(), p.i / 8, warp, lane,
        [&](int n, int octet, int row) {
            from[n] = hidden + place_of_octet(octet, row, rows) * 4;
            ld_relaxed_gpu_v4(from[n], words[n]);
        },
        [&](int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[n][i] = ~0u;
        },
        [&](int n, uint32_t address) {
            uint32_t (&w)[4] = words[n];
            for (Patience patience; w[0] == 0 || w[1] == 0 || w[2] == 0 || w[3] == 0;) {
                patience.wait();
                ld_relaxed_gpu_v4(from[n], w);
            }
            st_shared_v4_b32(address, ~w[0], ~w[1], ~w[2], ~w[3]);
        });
}
