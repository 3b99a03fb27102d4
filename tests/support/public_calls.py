"""A good call of every public function and converter, by name, and the tensors in its arguments and results."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import padless
from padless import checkpoints, layouts
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledTensor, blocked_size
from padless.ops.epilogue_run import with_outputs

M, N, K, GROUPS = 6, 64, 128, 3
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def one_byte(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(60, 70, shape, dtype=torch.uint8, generator=generator).view(dtype)


def activation(fmt: padless.BlockScaledFormat = NVFP4, m: int = M, **options: Any) -> BlockScaledTensor:
    return padless.quantize(normal(m, K), fmt, **options)


def weight(fmt: padless.BlockScaledFormat = NVFP4, *groups: int) -> BlockScaledTensor:
    return padless.quantize(normal(*groups, N, K), fmt, kind="weight")


def columns(features: int, block: tuple[int, int] = (1, 128)) -> padless.GroupedColumns:
    _, made = padless.quantize_rows_columns(normal(M, features), OFFS, column_block=block, rows=False)
    return made


def product() -> dict[str, Any]:
    out = torch.empty((M, N), dtype=torch.bfloat16)
    return {"a": activation(offs=OFFS), "b": weight(NVFP4, GROUPS), "offs": OFFS, "out": out}


def product_of_list() -> dict[str, Any]:
    return {
        "a": [activation(m=m) for m in (3, 5)],
        "b": [weight() for _ in range(2)],
        "out": [torch.empty((m, N), dtype=torch.bfloat16) for m in (3, 5)],
        "alpha": normal(2),
    }


def numbers() -> dict[str, Any]:
    return {"alpha_tensor": normal(GROUPS), "prob_tensor": normal(M), "bias_tensor": normal(GROUPS, N)}


def epilogue_outputs() -> dict[str, Any]:
    epilogue = padless.Epilogue(
        alpha=True,
        bias=True,
        prob=True,
        amax=True,
        d_dtype=torch.bfloat16,
        row_format=NVFP4,
        row_layout="blocked",
        scale_rule="te",
    )
    tensors = padless.EpilogueTensors(
        alpha=normal(GROUPS), bias=normal(GROUPS, N), prob=normal(M), global_scale=torch.tensor([0.01])
    )
    operands = {"a": activation(offs=OFFS), "b": weight(NVFP4, GROUPS), "offs": OFFS}
    return {**operands, "epilogue": epilogue, "tensors": tensors}


def into_given(call: dict[str, Any]) -> dict[str, Any]:
    """The call with the outputs that it would allocate, codes and values as zeros, among its tensors."""
    t = with_outputs(call["epilogue"], call["tensors"], M, N, GROUPS, torch.device("cpu"))
    for output in (t.d, t.row_codes):
        output.untyped_storage().fill_(0)
    return {**call, "tensors": t}


def nvfp4_outputs() -> dict[str, Any]:
    """With BlockScaledTensors."""
    operands = {"a_tensor": activation(offs=OFFS), "b_tensor": weight(NVFP4, GROUPS), "padded_offsets": OFFS}
    return {**operands, **numbers(), "d_format": NVFP4, "global_scale_tensor": torch.tensor([0.01])}


def into_row(function: Any, **given: Any) -> dict[str, Any]:
    """The call with an output like the one that it makes, whose scales lie plain."""
    given = {**nvfp4_outputs(), **given, "row_layout": "plain"}
    row = function(**given).row
    row.data.untyped_storage().fill_(0)
    return {**given, "out": row, "global_scale_tensor": None}


def cudnn_operands() -> dict[str, Any]:
    a = activation(MXFP8, scale_layout="blocked")
    b = padless.quantize(normal(GROUPS, N, K), MXFP8, kind="weight", scale_layout="blocked")
    return {
        "a_tensor": a.data[:, :, None],
        "b_tensor": b.data.permute(1, 2, 0),
        "sfa_tensor": layouts.cudnn_view(a.scale, M, K // 32),
        "sfb_tensor": layouts.cudnn_view(b.scale, N, K // 32),
        "padded_offsets": OFFS,
        **numbers(),
        "norm_const_tensor": torch.tensor([1.5]),
        "bias_tensor": normal(N, GROUPS),
    }


def cudnn_outputs(gate_up: str | None = None) -> dict[str, Any]:
    given = {**cudnn_operands(), "d_dtype": torch.float8_e4m3fn}
    return given if gate_up is None else {**given, "gate_up": gate_up}


def buffers() -> dict[str, Any]:
    """What GroupedGemmQuant.execute takes."""
    made = padless.grouped_gemm_quant(**cudnn_outputs(), return_amax=True)
    outputs = {key: torch.zeros_like(value) for key, value in dict(made).items()}
    for key in ("sfd_row_tensor", "sfd_col_tensor"):
        outputs[key] = made[key].clone(memory_format=torch.preserve_format)
    given = cudnn_operands()
    given["prob_tensor"] = given["prob_tensor"].view(M, 1, 1)
    return {**given, **outputs}


def samples() -> dict[str, Any]:
    return {f"sample_{name.removesuffix('_tensor')}": value for name, value in buffers().items()}


def execution() -> dict[str, Any]:
    """What GroupedGemmQuant.execute takes, and an object that `execute` calls."""
    EXECUTED[:] = [padless.GroupedGemmQuant(**samples())]
    EXECUTED[0].compile()
    return buffers()


def execute(**tensors: Any) -> None:
    EXECUTED[0].execute(**tensors)


EXECUTED: list[padless.GroupedGemmQuant] = []


def torch_call() -> dict[str, Any]:
    a, b = activation(FP8_BLOCK, scale_major="k"), weight(FP8_BLOCK, GROUPS)
    recipes = {"scale_recipe_a": "BlockWise1x128", "scale_recipe_b": "BlockWise128x128"}
    tensors = {"mat_a": a.data, "mat_b": b.data.transpose(-2, -1), "scale_a": a.scale, "scale_b": [b.scale]}
    return {**tensors, **recipes, "offs": OFFS}


def made(t: BlockScaledTensor) -> dict[str, Any]:
    return {"data": t.data, "scale": t.scale, "format": t.format, "global_scale": t.global_scale, "offs": t.offs}


@dataclass(frozen=True)
class Call:
    """A good call: the function, and a maker of its arguments by keyword. covers: the function of the signature."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    covers: Callable[..., Any] | None = None

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.covers or self.function)


Q = padless.quantize
TILES = blocked_size(M, 5)
PUBLIC: dict[str, Call] = {
    "BlockScaledTensor": Call(BlockScaledTensor, lambda: made(activation(offs=OFFS))),
    "GroupedGemmQuant": Call(padless.GroupedGemmQuant, samples),
    "GroupedGemmQuant.execute": Call(execute, execution, padless.GroupedGemmQuant.execute),
    "dequantize": Call(padless.dequantize, lambda: {"t": activation(offs=OFFS), "offs": OFFS}),
    "gemm": Call(
        padless.gemm, lambda: {"a": activation(), "b": weight(), "out": torch.empty((M, N), dtype=torch.bfloat16)}
    ),
    "gemm of bf16": Call(padless.gemm, lambda: {"a": normal(M, K).bfloat16(), "b": weight()}),
    "group_offsets": Call(padless.group_offsets, lambda: {"sizes": torch.tensor([1, 2])}),
    "grouped_gemm": Call(padless.grouped_gemm, product),
    "grouped_gemm of bf16": Call(
        padless.grouped_gemm, lambda: {"a": normal(M, K).bfloat16(), "b": weight(NVFP4, GROUPS), "offs": OFFS}
    ),
    "grouped_gemm of FP8_BLOCK": Call(
        padless.grouped_gemm,
        lambda: {"a": activation(FP8_BLOCK), "b": weight(FP8_BLOCK, GROUPS), "offs": OFFS, "check_offs": True},
    ),
    "grouped_gemm_epilogue": Call(padless.grouped_gemm_epilogue, epilogue_outputs),
    "grouped_gemm_epilogue into given outputs": Call(
        padless.grouped_gemm_epilogue, lambda: into_given(epilogue_outputs())
    ),
    "grouped_gemm_list": Call(padless.grouped_gemm_list, product_of_list),
    "grouped_gemm_quant": Call(padless.grouped_gemm_quant, nvfp4_outputs),
    "grouped_gemm_quant into a given output": Call(
        padless.grouped_gemm_quant, lambda: into_row(padless.grouped_gemm_quant)
    ),
    "grouped_gemm_swiglu_quant into a given output": Call(
        padless.grouped_gemm_swiglu_quant, lambda: into_row(padless.grouped_gemm_swiglu_quant, gate_up="concatenated")
    ),
    "grouped_gemm_quant of cuDNN's tensors": Call(padless.grouped_gemm_quant, cudnn_outputs),
    "grouped_gemm_swiglu_quant": Call(
        padless.grouped_gemm_swiglu_quant, lambda: {**nvfp4_outputs(), "gate_up": "concatenated"}
    ),
    "grouped_gemm_swiglu_quant of cuDNN's tensors": Call(
        padless.grouped_gemm_swiglu_quant, lambda: {**cudnn_outputs("concatenated"), "d_dtype": torch.bfloat16}
    ),
    "quantize": Call(
        Q, lambda: {"x": normal(M, K), "format": NVFP4, "offs": OFFS, "global_scale": normal(GROUPS).abs()}
    ),
    "quantize of gathered rows": Call(
        Q, lambda: {"x": normal(M, K), "format": FP8_BLOCK, "rows": torch.tensor([3, 1, 1])}
    ),
    "quantize with global scales of groups": Call(Q, lambda: {"x": normal(M, K), "format": NVFP4, "offs": OFFS}),
    "quantize weights into tiles": Call(
        Q, lambda: {"x": normal(GROUPS, N, K), "format": NVFP4, "kind": "weight", "scale_layout": "blocked"}
    ),
    "quantize into tiles of groups": Call(
        Q, lambda: {"x": normal(M, K), "format": MXFP8, "scale_layout": "blocked_groups", "offs": OFFS.long()}
    ),
    "quantize to FP8_BLOCK": Call(Q, lambda: {"x": normal(M, K), "format": FP8_BLOCK}),
    "quantize to MXFP4": Call(Q, lambda: {"x": normal(M, K), "format": MXFP4, "kind": "weight"}),
    "scaled_grouped_mm": Call(padless.scaled_grouped_mm, torch_call),
    "GroupedColumns": Call(padless.GroupedColumns, lambda: dict(vars(columns(N)))),
    "grouped_gemm of plain tensors": Call(
        padless.grouped_gemm,
        lambda: {
            "a": normal(M, K).bfloat16(),
            "b": normal(GROUPS, N, K).bfloat16(),
            "offs": OFFS,
            "out": torch.zeros(M, N),
        },
    ),
    "gemm of plain tensors": Call(padless.gemm, lambda: {"a": normal(M, K).bfloat16(), "b": normal(N, K).bfloat16()}),
    "grouped_gemm_wgrad": Call(
        padless.grouped_gemm_wgrad,
        lambda: {"dy": columns(N), "x": columns(K, (128, 128)), "out": torch.zeros(GROUPS, N, K)},
    ),
    "grouped_gemm_wgrad of rows": Call(
        padless.grouped_gemm_wgrad,
        lambda: {
            "dy": normal(M, N).bfloat16(),
            "x": normal(M, K).bfloat16(),
            "offs": OFFS,
            "out": torch.zeros(GROUPS, N, K),
        },
    ),
    "quantize_rows_columns": Call(
        padless.quantize_rows_columns,
        lambda: {"x": normal(M, K), "offs": OFFS, "tokens": torch.arange(M, dtype=torch.int32).flip(0)},
    ),
    "quantize_weight_both": Call(padless.quantize_weight_both, lambda: {"w": normal(GROUPS, N, K)}),
    "swiglu_backward_quantize": Call(
        padless.swiglu_backward_quantize,
        lambda: {"dh": normal(M, K), "z": normal(M, 2 * K), "offs": OFFS, "prob": normal(M), "gate_up": "concatenated"},
    ),
}
E8M0, E4M3, U8 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8
CONVERTERS: dict[str, Call] = {
    "layouts.to_mn_major": Call(layouts.to_mn_major, lambda: {"scale": normal(M, 3)}),
    "layouts.to_mn_major of MN-major": Call(layouts.to_mn_major, lambda: {"scale": layouts.to_mn_major(normal(M, 3))}),
    "layouts.pack_fp4": Call(layouts.pack_fp4, lambda: {"codes": one_byte(U8, 2, 4) % 16}),
    "layouts.unpack_fp4": Call(layouts.unpack_fp4, lambda: {"data": one_byte(torch.float4_e2m1fn_x2, 2, 4)}),
    "layouts.to_blocked": Call(layouts.to_blocked, lambda: {"scale": one_byte(E8M0, M, 5)}),
    "layouts.from_blocked": Call(
        layouts.from_blocked, lambda: {"blocked": one_byte(E8M0, TILES), "rows": M, "columns": 5}
    ),
    "layouts.cudnn_view": Call(layouts.cudnn_view, lambda: {"blocked": one_byte(E4M3, TILES), "rows": M, "columns": 5}),
    "layouts.from_cudnn_view": Call(
        layouts.from_cudnn_view, lambda: {"view": layouts.cudnn_view(one_byte(E4M3, TILES), M, 5)}
    ),
    "layouts.group_of_rows": Call(layouts.group_of_rows, lambda: {"offs": OFFS, "rows": M}),
    "layouts.offs_from_indptr": Call(layouts.offs_from_indptr, lambda: {"m_indptr": torch.tensor([0, 2, 2, 5])}),
    "layouts.offs_from_indices": Call(
        layouts.offs_from_indices, lambda: {"m_indices": torch.tensor([0, 0, -1, 2]), "num_groups": 3}
    ),
    "layouts.from_masked": Call(layouts.from_masked, lambda: {"masked_m": torch.tensor([2, 0, 3]), "max_m": 4}),
    "layouts.group_max": Call(layouts.group_max, lambda: {"row_amax": normal(M).abs(), "offs": OFFS}),
    "layouts.padded_rows": Call(layouts.padded_rows, lambda: {"offs": OFFS, "rows": M}),
    "layouts.to_blocked_groups": Call(layouts.to_blocked_groups, lambda: {"scale": one_byte(E8M0, M, 5), "offs": OFFS}),
    "layouts.from_blocked_groups": Call(
        layouts.from_blocked_groups,
        lambda: {"blocked": one_byte(E8M0, 3 * TILES), "offs": OFFS, "rows": M, "columns": 5},
    ),
    "layouts.is_repackable": Call(layouts.is_repackable, lambda: {"weights": weight(MXFP4, GROUPS)}),
    "layouts.to_repacked": Call(layouts.to_repacked, lambda: {"weights": weight(MXFP4, GROUPS)}),
    "layouts.from_repacked": Call(
        layouts.from_repacked, lambda: {"weights": layouts.to_repacked(weight(MXFP4, GROUPS))}
    ),
    "layouts.plain_scale": Call(layouts.plain_scale, lambda: {"t": activation(), "offs": OFFS}),
    "checkpoints.from_deepseek": Call(
        checkpoints.from_deepseek, lambda: {"weight": weight(FP8_BLOCK).data, "scale_inv": normal(1, 1)}
    ),
    "checkpoints.from_compressed_tensors": Call(
        checkpoints.from_compressed_tensors,
        lambda: {
            "packed": one_byte(torch.float4_e2m1fn_x2, N, 16),
            "scale": one_byte(E4M3, N, 2),
            "global_scale": torch.tensor([300.0]),
        },
    ),
    "checkpoints.from_torch": Call(
        checkpoints.from_torch,
        lambda: {
            "data": one_byte(torch.float4_e2m1fn_x2, N, 16),
            "scale": one_byte(E4M3, N, 2),
            "global_scale": torch.tensor([300.0]),
        },
    ),
    "checkpoints.from_gpt_oss": Call(
        checkpoints.from_gpt_oss, lambda: {"blocks": one_byte(U8, N, 4, 16), "scales": one_byte(U8, N, 4)}
    ),
    "checkpoints.stack_experts": Call(checkpoints.stack_experts, lambda: {"weights": [weight(), weight()]}),
    "checkpoints.concatenate_rows": Call(checkpoints.concatenate_rows, lambda: {"weights": [weight(), weight()]}),
}
CALLS = PUBLIC | CONVERTERS


def replaced(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An argument with every tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [replaced(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: replaced(one, change) for key, one in value.items()}
    if isinstance(value, (BlockScaledTensor, padless.EpilogueTensors, padless.GroupedColumns)):
        made = (field.name for field in dataclasses.fields(value) if field.init)
        return type(value)(**{name: replaced(getattr(value, name), change) for name in made})
    return value


def copied(t: torch.Tensor, device: torch.device | str, reverse: bool = False) -> torch.Tensor:
    """The tensor elsewhere with its strides, or one with its rows in reverse."""
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    to, of = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (made, t))
    to.copy_(of.flip(0) if reverse and t.dim() else of)
    return made


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a call's arguments or its result, in order."""
    found: list[torch.Tensor] = []
    replaced(dict(value) if hasattr(value, "keys") else value, lambda t: (found.append(t), t)[1])
    return found


def described(t: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor without values has, too."""
    return t.shape, t.dtype, t.stride(), t.device


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in an argument or a result, with its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, BlockScaledTensor):
        for part in ("data", "scale", "global_scale"):
            yield from tensors_in(getattr(value, part), f"{name}.{part}")
    elif isinstance(value, padless.EpilogueTensors):
        for part, t in vars(value).items():
            yield from tensors_in(t, f"{name}.{part}")
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from tensors_in(one, f"{name}[{i}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_in(one, f"{name}.{key}" if name else key)
        yield from tensors_in(getattr(value, "row", None), f"{name}.row")


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the rows that belong to a group have the same bits; what lies in no group's rows is undefined."""
    if got.dim() > 1 and got.shape[0] == M:
        got, want = got[: OFFS[-1]], want[: OFFS[-1]]
    both = [t.detach().contiguous().flatten().clone().view(torch.uint8) for t in (got, want)]
    return got.dtype == want.dtype and torch.equal(*both)
