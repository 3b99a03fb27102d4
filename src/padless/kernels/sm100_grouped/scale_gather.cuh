// One-byte block scales that do not lie as the tensor core wants them: a warp fetches them and lays them in shared memory
// as atoms, 128 rows x 4 scales in 512 bytes, row r at byte (r % 32) * 16 + (r / 32) * 4.
//
// Rows of a group may start anywhere in a 128-row tile of the scales. Lane l takes rows l, l + 32, l + 64 and l + 96 of
// the atom, whose four words are 16 bytes of it. In tiles, rows 32 apart are neighbouring words of one 16-byte chunk:
// the four words wanted are a window into the chunks number (row + l) % 32 of two consecutive tiles, so that a shift by
// 32 rows is a shift by one word, and any other a rotation of the lanes.
// Example: rows from 50, lane 3: row 53 is word 53 / 32 = 1 of chunk 53 % 32 = 21 of tile 0, so the window is words 1, 2
// and 3 of it and word 0 of chunk 21 of tile 1, which is row 53 + 96 = 149 = 128 + 21.
#pragma once

constexpr int SCALES_TILED = 0;   // every 128 rows of a tile are one atom in memory: TMA's work
constexpr int SCALES_WINDOW = 1;  // in 128-row tiles, but the rows may start anywhere
constexpr int SCALES_PLAIN = 2;   // (rows, columns), columns a multiple of 4

struct ScaleSource {
    const uint8_t* bytes;
    int columns;   // scales of a row: blocks along K
    int last_row;  // rows past it read as it
};

// Scales 4 * atom .. 4 * atom + 3 of a row; those past the last column are zero (padding may hold a NaN, and the zeros
// that pad the data do not undo it).
__device__ __forceinline__ uint32_t existing_scales(uint32_t word, int columns, int atom) {
    const int left = columns - 4 * atom;
    return left >= 4 ? word : word & ((1u << 8 * left) - 1);
}

template <int SOURCE, int K_ATOMS>
__device__ __forceinline__ void load_scales(uint32_t (&words)[K_ATOMS][4], const ScaleSource& source, int row,
                                            int first_atom, int lane) {
    const int last_atom = (source.columns + 3) / 4 - 1;
    const int first = row + lane;
    const int skip = first >> 5 & 3;
    const int last_tile = source.last_row >> 7;
    const int tile = first >> 7 < last_tile ? first >> 7 : last_tile;
    const int next_tile = tile < last_tile && skip != 0 ? tile + 1 : tile;
    // All loads first, and no branch between them: they are under way together, not one after the other.
    uint4 low[K_ATOMS], high[K_ATOMS];
#pragma unroll
    for (int i = 0; i < K_ATOMS; ++i) {
        const int atom = first_atom + i < last_atom ? first_atom + i : last_atom;
        if constexpr (SOURCE == SCALES_WINDOW) {
            const int chunk = (first & 31) * 16;
            const long long at = static_cast<long long>(tile) * (last_atom + 1) + atom;
            const long long next_at = static_cast<long long>(next_tile) * (last_atom + 1) + atom;
            low[i] = __ldg(reinterpret_cast<const uint4*>(source.bytes + at * 512 + chunk));
            high[i] = __ldg(reinterpret_cast<const uint4*>(source.bytes + next_at * 512 + chunk));
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int wanted = first + 32 * j;
                const int existing = wanted < source.last_row ? wanted : source.last_row;
                const long long at = static_cast<long long>(existing) * source.columns + 4 * atom;
                words[i][j] = __ldg(reinterpret_cast<const uint32_t*>(source.bytes + at));
            }
        }
    }
#pragma unroll
    for (int i = 0; i < K_ATOMS; ++i) {
        if constexpr (SOURCE == SCALES_WINDOW) {
            const bool by_one = skip & 1, by_two = skip & 2;
            const uint32_t w0 = by_one ? low[i].y : low[i].x, w1 = by_one ? low[i].z : low[i].y;
            const uint32_t w2 = by_one ? low[i].w : low[i].z, w3 = by_one ? high[i].x : low[i].w;
            const uint32_t w4 = by_one ? high[i].y : high[i].x, w5 = by_one ? high[i].z : high[i].y;
            words[i][0] = by_two ? w2 : w0;
            words[i][1] = by_two ? w3 : w1;
            words[i][2] = by_two ? w4 : w2;
            words[i][3] = by_two ? w5 : w3;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            words[i][j] = existing_scales(words[i][j], source.columns, first_atom + i);
    }
}

template <int K_ATOMS>
__device__ __forceinline__ void store_scales(const uint32_t (&words)[K_ATOMS][4], uint32_t destination,
                                             int atoms, int lane) {
#pragma unroll
    for (int i = 0; i < K_ATOMS; ++i) {
        if (i < atoms)
            st_shared_v4_b32(destination + i * 512 + lane * 16, words[i][0], words[i][1], words[i][2],
                             words[i][3]);
    }
}

// One warp: shifts[g] = first row of the scales of group g minus its first row, where every group's scales start on a
// tile of 128 rows of their own. Example: groups of 2 and 3 rows: 0, 126.
__device__ __forceinline__ void shift_to_own_tiles(const int* group_ends, int num_groups, int* shifts,
                                                   int lane) {
    int before = 0;
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        const int start = g == 0 || g >= num_groups ? 0 : group_ends[g - 1];
        const int own = g < num_groups ? (group_ends[g] - start + 127) / 128 : 0;
        int tiles = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, tiles, distance);
            if (lane >= distance) tiles += other;
        }
        if (g < num_groups) shifts[g] = (before + tiles - own) * 128 - start;
        before += __shfl_sync(0xffffffff, tiles, 31);
    }
}
