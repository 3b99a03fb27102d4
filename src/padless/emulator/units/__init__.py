"""The functional units of the emulator: pure functions of bits and bytes, in numpy, with no notion of time.

The engine decides when an operation happens and who races with whom; a unit says what it reads, what it writes and
which values come out. Signatures (shared memory is a flat uint8 array indexed by CTA offset, TMEM a (128, 512) uint32
array, a warp's registers a (32, registers) uint32 array, a warpgroup's a (128, registers) one):

number_formats
    decode(codes, name) -> float64                      names e4m3 e5m2 e2m1 e3m2 e2m3 ue8m0 ue4m3 bf16 f16 tf32 f32
    encode(values, name, *, rounding="rn", saturate=False, relu=False) -> uint codes
    encode_pair(high, low, name, ...) / decode_pair(codes, name) -> (high, low)
    float_to_int(values, name, *, rounding="rzi", saturate=False), int_to_float(values, name, rounding)
arithmetic
    decode_operand(codes, name) -> Operand              rows x K
    dot_product_add(a, b, c, rule, *, mode, scale_a=None, scale_b=None) -> float32 (M, N)
        mode "truncate" | "exact" | "separate_add" | "fast"; rules HOPPER_FP8 WIDE FP4_BLOCK
swizzle
    swizzle(addresses, mode)                            mode "none" "32B" "64B" "128B" "128B_32B"
tensor_map
    encode_tiled(data_type, address, dims, strides, box, element_strides=None, *, interleave=0, swizzle=0,
                 l2_promotion=0, oob_fill=0, object_address=0) -> 128 bytes   (ValueError as the driver refuses)
    decode(raw) -> TensorMap;   replace(raw, field, value, ordinal=0) -> 128 bytes
tma
    plan(tensor_map, coordinates, shared_address, *, store=False, mode="tile") -> Transfer
        Transfer: granule, global_address uint64 (n,), shared_address int64 (n,), in_bounds bool (n,),
                  transaction_bytes, problems; .runs() -> contiguous in-bounds (global, bytes) pieces
    load(transfer, gather, shared), store(transfer, shared, scatter)
        gather(addresses, granule) -> uint8 (n, granule); scatter(addresses, data)
    reduce_values(old, new, element, operation)
matrix_descriptor
    decode_wgmma(bits), decode_tcgen05(bits) -> MatrixDescriptor (.problems)
    element_addresses(descriptor, rows, k, element_bytes, major) -> int64 (rows, k)
    byte_ranges(addresses, size) -> merged sorted [(first, end), ...]
instruction_descriptor
    decode(bits, kind) -> InstructionDescriptor (.problems(cta_group)); build(kind, ...) -> bits
wgmma
    Wgmma(n, d_type, a_type, b_type, a_descriptor | None, b_descriptor, scale_d, negate_a, negate_b, a_major, b_major)
        .k  .problems()  .shared_ranges() -> {"a": [...], "b": [...]}
        .execute(shared, d, a_registers=None, mode="truncate") -> d      d (128, n/2) of f32 bits or (128, n/4) of f16x2
tcgen05
    Mma(kind, cta_group, idesc, d, a_descriptor | a_tmem, b_descriptor, enable_d, sfa, sfb, block, ...)
        .problems() .shared_ranges() .tmem_reads() .tmem_writes() .execute(shared: list, tmem: list, mode) -> reports
    Copy(shape, multicast, descriptor, address) .problems() .shared_ranges() .tmem_writes() .execute(shared, tmem)
    register_map(shape, repeat, address, warp_quarter, split=0) -> lanes (32, r), columns (32, r)
    load(tmem, ...), store(tmem, ..., registers)        with pack16 / unpack16
        TMEM regions are (first lane, end lane, first column, end column) rectangles
mma_sync
    mma(m, n, k, d_type, a_type, b_type, a, b, c, mode="truncate") -> d
    ldmatrix(...), stmatrix(...): (lane, register) <-> byte maps
"""
