"""Quantizers of training: rows and token-contiguous columns in one read, weights and their transposes, SwiGLU's backward."""
