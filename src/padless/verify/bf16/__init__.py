"""Checks on a GPU of the kernels that multiply plain bf16 operands."""
