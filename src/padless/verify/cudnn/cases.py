"""Calls that cuDNN's kernels and padless's both take: operands in cuDNN's layouts, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FORMAT_BY_NAME, BlockScaledTensor, ceil_div
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.layouts import cudnn_view, from_cudnn_view
from padless.ops.grouped_gemm import gemm, group_offsets
from padless.testing.operands import in_layout, quantized
from padless.verify.cudnn.kernel import DENSE, GROUPED, Tensors

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
_E4M3, _E5M2, _E2M1 = CODES
OUTPUTS = ("d", "d_col", "amax", "sfd_row", "sfd_col", "c")


@dataclass(frozen=True)
class Case:
    """One call. sizes: rows of each group, multiples of 256, as cuDNN needs them, or of a dense product, any one number.
    bias: its dtype, or None.

    cudnn: keywords of cuDNN's class beyond those that the formats say. by_pointers: cuDNN gets addresses of the groups'
    weights. tile: padless's; None lets it choose.
    """

    name: str
    format: str = "MXFP8"
    d_dtype: torch.dtype = torch.bfloat16
    sizes: tuple[int, ...] = (256, 0, 256)
    n: int = 384
    k: int = 288
    bias: torch.dtype | None = None
    prob: bool = True
    cudnn: dict[str, Any] = field(default_factory=dict)
    tile: Sm100GroupedConfig | None = None
    dense: bool = False
    by_pointers: bool = False

    @property
    def program(self) -> tuple[str, str]:
        return DENSE if self.dense else GROUPED

    @property
    def quantizes(self) -> bool:
        """Whether D is codes, with scales along rows and columns."""
        return self.d_dtype in CODES

    @property
    def compared(self) -> tuple[str, ...]:
        """Outputs that both kernels have: padless has no FP4 along columns."""
        return tuple(x for x in OUTPUTS if self.d_dtype != _E2M1 or not x.endswith("col"))

    @property
    def block(self) -> int:
        return FORMAT_BY_NAME[self.format].block_k


_PAIR = {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (2, 1)}
_ONE = {"mma_tiler_mn": (128, 256), "cluster_shape_mn": (1, 1)}
_DENSE: dict[str, Any] = {"sizes": (200,), "n": 320, "dense": True}
_FOUR = {"cluster_shape_mn": (2, 2)}
_WIDE = Sm100GroupedConfig(cta_group=2, mma_n=256)

CASES = (
    Case("MXFP8 to bf16"),
    Case("MXFP8 to f16", d_dtype=torch.float16),
    Case("MXFP8 to e4m3", d_dtype=_E4M3),
    Case("MXFP8 to e5m2", d_dtype=_E5M2),
    Case("MXFP8 to e2m1, rows", d_dtype=_E2M1),
    Case("MXFP8_E5M2 to bf16", "MXFP8_E5M2"),
    Case("MXFP8_E5M2 to e4m3", "MXFP8_E5M2", _E4M3),
    Case("MXFP4 to bf16", "MXFP4"),
    Case("MXFP4 to f32", "MXFP4", torch.float32),
    Case("NVFP4 to bf16", "NVFP4"),
    Case("NVFP4 to f16", "NVFP4", torch.float16),
    Case("one CTA, 128 x 256", cudnn=_ONE),
    Case("one CTA, e4m3", d_dtype=_E4M3, cudnn=_ONE),
    Case("cluster 1 x 2", cudnn=_ONE | {"cluster_shape_mn": (1, 2)}),
    Case("cluster 2 x 1 of single CTAs", "NVFP4", cudnn=_ONE | {"cluster_shape_mn": (2, 1)}),
    Case("cluster 2 x 2", cudnn=_PAIR | {"cluster_shape_mn": (2, 2)}),
    Case("padless in pairs, 256 x 256", d_dtype=_E4M3, tile=_WIDE),
    Case("discrete column scales", d_dtype=_E4M3, cudnn={"discrete_col_sfd": True}),
    Case("discrete column scales, e5m2, one CTA", d_dtype=_E5M2, cudnn=_ONE | {"discrete_col_sfd": True}),
    Case("packed f32 operations", d_dtype=_E4M3, cudnn={"vector_f32": True}),
    Case("packed f32 operations, bf16", "MXFP4", cudnn={"vector_f32": True}),
    Case("dynamic scheduling", cudnn={"use_dynamic_sched": True}),
    Case("weights by pointers", d_dtype=_E4M3, bias=torch.bfloat16, by_pointers=True),
    Case("weights by pointers, NVFP4, one CTA", "NVFP4", cudnn=_ONE, by_pointers=True),
    Case("empty groups first and last", d_dtype=_E4M3, sizes=(0, 256, 256, 0)),
    Case("one group", "NVFP4", sizes=(512,), n=320, k=416),
    Case("a narrow product", sizes=(256, 256), n=64, k=32),
    Case("without prob", prob=False),
    Case("without prob, e4m3", d_dtype=_E4M3, prob=False),
    Case("bf16 bias, bf16", bias=torch.bfloat16),
    Case("f16 bias, f16", d_dtype=torch.float16, bias=torch.float16),
    Case("f32 bias, bf16, NVFP4", "NVFP4", bias=torch.float32),
    Case("bf16 bias, f32, MXFP4", "MXFP4", torch.float32, bias=torch.bfloat16),
    Case("bf16 bias, e4m3", d_dtype=_E4M3, bias=torch.bfloat16),
    Case("bf16 bias, e5m2, packed", d_dtype=_E5M2, bias=torch.bfloat16, cudnn={"vector_f32": True}),
    Case("bf16 bias without prob", bias=torch.bfloat16, prob=False),
    Case("dense, MXFP8 to f32", d_dtype=torch.float32, **_DENSE),
    Case("dense, MXFP8 to bf16, 128 x 256", cudnn={"mma_tiler_mn": (128, 256)}, **_DENSE),
    Case("dense, MXFP8_E5M2 to f16, cluster 2 x 2", "MXFP8_E5M2", torch.float16, cudnn=_FOUR, **_DENSE),
    Case("dense, MXFP4 to bf16, cluster 1 x 2", "MXFP4", cudnn={"cluster_shape_mn": (1, 2)}, **_DENSE),
    Case("dense, NVFP4 to f32", "NVFP4", torch.float32, **_DENSE),
)


def case_of(name: str) -> Case:
    """The case of a name. Raises ValueError for another."""
    found = {case.name: case for case in CASES}
    if name not in found:
        raise ValueError(f"checks has {name!r}; allowed are {', '.join(map(repr, found))}")
    return found[name]


def operands(case: Case, seed: int) -> Tensors:
    """cuDNN's operands and poisoned outputs, by its names.

    Three rows of four are near one, where a bias is as large as the products and every rounding shows; the others span
    forty powers of two, and one is zero.
    """
    draw = torch.Generator().manual_seed(seed)
    m, groups, n = sum(case.sizes), len(case.sizes), case.n
    exponents = torch.randint(-20, 21, (m, 1), generator=draw)
    exponents[torch.arange(m) % 4 != 0] = 0
    x = torch.randn(m, case.k, generator=draw) * case.k**-0.5 * torch.exp2(exponents.float())
    x[m // 3] = 0
    w = torch.randn(groups, n, case.k, generator=draw)
    a = in_layout(quantized(x, case.format, "activation"), "blocked")
    b = in_layout(quantized(w, case.format, "weight"), "blocked")
    tensors: Tensors = {
        "a": a.data.as_strided((m, a.data.shape[1], 1), (a.data.shape[1], 1, a.data.numel())),
        "b": b.data.permute(1, 2, 0),
        "sfa": _six_d(a, m, case),
        "sfb": _six_d(b, n, case),
    }
    if case.dense:
        return tensors | {"c": _poisoned(m, n, case.d_dtype), "amax": torch.full((1, 1, 1), -torch.inf)}
    tensors |= dict.fromkeys(("d_col", "bias", "sfd_row", "sfd_col", "amax", "norm_const", "prob"))
    tensors |= {
        "padded_offsets": group_offsets(torch.tensor(case.sizes)),
        "alpha": torch.randn(groups, generator=draw),
        "d": _poisoned(m, n, case.d_dtype),
    }
    if case.bias is not None:
        tensors["bias"] = (torch.randn(groups, n, generator=draw) * 3).to(case.bias).t()
    if case.prob:
        tensors["prob"] = torch.rand(m, 1, 1, generator=draw) * 2 - 0.5
    if case.d_dtype in (torch.bfloat16, torch.float16):
        tensors["amax"] = torch.full((groups, 1), -torch.inf)
    if case.quantizes:
        tensors["norm_const"] = torch.rand(1, generator=draw) + 0.5
        tensors["d_col"] = _poisoned(m, n, case.d_dtype)
        tensors["sfd_row"] = cudnn_view(_scales(m, ceil_div(n, case.block)), m, ceil_div(n, case.block))
        tensors["sfd_col"] = cudnn_view(_scales(n, ceil_div(m, case.block)), n, ceil_div(m, case.block))
    return tensors


def class_options(case: Case) -> dict[str, Any]:
    """Keywords of cuDNN's class for a case."""
    options = {"sf_vec_size": case.block} | case.cudnn
    if case.by_pointers:
        weights = {"b_shape": (case.n, case.k), "b_dtype": FORMAT_BY_NAME[case.format].data_dtype}
        options |= {"num_experts": len(case.sizes)} | weights
    return options


def outputs_here(case: Case, tensors: Tensors) -> Tensors:
    """padless's outputs for these operands, by cuDNN's names, of the sm_100a kernels in the emulator."""
    if case.dense:
        return _product_here(case, tensors)
    given = {
        f"{name}_tensor": tensors[name] for name in ("a", "b", "sfa", "sfb", "alpha", "bias", "prob", "norm_const")
    }
    out = grouped_gemm_quant(
        **given,  # type: ignore[arg-type]
        padded_offsets=tensors["padded_offsets"],  # type: ignore[arg-type]
        d_dtype=case.d_dtype,
        sf_vec_size=case.block,
        m_aligned=256,
        discrete_col_sfd=case.cudnn.get("discrete_col_sfd", False),
        config=case.tile,
        backend="emulator:sm_100a",
    )
    return {name: out.get(f"{name}_tensor") for name in OUTPUTS}


def _product_here(case: Case, tensors: Tensors) -> Tensors:
    def operand(name: str) -> BlockScaledTensor:
        codes, scale = tensors[name], tensors[f"sf{name}"]
        assert codes is not None
        assert scale is not None
        tiles = from_cudnn_view(scale)[0]
        return BlockScaledTensor(codes[:, :, 0], tiles, FORMAT_BY_NAME[case.format], None, "blocked")

    left, right = operand("a"), operand("b")
    sums, c = (gemm(left, right, out_dtype=d, backend="emulator:sm_100a") for d in (torch.float32, case.d_dtype))
    return dict.fromkeys(OUTPUTS) | {"c": c[:, :, None], "amax": sums.abs().max().view(1, 1, 1)}


def _six_d(t: BlockScaledTensor, rows: int, case: Case) -> torch.Tensor:
    return cudnn_view(t.scale.contiguous(), rows, ceil_div(case.k, case.block))


def _poisoned(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    width = n // 2 if dtype == torch.float4_e2m1fn_x2 else n
    raw = torch.full((m, width * dtype.itemsize), 0xA5, dtype=torch.uint8)
    return raw.view(dtype).as_strided((m, width, 1), (width, 1, m * width))


def _scales(rows: int, columns: int) -> torch.Tensor:
    size = ceil_div(rows, 128) * ceil_div(columns, 4) * 512
    return torch.full((size,), 0xA5, dtype=torch.uint8).view(torch.float8_e8m0fnu)
