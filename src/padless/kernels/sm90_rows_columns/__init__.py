"""Rows and token-contiguous columns of ragged groups in FP8_BLOCK on Hopper, as a CUDA kernel."""
