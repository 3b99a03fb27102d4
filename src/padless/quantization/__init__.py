"""Quantizers of training: rows and their columns in one read, weights and their transposes, SwiGLU's backward."""
