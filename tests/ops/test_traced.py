"""Public calls in programs: fake tensors, torch.export and torch.compile of every one, with the bits of the eager call.

A call that is new in `support.public_calls` is in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import padless
from padless import checkpoints
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.table import PLAIN_ROUTES, ROUTES
from padless.ops import traced
from padless.quantization import traced as traced_quantize
from support.public_calls import (
    CALLS,
    GROUPS,
    OFFS,
    PUBLIC,
    K,
    M,
    N,
    activation,
    columns,
    copied,
    described,
    normal,
    replaced,
    same,
    tensors_in,
    tensors_of,
    weight,
)

# Dynamo says so to a user once a process for every function that it has to look through.
pytestmark = pytest.mark.filterwarnings("error:.*lru_cache")

GROUPED_GEMM = padless.grouped_gemm
OTHER_OFFS = torch.tensor([1, 4, 6], dtype=torch.int32)
# Products, which are operators in a program: padless's, since what a tensor holds decides what they do.
OPERATORS = ("gemm", "grouped_gemm", "GroupedGemmQuant.execute", "quantize", "scaled_grouped_mm")


class Program(torch.nn.Module):
    """A call of tensors alone, as torch.export takes them: block-scaled ones are put together inside."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call, self.arguments = CALLS[name].function, CALLS[name].arguments()

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        left = list(tensors)
        given = replaced(self.arguments, lambda t: left.pop(0))
        return tensors_of(self.call(**given)) or tensors  # a call without a result writes into its arguments


def with_other_values(tensors: list[torch.Tensor], is_of_columns: bool) -> list[torch.Tensor]:
    """Tensors of the same shapes and strides: rows in reverse, and groups that end elsewhere."""

    def other(t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point() or t.dtype == torch.uint8:
            return copied(t, t.device, reverse=True)
        is_offs = torch.equal(t.cpu(), OFFS.to(t.dtype)) and not is_of_columns
        return OTHER_OFFS.to(t) if is_offs else t.clone()

    made = {id(t): other(t) for t in tensors}  # a tensor that is there twice stays one: groups are told by it on a GPU
    return [made[id(t)] for t in tensors]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.shape == other.shape, i
        assert same(one, other), i


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name: str) -> None:
    """The shapes, types and strides of the real call, and no value of it."""
    arguments = CALLS[name].arguments()
    with FakeTensorMode() as mode:
        got = tensors_of(CALLS[name].function(**replaced(arguments, mode.from_tensor)))
    want = tensors_of(CALLS[name].function(**arguments))
    assert [described(t) for t in got] == [described(t) for t in want]
    assert all(type(t) is not torch.Tensor for t in got)


@pytest.mark.parametrize("name", CALLS)
def test_export(name: str) -> None:
    """The program computes from the tensors that it is given then, groups too, and not from those of the export."""
    assert_exports(Program(name), name)


def assert_exports(module: Program, name: str) -> None:
    tensors = tensors_of(module.arguments)
    program = torch.export.export(module, (tensors,), strict=False)
    is_of_columns = any(isinstance(value, padless.GroupedColumns) for value in module.arguments.values())
    given = with_other_values(tensors, is_of_columns or name == "GroupedColumns")
    eager = with_other_values(tensors, is_of_columns or name == "GroupedColumns")
    assert_same([t.cpu() for t in program.module()(given)], [t.cpu() for t in module(eager)])
    assert_same([t.cpu() for t in given], [t.cpu() for t in eager])  # what is written into as well
    called = {str(node.target) for node in program.graph.nodes if "padless" in str(node.target)}
    assert called or not name.startswith(OPERATORS)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CALLS)
def test_compile(name: str, dynamic: bool | None) -> None:
    """In one graph, of arguments as a user has them. dynamic: sizes and numbers may all change."""
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name].function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    given, eager = CALLS[name].arguments(), CALLS[name].arguments()
    got, want = compiled(**given), CALLS[name].function(**eager)
    assert type(got) is type(want)
    assert_same(tensors_of(got), tensors_of(want))
    assert_same(tensors_of(given), tensors_of(eager))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["grouped_gemm", "grouped_gemm_epilogue", "grouped_gemm_list", "grouped_gemm_wgrad", "quantize to FP8_BLOCK"],
)
def test_compile_by_torchs_own_backend(name: str) -> None:
    """Inductor, which generates code for what is around the operators."""
    torch._dynamo.reset()
    given, eager = CALLS[name].arguments(), CALLS[name].arguments()
    got = torch.compile(CALLS[name].function, fullgraph=True)(**given)
    assert_same(tensors_of(got), tensors_of(CALLS[name].function(**eager)))


# All calls but those of Blackwell, on tensors of a Hopper GPU.
ON_A_GPU = [name for name in PUBLIC if not name.startswith("grouped_gemm_list")]


def on_a_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    moved: dict[int, torch.Tensor] = {}
    return replaced(arguments, lambda t: moved.setdefault(id(t), copied(t, "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name: str) -> None:
    """Fake tensors, export and compilation of a call that launches kernels."""
    call = CALLS[name].function
    given, eager = on_a_gpu(CALLS[name].arguments()), on_a_gpu(CALLS[name].arguments())
    with FakeTensorMode() as mode:
        fakes = tensors_of(call(**replaced(given, mode.from_tensor)))
    got, want = torch.compile(call, backend="aot_eager", fullgraph=True)(**given), call(**eager)
    assert [described(t) for t in fakes] == [described(t) for t in tensors_of(want)]
    assert_same([t.cpu() for t in tensors_of(got)], [t.cpu() for t in tensors_of(want)])
    module = Program(name)
    module.arguments = on_a_gpu(module.arguments)
    assert_exports(module, name)


def compiled_product(**options: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()

    def product(a: Any, b: Any, offs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return GROUPED_GEMM(a, b, offs, out=out, **options)

    return torch.compile(product, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("check_offs", [False, True])
def test_values_are_looked_at_when_the_program_runs(check_offs: bool) -> None:
    product = compiled_product(check_offs=check_offs)
    a, b = activation(MXFP8), weight(MXFP8, GROUPS)
    product(a, b, OFFS)
    with pytest.raises(ValueError, match=r"^offs\[1\] is 1; offs must not be negative nor decrease"):
        product(a, b, torch.tensor([2, 1, 5], dtype=torch.int32))


def test_offs_are_checked_on_a_kernel_where_that_is_wanted() -> None:
    """The emulator's kernels take any offs; with check_offs the program refuses what is no partition."""
    descending = torch.tensor([2, 1, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^offs\[1\] is 1"):
        compiled_product(check_offs=True, backend="emulator")(activation(FP8_BLOCK), weight(FP8_BLOCK, 3), descending)
    with pytest.raises(ValueError, match=r"^offs\[0\] is 2, which is no multiple of m_aligned = 4"):
        torch.compile(padless.grouped_gemm_epilogue, backend="aot_eager", fullgraph=True)(
            activation(MXFP8), weight(MXFP8, 3), OFFS, Epilogue(d_dtype=torch.bfloat16), m_aligned=4, check_offs=True
        )


def test_scales_of_other_groups_are_refused_when_the_program_runs() -> None:
    product, b = compiled_product(), weight(NVFP4, GROUPS)
    a = activation(offs=OFFS)
    assert same(product(a, b, OFFS), padless.grouped_gemm(a, b, OFFS))
    with pytest.raises(ValueError, match=r"^offs\[0\] is 1 and a has scales for groups of which that one ends at 2"):
        product(a, b, OTHER_OFFS)


def test_a_tensor_that_a_program_made_remembers_its_groups() -> None:
    torch._dynamo.reset()
    quantize = torch.compile(padless.quantize, backend="aot_eager", fullgraph=True)
    a, b = quantize(normal(M, K), NVFP4, offs=OFFS), weight(NVFP4, GROUPS)
    assert same(padless.grouped_gemm(a, b, OFFS), padless.grouped_gemm(activation(offs=OFFS), b, OFFS))
    with pytest.raises(ValueError, match=r"^offs\[0\] is 1 and a has scales for groups"):
        padless.grouped_gemm(a, b, OTHER_OFFS)


def test_parts_with_other_global_scales_become_nan_in_a_program() -> None:
    class Joined(torch.nn.Module):
        def forward(self, data: torch.Tensor, scale: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> Any:
            parts = [padless.BlockScaledTensor(data, scale, NVFP4, shared, w.scale_layout) for shared in (one, two)]
            return checkpoints.concatenate_rows(parts).global_scale

    w, one = weight(), torch.tensor([0.5])
    program = torch.export.export(Joined(), (w.data, w.scale, one, one.clone()), strict=False).module()
    assert program(w.data, w.scale, one, one.clone()).tolist() == [0.5]
    assert bool(program(w.data, w.scale, one, one * 2).isnan())


# --- the operators -----------------------------------------------------------------------------------------


def test_a_config_and_a_backend_reach_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(padless, "grouped_gemm", lambda *operands, **how: seen.append(how))
    for config in (None, padless.Sm90Fp8Config(block_m=64, out_dtype=torch.float16), padless.Sm90Bf16Config):
        compiled_product(backend="emulator", config=config)(activation(FP8_BLOCK), weight(FP8_BLOCK, 3), OFFS)
        assert seen[-1]["config"] == config
        assert seen[-1]["backend"] == "emulator"


GATED = Epilogue(
    activation="swiglu", gate_up="alternating", gate_rule=padless.GateRule(1.7, 7.0, -1.0), d_dtype=torch.bfloat16
)


def test_a_rule_of_the_gate_reaches_the_call() -> None:
    torch._dynamo.reset()
    operands = activation(FP8_BLOCK), weight(FP8_BLOCK, GROUPS), OFFS, GATED
    made = torch.compile(padless.grouped_gemm_epilogue, backend="aot_eager", fullgraph=True)(*operands)
    assert same(made.d, padless.grouped_gemm_epilogue(*operands).d)


def settings() -> list[Any]:
    classes = {route.config_class for route in (*ROUTES, *PLAIN_ROUTES)} | {
        padless.WgradConfig,
        padless.Bf16WgradConfig,
    }
    required = {"a_format": "MXFP8", "b_format": "MXFP4"}
    made = [
        found(**{f.name: required[f.name] for f in dataclasses.fields(found) if f.name in required})
        for found in classes
    ]
    named = [dataclasses.replace(config, out_dtype=torch.float32) for config in made]
    epilogue = Epilogue(True, False, True, amax=True, row_format=NVFP4, row_layout="blocked", scale_rule="te")
    return [None, *classes, *made, *named, epilogue, GATED, Epilogue(d_dtype=torch.float16)]


def test_settings_are_told_by_their_text() -> None:
    for given in settings():
        assert traced.from_text(traced.text_of(given)) == given


class Recorder(TorchDispatchMode):
    """Every operator of padless that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "padless":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(function: Callable[..., Any], *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    with Recorder() as recorder:
        function(*arguments)
    return recorder.calls[0]


def uses() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    a, b, out = activation(FP8_BLOCK), weight(FP8_BLOCK, GROUPS), torch.zeros(M, N)
    of_one = weight(FP8_BLOCK)
    dy, x = columns(N), columns(K, (128, 128))
    rows = normal(M, N).bfloat16(), normal(M, K).bfloat16()
    tensors = padless.EpilogueTensors(d=out, amax=torch.zeros(GROUPS), row_codes=activation(FP8_BLOCK).data[:, :N])
    epilogue = Epilogue(amax=True, d_dtype=torch.float32, row_format=FP8_BLOCK)
    tensors = dataclasses.replace(tensors, row_scale=torch.zeros(M, 1))
    return {
        "grouped_gemm_": lambda: recorded(traced.product, a, b, OFFS, out, None, True, None),
        "grouped_gemm_ of one group": lambda: recorded(traced.product, a, of_one, None, out, None, False, None),
        "grouped_gemm_list_": lambda: recorded(traced.products, [a], [of_one], [out], torch.ones(1), None, None),
        "grouped_gemm_epilogue_": lambda: recorded(
            traced.product_with_epilogue, a, b, OFFS, epilogue, tensors, None, None, 1, True
        ),
        "grouped_gemm_wgrad_of_columns_": lambda: recorded(
            traced.wgrad_of_columns, dy, x, torch.zeros(GROUPS, N, K), True, None, None
        ),
        "grouped_gemm_wgrad_of_rows_": lambda: recorded(
            traced.wgrad_of_rows, *rows, OFFS, torch.zeros(GROUPS, N, K), True, None, None
        ),
        "quantize": lambda: recorded(
            traced_quantize.quantized, normal(M, K), FP8_BLOCK, "activation", "mn", "", "plain", None, None, None
        ),
    }


@pytest.mark.parametrize("name", uses())
def test_operator(name: str) -> None:
    """Schema, fake tensors, functionalization."""
    function, arguments = uses()[name]()
    assert str(function) == f"padless.{name.split()[0]}.default"
    torch.library.opcheck(function, arguments)


def test_every_operator_is_tried() -> None:
    own = {name for name in vars(traced) if isinstance(getattr(traced, name), torch._ops.OpOverload)}
    assert len(own) == len({name.split()[0] for name in uses()} - {"quantize"})


def test_other_tensors_would_be_seen() -> None:
    """The comparison with other values is one: the two sets of arguments give other results."""
    module = Program("grouped_gemm")
    tensors = tensors_of(module.arguments)
    assert not same(module(tensors)[0].clone(), module(with_other_values(tensors, False))[0])
    assert [name for name, _ in tensors_in(module.arguments, "")]
