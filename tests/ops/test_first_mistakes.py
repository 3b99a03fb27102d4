"""Mistakes of a first hour: a sentence that names the argument and the remedy, and the remedy is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import padless
from padless import FP8_BLOCK, MXFP8_E5M2, nn
from padless.layouts import offs_from_indptr
from padless.moe import Router, moe

M, N, K, G = 8, 64, 128, 3
T, E, TOP, H, I = 5, 4, 2, 128, 64  # noqa: E741
SIZES = torch.tensor([3, 0, 5])
ENDS = padless.group_offsets(SIZES)
INDPTR = torch.tensor([0, 3, 3, 8])


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def rows(**options: Any) -> padless.BlockScaledTensor:
    return padless.quantize(normal(M, K), FP8_BLOCK, **options)


def weight(values: torch.Tensor, format: padless.BlockScaledFormat = FP8_BLOCK) -> padless.BlockScaledTensor:
    return padless.quantize(values, format, kind="weight")


LOGITS = normal(T, E)
SHARES, IDS = LOGITS.float().softmax(-1).topk(TOP)
W13, W2 = normal(E, 2 * I, H), normal(E, H, I)


def layer(**other: Any) -> torch.Tensor:
    given = {"x": normal(T, H), "top_k_index": IDS, "top_k_weights": SHARES, "w13": weight(W13), "w2": weight(W2)}
    return moe(**given | other)


def product(a: Any = None, b: Any = None, offs: Any = ENDS, **options: Any) -> torch.Tensor:
    return padless.grouped_gemm(
        rows() if a is None else a, weight(normal(G, N, K)) if b is None else b, offs, **options
    )


class Mistake(NamedTuple):
    wrong: Callable[[], object]
    said: tuple[str, ...]
    right: Callable[[], object]


BY_LOGITS = {"top_k_index": None, "top_k_weights": None, "router_logits": LOGITS, "router": Router(TOP)}
PLAIN, TURNED = normal(G, N, K), normal(G, K, N)
MISTAKES = {
    "sizes for ends": Mistake(
        lambda: product(offs=SIZES), ("offs[1] is 0", "padless.group_offsets"), lambda: product(offs=ENDS)
    ),
    "sizes for ends of plain rows": Mistake(
        lambda: product(normal(M, K), PLAIN, SIZES),
        ("offs[1] is 0", "padless.group_offsets"),
        lambda: product(normal(M, K), PLAIN, ENDS),
    ),
    "sizes for ends of a layer's rows": Mistake(
        lambda: nn.GroupedLinear(G, K, N)(normal(M, K), SIZES),
        ("offs[1] is 0", "padless.group_offsets"),
        lambda: nn.GroupedLinear(G, K, N)(normal(M, K), ENDS),
    ),
    "starts and ends": Mistake(
        lambda: product(offs=INDPTR),
        ("offs has 4 entries", "padless.layouts.offs_from_indptr"),
        lambda: product(offs=offs_from_indptr(INDPTR)),
    ),
    "weights (G, K, N)": Mistake(
        lambda: product(b=weight(TURNED)),
        ("b is (G, N, K)", ".mT.contiguous()"),
        lambda: product(b=weight(TURNED.mT.contiguous())),
    ),
    "plain weights (G, K, N)": Mistake(
        lambda: product(normal(M, K), TURNED),
        ("b is (G, N, K)", ".mT.contiguous()"),
        lambda: product(normal(M, K), TURNED.mT.contiguous()),
    ),
    "weights that are not quantized": Mistake(
        lambda: product(b=PLAIN), ("b must be", "padless.quantize"), lambda: product(b=weight(PLAIN))
    ),
    "experts that are not quantized": Mistake(
        lambda: layer(w13=W13), ("w13 must be", "padless.quantize"), lambda: layer(w13=weight(W13))
    ),
    "experts (E, H, N)": Mistake(
        lambda: layer(x=normal(T, 2 * I + 64), w13=weight(normal(E, 2 * I + 64, 2 * I))),
        ("w13 is (E, N, K)", ".mT.contiguous()"),
        lambda: layer(
            x=normal(T, 2 * I + 64),
            w13=weight(normal(E, 2 * I + 64, 2 * I).mT.contiguous()),
            w2=weight(normal(E, 2 * I + 64, I)),
        ),
    ),
    "experts without a gate": Mistake(
        lambda: layer(activation="silu"),
        ("w2 must be (E, H, I)", "activation is 'silu'"),
        lambda: layer(activation="swiglu"),
    ),
    "experts of two formats": Mistake(
        lambda: layer(w2=weight(W2, MXFP8_E5M2)),
        ("activations has format FP8_BLOCK and w2 has format MXFP8_E5M2",),
        lambda: layer(w13=weight(W13, MXFP8_E5M2), w2=weight(W2, MXFP8_E5M2)),
    ),
    "logits for ids": Mistake(
        lambda: layer(top_k_index=LOGITS), ("top_k_index must be", "router_logits"), lambda: layer(**BY_LOGITS)
    ),
    "logits for weights": Mistake(
        lambda: layer(top_k_weights=LOGITS), ("top_k_weights must be", "router_logits"), lambda: layer(**BY_LOGITS)
    ),
    "ids of int16": Mistake(
        lambda: layer(top_k_index=IDS.short()),
        ("top_k_index must be", "int32 or int64"),
        lambda: layer(top_k_index=IDS),
    ),
    "ids and weights in each other's place": Mistake(
        lambda: layer(top_k_index=SHARES, top_k_weights=IDS), ("top_k_index must be", "int32 or int64"), layer
    ),
    "a batch of sequences": Mistake(
        lambda: layer(x=normal(1, T, H)),
        ("x must be", ".flatten(0, -2)"),
        lambda: layer(x=normal(1, T, H).flatten(0, -2)),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_first_mistake_gets_its_remedy_and_the_remedy_works(name: str) -> None:
    wrong, said, right = MISTAKES[name]
    with pytest.raises(ValueError, match=r"\w") as caught:
        wrong()
    sentence = str(caught.value)
    assert all(words in sentence for words in said), sentence
    assert "\n" not in sentence
    assert isinstance(found := right(), torch.Tensor)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(b=weight(normal(G, N, 2 * K))),
        lambda: product(offs=torch.tensor([3, 8])),
        lambda: layer(top_k_weights=normal(T, TOP + 1)),
        lambda: layer(top_k_index=IDS[:, :1]),
        lambda: layer(x=normal(T, 2 * H)),
    ],
)
def test_a_remedy_for_another_mistake_is_not_named(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        call()
    assert not any(word in str(caught.value) for word in ("seems", "indptr", "router_logits", "flatten"))


def test_weights_for_as_many_experts_as_are_chosen_are_no_logits() -> None:
    every = torch.arange(E).expand(T, E).contiguous()
    assert layer(top_k_index=every, top_k_weights=LOGITS.float().softmax(-1)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_in_float32_takes_16_bit_rows(dtype: torch.dtype) -> None:
    """Its router and shared expert convert them, as its experts do."""
    torch.manual_seed(3)
    made = nn.MoE(H, I, E, TOP, shared_intermediate=I)
    x = torch.randn(2, T, H).to(dtype).requires_grad_()
    out = made(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    torch.testing.assert_close(out.float(), made(x.detach().float()), rtol=0.02, atol=0.02)
    out.float().pow(2).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert made.router.weight.grad is not None
