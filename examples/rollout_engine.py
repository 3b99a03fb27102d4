"""vLLM's engine for rollout.py: it samples, scores what it sampled in one pass, and shows what its experts computed.

The engine runs in this process, so that its experts' calls can be seen; one engine is shut down before the next starts.
Token ids go in and come out: there is no tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Checkpoint and arguments of vllm.LLM of each engine.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "padless": ("fp8", {"quantization": "padless"}),
    "vLLM FP8": ("fp8", {"moe_backend": "triton"}),
    "vLLM bf16": ("bf16", {"moe_backend": "triton"}),
}
# One process; the engine's own sampler and products, whatever else is installed.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# Number of the layer; rows (T, H), ids (T, k) and weights (T, k) that went in, the weighted sum (T, H) that came out.
Call = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rollout:
    """What an engine gave for B prompts of L tokens."""

    ids: torch.Tensor  # (B, L + new), prompts included
    generated: torch.Tensor  # (B, new) log-probabilities as the tokens were sampled
    one_pass: torch.Tensor  # (B, new) of the same tokens, each sequence in one pass
    calls: list[Call]


@contextmanager
def watched() -> Iterator[list[Call]]:
    """In this block each call of a layer of experts is noted down."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    calls: list[Call] = []
    layers: dict[int, int] = {}
    plain = FusedMoEKernel.apply

    def apply(self: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **named: Any) -> Any:
        inputs = [t.clone() for t in (hidden_states, topk_ids, topk_weights)]  # the output may lie in their place
        out = plain(self, hidden_states, w1, w2, topk_weights, topk_ids, **named)
        layer = layers.setdefault(id(self), len(layers))  # layers are called in their order
        calls.append((layer, *inputs, out.clone()))
        return out

    FusedMoEKernel.apply = apply
    try:
        yield calls
    finally:
        FusedMoEKernel.apply = plain


def sample(folder: Path, arguments: dict[str, Any], prompts: torch.Tensor, new: int) -> Rollout:
    """Samples `new` tokens behind each prompt (B, L) from a checkpoint's model, at temperature 1."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    from padless.integrations.vllm import register

    register()  # the entry point does it where padless is installed
    count, length = prompts.shape
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length + new + 8, seed=0,
        max_num_seqs=count, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, **arguments,
    )  # fmt: skip

    def serve(llm: Any, sequences: list[list[int]], **how: Any) -> Any:
        sampling = SamplingParams(detokenize=False, ignore_eos=True, **how)
        return llm.generate([{"prompt_token_ids": each} for each in sequences], sampling, use_tqdm=False)

    try:
        with watched() as calls:
            outputs = [
                each.outputs[0] for each in serve(llm, prompts.tolist(), temperature=1.0, max_tokens=new, logprobs=1)
            ]
            tokens = [list(each.token_ids) for each in outputs]
            generated = [
                [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
                for each in outputs
            ]
            whole = [a + b for a, b in zip(prompts.tolist(), tokens, strict=True)]
            scored = serve(llm, whole, temperature=0.0, max_tokens=1, prompt_logprobs=1)
            one_pass = [
                [each.prompt_logprobs[i][row[i]].logprob for i in range(length, length + new)]
                for each, row in zip(scored, whole, strict=True)
            ]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    device = prompts.device
    return Rollout(
        torch.tensor(whole, device=device),
        torch.tensor(generated, device=device),
        torch.tensor(one_pass, device=device),
        [(layer, *(t.clone() for t in tensors)) for layer, *tensors in calls],  # made in inference mode
    )
