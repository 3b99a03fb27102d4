"""Low-rank adapters over frozen experts: `LoraExperts`, and the products that it is made of."""

from padless.nn.lora.experts import LoraExperts

__all__ = ["LoraExperts"]
