// Which output tile is number i: the order in which the tiles of a ragged problem are scheduled.
//
// The groups are walked from the one with the most rows to the one with the fewest, so that what is left at the end,
// when some workers (CTAs, or clusters of CTAs side by side along N) run out of work, are small tiles; or by number, where
// each has one m-tile and all of these take the same time. Inside a group
// the m-tiles are cut into bands of RASTER_M; a band is walked column after column, so that the tiles in flight share
// both A rows and B columns in L2.
//
// In the last round some workers have nothing to do while the others do a tile. With HALF_TILES its last tiles are cut in
// two, of half the rows each, as many as leave no worker more than one half tile of the round: if it is at most half full,
// all of them. A half tile takes little more than half the time.
//
// This header is plain C++ apart from the qualifiers: the tests compile it for the CPU and compare it with its Python
// twin, schedule.py.
#pragma once

struct Tile {
    int group;
    int row;     // first row of the tile, counted from the start of A
    int rows;    // rows that exist, 1 .. BLOCK_M; 0: there are no more tiles; -1: a half tile without a row
    int column;  // first column; of the first CTA where a cluster shares the tile
};

// The groups that have rows, in the order in which they are walked.
struct GroupTable {
    const int* groups;     // [num_groups] number of the group
    const int* ends;       // by number of the group, of all of them: one past its last row
    const int* tile_ends;  // [num_groups] m-tiles of this group and those before it
    int num_groups;
    bool is_sorted;  // else each group has one m-tile, and there are no tile_ends

    __device__ __forceinline__ int m_tiles() const {
        return !is_sorted || num_groups == 0 ? num_groups : tile_ends[num_groups - 1];
    }
};

template <int BLOCK_M, int BLOCK_N_CLUSTER, int RASTER_M, bool HALF_TILES = false>
struct TileOrder {
    static constexpr bool HAS_HALF_TILES = false;
    GroupTable table;
    int n_tiles;
    int at = 0;            // place of the current group
    int first_m_tile = 0;  // m-tiles before it

    __device__ __forceinline__ TileOrder(const GroupTable& table, int n, int /*workers*/ = 0)
        : table(table), n_tiles(tiles_along(n)) {}

    static __device__ __forceinline__ int tiles_along(int n) {
        return (n + BLOCK_N_CLUSTER - 1) / BLOCK_N_CLUSTER;
    }

    // Tile number `number`, which may not be smaller than in the last call; rows = 0 past the last tile.
    __device__ __forceinline__ Tile tile_at(int number) {
        if (number >= table.m_tiles() * n_tiles) return Tile{0, 0, 0, 0};
        if (!table.is_sorted) {
            at = number / n_tiles;
            const int group = table.groups[at];
            return tile_in_group(number - at * n_tiles, group, group == 0 ? 0 : table.ends[group - 1],
                                 table.ends[group], 1, n_tiles);
        }
        while (number >= table.tile_ends[at] * n_tiles) first_m_tile = table.tile_ends[at++];
        const int group = table.groups[at];
        return tile_in_group(number - first_m_tile * n_tiles, group, group == 0 ? 0 : table.ends[group - 1],
                             table.ends[group], table.tile_ends[at] - first_m_tile, n_tiles);
    }

    // Tile `in_group` of a group that has rows start .. end - 1.
    static __device__ __forceinline__ Tile tile_in_group(int in_group, int group, int start, int end,
                                                         int m_tiles, int n_tiles) {
        int m_tile = 0, n_tile = in_group;
        if (m_tiles > 1) {  // not so in most calls of few rows, whose first tile the whole CTA waits for
            const int band = in_group / (RASTER_M * n_tiles);
            const int left = m_tiles - band * RASTER_M;
            const int height = left < RASTER_M ? left : RASTER_M;
            const int in_band = in_group - band * RASTER_M * n_tiles;
            n_tile = in_band / height;
            m_tile = band * RASTER_M + (in_band - n_tile * height);
        }
        Tile tile;
        tile.group = group;
        tile.row = start + m_tile * BLOCK_M;
        tile.rows = end - tile.row < BLOCK_M ? end - tile.row : BLOCK_M;
        tile.column = n_tile * BLOCK_N_CLUSTER;
        return tile;
    }
};

// The numbers from `whole` on are those of half tiles, two for every tile. The second of a short tile has no row.
template <int BLOCK_M, int BLOCK_N_CLUSTER, int RASTER_M>
struct TileOrder<BLOCK_M, BLOCK_N_CLUSTER, RASTER_M, true> {
    using Tiles = TileOrder<BLOCK_M, BLOCK_N_CLUSTER, RASTER_M>;
    static constexpr bool HAS_HALF_TILES = true;
    Tiles tiles;
    int whole;  // tiles before those that are cut

    __device__ __forceinline__ TileOrder(const GroupTable& table, int n, int workers) : tiles(table, n) {
        whole = whole_tiles(table.m_tiles() * tiles.n_tiles, workers);
    }

    // How many of `all` tiles are not cut.
    static __device__ __forceinline__ int whole_tiles(int all, int workers) {
        const int rest = all < workers ? all : all % workers;
        return all - (rest < workers - rest ? rest : workers - rest);
    }

    static __device__ __forceinline__ int tiles_along(int n) { return Tiles::tiles_along(n); }

    static __device__ __forceinline__ Tile tile_in_group(int in_group, int group, int start, int end,
                                                         int m_tiles, int n_tiles) {
        return Tiles::tile_in_group(in_group, group, start, end, m_tiles, n_tiles);
    }

    // The first (half = 0) or second half of a tile.
    static __device__ __forceinline__ Tile half_tile_of(Tile tile, int half) {
        const int rows = tile.rows - BLOCK_M / 2;  // of the second half
        if (half == 0) {
            if (rows > 0) tile.rows = BLOCK_M / 2;
        } else {
            tile.row += BLOCK_M / 2;
            tile.rows = rows > 0 ? rows : -1;
        }
        return tile;
    }

    __device__ __forceinline__ Tile tile_at(int number) {
        const int past = number - whole;
        const Tile tile = tiles.tile_at(past < 0 ? number : whole + past / 2);
        return past < 0 || tile.rows == 0 ? tile : half_tile_of(tile, past % 2);
    }
};
