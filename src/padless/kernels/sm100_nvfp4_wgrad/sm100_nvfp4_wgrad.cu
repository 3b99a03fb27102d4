// Weight gradients of grouped layers on Blackwell, NVFP4: D[g] = A_g * B_g^T, summed over the tokens of group g.
//
//   A    (N, T) e2m1, dY transposed, two tokens to a byte, and sfa: (N, T / 16) UE4M3 in 32x4x4 tiles, of 128 features x 64 tokens
//   B    (K, T) e2m1, X transposed, and sfb
//   D    (G, N, K) bf16 or float32, stored; or float32, added to
//
// The tensor core takes FP4 K-major alone, so both operands come transposed (their quantizer transforms tokens and packs two of
// them to a byte anyway), and groups begin at multiples of 64 tokens, filled up with zero codes: an instruction, and an atom
// of scales, are of one group. In the code rows are features of dY, columns are features of X.
//
// Arithmetic, per output element: the tensor core adds the scaled products of 64 tokens to a float32 accumulator, from the group's
// first token on. The sum is multiplied by the product of both global scales, each step rounded to float32, and stored rounded to
// nearest even, or added to what was there, in float32.
//
// Roles, by warp. A CTA has one tile of one group.
//
//   0-3  store        4  load        5  multiply
//
//      4                                        5                                0-3
//      -                                        -                                ---
//      wait empty[s] <---------- commits -----  ... after the products of s
//      load --> full[s] (bytes) ------------->  wait full[s]; cp scales; mma
//                                               mma of the tile; commit --> done  -> wait done; ld; store
//
// Padding-free rule: nothing of another group is multiplied. A stage that a group does not fill has tokens of the next one, whose
// instructions are not issued.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tcgen05.cuh"
#include "device/ptx/tma.cuh"

#include "device/sm100/descriptors.cuh"
#include "device/pipeline.cuh"
#include "sm100_nvfp4_wgrad/storage.cuh"

// Codes and scales of all stages, one thread.
__device__ __forceinline__ void load(SharedStorage& shared, const Operand& a, const Operand& b,
                                     const Tile& tile) {
    Pipeline<STAGES> pipeline;
    for (int block = 0; block < tile.blocks(); ++block) {
        const int stage = pipeline.stage;
        const uint32_t full = shared_address(&shared.full[stage]);
        mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
        mbarrier_arrive_expect_tx(full, 2 * (OPERAND_BYTES + SCALE_BYTES));
        const int token = tile.start + block * BLOCK_T;
        tma_load_2d(a.codes, shared_address(shared.a[stage]), full, token / 2, tile.row);
        tma_load_2d(b.codes, shared_address(shared.b[stage]), full, token / 2, tile.column);
        tma_load_3d(a.scales, shared_address(shared.sfa[stage]), full, 0, token / MMA_T, tile.row / TILE);
        tma_load_3d(b.scales, shared_address(shared.sfb[stage]), full, 0, token / MMA_T, tile.column / TILE);
        pipeline.advance();
    }
}

// Products, one thread. `tmem`: first column of the allocation.
__device__ __forceinline__ void issue_mma(SharedStorage& shared, const Tile& tile, uint32_t tmem) {
    Pipeline<STAGES> pipeline;
    for (int block = 0; block < tile.blocks(); ++block) {
        const int stage = pipeline.stage;
        mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
        tcgen05_fence_after_thread_sync();
        const uint32_t a = tcgen05_descriptor_low(shared_address(shared.a[stage]));
        const uint32_t b = tcgen05_descriptor_low(shared_address(shared.b[stage]));
        const uint32_t sfa = tcgen05_descriptor_low(shared_address(shared.sfa[stage]));
        const uint32_t sfb = tcgen05_descriptor_low(shared_address(shared.sfb[stage]));
        const int steps = tile.steps(block);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step >= steps) break;
            const uint32_t to_a = tmem + SFA_COLUMN + step * SCALE_ATOM_COLUMNS;
            const uint32_t to_b = tmem + SFB_COLUMN + step * SCALE_ATOM_COLUMNS;
            tcgen05_cp_32x128b_warpx4<1>(to_a, scale_atom_descriptor(sfa + step * (SCALE_ATOM_BYTES / 16)));
            tcgen05_cp_32x128b_warpx4<1>(to_b, scale_atom_descriptor(sfb + step * (SCALE_ATOM_BYTES / 16)));
            tcgen05_mma_mxf4nvf4_block16<1>(tmem, tcgen05_operand_descriptor(a + step * (STEP_BYTES / 16)),
                                            tcgen05_operand_descriptor(b + step * (STEP_BYTES / 16)), SHAPE,
                                            to_a, to_b, block != 0 || step != 0);
        }
        tcgen05_commit(shared_address(&shared.empty[stage]));
        pipeline.advance();
    }
    if (tile.products > 0) tcgen05_commit(shared_address(&shared.done));
}

// One warp: 32 rows of the tile, one to a lane. factor: of both global scales.
__device__ __forceinline__ void store_tile(SharedStorage& shared, const Gradient& d, const Tile& tile,
                                           float factor, uint32_t tmem, int warp, int lane) {
    if (tile.products > 0) {
        mbarrier_wait(shared_address(&shared.done), 0);
        tcgen05_fence_after_thread_sync();
    } else if (ACCUMULATE) {
        return;
    }
    const int row = tile.row + warp * 32 + lane;
#pragma unroll 1
    for (int column = 0; column < TILE; column += 32) {
        uint32_t sums[32] = {};
        if (tile.products > 0) {
            __syncwarp();
            tcgen05_ld_32x32b(sums, tmem + (warp * 32 << 16) + column);
            tcgen05_wait_ld();
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                pin_loaded(sums[i]);
                sums[i] = __float_as_uint(__fmul_rn(__uint_as_float(sums[i]), factor));
            }
        }
        store_sums(d, sums, tile.group, row, tile.column + column);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm100_nvfp4_wgrad(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_sfa,
    const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_sfb, const float* global_a,
    const float* global_b, const int* ends, void* out, long long group_stride, long long row_stride,
    int n_rows, int n_columns, int tokens) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const Tile tile = tile_of(blockIdx.x, ends, n_rows, n_columns, tokens);
    const Gradient d{out, group_stride, row_stride, n_rows, n_columns};

    if (warp == 0 && elect_one()) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), 1);
            mbarrier_init(shared_address(&shared.empty[s]), 1);
        }
        mbarrier_init(shared_address(&shared.done), 1);
        fence_mbarrier_init();
    }
    if (warp == LOAD_WARP && elect_one()) {
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_sfa);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_sfb);
    }
    __syncwarp();
    if (warp == MMA_WARP) {
        tcgen05_alloc<1, TMEM_COLUMNS>(shared_address(&shared.tensor_memory));
        tcgen05_relinquish_alloc_permit<1>();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    const uint32_t tmem = shared.tensor_memory;

    if (warp == LOAD_WARP) {
        if (elect_one()) load(shared, Operand{map_a, map_sfa}, Operand{map_b, map_sfb}, tile);
    } else if (warp == MMA_WARP) {
        if (elect_one()) issue_mma(shared, tile, tmem);
    } else {
        const float factor = __fmul_rn(__ldg(global_a), __ldg(global_b));
        store_tile(shared, d, tile, factor, tmem, warp, lane);
    }

    // No warp may free tensor memory while another reads it.
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if (warp == MMA_WARP) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<1, TMEM_COLUMNS>(tmem);
    }
}
