"""SwiGLU's backward with quantization on Hopper, as a CUDA kernel."""
