"""Bad inputs of every kind, each with what makes it; the table of docs/bad_input.md is what they get.

`python tests/support/bad_input.py --write` writes the table anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import padless
from padless import checkpoints, layouts, moe, nn
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledTensor
from padless.verify.fuzz.run import run_fuzz

M, N, K, G = 6, 64, 128, 3
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)
# What differs from run to run, with libraries' versions or with every new kernel.
ALIKE = (
    (r"0x[0-9a-f]+", "0x..."),
    (r"'/[^']*'", "'...'"),
    (r"(no whole \.safetensors file|cannot be read, [^:]*): .*", r"\1: ..."),
    (r"supported: FP8_BLOCK x .*", "supported: ..."),
)
SAME = "the same"
UNSEEN = "not looked at: a wrong result, and no access outside of the tensors"


@dataclass(frozen=True)
class Bad:
    """One line: where, what, a call that is refused on a CPU, and what a GPU does."""

    call: str
    what: str
    make: Callable[[], Any]
    gpu: str = SAME

    def sentence(self) -> str:
        """The error's words; addresses and temporary folders made alike. AssertionError where nothing is refused."""
        try:
            self.make()
        except ValueError as error:
            text = str(error)
            for pattern, made in ALIKE:
                text = re.sub(pattern, made, text)
            return text
        raise AssertionError(f"{self.call}: {self.what}: not refused")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def a(fmt: Any = FP8_BLOCK, m: int = M, k: int = K, x: torch.Tensor | None = None, **options: Any) -> BlockScaledTensor:
    return padless.quantize(normal(m, k) if x is None else x, fmt, **options)


def b(fmt: Any = FP8_BLOCK, groups: int = G, n: int = N, k: int = K, **options: Any) -> BlockScaledTensor:
    return padless.quantize(normal(groups, n, k), fmt, kind="weight", **options)


def ends(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def multiply(x: Any = None, w: Any = None, offs: Any = OFFS, **options: Any) -> Any:
    return lambda: padless.grouped_gemm(a() if x is None else x, b() if w is None else w, offs, **options)


def out(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def shared_memory() -> Any:
    memory = normal(M + 5, N).bfloat16()
    return padless.grouped_gemm(memory[:M], normal(G, N, N).bfloat16(), OFFS, out=memory[5:])


def made_for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return out(M, N)


def misaligned(t: BlockScaledTensor) -> BlockScaledTensor:
    flat = torch.zeros(t.data.numel() + 8, dtype=torch.uint8)
    return BlockScaledTensor(flat[8:].view(t.data.dtype).view(t.data.shape), t.scale, t.format)


def file_of(content: bytes, name: str = "model.safetensors") -> Callable[[], Any]:
    def make() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(content)
            return checkpoints.Checkpoint(folder)

    return make


def fp4(rows: int = 4, columns: int = 16) -> torch.Tensor:
    return torch.zeros((rows, columns), dtype=torch.uint8)


def along(recipe: str, offs: torch.Tensor) -> torch.Tensor:
    """A product along 128 tokens in groups, called as torch's."""
    codes, scale = a(m=K).data, normal(K, G)
    return padless.scaled_grouped_mm(codes, codes.t(), scale, recipe, scale.t().contiguous(), recipe, offs=offs)


GEMM, QUANT = "grouped_gemm", "grouped_gemm_quant"
LINES: tuple[Bad, ...] = (
    # offsets
    Bad(GEMM, "`offs` that descend", multiply(offs=ends(3, 2, 5)), UNSEEN),
    Bad(GEMM, "a negative end", multiply(offs=ends(-1, 2, 5)), UNSEEN),
    Bad(GEMM, "an end past M", multiply(offs=ends(2, 2, 7)), UNSEEN),
    Bad(GEMM, "an int64 end past 2^31", multiply(offs=ends(2, 2, 2**32 + 5, dtype=torch.int64)), UNSEEN),
    Bad(GEMM, "`offs` of another number of groups", multiply(offs=ends(2, 5))),
    Bad(GEMM, "`offs` that begin with 0", multiply(offs=ends(0, 2, 2, 5))),
    Bad(GEMM, "sizes in the place of `offs`", multiply(offs=ends(3, 0, 2)), UNSEEN),
    Bad(GEMM, "`offs` of float32", multiply(offs=torch.ones(3))),
    Bad(GEMM, "`offs` that is a list", multiply(offs=[2, 2, 5])),
    Bad(GEMM, "`offs` with gaps", multiply(offs=OFFS.repeat_interleave(2)[::2])),
    Bad(GEMM, "`offs` elsewhere", multiply(offs=OFFS.to("meta"))),
    Bad(GEMM, "no `offs`", multiply(offs=None)),
    Bad(GEMM, "4097 groups", multiply(w=b(groups=4097, n=8), offs=torch.zeros(4097, dtype=torch.int32))),
    Bad("group_offsets", "no sizes", lambda: padless.group_offsets(None)),  # type: ignore[arg-type]
    Bad("group_offsets", "a negative size", lambda: padless.group_offsets([3, -1])),
    Bad("group_offsets", "sizes of 2^31 rows", lambda: padless.group_offsets([2**30, 2**30])),
    Bad("layouts.offs_from_indptr", "a first entry that is not 0", lambda: layouts.offs_from_indptr(ends(1, 3)),
        "not looked at: taken for 0"),
    Bad("layouts.offs_from_indices", "indices that descend", lambda: layouts.offs_from_indices(ends(1, 0), 2),
        "not looked at: taken for the largest one before"),
    # operands
    Bad(GEMM, "a plain float32 tensor", multiply(x=normal(M, K))),
    Bad(GEMM, "formats without a kernel", multiply(w=b(MXFP8_E5M2))),
    Bad(GEMM, "another K", multiply(w=b(k=256))),
    Bad(GEMM, "weights (G, K, N)", multiply(w=b(n=K, k=64))),
    Bad(GEMM, "K that is no multiple of 16", multiply(x=a(k=136), w=b(k=136))),
    Bad(GEMM, "N that is no multiple of 8", multiply(w=b(n=60))),
    Bad(GEMM, "weights for activations", multiply(x=BlockScaledTensor(b().data[0], b().scale[0], FP8_BLOCK))),
    Bad(GEMM, "rows on top of each other", multiply(
        x=BlockScaledTensor(a().data[:1].expand(M, K), a().scale, FP8_BLOCK))),
    Bad(GEMM, "codes at an odd address", multiply(x=misaligned(a()), backend="emulator"),
        "the same; the reference takes any address"),
    Bad(GEMM, "another device", multiply(w=BlockScaledTensor(
        b().data.to("meta"), b().scale.to("meta"), FP8_BLOCK))),
    Bad(GEMM, "scales of groups that are not the call's", multiply(
        x=a(NVFP4, offs=ends(1, 2, 5)), w=b(NVFP4)),
        "the same, where `offs` is another tensor or was written to since"),
    Bad(GEMM, "global scales of another number of groups", multiply(x=a(NVFP4, offs=ends(2, 5)), w=b(NVFP4))),
    # outputs and options
    Bad(GEMM, "`out` of another shape", multiply(out=out(M, N + 8))),
    Bad(GEMM, "`out` of float64", multiply(out=out(M, N, dtype=torch.float64))),
    Bad(GEMM, "`out` whose columns are contiguous", multiply(out=out(N, M).t())),
    Bad(GEMM, "`out` in the memory of an operand", shared_memory),
    Bad(GEMM, "`out` of torch.inference_mode, outside of it", multiply(out=made_for_inference())),
    Bad(GEMM, "`out_dtype` int8", multiply(out_dtype=torch.int8)),
    Bad(GEMM, "an unknown backend", multiply(backend="gpu")),
    Bad(GEMM, "a config of another kernel", multiply(config=padless.Sm90Bf16Config)),
    Bad("Sm90Fp8Config", "a tile that there is not", lambda: padless.Sm90Fp8Config(block_m=96)),
    Bad("gemm", "weights of several groups", lambda: padless.gemm(a(), b())),
    Bad("scaled_grouped_mm", "a recipe that there is not", lambda: padless.scaled_grouped_mm(
        a().data, b().data.mT, a().scale, "RowWise", b().scale, "BlockWise128x128", offs=OFFS)),
    Bad("scaled_grouped_mm", "one-byte scales, and no word on their swizzle", lambda: padless.scaled_grouped_mm(
        a(MXFP8).data, b(MXFP8).data.mT, a(MXFP8).scale, "BlockWise1x32", b(MXFP8).scale, "BlockWise1x32", offs=OFFS)),
    Bad("scaled_grouped_mm", "MXFP8 along the groups", lambda: along("BlockWise1x32", ends(32, 64, 128))),
    Bad("scaled_grouped_mm", "groups of other lengths along the sum", lambda: along("BlockWise1x128", ends(2, 2, 5)),
        UNSEEN),
    Bad(QUANT, "NVFP4 output without its global scale", lambda: padless.grouped_gemm_quant(
        a_tensor=a(), b_tensor=b(), padded_offsets=OFFS, d_format=NVFP4)),
    Bad(QUANT, "columns of MXFP4", lambda: padless.grouped_gemm_quant(
        a_tensor=a(), b_tensor=b(), padded_offsets=OFFS, d_format=MXFP4, column_output=True)),
    Bad("grouped_gemm_wgrad", "accumulating in bfloat16", lambda: padless.grouped_gemm_wgrad(
        *[padless.quantize_rows_columns(normal(M, K), OFFS, rows=False)[1]] * 2,
        out=out(G, K, K), accumulate=True)),
    Bad("grouped_gemm_wgrad", "sizes in the place of `offs`", lambda: padless.grouped_gemm_wgrad(
        *[normal(M, K).bfloat16()] * 2, offs=torch.tensor([3, 0, 3], dtype=torch.int32)), UNSEEN),
    # quantizing
    Bad("quantize", "int32 values", lambda: padless.quantize(torch.ones((M, K), dtype=torch.int32), MXFP8)),
    Bad("quantize", "a sparse tensor", lambda: a(x=torch.eye(K).to_sparse())),
    Bad("quantize", "the imaginary part of a conjugate", lambda: a(
        x=torch.complex(normal(M, K), normal(M, K)).conj().imag)),
    Bad("quantize", "a global scale below 0", lambda: a(NVFP4, global_scale=-1.0),
        "the same for a number; a tensor on a GPU is not looked at"),
    Bad("quantize", "a call inside of torch.vmap", lambda: torch.vmap(lambda x: a(x=x).data)(normal(2, M, K))),
    Bad("quantize", "an odd K of FP4", lambda: padless.quantize(normal(M, 33), MXFP4)),
    Bad("quantize", "a rule of another format", lambda: a(MXFP8, scale_rule="te")),
    Bad("quantize", "tiles of groups without groups", lambda: a(MXFP8, scale_layout="blocked_groups")),
    Bad("dequantize", "scales of groups without `offs`", lambda: padless.dequantize(a(NVFP4, offs=OFFS))),
    # tensors
    Bad("BlockScaledTensor", "scales of another shape", lambda: BlockScaledTensor(
        a().data, torch.ones(M, 2), FP8_BLOCK)),
    Bad("BlockScaledTensor", "codes of another dtype", lambda: BlockScaledTensor(
        normal(M, K), a().scale, FP8_BLOCK)),
    Bad("BlockScaledTensor.to", "a dtype", lambda: a().to(torch.bfloat16)),  # type: ignore[arg-type]
    Bad("BlockScaledTensor[..]", "activations", lambda: a()[0]),
    # the layer
    Bad("nn.GroupedLinear", "more groups than there can be", lambda: nn.GroupedLinear(5000, 16, 16)),
    Bad("nn.GroupedLinear", "sizes that the recipe does not take", lambda: nn.GroupedLinear(1, 16, 16, recipe="mxfp8")),
    Bad("moe.route", "17 experts a token", lambda: moe.route(torch.zeros((2, 17), dtype=torch.int64), 32)),
    Bad("moe.moe", "a router's logits for weights", lambda: moe.moe(
        normal(2, K), ends(0, 1).view(2, 1), normal(2, G), b(n=256), b(n=K))),
    Bad("moe.route", "ids of float32", lambda: moe.route(torch.zeros(2, 2), 4)),
    Bad("moe.combine", "too few rows", lambda: moe.combine(normal(3, 8), ends(0, 1, 2, 3).view(2, 2), None)),
    Bad("moe.combine", "a row that there is not", lambda: moe.combine(normal(4, 8), ends(0, 1, 2, 4).view(2, 2), None),
        "not looked at: the slot adds nothing, and no access outside of the tensors"),
    Bad("moe.gather_quantize", "a row of two slots",
        lambda: moe.gather_quantize(normal(2, 128), ends(0, 1, -2, 3).view(2, 2), FP8_BLOCK), UNSEEN),
    # checkpoints
    Bad("Checkpoint", "a file that was cut", file_of(b"\x10\0\0\0\0\0\0\0{")),
    Bad("Checkpoint", "an index that leads out of the folder", file_of(
        b'{"weight_map": {"a": "../a.safetensors"}}', "model.safetensors.index.json")),
    Bad("Checkpoint", "an index that is no JSON", file_of(b"{", "model.safetensors.index.json")),
    Bad("Checkpoint", "an empty folder", file_of(b"", "readme.txt")),
    Bad("checkpoints.from_compressed_tensors", "a global scale of 0", lambda: checkpoints.from_compressed_tensors(
        fp4(), torch.ones((4, 2)).to(torch.float8_e4m3fn), torch.zeros(1)), "not looked at: the scale is Inf"),
    Bad("checkpoints.from_torch", "a scale for each row of FP8", lambda: checkpoints.from_torch(
        b().data[0], torch.ones(N, 1))),
    Bad("checkpoints.from_torch", "tiles of another shape", lambda: checkpoints.from_torch(
        fp4(128, 128), torch.zeros((64, 16), dtype=torch.uint8))),
    # commands
    Bad("padless fuzz", "no problems", lambda: run_fuzz(problems=0, backend="reference")),
    Bad("padless fuzz", "text that is no problem", lambda: run_fuzz(repeat="gemm", backend="reference")),
)  # fmt: skip


def rows(lines: Iterable[Bad]) -> list[str]:
    """Rows of the table in Markdown."""
    found = []
    for line in lines:
        sentence = line.sentence().replace("|", "\\|")
        found.append(f"| `{line.call}` | {line.what} | {sentence} | {line.gpu} |")
    return found


def table() -> str:
    """The table in Markdown."""
    heading = ["| call | what is bad | on a CPU | on a GPU |", "|---|---|---|---|"]
    return "\n".join([*heading, *rows(LINES)]) + "\n"


def write(page: Path) -> None:
    """Puts the table between the marks of the page."""
    before, rest = page.read_text().split("<!-- table:begin -->\n")
    page.write_text(f"{before}<!-- table:begin -->\n{table()}<!-- table:end -->{rest.split('<!-- table:end -->')[1]}")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write(Path(__file__).parents[2] / "docs" / "bad_input.md")
    else:
        print(table(), end="")
