"""Log-probabilities of sampled tokens, by the model that samples and by the model that trains.

python examples/rollout.py                        trains a small Qwen3-MoE on text, samples, compares, writes a record
python examples/rollout.py --draw rollout.json    the picture of a record, rollout.svg, by matplotlib

Both are transformers' models of the same bfloat16 weights; no serving engine runs. What samples (`generate`) has the
experts of one of

    padless    the plug-in "padless", FP8 codes of `quantize_experts`
    vLLM       a definition in torch of the arithmetic of vLLM's own FP8 experts in Triton, with the same codes
    bf16       transformers' own, in bfloat16

and what trains has "padless_train" with a recipe of "fp8" or "bf16".
"""

from __future__ import annotations

import argparse
import copy
import json
import pydoc_data.topics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface

import padless
from padless.integrations.transformers import NAME, TRAIN_NAME, quantize_experts, set_recipe

BLOCK, LARGEST = 128, 448.0


def product(x: torch.Tensor, w: padless.BlockScaledTensor, expert: int) -> torch.Tensor:
    """x (R, K) bfloat16, quantized as vLLM does it, times an expert's weight: float32, scaled and added by 128 of K."""
    parts = x.float().unflatten(1, (-1, BLOCK))
    scale = parts.abs().amax(-1).clamp(min=1e-10) / LARGEST
    codes = (parts / scale[..., None]).to(torch.float8_e4m3fn).float()
    weight, by = w.data[expert].float(), w.scale[expert].repeat_interleave(BLOCK, 0)
    out = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for k in range(scale.shape[1]):
        out += codes[:, k] @ weight[:, k * BLOCK : (k + 1) * BLOCK].T * scale[:, k, None] * by[:, k]
    return out


def vllm_experts(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """vLLM 0.33's experts of Triton: both products and silu end in bfloat16, the routing weight comes before that."""
    w13, w2 = (
        padless.quantize(w.detach(), padless.FP8_BLOCK, kind="weight") for w in (self.gate_up_proj, self.down_proj)
    )
    slots = torch.zeros(*ids.shape, x.shape[1], dtype=torch.bfloat16, device=x.device)
    for e in ids.unique().tolist():
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        gate, up = product(x[token], w13, e).bfloat16().chunk(2, dim=-1)
        h = functional.silu(gate.float()).bfloat16() * up
        slots[token, slot] = (product(h, w2, e) * weights[token, slot, None].float()).bfloat16()
    return slots.float().sum(1).to(x.dtype)


# The layers of "mixed" whose experts are vLLM's; the others are those of the model that trains.
CHOSEN: set[int] = set()


def mixed_experts(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    forward = vllm_experts if id(self) in CHOSEN else ExpertsInterface()[TRAIN_NAME]
    return forward(self, x, ids, weights)


ExpertsInterface.register("vllm_arithmetic", vllm_experts)
ExpertsInterface.register("mixed", mixed_experts)


def trained(tokens: torch.Tensor, steps: int, layers: int, device: str) -> Any:
    """A Qwen3-MoE of bytes after some steps in FP8, in bfloat16."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=TRAIN_NAME).to(device)
    optimizer = torch.optim.AdamW(set_recipe(model, "fp8").train().parameters(), lr=2e-3)
    for _ in range(steps):
        first = torch.randint(0, tokens.numel() - 128, (8, 1))
        ids = tokens[first + torch.arange(128)].to(device)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def scored(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probabilities (B, new) of the tokens behind the prompt, in one pass."""
    with torch.no_grad():
        logits = model(ids).logits[:, prompt - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None])[..., 0]


def difference(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Of log-probabilities: the largest and the mean distance, and the share of tokens with the same bits."""
    off = (a - b).abs().double()
    return {"mean": off.mean().item(), "max": off.max().item(), "equal": (off == 0).double().mean().item()}


def compared(model: Any, prompts: torch.Tensor, new: int) -> dict[str, Any]:
    """Differences by what samples and what trains, generated token by token and scored in one pass; by layer."""
    model.eval()
    samplers = {name: copy.deepcopy(model) for name in ("padless", "vLLM", "bf16")}
    quantize_experts(samplers["padless"], padless.FP8_BLOCK).set_experts_implementation(NAME)
    samplers["vLLM"].set_experts_implementation("vllm_arithmetic")
    samplers["bf16"].set_experts_implementation("eager")
    found: dict[str, Any] = {"pairs": [], "layers": []}
    sampled = {}
    length = prompts.shape[1]
    for name, sampler in samplers.items():
        out = sampler.generate(
            prompts, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        sampled[name] = ids = out.sequences
        steps = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, ids[:, length:, None])[..., 0]
        for recipe in ("fp8", "bf16"):
            trainer = scored(set_recipe(model, recipe), ids, length)
            passes = scored(sampler, ids, length)
            one, generated = difference(passes, trainer), difference(steps, trainer)
            found["pairs"].append({"samples": name, "trains": recipe, "one_pass": one, "generated": generated})
    ids = sampled["vLLM"]
    want = scored(set_recipe(model, "fp8"), ids, length)
    model.set_experts_implementation("mixed")
    experts = [layer.mlp.experts for layer in model.model.layers]
    for chosen in [[e] for e in experts] + [experts]:
        CHOSEN.update(map(id, chosen))
        found["layers"].append(difference(scored(model, ids, length), want))
        CHOSEN.clear()
    model.set_experts_implementation(TRAIN_NAME)
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Mean differences of the pairs, and of vLLM's arithmetic in one layer at a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = [f"{p['samples']} /\n{p['trains']}" for p in record["pairs"]]
    for shift, (kind, colour) in enumerate((("one_pass", "#33658a"), ("generated", "#c99a1b"))):
        values = [p[kind]["mean"] for p in record["pairs"]]
        bars = left.bar(
            [i + 0.4 * shift for i in range(len(names))], values, 0.38, label=kind.replace("_", " "), color=colour
        )
        left.bar_label(bars, [f"{v:.1g}" if v else "0" for v in values], fontsize=7)
    left.set_xticks([i + 0.2 for i in range(len(names))], names, fontsize=8)
    left.set_title("mean |difference of log p|, samples / trains", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    values = [p["mean"] for p in record["layers"]]
    right.bar([*map(str, range(len(values) - 1)), "all"], values, color="#2f9c95")
    right.set_title("the same, vLLM's arithmetic in one layer of the trainer", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['device']}, torch {record['torch']}, {record['tokens']} tokens", fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("padless-out/rollout.json"))
    parser.add_argument("--draw", type=Path, help="a record; draws it and does nothing else")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".svg"))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    model = trained(tokens, arguments.steps, arguments.layers, device)
    first = torch.randint(0, tokens.numel() - 32, (arguments.prompts, 1))
    found = compared(model, tokens[first + torch.arange(32)].to(device), arguments.new_tokens)
    for pair in found["pairs"]:
        one, generated = pair["one_pass"], pair["generated"]
        print(f"{pair['samples']:8} {pair['trains']:5} one pass {one['mean']:.2e} ({one['equal']:.0%} equal)", end=", ")
        print(f"generated {generated['mean']:.2e} ({generated['equal']:.0%} equal)")
    print("vLLM's arithmetic in one layer, then in all:", ", ".join(f"{p['mean']:.2e}" for p in found["layers"]))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "engine": "transformers' generate; vLLM's experts by a definition of their arithmetic",
        "steps": arguments.steps,
        "tokens": arguments.prompts * arguments.new_tokens,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
