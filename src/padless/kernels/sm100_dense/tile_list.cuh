// The problem of sm100_mxfp8_gemm.cu and its tiles: which worker computes what. Included by it after its constants.
#pragma once

struct Problem {
    void* d;
    long long d_stride;  // elements
    int m, n, k;
    int d_is_aligned;  // rows of D begin on 32-byte boundaries

    __device__ __forceinline__ int m_tiles() const {
        return (m + CTA_GROUP * BLOCK_M - 1) / (CTA_GROUP * BLOCK_M);
    }
    __device__ __forceinline__ int n_tiles() const { return (n + BLOCK_N - 1) / BLOCK_N; }
    __device__ __forceinline__ int tiles() const { return m_tiles() * n_tiles(); }
    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }

    // K steps of a product in this block; the last block may have fewer. What lies past K is never multiplied: the
    // scales there may be anything.
    __device__ __forceinline__ int steps(int k_block) const {
        const int left = k / MMA_K - k_block * (BLOCK_K / MMA_K);
        return left < BLOCK_K / MMA_K ? left : BLOCK_K / MMA_K;
    }
    __device__ __forceinline__ int slabs(int k_block) const {
        return (steps(k_block) + SLAB_K / MMA_K - 1) / (SLAB_K / MMA_K);
    }
};

// Workers: CTAs, or pairs.
__device__ __forceinline__ int first_tile() {
    return blockIdx.x / CTA_GROUP;
}
__device__ __forceinline__ int workers() {
    return gridDim.x / CTA_GROUP;
}

// What a worker computes at a time.
struct Tile {
    int row, column;  // of this CTA's part
    int halves;       // HALVES, or 1 of a tile that was cut
};

// Tiles as they are handed out: whole ones, then those of the last round, whole or cut.
struct TileList {
    int whole, total;

    __device__ __forceinline__ explicit TileList(const Problem& problem) {
        const int tiles = problem.tiles(), left = tiles % workers();
        const bool cuts = HALVES == 2 && 2 * left <= workers();
        whole = cuts ? tiles - left : tiles;
        total = cuts ? tiles + left : tiles;
    }

    __device__ __forceinline__ int halves(int number) const { return number < whole ? HALVES : 1; }

    __device__ __forceinline__ Tile tile(const Problem& problem, int number, int cta_rank) const {
        const int part = number < whole ? 0 : number - whole;
        const int tile = number - part + part / 2;
        const GridPoint at = TILE_ORDER == ORDER_HILBERT
                                 ? hilbert_order(tile, problem.m_tiles(), problem.n_tiles())
                                 : row_order(tile, problem.n_tiles());
        return Tile{(at.m * CTA_GROUP + cta_rank) * BLOCK_M, at.n * BLOCK_N + part % 2 * HALF_N,
                    halves(number)};
    }
};
