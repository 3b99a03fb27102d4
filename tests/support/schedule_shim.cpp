// Runs scheduler.cuh, group_table.cuh and tile_queue.cuh on the CPU for test_schedule.py, which compiles this file with
// SHAPES defined as SHAPE(block_m, block_n, raster_m) for every shape to compile in.
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
struct int4 {
    int x, y, z, w;
};

// Threads are coroutines: one runs until it has to wait for others, and then another does.
namespace threads {
constexpr int MOST = 256;
ucontext_t caller, contexts[MOST];
alignas(16) char stacks[MOST][32768];
bool done[MOST];
int count, me;
unsigned seed;  // 0: in turn; otherwise in an order drawn from it
void (*body)();

int another() {
    for (int at = me;;) {
        seed = seed * 1664525u + 1013904223u * (seed != 0);
        at = seed ? int((seed >> 16) % count) : (at + 1) % count;
        if (!done[at]) return at;
    }
}
void give_way() {
    const int mine = me, next = another();
    if (next != mine) {
        me = next;
        swapcontext(&contexts[mine], &contexts[next]);
        me = mine;
    }
}
void run_one() {
    body();
    done[me] = true;
    bool left = false;
    for (int t = 0; t < count; ++t) left |= !done[t];
    if (!left) setcontext(&caller);
    me = another();
    setcontext(&contexts[me]);
}
void run(int number, unsigned order, void (*function)()) {
    count = number, seed = order, body = function, me = 0;
    for (int t = 0; t < number; ++t) {
        done[t] = false;
        getcontext(&contexts[t]);
        contexts[t].uc_stack.ss_sp = stacks[t];
        contexts[t].uc_stack.ss_size = sizeof(stacks[t]);
        contexts[t].uc_link = nullptr;
        makecontext(&contexts[t], run_one, 0);
    }
    volatile bool started = false;
    getcontext(&caller);
    if (!started) {
        started = true;
        setcontext(&contexts[0]);
    }
}
}  // namespace threads

static struct ThreadIndex {
    struct X {
        operator int() const { return threads::me; }
    } x;
} threadIdx;

// Two boxes: a lane may be at the next shuffle before the others have read this one, but no further.
namespace together {
int box[2][threads::MOST], shuffles[threads::MOST], barriers[threads::MOST];
void wait_for(const int* counts, int first, int number, int mine) {
    for (int t = first; t < first + number; ++t)
        while (counts[t] < mine) threads::give_way();
}
int exchange(int value, int source) {
    const int me = threads::me, mine = ++shuffles[me];
    box[mine & 1][me] = value;
    wait_for(shuffles, me / 32 * 32, 32, mine);
    return box[mine & 1][me / 32 * 32 + source];
}
}  // namespace together

static int __shfl_up_sync(unsigned, int value, int distance) {
    const int lane = threads::me % 32;
    return together::exchange(value, lane >= distance ? lane - distance : lane);
}
static int __shfl_sync(unsigned, int value, int source) {
    return together::exchange(value, source);
}
static int __shfl_xor_sync(unsigned, int value, int distance) {
    return together::exchange(value, threads::me % 32 ^ distance);
}
static int __reduce_add_sync(unsigned, int value) {
    for (int distance = 1; distance < 32; distance *= 2) value += __shfl_xor_sync(0, value, distance);
    return value;
}
static unsigned __ballot_sync(unsigned, bool value) {
    unsigned all = unsigned(value) << threads::me % 32;
    for (int distance = 1; distance < 32; distance *= 2) all |= __shfl_xor_sync(0, all, distance);
    return all;
}
static int __popc(unsigned value) {
    return __builtin_popcount(value);
}
static bool __all_sync(unsigned, bool value) {
    int all = value;
    for (int distance = 1; distance < 32; distance *= 2)
        all &= together::exchange(all, threads::me % 32 ^ distance);
    return all;
}
static void __syncthreads() {
    const int mine = ++together::barriers[threads::me];
    together::wait_for(together::barriers, 0, threads::count, mine);
}
static void __syncwarp() {  // with a shuffle's own steps: all lanes come before any goes on
    together::exchange(0, threads::me % 32);
}
static void __threadfence() {}

#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"

// The tile queue of each worker, whose readers take every tile at once. Only what is handed out is of interest here.
static uint32_t shared_address(const void*);
static void on_arrival(uint32_t address);
static void on_wait(uint32_t address);
static void mbarrier_wait(uint32_t address, uint32_t) {
    on_wait(address);
    threads::give_way();
}
static void mbarrier_wait_cluster(uint32_t, uint32_t) {
    threads::give_way();
}
static void mbarrier_arrive(uint32_t address) {
    on_arrival(address);
}
static void mbarrier_arrive_cluster(uint32_t address, uint32_t) {
    on_arrival(address);
}
static void mbarrier_arrive_release_cluster(uint32_t address, uint32_t cta) {
    if (cta == 0) on_arrival(address);
}
static void st_cluster_v4(uint32_t address, uint32_t cta, int group, int row, int rows, int column);
static int atomicAdd(int* address, int value) {
    threads::give_way();
    const int old = *address;
    *address += value;
    return old;
}

#include "device/tile_queue.cuh"

namespace {
constexpr int MOST_GROUPS = 4096;
constexpr int CTA = 64;  // two warps: the table's warp and one more
struct {
    int block_m;
    const int* offs;
    int num_groups, m;
    GroupTableStorage<MOST_GROUPS> storage;
    alignas(16) int in_fours[MOST_GROUPS];
} input;

template <int BLOCK_M>
void build_as() {
    const int warp = threads::me / 32, lane = threads::me % 32, groups = input.num_groups;
    if (groups > SMALL_TABLE) {
        build_large_table<BLOCK_M, CTA>(input.storage, input.offs, groups, input.m, lane);
    } else if (warp == 1) {  // as the kernels do
        const int end = load_group_end(input.offs, groups, input.m, lane);
        store_group(input.storage, place_group<BLOCK_M>(end, groups, input.m, lane), groups, lane);
    }
}
void build() {
    input.block_m == 64 ? build_as<64>() : input.block_m == 128 ? build_as<128>() : build_as<256>();
}
void put(int* out, const Tile& tile) {
    out[0] = tile.group, out[1] = tile.row, out[2] = tile.rows, out[3] = tile.column;
}

sigjmp_buf crashed;
void on_crash(int) {
    siglongjmp(crashed, 1);
}

struct {
    TileQueueStorage queues[threads::MOST];
    uint64_t wanted[threads::MOST];  // the barriers at which a worker waits to be asked for its next tile
    int tiles[threads::MOST];        // that a worker has handed out
    bool was_asked[threads::MOST];   // since the last of them
    bool early;                      // a worker handed out a tile, or ended, before it was asked for it
    int counter, workers, *out, handed_out, room, arrivals_of_first;
    bool first_is_queued, is_flat[32];
} launch;

template <int M, int N, int R, bool HALF_TILES>
struct Shape {
    using Order = TileOrder<M, N, R, HALF_TILES>;
    static Order order(int n, int workers) {
        return Order(input.storage.table(), n, workers);
    }
    static int n_of_launch;

    static void numbers(int n, int workers, const int* wanted, int count, int* out) {
        Order tiles = order(n, workers);
        for (int i = 0; i < count; ++i) put(out + 4 * i, tiles.tile_at(wanted[i]));
    }
    static void worker() {
        schedule_tiles<1, HALF_TILES, HALF_TILES>(launch.queues[threads::me], order(n_of_launch, launch.workers),
                                          launch.counter, threads::me, launch.workers,
                                          &launch.wanted[threads::me], launch.first_is_queued);
    }
    static void cluster_worker() {
        schedule_tiles<2, HALF_TILES, HALF_TILES>(launch.queues[threads::me], order(n_of_launch, launch.workers),
                                          launch.counter, threads::me, launch.workers,
                                          &launch.wanted[threads::me], launch.first_is_queued);
    }
    static void put_firsts(int n) {  // what every worker's queue holds when its scheduler begins
        for (int w = 0; w < launch.workers; ++w) {
            Tile tile = order(n, launch.workers).tile_at(w);
            if (tile.rows < 0) tile = Tile{0, 0, 0, 0};  // as queue_first_tile has it
            launch.queues[w].tiles[0] = tile;
            launch.tiles[w] = 1;
            int* out = launch.out + 5 * launch.handed_out++;
            out[0] = w;
            put(out + 1, tile);
        }
    }
    static void queue_first() {  // one warp
        const int lane = threads::me;
        if (input.num_groups > SMALL_TABLE) {  // of the last table built, one thread
            if (lane == 0)
                queue_first_tile(launch.queues[0], order(n_of_launch, launch.workers), launch.counter);
            return;
        }
        const int end = load_group_end(input.offs, input.num_groups, input.m, lane);
        const PlacedGroup group = place_group<M>(end, input.num_groups, input.m, lane);
        queue_first_tile<Order>(launch.queues[0], group, Order::tiles_along(n_of_launch), launch.counter,
                                launch.workers, lane);
    }
    static void search_first() {  // one warp, without a table
        if constexpr (!HALF_TILES)
            launch.is_flat[threads::me] =
                queue_first_tile<Order, M>(launch.queues[0], input.in_fours, input.num_groups, input.m,
                                           Order::tiles_along(n_of_launch), launch.counter, threads::me);
    }
};
template <int M, int N, int R, bool HALF_TILES>
int Shape<M, N, R, HALF_TILES>::n_of_launch;
}  // namespace

static uint32_t shared_address(const void* pointer) {
    return uint32_t(static_cast<const char*>(pointer) - reinterpret_cast<const char*>(launch.queues));
}
static void st_cluster_v4(uint32_t address, uint32_t cta, int group, int row, int rows, int column) {
    if (cta == 0)
        *reinterpret_cast<Tile*>(reinterpret_cast<char*>(launch.queues) + address) =
            Tile{group, row, rows, column};
}
static void on_arrival(uint32_t address) {  // a worker's scheduler has filled a slot
    if (address == shared_address(&launch.queues[0].full[0])) ++launch.arrivals_of_first;
    TileQueueStorage& queue = launch.queues[threads::me];
    for (int slot = 0; slot < QUEUE_SLOTS; ++slot)
        if (address == shared_address(&queue.full[slot]) && launch.handed_out < launch.room) {
            int* out = launch.out + 5 * launch.handed_out++;
            out[0] = threads::me;
            put(out + 1, queue.tiles[slot]);
            launch.early |= launch.tiles[threads::me]++ != 0 && !launch.was_asked[threads::me];
            launch.was_asked[threads::me] = false;
        }
}
static void on_wait(uint32_t address) {
    if (address == shared_address(&launch.wanted[threads::me])) launch.was_asked[threads::me] = true;
}

// The table of groups; offs null is the dense problem. Each output has room for num_groups entries, tile_ends those of groups
// with rows, whose number is the result.
extern "C" int build_table(int block_m, const int* offs, int num_groups, int m, int* cleaned, int* groups,
                           int* tile_ends, int* is_sorted) {
    input.block_m = block_m, input.offs = offs, input.num_groups = num_groups, input.m = m;
    for (int t = 0; t < threads::MOST; ++t) together::shuffles[t] = together::barriers[t] = 0;
    threads::run(CTA, 0, build);
    for (int i = 0; i < num_groups; ++i)
        cleaned[i] = input.storage.sorted.ends[i], groups[i] = input.storage.sorted.order[i];
    // A flat table has none: an entry is then the place behind it, which is what the order of tiles assumes.
    for (int i = 0; i < input.storage.sorted.active; ++i)
        tile_ends[i] = input.storage.sorted.is_sorted ? input.storage.tile_ends[i] : i + 1;
    *is_sorted = input.storage.sorted.is_sorted;
    return input.storage.sorted.active;
}

// Both use the last table built. 0, or -1 for a division by zero, or -2 for a shape that is not compiled in.
#define DISPATCH(CALL)                      \
    volatile int result = -2;               \
    auto before = signal(SIGFPE, on_crash); \
    if (sigsetjmp(crashed, 1))              \
        result = -1;                        \
    else {                                  \
        SHAPES                              \
    }                                       \
    signal(SIGFPE, before);                 \
    return result;

// half_tiles_for: workers for which the last tiles are cut in two, 0 to cut none.
extern "C" int tiles_at(int block_m, int block_n, int raster_m, int n, int half_tiles_for, const int* wanted,
                        int count, int* out) {
#define SHAPE(M, N, R)                                                                \
    if (block_m == M && block_n == N && raster_m == R) {                              \
        result = 0;                                                                   \
        half_tiles_for ? Shape<M, N, R, true>::numbers(n, half_tiles_for, wanted, count, out) \
                   : Shape<M, N, R, false>::numbers(n, 0, wanted, count, out);        \
    }
    DISPATCH()
#undef SHAPE
}

template <class S>
static int run_first(int n, int* out) {
    S::n_of_launch = n;
    threads::run(32, 0, S::queue_first);
    put(out, launch.queues[0].tiles[0]);
    return launch.arrivals_of_first;
}

// What a warp queues as the first tile of `worker`, and how often (1 is right), or -2 for a shape that is not compiled in.
// half_tiles_for: workers for which the last tiles are cut in two, 0 to cut none.
extern "C" int first_tile(int block_m, int block_n, int raster_m, int n, int half_tiles_for, const int* offs,
                          int num_groups, int m, int worker, int* out) {
    input.offs = offs, input.num_groups = num_groups, input.m = m;
    launch.counter = worker, launch.workers = half_tiles_for;
    launch.arrivals_of_first = launch.handed_out = launch.room = 0;
    launch.queues[0].tiles[0] = Tile{-1, -1, -1, -1};
    for (int t = 0; t < threads::MOST; ++t) together::shuffles[t] = together::barriers[t] = 0;
    volatile int result = -2;
#define SHAPE(M, N, R)                                 \
    if (block_m == M && block_n == N && raster_m == R) \
        result =                                       \
            half_tiles_for ? run_first<Shape<M, N, R, true>>(n, out) : run_first<Shape<M, N, R, false>>(n, out);
    SHAPES
#undef SHAPE
    return result;
}

template <class S>
static int run_search(int n, int* out) {
    S::n_of_launch = n;
    threads::run(32, 0, S::search_first);
    put(out, launch.queues[0].tiles[0]);
    for (bool is_flat : launch.is_flat)
        if (is_flat != launch.is_flat[0]) return -3;  // lanes disagree
    return launch.is_flat[0] ? launch.arrivals_of_first : launch.arrivals_of_first ? -4 : 0;
}

// The same of a worker whose CTA has no table yet; 0 where nothing is queued.
extern "C" int searched_tile(int block_m, int block_n, int raster_m, int n, const int* offs, int num_groups, int m,
                             int worker, int* out) {
    for (int g = 0; g < MOST_GROUPS; ++g) input.in_fours[g] = g < num_groups ? offs[g] : 0x55555555;
    input.num_groups = num_groups, input.m = m, launch.counter = worker;
    launch.arrivals_of_first = launch.handed_out = launch.room = 0;
    for (int t = 0; t < threads::MOST; ++t) together::shuffles[t] = together::barriers[t] = 0;
    volatile int result = -2;
#define SHAPE(M, N, R) \
    if (block_m == M && block_n == N && raster_m == R) result = run_search<Shape<M, N, R, false>>(n, out);
    SHAPES
#undef SHAPE
    return result;
}

template <class S>
static int run_workers(int n, int cluster, int workers, unsigned seed) {
    S::n_of_launch = n;
    launch.early = false;
    for (int t = 0; t < threads::MOST; ++t) launch.tiles[t] = launch.was_asked[t] = 0;
    if (launch.first_is_queued) S::put_firsts(n);
    threads::run(workers, seed, cluster == 1 ? S::worker : S::cluster_worker);
    return launch.handed_out;
}

// Runs the scheduler threads of a launch; out has (worker, tile) for everything handed out, in the order of time.
// The number of entries, or -3 when the counter is not zero afterwards, or -4 when a worker with halves handed out a tile
// that nobody had asked for yet.
extern "C" int hand_out(int block_m, int block_n, int raster_m, int n, int half_tiles, int cluster, int counter,
                        int workers, unsigned seed, bool first_is_queued, int* out, int room) {
    launch.first_is_queued = first_is_queued;
    launch.counter = counter, launch.workers = workers, launch.out = out, launch.handed_out = 0,
    launch.room = room;
#define SHAPE(M, N, R)                                                                 \
    if (block_m == M && block_n == N && raster_m == R)                                 \
        result = half_tiles ? run_workers<Shape<M, N, R, true>>(n, cluster, workers, seed) \
                        : run_workers<Shape<M, N, R, false>>(n, cluster, workers, seed);
    volatile int result = -2;
    SHAPES
    if (counter >= 0 && (padless_counters[counter].drawn != 0 || padless_counters[counter].finished != 0))
        return -3;
    if (half_tiles && launch.early) return -4;
    return result;
#undef SHAPE
}
