// What the roles of sm100_nvfp4_wgrad.cu share: constants, shared memory, the tile.
#pragma once

// The host defines, from Sm100WgradConfig: NUM_STAGES (0 = as many as fit), OUT_TYPE (OUT_BF16 or OUT_F32), ACCUMULATE (adds to
// what is there).
constexpr int OUT_BF16 = 0, OUT_F32 = 2;
constexpr int TILE = 128;     // features of either operand
constexpr int BLOCK_T = 256;  // tokens of a stage: 128 bytes of a feature, the width of a swizzle
constexpr int MMA_T = 64;     // of an instruction, an atom of scales
constexpr int STEPS = BLOCK_T / MMA_T;
constexpr int OPERAND_BYTES = TILE * BLOCK_T / 2;
constexpr int STEP_BYTES = MMA_T / 2;
constexpr int SCALE_BYTES = STEPS * SCALE_ATOM_BYTES;
constexpr uint32_t SHAPE = mxf4nvf4_shape(TILE, TILE, false);

constexpr int STORE_WARPS = 4, LOAD_WARP = 4, MMA_WARP = 5;
constexpr int NUM_THREADS = 6 * 32;
constexpr int SFA_COLUMN = TILE, SFB_COLUMN = SFA_COLUMN + STEPS * SCALE_ATOM_COLUMNS;
constexpr int TMEM_COLUMNS = 256;
static_assert(SFB_COLUMN + STEPS * SCALE_ATOM_COLUMNS <= TMEM_COLUMNS, "does not fit in tensor memory");

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][OPERAND_BYTES];
    uint8_t b[STAGES][OPERAND_BYTES];
    uint8_t sfa[STAGES][SCALE_BYTES];
    uint8_t sfb[STAGES][SCALE_BYTES];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t done;
    uint32_t tensor_memory;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
#include "device/sm100/gradient.cuh"

// A tile of one group. start: its first token; products: of 64 tokens.
struct Tile {
    int group, row, column, start, products;

    __device__ __forceinline__ int blocks() const { return (products + STEPS - 1) / STEPS; }
    // Products in a block.
    __device__ __forceinline__ int steps(int block) const {
        const int left = products - block * STEPS;
        return left < STEPS ? left : STEPS;
    }
};

// Tile `number`, columns first, then rows, then groups. Ends that are wrong are cut to the tokens and to whole products.
__device__ __forceinline__ Tile tile_of(int number, const int* ends, int n_rows, int n_columns, int tokens) {
    const int across = (n_columns + TILE - 1) / TILE, down = (n_rows + TILE - 1) / TILE;
    const int group = number / (across * down), in_group = number % (across * down);
    const int given = group == 0 ? 0 : __ldg(ends + group - 1), given_end = __ldg(ends + group);
    const int first = (given < 0 ? 0 : given) / MMA_T;
    const int last = (given_end < tokens ? given_end : tokens) / MMA_T;
    return Tile{group, in_group / across * TILE, in_group % across * TILE, first * MMA_T,
                last > first ? last - first : 0};
}

// An operand: codes, and scales in 32x4x4 tiles.
struct Operand {
    const TensorMap& codes;
    const TensorMap& scales;
};
