// The order of the tiles of a weight gradient. Every group has as many tiles as every other, but a tile lasts as long as its
// group has tokens: the longest groups come first, so that what is left for the end, when some CTAs have no work, is short.
// Inside a group, bands of RASTER_M row tiles are walked column after column, so that tiles in flight share both operands in
// L2.
//
// Like device/scheduler.cuh this is plain C++ apart from the qualifiers: the tests compile it for the CPU and compare it with
// its Python twin, longest_first.py.
#pragma once

template <int BLOCK_M, int BLOCK_N, int RASTER_M, int MAX_GROUPS>
struct LongestFirst {
    const SortedGroups<MAX_GROUPS>& groups;
    int num_groups, n_rows, n_columns;  // of one group's result
    bool skips_empty;                   // groups without a token have no tiles

    // Tile `number`; rows = 0 past the last one. Tile (group, row, rows, column) as in device/scheduler.cuh, where row counts from
    // the start of the group's result.
    __device__ __forceinline__ Tile tile_at(int number) const {
        const int m_tiles = (n_rows + BLOCK_M - 1) / BLOCK_M, n_tiles = (n_columns + BLOCK_N - 1) / BLOCK_N;
        const int place = number / (m_tiles * n_tiles);
        if (place >= num_groups) return Tile{0, 0, 0, 0};
        if (skips_empty && place >= groups.active) return Tile{0, 0, 0, 0};
        const int group = groups.order[place];
        const int in_group = number - place * m_tiles * n_tiles;
        const int band = in_group / (RASTER_M * n_tiles);
        const int left = m_tiles - band * RASTER_M;
        const int height = left < RASTER_M ? left : RASTER_M;
        const int in_band = in_group - band * RASTER_M * n_tiles;
        const int row = (band * RASTER_M + in_band % height) * BLOCK_M;
        const int rows = n_rows - row < BLOCK_M ? n_rows - row : BLOCK_M;
        return Tile{group, row, rows, in_band / height * BLOCK_N};
    }
};
