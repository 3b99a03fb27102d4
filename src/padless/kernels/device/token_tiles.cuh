// Tiles of 128 tokens of one group x 128 features whose codes are also stored transposed, tokens innermost: how a CTA of 16 warps
// holds them, which of them it takes, and how transposed codes go through shared memory.
//
// A warp has 8 tokens and a lane 4 features of each: a row's scale is found within a warp, and 8 codes of a feature, which follow
// each other in memory once transposed, are in one thread.
#pragma once

// The host defines BAND: blocks of 128 features that are done tile by tile before the next ones.
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

// Ragged groups of rows, and tiles of 128 tokens that each belong to one of them. Tiles of all groups come first, in order; those
// behind hold the rows past the last group, and columns past the last group that are to be zeroed.
struct Groups {
    const int* offs;  // (num_groups) cumulative END rows
    int num_groups, num_rows, alignment;
    int tokens, num_scale_rows,
        num_tiles;      // of the transposed codes; of the scales; enough for groups of any sizes
    int* starts;        // (num_groups) first token of a group, which is written
    int* block_starts;  // (num_groups) first tile of a group, which is written
};

// A tile of tokens and a block of features: rows of the source, how many of them are tokens of a group (all or none), columns of
// the transposed codes in units of 32. tile is num_tiles where there are no more.
struct alignas(16) Item {
    int tile, block, first_row, rows, tokens, first_unit, units, unused;
};

// What a CTA works on next, worked out by one warp while the others do something else. MOST: room for groups.
template <int MOST>
struct Schedule {
    int first_row[MOST + 1], first_tile[MOST + 1],
        first_unit[MOST + 1];  // of each group, and of what is behind
    int next, group;  // number of the item to be looked at next, of all; a group that its tile is not before
    Item items[4];    // of numbers n - 1, n, n + 1 and n + 2, in turn

    // One warp: ends that are not ascending, negative or above M count as the nearest that can be.
    __device__ __forceinline__ void begin(const Groups& groups, int num_blocks, int lane) {
#pragma unroll 8
        for (int g = lane; g < groups.num_groups; g += 32)  // all are on their way before one is needed
            first_row[g] = groups.offs[g];
        int row = 0, tiles = 0, units = 0;
        for (int first = 0; first < groups.num_groups; first += 32) {
            const int group = first + lane;
            const bool there = group < groups.num_groups;
            int end = there ? first_row[group] : 0;
            end = end > groups.num_rows ? groups.num_rows : end;
            end = end > row ? end : row;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int before = __shfl_up_sync(0xffffffff, end, distance);
                end = lane >= distance && before > end ? before : end;
            }
            const int before = __shfl_up_sync(0xffffffff, end, 1), start = lane == 0 ? row : before;
            const int own_tiles = (end - start + TILE - 1) / TILE;
            const int own_units = ((end - start + groups.alignment - 1) & -groups.alignment) / UNIT;
            int all_tiles = own_tiles, all_units = own_units;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other_tiles = __shfl_up_sync(0xffffffff, all_tiles, distance);
                const int other_units = __shfl_up_sync(0xffffffff, all_units, distance);
                all_tiles += lane >= distance ? other_tiles : 0;
                all_units += lane >= distance ? other_units : 0;
            }
            if (there) {
                first_row[group] = start;
                first_tile[group] = tiles + all_tiles - own_tiles;
                first_unit[group] = units + all_units - own_units;
                if (blockIdx.x == 0) {
                    groups.starts[group] = UNIT * (units + all_units - own_units);
                    groups.block_starts[group] = tiles + all_tiles - own_tiles;
                }
            }
            row = __shfl_sync(0xffffffff, end, 31);
            tiles += __shfl_sync(0xffffffff, all_tiles, 31);
            units += __shfl_sync(0xffffffff, all_units, 31);
        }
        if (lane == 0) {
            first_row[groups.num_groups] = row;
            first_tile[groups.num_groups] = tiles;
            first_unit[groups.num_groups] = units;
            group = 0;
            next = blockIdx.x;
        }
        __syncwarp();
    }

    // One warp: finds item `number`, of every so manieth of those that have something to do. A band of BAND blocks is done tile by
    // tile before the next band: what is under way at once are runs of memory along rows and along columns.
    __device__ __forceinline__ void take(const Groups& groups, int num_blocks, int number, int lane) {
        Item item{groups.num_tiles, 0, 0, 0, 0, 0, 0, 0};
        int at = next, of = group;
        bool found = false;
        while (!found && at < groups.num_tiles * num_blocks) {
            const int band = at / (groups.num_tiles * BAND), in_band = at - band * groups.num_tiles * BAND;
            const int left = num_blocks - band * BAND, width = left < BAND ? left : BAND;
            const int tile = in_band / width;
            if (tile < first_tile[of]) of = 0;
            uint32_t begun;  // groups after `of` whose tiles begin no later
            do {
                const int other = of + 1 + lane;
                const bool is_begun = other <= groups.num_groups && first_tile[other] <= tile;
                begun = __popc(__ballot_sync(0xffffffff, is_begun));
                of += begun;
            } while (begun == 32);
            const bool is_group = of < groups.num_groups;
            const int end_row = is_group ? first_row[of + 1] : groups.num_rows;
            const int end_unit = is_group ? first_unit[of + 1] : groups.tokens / UNIT;
            const int index = tile - first_tile[of];
            item.first_row = first_row[of] + TILE * index;
            item.first_unit = first_unit[of] + TILE / UNIT * index;
            item.rows = clipped(end_row - item.first_row, TILE);
            item.units = clipped(end_unit - item.first_unit, TILE / UNIT);
            item.tokens = is_group ? item.rows : 0;
            item.block = band * BAND + in_band - tile * width;
            found = item.rows > 0 || item.units > 0 || tile < groups.num_scale_rows;
            item.tile = found ? tile : groups.num_tiles;
            at += gridDim.x;
        }
        __syncwarp();
        if (lane == 0) {
            next = at;
            group = of;
            items[number % 4] = item;
        }
        __syncwarp();
    }

  private:
    __device__ __forceinline__ static int clipped(int value, int most) {
        return value < 0 ? 0 : value > most ? most : value;
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
