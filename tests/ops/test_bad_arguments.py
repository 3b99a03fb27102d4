"""Every argument of every public call made something else: a ValueError of one sentence that names an argument.

Nothing else is raised, and nothing is taken, but for what a call says that it does not look at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import autograd, layouts, moe, nn
from padless.formats import FP8_BLOCK, NVFP4
from support.public_calls import (
    CALLS,
    GROUPS,
    OFFS,
    Call,
    K,
    M,
    N,
    activation,
    described,
    normal,
    replaced,
    tensors_of,
    weight,
)

T, E, H, WIDE = 3, 3, 128, 64
IDS = torch.tensor([[0, 2], [1, 0], [2, 9]])


def tokens() -> dict[str, Any]:
    return {"x": normal(T, H), "top_k_index": IDS, "top_k_weights": normal(T, 2).abs()}


def layer_weights(format: padless.BlockScaledFormat) -> dict[str, Any]:
    shapes = {"w13": (E, 2 * WIDE, H), "w2": (E, H, WIDE)}
    return {name: padless.quantize(normal(*shape), format, kind="weight") for name, shape in shapes.items()}


def routing() -> moe.Routing:
    return moe.route(IDS, E)


def gathered() -> dict[str, Any]:
    return {"x": normal(T, H), "inverse": routing().inverse, "format": FP8_BLOCK, "tokens": routing().tokens}


def linear(x: Any, offs: Any) -> Any:
    return nn.GroupedLinear(GROUPS, K, N)(x, offs)


def experts(x: Any, top_k_index: Any, top_k_weights: Any, shared: Any = None) -> Any:
    return nn.Experts(H, WIDE, E)(x, top_k_index, top_k_weights, shared)


def layer(x: Any) -> Any:
    return nn.MoE(H, WIDE, E, 2)(x)


def moved(device: Any) -> Any:
    return activation().to(device)


def of_group(group: Any) -> Any:
    return weight(NVFP4, GROUPS)[group]


def backward() -> dict[str, Any]:
    return {"dout": normal(T, H), "y": normal(2 * T, H), "inverse": routing().inverse, "weights": normal(T, 2)}


def summed() -> dict[str, Any]:
    return {"y": normal(2 * T, H), "inverse": routing().inverse, "weights": normal(T, 2), "shared": normal(T, H)}


def activated() -> dict[str, Any]:
    scale = torch.tensor([0.01, 0.02, 0.03])
    rule = moe.Activation()
    return {"x": normal(M, K), "activation": rule, "format": NVFP4, "global_scale": scale, "offs": OFFS}


OTHERS: dict[str, Call] = {
    "moe.route": Call(moe.route, lambda: {"top_k_index": IDS, "num_experts": E}),
    "moe.gather_quantize": Call(moe.gather_quantize, gathered),
    "moe.route_quantize": Call(
        moe.route_quantize, lambda: {"x": normal(T, H), "top_k_index": IDS, "num_experts": E, "format": FP8_BLOCK}
    ),
    "moe.activate_quantize": Call(moe.activate_quantize, activated),
    "moe.combine": Call(moe.combine, summed),
    "moe.combine_backward": Call(moe.combine_backward, backward),
    "moe.gather_backward": Call(moe.gather_backward, lambda: {"drows": normal(2 * T, H), "inverse": routing().inverse}),
    "moe.moe": Call(
        moe.moe,
        lambda: (
            tokens()
            | layer_weights(FP8_BLOCK)
            | {"bias13": normal(E, 2 * WIDE), "bias2": normal(E, H), "shared": normal(T, H)}
        ),
    ),
    "moe.moe in NVFP4": Call(
        moe.moe,
        lambda: (
            tokens()
            | layer_weights(NVFP4)
            | {"global_scale1": torch.tensor([0.01]), "global_scale2": torch.tensor([0.01])}
        ),
    ),
    "moe.Activation": Call(moe.Activation, lambda: {"kind": "swiglu", "alpha": 1.7, "limit": 7.0, "up_offset": 1.0}),
    "Epilogue": Call(padless.Epilogue, lambda: {"d_dtype": torch.bfloat16}),
    "GateRule": Call(padless.GateRule, lambda: {"alpha": 1.7, "limit": 7.0, "up_offset": 1.0}),
    "BlockScaledTensor.to": Call(moved, lambda: {"device": "cpu"}),
    "BlockScaledTensor[..]": Call(of_group, lambda: {"group": 1}),
    "nn.Recipe": Call(nn.Recipe, dict),
    "nn.GroupedLinear": Call(nn.GroupedLinear, lambda: {"num_groups": E, "in_features": 32, "out_features": 64}),
    "nn.Experts": Call(nn.Experts, lambda: {"hidden": 32, "intermediate": 64, "num_experts": E}),
    "nn.MoE": Call(
        nn.MoE, lambda: {"hidden": 32, "intermediate": 64, "num_experts": E, "top_k": 2, "shared_intermediate": 32}
    ),
    "GroupedLinear()": Call(linear, lambda: {"x": normal(M, K), "offs": OFFS}),
    "Experts()": Call(experts, lambda: tokens() | {"shared": normal(T, H)}),
    "MoE()": Call(layer, lambda: {"x": normal(T, H)}),
    "autograd.grouped_linear": Call(
        autograd.grouped_linear, lambda: {"x": normal(M, K), "weight": normal(GROUPS, N, K), "offs": OFFS}
    ),
    "autograd.experts": Call(
        autograd.experts, lambda: tokens() | {"w13": normal(E, 2 * WIDE, H), "w2": normal(E, H, WIDE)}
    ),
    "layouts.empty_mn_major": Call(
        layouts.empty_mn_major, lambda: {"rows": 5, "columns": 3, "device": torch.device("cpu")}
    ),
}
ALL = CALLS | OTHERS


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(normal(M, K), 0.1, 0, torch.qint8)


BAD: dict[str, Any] = {
    "a word": "x",
    "a fraction": 1.5,
    "minus one": -1,
    "2^70": 2**70,
    "NaN": float("nan"),
    "numbers": [1, 2],
    "an object": object(),
    "a type": torch.int32,
    "sparse": normal(M, K).to_sparse(),
    "CSR": normal(M, K).to_sparse_csr(),
    "quantized": quantized(),
    "nested": torch.nested.nested_tensor([normal(M, K)]),
    "complex": normal(M, K).to(torch.complex64),
    "booleans": normal(M, K) > 0,
    "4-D": normal(2, 1, 3, 1),
}
# (call, argument): values that are good ones.
GOOD: dict[tuple[str, str], tuple[str, ...]] = {
    ("group_offsets", "sizes"): ("numbers",),
    **{(f"layouts.{name}", part): ("booleans",) for name, part in (("to_blocked", "scale"), ("unpack_fp4", "data"))},
    ("layouts.to_blocked_groups", "scale"): ("booleans",),
    ("BlockScaledTensor[..]", "group"): ("minus one", "2^70"),  # past the end, as a list says it
    **{("GateRule", part): ("a fraction", "minus one") for part in ("alpha", "limit", "up_offset")},
    **{("moe.Activation", part): ("a fraction", "minus one") for part in ("alpha", "up_offset")},
    **{(name, part): ("a fraction", "minus one") for name in ("moe.moe", "moe.moe in NVFP4")
       for part in ("alpha", "up_offset")},
    **{(name, "limit"): ("a fraction",) for name in ("moe.Activation", "moe.moe", "moe.moe in NVFP4")},
    **{(name, "global_scale"): ("a fraction", "2^70", "NaN") for name in CALLS if name.startswith("quantize")},
    ("checkpoints.from_compressed_tensors", "global_scale"): ("4-D",),
}  # fmt: skip
# Not looked at in the call: what the type of ``out`` says, what values have no use for, and samples, which check_support
# looks at.
UNSEEN = {(name, "out_dtype") for name, call in CALLS.items() if call.arguments().get("out") is not None}
UNSEEN |= {("grouped_gemm_swiglu_quant of cuDNN's tensors", "norm_const_tensor")}
UNSEEN |= {("GroupedColumns", part) for part in CALLS["GroupedColumns"].arguments()}  # but by products
UNSEEN |= {("GroupedGemmQuant", p.name) for p in CALLS["GroupedGemmQuant"].signature.parameters.values()}


def parameters(call: Call) -> list[str]:
    found = call.signature.parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"]


def complaint(call: Call, given: dict[str, Any]) -> str | None:
    """What is wrong with what the call does; None for a sentence that names one of its arguments."""
    try:
        call.function(**given)
    except ValueError as error:
        text, names = str(error), parameters(call)
        if "\n" in text or "  " in text:
            return f"more than a sentence: {text[:200]!r}"
        said = re.search(rf"\b({'|'.join(names)})\b", text) is not None
        return None if said else f"no argument is named: {text[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "taken"


@pytest.mark.parametrize("name", ALL)
def test_a_bad_argument_is_refused_by_name(name: str) -> None:
    call = ALL[name]
    arguments, wrong = call.arguments(), []
    for parameter in parameters(call):
        if (name, parameter) in UNSEEN:
            continue
        for what, value in BAD.items():
            if what in GOOD.get((name, parameter), ()):
                continue
            found = complaint(call, {**arguments, parameter: value})
            if found is not None:
                wrong.append(f"{parameter} = {what}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ALL)
def test_a_view_that_negates_memory_is_refused_by_name(name: str) -> None:
    """A kernel would read the other sign."""
    call = ALL[name]
    arguments, wrong = call.arguments(), []
    for parameter in parameters(call):
        value = arguments.get(parameter)
        several = isinstance(value, list) and isinstance(value[0], torch.Tensor)
        if not several and not (isinstance(value, torch.Tensor) and value.dtype != torch.bool):
            continue
        negated = [torch._neg_view(t) for t in value] if several else torch._neg_view(value)
        if (found := complaint(call, {**arguments, parameter: negated})) is not None:
            wrong.append(f"{parameter}: {found}")
    assert not wrong, "\n".join(wrong)


def test_the_good_calls_are_good() -> None:
    for name, call in ALL.items():
        assert complaint(call, call.arguments()) == "taken", name


def test_other_errors_and_silence_are_seen() -> None:
    def unchecked(x: Any, flag: Any = False) -> Any:
        return x.dim() if flag else None

    call = Call(unchecked, lambda: {"x": 1})
    assert complaint(call, {"x": 1, "flag": True}) == "AttributeError: 'int' object has no attribute 'dim'"
    assert complaint(call, {"x": 1, "flag": "x"}) != "taken"
    assert complaint(call, {"x": 1}) == "taken"


# --- sizes, devices and modes ------------------------------------------------------------------------------

SIZES: dict[str, Callable[[], Any]] = {
    "in_features": lambda: nn.GroupedLinear(1, 16.0, 16),  # type: ignore[arg-type]
    "num_groups": lambda: nn.GroupedLinear(4097, 16, 16),
    "num_experts": lambda: nn.Experts(16, 16, 4097),
    "hidden": lambda: nn.MoE(True, 16, 4, 2),
    "top_k": lambda: nn.MoE(16, 16, 4, 5),
    "weight": lambda: nn.GroupedLinear(1, 16, 16, recipe="mxfp8"),
    "w2": lambda: nn.Experts(32, 24, 2),
    "global_scale": lambda: padless.quantize(normal(4, 32), NVFP4, global_scale=-1.0),
    "x": lambda: padless.quantize(normal(4, 32).to_sparse(), NVFP4),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_refused_where_they_are_given(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} "):
        SIZES[name]()


# Some of them are 0 in float32, or nothing.
GLOBAL_SCALES = [0.0, -0.0, -2.0, torch.tensor(0.0), torch.tensor([0.5, -1.0]), 1e-300, 2.0**-150, 1e300, 10**40]
GLOBAL_SCALES += [torch.tensor(1e-300, dtype=torch.float64)]


@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_a_global_scale_is_positive(scale: Any) -> None:
    offs = torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^global_scale must be a positive number"):
        padless.quantize(normal(4, 32), NVFP4, global_scale=scale, offs=offs)


@pytest.mark.parametrize("scale", [2.0**-149, torch.finfo(torch.float32).max, float("inf"), float("nan"), 1])
def test_a_global_scale_of_float32_is_taken(scale: float) -> None:
    assert padless.quantize(normal(4, 32), NVFP4, global_scale=scale).global_scale.numel() == 1


def test_a_recipe_that_the_sizes_do_not_fit_is_refused_when_it_is_assigned() -> None:
    made = nn.GroupedLinear(2, 48, 64)
    with pytest.raises(ValueError, match=r"^weight is \(num_groups, N, K\) = \(2, 64, 48\); .* multiples of 32"):
        made.recipe = "mxfp8"  # type: ignore[assignment]
    assert made.recipe == nn.Recipe()


def test_an_inference_tensor_is_no_output_outside_of_inference_mode() -> None:
    a, b = activation(FP8_BLOCK), weight(FP8_BLOCK, GROUPS)
    with torch.inference_mode():
        out = torch.empty((M, N), dtype=torch.bfloat16)
        padless.grouped_gemm(a, b, OFFS, out=out)
    with pytest.raises(ValueError, match=r"^out is an inference tensor"):
        padless.grouped_gemm(a, b, OFFS, out=out)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jit.trace"])
def test_transforms_are_refused_in_a_sentence(transform: str) -> None:
    made, offs = nn.GroupedLinear(2, 64, 32), torch.tensor([3, 8], dtype=torch.int32)
    w, x = made.weight.detach(), normal(8, 64)

    def loss(weight: torch.Tensor) -> Any:
        return torch.func.functional_call(made, {"weight": weight}, (x, offs)).sum()

    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(loss)(w),
        "vmap": lambda: torch.vmap(loss)(torch.stack([w, w])),
        "jit.trace": lambda: torch.jit.trace(nn.MoE(64, 32, 4, 2), (normal(5, 64),)),
    }
    with pytest.raises(ValueError, match=r"^\w+ is inside of a transform of torch\.func or of torch\.jit\.trace"):
        calls[transform]()
    vmapped = torch.vmap(lambda x: padless.quantize(x, FP8_BLOCK).data)
    with pytest.raises(ValueError, match=r"^x is inside of a transform"):
        vmapped(normal(2, 4, 128))


META = [name for name in CALLS if not name.startswith("GroupedGemmQuant")]


@pytest.mark.parametrize("name", META)
def test_meta_tensors_have_the_shapes_of_a_call(name: str) -> None:
    arguments = CALLS[name].arguments()
    got = tensors_of(CALLS[name].function(**replaced(arguments, lambda t: torch.empty_strided(
        t.shape, t.stride(), dtype=t.dtype, device="meta"))))  # fmt: skip
    want = tensors_of(CALLS[name].function(**arguments))
    assert [described(t)[:3] for t in got] == [described(t)[:3] for t in want]
    assert all(t.is_meta for t in got)
