"""Comparisons with the emulator: whole kernels, and single tensor-core instructions."""
