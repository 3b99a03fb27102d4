"""Log-probabilities of sampled tokens, by the model that samples and by the model that trains.

python examples/rollout.py                        trains a small Qwen3-MoE on text, samples, compares, writes a record
python examples/rollout.py --engine               vLLM's engine samples, too; needs a GPU and vLLM
python examples/rollout.py --draw rollout.json    the picture of a record, rollout.svg, by matplotlib

What trains is a model of transformers with the experts "padless_train" and a recipe of "fp8" or "bf16". Without --engine
what samples is `generate` of another model of transformers with the same bfloat16 weights and the experts of one of

    padless    the plug-in "padless", FP8 codes of `quantize_experts`
    vLLM       a definition in torch of the arithmetic of vLLM's own FP8 experts in Triton, with the same codes
    bf16       transformers' own, in bfloat16

With --engine vLLM reads the same weights from a checkpoint and samples with padless' experts, its own FP8 ones or
bfloat16 ones (rollout_engine.py). Attention, norms, rotary embedding, dense products, the router's softmax and the
sampler are vLLM's kernels then, which round elsewhere than transformers', so log-probabilities differ with any experts.
The experts alone are compared by what went into each call: the model that trains computes the same rows again.
"""

from __future__ import annotations

import argparse
import copy
import json
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface

import padless
from padless.integrations.transformers import NAME, TRAIN_NAME, quantize_experts, set_recipe
from padless.testing import machine

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
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=layers,
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
    """Of log-probabilities a of what samples, b of what trains: the largest and the mean distance, the estimate of the
    divergence of the sampler from the trainer by r - 1 - log r of r = p_b / p_a, the share of tokens with the same bits.
    """
    off = (b - a).double()
    kl = (off.expm1() - off).mean().item()
    return {
        "mean": off.abs().mean().item(), "max": off.abs().max().item(), "kl": kl,
        "equal": (off == 0).double().mean().item(),
    }  # fmt: skip


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
        found["pairs"] += pairs(name, model, ids, steps, scored(sampler, ids, length))
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


def pairs(name: str, model: Any, ids: torch.Tensor, generated: torch.Tensor, one_pass: torch.Tensor) -> list[Any]:
    """Differences from the model that trains, by its recipe, of log-probabilities (B, new) of the last tokens of ids."""
    found = []
    for recipe in ("fp8", "bf16"):
        trainer = scored(set_recipe(model, recipe), ids, ids.shape[1] - generated.shape[1])
        one, steps = difference(one_pass, trainer), difference(generated, trainer)
        found.append({"samples": name, "trains": recipe, "one_pass": one, "generated": steps})
    return found


def experts_compared(model: Any, calls: list[Any]) -> dict[str, Any]:
    """Rows of an engine's experts against what the layer that trains, and vLLM's arithmetic, make of the same inputs.

    calls: of `rollout_engine.watched`. By what computes: "equal", the share of rows with the same bits, and "error",
    the norm of the difference over the norm.
    """
    layers = [layer.mlp.experts for layer in model.model.layers]
    by_layer = [
        [torch.cat(t) for t in zip(*(c[1:] for c in calls if c[0] == i), strict=True)] for i in range(len(layers))
    ]
    got = torch.cat([out for *_, out in by_layer])

    def against(forward: Any) -> dict[str, float]:
        with torch.no_grad():
            want = torch.cat([forward(layer, *inputs) for layer, (*inputs, _) in zip(layers, by_layer, strict=True)])
        error = (got.double() - want.double()).norm() / want.double().norm()
        return {"equal": (got == want).all(1).double().mean().item(), "error": error.item()}

    found: dict[str, Any] = {"rows": got.shape[0]}
    for recipe in ("fp8", "bf16"):
        set_recipe(model, recipe)
        found[recipe] = against(ExpertsInterface()[TRAIN_NAME])
    return found | {"vLLM": against(vllm_experts)}


def engine_compared(model: Any, prompts: torch.Tensor, new: int) -> Iterator[dict[str, Any]]:
    """Differences by the engine that samples and by what trains, experts' rows by the engine; after each engine."""
    import vllm
    from rollout_engine import ENGINES, sample

    model.eval()
    found: dict[str, Any] = {"vllm": vllm.__version__, "pairs": [], "experts": {}}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder, "bf16"))
        quantize_experts(copy.deepcopy(model), padless.FP8_BLOCK).save_pretrained(Path(folder, "fp8"))
        for name, (checkpoint, arguments) in ENGINES.items():
            rollout = sample(Path(folder, checkpoint), arguments, prompts, new)
            found["pairs"] += pairs(name, model, rollout.ids, rollout.generated, rollout.one_pass)
            found["experts"][name] = experts_compared(model, rollout.calls)
            yield found


def draw(record: dict[str, Any], path: Path) -> None:
    """Mean differences of the pairs, and of vLLM's arithmetic in one layer at a time; the engine's below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    engine = record.get("engine")
    figure, grid = plt.subplots(
        1 + bool(engine), 2, figsize=(11, 4.2 + 3.8 * bool(engine)), layout="constrained", squeeze=False
    )

    def bars(axes: Any, found: list[Any], title: str) -> None:
        for shift, (kind, colour) in enumerate((("one_pass", "#33658a"), ("generated", "#c99a1b"))):
            values = [p[kind]["mean"] for p in found]
            at = [i + 0.4 * shift for i in range(len(found))]
            made = axes.bar(at, values, 0.38, label=kind.replace("_", " "), color=colour)
            axes.bar_label(made, [f"{v:.1g}" if v else "0" for v in values], fontsize=7)
        names = [f"{p['samples']} /\n{p['trains']}" for p in found]
        axes.set_xticks([i + 0.2 for i in range(len(found))], names, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.2)  # the legend's place
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")

    bars(grid[0, 0], record["pairs"], "mean |difference of log p|, generate with experts of / trains")
    values = [p["mean"] for p in record["layers"]]
    grid[0, 1].bar([*map(str, range(len(values) - 1)), "all"], values, color="#2f9c95")
    grid[0, 1].set_title("the same, vLLM's arithmetic in one layer of the trainer", fontsize=10)
    if engine:
        bars(grid[1, 0], engine["pairs"], f"the same, vLLM {engine['vllm']} with experts of / trains")
        against = {"fp8": "#33658a", "bf16": "#c99a1b", "vLLM": "#2f9c95"}
        labels = {
            "fp8": "the layer that trains in FP8",
            "bf16": "the one in bf16",
            "vLLM": "vLLM's arithmetic in torch",
        }
        for shift, (kind, colour) in enumerate(against.items()):
            values = [100 * p[kind]["equal"] for p in engine["experts"].values()]
            at = [i + 0.27 * shift for i in range(len(values))]
            made = grid[1, 1].bar(at, values, 0.25, label=labels[kind], color=colour)
            grid[1, 1].bar_label(made, [f"{v:.3g}" for v in values], fontsize=7)
        grid[1, 1].set_xticks([i + 0.27 for i in range(len(engine["experts"]))], engine["experts"], fontsize=8)
        grid[1, 1].set_title("% of rows of the engine's experts with the bits of", fontsize=10)
        grid[1, 1].legend(frameon=False, fontsize=8)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['device']}, torch {record['torch']}, {record['tokens']} tokens", fontsize=9)
    figure.savefig(path)


def print_pairs(found: list[Any]) -> None:
    for pair in found:
        one, generated = pair["one_pass"], pair["generated"]
        print(f"{pair['samples']:9} {pair['trains']:5} one pass {one['mean']:.2e} ({one['equal']:.0%} equal)", end=", ")
        print(f"generated {generated['mean']:.2e} ({generated['equal']:.0%} equal)")


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--engine", action="store_true", help="samples with vLLM's engine, too")
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
    prompts = tokens[first + torch.arange(32)].to(device)
    found = compared(model, prompts, arguments.new_tokens)
    print_pairs(found["pairs"])
    print("vLLM's arithmetic in one layer, then in all:", ", ".join(f"{p['mean']:.2e}" for p in found["layers"]))
    about = machine.describe() | {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": arguments.steps,
        "tokens": arguments.prompts * arguments.new_tokens,
    }
    write(arguments.out, about | found)
    if arguments.engine:
        for found["engine"] in engine_compared(model, prompts, arguments.new_tokens):
            write(arguments.out, about | found)
        print_pairs(found["engine"]["pairs"])
        for name, each in found["engine"]["experts"].items():
            rows = ", ".join(
                f"{each[k]['equal']:.2%} {k} (error {each[k]['error']:.1e})" for k in ("fp8", "bf16", "vLLM")
            )
            print(f"{name}: {each['rows']} rows of experts, with the bits of {rows}")


if __name__ == "__main__":
    main()
