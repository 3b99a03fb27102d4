"""Host side of sm90_bf16_grouped_gemm.cu: pairs of formats whose values are exact in bf16, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, TILE_BYTES, BlockScaledTensor, round_up
from padless.kernels.config import (
    FEW_GROUPS,
    check_common_fields,
    cpp_constants,
    requirement_of,
    room_for_groups,
)
from padless.kernels.launch import Prepared, load_kernel, tile_counter
from padless.kernels.table import BF16, ROUTES, format_name
from padless.layouts import plain_scale
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_bf16/sm90_bf16_grouped_gemm.cu"

# Formats by the numbers of kernels/sm90_bf16/dequantize.cuh.
FORMATS = {BF16: 0, "FP8_BLOCK": 1, "MXFP8": 2, "MXFP8_E5M2": 3, "MXFP4": 4, "NVFP4": 5}
# (activations, weights) that the kernel multiplies.
PAIRS: tuple[tuple[str, str], ...] = tuple(
    dict.fromkeys((path.a, path.b) for path in ROUTES if path.kernel == KERNEL)
)

_SCALE_ROW_BYTES = 16  # what one copy brings of a row of row-major scales


@dataclass(frozen=True)
class Sm90Bf16Config:
    """One compiled kernel. Each field becomes a constant of the device code; M is not here, and must never be.

    Attributes:
        a_format, b_format: names of the formats of activations and weights; "BF16" for plain activations.
        block_m: tokens of the output tile: 8, 16, 32, 64 or 128.
        block_n: weight rows of the output tile: 128 or 256, shared out to the consumer warpgroups 64 at a time.
        num_warpgroups: consumer warpgroups, 2 or 4. With 4 a thread has fewer registers: at most 64 tokens.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        stage_blocks: blocks of 128 of K to a stage, 1 or 2; 2 needs FP4 weights and activations other than FP8_BLOCK.
            0 chooses: 2 with at most 16 tokens, where that can be.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        blocked: whether the scales of the weights are in the 32x4x4 layout, else row-major.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    a_format: str
    b_format: str
    block_m: int = 128
    block_n: int = 128
    num_warpgroups: int = 2
    num_stages: int = 0
    stage_blocks: int = 0
    raster_m: int = 8
    blocked: bool = False
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.a_format in {a for a, _ in PAIRS}, "a_format", ", ".join(dict(PAIRS)))
        with_a = [b for a, b in PAIRS if a == self.a_format]
        require(self.b_format in with_a, "b_format", f"{', '.join(with_a)} with {self.a_format}")
        require(self.block_m in (8, 16, 32, 64, 128), "block_m", "8, 16, 32, 64 or 128")
        require(self.block_n in (128, 256), "block_n", "128 or 256")
        require(self.num_warpgroups in (2, 4), "num_warpgroups", "2 or 4")
        if self.num_warpgroups == 4:
            require(self.block_n == 256, "block_n", "256 with 4 warpgroups")
            require(self.block_m <= 64, "block_m", "at most 64 with 4 warpgroups")
        if self.a_format == "FP8_BLOCK" and self.block_m >= 64:
            require(self.block_n == 128, "block_n", "128 with 64 or more tokens of FP8_BLOCK")
        require(self.stage_blocks in (0, 1, 2), "stage_blocks", "0 (chosen), 1 or 2")
        if self.stage_blocks == 2:
            require(
                self.can_pair_blocks, "stage_blocks", "0 or 1 with weights of FP8 or FP8_BLOCK activations"
            )
        check_common_fields(self, require)

    @property
    def blocks_of_stage(self) -> int:
        """``stage_blocks``, chosen."""
        return self.stage_blocks or (2 if self.can_pair_blocks and self.block_m <= 16 else 1)

    @property
    def can_pair_blocks(self) -> bool:
        """Whether a stage can have two blocks of 128 of K."""
        return self.b_format in ("MXFP4", "NVFP4") and self.a_format != "FP8_BLOCK"

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "NUM_MMA_WARPGROUPS": self.num_warpgroups,
            "NUM_STAGES": self.num_stages,
            "STAGE_BLOCKS": self.blocks_of_stage,
            "RASTER_M": self.raster_m,
            "MAX_GROUPS": self.max_groups,
            "A_FORMAT": FORMATS[self.a_format],
            "B_FORMAT": FORMATS[self.b_format],
        }
        macros = {"OUT_TYPE": OUT_DTYPES[self.out_dtype]}
        return cpp_constants(constants, {"SFB_IS_BLOCKED": self.blocked}, macros)


Config = Sm90Bf16Config


def select_config(
    a_format: str,
    b_format: str,
    m: int,
    num_groups: int,
    *,
    blocked: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Sm90Bf16Config:
    """The kernel for a problem: a pure function of the formats, M and G, since the groups' sizes are on the device.

    A tile has about as many tokens as a group. Many tokens to a tile make the weights' dequantisation, which every tile
    does anew, cheap against the products; few leave no part of an instruction idle. FP4 weights for up to 64 tokens
    take four warpgroups, which hide latencies that two leave open.
    """
    per_group = -(-m // max(min(num_groups, m), 1))
    block_m = next((size for size in (8, 16, 32, 64) if per_group <= size), 128)
    decoding = block_m <= 32
    # With FP8_BLOCK's second set of sums 256 rows of many tokens exceed the registers; 256 rows of 128 tokens and
    # their float32 output the shared memory.
    if a_format == "FP8_BLOCK":
        wide = decoding
    else:
        wide = block_m < 128 or out_dtype != torch.float32
    fp4 = b_format in ("MXFP4", "NVFP4")
    # 32 tokens of FP4 leave room for three stages of two blocks, 32 of bf16 for two, and 64 of FP4 for two beside an
    # output of 16 bits.
    most = 64 if out_dtype != torch.float32 else 32
    two_blocks = fp4 and 32 <= block_m <= most and a_format in ("MXFP4", "NVFP4")
    return Sm90Bf16Config(
        a_format,
        b_format,
        block_m=block_m,
        block_n=256 if wide else 128,
        num_warpgroups=4 if fp4 and wide and block_m <= 64 else 2,
        stage_blocks=2 if two_blocks else 0,
        blocked=blocked,
        max_groups=room_for_groups(num_groups),
        out_dtype=out_dtype,
    )


def prepare(
    driver: Driver,
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm90Bf16Config | None,
) -> Prepared:
    """Packs the launch of out = a @ b of its group.

    Scales that the copy engine cannot read in place are copied first: row-major ones whose rows are not a multiple of 16
    bytes, and blocked ones of activations.
    """
    (m, n), num_groups = out.shape, b.data.shape[0]
    device = out.device.index or 0
    if config is None:
        blocked = b.scale_layout == "blocked"
        config = select_config(
            format_name(a), b.format.name, m, num_groups, blocked=blocked, out_dtype=out.dtype
        )
    else:
        config = fit(config, a, b, out.dtype)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    read = operands(a, b, offs, config)
    arguments: list[Argument] = [driver.encode(spec) for spec in read.maps]
    arguments += [driver.encode(tensor_map.output_ragged(out, config.block_m)), *read.numbers]
    arguments += [(tile_counter(config, device, out.data_ptr()), 4)]
    # As many CTAs as multiprocessors: a tile costs far more than finding the next one. No more than there can be tiles.
    most_tiles = (-(-m // config.block_m) + num_groups) * -(-n // config.block_n)
    shape = LaunchShape(min(driver.num_sms(device), most_tiles), kernel.num_threads, 1, programmatic=True)
    prepared = driver.prepare(function, kernel, shape, arguments, [*read.tensors, out])
    return Prepared(prepared, read.copies)


def fit(
    config: Sm90Bf16Config, a: BlockScaledTensor | torch.Tensor, b: BlockScaledTensor, out_dtype: torch.dtype
) -> Sm90Bf16Config:
    """``config`` with what has to follow from the operands and the output."""
    return replace(
        config,
        a_format=format_name(a),
        b_format=b.format.name,
        blocked=b.scale_layout == "blocked",
        max_groups=room_for_groups(b.data.shape[0]),
        out_dtype=out_dtype,
    )


@dataclass(frozen=True)
class Operands:
    """What the kernel is given of its operands: the maps before the output's, the numbers after it but for the tile
    counter, the tensors that are read, and those among them that are copies."""

    maps: tuple[tensor_map.TensorMapSpec, ...]
    numbers: tuple[tuple[int, int], ...]
    tensors: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]


def operands(
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    config: Sm90Bf16Config,
    *,
    weight_rows: int | None = None,
) -> Operands:
    """The operands as the kernel reads them; weight_rows: rows of weights that come together, None for a tile's."""
    (num_groups, n), m, k = b.data.shape[:2], a.shape[0], b.logical_shape[-1]
    box_rows = config.block_n if weight_rows is None else weight_rows
    copies: list[torch.Tensor] = []
    a_data = a.data if isinstance(a, BlockScaledTensor) else a
    sfa, sfa_map = _activation_scales(a, offs, config, copies)
    sfb, sfb_map = _weight_scales(b, config, box_rows, copies)
    maps = (
        _rows_of_codes(a_data, config.block_m),
        _rows_of_codes(b.data, box_rows),
        sfa_map if sfa_map is not None else sfb_map,  # not looked at without one-byte scales of a
        sfb_map,
    )
    promoted = config.a_format == "FP8_BLOCK"
    global_a = a.global_scale if isinstance(a, BlockScaledTensor) else None
    numbers = [(sfa.data_ptr() if promoted and sfa is not None else 0, 8)]
    numbers += [(stride, 8) for stride in (sfa.stride() if promoted and sfa is not None else (0, 0))]
    numbers += [(0 if s is None else s.data_ptr(), 8) for s in (global_a, b.global_scale)]
    numbers += [(0 if s is None or s.numel() == 1 else 1, 4) for s in (global_a, b.global_scale)]
    numbers += [(0 if offs is None else offs.data_ptr(), 8)]
    numbers += [(value, 4) for value in (m, n, k, num_groups)]
    tensors = [a_data, sfa, b.data, sfb, global_a, b.global_scale, offs]
    return Operands(maps, tuple(numbers), tuple(t for t in tensors if t is not None), tuple(copies))


def _rows_of_codes(data: torch.Tensor, block_rows: int) -> tensor_map.TensorMapSpec:
    """Codes read 128 of K at a time (bf16: 64): FP8 and bf16 rows of 128 swizzled bytes, FP4 rows of 64 plain ones."""
    if data.dtype == torch.bfloat16:
        spec = tensor_map.operand(data, block_rows)
        return replace(spec, box=(64, *spec.box[1:]))
    if data.dtype == torch.float4_e2m1fn_x2:
        spec = tensor_map.operand(data.view(torch.uint8), block_rows)
        return replace(spec, box=(64, *spec.box[1:]), swizzle=tensor_map.SWIZZLE_NONE)
    return tensor_map.operand(data.view(torch.uint8), block_rows)


def _row_major(
    scale: torch.Tensor, block_rows: int, copies: list[torch.Tensor]
) -> tuple[torch.Tensor, tensor_map.TensorMapSpec]:
    """One-byte scales (.., rows, columns) for copies of 16 bytes a row; the tensor that is read, and its map."""
    columns = scale.shape[-1]
    scale = scale.view(torch.uint8)
    strides = [s for s, size in zip(scale.stride()[:-1], scale.shape[:-1], strict=True) if size > 1]
    if any(stride % 16 for stride in strides) or scale.data_ptr() % 16:
        padded = scale.new_empty((*scale.shape[:-1], round_up(columns, 16)))
        copies.append(padded)
        padded[..., :columns].copy_(scale)
        scale = padded[..., :columns]
    dims = tuple(reversed(scale.shape))
    steps = []
    for dim in range(scale.dim() - 2, -1, -1):
        wanted = scale.stride(dim) if scale.shape[dim] > 1 else round_up(columns, 16)
        steps.append(wanted)
    box = (_SCALE_ROW_BYTES, block_rows) + (1,) * (len(dims) - 2)
    return scale, tensor_map.TensorMapSpec(0, scale.data_ptr(), dims, tuple(steps), box)


def _activation_scales(
    a: BlockScaledTensor | torch.Tensor,
    offs: torch.Tensor | None,
    config: Sm90Bf16Config,
    copies: list[torch.Tensor],
) -> tuple[torch.Tensor | None, tensor_map.TensorMapSpec | None]:
    """The scales that the kernel reads and their map, where it reads them with the copy engine."""
    if not isinstance(a, BlockScaledTensor):
        return None, None
    if config.a_format == "FP8_BLOCK":
        return a.scale, None
    scale = a.scale
    if a.scale_layout != "plain":
        ends = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device) if offs is None else offs
        scale = plain_scale(a, ends).contiguous()
        copies.append(scale)
    return _row_major(scale, config.block_m, copies)


def _weight_scales(
    b: BlockScaledTensor, config: Sm90Bf16Config, box_rows: int, copies: list[torch.Tensor]
) -> tuple[torch.Tensor, tensor_map.TensorMapSpec]:
    if not config.blocked:
        return _row_major(b.scale, box_rows, copies)
    scale = b.scale.view(torch.uint8)
    # Half tiles, in the order they lie in: two or four of them, one after the other, are 128 rows' scales of 128 of K.
    tiles = 2 if config.b_format == "NVFP4" else 1
    halves = scale.numel() // (TILE_BYTES // 2)
    return scale, tensor_map.TensorMapSpec(
        0, scale.data_ptr(), (TILE_BYTES // 2, halves), (TILE_BYTES // 2,), (TILE_BYTES // 2, 2 * tiles)
    )
