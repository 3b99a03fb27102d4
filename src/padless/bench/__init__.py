"""Benchmarks: the paper's comparison, dense and decode sizes, the memory-bound kernels."""
