// The beginning of some weights, fetched into L2 while the table of groups is still being built.
#pragma once

// One thread: two K blocks of a tile's weights, another tile's in every CTA, in the order of the groups' numbers. They need
// not be those of the CTA's first tile, which the offsets decide: somebody will find them in L2, unless their group is
// empty. More delay the first loads. `map_b`: (K in elements or bytes, N, G), K_STEP of K and a tile of N to a box.
template <int BLOCK_N, int K_STEP>
__device__ __forceinline__ void prefetch_weights(const TensorMap& map_b, int n, int k_blocks,
                                                 int num_groups) {
    const int n_tiles = (n + BLOCK_N - 1) / BLOCK_N;
    const int group = blockIdx.x / n_tiles, column = blockIdx.x % n_tiles * BLOCK_N;
    for (int kb = 0; kb < 2 && kb < k_blocks && group < num_groups; ++kb)
        tma_prefetch_3d(map_b, kb * K_STEP, column, group);
}

// The same by the first THREADS threads of the CTA, a line of 128 bytes to each, for weights of one byte an element. Neither
// the tensor map nor TMA is needed, so nothing comes before these requests but their own instructions.
struct Weights {
    const uint8_t* data;               // (G, N, K)
    long long row_bytes, group_bytes;  // from one to the next
};

template <int BLOCK_N, int THREADS>
__device__ __forceinline__ void prefetch_weights_lines(const Weights& weights, int n, int k, int num_groups) {
    constexpr int LINE = 128, LINES = 2;  // of a row: neighbours, asked for by neighbouring threads
    const int n_tiles = (n + BLOCK_N - 1) / BLOCK_N;
    const int group = blockIdx.x / n_tiles, column = blockIdx.x % n_tiles * BLOCK_N;
    if (group >= num_groups) return;
#pragma unroll
    for (int first = 0; first < BLOCK_N * LINES; first += THREADS) {
        const int row = column + (first + static_cast<int>(threadIdx.x)) / LINES;
        const int at = threadIdx.x % LINES * LINE;
        if (first + threadIdx.x < BLOCK_N * LINES && row < n && at < k)
            prefetch_global_l2(weights.data + group * weights.group_bytes + row * weights.row_bytes + at);
    }
}
