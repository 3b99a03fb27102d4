// A Mixture-of-Experts layer of few tokens in one launch on Hopper, MXFP4 weights and bf16 activations:
// out[t] = sum over j of weights[t, j] * y, y = w2[e] act(w13[e] x[t] + bias13[e]) + bias2[e] with e = ids[t, j], plus
// shared[t].
//
//   x        (T, H) bf16, T <= MOST_TOKENS
//   ids      (T, k) int32 or int64; weights (T, k) float32, bf16 or fp16
//   w13      (E, 2 I, H) e2m1, rows of gate and of up in turn, with a scale per 32 of K in tiles of 32x4x4
//   w2       (E, H, I) e2m1, the same
//   bias13   (E, 2 I) float32, bias2 (E, H) float32, or null
//   out      (T, H) bf16
//
// The bits are those of route_gather, grouped_gemm with the gate, grouped_gemm and combine: the same operations, each rounded as
// there.
//
// Work. What bounds such a layer is, next to its bytes, making bf16 of the codes: 17 instructions for eight codes, as many for one
// token as for eight. So every warp converts on its own and multiplies with mma.sync: it waits for no other warp, and the work
// comes in units of 16 weight rows that are shared out evenly over all warps of all CTAs. In the first product a unit is 8
// activated columns of an expert, in the second 16 columns of the result with one, or 8 with two. A CTA has all experts of a
// stripe of as many columns, so that a token's slots are added in its shared memory.
//
// Roles. Consumer warps, each with a ring of stages of 16 rows x 256 codes and their scales, which it fills itself; a warp that
// routes, and a thread that takes shares of the work (route.cuh and share.cuh of sm90_moe_decode). Rings run on into the second
// product's weights while the hidden rows are on their way.
//
// Hidden rows are bf16 in global memory, in the order in which products read them; a word of two is its own flag (common.cuh,
// Control): no fence, no count.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/dequantize.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/mma_m16n8k16.cuh"
#include "device/ptx/strong_memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_evict_first.cuh"
#include "device/ptx/tma_5d.cuh"
#include "device/ptx/wgmma.cuh"  // pin_register

// In this order: later ones use earlier ones.
#include "device/ptx/conversion.cuh"
#include "device/ptx/halves.cuh"
#include "device/pipeline.cuh"
#define GATE_IN_BF16 1  // as `padless.moe` activates everywhere
#include "device/activation.cuh"
#include "device/sm90/descriptors.cuh"
#include "sm90_bf16/dequantize.cuh"
#include "sm90_bf16/repacked.cuh"

#include "sm90_moe_decode/common.cuh"
#include "sm90_moe_decode/fp4/storage.cuh"

#include "sm90_moe_decode/choose.cuh"
#include "sm90_moe_decode/route.cuh"
#include "sm90_moe_decode/share.cuh"
#include "sm90_moe_decode/divisor.cuh"
#include "sm90_moe_decode/fp4/rows.cuh"
#include "sm90_moe_decode/fp4/load.cuh"
#include "sm90_moe_decode/fp4/multiply.cuh"
#include "sm90_moe_decode/fp4/consume.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_moe_decode_fp4(
    const __grid_constant__ TensorMap map_w13, const __grid_constant__ TensorMap map_w2,
    const __grid_constant__ TensorMap map_w13_scale, const __grid_constant__ TensorMap map_w2_scale,
    const float* bias13, const float* bias2, const uint16_t* x, const uint16_t* shared_rows, const void* ids,
    const void* weights, uint16_t* out, Control* control, int tokens, int top_k, int experts, int h, int i,
    int ids_bytes, int weights_type, int stages, int room RULE_PARAMETERS) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{{x, shared_rows, ids, weights, out, control, tokens, top_k, experts, h, i,
                           i / UNIT_OUTPUTS, ids_bytes, weights_type, stages, room RULE},
                          bias13,
                          bias2};
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (warp == SHARE_WARP) {
        for (int n = lane; n < NUM_CONSUMER_WARPS * stages; n += 32)
            mbarrier_init(shared_address(&shared.full[n / stages][n % stages]), 1);
        if (lane == 0) mbarrier_init(shared_address(&shared.routed), 2);
#ifdef LOGITS_ROOM
        if (lane == 0) mbarrier_init(shared_address(&shared.chosen), NUM_CONSUMER_WARPS);
#endif
        fence_mbarrier_init();
    } else if (warp == ROUTER_WARP) {
        for (int n = lane; n < MOST_SHARES + 2; n += 32) shared.shares[n] = UNKNOWN_SHARE;
    } else if (warp == 0 && lane == 0) {
        griddepcontrol_launch_dependents();
        prefetch_tensormap(map_w13);
        prefetch_tensormap(map_w13_scale);
        prefetch_tensormap(map_w2);
        prefetch_tensormap(map_w2_scale);
    }
    __syncthreads();
    griddepcontrol_wait();  // nothing of global memory is touched before: the kernels ahead may still be writing it

    const Layout layout(shared, problem);
    const uint32_t routed = shared_address(&shared.routed);
    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<OTHER_REGISTERS>();
        if (warp == SHARE_WARP) {
            if (lane == 0) take_shares(shared, problem);
        } else if (warp == ROUTER_WARP) {
            route(shared, problem, lane);
            if (lane == 0) mbarrier_arrive(routed);
            mbarrier_wait(routed, 0);
            clear_old_rows(shared, problem, lane);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        const WeightMaps maps{map_w13, map_w2, map_w13_scale, map_w2_scale};
#ifdef LOGITS_ROOM
        choose_experts(shared, problem, warp, lane);
#endif
        const UnitDivisors by(problem);
        fill_x(problem, layout, threadIdx.x);
        mbarrier_wait(routed, 0);
        Ring ring(shared, problem, layout, warp);
        WeightLoader loader(shared, problem, by, maps, warp, lane);
        for (int s = 0; s < stages; ++s) loader.load_stage(ring.stage(s));
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // rows of x are there
        Consumer consumer{shared, problem, by, layout, loader, ring, warp, lane};
        first_product(consumer);
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // rows of x are read no more
        fill_hidden(shared, problem, layout, threadIdx.x);
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);
        second_product(consumer);
    }
}
