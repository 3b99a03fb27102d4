"""Triton kernels of training that are no quantizers."""
