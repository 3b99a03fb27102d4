"""Experts of prime-rl, DeepSpeed AutoEP and NeMo Automodel over padless: `replace_experts`, and torchao's wrapper.

What would convince: their own modules, called as their trainers call them, have the bits of `experts_of_rows` with the
same weights, outputs and every gradient, with empty groups, groups of one row and rows behind the last one; near
float64; the same check finds gate and up exchanged, transposed weights and probabilities applied twice; states are
those of the module without padless. Where a trainer can be imported its own files are used, elsewhere
`support.trainer_seams`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.autograd import grouped_linear
from padless.integrations import trainers
from padless.integrations.trainers import replace_experts
from padless.nn import experts_of_rows
from support.trainer_seams import CALLS, COUNTS, Trainer, trainer
from support.training_layer import sqnr

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao on PYTHONPATH")
ROOT = Path(__file__).parents[2]
END, TAIL = sum(COUNTS), 9
OFFS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
Step = dict[str, torch.Tensor]


@pytest.fixture(params=CALLS)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return trainer(request.param, monkeypatch)


def inputs(h: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, those behind the last group NaN, their probabilities, and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    x, dout = (torch.randn(END + TAIL, h, generator=generator).bfloat16() for _ in range(2))
    prob = 0.25 + torch.rand(END + TAIL, generator=generator)
    x[END:], prob[END:] = torch.nan, torch.nan
    return x.requires_grad_(), prob.requires_grad_(), dout


def step(case: Trainer, module: Any) -> Step:
    """The output and all gradients of one step, those of the weights by the names of experts_of_rows."""
    x, prob, dout = inputs(width(case, module))
    out = case.call(module, x, prob)
    out.backward(dout)
    w13, w2 = case.weights({name: p.grad for name, p in module.named_parameters()})
    found = {"out": out.detach(), "x": x.grad, "w13": w13, "w2": w2}
    return found | {"prob": prob.grad} if case.input_major else found


def width(case: Trainer, module: Any) -> int:
    return case.weights(dict(module.named_parameters()))[1].shape[2 if case.input_major else 1]


def of_rows(case: Trainer, module: Any, recipe: str, act: Callable[..., torch.Tensor] = experts_of_rows) -> Step:
    """The same by `experts_of_rows`, with the weights in one piece."""
    x, prob, dout = inputs(width(case, module))
    w13, w2 = (w.detach().clone().requires_grad_() for w in case.weights(dict(module.named_parameters())))
    out = act(x, OFFS, w13, w2, prob if case.input_major else None, recipe, input_major=case.input_major)
    out.backward(dout)
    found = {"out": out.detach(), "x": x.grad, "w13": w13.grad, "w2": w2.grad}
    return found | {"prob": prob.grad} if case.input_major else found


def exact(x: Any, offs: Any, w13: Any, w2: Any, prob: Any, _: str, input_major: bool) -> torch.Tensor:
    """In float64 under torch's autograd: the definition, expert by expert."""
    of13, of2 = (w13.mT, w2.mT) if input_major else (w13, w2)
    ends, parts = offs.tolist(), []
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        gate, up = (x[start:end].double() @ of13[e].double().T).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        hidden = hidden if prob is None else hidden * prob[start:end, None].double()
        parts.append(hidden @ of2[e].double().T)
    return torch.cat([*parts, torch.zeros(len(x) - ends[-1], x.shape[1], dtype=torch.float64)]).to(torch.bfloat16)


def check(case: Trainer, module: Any, least_db: float) -> None:
    """Outputs and gradients near float64, rows of no expert zeros."""
    got, want = step(case, module), of_rows(case, module, "", exact)
    assert got.keys() == want.keys()
    for what in want:
        if what in ("out", "x", "prob"):
            assert not got[what][END:].any(), what
            got[what], want[what] = got[what][:END], want[what][:END]
        assert sqnr(got[what], want[what]) > least_db, (what, sqnr(got[what], want[what]))


# --- one function replaced -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp8", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_bits_of_experts_of_rows(case: Trainer, recipe: str) -> None:
    replace_experts(case.framework, recipe)
    module = case.experts(160, 96)
    got, want = step(case, module), of_rows(case, module, recipe)
    for what in want:
        assert torch.equal(got[what], want[what]), what


@pytest.mark.parametrize(("recipe", "least_db"), [("bf16", 44.0), pytest.param("fp8", 22.0, marks=pytest.mark.slow)])
def test_near_float64(case: Trainer, recipe: str, least_db: float) -> None:
    """In bfloat16 as near as the trainer's own products are, in FP8 as FP8 is and no nearer."""
    replace_experts(case.framework, recipe)
    check(case, case.experts(), least_db)
    with pytest.raises(AssertionError):
        check(case, case.experts(), least_db + 20.0)


def test_parameters_in_float32(case: Trainer) -> None:
    """They are multiplied in the rows' dtype, as by the trainers, and have gradients in their own."""
    replace_experts(case.framework, "bf16")
    wide, narrow = case.experts(dtype=torch.float32), case.experts()
    got, want = step(case, wide), step(case, narrow)
    assert all(p.grad.dtype == torch.float32 for p in wide.parameters())
    assert all(torch.equal(got[what].to(want[what].dtype)[:END], want[what][:END]) for what in want)


def swapped(x: Any, offs: Any, w13: Any, w2: Any, *rest: Any, **options: Any) -> torch.Tensor:
    axis = 2 if options.get("input_major") else 1
    return experts_of_rows(x, offs, torch.cat(w13.chunk(2, axis)[::-1], axis), w2, *rest, **options)


def transposed(x: Any, offs: Any, w13: Any, w2: Any, *rest: Any, **options: Any) -> torch.Tensor:
    return experts_of_rows(x, offs, w13, w2.mT.contiguous(), *rest, **options)


def twice(x: Any, offs: Any, w13: Any, w2: Any, prob: Any, recipe: Any, **options: Any) -> torch.Tensor:
    again = torch.ones(len(x)) * 0.5 if prob is None else prob
    return experts_of_rows(x, offs, w13, w2, again if prob is None else prob * again, recipe, **options)


def one_row_late(x: Any, offs: Any, *rest: Any, **options: Any) -> torch.Tensor:
    return experts_of_rows(x, (offs - 1).clamp(min=0), *rest, **options)


def test_planted_bugs_are_found(case: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are equal here, so that a transposed weight is multiplied at all."""
    replace_experts(case.framework, "bf16")
    check(case, case.experts(64, 64), 44.0)
    for bug in (swapped, transposed, twice, one_row_late):
        monkeypatch.setattr(trainers, "experts_of_rows", bug)
        with pytest.raises(AssertionError):
            check(case, case.experts(64, 64), 44.0)


def test_states_are_the_trainers(case: Trainer, tmp_path: Path) -> None:
    """Parameters are what they were: torch.load of weights alone and a distributed checkpoint, both ways."""
    import torch.distributed.checkpoint as dcp

    plain = case.experts()
    torch.save(plain.state_dict(), tmp_path / "state.pt")
    replace_experts(case.framework, "bf16")
    module = case.experts()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    module.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, values in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], values), name
    step(case, module)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    read = {name: torch.zeros_like(t) for name, t in plain.state_dict().items()}
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(read[name], t) and type(t) is torch.Tensor for name, t in plain.state_dict().items())


@pytest.mark.slow
def test_compiled(case: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the function's place is one graph, with the bits of eager calls."""
    replace_experts(case.framework)
    want = step(case, case.experts())
    for name in trainers._SEAMS[case.framework][1]:
        compiled = torch.compile(getattr(case.place, name), fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(case.place, name, compiled)
    got = step(case, case.experts())
    assert all(torch.equal(got[what], want[what]) for what in want)


def test_what_is_not_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="framework is 'verl'; allowed: 'prime_rl', 'deepspeed', 'nemo_automodel'"):
        replace_experts("verl")
    with pytest.raises(ValueError, match="recipe is 'fp9'"):
        replace_experts("deepspeed", "fp9")
    deepspeed, automodel = trainer("deepspeed", monkeypatch), trainer("nemo_automodel", monkeypatch)
    for case, more, said in (
        (deepspeed, {"activation": "geglu_tanh"}, "the experts' activation is 'geglu_tanh'"),
        (automodel, {"swiglu_limit": 7.0}, "the experts' activation is "),
    ):
        replace_experts(case.framework)
        with pytest.raises(ValueError, match=f"{said}.*padless.integrations.torchao"):
            step(case, case.experts(**more))


@pytest.mark.parametrize("moved", ["gone", "other arguments"])
def test_a_function_that_has_moved_is_refused(case: Trainer, moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is replaced then, so that no run is half of either."""
    place, names, read_at, _ = trainers._SEAMS[case.framework]
    if moved == "gone":
        monkeypatch.delattr(case.place, names[-1])
    else:
        monkeypatch.setattr(case.place, names[-1], lambda rows, counts: rows)
    before = vars(case.place).copy()
    with pytest.raises(ValueError, match=rf"{re.escape(place)} has .* padless was written for {re.escape(read_at)}"):
        replace_experts(case.framework)
    assert vars(case.place) == before


# --- torchao's wrapper -----------------------------------------------------------------------------------


def converted(case: Trainer, recipe: str = "fp8", **more: Any) -> Any:
    from torchao.quantization import quantize_

    from padless.integrations.torchao import PadlessTrainingOpConfig

    module = case.experts(**more)
    quantize_(module, PadlessTrainingOpConfig(recipe), filter_fn=lambda module, name: True)
    return module


@pytest.fixture(params=[name for name in CALLS if name != "deepspeed fused"])
def wrapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A case whose activation runs on a CPU: DeepSpeed's is a Triton kernel, of a gate and an up or of both."""
    case = trainer(request.param, monkeypatch)
    activation_in_torch(case, monkeypatch)
    return case


def activation_in_torch(case: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.framework == "deepspeed" and find_spec("deepspeed.ops") is not None:
        kernels = import_module("deepspeed.ops.triton_ops.swiglu_triton")
        silu = torch.nn.functional.silu
        monkeypatch.setattr(kernels, "swiglu", lambda gate, up: silu(gate) * up)
        monkeypatch.setattr(kernels, "swiglu_packed", lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])


@needs_torchao
def test_torchao_s_wrapper_in_their_modules(wrapped: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near float64, and the bits of the trainer's own code with `grouped_linear` for each of its products."""
    got = step(wrapped, converted(wrapped))
    check(wrapped, converted(wrapped), 21.0)
    monkeypatch.setattr(
        torch, "_grouped_mm", lambda a, b, offs: grouped_linear(a, b.transpose(-2, -1), offs, "fp8"), raising=True
    )
    want = step(wrapped, wrapped.experts())
    assert all(torch.equal(got[what], want[what]) for what in want)


@needs_torchao
def test_a_concatenation_has_no_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's gate_up_impl "fused" multiplies by gate and up in one, which torch then does: the page says so."""
    case = trainer("deepspeed fused", monkeypatch)
    activation_in_torch(case, monkeypatch)
    seen: list[type] = []
    grouped = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: seen.append(type(b)) or grouped(a, b, offs=offs))
    module = converted(case)
    x, prob, _ = inputs(width(case, module))
    case.call(module, x, prob)
    assert [kind.__name__ for kind in seen] == ["Tensor", "PadlessWeight"]
    assert '"fused"' in (ROOT / "docs/trainers.md").read_text()


@needs_torchao
def test_torchao_s_states_load_here_and_without(wrapped: Trainer, tmp_path: Path) -> None:
    """With the wrappers: torch.load of weights alone, and distributed checkpoints, also of a module without them."""
    import torch.distributed.checkpoint as dcp

    from padless.integrations.torchao import PadlessWeight

    saved = converted(wrapped, "fp8_1d1d")
    want = step(wrapped, saved)["out"][:END]
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(t) is PadlessWeight and t.config.recipe == "fp8_1d1d" for t in state.values())
    other = converted(wrapped, "fp8_1d1d")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(state)
    assert torch.equal(step(wrapped, other)["out"][:END], want)

    dcp.save(wrapped.experts().state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)  # before conversion
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    read = other.state_dict()
    dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(read)
    assert torch.equal(step(wrapped, other)["out"][:END], want)
