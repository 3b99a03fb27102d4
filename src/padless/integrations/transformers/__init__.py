"""Experts of Hugging Face transformers computed by padless: importing this module registers "padless".

    import padless.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(.., experts_implementation="padless", device_map="cuda")

FP8 checkpoints (128 x 128 blocks), MXFP8 and MXFP4 ones keep their codes; `quantize_experts` quantizes the experts of a
bfloat16 model. "padless_train" trains bfloat16 experts with FP8 products. docs/transformers.md describes it.
"""

from __future__ import annotations

try:
    import transformers as _transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "padless.integrations.transformers needs transformers 5.17 or newer: pip install 'padless[transformers]'"
    ) from error

if tuple(int(part) for part in _transformers.__version__.split(".")[:2]) < (5, 17):
    raise ImportError(
        f"transformers is {_transformers.__version__}; padless.integrations.transformers needs 5.17 or newer: "
        "pip install 'padless[transformers]'"
    )

from padless.integrations.transformers.activations import set_activations
from padless.integrations.transformers.adapters import adapt_experts
from padless.integrations.transformers.experts import NAME, experts_forward
from padless.integrations.transformers.fp8_kernels import use_padless_fp8_kernels
from padless.integrations.transformers.peft_adapters import use_padless_peft
from padless.integrations.transformers.quantizers import register_quantizers
from padless.integrations.transformers.quantizing import quantize_experts
from padless.integrations.transformers.routers import use_padless_routers
from padless.integrations.transformers.training import TRAIN_NAME, set_recipe, train_forward

__all__ = [
    "NAME",
    "TRAIN_NAME",
    "adapt_experts",
    "experts_forward",
    "quantize_experts",
    "register",
    "set_activations",
    "set_recipe",
    "train_forward",
    "use_padless_fp8_kernels",
    "use_padless_peft",
    "use_padless_routers",
]


def register() -> None:
    """Registers "padless" and "padless_train" for plain and for FP8 experts, the quantizers, and FP8 products if needed.

    The import does it; calling it again changes nothing.
    """
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
    from transformers.utils import is_kernels_available

    # A name that is in one of the two registries is accepted for every model and then missed at the first forward.
    for name, forward in ((NAME, experts_forward), (TRAIN_NAME, train_forward)):
        ExpertsInterface.register(name, forward)
        FP8ExpertsInterface.register(name, forward)
    register_quantizers()
    if not is_kernels_available():
        use_padless_fp8_kernels()


register()
