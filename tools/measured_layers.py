"""Sections of README.md for whole layers: forward, a training step, weight gradients, and experts on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from measured_markdown import failure_sentence, markdown, paragraph, span
from measured_records import FOLDER, Measured, peers
from padless.bench.cases import decoding, ep, layer, model, wgrad
from padless.bench.cases.train.contenders import BF16, KEPT
from padless.bench.report import table
from padless.bench.results import Record, ratios
from padless.testing.timing import geomean

PREFILL = 2048  # tokens from which a layer's point is no decoding
# The recipe "fp8", which has kept values before the activation in bf16 since records said so in its name.
FP8 = ("padless fp8, Z bf16", "padless fp8")


def layer_section(found: Measured) -> list[str]:
    prefill = [r for r in found.points if r["point"]["tokens"] >= PREFILL]
    decode = [r for r in found.points if r["point"]["tokens"] <= 64]
    framework = ""
    if ratios(prefill, "gpu", layer.DEEPGEMM, layer.PADLESS):
        framework = (
            f" deepgemm is its grouped product with groups padded to 128 rows and the passes that vLLM and SGLang put "
            f"around it, in fewer launches than theirs: {_mean(prefill, layer.DEEPGEMM, layer.PADLESS)} from "
            f"{PREFILL} tokens on; a layer whose products and passes all ran at their floors would be "
            f"{_beside_floor(prefill)}."
        )
    text = paragraph(
        f"**A whole Mixture-of-Experts layer**, forward ({found.link}; {_peers(found)}{found.medians}): routing, "
        "gather, quantization, both products, weighted sum; microseconds, up to 256 tokens replayed from CUDA graphs. "
        "bf16 is torch's grouped product with the passes that transformers puts around it; `torch passes` are "
        "padless's products with those passes; the floor is the two products' FLOPs or their bytes, whichever takes "
        f"longer, and no pass. bf16 over padless: {_mean(prefill, layer.BF16, layer.PADLESS)} from {PREFILL} tokens "
        f"on, {_mean(decode, layer.BF16, layer.PADLESS)} up to 64.{framework}",
        failure_sentence(found.points),
    )
    return [text, markdown(layer.tables(found.points, found.sessions, 0)[0])]


def decoding_section(found: Measured) -> list[str]:
    points = found.points
    models = len({r["point"]["model"] for r in points})
    picture = found.path.with_suffix(".png")
    text = paragraph(
        f"**Layers of few tokens**, {models} models, {len(points)} points ({found.link}; {_peers(found)}"
        f"{found.medians}): microseconds a layer, from ids, or from the router's logits where it says so; layers with "
        "weights of their own in one CUDA graph. `triton products` and `deepgemm products` are the two products alone, "
        "on rows that were sorted and quantized before, in plain Triton with the fastest of its configurations and in "
        "DeepGEMM's masked layout; the floor is the weights of the experts that have a token at the rate of a copy. "
        f"Over padless: torch's bf16 {_mean(points, decoding.BF16, decoding.PADLESS)}, Triton's products "
        f"{_mean(points, 'triton', decoding.PADLESS)}.",
        failure_sentence(points),
    )
    shown = markdown(decoding.tables(points, found.sessions, 0)[0])
    drawn = f"![Microseconds a layer over tokens, ten models]({FOLDER}/{picture.name})"
    return [text, shown, *([drawn] if picture.exists() else [])]


def model_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**A whole model of transformers**, prefill of a random Qwen3-30B-A3B ({found.link}; {found.medians}): "
        "bfloat16 with transformers' own grouped product against the same with FP8 experts by padless; time with the "
        "host's, parameters and what a call adds to them at its peak.",
        failure_sentence(found.points),
    )
    return [text, markdown(model.tables(found.points, found.sessions, 0)[0])]


def train_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**A training step of an expert layer**, forward and backward, everything counted ({found.link}; "
        f"{found.medians}): torch's bf16 grouped products with compiled elementwise kernels against "
        "`padless.nn.Experts` in FP8_BLOCK, both in a CUDA graph. In the last comparison the weights' codes are kept "
        "from an earlier microbatch of the same optimizer step. Kept: bytes a routed row for the backward pass.",
        failure_sentence(found.points),
    )
    own = next(name for name in FP8 if any(name in record["gpu"] for record in found.points))
    columns = [
        table.Column("model", text=lambda part: str(part[0]["point"]["model"])),
        table.Column("rows", text=lambda part: str(part[0]["point"]["tokens"] * part[0]["point"]["top_k"])),
        table.Column("experts", text=lambda part: str(part[0]["point"]["experts"])),
        table.time(BF16, "bf16 us", 0),
        table.time(own, "FP8 us", 0),
        table.ratio("bf16 / FP8", BF16, own, 2, unit="x"),
        table.ratio("codes kept", BF16, own + KEPT, 2, unit="x"),
        table.Column("bf16 kept", text=lambda part: _saved(part, BF16)),
        table.Column("FP8 kept", text=lambda part: _saved(part, own)),
    ]
    return [text, markdown(table.table_of("", columns, table.by_point(found.points)))]


def wgrad_section(found: Measured) -> list[str]:
    points = found.points
    text = paragraph(
        f"**Weight gradients** along the tokens of ragged groups, {len(points)} shapes ({found.link}; "
        f"{_peers(found)}{found.medians}): times of torch's bf16 grouped product (bf16 output) and of DeepGEMM's "
        "(float32, added to what is there, groups padded before) over those of padless, geometric mean and least to "
        "most. `1d2d` and `1d1d` are FP8 with a scale per 128 x 128 or per 1 x 128 of the layer's inputs.",
        failure_sentence(points),
    )
    others = (wgrad.TORCH, wgrad.DEEPGEMM)
    left_out = (*others, *wgrad.FILLS.values())
    names = [n for n in dict.fromkeys(n for r in points for n in r["gpu"]) if n not in left_out]
    rows = [[name, *(_mean_and_span(points, other, name) for other in others)] for name in names]
    return [text, markdown(table.Table("", table.labels("contender", "torch bf16", "DeepGEMM"), rows))]


def ep_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**Experts on several GPUs** ({found.link}; {found.medians}; the slowest rank's time): bf16 tokens to "
        "quantized rows sorted by expert, products' rows back to tokens, and the whole layer, against NCCL's "
        "all_to_all with the passes around it, torchtitan's MinimalAsyncEP (both BSD-3-Clause) and DeepEP's first "
        "version (MIT). The table without peers has what was predicted, how far that is from what was measured, and by "
        "how much the slowest rank is over the mean, in percent.",
        failure_sentence(found.points),
    )
    *against, steps, sent = ep.tables(found.points, found.sessions, 0)
    parts = "Its parts; gradients on their way, sums of slots, and GB/s over the link:"
    return [text, *map(markdown, against), parts, markdown(steps), markdown(sent)]


def _peers(found: Measured) -> str:
    named = peers(found)
    return f"{named}; " if named else ""


def _beside_floor(records: Sequence[Record]) -> str:
    """Times of DeepGEMM's layer over the floors of the layer, mean and least."""
    values = [x for r in records if (x := layer.over_floor(r, layer.DEEPGEMM)) is not None]
    return f"{geomean(values):.2f}x, {min(values):.2f}x at least" if values else "-"


def _mean(records: Sequence[Record], numerator: str, denominator: str) -> str:
    values = ratios(records, "gpu", numerator, denominator)
    return f"{geomean(values):.2f}x" if values else "-"


def _mean_and_span(records: Sequence[Record], numerator: str, denominator: str) -> str:
    values = ratios(records, "gpu", numerator, denominator)
    return f"{geomean(values):.2f}x ({span(values, '.2f')})" if values else "-"


def _saved(part: table.Records, name: str) -> str:
    return table.number(part[0]["saved_bytes_per_row"].get(name), 0)
