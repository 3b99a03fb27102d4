"""The functional units of the emulator: pure functions of bits and bytes, in numpy, with no notion of time.

The engine decides when an operation happens and who races with whom; a unit says what it reads, what it writes and
which values come out. Shared memory is a flat uint8 array indexed by CTA offset, tensor memory a (128, 512) uint32
array, a warp's registers a (32, registers) uint32 array, a warpgroup's a (128, registers) one. ``problems`` are
sentences about broken rules, for the engine to report with a line; what cannot be modelled raises ValueError.

number_formats          codes <-> values of every format, with cvt's roundings
arithmetic, exact_sum   the fused dot-product-add: the published bit-accurate model, exact sums, and two more
swizzle                 the XOR swizzles on shared-memory addresses
tensor_map, tma         tensor maps (encode, decode, replace on the device) and the bytes that a copy moves
matrix_descriptor       operands in shared memory, of wgmma and of tcgen05
wgmma                   warpgroup products, D in registers
instruction_descriptor  the 32 bits that say what a tcgen05.mma multiplies
tcgen05, tensor_memory  products with D in tensor memory, by one CTA or two; cp, ld and st
mma_sync                warp products; ldmatrix and stmatrix
"""
