"""Device code, and the host side of the kernels that have a folder of their own."""
