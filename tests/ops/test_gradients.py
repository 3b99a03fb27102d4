"""Tensors that require grad: refused by every public call while grad mode is on, taken as numbers while it is off."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import checkpoints, layouts
from padless.formats import FP8_BLOCK
from padless.kernels import remembered
from padless.runtime import driver
from support.public_calls import CALLS, GROUPS, OFFS, K, M, N, normal, product, same, tensors_in

REFUSED = (
    r"requires grad and this call computes no gradients; train with padless\.nn or padless\.autograd, "
    r"pass .*\.detach\(\) or call under torch\.no_grad\(\)"
)
# torch's call has a bias in its signature and refuses any. The others hold what they were given; calls look at that.
ONLY_NONE = {("scaled_grouped_mm", "bias")}
RESULTS = {"QuantOutputs", "EpilogueTensors"}


def floating(call: str) -> dict[str, torch.Tensor]:
    """The tensors of a call that can require grad."""
    found = dict(tensors_in(CALLS[call].arguments(), ""))
    return {name: t for name, t in found.items() if t.is_floating_point()}


CASES = [(call, name) for call in CALLS for name in floating(call)]


def with_gradient(call: str, name: str) -> dict[str, Any]:
    """The arguments of a call, of which the tensor ``name`` was marked after everything was made."""
    arguments = CALLS[call].arguments()
    dict(tensors_in(arguments, ""))[name].requires_grad_()
    return arguments


@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call}: {name}" for call, name in CASES])
def test_a_tensor_that_requires_grad_is_refused(call: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(name)} {REFUSED}"):
        CALLS[call].function(**with_gradient(call, name))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call}: {name}" for call, name in CASES])
def test_it_is_a_number_like_others_while_grad_mode_is_off(call: str, name: str, mode: Callable[[], Any]) -> None:
    arguments = with_gradient(call, name)
    with mode():
        result = CALLS[call].function(**arguments)
        wanted = CALLS[call].function(**CALLS[call].arguments())
    for of_result, t in tensors_in(result, "result"):
        if not (name.startswith("out") and t is dict(tensors_in(arguments, ""))[name]):
            assert not t.requires_grad, of_result
    for (of_result, got), (_, want) in zip(tensors_in(result, ""), tensors_in(wanted, ""), strict=True):
        assert same(got, want), of_result


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_good_ones(call: str) -> None:
    CALLS[call].function(**CALLS[call].arguments())


# --- nothing is left out ---------------------------------------------------------------------------------


def takes_tensors(function: Callable[..., Any]) -> set[str]:
    """Parameters that the annotations say are tensors."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if re.search(r"Tensor|Activation", str(p.annotation))}


def public_functions() -> dict[str, Callable[..., Any]]:
    """Everything that can be called by a public name: functions, constructors and public methods."""
    found: dict[str, Callable[..., Any]] = {}
    for name in padless.__all__:
        value = getattr(padless, name)
        if inspect.isclass(value):
            methods = inspect.getmembers(value, inspect.isfunction)
            found |= {f"{name}.{method}": f for method, f in methods if not method.startswith("_")}
        if callable(value):
            found[name] = value
    for module in (layouts, checkpoints):
        for name, value in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and value.__module__ == module.__name__:
                found[f"{module.__name__.removeprefix('padless.')}.{name}"] = value
    return found


def tried(name: str) -> set[str]:
    """Parameters of a public function that some call here gives a tensor to."""
    calls = [call for call in CALLS if call == name or call.startswith(f"{name} ")]
    given = [tensor for call in calls for tensor, _ in tensors_in(CALLS[call].arguments(), "")]
    return {re.split(r"[.\[]", tensor)[0] for tensor in given}


@pytest.mark.parametrize("name", public_functions())
def test_every_tensor_of_every_public_function_is_tried(name: str) -> None:
    missing = {(name, argument) for argument in takes_tensors(public_functions()[name]) - tried(name)}
    assert name in RESULTS or missing <= ONLY_NONE, missing


def test_a_new_argument_would_be_missed_by_no_one() -> None:
    def grouped_gemm(a: torch.Tensor, mask: torch.Tensor | None = None) -> None: ...

    assert takes_tensors(grouped_gemm) - tried("grouped_gemm") == {"mask"}


# --- what was seen ---------------------------------------------------------------------------------------


def test_no_gradient_of_quantized_products() -> None:
    x, w = normal(M, K).requires_grad_(), normal(GROUPS, N, K).requires_grad_()
    with pytest.raises(ValueError, match=r"^x requires grad"):
        padless.quantize(x, FP8_BLOCK)
    with torch.no_grad():
        a, b = padless.quantize(x, FP8_BLOCK), padless.quantize(w, FP8_BLOCK, kind="weight")
    out = padless.grouped_gemm(a, b, OFFS)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


def test_an_output_of_a_graph_is_refused() -> None:
    out = torch.zeros((M, N), dtype=torch.bfloat16, requires_grad=True) * 1
    with pytest.raises(ValueError, match=r"^out requires grad"):
        padless.grouped_gemm(**{**product(), "out": out})


@pytest.mark.parametrize("backend", ["emulator", "emulator:sm_100a", "cuda", "reference"])
def test_backends_do_not_matter(backend: str) -> None:
    arguments = with_gradient("grouped_gemm", "b.scale")
    with pytest.raises(ValueError, match=r"^b\.scale requires grad"):
        padless.grouped_gemm(**arguments, backend=backend)


def test_a_remembered_launch_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in host memory that say they are on a GPU; marked after the launch with them was remembered."""
    names = ("a.data", "a.scale", "a.global_scale", "b.data", "b.scale", "b.global_scale", "out", "a")
    calls = [product() if name != "a" else product() | {"a": normal(M, K).bfloat16()} for name in names]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    monkeypatch.setattr(driver, "current_stream", lambda index: 0)
    for name, arguments in zip(names, calls, strict=True):
        a, b, offs, out = (arguments[key] for key in ("a", "b", "offs", "out"))
        launches: list[int] = []
        known = {remembered.facts_of((None,), out): launches.append}
        remembered.remember(remembered.facts_of(("grouped_gemm", None), a, b, offs, offs=offs), known)
        padless.grouped_gemm(**arguments)
        assert len(launches) == 1
        dict(tensors_in(arguments, ""))[name].requires_grad_()
        with pytest.raises(ValueError, match=f"^{re.escape(name)} requires grad"):
            padless.grouped_gemm(**arguments)
        assert len(launches) == 1, name
        with torch.no_grad():
            padless.grouped_gemm(**arguments)
        assert len(launches) == 2, name
