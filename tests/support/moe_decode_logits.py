"""The choice of experts of the decoding layer's kernels alone (choose.cuh), in the emulator; tokens with logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from padless.emulator import Emulator
from padless.kernels.sm90_moe_decode.choice import ByLogits, Choice
from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
from padless.moe import Router
from padless.runtime import jit
from support.emulator_cuda import compile_ptx
from support.emulator_variants import Edit, replace_nth
from support.moe_decode_cases import Tokens

CHOOSE, ROUTE = "sm90_moe_decode/choose.cuh", "sm90_moe_decode/route.cuh"
_TOKENS, _WARPS = 8, 3  # of a CTA
_PROBE = """
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/conversion.cuh"
#include "device/ptx/halves.cuh"
#define GATE_IN_BF16 1
#include "device/activation.cuh"
#include "sm90_moe_decode/common.cuh"
struct SharedStorage : Tables {};
struct Problem : Layer {};
constexpr int NUM_CONSUMER_WARPS = WARPS;
#include "sm90_moe_decode/choose.cuh"
extern "C" __global__ void probe(const void* logits, const void* bias, int* ids, float* weights, int logits_type,
                                 int bias_type, int tokens, int top_k, int experts, int scaling_factor, int groups,
                                 int top_groups, int is_sigmoid, int renormalizes) {
    __shared__ SharedStorage shared;
    const int first = blockIdx.x * MOST_TOKENS, bytes = logits_type == WEIGHTS_F32 ? 4 : 2;
    Problem p = {};
    p.ids = static_cast<const uint8_t*>(logits) + static_cast<long long>(first) * experts * bytes;
    p.weights = bias;
    p.tokens = min(tokens - first, MOST_TOKENS);
    p.top_k = top_k;
    p.experts = experts;
    p.ids_bytes = logits_type;
    p.weights_type = bias_type;
    p.rule = {__int_as_float(scaling_factor), groups, top_groups, is_sigmoid, renormalizes};
    if (threadIdx.x == 0) mbarrier_init(shared_address(&shared.chosen), WARPS);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < WARPS) {
        choose_experts(shared, p, warp, lane);
        return;
    }
    mbarrier_wait(shared_address(&shared.chosen), 0);
    for (int slot = lane; slot < p.slots(); slot += 32) {
        ids[first * top_k + slot] = shared.id_of_slot[slot];
        weights[first * top_k + slot] = shared.slot_weight[slot];
    }
}
"""


@lru_cache(maxsize=32)
def _probe(room: int, edits: tuple[Edit, ...]) -> bytes:
    files = dict(jit.sources())
    for file, old, new in edits:
        files[file] = replace_nth(files[file], old, new, 0, file)
    text = MoeDecodeConfig(_TOKENS, logits_room=room).prelude() + f"#define WARPS {_WARPS}\n" + _PROBE
    return compile_ptx(text, "probe.cu", "90a", files)


def chosen_by_kernel(choice: ByLogits, edits: tuple[Edit, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights (T, k), ids (T, k)) that the header makes of logits, as its kernels' routing warp sees them; no report.

    edits: of sources, for planted bugs.
    """
    tokens, top_k = choice.sizes
    emulator = Emulator(_probe(choice.logits_room, edits).rstrip(b"\0").decode(), name="probe.ptx")
    ids, weights = np.full((tokens, top_k), -7, np.int32), np.full((tokens, top_k), np.nan, np.float32)
    read = [None if t is None else t.contiguous().view(torch.uint8).numpy() for t in choice.tensors]
    addresses = [0 if t is None else emulator.memory.register(t) for t in read]
    addresses += [emulator.memory.register(t) for t in (ids, weights)]
    numbers = [value for value, _ in choice.rule_arguments]
    sizes = [*choice.types, tokens, top_k, choice.logits.shape[1]]
    result = emulator.launch("probe", -(-tokens // _TOKENS), 32 * (_WARPS + 1), [*addresses, *sizes, *numbers])
    result.raise_on_reports()
    return torch.from_numpy(weights), torch.from_numpy(ids).long()


@dataclass(frozen=True)
class RoutedTokens(Tokens):
    """Tokens with a router's logits; ids and weights are topk's, for launches that are given them."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    rule: Router

    @property
    def choice(self) -> Choice:
        return ByLogits(self.logits, self.bias, self.rule)

    @property
    def given(self) -> Tokens:
        return Tokens(self.x, self.ids, self.weights, self.shared)
