"""Low-rank adapters over frozen codes, for layers of experts and one projection; PEFT's files; adapters in codes."""

from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.linear import LoraGroupedLinear
from padless.nn.lora.merging import Merged, merged
from padless.nn.lora.peft_files import load_adapter, save_adapter
from padless.nn.lora.peft_names import from_peft, to_peft

__all__ = [
    "LoraExperts",
    "LoraGroupedLinear",
    "Merged",
    "from_peft",
    "load_adapter",
    "merged",
    "save_adapter",
    "to_peft",
]
