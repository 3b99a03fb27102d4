// The groups of a ragged problem in shared memory, from the one with the most rows to the one with the fewest: built from
// `offs` by all threads of a CTA, in a time that grows with the groups that have rows. The others are looked at once, 32 at a
// time by every warp. Before the table is there a CTA can load nothing.
//
// Like device/scheduler.cuh this is plain C++ apart from the qualifiers: the tests compile it for the CPU.
#pragma once

// Where group g ends, as given. A null `offs` is a dense problem: one group of m rows.
__device__ __forceinline__ int load_group_end(const int* offs, int num_groups, int m, int g) {
    return g >= num_groups ? 0 : offs == nullptr ? m : offs[g];
}

// One warp, group g to a lane: min(max(highest, ends[.. g]), m), the largest of `highest` and the lanes up to this one.
// Whatever offs hold, the result is ascending and inside [0, m], so that no wrong value can lead outside the tensors.
__device__ __forceinline__ int clean_end(int end, int m, int highest, int lane) {
    end = end < highest ? highest : end;
    end = end > m ? m : end;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {  // running maximum
        const int other = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance && other > end) end = other;
    }
    return end;
}

// One warp: the cleaned offs of all groups.
__device__ __forceinline__ void clean_offs(const int* offs, int num_groups, int m, int* group_ends,
                                           int lane) {
    int highest = 0;
#pragma unroll 1
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        const int end = clean_end(load_group_end(offs, num_groups, m, g), m, highest, lane);
        if (g < num_groups) group_ends[g] = end;
        highest = __shfl_sync(0xffffffff, end, 31);
    }
}

// The sum of the warp's values, in all lanes.
__device__ __forceinline__ int sum_of_lanes(int value) {
    return __reduce_add_sync(0xffffffff, value);
}

template <int MAX_GROUPS>
struct SortedGroups {
    static constexpr int CHUNKS = (MAX_GROUPS + 31) / 32;

    int ends[MAX_GROUPS];       // by group: cleaned offs
    int order[MAX_GROUPS];      // group numbers: most rows first, of equal ones the smaller number
    int active;                 // groups with rows, which come first
    uint32_t is_sorted;         // not where all have few rows
    uint32_t of_chunk[CHUNKS];  // a bit for each group: whether it has rows
    uint32_t seen[32];          // by warp: what it has seen of WRONG and TALL

    static constexpr uint32_t WRONG = 1;  // offs that must be cleaned
    static constexpr uint32_t TALL = 2;   // a group with more rows than may stay unsorted

    __device__ __forceinline__ int rows(int group) const {
        return ends[group] - (group == 0 ? 0 : ends[group - 1]);
    }

    // All threads of the CTA. `rows_together`: room for MAX_GROUPS, 16-byte aligned, that holds nothing yet and holds nothing
    // afterwards. `most`: what no end may be above. Ends with everything visible to all of them. Where no group has more than
    // FLAT_ROWS rows the groups with rows stay in the order of their numbers, and the result is false.
    template <int NUM_THREADS, int FLAT_ROWS = 0>
    __device__ __forceinline__ bool build(int* rows_together, const int* offs, int num_groups, int most) {
        constexpr int WARPS = NUM_THREADS / 32;
        static_assert(WARPS <= 32, "a flag of each warp");
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        bool is_right = true, is_tall = FLAT_ROWS == 0;
#pragma unroll 4
        for (int g = threadIdx.x; g - lane < num_groups; g += NUM_THREADS) {
            const int end = load_group_end(offs, num_groups, most, g);
            const int before = g == 0 ? 0 : load_group_end(offs, num_groups, most, g - 1);
            const bool exists = g < num_groups;
            is_right = is_right && (!exists || (end >= before && end <= most));
            is_tall = is_tall || (exists && end - before > FLAT_ROWS);
            if (exists) ends[g] = end;
            const uint32_t with_rows = __ballot_sync(0xffffffff, exists && end > before);
            if (lane == 0) of_chunk[g / 32] = with_rows;
        }
        is_right = __all_sync(0xffffffff, is_right);
        is_tall = !__all_sync(0xffffffff, !is_tall);
        if (lane == 0) seen[warp] = (is_right ? 0 : WRONG | TALL) | (is_tall ? TALL : 0);
        __syncthreads();
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) any |= seen[w];
        if (any & WRONG) clean<NUM_THREADS>(offs, num_groups, most);
        gather<NUM_THREADS>(rows_together, num_groups, any & TALL);
        __syncthreads();
        if (!(any & TALL)) return false;
        if (active <= MOST_RANKED)
            rank<NUM_THREADS>(rows_together);
        else
            merge<NUM_THREADS>(rows_together);
        __syncthreads();
        return true;
    }

  private:
    // Up to here a thread compares its group with all others sooner than runs are merged.
    static constexpr int MOST_RANKED = 512;

    // Wrong offs, which are rare: the same from cleaned ones.
    template <int NUM_THREADS>
    __device__ __forceinline__ void clean(const int* offs, int num_groups, int most) {
        const int lane = threadIdx.x % 32;
        if (threadIdx.x / 32 == 1) clean_offs(offs, num_groups, most, ends, lane);
        __syncthreads();
#pragma unroll 1
        for (int g = threadIdx.x; g - lane < num_groups; g += NUM_THREADS) {
            const uint32_t with_rows = __ballot_sync(0xffffffff, g < num_groups && rows(g) > 0);
            if (lane == 0) of_chunk[g / 32] = with_rows;
        }
        __syncthreads();
    }

    // Groups with rows to the front, the others behind them, both by number.
    template <int NUM_THREADS>
    __device__ __forceinline__ void gather(int* rows_together, int num_groups, uint32_t sorts) {
        const int lane = threadIdx.x % 32, chunks = (num_groups + 31) / 32;
        int all = 0;
        for (int c = lane; c < chunks; c += 32) all += __popc(of_chunk[c]);
        all = sum_of_lanes(all);
        if (threadIdx.x == 0) active = all, is_sorted = sorts;
#pragma unroll 1
        for (int g = threadIdx.x; g - lane < num_groups; g += NUM_THREADS) {
            const int chunk = g / 32;
            int before = 0;
            for (int c = lane; c < chunk; c += 32) before += __popc(of_chunk[c]);
            before = sum_of_lanes(before);
            const uint32_t bits = of_chunk[chunk];
            before += __popc(bits & ((1u << lane) - 1));
            const bool is_active = bits >> lane & 1;
            if (g < num_groups) order[is_active ? before : all + g - before] = g;
            if (is_active) rows_together[before] = rows(g);
        }
        if (threadIdx.x < (-all & 3)) rows_together[all + threadIdx.x] = 0;  // rank() reads four at a time
    }

    // The place of a group is the number of those that come before it.
    template <int NUM_THREADS>
    __device__ __forceinline__ void rank(const int* rows_together) {
        constexpr int EACH = (MOST_RANKED + NUM_THREADS - 1) / NUM_THREADS;
        int groups[EACH], places[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = e * NUM_THREADS + threadIdx.x;
            places[e] = -1;
            if (i >= active) continue;
            groups[e] = order[i];
            const int own = rows_together[i];
            int place = 0;
#pragma unroll 2
            for (int j = 0; j < active; j += 4) {
                const int4 others = *reinterpret_cast<const int4*>(&rows_together[j]);
                place += others.x > own || (others.x == own && j < i);
                place += others.y > own || (others.y == own && j + 1 < i);
                place += others.z > own || (others.z == own && j + 2 < i);
                place += others.w > own || (others.w == own && j + 3 < i);
            }
            places[e] = place;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (places[e] >= 0) order[places[e]] = groups[e];
    }

    // Batcher's merges of runs of 1, 2, 4 .. groups. Every exchange puts the earlier group at the smaller index, so that those
    // with an index past the last group can be left out.
    template <int NUM_THREADS>
    __device__ __forceinline__ void merge(int* rows_together) {
#pragma unroll 1
        for (int run = 1; run < active; run *= 2) {
#pragma unroll 1
            for (int distance = run; distance > 0; distance /= 2) {
#pragma unroll 1
                for (int pair = threadIdx.x;; pair += NUM_THREADS) {
                    const int in = pair & (distance - 1), low = 2 * pair - in;  // of a block of 2 * distance
                    if (low >= active) break;
                    // The first exchange of a merge mirrors the second run: then both halves are ready to be merged alike.
                    const int high = distance == run ? low + 2 * (distance - in) - 1 : low + distance;
                    if (high < active) {
                        const int a = order[low], b = order[high], rows_a = rows_together[low],
                                  rows_b = rows_together[high];
                        if (rows_b > rows_a || (rows_b == rows_a && b < a)) {
                            order[low] = b, order[high] = a;
                            rows_together[low] = rows_b, rows_together[high] = rows_a;
                        }
                    }
                }
                __syncthreads();
            }
        }
    }
};
