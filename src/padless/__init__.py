"""Block-scaled grouped GEMM for Mixture-of-Experts on NVIDIA GPUs, with no padding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from padless._version import __version__ as __version__

if TYPE_CHECKING:
    from padless import autograd as autograd
    from padless import distributed as distributed
    from padless import moe as moe
    from padless import nn as nn
    from padless.compat.cudnn.calls import grouped_gemm_quant, grouped_gemm_swiglu_quant
    from padless.compat.cudnn.gemm_class import GroupedGemmQuant
    from padless.compat.cudnn.outputs import QuantOutputs
    from padless.compat.torch import scaled_grouped_mm
    from padless.epilogue import Epilogue, EpilogueTensors
    from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
    from padless.kernels.sm90_bf16.config import Sm90Bf16Config
    from padless.kernels.sm90_bf16.config import Sm90Bf16Config as Bf16GemmConfig
    from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
    from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
    from padless.kernels.sm90_fp8.config import Sm90Fp8Config
    from padless.kernels.sm90_fp8.config import Sm90Fp8Config as GemmConfig
    from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
    from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
    from padless.kernels.sm100_dense.config import Sm100DenseConfig
    from padless.kernels.sm100_dense.config import Sm100DenseConfig as Mxfp8GemmConfig
    from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
    from padless.layouts import GroupedColumns
    from padless.ops.grouped_gemm import gemm, group_offsets, grouped_gemm
    from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
    from padless.ops.grouped_gemm_list import grouped_gemm_list
    from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
    from padless.quantization.quantize import dequantize, quantize
    from padless.quantization.rows_columns import quantize_rows_columns
    from padless.quantization.swiglu_backward import swiglu_backward_quantize
    from padless.quantization.weight_both import quantize_weight_both
    from padless.runtime.devices import backends

__all__ = [
    "FP8_BLOCK",
    "MXFP4",
    "MXFP8",
    "MXFP8_E5M2",
    "NVFP4",
    "Bf16GemmConfig",
    "Bf16PlainConfig",
    "Bf16WgradConfig",
    "BlockScaledFormat",
    "BlockScaledTensor",
    "Epilogue",
    "EpilogueTensors",
    "GemmConfig",
    "GroupedColumns",
    "GroupedGemmQuant",
    "Mxfp8GemmConfig",
    "QuantOutputs",
    "Sm90Bf16Config",
    "Sm90Fp8Config",
    "Sm90Mxfp8Config",
    "Sm100DenseConfig",
    "Sm100GroupedConfig",
    "WgradConfig",
    "backends",
    "dequantize",
    "gemm",
    "group_offsets",
    "grouped_gemm",
    "grouped_gemm_epilogue",
    "grouped_gemm_list",
    "grouped_gemm_quant",
    "grouped_gemm_swiglu_quant",
    "grouped_gemm_wgrad",
    "quantize",
    "quantize_rows_columns",
    "quantize_weight_both",
    "scaled_grouped_mm",
    "swiglu_backward_quantize",
]

_HOMES = {
    "Bf16PlainConfig": "kernels.sm90_bf16_plain.config",
    "Bf16WgradConfig": "kernels.sm90_bf16_wgrad.config",
    "BlockScaledFormat": "formats",
    "BlockScaledTensor": "formats",
    "Epilogue": "epilogue",
    "EpilogueTensors": "epilogue",
    "FP8_BLOCK": "formats",
    "GroupedColumns": "layouts",
    "GroupedGemmQuant": "compat.cudnn.gemm_class",
    "MXFP4": "formats",
    "MXFP8": "formats",
    "MXFP8_E5M2": "formats",
    "NVFP4": "formats",
    "QuantOutputs": "compat.cudnn.outputs",
    "Sm100DenseConfig": "kernels.sm100_dense.config",
    "Sm100GroupedConfig": "kernels.sm100_grouped.config",
    "Sm90Bf16Config": "kernels.sm90_bf16.config",
    "Sm90Fp8Config": "kernels.sm90_fp8.config",
    "Sm90Mxfp8Config": "kernels.sm90_mxfp8.config",
    "WgradConfig": "kernels.sm90_fp8_wgrad.config",
    "backends": "runtime.devices",
    "dequantize": "quantization.quantize",
    "gemm": "ops.grouped_gemm",
    "group_offsets": "ops.grouped_gemm",
    "grouped_gemm": "ops.grouped_gemm",
    "grouped_gemm_epilogue": "ops.grouped_gemm_epilogue",
    "grouped_gemm_list": "ops.grouped_gemm_list",
    "grouped_gemm_quant": "compat.cudnn.calls",
    "grouped_gemm_swiglu_quant": "compat.cudnn.calls",
    "grouped_gemm_wgrad": "ops.grouped_gemm_wgrad",
    "quantize": "quantization.quantize",
    "quantize_rows_columns": "quantization.rows_columns",
    "quantize_weight_both": "quantization.weight_both",
    "scaled_grouped_mm": "compat.torch",
    "swiglu_backward_quantize": "quantization.swiglu_backward",
}
# Packages whose names are public: padless.moe.moe, padless.distributed.ExpertParallel, ..
_PACKAGES = ("autograd", "distributed", "moe", "nn")

# Earlier names of configurations.
_ALIASES = {"Bf16GemmConfig": "Sm90Bf16Config", "GemmConfig": "Sm90Fp8Config", "Mxfp8GemmConfig": "Sm100DenseConfig"}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


if not TYPE_CHECKING:  # a type checker knows the names from above, and refuses others

    def __getattr__(name: str) -> Any:
        """Imports a public name at its first use, so that ``padless --help`` does not wait for torch."""
        if name in _PACKAGES:
            return import_module(f"padless.{name}")
        home = _HOMES.get(_ALIASES.get(name, name))
        if home is None:
            raise AttributeError(f"module 'padless' has no attribute {name!r}")
        value = getattr(import_module(f"padless.{home}"), _ALIASES.get(name, name))
        globals()[name] = value
        return value
