"""Grouped GEMM of plain bf16 operands on Hopper."""
