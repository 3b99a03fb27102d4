"""Times every step of an expert layer, before and after, and draws where the time goes.

python examples/layer_time.py                                           a small layer, on whatever is here
python examples/layer_time.py --model Qwen3-30B --tokens 2048 8192      on a GPU

"before" is the layer as it is put together from torch's grouped product in bfloat16 and torch's passes; "products" has
padless' FP8 products with torch's passes around them; "after" is `padless.moe`, step by step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from padless import FP8_BLOCK, grouped_gemm, grouped_gemm_swiglu_quant, quantize
from padless.moe import combine, moe, route_quantize
from padless.testing.timing import Timer

# experts, chosen ones a token, hidden size, intermediate size
MODELS = {"small": (8, 2, 256, 128), "Qwen3-30B": (128, 8, 2048, 768), "DeepSeek-V3 / 8": (32, 8, 7168, 2048)}
KINDS = {
    "sort": "tab:purple",
    "gather": "tab:blue",
    "quantize": "tab:cyan",
    "products": "tab:gray",
    "activation": "tab:orange",
    "sum": "tab:red",
}
Step = tuple[str, str, Callable[[dict[str, Any]], Any]]  # kind, name of its result, what makes it of the results so far


def layer(model: str, tokens: int, device: str) -> dict[str, Any]:
    """Random operands of a layer: x, ids and weights of the router, both weights in bfloat16 and in FP8."""
    experts, k, hidden, intermediate = MODELS[model]
    torch.manual_seed(0)
    with torch.device(device):
        weights, ids = (0.5 * torch.randn(experts) + torch.randn(tokens, experts)).topk(k)
        w13 = torch.randn(experts, 2 * intermediate, hidden, dtype=torch.bfloat16) / hidden**0.5
        w2 = torch.randn(experts, hidden, intermediate, dtype=torch.bfloat16) / intermediate**0.5
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    quantized = {name: quantize(w, FP8_BLOCK, kind="weight") for name, w in (("q13", w13), ("q2", w2))}
    return {"x": x, "ids": ids, "weights": weights.softmax(-1), "w13": w13, "w2": w2, **quantized}


def sort(s: dict[str, Any]) -> Any:
    flat, experts = s["ids"].reshape(-1), s["w13"].shape[0]
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    sizes = torch.histc(flat.float(), bins=experts, min=0, max=experts - 1)
    return order, inverse, sizes.cumsum(0).to(torch.int32)


def gather(s: dict[str, Any]) -> torch.Tensor:
    rows: torch.Tensor = s["x"][s["sorted"][0] // s["ids"].shape[1]]
    return rows


def activation(s: dict[str, Any]) -> torch.Tensor:
    gate, up = s["h"].chunk(2, dim=-1)
    return silu(gate) * up


def weighted_sum(s: dict[str, Any]) -> torch.Tensor:
    order, inverse, _ = s["sorted"]
    rows = s["y"] * s["weights"].reshape(-1)[order][:, None].to(s["y"].dtype)
    return rows[inverse].view(*s["ids"].shape, -1).sum(dim=1)


BEFORE: list[Step] = [
    ("sort", "sorted", sort),
    ("gather", "rows", gather),
    ("products", "h", lambda s: torch._grouped_mm(s["rows"], s["w13"].transpose(-2, -1), offs=s["sorted"][2])),
    ("activation", "hidden", activation),
    ("products", "y", lambda s: torch._grouped_mm(s["hidden"], s["w2"].transpose(-2, -1), offs=s["sorted"][2])),
    ("sum", "out", weighted_sum),
]
PRODUCTS: list[Step] = [
    ("sort", "sorted", sort),
    ("gather", "gathered", gather),
    ("quantize", "rows", lambda s: quantize(s["gathered"], FP8_BLOCK)),
    ("products", "h", lambda s: grouped_gemm(s["rows"], s["q13"], s["sorted"][2])),
    ("activation", "activated", activation),
    ("quantize", "hidden", lambda s: quantize(s["activated"], FP8_BLOCK)),
    ("products", "y", lambda s: grouped_gemm(s["hidden"], s["q2"], s["sorted"][2])),
    ("sum", "out", weighted_sum),
]
AFTER: list[Step] = [
    ("quantize", "routed", lambda s: route_quantize(s["x"], s["ids"], s["w13"].shape[0], FP8_BLOCK)),
    (
        "products",
        "hidden",
        lambda s: grouped_gemm_swiglu_quant(
            gate_up="concatenated", a_tensor=s["routed"][1], b_tensor=s["q13"], padded_offsets=s["routed"][0].offs,
            d_format=FP8_BLOCK, column_output=False,
        ).row,
    ),
    ("products", "y", lambda s: grouped_gemm(s["hidden"], s["q2"], s["routed"][0].offs)),
    ("sum", "out", lambda s: combine(s["y"], s["routed"][0].inverse, s["weights"])),
]  # fmt: skip
WAYS = {"before": BEFORE, "products": PRODUCTS, "after": AFTER}


def step_times(operands: dict[str, Any], steps: list[Step]) -> list[tuple[str, str, float]]:
    """(kind, result, microseconds) of each step, one after the other on the results of those before."""
    state = dict(operands)
    for _, name, make in steps:
        state[name] = make(state)
    calls = {name: (lambda make=make: make(state)) for _, name, make in steps}
    if operands["x"].is_cuda:
        times = {name: timing.median_us for name, timing in Timer(repeats=10, pause_s=0.002).gpu(calls).items()}
    else:
        times = {name: statistics.median(_seconds(call) for _ in range(3)) * 1e6 for name, call in calls.items()}
    reference = moe(state["x"], state["ids"], state["weights"], state["q13"], state["q2"])
    error = float((state["out"].double() - reference.double()).norm() / reference.double().norm())
    assert error < 0.1, f"the steps make another layer: they differ by {error:.3g}"
    return [(kind, name, times[name]) for kind, name, _ in steps]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """A panel a layer, a bar a way, its steps from left to right in their kinds' colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 0.6 + 1.3 * len(found)), layout="constrained")
    for axes, one in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        for i, steps in enumerate(reversed(one["steps"].values())):
            left = 0.0
            for kind, _, us in steps:
                axes.barh(i, us, left=left, color=KINDS[kind], edgecolor="white")
                left += us
            axes.text(left, i, f" {left:.0f} us", va="center")
        axes.set_yticks(range(len(one["steps"])), list(reversed(one["steps"])))
        axes.set_title(f"{one['model']}, {one['tokens']} tokens", loc="left", fontsize=10)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color, label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(KINDS), frameon=False)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["small"], choices=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--out", type=Path, default=Path("layer_time"), help="name of the .json and the .png")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    found = []
    for model in arguments.model:
        for tokens in arguments.tokens:
            operands = layer(model, tokens, device)
            one = {"model": model, "tokens": tokens, "steps": {w: step_times(operands, s) for w, s in WAYS.items()}}
            found.append(one)
            for way, steps in one["steps"].items():
                shown = ", ".join(f"{name} {us:.0f}" for _, name, us in steps)
                print(f"{model}, {tokens} tokens, {way}: {sum(us for *_, us in steps):.0f} us ({shown})")
    about = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    arguments.out.with_suffix(".json").write_text(json.dumps({"machine": about, "layers": found}, indent=1))
    draw(found, arguments.out.with_suffix(".png"))
    print(f"picture: {arguments.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
