"""Block-scaled grouped GEMM for Mixture-of-Experts on NVIDIA GPUs, with no padding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from padless._version import __version__ as __version__
from padless.deprecation import LEAVING as _LEAVING
from padless.deprecation import warn_of as _warn_of

if TYPE_CHECKING:
    from padless import autograd as autograd
    from padless import distributed as distributed
    from padless import moe as moe
    from padless import nn as nn
    from padless.compat.cudnn.calls import grouped_gemm_quant, grouped_gemm_swiglu_quant
    from padless.compat.cudnn.gemm_class import GroupedGemmQuant
    from padless.compat.cudnn.outputs import QuantOutputs
    from padless.compat.torch import scaled_grouped_mm
    from padless.epilogue import Epilogue, EpilogueTensors, GateRule
    from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
    from padless.kernels.sm90_bf16.config import Sm90Bf16Config
    from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
    from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
    from padless.kernels.sm90_fp8.config import Sm90Fp8Config
    from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
    from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
    from padless.kernels.sm100_dense.config import Sm100DenseConfig
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

__all__ = ["FP8_BLOCK", "MXFP4", "MXFP8", "MXFP8_E5M2", "NVFP4", "BlockScaledFormat", "BlockScaledTensor"]
__all__ += ["Epilogue", "EpilogueTensors", "GateRule", "GroupedColumns", "GroupedGemmQuant", "QuantOutputs", "backends"]
__all__ += ["Bf16PlainConfig", "Bf16WgradConfig", "Sm90Bf16Config", "Sm90Fp8Config", "Sm90Mxfp8Config", "WgradConfig"]
__all__ += ["Sm100DenseConfig", "Sm100GroupedConfig"]
__all__ += ["gemm", "group_offsets", "grouped_gemm", "grouped_gemm_epilogue", "grouped_gemm_list"]
__all__ += ["grouped_gemm_quant", "grouped_gemm_swiglu_quant", "grouped_gemm_wgrad", "scaled_grouped_mm"]
__all__ += ["dequantize", "quantize", "quantize_rows_columns", "quantize_weight_both", "swiglu_backward_quantize"]

_MODULES = {
    "formats": (*("FP8_BLOCK", "MXFP4", "MXFP8", "MXFP8_E5M2", "NVFP4"), "BlockScaledFormat", "BlockScaledTensor"),
    "layouts": ("GroupedColumns",),
    "epilogue": ("Epilogue", "EpilogueTensors", "GateRule"),
    "kernels.sm90_bf16.config": ("Sm90Bf16Config",),
    "kernels.sm90_bf16_plain.config": ("Bf16PlainConfig",),
    "kernels.sm90_bf16_wgrad.config": ("Bf16WgradConfig",),
    "kernels.sm90_fp8.config": ("Sm90Fp8Config",),
    "kernels.sm90_fp8_wgrad.config": ("WgradConfig",),
    "kernels.sm90_mxfp8.config": ("Sm90Mxfp8Config",),
    "kernels.sm100_dense.config": ("Sm100DenseConfig",),
    "kernels.sm100_grouped.config": ("Sm100GroupedConfig",),
    "ops.grouped_gemm": ("gemm", "group_offsets", "grouped_gemm"),
    "ops.grouped_gemm_epilogue": ("grouped_gemm_epilogue",),
    "ops.grouped_gemm_list": ("grouped_gemm_list",),
    "ops.grouped_gemm_wgrad": ("grouped_gemm_wgrad",),
    "compat.cudnn.calls": ("grouped_gemm_quant", "grouped_gemm_swiglu_quant"),
    "compat.cudnn.gemm_class": ("GroupedGemmQuant",),
    "compat.cudnn.outputs": ("QuantOutputs",),
    "compat.torch": ("scaled_grouped_mm",),
    "quantization.quantize": ("dequantize", "quantize"),
    "quantization.rows_columns": ("quantize_rows_columns",),
    "quantization.swiglu_backward": ("swiglu_backward_quantize",),
    "quantization.weight_both": ("quantize_weight_both",),
    "runtime.devices": ("backends",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
# Packages whose names are public: padless.moe.moe, padless.distributed.ExpertParallel, ..
_PACKAGES = ("autograd", "distributed", "moe", "nn")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


if not TYPE_CHECKING:  # a type checker knows the names from above, and refuses others

    def __getattr__(name: str) -> Any:
        """Imports a public name at its first use, so that ``padless --help`` does not wait for torch."""
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        if (leaving := _LEAVING.get(f"padless.{name}")) is not None:
            _warn_of(f"padless.{name}")
            return __getattr__(leaving.new.removeprefix("padless."))
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'padless' has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
