"""Triton kernels of the quantizers, equal to the rules in torch bit for bit."""
