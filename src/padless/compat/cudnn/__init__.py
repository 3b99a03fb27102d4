"""cuDNN's Grouped GEMM + Quant: its names and tensor shapes on top of padless's calls."""
