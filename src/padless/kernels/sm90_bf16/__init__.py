"""Pairs of formats whose values are exact in bf16, on Hopper's bf16 and f16 tensor cores."""
