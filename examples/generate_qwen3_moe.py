"""Generates with a Qwen3-MoE whose experts padless computes.

python examples/generate_qwen3_moe.py                                a small random model, quantized here
python examples/generate_qwen3_moe.py Qwen/Qwen3-30B-A3B-FP8 "Hi"    a checkpoint in FP8, from the hub or a folder
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from padless.integrations.transformers import quantize_experts
from padless.integrations.transformers.weights import expert_weights


def random_model(device: str) -> torch.nn.Module:
    """A bfloat16 model of random weights with its experts quantized to FP8_BLOCK."""
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="padless")
    return quantize_experts(model.to(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="checkpoint; none: a small random model")
    parser.add_argument("prompt", nargs="?", default="Mixture-of-Experts models are")
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    if arguments.model is None:
        model, tokenizer = random_model(device), None
        ids = torch.randint(0, 512, (1, 16), device=device)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.bfloat16, device_map=device, experts_implementation="padless"
        )
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids.to(device)
    model.eval()

    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)  # compiles the kernels
    start = time.perf_counter()
    out = model.generate(
        ids, max_new_tokens=arguments.new_tokens, min_new_tokens=arguments.new_tokens, do_sample=False, pad_token_id=0
    )
    new = out[0, ids.shape[1] :].tolist()
    seconds = time.perf_counter() - start

    experts = next(m for name, m in model.named_modules() if name.endswith(".experts"))
    print(f"experts: {expert_weights(experts).w13.format.name} on {device}")
    print(f"{len(new)} new tokens, {len(new) / seconds:.1f} tokens/s")
    print(tokenizer.decode(new) if tokenizer else new)


if __name__ == "__main__":
    main()
