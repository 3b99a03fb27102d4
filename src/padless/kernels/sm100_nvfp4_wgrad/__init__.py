"""Weight gradients on Blackwell, NVFP4."""
