// A store by warps of its own: a tile's registers are converted into staging memory piece by piece, from which the copy engine
// writes them.
//
//      consumer warpgroup                                  store warp, one for each of them
//      ------------------                                  --------------------------------
//      wait d_free[b]  <---------------- arrive ---------  ... after the piece before the last has been read
//      stage; proxy fence; arrive ---- d_full[b] ------->  wait d_full[b]; store
//
// A warpgroup has its tile in parts, of PIECES pieces each, which are staged in NUM_D = 2 buffers in turn. A piece is PIECE_COLUMNS
// columns of 64 rows (PIECE_SLABS slabs), a tile NUM_PIECES of them. The first time a consumer stages registers that hold no tile,
// and the store warp stores nothing: where parts are staged when other products are already under way, a branch there takes
// registers that the largest kernels do not have.
//
// Where the result is added to (ACCUMULATE), a buffer is handed out with the old values of its piece in it, which the copy engine
// brings behind the last store's reads; consumers wait for d_loaded (a barrier of its bytes) in place of d_free, add, and the sums
// are stored. So they are fetched from one tile's end on for the next. The last REDUCED_PIECES pieces of a tile have their
// buffers handed out empty, by the same barrier, and the copy engine adds them where the result is.
//
// Included behind the kernel's SharedStorage, Reader, Problem, these constants and these functions: piece_row and piece_column,
// where in the result a warpgroup's piece of a tile begins; is_in_result, whether the result has a row and column of a tile; and
// write_slab, which has the copy engine write 64 rows of SLAB_COLUMNS.
#pragma once

static_assert(!ACCUMULATE || OUT_TYPE == OUT_F32, "sums are float32");
static_assert(REDUCED_PIECES <= NUM_PIECES, "of a tile's pieces");
constexpr int USES = NUM_PIECES / NUM_D;                                  // of a buffer, by a tile
constexpr int NUM_LOADED = ACCUMULATE ? NUM_PIECES - REDUCED_PIECES : 0;  // pieces with old values, the first
constexpr int NO_ROW = 1 << 30;          // behind any result: what is read there is zeros
constexpr int STORE_THREADS = 128 + 32;  // that meet at a barrier: a warpgroup and its store warp

__device__ __forceinline__ uint32_t d_free(int warpgroup, int piece) {
    return 1 + warpgroup * NUM_D + piece % NUM_D;
}
__device__ __forceinline__ uint32_t d_full(int warpgroup, int piece) {
    return 1 + NUM_MMA_WARPGROUPS * NUM_D + warpgroup * NUM_D + piece % NUM_D;
}

template <class Storage>
__device__ __forceinline__ uint32_t d_loaded(Storage& shared, int warpgroup, int piece) {
    return shared_address(&shared.d_loaded[warpgroup][piece % NUM_D]);
}

// Consumer: hands a part of its tile to its store warp. parity: of the tiles before, where a tile uses buffers an odd number of times.
template <int PIECES>
__device__ __forceinline__ void stage_part(const float (&d)[PIECES * PIECE_COLUMNS / 2],
                                           SharedStorage& shared, int warpgroup, int part, uint32_t& parity) {
    using Piece = const float (&)[PIECE_COLUMNS / 2];
    const uint32_t tid = read_tid_x();
    const int warp = tid / 32 % 4, lane = tid % 32;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int piece = part * PIECES + i;
        if constexpr (ACCUMULATE)
            mbarrier_wait(d_loaded(shared, warpgroup, piece), (piece / NUM_D + parity) % 2);
        else
            bar_sync(d_free(warpgroup, piece), STORE_THREADS);
        Piece values = reinterpret_cast<Piece>(d[i * (PIECE_COLUMNS / 2)]);
        const uint32_t slabs = shared_address(shared.d[warpgroup][piece % NUM_D]);
        if (piece < NUM_LOADED)
            stage_tile<PIECE_COLUMNS, OUT_TYPE, true>(values, slabs, warp, lane);
        else
            stage_tile<PIECE_COLUMNS, OUT_TYPE>(values, slabs, warp, lane);
        fence_proxy_async_shared();
        bar_arrive(d_full(warpgroup, piece), STORE_THREADS);
        if (ACCUMULATE && USES % 2 == 1 && piece == NUM_PIECES - 1) parity ^= 1;
    }
}

// One thread: has a piece's old values brought into its buffer, whole: zeros where the result has none, and for no tile. With a
// tile's first piece those that have no buffer yet are brought into L2 (FETCHES_LATE_PIECES).
template <class Storage>
__device__ __forceinline__ void load_piece(Storage& shared, const TensorMap& map_d, const Tile& tile,
                                           int warpgroup, int piece) {
    const uint32_t loaded = d_loaded(shared, warpgroup, piece);
    mbarrier_arrive_expect_tx(loaded, PIECE_SLABS * SLAB_BYTES);
    const int row = tile.rows > 0 ? piece_row(tile, warpgroup, piece) : NO_ROW;
    for (int s = 0; s < PIECE_SLABS; ++s) {
        const uint32_t slab = shared_address(shared.d[warpgroup][piece % NUM_D] + s * SLAB_BYTES);
        tma_load_3d(map_d, slab, loaded, piece_column(tile, piece) + s * SLAB_COLUMNS, row, tile.group);
    }
    if (piece > 0 || tile.rows == 0) return;
    constexpr int FIRST_LATE = NUM_LOADED < NUM_D ? NUM_LOADED : NUM_D;
    for (int later = FETCHES_LATE_PIECES ? FIRST_LATE : NUM_PIECES; later < NUM_PIECES; ++later)
        for (int s = 0; s < PIECE_SLABS; ++s)
            tma_prefetch_3d(map_d, piece_column(tile, later) + s * SLAB_COLUMNS,
                            piece_row(tile, warpgroup, later), tile.group);
}

// One thread: writes a piece, clipped to the rows and columns that exist.
__device__ __forceinline__ void store_piece(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, const Tile& tile, int warpgroup,
                                            int piece) {
    const int row = piece_row(tile, warpgroup, piece);
    for (int s = 0; s < PIECE_SLABS; ++s) {
        const int column = piece_column(tile, piece) + s * SLAB_COLUMNS;
        if (!is_in_result(problem, tile, row, column)) break;
        const uint32_t slab = shared_address(shared.d[warpgroup][piece % NUM_D] + s * SLAB_BYTES);
        if (ACCUMULATE && piece >= NUM_LOADED)
            tma_reduce_add_3d(map_d, slab, column, row, tile.group);
        else
            write_slab(problem, map_d, slab, tile, row, column);
    }
    cp_async_bulk_commit_group();
}

// Store warp of a consumer warpgroup. While a piece is staged the buffer of the next one is emptied.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, int warpgroup, int lane) {
    Reader reader(shared.queue);
    Tile tile{}, next{};
    const auto hand_out = [&](const Tile& to, int piece) {
        if constexpr (ACCUMULATE) {
            if (lane == 0 && piece < NUM_LOADED)
                load_piece(shared, map_d, to, warpgroup, piece);
            else if (lane == 0)
                mbarrier_arrive(d_loaded(shared, warpgroup, piece));
        } else {
            bar_arrive(d_free(warpgroup, piece), STORE_THREADS);
        }
    };
    hand_out(tile, 0);
    do {
        tile = next;
#pragma unroll
        for (int piece = 0; piece < NUM_PIECES; ++piece) {
            if (piece == NUM_PIECES - 1) {  // the tile behind is being multiplied, so it is known
                reader.next(next, lane);
                if (next.rows > 0 && lane == 0) reader.release();
                reader.advance();
            }
            if (piece < NUM_PIECES - 1 || next.rows > 0) {
                if (lane == 0) cp_async_bulk_wait_group_read_all();
                __syncwarp();
                hand_out(piece < NUM_PIECES - 1 ? tile : next, (piece + 1) % NUM_PIECES);
            }
            bar_sync(d_full(warpgroup, piece), STORE_THREADS);
            if (lane == 0 && tile.rows > 0) store_piece(shared, problem, map_d, tile, warpgroup, piece);
            __syncwarp();
        }
    } while (next.rows > 0);
    if (lane == 0) cp_async_bulk_wait_group_read_all();  // shared memory must outlive the reads
}
