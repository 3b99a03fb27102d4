"""Triton kernels of the Mixture-of-Experts layer; each equals its torch twin bit for bit."""
