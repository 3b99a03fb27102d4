"""References: slow, exact products and epilogues on the CPU, the exact oracle of the kernels."""
