"""Low-rank adapters over frozen experts: `LoraExperts`, and its adapters under PEFT's names."""

from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.peft_names import from_peft, to_peft

__all__ = ["LoraExperts", "from_peft", "to_peft"]
