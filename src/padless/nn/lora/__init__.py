"""Low-rank adapters over frozen experts: `LoraExperts`; its adapters under PEFT's names, and merged into codes."""

from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.merging import Merged, merged
from padless.nn.lora.peft_names import from_peft, to_peft

__all__ = ["LoraExperts", "Merged", "from_peft", "merged", "to_peft"]
