"""Families of transformers whose experts padless computes: a tiny random model of each, and the table in docs.

    python tools/transformers_families.py            # writes docs/transformers_families.md; minutes on a core
    python tools/transformers_families.py zaya dots1  # prints the rows of these

A family is a folder of transformers' models that dispatches experts by experts_implementation. Of each a model of two
layers runs on the CPU in bfloat16 by "eager", and then by padless with the same routing.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from padless.integrations.transformers import NAME as PADLESS
from padless.integrations.transformers import TRAIN_NAME, quantize_experts

PAGE = Path(__file__).parents[1] / "docs" / "transformers_families.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
LARGEST = 60_000_000  # parameters: what a configuration did not make tiny is not built
BOUND, GRADIENT_BOUND = 0.12, 0.25

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "shared_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128,
    "shared_experts_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "qk_head_dim": 64,
    "v_head_dim": 64,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "first_k_dense": 1, "vocab_size": 256, "max_position_embeddings": 128, "sliding_window": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {}},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [128, 128], "mlp_layer_types": ["dense", "sparse"],
                        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [10, 10, 12]}},
    "flint": {"mlp_only_layers": []},
    "glm5_next": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 0, "index_n_heads": 4,
                  "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
                  "indexer_types": ["full", "full"], "linear_num_heads": 4, "linear_head_dim": 64},
    "gemma4": {"enable_moe_block": True, "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {}},
    "glm4v_moe": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 6, 6],
                                      "partial_rotary_factor": 0.5}},
    "granitemoehybrid": {"layer_types": ["full_attention", "full_attention"], "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
              "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"]},
    "qwen4_exp": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 16,
                  "indexer_compress_ratio": 4, "ple_embed_dim": 64, "ngram_vocab_size_base": 1000,
                  "split_ngram_parts": 8},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "zaya": {"layer_types": ["hybrid", "hybrid"], "num_experts_per_tok": 1},
}  # fmt: skip
_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
_HEADS = ("ForCausalLM", "TextModel", "Model")


def families() -> list[str]:
    """Folders of transformers' models with experts that are dispatched."""
    root = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^@use_experts_implementation", re.MULTILINE)
    return sorted({path.parent.name for path in root.glob("*/modeling_*.py") if pattern.search(path.read_text())})


def build(family: str) -> Any:
    """A random model in bfloat16, whose experts count. Raises ValueError where no tiny one is known."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds: list[Any] = [
        kind
        for head in _HEADS
        for name, kind in vars(module).items()
        if name.endswith(head) and inspect.isclass(kind) and issubclass(kind, PreTrainedModel)
    ]
    reasons = []
    for kind in dict.fromkeys(kinds):
        if kind.__module__ != module.__name__ or not callable(kind.config_class):
            continue
        try:
            model = _tiny(family, kind)
        except Exception as error:  # configurations check themselves in many ways
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            continue
        if any(hasattr(each, "is_transposed") for each in model.modules()):
            return model
    raise ValueError("; ".join(reasons) or "no model with experts")


def _tiny(family: str, kind: Any) -> Any:
    known = kind.config_class().to_dict()
    names = set(known) | set(kind.config_class.attribute_map or {})
    names |= set(inspect.signature(kind.config_class.__init__).parameters)
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "qk_rope_head_dim" in names:  # latent attention: as many heads of keys, and head_dim is that of positions
        sizes["num_key_value_heads"] = 4
        sizes.pop("head_dim", None)
    for name in _LAYERS:
        if isinstance(known.get(name), list) and known[name]:
            sizes[name] = [known[name][0], known[name][-1]]
    config = kind.config_class(**(sizes | MORE.get(family, {})))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(0, 1 / 16)
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # loading keeps some parameters and buffers in float32, which a cast does not
        model.save_pretrained(folder)
        return _load(kind, folder, "eager")


def _load(kind: Any, folder: str, experts: str) -> Any:
    loaded = kind.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation=experts)
    return loaded.eval()


def output(model: Any) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    ids = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    result = model(input_ids=ids, use_cache=False)
    return (result.logits if hasattr(result, "logits") else result.last_hidden_state).float()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the error over the norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def experts_of(model: Any) -> list[Any]:
    """The experts modules."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def _stored(experts: Any) -> list[torch.Tensor]:
    """Codes and scales, in an order."""
    found = {name: p.detach() for name, p in experts.named_parameters(recurse=False) if "proj" in name}
    return [found[name] for name in sorted(found)]


@contextmanager
def routing(model: Any, decisions: list[Any], record: bool) -> Iterator[None]:
    """Notes down ids and weights of every call of experts, or gives those instead: near ties are no error of experts."""
    calls = iter(list(decisions))

    def hook(module: Any, arguments: tuple[Any, ...]) -> Any:
        if not record:
            return (arguments[0], *next(calls), *arguments[3:])
        decisions.append(tuple(t.detach() for t in arguments[1:3]))
        return None

    handles = [module.register_forward_pre_hook(hook) for module in experts_of(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: Any, decisions: list[Any]) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, for a fixed random one of the output."""
    model.zero_grad()
    with routing(model, decisions, record=False):
        out = output(model)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def row(family: str) -> str:
    """The row of a family: the experts' class, and whether padless computes, trains and saves it, or why not."""
    model = build(family)
    name, decisions = type(experts_of(model)[0]).__name__, []  # type: str, list[Any]
    model.set_experts_implementation("eager")
    with torch.no_grad(), routing(model, decisions, record=True):
        want = output(model)
    trains = _trains(model, decisions)
    computes, saves = _computes(model, decisions, want)
    return f"| {family} | {name} | {computes} | {trains} | {saves} |"


def _trains(model: Any, decisions: list[Any]) -> str:
    reference = gradients(model, decisions)
    model.set_experts_implementation(TRAIN_NAME)
    try:
        found = gradients(model, decisions)
    except ValueError as refusal:
        return str(refusal).partition(" has ")[2].partition(";")[0]
    if found.keys() != reference.keys():
        return "WRONG: gradients are missing"
    # Sums over everything, such as of one attention sink, nearly cancel: rounding is all that is left of some.
    worst = max(error(found[name], want) for name, want in reference.items() if want.numel() >= 1024)
    return "yes" if worst < GRADIENT_BOUND else f"WRONG: a gradient is off by {worst:.2f}"


def _computes(model: Any, decisions: list[Any], want: torch.Tensor) -> tuple[str, str]:
    quantize_experts(model)
    model.set_experts_implementation(PADLESS)
    with torch.no_grad(), routing(model, decisions, record=False):
        got = output(model)
    off = error(got, want)
    computes = "yes" if 0 < off < BOUND else f"WRONG: off by {off:.2f}"
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except ValueError as refusal:
            return computes, _short(str(refusal))
        again = _load(type(model), folder, PADLESS)
        with routing(again, decisions, record=False):  # a clamped gate is fused there, and rounds otherwise
            off_again = error(output(again), got)
        same = all(
            torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            for one, other in zip(experts_of(model), experts_of(again), strict=True)
            for ours, theirs in zip(_stored(one), _stored(other), strict=True)
        )
        saves = "yes" if same and off_again < BOUND / 2 else f"WRONG: off by {off_again:.2f}"
        for experts in experts_of(model):
            experts.down_proj_scale_inv.zero_()
        with routing(model, decisions, record=False):
            if error(output(model), want) < 3 * off:
                computes = "WRONG: experts do not count"
    return computes, saves


def _short(refusal: str) -> str:
    """The part of a refusal to save that is about the experts, without their sizes and names."""
    known: tuple[str, ...] = (
        "biases or a norm",
        "a configuration of which transformers makes no FP8 experts",
        "another activation",
    )
    known += ("a name by which transformers would not leave it in bfloat16",)
    return next((words for words in known if words in refusal), refusal)


def table(rows: list[str]) -> str:
    """The part of the page between its marks."""
    columns = [[cell.strip() for cell in each.split("|")[3:6]] for each in rows]
    computed, trained, saved = (sum(cells[i] == "yes" for cells in columns) for i in range(3))
    text = (
        f"transformers {transformers.__version__} has {len(rows)} families of models that dispatch experts. Of a tiny "
        f"random model of each,\n{computed} are computed, {trained} train, and {saved} are saved after "
        "`quantize_experts` as FP8.\n\n"
        "| family | experts | computes | trains | saves |\n|---|---|---|---|---|\n"
    )
    return text + "".join(each + "\n" for each in rows)


def main() -> None:
    """Writes the table, or prints the rows that were asked for."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1:]:
        for family in sys.argv[1:]:
            print(row(family), flush=True)
        return
    rows = []
    for family in families():
        rows.append(row(family))
        print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
