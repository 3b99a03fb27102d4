"""Clock times of the stages of decoding layers on a Hopper GPU, in one launch and in several.

    python tools/decode_stages.py OUT.json [--models gpt-oss-120b ...] [--tokens 1 4] [--repacked]      about 60 s

Puts stamps of the GPU's clock, which an H200 counts in steps of 256 ns, into a copy of the kernels' sources, and runs
layers of some models in a CUDA graph by it, in one launch and in several where both can. Times are nanoseconds after
the launch ahead of the layer had ended: the least, the median and the largest of the CTAs, medians of 20 replays. Of
several launches a stage is named by its launch: routing, first product, second product, sum.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import padless


class Place(NamedTuple):
    """A stamp: its stage, next to which text of which file, and the condition of the threads that store it."""

    stage: str
    file: str
    line: str
    is_behind: bool = False
    thread: str = "threadIdx.x == 0"


_DECODE, _DECODE_FP4 = "sm90_moe_decode/sm90_moe_decode.cu", "sm90_moe_decode/sm90_moe_decode_fp4.cu"
_WAIT = "    __syncthreads();\n    griddepcontrol_wait();"
_ROUTED = "    const Layout layout(shared, problem);\n"
_LOADS_OF_SECOND = """    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) break;
        for (int stripe"""
_AWAITED = "    wait_for_hidden(hidden, blocks, warp, lane);\n"
_READ_NO_MORE = "        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // rows of x are read no more\n"
# Of the layer in one launch, by the format of its weights; the second stage is that from which times count.
ONE_LAUNCH = {
    "FP8_BLOCK": (
        Place("entered", _DECODE, _WAIT),
        Place("waited", _DECODE, _ROUTED),
        Place("routed", _DECODE, "        load_weights(", thread="warp == NUM_CONSUMER_WARPS && lane == 0"),
        Place("codes of x", _DECODE, "        mbarrier_wait(routed, 0);\n        first_product("),
        Place("first product", _DECODE, "        const StripeUnit unit = "),
        Place("codes of hidden rows", _DECODE, "        second_product("),
        Place("end", _DECODE, "lane, unit, position);\n", True),
        Place("hidden rows are there", "sm90_moe_decode/codes.cuh", _AWAITED, True),
        Place("first loads issued", "sm90_moe_decode/load.cuh", _LOADS_OF_SECOND, thread="pipeline == 0 && lane == 0"),
    ),
    "MXFP4": (
        Place("entered", _DECODE_FP4, _WAIT),
        Place("waited", _DECODE_FP4, _ROUTED),
        Place("rows of x", _DECODE_FP4, "        mbarrier_wait(routed, 0);\n        Ring ring"),
        Place("routed", _DECODE_FP4, "        Ring ring("),
        Place("first loads issued", _DECODE_FP4, "        Consumer consumer{"),
        Place("first product", _DECODE_FP4, _READ_NO_MORE),
        Place("first product of all warps", _DECODE_FP4, _READ_NO_MORE, True),
        Place("hidden rows", _DECODE_FP4, "        second_product("),
        Place("second product", "sm90_moe_decode/fp4/consume.cuh", "        const int outputs = "),
        Place("end", _DECODE_FP4, "        second_product(consumer);\n", True),
    ),
}  # fmt: skip


def _product(main: str, no_tile: str, rows: str, last_tile: str, end: str) -> tuple[Place, ...]:
    """Places of a kernel of either product; a producer's stages are one thread's."""
    load = main.partition("/")[0] + "/load.cuh"
    return (
        Place("entered", main, "    extern __shared__ __align__(1024) uint8_t shared_bytes[];\n"),
        Place("first weights asked for", load, no_tile, True, "true"),
        Place("rows are there", load, rows, True, "true"),
        Place("last loads asked for", load, "        ahead = 0;\n        reader.release();\n", False, "true"),
        Place("last tile", main, last_tile),
        Place("end", main, end, True),
    )


_TRANSPOSED = (
    "    if (tile.rows == 0) return;\n",
    "    griddepcontrol_wait();\n    bool is_tile = reader.next(tile);\n",
    "        reader.advance();\n    }\n    if (warp == 0 && lane == 0) cp_async",
    "    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();\n",
)
# Of the products, by the kernel's folder.
PRODUCTS = {
    "sm90_fp8_few": _product("sm90_fp8_few/sm90_fp8_few_grouped_gemm.cu", *_TRANSPOSED),
    "sm90_bf16": _product("sm90_bf16/sm90_bf16_grouped_gemm.cu", *_TRANSPOSED),
    "sm90_fp8": _product(
        "sm90_fp8/sm90_fp8_grouped_gemm.cu",
        "    if (tile.rows == 0) return 0;\n",
        "    if (is_ready) {\n        griddepcontrol_wait();\n",
        "        reader.advance();\n        if constexpr (SCALES_K_MAJOR) {\n",
        "    if (CONSUMERS_STORE && warp == 0 && lane == 0) cp_async_bulk_wait_group_all();\n",
    ),
}
# Of the passes around them, in Triton.
PASSES = {
    "routing": (
        Place("entered", "moe/triton/quantize_rows.py", "    begin(PROGRAMMATIC)\n"),
        Place("waited", "moe/triton/quantize_rows.py", "    begin(PROGRAMMATIC)\n", True),
        Place("end", "moe/triton/quantize_rows.py", "\n\n@triton.jit\ndef _load("),
    ),
    "sum": (
        Place("entered", "moe/triton/combine.py", "    begin(PROGRAMMATIC)\n"),
        Place("waited", "moe/triton/combine.py", "    begin(PROGRAMMATIC)\n", True),
        Place("end", "moe/triton/combine.py", '\n\n@triton.jit(do_not_specialize=["rows"])\ndef _combine_backward('),
    ),
}
LAUNCHES = ("routing", "first product", "second product", "sum")
_ALL = len(LAUNCHES)  # the number of the launch that is a whole layer
MOST_CTAS, MOST_STAGES = 256, 16
# A first product has gate and up, wherever a layer does.
_OF_PRODUCT = """#if EPILOGUE_IS_QUANT
constexpr int LAUNCH_OF_LAYER = GLU == GLU_NONE ? 2 : 1;
#else
constexpr int LAUNCH_OF_LAYER = 2;
#endif
"""
_TRITON_STAMP = f'''
import os

_STAMPS_AT: tl.constexpr = tl.constexpr(int(os.environ.get("PADLESS_STAMPS_AT", "0")))


@triton.jit
def stamp(LAUNCH: tl.constexpr, STAGE: tl.constexpr):
    """Stores the GPU's clock as one stage of a launch."""
    cta = LAUNCH * {MOST_CTAS} + tl.program_id(0) % {MOST_CTAS}
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    at = tl.full((), _STAMPS_AT, tl.int64) + (cta * {MOST_STAGES} + STAGE) * 8
    tl.store(at.to(tl.pointer_type(tl.int64)), now)
'''
_INNER = "PADLESS_STAMPED"
_ENTERED_AHEAD_NS = 6000  # before the launch ahead of the layer has ended


def cuda_stamp(launch: str) -> str:
    """Device code of the function that stamps stages of a launch; a comment says in PTX which stage it is."""
    return f"""template <int STAGE>
__device__ __forceinline__ void stamp() {{
#ifdef STAMPS_AT
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer; // stamp %1 %2" : "=l"(now) : "n"({launch}), "n"(STAGE) : "memory");
    const int cta = {launch} * {MOST_CTAS} + blockIdx.x % {MOST_CTAS};
    reinterpret_cast<volatile unsigned long long*>(STAMPS_AT)[cta * {MOST_STAGES} + STAGE] = now;
#endif
}}
"""


def _insert(root: Path, file: str, line: str, text: str, what: str, *, is_behind: bool = True) -> None:
    """Puts ``text`` next to the one ``line`` of a file below ``root``."""
    source = (root / file).read_text()
    if (count := source.count(line)) != 1:
        raise ValueError(f"no place for {what}: {file} has {count or 'no'} line {line!r}")
    (root / file).write_text(source.replace(line, line + text if is_behind else text + line))


def _put(root: Path, places: Sequence[Place], stamp: str) -> None:
    """Puts the stamps of a launch into files below ``root``. stamp: a stage's, of its thread and its number."""
    for stage, (name, file, line, is_behind, thread) in enumerate(places):
        text = stamp.format(thread=thread, stage=stage)
        _insert(root, file, line, text, f"the stamp {name!r}", is_behind=is_behind)


def with_stamps(package: Path, into: Path) -> Path:
    """A copy of the package whose kernels have stamps, in folder ``into``; they go to the address STAMPS_AT."""
    copy = Path(shutil.copytree(package, into / "padless"))
    kernels, launches = copy / "kernels", copy / "quantization" / "triton" / "launches.py"
    for places in (*ONE_LAUNCH.values(), *PRODUCTS.values()):
        _put(kernels, places, "        if ({thread}) stamp<{stage}>();\n")
    definitions = dict.fromkeys(PRODUCTS, (f"{_OF_PRODUCT}{cuda_stamp('LAUNCH_OF_LAYER')}", "load.cuh"))
    definitions["sm90_moe_decode"] = (cuda_stamp(str(_ALL)), "common.cuh")
    for folder, (definition, file) in definitions.items():
        _insert(kernels, f"{folder}/{file}", "#pragma once\n", definition, "the function that stamps")
    for launch, places in PASSES.items():
        _put(copy, places, f"\n    stamp({LAUNCHES.index(launch)}, {{stage}})\n")
        names = "from padless.quantization.triton.launches import "
        _insert(copy, places[0].file, names, "stamp, ", "the import of stamp")
    launches.write_text(launches.read_text() + _TRITON_STAMP)
    return copy


def stages_of(format: str, in_one: bool) -> Iterator[tuple[str, int, int]]:
    """(name, launch, stage) of what is stamped of a layer."""
    if in_one:
        yield from ((place.stage, _ALL, stage) for stage, place in enumerate(ONE_LAUNCH[format]))
        return
    product = PRODUCTS["sm90_fp8"]  # every kernel has the same
    for launch, places in enumerate((PASSES["routing"], product, product, PASSES["sum"])):
        yield from ((f"{LAUNCHES[launch]}: {place.stage}", launch, stage) for stage, place in enumerate(places))


def timed(graph: Any, stamps: Any, layers: int, stages: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """Microseconds of a layer of a graph, and nanoseconds of the last one's stages."""
    import torch

    times: list[float] = []
    seen: dict[str, list[list[Any]]] = {name: [] for name, *_ in stages}
    for replay in range(24):
        stamps.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay < 4:
            continue
        times.append(1e3 * start.elapsed_time(end) / layers)
        here = stamps.cpu()
        waited = here[stages[1][1], :, stages[1][2]]
        begin = waited[waited > 0].min()
        for name, launch, stage in stages:
            at = here[launch, :, stage] - begin
            # CTAs without a tile in the last layer have stamps of an earlier one, or none.
            at = at[at > -_ENTERED_AHEAD_NS].double()
            if at.numel():
                seen[name].append([at.min(), at.median(), at.max()])
    of_stages = {name: [int(median(values)) for values in zip(*of, strict=True)] for name, of in seen.items() if of}
    return {"us": round(median(times), 2), "stages_ns": of_stages}


def measure(out: Path, models: list[str], tokens: list[int], *, repacked: bool) -> None:
    """Runs in the process whose padless is the copy."""
    import torch

    stamps = torch.zeros(_ALL + 1, MOST_CTAS, MOST_STAGES, dtype=torch.int64, device="cuda")
    os.environ["PADLESS_STAMPS_AT"] = str(stamps.data_ptr())  # before the passes are imported

    from padless.bench.cases.layer import padless_layer
    from padless.bench.cases.problems.decoding import MODELS, DecodingPoint, layers_of, make_stack
    from padless.kernels import remembered, replay
    from padless.kernels.sm90_bf16.config import Sm90Bf16Config
    from padless.kernels.sm90_fp8.config import Sm90Fp8Config
    from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
    from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
    from padless.layouts import to_repacked
    from padless.moe import decode
    from padless.testing import machine
    from padless.testing.timing import capture

    address = f"#define STAMPS_AT {stamps.data_ptr():#x}ull\n"
    configs: tuple[Any, ...] = (MoeDecodeConfig, MoeDecodeFp4Config, Sm90Fp8Config, Sm90Bf16Config)
    found = []
    with ExitStack() as patches:
        for config in configs:
            prelude = config.prelude
            patches.enter_context(
                mock.patch.object(config, "prelude", lambda given, prelude=prelude: prelude(given) + address)
            )
        for name in models:
            experts, top_k, hidden, width, format = MODELS[name]
            layers = min(layers_of(top_k, hidden, width, format), 12)
            stack = make_stack(DecodingPoint(name, 1, experts, top_k, hidden, width, format, layers), 0, "cuda")
            if repacked and format == "MXFP4":
                packed = [
                    replace(layer, w13=to_repacked(layer.w13), w2=to_repacked(layer.w2)) for layer in stack.layers
                ]
                stack.layers[:] = packed
            for count in tokens:
                stack = stack.with_tokens(count, 100)  # the same experts in every layer, so that each is like the last
                stack.layers[:] = [replace(layer, ids=stack.layers[0].ids) for layer in stack.layers]
                for in_one in (True, False):
                    remembered.forget()
                    replay._REPLAYS.clear()
                    with mock.patch.object(decode, "is_faster", return_value=in_one):
                        graph = capture(lambda: [padless_layer(layer) for layer in stack.layers])  # noqa: B023
                    stamps.zero_()
                    graph.replay()
                    if in_one and not bool(stamps[_ALL].any()):
                        continue  # not such a layer
                    at = {"model": name, "tokens": count, "launches": 1 if in_one else _ALL, "bytes": stack.bytes}
                    found.append(at | timed(graph, stamps, layers, list(stages_of(format, in_one))))
                    print(json.dumps(found[-1]), flush=True)
    out.write_text(
        json.dumps({"kind": "decode stages", "machine": machine.describe(), "found": found}, indent=1) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen3-30B", "Qwen3.5-35B", "GLM-4.5-Air", "gpt-oss-120b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repacked", action="store_true", help="MXFP4 weights as padless.layouts.to_repacked has them")
    given = parser.parse_args()
    if _INNER in os.environ:
        measure(given.out, given.models, given.tokens, repacked=given.repacked)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        with_stamps(Path(padless.__file__).parent, Path(folder))
        environment = os.environ | {"PYTHONPATH": folder, _INNER: "1"}
        command = [sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
