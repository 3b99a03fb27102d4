// Which output tile next: a static, persistent schedule over ragged groups.
//
// Tiles are numbered group after group. Inside a group the m-tiles are cut into bands of RASTER_M; a band is walked
// column after column, so that the tiles in flight share both A rows and B columns in L2. Worker w of W (a CTA, or a
// cluster of CTAs side by side along N) takes tiles w, w + W, w + 2 W, ...
//
// This header is plain C++ apart from the qualifiers: the tests compile it for the CPU and compare it with its Python
// twin, schedule.py.
#pragma once

struct Tile {
    int group;
    int group_end;  // one past the last row of the group
    int row;        // first row of the tile, counted from the start of A
    int rows;       // rows that exist, 1 .. BLOCK_M
    int column;     // first column; of the first CTA where a cluster shares the tile
};

template <int BLOCK_M, int BLOCK_N_CLUSTER, int RASTER_M>
struct TileScheduler {
    const int* group_ends;  // [num_groups] cleaned offs: ascending, inside [0, m]
    const int* tile_ends;   // [num_groups] m-tiles of groups 0 .. g together
    int num_groups;
    int n_tiles;
    int next;      // number of the tile that next_tile() will give
    int step;      // workers
    int group = 0;
    int first_m_tile = 0;  // m-tiles before `group`

    __device__ __forceinline__ TileScheduler(const int* group_ends, const int* tile_ends, int num_groups, int n,
                                             int worker, int workers)
        : group_ends(group_ends),
          tile_ends(tile_ends),
          num_groups(num_groups),
          n_tiles((n + BLOCK_N_CLUSTER - 1) / BLOCK_N_CLUSTER),
          next(worker),
          step(workers) {}

    __device__ __forceinline__ bool next_tile(Tile& tile) {
        while (group < num_groups && next >= tile_ends[group] * n_tiles) first_m_tile = tile_ends[group++];
        if (group >= num_groups) return false;

        const int index = next - first_m_tile * n_tiles;  // inside the group
        const int m_tiles = tile_ends[group] - first_m_tile;
        const int band = index / (RASTER_M * n_tiles);
        const int left = m_tiles - band * RASTER_M;
        const int height = left < RASTER_M ? left : RASTER_M;
        const int in_band = index - band * RASTER_M * n_tiles;
        const int n_tile = in_band / height;
        const int m_tile = band * RASTER_M + (in_band - n_tile * height);

        const int group_start = group == 0 ? 0 : group_ends[group - 1];
        tile.group = group;
        tile.group_end = group_ends[group];
        tile.row = group_start + m_tile * BLOCK_M;
        tile.rows = tile.group_end - tile.row < BLOCK_M ? tile.group_end - tile.row : BLOCK_M;
        tile.column = n_tile * BLOCK_N_CLUSTER;
        next += step;
        return true;
    }
};
