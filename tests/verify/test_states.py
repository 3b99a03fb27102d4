"""Sequences of operations find what they are made to find: stale states planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.formats import BlockScaledTensor
from padless.nn import GroupedLinear, graphs, weight_codes
from padless.nn.linear import QuantizedModule
from padless.nn.linear_function import grouped_linear
from padless.nn.weight_codes import WeightCodes
from padless.runtime.streams import Kept
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Draw, Problem
from padless.verify.fuzz.products import k_multiple
from padless.verify.fuzz.shrink import shrunk
from padless.verify.fuzz.states import sites
from padless.verify.fuzz.states.layers import FRESH
from padless.verify.fuzz.states.subjects import STATES
from padless.verify.fuzz.subjects import judged
from support.replays import again

REFERENCE = place_of("reference")
TRIES = 24  # sequences in which a planted bug must be found
SMALL = {"recipe": "fp8", "dtype": "float32", "groups": 2, "n": 32, "k": 32}
# Lines that found something, each with the defect in its time.
FOUND = [
    # on a CPU the sums of a plain product depended on the strides of its weight
    "states.experts(recipe='bf16', keep_codes=False, dtype='float32', groups=3, n=272, k=32, gate_up='concatenated', "
    "top_k=3, shared=False, rows=1, seed=442159980, operations=[('in_place', 6), ('data_in_place', 114), "
    "('optimizer_step', 846), ('in_flight', 935)])",
    "states.linear(recipe='bf16', keep_codes=False, dtype='float16', groups=3, n=272, k=144, rows=16, "
    "seed=1676691886, operations=[('data_strided', 155)])",
    # kept codes: made in inference mode, and referred to weakly
    "states.linear(recipe='fp8', keep_codes=True, dtype='float32', groups=2, n=32, k=48, rows=5, seed=5, "
    "operations=[('without_grad', 0), ('without_grad', 1), ('without_grad', 2), ('without_grad', 3), "
    "('without_grad', 4), ('without_grad', 5), ('swapped_tensors', 1), ('converted_by_swapping', 2)])",
]

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(call: str, number: int, **fixed: Any) -> Problem:
    return STATES[call].draw(call, Draw(f"test {call} {number}", "reference")).but(**fixed)


def must_be_found(call: str, **fixed: Any) -> None:
    """A planted bug is to show in results, whatever raises besides."""
    for number in range(TRIES):
        if any(name.startswith(FRESH) for name in judged(drawn(call, number, **fixed), REFERENCE)):
            return
    raise AssertionError(f"nothing was found in {TRIES} sequences")


# --- nothing is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["states.linear", "states.call"])
def test_sequences_are_right(call: str) -> None:
    for number in range(3):
        problem = drawn(call, number)
        assert judged(problem, REFERENCE) == [], problem


@pytest.mark.slow
@pytest.mark.parametrize("call", STATES)
def test_more_sequences_are_right(call: str) -> None:
    for number in range(100, 112):
        problem = drawn(call, number)
        assert judged(problem, REFERENCE) == [], problem


@pytest.mark.parametrize("text", FOUND)
def test_what_was_found_is_right_now(text: str) -> None:
    assert judged(Problem.parse(text), REFERENCE) == []


@pytest.mark.parametrize("call", STATES)
def test_text_is_read_back(call: str) -> None:
    for number in range(5):
        problem = drawn(call, number)
        assert Problem.parse(str(problem)) == problem
        assert 3 <= len(problem.options["operations"]) <= 12
        assert drawn(call, number) == problem  # a function of its seed


def test_another_operation_is_refused() -> None:
    problem = drawn("states.linear", 0, operations=[("in_plac", 1)])
    assert "operation is 'in_plac'; allowed: optimizer_step" in judged(problem, REFERENCE)[0]


# --- planted bugs ----------------------------------------------------------------------------------------


def codes_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    right = QuantizedModule._operands

    def wrong(self: Any, name: str, *arguments: Any) -> Any:
        kept = self.__dict__.setdefault("_kept", {})
        if name not in kept or self.keep_codes:
            kept[name] = right(self, name, *arguments)
        return kept[name]

    monkeypatch.setattr(QuantizedModule, "_operands", wrong)


def kept_by(codes: WeightCodes, facts: Any, weight: Any, recipe: Any) -> Any:
    """Operands that are a weight's for as long as these facts are what they were."""
    if facts is None or codes._made is None or codes._made.facts != facts:
        codes._made = weight_codes._Made(weight, facts, weight_codes.weight_operands(weight, recipe), Kept(()))
    return codes._made.operands


def codes_by_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at: version, optimizers' steps, address, type, shape, strides. Not the parameter itself."""

    def wrong(self: Any, name: str, parameter: Any, weight: Any, backward: bool) -> Any:
        return kept_by(self._codes[name], weight_codes.facts_of(weight, self.recipe), weight, self.recipe)

    monkeypatch.setattr(QuantizedModule, "_operands", wrong)


def kept_codes_never_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, parameter: Any, weight: Any, recipe: Any) -> Any:
        return kept_by(self, (recipe,), weight, recipe)

    monkeypatch.setattr(WeightCodes, "of", wrong)


def copies_that_share_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compare neither the parameter nor its address."""
    facts = weight_codes.facts_of

    def of(self: Any, parameter: Any, weight: Any, recipe: Any) -> Any:
        now = facts(weight, recipe)
        return kept_by(self, now and (*now[:2], *now[3:]), weight, recipe)

    monkeypatch.setattr(WeightCodes, "of", of)
    monkeypatch.setattr(WeightCodes, "__deepcopy__", lambda self, memo: self)


def a_parametrized_weight_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedLinear.forward

    def wrong(self: Any, x: Any, offs: Any) -> Any:
        if "weight" in self._parameters:
            return right(self, x, offs)
        weight = self.__dict__.setdefault("_first", self.weight)
        operands = self._operands("weight", weight, weight, True)
        return grouped_linear(x, self.weight, offs, self.recipe, operands)

    monkeypatch.setattr(GroupedLinear, "forward", wrong)


def a_backward_pass_of_the_weights_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes for it lie in memory of the module, which every call writes."""

    def wrong(self: Any, name: str, parameter: Any, weight: Any, backward: bool) -> Any:
        made = weight_codes.weight_operands(weight, self.recipe)
        kept = self.__dict__.setdefault("_memory", made.dgrad)
        if any(not isinstance(t, BlockScaledTensor) for t in (kept, made.dgrad)) or kept.shape != made.dgrad.shape:
            return made
        if kept.format != made.dgrad.format:
            return made
        kept.data.detach().view(torch.uint8).copy_(made.dgrad.data.view(torch.uint8))
        kept.scale.data.copy_(made.dgrad.scale)
        return made._replace(dgrad=replace(made.dgrad, data=kept.data.data, scale=kept.scale.data))

    monkeypatch.setattr(QuantizedModule, "_operands", wrong)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], bool]] = [
    (codes_made_once, False),
    (codes_by_what_torch_counts, False),
    (kept_codes_never_refreshed, True),
    (copies_that_share_codes, True),
    (a_parametrized_weight_read_once, False),
    (a_backward_pass_of_the_weights_now, False),
]


@pytest.mark.parametrize(("bug", "keep_codes"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_stale_codes_are_found(
    bug: Callable[[pytest.MonkeyPatch], None], keep_codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    must_be_found("states.linear", **SMALL, keep_codes=keep_codes)


def test_a_sequence_is_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    codes_made_once(monkeypatch)
    operations = [("rows", 3), ("alias", 1), ("data_in_place", 114), ("mode", 2), ("forget_codes", 5)]
    problem = drawn("states.linear", 0, **SMALL, keep_codes=False, rows=2, operations=operations)
    smaller, wrong = shrunk(problem, REFERENCE)
    assert smaller.options["operations"] == [("data_in_place", 114)]
    assert wrong
    assert judged(smaller, REFERENCE) == wrong


# --- graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_codes", [False, True])
def test_graphs_are_right(keep_codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", again)
    for number in range(3):
        operations = [("graphed", number), ("in_place", number), ("graphed", number + 9)]
        problem = drawn("states.linear", number, **SMALL, keep_codes=keep_codes, rows=5, operations=operations)
        assert judged(problem, REFERENCE) == []


def test_stale_codes_of_graphs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again for steps of an optimizer alone."""
    right = graphs.writes_of
    monkeypatch.setattr(graphs, "record", again)
    monkeypatch.setattr(graphs, "writes_of", lambda weight: (right(weight) or (0, 0))[1:])
    operations = [("graphed", 1), ("graphed", 2), ("graphed", 3)]
    must_be_found("states.linear", **SMALL, keep_codes=True, rows=5, operations=operations)


# --- launches that are remembered --------------------------------------------------------------------------


def remembering(right: Callable[..., Any], without: str) -> Callable[..., Any]:
    """The product by launches packed from addresses, which are found again by all facts but one."""
    arena, launches = sites._arena(torch.device("cpu")), dict[Any, Any]()

    def fact(t: torch.Tensor) -> dict[str, Any]:
        start = t.data_ptr() - arena.data_ptr()
        return {"address": start, "shape": t.shape, "strides": t.stride(), "dtype": t.dtype}

    def tensor(facts: dict[str, Any]) -> torch.Tensor:
        whole = arena[facts["address"] :]
        whole = whole[: len(whole) // 8 * 8].view(facts["dtype"])
        return whole.as_strided(facts["shape"], facts["strides"], 0 + whole.storage_offset())

    def call(a: Any, b: Any, offs: Any, *, out: Any = None, **how: Any) -> Any:
        given = (a, b, offs, out)
        if any(not isinstance(t, torch.Tensor) or t.untyped_storage() is None for t in given):
            return right(a, b, offs, out=out, **how)
        if any(t.untyped_storage().data_ptr() != arena.data_ptr() for t in given):
            return right(a, b, offs, out=out, **how)
        facts = [fact(t) for t in given]
        parts = [(i, name, one[name]) for i, one in enumerate(facts) for name in one]
        key = tuple(p for p in parts if p[1] != without and (without != "output" or p[:2] != (3, "address")))
        packed = launches.setdefault(key, facts)
        old_a, old_b, old_offs, old_out = map(tensor, packed)
        old_offs = old_offs.clamp(max=len(old_a))  # a launch does not check them, as the call does on a CPU
        right(old_a, old_b, old_offs, out=old_out, **(how | {"out_dtype": old_out.dtype}))
        return out

    return call


@pytest.mark.parametrize("without", ["strides", "dtype", "output", "shape"])
def test_forgetful_launches_are_found(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "grouped_gemm", remembering(sites.grouped_gemm, without))
    must_be_found("states.call", calls=["plain"] * 3, n=[64, 96], k=[64, 64])


def test_launches_by_all_facts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "grouped_gemm", remembering(sites.grouped_gemm, "nothing"))
    for number in range(8):
        assert judged(drawn("states.call", number, calls=["plain"] * 3), REFERENCE) == []


def test_sizes_of_sites_fit_every_format_that_is_drawn_with_them() -> None:
    drawn = [sites.constants(Draw(f"sizes {number}", "reference")) for number in range(300)]
    assert any(b == "MXFP4_REPACKED" for one in drawn for _, b in one["pairs"])
    for one in drawn:
        assert all(k % k_multiple(a, b) == 0 for a, b in one["pairs"] for k in one["k"]), one
