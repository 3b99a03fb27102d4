"""Block-scaled grouped GEMM for Mixture-of-Experts on NVIDIA GPUs, with no padding."""

from padless.backends import backends
from padless.config import GemmConfig
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.quantize import dequantize, quantize
from padless.torch_api import scaled_grouped_mm

__version__ = "0.1.0"
__all__ = [
    "FP8_BLOCK",
    "BlockScaledFormat",
    "BlockScaledTensor",
    "GemmConfig",
    "backends",
    "dequantize",
    "gemm",
    "group_offsets",
    "grouped_gemm",
    "quantize",
    "scaled_grouped_mm",
]
