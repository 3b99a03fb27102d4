// A Mixture-of-Experts layer of few tokens in one launch on Hopper, FP8 (e4m3) with block scales:
// out[t] = sum over j of weights[t, j] * y, y = w2[e] act(w13[e] x[t]) with e = ids[t, j], plus shared[t].
//
//   x        (T, H) bf16, T <= MOST_TOKENS; quantized here, a scale per 1 x 128
//   ids      (T, k) int32 or int64; weights (T, k) float32, bf16 or fp16
//   w13      (E, 2 I, H) e4m3, w13_scale (E, 2 I / 128, H / 128) float32; gate above up, or in runs of 32
//   w2       (E, H, I) e4m3, w2_scale (E, H / 128, I / 128) float32
//   out      (T, H) bf16
//
// The bits are those of route_quantize, grouped_gemm with SwiGLU and quantization, grouped_gemm and combine: the same
// operations on the same blocks, each rounded as there.
//
// Work. The first product is cut into units, 8 activated columns of an expert, which all pipelines share out evenly; a tile is
// four units, one for each warp, and its B operand is x of all tokens. The second product is cut into stripes of 16 columns
// of the result; a CTA has all experts of a stripe, four at a time, one for each warp, so that a token's slots are added in
// its shared memory and nothing but the hidden rows passes from CTA to CTA. That passage takes three microseconds, while the
// rings, which run on into the second product's weights, still fill.
//
// Roles. Two pipelines, each a producer warp, a ring of stages of 64 x 128 weights, and a consumer warpgroup; a warp that
// routes (route.cuh); a thread that takes shares of the work (share.cuh).
//
//      routing warp, share thread                  producer                        consumer warpgroup
//      --------------------------                  --------                        ------------------
//      routed <- tables, first share ----------->  wait routed                     x to codes; wait routed
//                                                  wait empty[s]  <-- arrive ---   .. after the products of stage s
//                                                  weights --> full[s] (bytes) ->  wait full[s]; wgmma; promote
//                                                                                  activate; hidden rows --> all CTAs
//                                                                                  wait for all hidden rows; to codes
//                                                                                  stripes: wgmma; promote; sum of slots
//
// Hidden rows are float32 in global memory, where a word is its own flag (storage.cuh, Control): no fence, no count.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/strong_memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_evict_first.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_few_columns.cuh"

// In this order: later ones use earlier ones.
#include "device/ptx/conversion.cuh"
#include "device/ptx/halves.cuh"
#include "device/pipeline.cuh"
#define GATE_IN_BF16 1  // as `padless.moe` activates everywhere
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/sm90/descriptors.cuh"

#include "sm90_moe_decode/common.cuh"
#include "sm90_moe_decode/storage.cuh"

#include "sm90_moe_decode/choose.cuh"
#include "sm90_moe_decode/route.cuh"
#include "sm90_moe_decode/share.cuh"
#include "sm90_moe_decode/divisor.cuh"
#include "sm90_moe_decode/load.cuh"
#include "sm90_moe_decode/codes.cuh"
#include "sm90_moe_decode/multiply.cuh"
#include "sm90_moe_decode/consume.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_moe_decode(
    const __grid_constant__ TensorMap map_w13, const __grid_constant__ TensorMap map_w2,
    const float* w13_scale, const float* w2_scale, const uint16_t* x, const uint16_t* shared_rows,
    const void* ids, const void* weights, uint16_t* out, Control* control, int tokens, int top_k, int experts,
    int h, int i, int run, int ids_bytes, int weights_type, int stages, int room RULE_PARAMETERS) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{{x, shared_rows, ids, weights, out, control, tokens, top_k, experts, h, i, run,
                           ids_bytes, weights_type, stages, room RULE},
                          w13_scale,
                          w2_scale};
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (warp == SHARE_WARP) {
        if (lane == 0) {
            for (int pipeline = 0; pipeline < PIPELINES; ++pipeline) {
                for (int s = 0; s < stages; ++s) {
                    mbarrier_init(shared_address(&shared.full[pipeline][s]), 1);
                    mbarrier_init(shared_address(&shared.empty[pipeline][s]), 4);
                }
            }
            mbarrier_init(shared_address(&shared.routed), 2);
#ifdef LOGITS_ROOM
            mbarrier_init(shared_address(&shared.chosen), NUM_CONSUMER_WARPS);
#endif
            fence_mbarrier_init();
        }
    } else if (warp == ROUTER_WARP) {
        for (int n = lane; n < MOST_SHARES + 2; n += 32) shared.shares[n] = UNKNOWN_SHARE;
    } else if (warp == NUM_CONSUMER_WARPS && lane == 0) {
        griddepcontrol_launch_dependents();
        prefetch_tensormap(map_w13);
        prefetch_tensormap(map_w2);
    }
    __syncthreads();
    griddepcontrol_wait();  // nothing of global memory is touched before: the kernels ahead may still be writing it

    const Layout layout(shared, problem);
    const uint32_t routed = shared_address(&shared.routed);
    if (warp == SHARE_WARP) {
        if (lane == 0) take_shares(shared, problem);
    } else if (warp == ROUTER_WARP) {
        route(shared, problem, lane);
        if (lane == 0) mbarrier_arrive(routed);
        mbarrier_wait(routed, 0);
        prefetch_stripe_scales(shared, problem, lane);
        clear_old_rows(shared, problem, lane);
    } else if (warp >= NUM_CONSUMER_WARPS) {
        const UnitDivisors divisors(problem);
        mbarrier_wait(routed, 0);
        load_weights(shared, problem, map_w13, map_w2, divisors, warp - NUM_CONSUMER_WARPS, lane);
    } else {
        const int pipeline = warp / 4;
        const uint32_t ring = layout.ring + pipeline * stages * STAGE_BYTES;
        RingPosition position;
#ifdef LOGITS_ROOM
        choose_experts(shared, problem, warp, lane);
#endif
        quantize_x(problem, layout, warp, lane);
        fence_proxy_async_shared();
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);
        mbarrier_wait(routed, 0);
        first_product(shared, problem, layout, ring, pipeline, warp % 4, lane, position);
        const StripeUnit unit = first_stripe_unit(shared, problem, pipeline, warp % 4, lane);
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // codes of x are read no more
        quantize_hidden(shared, problem, layout, warp, lane);
        fence_proxy_async_shared();
        bar_sync(CODES_BARRIER, NUM_CONSUMERS);
        second_product(shared, problem, layout, ring, pipeline, warp % 4, lane, unit, position);
    }
}
