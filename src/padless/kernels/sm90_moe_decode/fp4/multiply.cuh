// Product of a unit, 16 weight rows, with eight rows: by a warp alone. Codes go from shared memory to registers, become bf16 and
// are the first operand; sums stay in the tensor core over all K. Sets of 16 products and their order are those of
// sm90_bf16_grouped_gemm.cu, and so are the bits.
#pragma once

// What a lane reads, 32 codes of a K block of two rows of a unit: two neighbours, of which it has pair number pair_of_lane(lane),
// or, IN_HALVES, weight_row_of_lane(lane) of either half.
template <bool IN_HALVES>
struct UnitLane {
    static constexpr int SCALES_OF_BLOCK = IN_HALVES ? 128 : 256,
                         SCALES_OF_ROW = IN_HALVES ? 256 : 16;  // bytes

    uint32_t codes[STAGE_BLOCKS][2];  // of either row, from a stage's first
    uint32_t scales;                  // of the first row

    // `first`: the unit's first row among an expert's. A row's scales are four bytes away from those of the row 32 before, in tiles of
    // 32x4x4.
    __device__ __forceinline__ UnitLane(int lane, int first) {
        const int row = IN_HALVES ? weight_row_of_lane(lane) : 2 * pair_of_lane(lane), quad = lane % 4;
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = row + (IN_HALVES ? 0 : h), tile = BLOCK_K / TILE_K * b + quad / 2;
                if constexpr (REPACKED)  // either half has its own half of every tile
                    codes[b][h] = IN_HALVES ? h * (CODE_BYTES / 2) + tile * (TILE_CODE_BYTES / 2) +
                                                  in_code_tile(at, quad)
                                            : tile * TILE_CODE_BYTES + in_code_tile(at, quad);
                else
                    codes[b][h] = swizzle_128b(at + (IN_HALVES ? 8 * h : 0), 4 * b + quad);
            }
        }
        scales = row * 16 + first / 32 % 4 * 4 + quad;
    }
};

// A lane's part of a stage, and what it multiplies it with.
struct StageOfLane {
    uint32_t words[STAGE_BLOCKS][2][4];  // of either row of a K block: octets
    uint32_t bytes[STAGE_BLOCKS][2];     // scales

    template <class Unit>
    __device__ __forceinline__ void read_codes(const Stage& stage, const Unit& unit, int block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t (&w)[4] = words[block][h];
            ld_shared_v4_u32(stage.codes + unit.codes[block][h], w[0], w[1], w[2], w[3]);
        }
    }
    template <class Unit>
    __device__ __forceinline__ void read_scales(const Stage& stage, const Unit& unit) {
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                bytes[b][h] = ld_shared_u8(stage.scales + unit.scales + b * Unit::SCALES_OF_BLOCK +
                                           h * Unit::SCALES_OF_ROW);
        }
    }
    // Warp: whether a scale may have a second factor (dequantize.cuh). Those past the end of K may be anything, so this may be
    // true because of them.
    __device__ __forceinline__ bool has_large() const {
        const uint32_t any = bytes[0][0] | bytes[0][1] | bytes[1][0] | bytes[1][1];
        return __any_sync(0xffffffff, mxfp4_is_large(any));
    }
};

// mxfp4_factor of a scale that is not large.
__device__ __forceinline__ uint32_t small_factor(uint32_t byte) {
    return byte * 0x00800080 + 0x3F003F00;
}

// The first operand of an octet's two products: octets of either row, scaled.
struct OctetOfUnit {
    uint32_t a[2][4];

    template <bool HAS_LARGE>
    __device__ __forceinline__ void make(uint32_t first, uint32_t second, const uint32_t (&factors)[2],
                                         const uint32_t (&bytes)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t from[1] = {h == 0 ? first : second};
            uint32_t to[4];
            expand_octet<FORMAT_MXFP4, false, false, REPACKED>(to, from);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to[i] = mul_bf16x2(to[i], factors[h]);
                if (HAS_LARGE) to[i] = mul_bf16x2(to[i], mxfp4_second_factor(bytes[h]));
                a[i / 2][i % 2 * 2 + h] = to[i];
            }
        }
    }
    // d += these times eight rows.
    __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&x)[4]) const {
        mma_m16n8k16_bf16(d, a[0], x[0], x[1]);
        mma_m16n8k16_bf16(d, a[1], x[2], x[3]);
    }
};

// d += a stage, some of whose scales have a second factor, times eight rows. That is rare, so this is short. `columns`: scales of a
// row from the stage's first on; those past them count as 0.
template <class Unit>
__device__ __forceinline__ void multiply_by_octets(float (&d)[4], const Stage& stage, const Unit& unit,
                                                   uint32_t rows, int columns, int lane) {
#pragma unroll 1
    for (int octet = 0; octet < (columns > 4 ? STEPS_OF_STAGE : STEPS_OF_STAGE / 2); ++octet) {
        const int b = octet / 4;
        uint32_t x[4], from[2], bytes[2], factors[2];
        ld_shared_v4_u32(rows + octet * STEP_BYTES, x[0], x[1], x[2], x[3]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            from[h] =
                ld_shared_u32(stage.codes + (b == 0 ? unit.codes[0][h] : unit.codes[1][h]) + octet % 4 * 4);
            const uint32_t byte = ld_shared_u8(stage.scales + unit.scales + b * Unit::SCALES_OF_BLOCK +
                                               h * Unit::SCALES_OF_ROW);
            bytes[h] = 4 * b + lane % 4 < columns ? byte : 0;
            factors[h] = mxfp4_factor(bytes[h]);
        }
        OctetOfUnit octets;
        octets.make<true>(from[0], from[1], factors, bytes);
        octets.multiply(d, x);
    }
}

// d = the unit whose stages come next, times eight rows. `rows`: address of what the lane reads at step 0. `columns`: scales of a
// row, K / 32. A block is read half a stage before it is multiplied, an octet made while the one before is. The instructions of a
// stage are in two straight runs, so that conversions lie between products that wait for each other: what asks for stages and
// waits for them is between the runs.
template <class Unit>
__device__ __forceinline__ void multiply(float (&d)[4], SharedStorage& shared, const Problem& p, Ring& ring,
                                         WeightLoader& loader, const Unit& unit, int k_stages, int columns,
                                         uint32_t rows, int lane) {
    static_assert(STAGE_BLOCKS == 2 && STEPS_OF_STAGE == 8, "below");
    constexpr int BEFORE = 4;  // octets until all that was read has been needed, one being made ahead
    StageOfLane part{};
    uint32_t x[2][4]{}, factors[STAGE_BLOCKS][2]{};
    OctetOfUnit octets[2]{};
    const auto read_rows = [&](int octet) {
        uint32_t (&to)[4] = x[octet % 2];
        ld_shared_v4_u32(rows + octet * STEP_BYTES, to[0], to[1], to[2], to[3]);
    };
    const auto make_octet = [&](int octet) {
        const int b = octet / 4, n = octet % 4;
        octets[octet % 2].make<false>(part.words[b][0][n], part.words[b][1][n], factors[b], part.bytes[b]);
    };
    const auto make_first = [&] {
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h) factors[b][h] = small_factor(part.bytes[b][h]);
        }
        make_octet(0);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    Stage stage = ring.await_stage(p);
    part.read_scales(stage, unit);
    part.read_codes(stage, unit, 0);
    part.read_codes(stage, unit, 1);
    read_rows(0);
    int left = k_stages;
    bool by_octets = part.has_large() | (left == 1);
    make_first();
#pragma unroll 1
    for (;;) {
        if (__builtin_expect(by_octets, 0)) {
            multiply_by_octets(d, stage, unit, rows, columns, lane);
        } else {
#pragma unroll
            for (int octet = 0; octet < BEFORE; ++octet) {
                read_rows(octet + 1);
                make_octet(octet + 1);
                octets[octet % 2].multiply(d, x[octet % 2]);
            }
        }
        __syncwarp();  // all lanes have what they loaded from the stage
        loader.load_stage(stage);
        if (--left == 0) break;
        stage = ring.await_stage(p);
        part.read_scales(stage, unit);
        part.read_codes(stage, unit, 0);
        const auto go_on = [&] {
            part.read_codes(stage, unit, 1);
            rows += STEPS_OF_STAGE * STEP_BYTES;
            columns -= STAGE_K / 32;
            read_rows(0);
            by_octets = part.has_large() | (left == 1);
            make_first();
        };
        if (__builtin_expect(by_octets, 0)) {
            go_on();
        } else {
#pragma unroll
            for (int octet = BEFORE; octet < STEPS_OF_STAGE; ++octet) {
                if (octet + 1 < STEPS_OF_STAGE) {
                    read_rows(octet + 1);
                    make_octet(octet + 1);
                } else {
                    go_on();
                }
                octets[octet % 2].multiply(d, x[octet % 2]);
            }
        }
    }
}
