"""Kernels of the "symm" backend. Each takes the addresses of all ranks' buffers; none decides an order by an atomic."""
