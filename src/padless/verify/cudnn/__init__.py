"""cuDNN's own grouped GEMM kernel in the emulator, beside this package's."""
