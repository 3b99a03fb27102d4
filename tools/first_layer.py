"""Seconds from `import padless` to the end of a process' first layer, with padless-cubins and without.

    python tools/first_layer.py OUT.json                 on a GPU; about 100 s
    python tools/first_layer.py OUT.json --cubins DIR    with a folder that holds padless_cubins, else it is built first

Every process has a kernel cache of its own that is empty, and Triton's cache empty or filled by the process before it.
With cubins nothing may be compiled, and all processes of as many tokens must give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768  # Qwen3-30B
CASES = (  # name, with cubins, whose Triton cache
    ("with cubins, all caches empty", True, "first"),
    ("with cubins, Triton's cache filled", True, "first"),
    ("without, all caches empty", False, "second"),
    ("without, Triton's cache filled", False, "second"),
)


def first_layer(tokens: int, device: str) -> dict[str, Any]:
    """One process' measurement: torch is imported and its device ready, the operands drawn, then the clock starts."""
    import torch

    generator = torch.Generator(device).manual_seed(7)

    def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (EXPERTS, n, k), dtype=torch.uint8, device=device, generator=generator)
        codes = torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)  # no NaN
        scales = torch.rand((EXPERTS, n // 128, k // 128), device=device, generator=generator) + 0.5
        return codes.view(torch.float8_e4m3fn), scales / (200 * k**0.5)

    drawn = [weights(2 * INTERMEDIATE, HIDDEN), weights(HIDDEN, INTERMEDIATE)]
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, generator=generator)
    shares, ids = torch.rand(tokens, EXPERTS, device=device, generator=generator).topk(TOP_K)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()

    start = time.perf_counter()
    import padless
    from padless.moe import moe

    imported = time.perf_counter()
    w13, w2 = (padless.BlockScaledTensor(codes, scale, padless.FP8_BLOCK) for codes, scale in drawn)
    y = moe(x, ids, shares, w13, w2)
    wait()
    end = time.perf_counter()
    if not (bool(y.isfinite().all()) and bool(y.any())):
        raise ValueError("the layer's output is not finite, or zeros")
    kept = Path(os.environ["PADLESS_CACHE_DIR"])
    return {
        "tokens": tokens,
        "import_s": round(imported - start, 3),
        "first_layer_s": round(end - imported, 3),
        "in_all_s": round(end - start, 3),
        "compiled": len(list(kept.rglob("*.cubin"))),
        "bits": hashlib.sha256(y.view(torch.uint8).cpu().numpy().tobytes()).hexdigest(),
    }


def in_process(cubins: Path, with_cubins: bool, triton: Path, tokens: int, device: str) -> dict[str, Any]:
    """`first_layer` in a new process with an empty kernel cache."""
    with tempfile.TemporaryDirectory() as cache:
        path = [str(ROOT / "src"), *([str(cubins)] if with_cubins else []), os.environ.get("PYTHONPATH", "")]
        given = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PADLESS_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": str(triton),
            "PADLESS_CUBINS": "1" if with_cubins else "0",
        }
        command = [sys.executable, __file__, "--process", str(tokens), "--device", device]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems_of(found: list[dict[str, Any]]) -> list[str]:
    """What must not be: compiling where cubins are installed, none where not, other bits."""
    wrong = [f"{f['case']}: {f['compiled']} kernels compiled" for f in found if f["cubins"] == bool(f["compiled"])]
    for tokens in sorted({f["tokens"] for f in found}):
        bits = {f["bits"] for f in found if f["tokens"] == tokens}
        wrong += [f"{tokens} tokens: {len(bits)} different results"] if len(bits) > 1 else []
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 2048])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.process:
        print(json.dumps(first_layer(given.process, given.device)))
        return 0
    if given.out is None:
        parser.error("OUT.json is missing")
    with tempfile.TemporaryDirectory() as work:
        cubins, built_s = given.cubins, None
        if cubins is None:
            cubins, start = Path(work) / "cubins", time.perf_counter()
            build = [sys.executable, str(ROOT / "tools" / "build_cubins.py"), str(cubins), "--model", "Qwen3-30B"]
            build += ["--arch", "sm_90a", "--tokens", str(max(given.tokens))]
            subprocess.run(build, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
            built_s = round(time.perf_counter() - start, 1)
        found: list[dict[str, Any]] = []
        for tokens in given.tokens:
            for name, with_cubins, triton in CASES:
                one = in_process(cubins, with_cubins, Path(work) / f"{triton}{tokens}", tokens, given.device)
                found.append({"case": name, "cubins": with_cubins} | one)
                print(f"{tokens:5} tokens, {name}: {one['in_all_s']} s", flush=True)
    from padless.testing import machine

    wrong = problems_of(found)
    record = {
        "kind": "first layer",
        "machine": machine.describe(),
        "built_s": built_s,
        "found": found,
        "problems": wrong,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(wrong) or f"nothing wrong; {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
