"""vLLM's whole engine on a GPU with quantization="padless": greedy tokens, CUDA graphs, batch invariance.

Engines run in processes of their own (support/vllm_engine.py), all started at once; support/engine_reference.py judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("vllm._C_stable_libtorch") is None,
        reason="needs vLLM with its compiled operators",
    ),
]
SECONDS = float(os.environ.get("PADLESS_ENGINE_SECONDS", "600"))  # until an engine must have served
MAX_TOKENS = 24
TRITON = {"attention_backend": "TRITON_ATTN"}
EAGER = {"quantization": "padless", "enforce_eager": True}
GRAPHS = {
    "quantization": "padless",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}


@dataclass(frozen=True)
class Run:
    model: str
    engine: dict[str, Any]
    watched: str | None = None  # the checkpoint whose tensors the experts are compared with
    alone: bool = False
    median: float = 0.02  # of the tokens' errors of logits, at most


# Engines of one process, in their order.
PROCESSES: dict[str, tuple[dict[str, str], dict[str, Run]]] = {
    "plain": (
        {},
        {
            "eager": Run("fp8", EAGER, watched="fp8"),
            "graphs": Run("fp8", GRAPHS),
            "eager_triton": Run("fp8", EAGER | TRITON, watched="fp8"),
            "graphs_triton": Run("fp8", GRAPHS | TRITON),
        },
    ),
    "invariant": (
        {"VLLM_BATCH_INVARIANT": "1"},
        {
            "invariant": Run("fp8", EAGER | TRITON, watched="fp8", alone=True),
            "invariant_graphs": Run("fp8", GRAPHS | TRITON, alone=True),
        },
    ),
    "others": (
        {},
        {
            "own_experts": Run("fp8", {"enforce_eager": True, "moe_backend": "triton"}),
            "exchanged": Run("exchanged", EAGER, watched="fp8"),
            # Every linear layer rounds to FP8, where a last bit of bfloat16 decides between codes 6% apart.
            "linear": Run("linear", EAGER, watched="linear", median=0.04),
        },
    ),
    "gpt_oss": ({}, {"gpt_oss": Run("gpt_oss", EAGER | TRITON), "gpt_oss_graphs": Run("gpt_oss", GRAPHS | TRITON)}),
    "compiled": ({}, {"compiled": Run("fp8", {"quantization": "padless"})}),
}
RUNS = {name: run for _, runs in PROCESSES.values() for name, run in runs.items()}


def write_checkpoints(root: Path) -> None:
    """Qwen3-MoE in FP8, with linear layers in FP8 too, and with experts 0 to 3 exchanged; gpt-oss in MXFP4."""
    from support.hub_checkpoints import write_bf16, write_fp8, write_mxfp4

    write_bf16("qwen3_moe", root / "bf16")
    write_fp8(root / "bf16", root / "fp8")
    write_fp8(root / "bf16", root / "linear", linear=True)
    write_mxfp4(write_bf16("gpt_oss", root / "gpt_oss_bf16"), root / "gpt_oss")
    target = write_fp8(root / "bf16", root / "exchanged") / "model.safetensors"
    tensors = load_file(target)
    exchanged = {}
    for name in tensors:
        for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
            if f".experts.{one}.down_proj." in name:
                exchanged[name] = tensors[name.replace(f".experts.{one}.", f".experts.{other}.")]
    save_file(tensors | exchanged, target, metadata={"format": "pt"})


def write_settings(root: Path, name: str) -> None:
    """RUN.json for each run, for which the processes wait."""
    from support.engine_reference import prompts

    run = RUNS[name]
    settings = {
        "model": str(root / run.model),
        "prompts": prompts(),
        "max_tokens": MAX_TOKENS,
        "engine": run.engine,
        "watched": run.watched and str(root / run.watched),
        "alone": run.alone,
    }
    (root / f"{name}.part").write_text(json.dumps(settings))
    (root / f"{name}.part").rename(root / f"{name}.json")


def start(root: Path, name: str) -> subprocess.Popen[str]:
    """The process of PROCESSES[name]: it writes RUN.pt for each of its runs, and NAME.log."""
    environment, runs = PROCESSES[name]
    files = [str(root / f"{run}.{end}") for run in runs for end in ("json", "pt")]
    with (root / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "support.vllm_engine", *files],
            stdout=log,
            stderr=log,
            text=True,
            env=os.environ | environment,
            cwd=root,
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints, settings, results and logs."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """served(run): what its engine gave. Fails with the end of the log if it gave nothing."""
    processes = {name: start(root, name) for name in PROCESSES}
    deadline = time.monotonic() + SECONDS

    def get(run: str) -> dict[str, Any]:
        name = next(name for name, (_, runs) in PROCESSES.items() if run in runs)
        while not (root / f"{run}.pt.done").exists() and processes[name].poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if not (root / f"{run}.pt.done").exists():
            lines = (root / f"{name}.log").read_text().splitlines()
            pytest.fail(f"{run}: no result\n" + "\n".join(line[:300] for line in lines[-40:]))
        result: dict[str, Any] = torch.load(root / f"{run}.pt")
        print(run, "seconds", [round(s, 1) for s in result["seconds"]])
        return result

    try:
        write_checkpoints(root)  # while the processes import
        for run in RUNS:
            write_settings(root, run)
        yield get
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def reference(root: Path, served: Any) -> Any:
    """Logits of transformers."""
    from support.engine_reference import Reference

    return Reference(root)


@pytest.mark.parametrize("run", [n for n in RUNS if n != "exchanged"])
def test_an_engine_serves_what_transformers_computes(run: str, served: Any, reference: Any) -> None:
    from support.engine_reference import LENGTHS, well

    got = served(run)["together"]
    assert [len(tokens) for tokens, _ in got] == [MAX_TOKENS] * len(LENGTHS)
    assert all(torch.equal(logits.argmax(-1), torch.tensor(tokens)) for tokens, logits in got)
    assert well(got, reference.logits(RUNS[run].model, got), RUNS[run].median)


def test_exchanged_experts_are_seen(served: Any, reference: Any) -> None:
    """The judge of the test above refuses an engine half of whose experts have each other's down projections."""
    from support.engine_reference import well

    result = served("exchanged")
    assert well(result["together"], reference.logits("exchanged", result["together"]))
    assert not well(result["together"], reference.logits("fp8", result["together"]))
    assert not all(equal for _, equal in result["watched"])


@pytest.mark.parametrize("run", [n for n, each in RUNS.items() if each.watched == each.model])
def test_each_call_of_the_experts_has_the_bits_of_padless(run: str, served: Any) -> None:
    """Prefills and decode steps of two layers, with the checkpoint's tensors as padless reads them."""
    from support.engine_reference import LENGTHS

    calls = served(run)["watched"]
    assert len(calls) >= 2 * MAX_TOKENS
    assert all(equal for _, equal in calls)
    sizes = {tokens for tokens, _ in calls}
    assert len(LENGTHS) in sizes  # decode
    assert max(sizes) > 64  # several prompts in one prefill


@pytest.mark.parametrize("run", ["invariant", "invariant_graphs"])
def test_a_request_alone_and_among_others(run: str, served: Any) -> None:
    """Under VLLM_BATCH_INVARIANT=1 each prompt has the same tokens and the same bits of logits by itself."""
    result = served(run)
    for (tokens, logits), (tokens_alone, logits_alone) in zip(result["together"], result["alone"], strict=True):
        assert tokens == tokens_alone
        assert torch.equal(logits, logits_alone)


def test_graphs_and_eager_have_the_same_bits(served: Any) -> None:
    """Under VLLM_BATCH_INVARIANT=1, where the rows that fill up a graph's batch change nothing."""
    for (tokens, logits), (want, want_logits) in zip(
        served("invariant_graphs")["together"], served("invariant")["together"], strict=True
    ):
        assert tokens == want
        assert torch.equal(logits, want_logits)
