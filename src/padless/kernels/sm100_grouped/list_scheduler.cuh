// Which output tile is number i of a list of problems, each with its own M, N and K. The host sorts them so that the tiles
// that cost most come first. Inside a problem the order is that of device/scheduler.cuh.
//
// Plain C++ apart from the qualifiers: the tests compare it with its Python twin.
#pragma once

struct ListEntry {
    int problem;
    int m, n;
    int tile_end;  // tiles of this problem and those before it in the walk
};

template <int BLOCK_M, int BLOCK_N, int RASTER_M>
struct ListOrder {
    const ListEntry* entries;
    int count;
    int at = 0;          // place of the current problem
    int first_tile = 0;  // tiles before it

    __device__ __forceinline__ ListOrder(const ListEntry* entries, int count)
        : entries(entries), count(count) {}

    // Tile number `number`, which may not be smaller than in the last call; rows = 0 past the last tile.
    __device__ __forceinline__ Tile tile_at(int number) {
        while (at < count && number >= entries[at].tile_end) first_tile = entries[at++].tile_end;
        if (at >= count) return Tile{0, 0, 0, 0};

        const ListEntry entry = entries[at];
        const int m_tiles = (entry.m + BLOCK_M - 1) / BLOCK_M;
        const int n_tiles = (entry.n + BLOCK_N - 1) / BLOCK_N;
        const int in_problem = number - first_tile;
        const int band = in_problem / (RASTER_M * n_tiles);
        const int left = m_tiles - band * RASTER_M;
        const int height = left < RASTER_M ? left : RASTER_M;
        const int in_band = in_problem - band * RASTER_M * n_tiles;
        const int n_tile = in_band / height;
        const int m_tile = band * RASTER_M + (in_band - n_tile * height);

        Tile tile;
        tile.group = entry.problem;
        tile.row = m_tile * BLOCK_M;
        tile.rows = entry.m - tile.row < BLOCK_M ? entry.m - tile.row : BLOCK_M;
        tile.column = n_tile * BLOCK_N;
        return tile;
    }
};
