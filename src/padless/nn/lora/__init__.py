"""Low-rank adapters over frozen experts: `LoraExperts`; its adapters in PEFT's files, and merged into codes."""

from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.merging import Merged, merged
from padless.nn.lora.peft_files import load_adapter, save_adapter
from padless.nn.lora.peft_names import from_peft, to_peft

__all__ = ["LoraExperts", "Merged", "from_peft", "load_adapter", "merged", "save_adapter", "to_peft"]
