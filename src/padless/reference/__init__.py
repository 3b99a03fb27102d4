"""References: slow, exact products and epilogues on the CPU, which judge the kernels."""
