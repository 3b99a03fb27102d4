// FlashInfer's MonoMoE behind two C functions, so that neither its Python package nor TVM-FFI is needed to call it.
//
// Built by build.sh from the headers of FlashInfer (csrc/fused_moe/monomoe) and CUTLASS. The scratch memory must be zero
// before the first layer; the kernel keeps it right from then on.

#include "src/moe.cuh"

namespace {

using Shape = monomoe::Dims_BS8_E256_N512_K2048_BlockFP8_WGMMA_TMA;
using Scratch = monomoe::MoEGemmSpec<Shape>;
constexpr uint32_t DOWN_ROWS_OF_BOX = 128;  // of the copies that the kernel issues

}  // namespace

extern "C" size_t monomoe_scratch_bytes() {
    return sizeof(Scratch);
}

// One layer on `stream`; returns a cudaError_t. x, logits, out: bfloat16 (tokens, 2048), (tokens, 256), (tokens, 2048).
// w13: e4m3 (256, 1024, 2048), eight rows of gate and eight of up in turn; w2: (256, 2048, 512); scales: float32 of
// 128 x 128 blocks. Weights of experts are a softmax over the chosen logits.
extern "C" int monomoe_layer(const void* x, uint32_t tokens, const void* logits, const void* w13,
                             const void* scale13, const void* w2, const void* scale2, void* out,
                             void* scratch, uint32_t top_k, void* stream) {
    using namespace monomoe;
    const size_t shared_bytes = get_moe_shmem_size<Shape>();
    const cudaError_t error = cudaFuncSetAttribute(
        moe_kernel_topk<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
    const CUtensorMap w13_map = create_up_weight_tma_desc(w13, Shape::NUM_EXPERTS, Shape::N, Shape::K);
    const CUtensorMap x_map = create_activations_tma_desc(x, tokens, Shape::HIDDEN_STATES);
    const CUtensorMap w2_map =
        create_down_weight_tma_desc(w2, Shape::NUM_EXPERTS, Shape::HIDDEN_STATES, Shape::N, DOWN_ROWS_OF_BOX);
    const CUtensorMap hidden_map = create_down_activation_tma_desc(
        static_cast<char*>(scratch) + Scratch::TEMP_FP8_OFFSET, Scratch::TEMP_ROWS_TMA, Shape::N);
    moe_kernel_topk<Shape><<<Shape::KernelConfig::GRID_SIZE, Shape::KernelConfig::BLOCK_SIZE, shared_bytes,
                             static_cast<cudaStream_t>(stream)>>>(
        static_cast<const A_element*>(x), tokens, static_cast<const __nv_bfloat16*>(logits),
        static_cast<const W_element*>(w13), static_cast<const S_element*>(scale13),
        static_cast<const W_element*>(w2), static_cast<const S_element*>(scale2),
        static_cast<R_element*>(out), scratch, sizeof(Scratch), shared_bytes, top_k, ScoringFunc::SOFTMAX,
        true, w13_map, x_map, w2_map, hidden_map);
    return cudaGetLastError();
}
