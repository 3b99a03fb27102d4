"""MXFP8, MXFP4 and NVFP4 on Blackwell: grouped, quantising and list calls."""
