"""Trains a Qwen3-MoE whose experts padless computes in FP8, forward and backward, on text that ships with Python.

python examples/fine_tune_qwen3_moe.py                                   a small random model, bytes as tokens
python examples/fine_tune_qwen3_moe.py --recipe bf16                     the same with bfloat16 products
python examples/fine_tune_qwen3_moe.py Qwen/Qwen3-30B-A3B --save tuned   a model of the hub, or of a folder
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from padless.integrations.transformers import TRAIN_NAME, set_recipe


def random_model() -> Any:
    """A Qwen3-MoE of random float32 weights, 256 tokens: bytes."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=TRAIN_NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a bfloat16 checkpoint; none: a small random model")
    parser.add_argument("--recipe", default="fp8", help="a name of padless.nn.RECIPES")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, help="3e-3 for the random model, 1e-5 for a checkpoint")
    parser.add_argument("--save", help="folder that the model is saved to")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    text = "\n".join(pydoc_data.topics.topics.values())
    if arguments.model is None:
        model = random_model().to(device)
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.bfloat16, device_map=device, experts_implementation=TRAIN_NAME
        )
        tokens = AutoTokenizer.from_pretrained(arguments.model)(text, return_tensors="pt").input_ids[0]
    set_recipe(model, arguments.recipe).train()
    rate = arguments.learning_rate or (3e-3 if arguments.model is None else 1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    start = time.perf_counter()
    losses = []
    for _ in range(arguments.steps):
        first = torch.randint(0, tokens.numel() - arguments.length, (arguments.batch, 1))
        ids = tokens[first + torch.arange(arguments.length)].to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()  # the only wait for the GPU
    seconds = time.perf_counter() - start

    count = arguments.steps * arguments.batch * arguments.length
    print(f"recipe {arguments.recipe} on {device}: {count} tokens, {count / seconds:.0f} tokens/s")
    print(f"loss of the first step {values[0]:.3f}, of the last {values[-1]:.3f}")
    if arguments.save:
        model.save_pretrained(arguments.save)


if __name__ == "__main__":
    main()
