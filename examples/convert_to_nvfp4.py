"""Converts the experts of a bfloat16 Mixture-of-Experts model to NVFP4 and compares its logits with the original's.

python examples/convert_to_nvfp4.py                                   a small random model
python examples/convert_to_nvfp4.py mistralai/Mixtral-8x7B-v0.1       a model of the hub, or of a folder
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from padless import NVFP4
from padless.integrations.transformers import quantize_experts


def random_model() -> Any:
    """A bfloat16 Qwen3-MoE of random weights, 256 tokens: bytes."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def expert_bytes(model: Any) -> int:
    """Bytes of all parameters of experts."""
    return sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a bfloat16 checkpoint; none: a small random model")
    parser.add_argument("--tokens", type=int, default=128, help="length of the text that is compared")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    text = pydoc_data.topics.topics["attribute-access"]
    if arguments.model is None:
        model = random_model().to(device)
        ids = torch.tensor([list(text.encode()[: arguments.tokens])], device=device)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, device_map=device)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : arguments.tokens].to(device)
    model.eval()

    with torch.no_grad():
        before, size = model(ids).logits.float(), expert_bytes(model)
        quantize_experts(model, NVFP4)
        model.set_experts_implementation("padless")
        after = model(ids).logits.float()
    log_p, log_q = before.log_softmax(-1), after.log_softmax(-1)

    print(f"experts: {size / 1e6:.2f} MB in bfloat16, {expert_bytes(model) / 1e6:.2f} MB in NVFP4 on {device}")
    print(f"relative error of the logits: {float((after - before).norm() / before.norm()):.4f}")
    print(f"divergence of the next token: {float((log_p.exp() * (log_p - log_q)).sum(-1).mean()):.6f} nats")
    print(f"same most likely token: {float((before.argmax(-1) == after.argmax(-1)).float().mean()):.1%}")


if __name__ == "__main__":
    main()
