"""Trains adapters over the frozen MXFP4 experts of gpt-oss on a text, and writes them as PEFT's files.

python examples/finetune_gpt_oss.py                                            a small random model, bytes as tokens
python examples/finetune_gpt_oss.py gpt-oss-20b --text notes.txt --out notes   a checkpoint's folder or a name on the hub

In --out: adapter_config.json and adapter_model.safetensors, and loss.svg where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

from padless import MXFP4
from padless.integrations.transformers import adapt_experts, quantize_experts
from padless.nn.lora import save_adapter

HELD_OUT = 0.1  # of the text, at its end: what the loss before and after is of


def random_model() -> Any:
    """A gpt-oss of random weights with experts in MXFP4, 256 tokens: bytes."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_local_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=4096, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="padless")
    return quantize_experts(model, MXFP4)


def load(folder: str | None, text: str, device: str) -> tuple[Any, torch.Tensor]:
    """The model, frozen, and the text's tokens."""
    if folder is None:
        model = random_model().to(device)
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, experts_implementation="padless")
        tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    return model.requires_grad_(False), tokens


def windows(tokens: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """(count, length) tokens from random places."""
    if len(tokens) <= length:
        raise SystemExit(
            f"the text has {len(tokens)} tokens for windows of {length}: give more text or a smaller --length"
        )
    first = torch.randint(0, len(tokens) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[first + torch.arange(length)]


@torch.no_grad()
def mean_loss(model: Any, held_out: torch.Tensor) -> float:
    """Nats a token."""
    model.eval()
    return sum(float(model(ids[None], labels=ids[None]).loss) for ids in held_out) / len(held_out)


def draw(losses: list[float], path: Path) -> None:
    """The loss of every step."""
    import matplotlib

    matplotlib.use("Agg")  # files only: a screen is never needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#33658a", linewidth=1.4, gid="losses")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint of gpt-oss in MXFP4; none: a small random model")
    parser.add_argument("--text", type=Path, help="a UTF-8 file; none: Python's help topics")
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    if options.text and not options.text.is_file():
        parser.error(f"--text is {options.text}; it must be a UTF-8 file")
    text = options.text.read_text(encoding="utf-8") if options.text else "\n".join(pydoc_data.topics.topics.values())
    model, tokens = load(options.model, text, device)
    experts = adapt_experts(model, rank=options.rank, alpha=options.alpha, dtype=torch.float32)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0, fused=device == "cuda")
    split = int(len(tokens) * (1 - HELD_OUT))
    held_out = windows(tokens[split:], 4, options.length, 0).to(device)
    count = sum(p.numel() for p in parameters)
    print(f"{len(experts)} layers of experts, {count:,} parameters of adapters, {len(tokens):,} tokens, on {device}")
    before = mean_loss(model, held_out)

    losses: list[float] = []
    columns = (TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=options.steps, loss=before)
        model.train()
        for step in range(options.steps):
            ids = windows(tokens[:split], options.batch, options.length, 1 + step).to(device)
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            progress.update(task, advance=1, loss=losses[-1])

    save_adapter(options.out, experts, "default", base_model=options.model)
    print(f"loss on held-out text: {before:.4f} before, {mean_loss(model, held_out):.4f} after; adapter: {options.out}")
    try:
        draw(losses, options.out / "loss.svg")
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed")


if __name__ == "__main__":
    main()
