"""FlashAttention-4 forward, plain and causal, against torch: flash_attention_4.py causal|plain.

The working directory holds fa4/flash_attn/cute, its sources.
"""

import sys

sys.path.insert(0, "fa4")
import torch
from flash_attn.cute.interface import flash_attn_func

causal = sys.argv[1] == "causal"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 128, 1, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
out = flash_attn_func(q, k, v, causal=causal)
out = out[0] if isinstance(out, tuple) else out
queries, keys, values = (x.float().cpu().transpose(1, 2) for x in (q, k, v))
attention = torch.nn.functional.scaled_dot_product_attention
wanted = attention(queries, keys, values, is_causal=causal).transpose(1, 2)
torch.testing.assert_close(out.float().cpu(), wanted, atol=2e-2, rtol=2e-2)
print("right")
