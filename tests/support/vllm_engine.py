"""Engines of vLLM in a process of their own: greedy tokens and logits, and what the layers of experts computed.

    python -m support.vllm_engine settings.json result.pt [settings.json result.pt ..]

Settings: model (a folder), prompts (lists of token ids), max_tokens, engine (arguments of vllm.LLM beside those below),
alone (serve each prompt once more by itself), watched (a folder, or nothing: each call of `PadlessExperts.apply` is
compared, bit for bit, with `padless.moe` of that checkpoint's tensors). One engine is shut down before the next starts.
Settings may be written later: the process imports meanwhile.

The package's entry point is not needed: the plug-in is registered here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

# Tokens, and logits (tokens, vocabulary) float32, of one prompt.
Completion = tuple[list[int], torch.Tensor]
# Tokens of a call of the experts, and whether it had the bits of `padless.moe`.
Call = tuple[int, bool]
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.05,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, in which the experts can be watched
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}


def complete(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
    """Greedy completions of prompts that are served together."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    found = []
    for output in outputs:
        steps = output.outputs[0].logprobs
        logits = torch.tensor([[step[token].logprob for token in range(len(step))] for step in steps])
        found.append((list(output.outputs[0].token_ids), logits))
    return found


@contextmanager
def watch(folder: str) -> Iterator[list[Call]]:
    """In this block each call of the experts is compared with `padless.moe`; the list is filled with what is seen."""
    from vllm.platforms import current_platform

    from padless.checkpoints import Checkpoint
    from padless.integrations.checkpoints import load_experts
    from padless.integrations.vllm.experts import PadlessExperts
    from padless.moe import moe

    seen: list[Call] = []
    layers: dict[int, Any] = {}
    plain = PadlessExperts.apply

    def apply(self: Any, **named: Any) -> None:
        rows = named["hidden_states"].clone()  # the output may lie in its place
        plain(self, **named)
        if id(self) not in layers:  # layers are called in their order
            layers[id(self)] = load_experts(checkpoint, f"model.layers.{len(layers)}.mlp.experts")
        stored = layers[id(self)]
        want = moe(rows, named["topk_ids"], named["topk_weights"], stored.w13, stored.w2, **stored.options)
        seen.append((rows.shape[0], torch.equal(named["output"], want)))

    with Checkpoint(folder, device=current_platform.device_type) as checkpoint:
        PadlessExperts.apply = apply  # type: ignore[method-assign]
        try:
            yield seen
        finally:
            PadlessExperts.apply = plain  # type: ignore[method-assign]


def serve(settings: dict[str, Any]) -> dict[str, Any]:
    """{"together": completions, "alone": completions, "watched": calls, "seconds": of each part} of one engine."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    start = time.perf_counter()
    llm = LLM(model=settings["model"], **(ARGUMENTS | settings["engine"]))
    made = time.perf_counter()
    prompts, max_tokens = settings["prompts"], settings["max_tokens"]
    with watch(settings["watched"]) if settings.get("watched") else nullcontext([]) as seen:
        result: dict[str, Any] = {"together": complete(llm, prompts, max_tokens)}
    served = time.perf_counter()
    if settings.get("alone"):
        result["alone"] = [complete(llm, [each], max_tokens)[0] for each in prompts]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return result | {"watched": seen, "seconds": [made - start, served - made, time.perf_counter() - served]}


def main(arguments: Sequence[str]) -> int:
    """Runs each engine and saves what it gave; an engine that fails is said and does not stop the next."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu.model_runner  # noqa: F401

    from padless.integrations.vllm import register

    register()
    failed = 0
    for settings_file, result_file in zip(arguments[::2], arguments[1::2], strict=True):
        while not Path(settings_file).exists():
            time.sleep(0.1)
        print("engine", settings_file, flush=True)
        try:
            result = serve(json.loads(Path(settings_file).read_text()))
            torch.save(result, result_file)
            Path(f"{result_file}.done").touch()
            print("served", settings_file, result["seconds"], flush=True)
        except Exception:
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
