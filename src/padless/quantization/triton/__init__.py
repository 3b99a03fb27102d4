"""The Triton kernels of the quantizers of training, each equal to its twin in torch bit for bit."""
