// Tiles of 128 tokens of one group x 128 features whose codes are also stored transposed, tokens innermost: how a CTA of 16 warps
// holds them, which of them it takes, and how transposed codes go through shared memory.
//
// A warp has 8 tokens and a lane 4 features of each: a row's scale is found within a warp, and 8 codes of a feature, which follow
// each other in memory once transposed, are in one thread.
#pragma once

constexpr int TILE = 128;  // tokens, and features
constexpr int NUM_WARPS = 16, NUM_THREADS = 32 * NUM_WARPS;
constexpr int ROWS = TILE / NUM_WARPS;  // tokens of a warp
constexpr int COLUMNS = TILE / 32;      // features of a lane
constexpr int UNIT = 32;                // tokens that `first_unit` and `units` count

struct alignas(16) Row {
    uint32_t words[TILE / 2];  // two bf16 each
};

// Transposed codes: 8 tokens at `slot_of`.
struct alignas(16) TransposedCodes {
    uint64_t columns[TILE][NUM_WARPS];
};

// The table of group_tiles.py.
struct TileTable {
    const int* entries;  // (5, num_tiles)
    int num_tiles, num_scale_rows;

    __device__ __forceinline__ int first_row(int tile) const { return entries[tile]; }
    __device__ __forceinline__ int rows(int tile) const { return entries[num_tiles + tile]; }
    __device__ __forceinline__ int tokens(int tile) const { return entries[2 * num_tiles + tile]; }
    __device__ __forceinline__ int first_unit(int tile) const { return entries[3 * num_tiles + tile]; }
    __device__ __forceinline__ int units(int tile) const { return entries[4 * num_tiles + tile]; }
};

// A tile of tokens and a block of features; tile is num_tiles where there are no more.
struct Item {
    int tile, block, first_row, rows;
};

// Items of a CTA: every so manieth of those that have something to do. Neighbours in time are neighbours in memory.
struct Items {
    const TileTable table;
    const int num_blocks;
    int tile, block, tiles_a_step, blocks_a_step;

    __device__ __forceinline__ Items(const TileTable& table, int num_blocks)
        : table(table), num_blocks(num_blocks) {
        tile = blockIdx.x / num_blocks;
        block = blockIdx.x % num_blocks;
        tiles_a_step = gridDim.x / num_blocks;
        blocks_a_step = gridDim.x % num_blocks;
    }

    __device__ __forceinline__ Item take() {
        Item item{table.num_tiles, 0, 0, 0};
        bool found = false;
        while (!found && tile < table.num_tiles) {
            const int rows = table.rows(tile);
            found = rows > 0 || table.units(tile) > 0 || tile < table.num_scale_rows;
            if (found) item = Item{tile, block, table.first_row(tile), rows};
            tile += tiles_a_step;
            block += blocks_a_step;
            if (block >= num_blocks) {
                block -= num_blocks;
                ++tile;
            }
        }
        return item;
    }
};

__device__ __forceinline__ float low_bf16(uint32_t word) {
    return __uint_as_float(word << 16);
}

__device__ __forceinline__ float high_bf16(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
}

// max(x, y), NaN where either is NaN.
__device__ __forceinline__ float max_nan(float x, float y) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(x), "f"(y));
    return value;
}

// The e4m3 codes of four values, the first in the lowest byte.
__device__ __forceinline__ uint32_t four_codes(float x0, float x1, float x2, float x3) {
    uint32_t word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(word)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return word;
}

// Reduces `low` and `high` with the lane `distance` away: lanes without that bit get low's result, the others high's.
template <typename Value, typename Operation>
__device__ __forceinline__ Value halved(Value low, Value high, int lane, int distance, Operation operation) {
    const bool upper = lane & distance;
    const Value kept = upper ? high : low, sent = upper ? low : high;
    return operation(kept, __shfl_xor_sync(0xffffffff, sent, distance));
}

// Where 8 tokens of warp `warp` lie among the 16 such in a row of `TransposedCodes`, for features of lane `lane`: stores of 16
// lanes, whose features are 4 apart, and loads of two such features each touch every bank once.
__device__ __forceinline__ int slot_of(int warp, int lane) {
    return warp ^ (lane % NUM_WARPS);
}

// Masks of two words of four codes that keep the first `kept` of the 8.
struct KeptCodes {
    uint32_t low, high;

    __device__ __forceinline__ explicit KeptCodes(int kept) {
        low = kept >= 4 ? 0xffffffffu : kept > 0 ? (1u << (8 * kept)) - 1 : 0;
        high = kept >= 8 ? 0xffffffffu : kept > 4 ? (1u << (8 * (kept - 4))) - 1 : 0;
    }
};

// A warp's share of transposed codes on their way to global memory, 16 tokens a lane: a line of 128 tokens is 8 lanes'. In two
// steps a warp takes features `column` and `column` + 64, of four lanes each time.
struct Lines {
    static constexpr int TOKENS = 16, LANES = TILE / TOKENS, STEPS = 2, STEP = TILE / STEPS;
    int column, chunk;
    uint32_t first, second;

    __device__ __forceinline__ Lines(TransposedCodes& codes, int warp, int lane) {
        chunk = lane % LANES;
        // A warp's features are 4 apart, so that their slots begin at other banks.
        const int of_lane = warp / 4 * 4 + lane / LANES;  // the lane that stored them
        column = of_lane * COLUMNS + warp % 4;
        first = shared_address(&codes.columns[column][slot_of(2 * chunk, of_lane)]);
        second = shared_address(&codes.columns[column][slot_of(2 * chunk + 1, of_lane)]);
    }

    __device__ __forceinline__ bool is_inside(int units) const { return TOKENS * chunk < UNIT * units; }

    // of: number of the TransposedCodes, which follow each other.
    __device__ __forceinline__ void store(int of, int step, void* target) const {
        const int offset = (of * TILE + step * STEP) * TILE;
        uint32_t words[4];
        ld_shared_v2_b32(first + offset, words[0], words[1]);
        ld_shared_v2_b32(second + offset, words[2], words[3]);
        st_global_v4_b32(target, words);
    }
};
