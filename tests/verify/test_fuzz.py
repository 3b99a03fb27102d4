"""The fuzzer finds what it is made to find: bugs planted in every call, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.formats import BlockScaledTensor
from padless.nn.lora import LoraExperts
from padless.nn.lora import base as lora_base
from padless.nn.lora import experts as lora_experts
from padless.nn.lora import frozen as lora_frozen
from padless.nn.lora import linear as lora_linear
from padless.nn.lora import tokens as lora_tokens
from padless.verify.bf16 import fuzz as plain
from padless.verify.fuzz import epilogues, input_gradients, layers, products, quantizers, run, training
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Draw, Problem
from padless.verify.fuzz.shrink import shrunk
from padless.verify.fuzz.subjects import SUBJECTS, judged

REFERENCE = place_of("reference")
TRIES = 60  # problems in which a planted bug must be found

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(call: str, number: int) -> Problem:
    return SUBJECTS[call].draw(call, Draw(f"test {call} {number}", "reference"))


def first_wrong(call: str) -> tuple[Problem, list[str]] | None:
    for number in range(TRIES):
        problem = drawn(call, number)
        if wrong := judged(problem, REFERENCE):
            return problem, wrong
    return None


# --- nothing is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", SUBJECTS)
def test_problems_are_right(call: str) -> None:
    for number in range(8):
        problem = drawn(call, number)
        assert judged(problem, REFERENCE) == [], problem


@pytest.mark.parametrize("call", SUBJECTS)
def test_text_is_read_back(call: str) -> None:
    for backend, number in itertools.product(("reference", "emulator"), range(5)):
        if backend == "emulator" and "sm_90a" not in SUBJECTS[call].kernels:
            continue
        problem = SUBJECTS[call].draw(call, Draw(f"{number}", backend))
        assert Problem.parse(str(problem)) == problem
        assert SUBJECTS[call].draw(call, Draw(f"{number}", backend)) == problem  # a function of its seed


@pytest.mark.parametrize("text", ["", "gemm", "gemm(1)", "gemm(a=b)", "gemm(a=1", "import os"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="problem is"):
        Problem.parse(text)


# --- planted bugs ----------------------------------------------------------------------------------------

Bug = Callable[[Callable[..., Any]], Callable[..., Any]]


def after(change: Callable[[Any], Any]) -> Bug:
    """A call whose result is changed."""
    return lambda right: lambda *args, **kwargs: change(right(*args, **kwargs))


def nudged(t: torch.Tensor) -> torch.Tensor:
    """One bit of the last element of the first row, in place."""
    if t.numel():
        bits = t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
        bits[(0,) * (t.dim() - 1) + (-1,)] ^= 1
    return t


def of_columns(change: Callable[[torch.Tensor], torch.Tensor], part: str = "data") -> Bug:
    """quantize_rows_columns, with a part of the columns changed."""

    def changed(result: Any) -> Any:
        rows, columns = result
        raw = getattr(columns, part)
        new = change(raw.view(torch.uint8).clone()).view(raw.dtype) if part == "data" else change(raw.clone())
        return rows, replace(columns, **{part: new})

    return after(changed)


def swapped_weights(right: Callable[..., Any]) -> Callable[..., Any]:
    """Every group is multiplied by the weights of the next one."""

    def wrong(a: Any, b: BlockScaledTensor, *args: Any, **kwargs: Any) -> Any:
        data = b.data.view(torch.uint8).roll(1, 0).view(b.data.dtype)
        return right(a, replace(b, data=data), *args, **kwargs)

    return wrong


def swapped_plain_weights(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, *args, **kwargs: right(a, b.roll(1, 0), *args, **kwargs)


def takes_a_row_more(right: Callable[..., Any]) -> Callable[..., Any]:
    """The first group ends a row later."""

    def wrong(dy: torch.Tensor, x: torch.Tensor, *, offs: torch.Tensor, **kwargs: Any) -> Any:
        later = offs.clone()
        if len(offs) > 1:
            later[0] = min(int(offs[0]) + 1, int(offs[1]))
        return right(dy, x, offs=later, **kwargs)

    return wrong


def moved_by_m(right: Callable[..., Any]) -> Callable[..., Any]:
    """The last bit of everything depends on the number of rows: near float64, but not the row's own."""

    def wrong(a: Any, *args: Any, **kwargs: Any) -> Any:
        out = right(a, *args, **kwargs)
        bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
        if a.shape[0] % 2:
            valid = int(args[1][-1])
            bits[:valid] ^= 1
        return out

    return wrong


def writes_behind(right: Callable[..., Any]) -> Callable[..., Any]:
    """One element more than the groups have is stored."""

    def wrong(a: Any, b: Any, offs: torch.Tensor, **kwargs: Any) -> Any:
        out = right(a, b, offs, **kwargs)
        row = int(offs[-1])
        torch.as_strided(out, (1,), (1,), out.storage_offset() + row * out.stride(0)).fill_(1.0)
        return out

    return wrong


def forgets(name: str) -> Bug:
    """A keyword that has no effect."""

    def bug(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: right(*args, **(kwargs | {name: None} if name in kwargs else kwargs))

    return bug


def other_half(right: Callable[..., Any]) -> Callable[..., Any]:
    """Gate and up exchanged."""

    def wrong(**kwargs: Any) -> Any:
        b = kwargs["b_tensor"]
        if kwargs.get("gate_up") == "concatenated" and b.scale_layout == "plain" and b.format.weight_block[0] == 1:
            half = b.data.shape[1] // 2
            data, scale = (t.view(torch.uint8).roll(half, 1).view(t.dtype) for t in (b.data, b.scale))
            kwargs["b_tensor"] = replace(b, data=data, scale=scale)
        return right(**kwargs)

    return wrong


def quant_output(key: str) -> Bug:
    """One bit of an output of the quantising call."""

    def change(made: Any) -> Any:
        if made[key] is not None and made[key].numel() and made[key].dim() == 2:
            nudged(made[key])
        return made

    return after(change)


def epilogue_output(name: str) -> Bug:
    def change(made: Any) -> Any:
        t = getattr(made, name)
        if t is not None and t.numel():
            nudged(t)
        return made

    return after(change)


def gathers_late(right: Callable[..., Any]) -> Callable[..., Any]:
    """rows= takes the row behind."""

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("rows") is not None:
            kwargs["rows"] = (kwargs["rows"] + 1) % x.shape[0]
        return right(x, *args, **kwargs)

    return wrong


def adds_twice(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate"):
            right(*args, **kwargs)
        return right(*args, **kwargs)

    return wrong


def tensor_nudged(t: BlockScaledTensor) -> BlockScaledTensor:
    nudged(t.data.view(torch.uint8))
    return t


def scale_nudged(t: BlockScaledTensor) -> BlockScaledTensor:
    nudged(t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8))
    return t


BUGS: dict[str, tuple[str, Any, str, Bug]] = {
    "weights of another group": ("grouped_gemm", products, "grouped_gemm", swapped_weights),
    "bits that depend on M": ("grouped_gemm", products, "grouped_gemm", moved_by_m),
    "a store behind the groups": ("grouped_gemm", products, "grouped_gemm", writes_behind),
    "one bit of a dense product": ("gemm", products, "gemm", after(nudged)),
    "a list without alpha": ("grouped_gemm_list", products, "grouped_gemm_list", forgets("alpha")),
    "torch's call, one bit": ("scaled_grouped_mm", products, "scaled_grouped_mm", after(nudged)),
    "a quantising call without bias": ("grouped_gemm_quant", epilogues, "grouped_gemm_quant", forgets("bias_tensor")),
    "one row code": ("grouped_gemm_quant", epilogues, "grouped_gemm_quant", quant_output("d_tensor")),
    "one amax": ("grouped_gemm_quant", epilogues, "grouped_gemm_quant", quant_output("amax_tensor")),
    "one column code": ("grouped_gemm_epilogue", epilogues, "grouped_gemm_epilogue", epilogue_output("column_codes")),
    "one row scale": ("grouped_gemm_epilogue", epilogues, "grouped_gemm_epilogue", epilogue_output("row_scale")),
    "gate and up exchanged": ("grouped_gemm_swiglu_quant", epilogues, "grouped_gemm_swiglu_quant", other_half),
    "one code": ("quantize", quantizers, "quantize", after(tensor_nudged)),
    "one scale": ("quantize", quantizers, "quantize", after(scale_nudged)),
    "gathered rows": ("quantize", quantizers, "quantize", gathers_late),
    "dequantized": ("quantize", quantizers, "dequantize", after(nudged)),
    "a transpose": (
        "quantize_weight_both",
        quantizers,
        "quantize_weight_both",
        after(lambda both: (both[0], tensor_nudged(both[1]))),
    ),
    "a scale of random roundings": (
        "quantize_nvfp4_stochastic",
        quantizers,
        "quantize_nvfp4_stochastic",
        after(scale_nudged),
    ),
    "a rotated value": (
        "quantize_nvfp4_stochastic",
        quantizers,
        "random_hadamard",
        after(lambda t: t * (1 + 2.0**-12)),
    ),
    "slack that is not zero": (
        "quantize_rows_columns",
        quantizers,
        "quantize_rows_columns",
        of_columns(lambda t: t | (t == 0).to(torch.uint8)),
    ),
    "scales of columns": (
        "quantize_rows_columns",
        quantizers,
        "quantize_rows_columns",
        of_columns(lambda t: t.roll(1, 0), "scale"),
    ),
    "a start": ("quantize_rows_columns", quantizers, "quantize_rows_columns", of_columns(lambda t: t + 32, "starts")),
    "SwiGLU's backward without prob": (
        "swiglu_backward_quantize",
        training,
        "swiglu_backward_quantize",
        lambda right: (
            lambda dh, z, offs, prob, **kw: right(dh, z, offs, None if prob is None else torch.ones_like(prob), **kw)
        ),
    ),
    "accumulated twice": ("grouped_gemm_wgrad", training, "grouped_gemm_wgrad", adds_twice),
    "one bit of a weight gradient": (
        "grouped_gemm_wgrad",
        training,
        "grouped_gemm_wgrad",
        lambda right: lambda dy, x, **kw: nudged(right(dy, x, **kw)) if len(dy.offs) > 1 else right(dy, x, **kw),
    ),
    "plain weights of another group": ("plain.grouped_gemm", products, "grouped_gemm", swapped_plain_weights),
    "plain rows whose bits depend on M": ("plain.grouped_gemm", products, "grouped_gemm", moved_by_m),
    "plain rows stored behind the groups": ("plain.grouped_gemm", products, "grouped_gemm", writes_behind),
    "one bit of a plain dense product": ("plain.grouped_gemm", products, "gemm", after(nudged)),
    "plain gradients accumulated twice": ("plain.grouped_gemm_wgrad", plain, "grouped_gemm_wgrad", adds_twice),
    "a row of the next group": ("plain.grouped_gemm_wgrad", plain, "grouped_gemm_wgrad", takes_a_row_more),
    "one bit of a plain weight gradient": (
        "plain.grouped_gemm_wgrad",
        plain,
        "grouped_gemm_wgrad",
        lambda right: lambda dy, x, **kw: nudged(right(dy, x, **kw)) if len(kw["offs"]) > 1 else right(dy, x, **kw),
    ),
    "codes of another group": ("fp4_input_gradient", input_gradients, "fp4_input_gradient", swapped_weights),
    "gradients of rows whose bits depend on M": (
        "fp4_input_gradient",
        input_gradients,
        "fp4_input_gradient",
        moved_by_m,
    ),
    "routing": ("moe.route", layers.moe, "route", after(lambda r: r._replace(tokens=r.tokens.flip(0)))),
    "gathered quantization": ("moe.gather_quantize", layers.moe, "gather_quantize", after(tensor_nudged)),
    "routed quantization": (
        "moe.gather_quantize",
        layers.moe,
        "route_quantize",
        after(lambda both: (both[0], scale_nudged(both[1]))),
    ),
    "an activation's offset": (
        "moe.activate_quantize",
        layers.moe,
        "activate_quantize",
        lambda right: lambda x, a, *rest, **kw: right(x, replace(a, up_offset=1.0) if a.is_gated else a, *rest, **kw),
    ),
    "a sum without weights": (
        "moe.combine",
        layers.moe,
        "combine",
        lambda right: lambda y, inverse, weights, *rest, **kw: right(y, inverse, None, *rest, **kw),
    ),
    "the shared expert": ("moe.moe", layers.moe, "moe", forgets("shared")),
    "the shared expert of few tokens": ("moe.decode", layers.moe, "moe", forgets("shared")),
    "a bias of the layer": ("moe.moe", layers.moe, "moe", forgets("bias2")),
    "the adapter of another group": (
        "nn.LoraGroupedLinear",
        lora_base,
        "Factors",
        lambda right: lambda a, *others: right(tuple(t.roll(1, 0) for t in a), *others),
    ),
    "an adapter without the gradient of its rows": (
        "nn.LoraGroupedLinear",
        lora_frozen,
        "call",
        lambda right: (
            lambda name, *given: (
                given[5]  # the one sum that is not scaled
                if name == "low_rank_up" and given[4] == 1.0
                else right(name, *(given[:7] if name == "frozen_input_gradient" else given))
            )
        ),
    ),
    "frozen weights that pass on no gradient": (
        "nn.LoraGroupedLinear",
        lora_linear,
        "adapted_product",
        lambda right: lambda rows, *others: right(rows.detach(), *others),
    ),
    "the adapter of the token before": (
        "nn.LoraExperts",
        LoraExperts,
        "_pairs",
        lambda right: lambda self, ids, chosen: right(self, ids, chosen.roll(1)),
    ),
    "the first adapter where a token has none": (
        "nn.LoraExperts",
        LoraExperts,
        "_pairs",
        lambda right: lambda self, ids, chosen: right(self, ids, chosen.clamp(min=0)),
    ),
    "an adapter by alpha over the rank where it is the rank's root": (
        "nn.LoraExperts",
        lora_base,
        "scaling_of",
        lambda right: lambda rank, alpha, rslora: right(rank, alpha, False),
    ),
    "A and B of the expert before in the layer": (
        "nn.LoraExperts",
        lora_base,
        "Factors",
        lambda right: lambda a, b, *others: right(*(tuple(t.roll(1, 0) for t in f) for f in (a, b)), *others),
    ),
    "a bias of the expert before": (
        "nn.LoraExperts",
        lora_experts,
        "adapted_product",
        lambda right: (
            lambda rows, operand, w, bias, *others: right(
                rows, operand, w, None if bias is None else bias.roll(1, 0), *others
            )
        ),
    ),
    "routing weights without a gradient": (
        "nn.LoraExperts",
        lora_experts,
        "combined",
        lambda right: lambda y, inverse, weights, dtype: right(y, inverse, weights.detach(), dtype),
    ),
    "the activation's gradient of another gate": (
        "nn.LoraExperts",
        lora_tokens,
        "activation_gradient",
        lambda right: lambda dout, h, activation: right(dout, h.roll(1, 0), activation),
    ),
    "a token with the gradient of one of its rows": (
        "nn.LoraExperts",
        lora_experts,
        "gathered_rows",
        lambda right: (
            lambda x, tokens, inverse: right(
                x, tokens, torch.cat([inverse[:, :1], torch.full_like(inverse[:, 1:], -1)], 1)
            )
        ),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, module, function, bug = BUGS[name]
    monkeypatch.setattr(module, function, bug(getattr(module, function)))
    assert first_wrong(call) is not None, f"{TRIES} problems of {call} and nothing was wrong"


def test_workers_are_as_many_as_a_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores and one GPU of 139 GiB: 64 workers ended by its memory."""
    free = [139 << 30, 20 << 30]
    monkeypatch.setattr(run, "cpus", lambda: 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free[i], 140 << 30))
    assert run._useful_workers([]) == 64
    assert run._useful_workers(["0"]) == 23
    assert run._useful_workers(["0", "1"]) == 26
    free[0] = 1 << 30
    assert run._useful_workers(["0"]) == 1
    monkeypatch.setattr(run, "cpus", lambda: 2)
    assert run._useful_workers(["0", "1"]) == 2


def test_every_call_has_a_planted_bug() -> None:
    assert {call for call, *_ in BUGS.values()} == set(SUBJECTS)


# --- shrinking and repeating -----------------------------------------------------------------------------


def test_a_wrong_problem_is_made_smaller_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "grouped_gemm", swapped_weights(products.grouped_gemm))
    found = first_wrong("grouped_gemm")
    assert found is not None
    smaller, wrong = shrunk(found[0], REFERENCE)
    assert wrong
    assert len(smaller.options["sizes"]) == 2  # the next group's weights are the own ones of one group
    assert sum(smaller.options["sizes"]) == 1
    assert smaller.options["k"] <= 32
    assert smaller.options["past"] == 0
    shown: list[str] = []
    assert run.run_fuzz(backend="reference", repeat=str(smaller), show=shown.append) == 1
    assert "WRONG" in shown[-1]
    monkeypatch.undo()
    assert run.run_fuzz(backend="reference", repeat=str(smaller), show=shown.append) == 0
