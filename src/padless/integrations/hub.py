"""Names of padless as a kernel of the Hugging Face hub: FP8 products as transformers asks for them, and the layer.

tools/build_hub_kernel.py makes the kernel's folder of it; docs/hub_kernel.md describes it.
"""

from __future__ import annotations

from padless.checkpoints import from_deepseek
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.integrations.fp8_products import batched_matmul as matmul_batched
from padless.integrations.fp8_products import grouped_matmul as matmul_grouped
from padless.integrations.fp8_products import matmul as matmul_2d
from padless.moe import moe
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

__all__ = ["FP8_BLOCK", "BlockScaledTensor", "from_deepseek", "group_offsets", "grouped_gemm"]
__all__ += ["matmul_2d", "matmul_batched", "matmul_grouped", "moe", "quantize"]
