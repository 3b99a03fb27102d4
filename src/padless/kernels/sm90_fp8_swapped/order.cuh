// Which tile is number i, where the rows of a group are shared out evenly.
//
// A group of R rows has ceil(R / BLOCK_M) tiles, as in device/scheduler.cuh. There all but the last have BLOCK_M rows; here each
// has as many eights of rows as the others or one more, since the tensor core's cost is that of the eights: the tiles of a group,
// which read the same weights, take the same time. Example: 200 rows are tiles of 104 and 96, not of 128 and 72.
//
// This header is plain C++ apart from the qualifiers. Its Python twin is in sm90_fp8_swapped/config.py.
#pragma once

template <int BLOCK_M, int BLOCK_N, int RASTER_M>
struct EvenTileOrder {
    using Uneven = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
    static constexpr bool HAS_HALF_TILES = false;
    GroupTable table;
    int n_tiles;
    int at = 0;            // place of the current group
    int first_m_tile = 0;  // m-tiles before it

    __device__ __forceinline__ EvenTileOrder(const GroupTable& table, int n)
        : table(table), n_tiles(tiles_along(n)) {}

    static __device__ __forceinline__ int tiles_along(int n) { return Uneven::tiles_along(n); }

    // Tile number `number`, which may not be smaller than in the last call; rows = 0 past the last tile.
    __device__ __forceinline__ Tile tile_at(int number) {
        while (at < table.num_groups && number >= table.tile_ends[at] * n_tiles)
            first_m_tile = table.tile_ends[at++];
        if (at >= table.num_groups) return Tile{0, 0, 0, 0};
        return tile_in_group(number - first_m_tile * n_tiles, table.groups[at], table.starts[at],
                             table.ends[at], table.tile_ends[at] - first_m_tile, n_tiles);
    }

    // Tile `in_group` of a group that has rows start .. end - 1.
    static __device__ __forceinline__ Tile tile_in_group(int in_group, int group, int start, int end,
                                                         int m_tiles, int n_tiles) {
        Tile tile = Uneven::tile_in_group(in_group, group, start, end, m_tiles, n_tiles);
        if (m_tiles > 1) {
            const int m_tile = (tile.row - start) / BLOCK_M;
            const int eights = (end - start + 7) / 8;
            const int least = eights / m_tiles, more = eights - least * m_tiles;  // of the first `more` tiles
            tile.row = start + 8 * (m_tile * least + (m_tile < more ? m_tile : more));
            const int rows = 8 * (least + (m_tile < more ? 1 : 0));
            tile.rows = rows < end - tile.row ? rows : end - tile.row;
        }
        return tile;
    }
};
