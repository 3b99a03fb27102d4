// ldmatrix: matrices of 16-bit elements from shared memory to the registers of a warp.
#pragma once

// Four 8x8 matrices, transposed; lane l gives the address of row l % 8 of matrix l / 8. r[i] of lane l: of matrix i, column
// l / 4 of rows 2 (l % 4), in the low half, and the next.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
