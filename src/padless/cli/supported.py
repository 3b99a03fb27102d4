"""Formats by operation and architecture, from ``padless.kernels.table.ROUTES``: the content of docs/supported.md."""

from __future__ import annotations

from pathlib import Path

from padless.formats import FORMATS, MXFP4_REPACKED, BlockScaledFormat
from padless.kernels.table import PLAIN_ROUTES, ROUTES, Route
from padless.runtime.architecture import ARCHITECTURES, with_own_kernels

_HEADINGS = {
    own.name: f"{own.generation} ({', '.join(found.name for found in ARCHITECTURES if found.kernels == own.name)})"
    for own in with_own_kernels()
}
_DTYPES = {
    "torch.float32": "float32",
    "torch.float8_e8m0fnu": "e8m0",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float8_e5m2": "e5m2",
    "torch.float4_e2m1fn_x2": "e2m1, two a byte",
}


def supported_markdown() -> str:
    """Markdown: the formats, and for each operation the kernel of every pair of formats on every architecture."""
    lines = [
        "# What runs where",
        "",
        "Generated from the code: `padless info --formats`. Pairs that are not listed get a `ValueError` that says what",
        "is supported. `BF16` stands for plain bfloat16 tensors. Every pair also runs on the CPU: in plain torch by",
        '`backend="reference"`, and the kernels themselves in the emulator, by',
        " and ".join(f'`backend="{own.backend}"` those of {own.name}' for own in with_own_kernels()) + ".",
        "No kernel has run on a Blackwell GPU: what is listed there was emulated. Kernels have pages, linked",
        "[below](#how-products-are-added-up). Recipes of training, and what each runs, are in",
        "[training](training.md#what-runs-where).",
        "",
        "## Formats",
        "",
        "| format | codes | scales | block of activations | block of weights | bits a value, with scales |",
        "|---|---|---|---|---|---|",
        *(_format_row(format) for format in (*FORMATS, MXFP4_REPACKED)),
    ]
    for operation in dict.fromkeys(route.operation for route in ROUTES):
        lines += ["", f"## `{operation}`", "", *_operation_table(operation)]
    lines += [
        "",
        "## How products are added up",
        "",
        "| kernel | accumulation |",
        "|---|---|",
        *dict.fromkeys(f"| {_page_link(r)} | {r.accumulation} |" for r in (*ROUTES, *PLAIN_ROUTES)),
        "",
        Path(__file__).with_name("batch_invariance.md").read_text().rstrip(),
    ]
    return "\n".join(lines) + "\n"


def _page_link(route: Route) -> str:
    """A link to the page of a route's kernel."""
    return f"[`{route.name}.cu`](kernels/{route.kernel.rpartition('/')[0]}/index.md)"


def _format_row(format: BlockScaledFormat) -> str:
    rows, columns = format.activation_block
    codes = 8 / format.codes_per_byte
    bits = [
        codes + 8 * format.scale_dtype.itemsize / (r * c) for r, c in (format.activation_block, format.weight_block)
    ]
    shown = " and ".join(dict.fromkeys(f"{b:.2f}" for b in bits))
    scales = _DTYPES[str(format.scale_dtype)] + (", and a float32 for all" if format.has_global_scale else "")
    weights = " x ".join(map(str, format.weight_block))
    return (
        f"| `{format.name}` | {_DTYPES[str(format.data_dtype)]} | {scales} | {rows} x {columns} | {weights} | {shown} |"
    )


def _operation_table(operation: str) -> list[str]:
    """A line for each pair of formats, a column for each architecture."""
    here = [route for route in (*ROUTES, *PLAIN_ROUTES) if route.operation == operation]
    archs = list(dict.fromkeys([*_HEADINGS, *(route.arch for route in here)]))
    pairs = dict.fromkeys((route.a, route.b) for route in here)
    lines = [
        "| activations | weights | " + " | ".join(_HEADINGS.get(arch, arch) for arch in archs) + " |",
        "|---|---|" + "---|" * len(archs),
    ]
    for a, b in pairs:
        cells = [_cell([route for route in here if (route.a, route.b, route.arch) == (a, b, arch)]) for arch in archs]
        lines.append(f"| `{a}` | `{b}` | " + " | ".join(cells) + " |")
    return lines


def _cell(routes: list[Route]) -> str:
    """The kernel; where there are several, the default, which is the first, and the others."""
    default, *others = dict.fromkeys(f"`{route.name}`" for route in routes) or ("-",)
    return f"{default}; on request {', '.join(others)}" if others else default
