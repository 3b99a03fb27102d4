"""Block-scaled grouped GEMM for Mixture-of-Experts on NVIDIA GPUs, with no padding."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.backends import backends
    from padless.config import GemmConfig
    from padless.config_sm100_grouped import Sm100GroupedConfig
    from padless.formats import (
        FP8_BLOCK,
        MXFP4,
        MXFP8,
        MXFP8_E5M2,
        NVFP4,
        BlockScaledFormat,
        BlockScaledTensor,
    )
    from padless.grouped_gemm import gemm, group_offsets, grouped_gemm
    from padless.grouped_gemm_list import grouped_gemm_list
    from padless.grouped_gemm_quant import grouped_gemm_quant, grouped_gemm_swiglu_quant
    from padless.moe import combine, moe, route
    from padless.paths.sm90_bf16 import Bf16GemmConfig
    from padless.paths.sm90_mxfp8 import Sm90Mxfp8Config
    from padless.paths.sm100_mxfp8_dense import Mxfp8GemmConfig
    from padless.quant_class import GroupedGemmQuant
    from padless.quant_outputs import QuantOutputs
    from padless.quantize import dequantize, quantize
    from padless.torch_api import scaled_grouped_mm

__version__ = "0.1.0"
__all__ = [
    "FP8_BLOCK",
    "MXFP4",
    "MXFP8",
    "MXFP8_E5M2",
    "NVFP4",
    "Bf16GemmConfig",
    "BlockScaledFormat",
    "BlockScaledTensor",
    "GemmConfig",
    "GroupedGemmQuant",
    "Mxfp8GemmConfig",
    "QuantOutputs",
    "Sm90Mxfp8Config",
    "Sm100GroupedConfig",
    "backends",
    "combine",
    "dequantize",
    "gemm",
    "group_offsets",
    "grouped_gemm",
    "grouped_gemm_list",
    "grouped_gemm_quant",
    "grouped_gemm_swiglu_quant",
    "moe",
    "quantize",
    "route",
    "scaled_grouped_mm",
]

_HOMES = {
    "FP8_BLOCK": "formats",
    "MXFP4": "formats",
    "MXFP8": "formats",
    "MXFP8_E5M2": "formats",
    "NVFP4": "formats",
    "Bf16GemmConfig": "paths.sm90_bf16",
    "BlockScaledFormat": "formats",
    "BlockScaledTensor": "formats",
    "GemmConfig": "config",
    "GroupedGemmQuant": "quant_class",
    "Mxfp8GemmConfig": "paths.sm100_mxfp8_dense",
    "QuantOutputs": "quant_outputs",
    "Sm90Mxfp8Config": "paths.sm90_mxfp8",
    "Sm100GroupedConfig": "config_sm100_grouped",
    "backends": "backends",
    "combine": "moe.combining",
    "dequantize": "quantize",
    "gemm": "grouped_gemm",
    "group_offsets": "grouped_gemm",
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_list": "grouped_gemm_list",
    "grouped_gemm_quant": "grouped_gemm_quant",
    "grouped_gemm_swiglu_quant": "grouped_gemm_quant",
    "moe": "moe.layer",
    "quantize": "quantize",
    "route": "moe.routing",
    "scaled_grouped_mm": "torch_api",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, so that ``padless --help`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'padless' has no attribute {name!r}")
    value = getattr(import_module(f"padless.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Importing a submodule stores it under its name here; where a function has that name, the function stays."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
