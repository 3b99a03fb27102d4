"""Predictions of the clock for the expert layers of ten models on a B200, next to what others published.

    python tools/clock_models.py            the table of docs/timing_b200_layers.md
    python tools/clock_models.py --write    the same, put into the page and a record

The models, and how many of their experts are on the GPU, are those of `padless bench decoding`; a layer is that of
clock_layers.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from clock_h200 import MEASURED
from clock_layers import Model, layer_of, sizes_of
from clock_page import Tables, model_digest, write_block
from padless.bench.cases.problems.decoding import MODELS

RECORD = MEASURED / "clock" / "2026-11-28-sm100-models.json"
TOOLS = ("clock_sm100.py", "clock_layers.py", "clock_models.py")
TOKENS = (1, 16, 128, 1024, 8192)
ALL = ("MXFP8", "NVFP4")
SHIPPED = {"FP8_BLOCK": "FP8_BLOCK", "MXFP4": "MXFP8 x MXFP4"}  # by the weights' format: the pair that is multiplied
NONE = "none found"
# Of other kernels; the letters are sources, which the page lists. DeepSeek-V3's: as many rows as here, which are those
# of eight times as many tokens, of which one in eight slots is on the rank.
PUBLISHED = {
    ("Qwen3-30B", 1): "bf16 39.6 (a)",
    ("DeepSeek-V3 / 8", 1): "FP8_BLOCK 112, 238 (b); B300: MXFP8 99.2, NVFP4 65.1 (c)",
    ("DeepSeek-V3 / 8", 16): "FP8_BLOCK 255, 387 (b); B300: MXFP8 234.7, NVFP4 143.6 (c)",
    ("DeepSeek-V3 / 8", 128): "FP8_BLOCK 289, 461 (b)",
    ("DeepSeek-V3 / 8", 1024): "with the exchange of 8 ranks: 465.0, NVFP4 375.8 (d)",
}


def model_of(name: str) -> Model:
    """A model of the benchmark: all of its experts are on the GPU."""
    experts, top_k, hidden, intermediate, weights = MODELS[name]
    return Model(experts, experts, top_k, hidden, intermediate, activates_apart=weights == "MXFP4")


def models_table() -> Iterator[str]:
    """A line a model and a number of tokens, as Markdown; microseconds of a layer at the highest and lowest clock."""
    yield f"| model | T | rows, experts with any | {' | '.join(ALL)} | as it ships | published |"
    yield "|---" * (5 + len(ALL)) + "|"
    for name, (*_, weights) in MODELS.items():
        for tokens in TOKENS:
            sizes = sizes_of(model_of(name), tokens)
            cells = []
            for fmt in (*ALL, SHIPPED[weights]):
                fast, slow = layer_of(model_of(name), tokens, fmt).total
                cells.append(f"{fast:.0f} to {slow:.0f}" + f", {fmt}" * (fmt not in (*ALL, "FP8_BLOCK")))
            published = PUBLISHED.get((name, tokens), NONE)
            yield f"| {name} | {tokens} | {sum(sizes)}, {len(sizes)} | {' | '.join(cells)} | {published} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments, say = parser.parse_args(), Tables()
    for line in models_table():
        say(line)
    if arguments.write:
        write_block("models", say.lines)
        RECORD.write_text(json.dumps({"model": model_digest(*TOOLS), "lines": say.lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
