// mma.sync: a warp's product, bf16 x bf16 -> float32, m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"). On Hopper it
// adds its 16 products and the sum in one step, as wgmma does: the same bits.
//
// a[r]: two neighbours of row lane / 4 + 8 * (r % 2), columns 2 * (lane % 4) + 8 * (r / 2) and the next; b0, b1: of column
// lane / 4, the same of K; d[j]: row lane / 4 + 8 * (j / 2), column 2 * (lane % 4) + j % 2.
#pragma once

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
