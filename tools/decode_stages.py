"""Clock times of the stages of a decoding layer in one launch on a Hopper GPU.

    python tools/decode_stages.py OUT.json [--models gpt-oss-120b ...]      about 35 s

Puts stamps of the GPU's clock, which an H200 counts in steps of 256 ns, into a copy of the kernels' sources, and runs
layers of four models in a CUDA graph by it. Times are nanoseconds after the launch ahead had ended: the least, the
median and the largest of the CTAs, medians of 20 replays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest import mock

import padless

_KERNEL, _FP4_KERNEL, _FIRST_OF_CTA = "sm90_moe_decode.cu", "sm90_moe_decode_fp4.cu", "threadIdx.x == 0"
_ENTERED = ("entered", "    __syncthreads();\n    griddepcontrol_wait();", False, _FIRST_OF_CTA)
_WAITED = ("waited", "    const Layout layout(shared, problem);\n", False, _FIRST_OF_CTA)
_LOADS_OF_SECOND = """    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) break;
        for (int stripe"""
_AWAITED = "    wait_for_hidden(hidden, blocks, warp, lane);\n"
_READ_NO_MORE = "        bar_sync(CODES_BARRIER, NUM_CONSUMERS);  // rows of x are read no more\n"
# Of a kernel by its format: (stage, file, text that is there, whether the stamp comes behind it, the thread).
STAGES = {
    "FP8_BLOCK": (
        (_ENTERED[0], _KERNEL, *_ENTERED[1:]),
        (_WAITED[0], _KERNEL, *_WAITED[1:]),
        ("routed", _KERNEL, "        load_weights(", False, "warp == NUM_CONSUMER_WARPS && lane == 0"),
        ("codes of x", _KERNEL, "        mbarrier_wait(routed, 0);\n        first_product(", False, _FIRST_OF_CTA),
        ("first product", _KERNEL, "        const StripeUnit unit = ", False, _FIRST_OF_CTA),
        ("codes of hidden rows", _KERNEL, "        second_product(", False, _FIRST_OF_CTA),
        ("end", _KERNEL, "lane, unit, position);\n", True, _FIRST_OF_CTA),
        ("hidden rows are there", "codes.cuh", _AWAITED, True, _FIRST_OF_CTA),
        ("first loads issued", "load.cuh", _LOADS_OF_SECOND, False, "pipeline == 0 && lane == 0"),
    ),
    "MXFP4": (
        (_ENTERED[0], _FP4_KERNEL, *_ENTERED[1:]),
        (_WAITED[0], _FP4_KERNEL, *_WAITED[1:]),
        ("rows of x", _FP4_KERNEL, "        mbarrier_wait(routed, 0);\n        Ring ring", False, _FIRST_OF_CTA),
        ("routed", _FP4_KERNEL, "        Ring ring(", False, _FIRST_OF_CTA),
        ("first loads issued", _FP4_KERNEL, "        Consumer consumer{", False, _FIRST_OF_CTA),
        ("first product", _FP4_KERNEL, _READ_NO_MORE, False, _FIRST_OF_CTA),
        ("first product of all warps", _FP4_KERNEL, _READ_NO_MORE, True, _FIRST_OF_CTA),
        ("hidden rows", _FP4_KERNEL, "        second_product(", False, _FIRST_OF_CTA),
        ("second product", "fp4/consume.cuh", "        const int outputs = ", False, _FIRST_OF_CTA),
        ("end", _FP4_KERNEL, "        second_product(consumer);\n", True, _FIRST_OF_CTA),
    ),
}  # fmt: skip
STAMP = """__device__ __forceinline__ void stamp(int stage) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    reinterpret_cast<volatile unsigned long long*>(STAMPS_AT)[blockIdx.x * 16 + stage] = now;
}
"""
MOST_CTAS = 256
_INNER = "PADLESS_STAMPED"


def with_stamps(package: Path, into: Path) -> Path:
    """A copy of the package whose decoding kernels have stamps, in folder ``into``; they go to the address STAMPS_AT."""
    copy = Path(shutil.copytree(package, into / "padless"))
    kernel = copy / "kernels" / "sm90_moe_decode"
    for stages in STAGES.values():
        for stage, (name, file, line, is_behind, thread) in enumerate(stages):
            source = (kernel / file).read_text()
            if line not in source:
                raise ValueError(f"no place for the stamp {name!r}: {file} has no line {line!r}")
            stamp = f"        if ({thread}) stamp({stage});\n"
            (kernel / file).write_text(source.replace(line, line + stamp if is_behind else stamp + line, 1))
    common = (kernel / "common.cuh").read_text()
    (kernel / "common.cuh").write_text(common.replace("struct Control {", STAMP + "struct Control {", 1))
    return copy


def measure(out: Path, models: list[str]) -> None:
    """Runs in the process whose padless is the copy."""
    import torch

    from padless.bench.cases.layer import padless_layer
    from padless.bench.cases.problems.decoding import MODELS, DecodingPoint, layers_of, make_stack
    from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
    from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
    from padless.moe import decode
    from padless.testing import machine
    from padless.testing.timing import capture

    stamps = torch.zeros(MOST_CTAS, 16, dtype=torch.int64, device="cuda")
    address = f"#define STAMPS_AT {stamps.data_ptr():#x}ull\n"
    preludes = {config: config.prelude for config in (MoeDecodeConfig, MoeDecodeFp4Config)}
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    with ExitStack() as patches:
        for config, prelude in preludes.items():
            patches.enter_context(
                mock.patch.object(config, "prelude", lambda given, prelude=prelude: prelude(given) + address)
            )
        patches.enter_context(mock.patch.object(decode, "is_faster", return_value=True))
        for name in models:
            experts, top_k, hidden, width, format = MODELS[name]
            layers = min(layers_of(top_k, hidden, width, format), 12)
            stack = make_stack(DecodingPoint(name, 1, experts, top_k, hidden, width, format, layers), 0, "cuda")
            for tokens in (1, 2, 3, 4) if format == "MXFP4" else (1, 2, 4, 8):
                stack = stack.with_tokens(tokens, 100)
                graph = capture(lambda: [padless_layer(layer) for layer in stack.layers])  # noqa: B023
                times, seen = [], []
                for replay in range(24):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    if replay < 4:
                        continue
                    times.append(1e3 * start.elapsed_time(end) / layers)
                    here = stamps[:num_sms].cpu().double()
                    seen.append(here - here[:, 1].min())
                of_stages = torch.stack(seen)
                stages = {
                    stage: [int(v.median()) for v in (at.amin(1), at.median(1).values, at.amax(1))]
                    for index, (stage, *_) in enumerate(STAGES[format])
                    for at in [of_stages[:, :, index]]
                }
                found.append({"model": name, "tokens": tokens, "us": round(median(times), 2), "stages_ns": stages})
                print(json.dumps(found[-1]), flush=True)
    out.write_text(
        json.dumps({"kind": "decode stages", "machine": machine.describe(), "found": found}, indent=1) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen3-30B", "Qwen3.5-35B", "GLM-4.5-Air", "gpt-oss-120b"])
    given = parser.parse_args()
    if _INNER in os.environ:
        measure(given.out, given.models)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        with_stamps(Path(padless.__file__).parent, Path(folder))
        environment = os.environ | {"PYTHONPATH": folder, _INNER: "1"}
        return subprocess.run(
            [sys.executable, __file__, str(given.out.resolve()), "--models", *given.models],
            env=environment,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
