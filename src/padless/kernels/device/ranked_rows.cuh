// Which output tile is number i, out of the sorted groups alone (device/sorted_groups.cuh): the order of device/scheduler.cuh
// without a table of tiles, for kernels that have no shared memory to spare.
#pragma once

template <int BLOCK_M, int BLOCK_N, int RASTER_M, int MAX_GROUPS>
struct RankedRows {
    using Tiles = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
    const SortedGroups<MAX_GROUPS>& groups;
    int n_tiles;
    int at = 0;            // place of the current group
    int first_m_tile = 0;  // m-tiles before it

    __device__ __forceinline__ RankedRows(const SortedGroups<MAX_GROUPS>& groups, int n)
        : groups(groups), n_tiles(Tiles::tiles_along(n)) {}

    // Tile number `number`, which may not be smaller than in the last call; rows = 0 past the last tile.
    __device__ __forceinline__ Tile tile_at(int number) {
        for (; at < groups.active; ++at) {
            const int group = groups.order[at], rows = groups.rows(group);
            const int m_tiles = (rows + BLOCK_M - 1) / BLOCK_M;
            const int in_group = number - first_m_tile * n_tiles;
            if (in_group < m_tiles * n_tiles) {
                const int end = groups.ends[group];
                return Tiles::tile_in_group(in_group, group, end - rows, end, m_tiles, n_tiles);
            }
            first_m_tile += m_tiles;
        }
        return Tile{0, 0, 0, 0};
    }
};
