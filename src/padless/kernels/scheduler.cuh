// Which output tile is number i: the order in which the tiles of a ragged problem are handed out.
//
// The groups are walked from the one with the most rows to the one with the fewest, so that what is left at the end,
// when some workers (CTAs, or clusters of CTAs side by side along N) run out of work, are small tiles. Inside a group
// the m-tiles are cut into bands of RASTER_M; a band is walked column after column, so that the tiles in flight share
// both A rows and B columns in L2.
//
// In the last round some workers have nothing to do while the others do a tile. With HALVES its last tiles are cut in two,
// of half the rows each, as many as leave no worker more than one piece of the round: if it is at most half full, all of
// them. A half takes little more than half the time.
//
// This header is plain C++ apart from the qualifiers: the tests compile it for the CPU and compare it with its Python
// twin, schedule.py.
#pragma once

struct Tile {
    int group;
    int row;     // first row of the tile, counted from the start of A
    int rows;    // rows that exist, 1 .. BLOCK_M; 0: there are no more tiles; -1: a half without a row
    int column;  // first column; of the first CTA where a cluster shares the tile
};

// The groups in the order in which they are walked.
struct GroupTable {
    const int* groups;     // [num_groups] number of the group
    const int* starts;     // [num_groups] its first row
    const int* ends;       // [num_groups] one past its last row
    const int* tile_ends;  // [num_groups] m-tiles of this group and those before it
    int num_groups;
};

// Place of group g in the walk: how many groups have more rows, or as many and a smaller number.
// `ends` are cleaned cumulative ends: ascending, the first group starts at 0.
__device__ __forceinline__ int place_of_group(const int* ends, int num_groups, int g) {
    const int rows = ends[g] - (g == 0 ? 0 : ends[g - 1]);
    int place = 0;
    int start = 0;
    for (int h = 0; h < num_groups; ++h) {
        const int other = ends[h] - start;
        start = ends[h];
        place += other > rows || (other == rows && h < g);
    }
    return place;
}

template <int BLOCK_M, int BLOCK_N_CLUSTER, int RASTER_M, bool HALVES = false>
struct TileOrder {
    GroupTable table;
    int n_tiles;
    int at = 0;            // place of the current group
    int first_m_tile = 0;  // m-tiles before it

    __device__ __forceinline__ TileOrder(const GroupTable& table, int n, int /*workers*/ = 0)
        : table(table), n_tiles((n + BLOCK_N_CLUSTER - 1) / BLOCK_N_CLUSTER) {}

    // Tile number `number`, which may not be smaller than in the last call; rows = 0 past the last tile.
    __device__ __forceinline__ Tile tile_at(int number) {
        while (at < table.num_groups && number >= table.tile_ends[at] * n_tiles)
            first_m_tile = table.tile_ends[at++];
        if (at >= table.num_groups) return Tile{0, 0, 0, 0};

        const int in_group = number - first_m_tile * n_tiles;
        const int m_tiles = table.tile_ends[at] - first_m_tile;
        const int band = in_group / (RASTER_M * n_tiles);
        const int left = m_tiles - band * RASTER_M;
        const int height = left < RASTER_M ? left : RASTER_M;
        const int in_band = in_group - band * RASTER_M * n_tiles;
        const int n_tile = in_band / height;
        const int m_tile = band * RASTER_M + (in_band - n_tile * height);

        Tile tile;
        tile.group = table.groups[at];
        tile.row = table.starts[at] + m_tile * BLOCK_M;
        tile.rows = table.ends[at] - tile.row < BLOCK_M ? table.ends[at] - tile.row : BLOCK_M;
        tile.column = n_tile * BLOCK_N_CLUSTER;
        return tile;
    }
};

// The numbers from `whole` on are those of halves, two for every tile. The second of a short tile has no row.
template <int BLOCK_M, int BLOCK_N_CLUSTER, int RASTER_M>
struct TileOrder<BLOCK_M, BLOCK_N_CLUSTER, RASTER_M, true> {
    TileOrder<BLOCK_M, BLOCK_N_CLUSTER, RASTER_M> tiles;
    int whole;  // tiles before those that are cut

    __device__ __forceinline__ TileOrder(const GroupTable& table, int n, int workers) : tiles(table, n) {
        const int all = table.num_groups == 0 ? 0 : table.tile_ends[table.num_groups - 1] * tiles.n_tiles;
        const int rest = all % workers;
        whole = all - (rest < workers - rest ? rest : workers - rest);
    }

    __device__ __forceinline__ Tile tile_at(int number) {
        const int past = number - whole;
        Tile tile = tiles.tile_at(past < 0 ? number : whole + past / 2);
        if (past < 0 || tile.rows == 0) return tile;
        const int rows = tile.rows - BLOCK_M / 2;  // of the second half
        if (past % 2 == 0) {
            if (rows > 0) tile.rows = BLOCK_M / 2;
        } else {
            tile.row += BLOCK_M / 2;
            tile.rows = rows > 0 ? rows : -1;
        }
        return tile;
    }
};
