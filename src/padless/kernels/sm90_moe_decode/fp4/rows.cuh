// Rows that products read, in shared memory: x of all tokens, and hidden rows as soon as other CTAs have written them. The consumer
// warps do this, all of them, before they multiply.
#pragma once

// Calls load(n, piece, octet, row) for octets that exist and skip(n) for others, MOST of them, then store(n, piece, address) for
// each. Pieces are numbered as octets lie in global memory; `octets`: of a row, which is padded to whole stages.
template <int MOST, class Load, class Skip, class Store>
__device__ __forceinline__ void fill_rows(const Layout& layout, int rows, int stages, int octets, int thread,
                                          const Load& load, const Skip& skip, const Store& store) {
    const Divisor by_rows(max(rows, 1));
    const int pieces = stages * STEPS_OF_STAGE * 4 * rows;
#pragma unroll 1
    for (int first = thread; first < pieces; first += MOST * NUM_CONSUMERS) {
        uint32_t to[MOST];
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            const int piece = first + n * NUM_CONSUMERS;
            if (piece >= pieces) break;
            const int quad = piece % 4, step = by_rows.quotient(piece / 4), row = piece / 4 - step * rows;
            const int octet = octet_of(step, quad);
            to[n] = layout.rows + row * layout.row_bytes(stages) + step * STEP_BYTES + quad * 16;
            if (octet < octets)
                load(n, piece, octet, row);
            else
                skip(n);
        }
#pragma unroll
        for (int n = 0; n < MOST; ++n) {
            const int piece = first + n * NUM_CONSUMERS;
            if (piece >= pieces) break;
            store(n, piece, to[n]);
        }
    }
}

__device__ __forceinline__ void fill_x(const Problem& p, const Layout& layout, int thread) {
    constexpr int MOST = 3;  // loads that a thread waits for together
    const int octets = p.h / 8;
    uint4 loaded[MOST];
    fill_rows<MOST>(
        layout, p.tokens, p.h_stages(), octets, thread,
        [&](int n, int, int octet, int row) {
            loaded[n] = reinterpret_cast<const uint4*>(p.x)[row * octets + octet];
        },
        [&](int n) { loaded[n] = make_uint4(0, 0, 0, 0); },
        [&](int n, int, uint32_t address) {
            const uint32_t from[4] = {loaded[n].x, loaded[n].y, loaded[n].z, loaded[n].w};
            uint32_t to[4];
            expand_octet<FORMAT_BF16, false, false>(to, from);
            st_shared_v4_b32(address, to[0], to[1], to[2], to[3]);
        });
}

// Words that are 0 have not been written: they are read again.
__device__ __forceinline__ void fill_hidden(const SharedStorage& shared, const Problem& p,
                                            const Layout& layout, int thread) {
    constexpr int MOST = 12;
    const uint32_t* hidden = p.hidden(shared.launches);
    uint32_t words[MOST][4];
    fill_rows<MOST>(
        layout, shared.first_row[shared.num_hit], p.i_stages(), p.i / 8, thread,
        [&](int n, int piece, int, int) { ld_relaxed_gpu_v4(hidden + piece * 4, words[n]); },
        [&](int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[n][i] = ~0u;
        },
        [&](int n, int piece, uint32_t address) {
            uint32_t (&w)[4] = words[n];
            for (Patience patience; w[0] == 0 || w[1] == 0 || w[2] == 0 || w[3] == 0;) {
                patience.wait();
                ld_relaxed_gpu_v4(hidden + piece * 4, w);
            }
            st_shared_v4_b32(address, ~w[0], ~w[1], ~w[2], ~w[3]);
        });
}
