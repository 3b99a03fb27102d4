"""Problems for the quantising epilogues of Hopper's kernels, and how to run them in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from padless import formats
from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import BF16
from padless.quantization.quantize import quantize
from support.quant_cases import ALL, Guarded, QuantCase, judge, make_outputs, tensors_of

DRIVER = EmulatedDriver()  # one for all tests, since it keeps prepared kernels
FORMATS: dict[str, BlockScaledFormat] = {fmt.name: fmt for fmt in formats.FORMATS}
_SUMS: dict[object, torch.Tensor] = {}  # by case


@dataclass
class Case(QuantCase):
    """Operands in FP8_BLOCK."""

    sizes: tuple[int, ...]
    n: int
    k: int = 128
    past: int = 3
    seed: int = 0
    scale: float = 1.0  # of the activations
    a: BlockScaledTensor = field(init=False)
    b: BlockScaledTensor = field(init=False)
    offs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        m, groups = self.m, len(self.sizes)
        values = torch.randn(m, self.k, generator=draw) * self.scale
        self.a = quantize(values, FP8_BLOCK, kind="activation")
        self.b = quantize(torch.randn(groups, self.n, self.k, generator=draw), FP8_BLOCK, kind="weight")
        self.offs = torch.tensor(self.sizes).cumsum(0).to(torch.int32)
        self.draw_epilogue_operands(draw)

    def sums(self, driver: EmulatedDriver) -> torch.Tensor:
        """(M, N) float32 of the plain kernel, NaN in rows of nobody."""
        out = torch.full((self.m, self.n), float("nan"))
        with driver.configured(arithmetic="fast", num_sms=1):
            sm90_fp8.prepare(driver, self.a, self.b, self.offs, out, Sm90Fp8Config()).launch(0)
        return out


@dataclass
class PairCase(Case):
    """A case of any pair of formats; layouts of the operands' scales as their names say."""

    pair: tuple[str, str] = (MXFP8.name, MXFP8.name)
    layouts: tuple[str, str] = ("plain", "plain")
    plain: ModuleType | None = None  # the module of the kernel without an epilogue
    altered: bool = False  # the operands are not those that the seed makes

    def __post_init__(self) -> None:
        super().__post_init__()
        draw = torch.Generator().manual_seed(self.seed + 7)
        offs, (a, b) = self.offs, self.pair
        values = torch.randn(self.m, self.k, generator=draw) * self.scale
        weights = torch.randn(len(self.sizes), self.n, self.k, generator=draw)
        per_group = offs if a == "NVFP4" or self.layouts[0] == "blocked_groups" else None
        self.a = (
            values.to(torch.bfloat16)
            if a == BF16
            else quantize(values, FORMATS[a], kind="activation", offs=per_group, scale_layout=self.layouts[0])
        )
        self.b = quantize(weights, FORMATS[b], kind="weight", scale_layout=self.layouts[1])

    def sums(self, driver: EmulatedDriver) -> torch.Tensor:
        """(M, N) float32 of the plain kernel, NaN in rows of nobody."""
        assert self.plain is not None
        key = (self.plain, self.sizes, self.n, self.k, self.past, self.seed, self.scale, self.pair, self.layouts)
        if self.altered or key not in _SUMS:
            out = torch.full((self.m, self.n), float("nan"))
            with driver.configured(arithmetic="fast", num_sms=1):
                self.plain.prepare(driver, self.a, self.b, self.offs, out, None).launch(0)
            if self.altered:
                return out
            _SUMS[key] = out
        return _SUMS[key].clone()


def run(
    module: ModuleType, case: Case, epilogue: Epilogue, config: object, tiles: int | None = None
) -> dict[str, Guarded]:
    """The kernel's outputs; raises when the emulator has anything to report."""
    outputs = make_outputs(case, epilogue, tiles)
    tensors = tensors_of(case, epilogue, outputs, tiles)
    module.prepare(DRIVER, case.a, case.b, case.offs, tensors, config, epilogue=epilogue).launch(0)
    assert DRIVER.last_result is not None
    assert not DRIVER.last_result.reports
    return outputs


def check(
    module: ModuleType,
    case: Case,
    epilogue: Epilogue,
    config: object = None,
    *,
    seed: int = 0,
    sms: int = 2,
    tiles: int | None = None,
    acc: torch.Tensor | None = None,
) -> dict[str, Guarded]:
    """Every byte of every output, fences included, against the reference; ``acc``: known sums."""
    acc = case.sums(DRIVER) if acc is None else acc
    with DRIVER.configured(arithmetic="fast", num_sms=sms, seed=seed):
        got = run(module, case, epilogue, config, tiles)
    judge(case, epilogue, acc, got, tiles)
    return got


# --- epilogues -------------------------------------------------------------------------------------------

EPILOGUES: dict[str, Epilogue] = {
    "FP8_BLOCK rows and columns, bf16, everything": Epilogue(
        row_format=FP8_BLOCK, column_format=FP8_BLOCK, d_dtype=torch.bfloat16, **ALL
    ),
    "FP8_BLOCK rows, MN-major": Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn", prob=True),
    "MXFP8 rows and columns by group, cudnn, everything": Epilogue(
        row_format=MXFP8,
        row_layout="blocked_groups",
        column_format=MXFP8,
        column_layout="blocked_groups",
        scale_rule="cudnn",
        bias_rule="gated_bias",
        **ALL,
    ),
    "MXFP8 rows and columns in tiles, floor": Epilogue(
        row_format=MXFP8,
        row_layout="blocked",
        column_format=MXFP8,
        column_layout="blocked",
        scale_rule="floor",
        d_dtype=torch.float32,
    ),
    "MXFP8_E5M2 rows and columns, documented": Epilogue(
        row_format=MXFP8_E5M2, column_format=MXFP8_E5M2, scale_rule="cudnn_documented", alpha=True
    ),
    "MXFP8 columns alone": Epilogue(column_format=MXFP8, column_layout="blocked", scale_rule="rceil"),
    "MXFP4 rows in tiles, f16": Epilogue(
        row_format=MXFP4, row_layout="blocked", scale_rule="rceil", d_dtype=torch.float16
    ),
    "MXFP4 rows, cudnn": Epilogue(row_format=MXFP4, scale_rule="cudnn", bias=True, prob=True),
    "NVFP4 rows by group, everything": Epilogue(row_format=NVFP4, row_layout="blocked_groups", scale_rule="te", **ALL),
    "NVFP4 rows": Epilogue(row_format=NVFP4, scale_rule="te"),
    "bf16 alone": Epilogue(d_dtype=torch.bfloat16, alpha=True, bias=True, prob=True),
    "amax alone": Epilogue(amax=True, alpha=True),
}
_VALUES = {"d_dtype": torch.float32}  # what glu_of_own_values judges
GLU_EPILOGUES: dict[str, Epilogue] = {
    "interleaved, NVFP4 rows": Epilogue(
        activation="swiglu",
        gate_up="interleaved",
        row_format=NVFP4,
        row_layout="blocked",
        scale_rule="te",
        **ALL,
        **_VALUES,
    ),
    "interleaved, MXFP8 rows and columns": Epilogue(
        activation="swiglu",
        gate_up="interleaved",
        row_format=MXFP8,
        row_layout="blocked_groups",
        column_format=MXFP8,
        column_layout="blocked_groups",
        scale_rule="rceil",
        prob=True,
        **_VALUES,
    ),
    "concatenated, MXFP8 rows and columns": Epilogue(
        activation="swiglu",
        gate_up="concatenated",
        row_format=MXFP8,
        column_format=MXFP8,
        scale_rule="rceil",
        **ALL,
        **_VALUES,
    ),
    "concatenated, MXFP4 rows": Epilogue(
        activation="swiglu", gate_up="concatenated", row_format=MXFP4, scale_rule="rceil", amax=True, **_VALUES
    ),
    "concatenated, FP8_BLOCK columns": Epilogue(
        activation="swiglu", gate_up="concatenated", column_format=FP8_BLOCK, prob=True, **_VALUES
    ),
}


def name_of(epilogue: Epilogue) -> str:
    return ", ".join(k for k, v in (EPILOGUES | GLU_EPILOGUES).items() if v == epilogue)


def poisoned(case: PairCase) -> PairCase:
    """A NaN in one row, zeros in another, an infinite bias: in the groups 0 and 2 of SIZES."""
    assert isinstance(case.a, BlockScaledTensor)
    codes, scales = case.a.data.view(torch.uint8), case.a.scale.view(torch.uint8)
    codes[20] = 0
    scales[3, 1] = 0xFF if case.a.format != NVFP4 else 0x7F
    case.bias[0] = 0.0  # so that the row of zeros stays one
    case.bias[2, 5] = float("inf")
    case.alpha[0] = 1.0
    case.altered = True
    return case
