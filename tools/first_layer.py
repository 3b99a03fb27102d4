"""Seconds from `import padless` to the end of a process' first layer, with padless-cubins and without.

    python tools/first_layer.py OUT.json                 on a GPU; about three minutes
    python tools/first_layer.py OUT.json --cubins DIR    with a folder that holds padless_cubins, else it is built first

Every process has separate caches, padless' and Triton's, that are empty; the last case has those that the one before
it filled. With cubins nothing may be compiled, by Triton neither, and the layer must be there within the target; all
processes of as many tokens must give the same bits.
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
WITH, WITHOUT, FILLED = "with cubins, all caches empty", "without, all caches empty", "without, caches filled"
CASES = (WITH, WITHOUT, FILLED)
TARGET_S = 3.0  # from torch's import to the end of the first layer, with cubins


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
    kept = {name: Path(os.environ[f"{name.upper()}_CACHE_DIR"]) for name in ("padless", "triton")}
    return {
        "tokens": tokens,
        "import_s": round(imported - start, 3),
        "first_layer_s": round(end - imported, 3),
        "in_all_s": round(end - start, 3),
        "cached": {name: len(list(folder.rglob("*.cubin"))) for name, folder in kept.items()},
        "bits": hashlib.sha256(y.view(torch.uint8).cpu().numpy().tobytes()).hexdigest(),
    }


def in_process(cubins: Path | None, caches: Path, tokens: int, device: str) -> dict[str, Any]:
    """`first_layer` in a new process. caches: the folder of its two caches. cached: the kernels in them at its end."""
    path = [str(ROOT / "src"), *([] if cubins is None else [str(cubins)]), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PADLESS_CACHE_DIR": str(caches / "padless"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PADLESS_CUBINS": "0" if cubins is None else "1",
    }
    command = [sys.executable, __file__, "--process", str(tokens), "--device", device]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems_of(found: list[dict[str, Any]]) -> list[str]:
    """Complaints: compiling, or more than the target, with cubins; nothing compiled without; other bits."""
    wrong = []
    for one in found:
        name = f"{one['tokens']} tokens, {one['case']}"
        if (one["case"] == WITH) == any(one["cached"].values()):  # one token's layer has no kernel of Triton's
            wrong.append(f"{name}: compiled kernels in {one['cached']}")
        if one["case"] == WITH and one["in_all_s"] > TARGET_S:
            wrong.append(f"{name}: {one['in_all_s']} s, and {TARGET_S} are the target")
    for tokens in sorted({f["tokens"] for f in found}):
        bits = {f["bits"] for f in found if f["tokens"] == tokens}
        wrong += [f"{tokens} tokens: {len(bits)} different results"] if len(bits) > 1 else []
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 2048, 8192])
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
            build += ["--format", "FP8_BLOCK", "--arch", "sm_90a", "--tokens", str(max(given.tokens))]
            subprocess.run(build, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True)
            built_s = round(time.perf_counter() - start, 1)
        found: list[dict[str, Any]] = []
        for tokens in given.tokens:
            for name in CASES:
                caches = Path(work) / f"{'with' if name == WITH else 'without'}{tokens}"
                one = in_process(cubins if name == WITH else None, caches, tokens, given.device)
                found.append({"case": name} | one)
                print(f"{tokens:5} tokens, {name}: {one['in_all_s']} s", flush=True)
    from padless.testing import machine

    wrong = problems_of(found)
    record = {
        "kind": "first layer",
        "machine": machine.describe(),
        "built_s": built_s,
        "target_s": TARGET_S,
        "found": found,
        "problems": wrong,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(wrong) or f"nothing wrong; {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
