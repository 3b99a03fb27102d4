"""Formats by operation and architecture, from ``padless.kernels.table.ROUTES``: the content of docs/supported.md."""

from __future__ import annotations

from padless.formats import FORMATS, BlockScaledFormat
from padless.kernels.table import PLAIN_ROUTES, ROUTES, Route

_ARCHS = {"sm_90a": "Hopper (sm_90a)", "sm_100a": "Blackwell (sm_100a, sm_103a)"}
_DTYPES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn_x2": "e2m1, two a byte"}
_SCALES = {"float32": "float32", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}

_INVARIANCE = """
## What the bits of a row depend on

On the row, the weights of its group, N, K, the architecture and the output's dtype; on nothing else. M, G, the sizes of
groups, the rows around it, rows past the last group, the tile, the layout of scales, graphs and streams change no bit
of it. Nor does the call: `gemm` is `grouped_gemm` of one group, `grouped_gemm_list` is `gemm` of each problem, and
`grouped_gemm_quant` quantises the float32 sums that `grouped_gemm` rounds. So a token gets the same numbers alone and in
a full batch, in prefill and in decoding. What is a function of many rows is not of one: column codes, amax, and the
global scale that `quantize` finds for NVFP4. `padless verify` checks all this on a GPU ("batch invariance"), and
tests/ops/test_batch_invariance.py in the emulator, for every pair here; of Blackwell there is the emulator alone.
The reference promises it where float64 holds a block's sum of code products exactly, which e4m3 and FP4 codes ensure.

Where a table says "on request" there are two kernels for a pair, and the default never changes. The class of the other's
configuration chooses the other, tile and all; the promise holds for each kernel by itself.

| pair | on request | what it is for, and what it costs |
|---|---|---|
| MXFP8 x MXFP8, Hopper | `config=padless.Sm90Bf16Config` | {few_rows} |
| MXFP8 x MXFP8, `gemm`, Blackwell | `config=padless.Sm100GroupedConfig` | the grouped kernel; not measured |

The Hopper figures are of one H200 ([record](measured/2026-11-22-h200-formats.jsonl)).
"""
_FEW_ROWS = (
    "products are exact and sums keep 25 fractional bits, not 13. At most 16 rows a group: 0.87 to 1.06 of the "
    "default's time, 0.94 on average; 64 rows a group: 1.16 to 1.21; prefill (M 8192 to 32768): 1.13 to 1.27"
)


def supported_markdown() -> str:
    """Markdown: the formats, and for each operation the kernel of every pair of formats on every architecture."""
    lines = [
        "# What runs where",
        "",
        "Generated from the code: `padless info --formats`. Pairs that are not listed get a `ValueError` that says what",
        "is supported. `BF16` stands for plain bfloat16 tensors. Every pair also runs on the CPU: in plain torch by",
        '`backend="reference"`, and the kernels themselves in the emulator, by `backend="emulator"` those of',
        'sm_90a and `backend="emulator:sm_100a"` those of sm_100a.',
        "",
        "## Formats",
        "",
        "| format | codes | scales | block of activations | block of weights | bits a value, with scales |",
        "|---|---|---|---|---|---|",
        *(_format_row(format) for format in FORMATS),
    ]
    for operation in dict.fromkeys(route.operation for route in ROUTES):
        lines += ["", f"## `{operation}`", "", *_operation_table(operation)]
    lines += [
        "",
        "## How products are added up",
        "",
        "| kernel | accumulation |",
        "|---|---|",
        *dict.fromkeys(f"| `{r.name}.cu` | {r.accumulation} |" for r in (*ROUTES, *PLAIN_ROUTES)),
        "",
        _INVARIANCE.strip().format(few_rows=_FEW_ROWS),
    ]
    return "\n".join(lines) + "\n"


def _format_row(format: BlockScaledFormat) -> str:
    rows, columns = format.activation_block
    codes = 8 / format.codes_per_byte
    bits = [
        codes + 8 * format.scale_dtype.itemsize / (r * c) for r, c in (format.activation_block, format.weight_block)
    ]
    shown = " and ".join(dict.fromkeys(f"{b:.2f}" for b in bits))
    scales = _SCALES[str(format.scale_dtype)[6:]] + (", and a float32 for all" if format.has_global_scale else "")
    weights = " x ".join(map(str, format.weight_block))
    return (
        f"| `{format.name}` | {_DTYPES[str(format.data_dtype)[6:]]} | {scales} | {rows} x {columns} | {weights} "
        f"| {shown} |"
    )


def _operation_table(operation: str) -> list[str]:
    """A line for each pair of formats, a column for each architecture."""
    here = [route for route in (*ROUTES, *PLAIN_ROUTES) if route.operation == operation]
    archs = list(dict.fromkeys([*_ARCHS, *(route.arch for route in here)]))
    pairs = dict.fromkeys((route.a, route.b) for route in here)
    lines = [
        "| activations | weights | " + " | ".join(_ARCHS.get(arch, arch) for arch in archs) + " |",
        "|---|---|" + "---|" * len(archs),
    ]
    for a, b in pairs:
        cells = [_cell([route for route in here if (route.a, route.b, route.arch) == (a, b, arch)]) for arch in archs]
        lines.append(f"| `{a}` | `{b}` | " + " | ".join(cells) + " |")
    return lines


def _cell(routes: list[Route]) -> str:
    """The kernel; where there are several, the default, which is the first, and the others."""
    default, *others = dict.fromkeys(map(_name, routes)) or ("-",)
    return f"{default}; on request {', '.join(others)}" if others else default


def _name(route: Route) -> str:
    return f"`{route.name}`"
