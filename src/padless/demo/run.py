"""`padless demo`: a real encoder's feed-forward blocks as experts, a real text as tokens, and no padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from padless.demo import model as demo_model
from padless.demo.formats import compare_formats
from padless.demo.layer import LayerInputs, Product, plain_layer, random_twin, relative, route, row_errors, run_layer
from padless.demo.picture import draw_padding
from padless.demo.report import DemoResult, print_report
from padless.runtime.devices import backends

NUM_TOKENS = 12 * demo_model.WINDOW
HIDDEN_LAYER = 3  # whose feed-forward input is routed: the middle of six
NUM_STEPS = 5

# Rounding the result to bf16 costs at most 2^-9 of each element; Hopper's tensor cores keep 13 fraction bits
# while adding, which may cost a row as much again where terms cancel. A wrong row is off by a tenth or more.
ARITHMETIC_LIMIT = 0.015


def run_demo(*, synthetic: bool = False, out: Path = Path("padless-out"), console: Console | None = None) -> DemoResult:
    """Run the demo, print it to console and then write its picture to out / "demo.png", where matplotlib is installed.

    synthetic: random activations with outlier channels; the model need not be installed.
    Raises ValueError where the model is missing, and where a result is off by more than arithmetic explains.
    """
    console = console or Console()
    if not (draws := find_spec("matplotlib") is not None):
        missing = "There will be no picture: matplotlib is not installed (pip install 'padless[demo]').\n"
        console.print(missing, markup=False)
    device = torch.device("cuda" if backends()["cuda"].available else "cpu")  # where a kernel can run
    begin = time.perf_counter()
    with _progress(console) as step:
        step("Making random data" if synthetic else f"Reading {demo_model.MODEL_NAME}, encoding the text")
        inputs, source = synthetic_inputs(device) if synthetic else model_inputs(device)
        step("Routing, quantizing and multiplying")
        routing = route(inputs.hidden, inputs.num_experts)
        sizes = routing.sizes
        up, down, output = run_layer(inputs, routing)
        step("Comparing with float64 and bf16")
        exact = plain_layer(inputs, routing, torch.float64)
        layer_error = relative(output, exact)
        bf16_layer_error = relative(plain_layer(inputs, routing, torch.bfloat16), exact)
        products = [
            Product("up projection", up, row_errors(up, sizes)),
            Product("down projection", down, row_errors(down, sizes)),
        ]
        step("The same with random data of the same shape")
        twins = [random_twin(product, sizes) for product in products]
        step("Every format side by side")
        compared = products if device.type == "cuda" else products[:1]  # the reference takes seconds for each
        formats = [compare_formats(p.name, p.gemm.x, p.gemm.w, sizes) for p in compared]
    picture = out / "demo.png" if draws else None
    result = DemoResult(
        source=source,
        data="outlier" if synthetic else "real",
        device=device,
        sizes=sizes,
        products=products,
        twins=twins,
        formats=formats,
        layer_error=layer_error,
        bf16_layer_error=bf16_layer_error,
        picture=picture,
        seconds=time.perf_counter() - begin,
    )
    print_report(console, result)
    if not result.worst_arithmetic <= ARITHMETIC_LIMIT:
        raise ValueError(
            f"a row of the grouped GEMM is off by {result.worst_arithmetic:.3g} from the float64 product of "
            f"the same codes, and rounding explains {ARITHMETIC_LIMIT}: please report it with padless info"
        )
    if picture is not None:  # last, so that nothing is lost where it cannot be drawn
        draw_padding(sizes, picture, source)
        console.print(f"\nPicture of where padding would have gone: [bold]{picture}[/]", soft_wrap=True)
    return result


def model_inputs(device: torch.device) -> tuple[LayerInputs, str]:
    """The encoder's six feed-forward blocks as experts, its hidden states for a real text as activations."""
    encoder = demo_model.load_encoder(device)
    ids = demo_model.tokenize(encoder, demo_model.reference_text(), NUM_TOKENS).to(device)
    hidden = demo_model.feed_forward_inputs(encoder, ids)[0][HIDDEN_LAYER].flatten(0, 1)
    source = (
        f"The feed-forward blocks of {demo_model.MODEL_NAME} as {encoder.num_layers} experts; "
        f"its hidden states for {NUM_TOKENS:,} tokens of {demo_model.TEXT_SOURCE}"
    )
    return LayerInputs(hidden, *encoder.feed_forward()), source


def synthetic_inputs(device: torch.device, num_tokens: int = NUM_TOKENS) -> tuple[LayerInputs, str]:
    """The same shapes from a seeded generator. A few channels are large, as a trained encoder's are."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num_experts, hidden, intermediate = 6, 384, 1536
    activations = 0.5 * normal(num_tokens, hidden) + 0.4 * normal(hidden)
    activations[:, torch.randperm(hidden, generator=generator)[:4]] *= 12
    inputs = LayerInputs(
        activations.to(device),
        (0.05 * normal(num_experts, intermediate, hidden)).to(device),
        (0.1 * normal(num_experts, intermediate)).to(device),
        (0.05 * normal(num_experts, hidden, intermediate)).to(device),
    )
    return inputs, f"Six random experts; random activations with outlier channels for {num_tokens:,} tokens"


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields step(text), which names the step that begins. The bar disappears at the end.

    Where the output is no terminal, a line for each step, with the time since the start.
    """
    if not console.is_terminal:
        begin = time.perf_counter()
        yield lambda text: console.print(f"{time.perf_counter() - begin:4.0f} s  {text}", highlight=False)
        return
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=NUM_STEPS, completed=-1)

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)

        yield step
