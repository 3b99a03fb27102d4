// Repacked codes (padless.layouts.to_repacked): 16 weight rows by 64 of K are a tile of 512 bytes, [row][32 bytes]. Tiles along K lie one
// after the other, so that a copy of a few brings neighbouring lines, whatever K is; then come the next 16 rows. In every second
// tile rows have their lowest two bits turned over: lanes with the same bytes of two tiles read other banks.
#pragma once

constexpr int TILE_CODE_ROWS = 16, TILE_K = 64, TILE_CODE_BYTES = 512;

// Where in a tile the 16 bytes of quad `quad` of row `row` are; quads 0 and 1 have them in one tile, 2 and 3 in the next.
__device__ __forceinline__ uint32_t in_code_tile(int row, int quad) {
    return (row ^ (quad / 2 * 3)) * 32 + quad % 2 * 16;
}

// One thread: prefetch_weights of device/weights_prefetch.cuh.
template <int BLOCK_N>
__device__ __forceinline__ void prefetch_code_tiles(const TensorMap& map_b, int n, int k, int num_groups) {
    const int n_tiles = (n + BLOCK_N - 1) / BLOCK_N;
    const int group = blockIdx.x / n_tiles, row = blockIdx.x % n_tiles * BLOCK_N;
    for (int tile = 0; tile < 4 && tile * TILE_K < k && group < num_groups; tile += 2)
        tma_prefetch_5d(map_b, 0, 0, tile, row / TILE_CODE_ROWS, group);
}
