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
