"""transformers' FP8 products by padless, for its FP8 linear layers and its own experts implementations.

transformers calls three functions of a kernel that it downloads from the hub. Where the `kernels` package is not
installed it would raise ImportError at the first FP8 layer; those of `fp8_products` take the kernel's place.
"""

from __future__ import annotations

from transformers.integrations import finegrained_fp8

from padless.integrations.fp8_products import batched_matmul, grouped_matmul, matmul


def use_padless_fp8_kernels() -> None:
    """Makes transformers' FP8 linear layers, and its own FP8 experts, multiply by padless, in this process."""
    finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8.FineGrainedFP8(
        matmul=matmul, batched_matmul=batched_matmul, grouped_matmul=grouped_matmul
    )
