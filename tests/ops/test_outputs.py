"""Outputs in the memory of what a call reads: refused, whatever computes; parts of one buffer that lie apart: taken."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.ops.outputs import check_outputs
from support.public_calls import CALLS, GROUPS, OFFS, K, M, N, activation, normal, replaced, same, tensors_in, weight

# Outputs that a caller gives, by the name that messages have, and where the call finds them.
OUTPUTS = {
    "gemm": ("out",),
    "grouped_gemm": ("out",),
    "grouped_gemm of plain tensors": ("out",),
    "grouped_gemm_list": ("out[0]", "out[1]"),
    "grouped_gemm_wgrad": ("out",),
    "grouped_gemm_wgrad of rows": ("out",),
    "grouped_gemm_epilogue into given outputs": tuple(f"tensors.{o}" for o in ("d", "amax", "row_codes", "row_scale")),
    "grouped_gemm_quant into a given output": ("out.data", "out.scale"),
    "grouped_gemm_swiglu_quant into a given output": ("out.data", "out.scale"),
    "GroupedGemmQuant.execute": (*("d_tensor", "d_col_tensor", "amax_tensor"), *("sfd_row_tensor", "sfd_col_tensor")),
}
# What a call reads a copy of, or does not read.
UNREAD = ("bias_tensor",)


def parts(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by name, each memory once."""
    found: dict[str, torch.Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, padless.GroupedColumns):
            found |= {f"{key}.{name}": t for name, t in vars(value).items() if isinstance(t, torch.Tensor)}
        else:
            found |= dict(tensors_in(value, key))
    return found


def pairs() -> list[tuple[str, str, str]]:
    made = []
    for call, outputs in OUTPUTS.items():
        names = [name for name in parts(CALLS[call].arguments()) if not name.startswith(UNREAD)]
        made += [(call, output, other) for output in outputs for other in names if other != output]
    return made


def extent(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def placed(t: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """The values of ``t`` with its strides, from byte ``start`` of the memory on."""
    part = memory[start : start + extent(t)].view(t.dtype)
    made = part.as_strided(t.shape, t.stride())
    to, of = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (made, t))
    to.copy_(of)
    return made


def sharing(arguments: dict[str, Any], output: str, other: str) -> dict[str, Any]:
    """The call with ``other`` in new memory and ``output`` behind its first element, 16 bytes or more."""
    found = parts(arguments)
    one, two = found[output], found[other]
    memory = torch.zeros(extent(one) + extent(two) + 64, dtype=torch.uint8)
    start = max(extent(two) - 1, 0) // 16 * 16
    moved = {id(one): placed(one, memory, start), id(two): placed(two, memory, 0)}  # what is read keeps its values
    return replaced(arguments, lambda t: moved.get(id(t), t))


@pytest.mark.parametrize(("call", "output", "other"), pairs())
def test_an_output_in_other_memory_of_the_call_is_refused(call: str, output: str, other: str) -> None:
    arguments = CALLS[call].arguments()
    given = sharing(arguments, output, other)
    before = [t.clone().flatten() for t in parts(given).values()]
    with pytest.raises(ValueError, match="memory") as raised:
        CALLS[call].function(**given)
    assert output in str(raised.value)
    assert "\n" not in str(raised.value)
    for was, t in zip(before, parts(given).values(), strict=True):
        assert torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (was, t)))


@pytest.mark.parametrize("backend", ["emulator", "emulator:sm_100a"])
def test_a_kernels_output_is_refused(backend: Any) -> None:
    a, b, out = activation(FP8_BLOCK), weight(FP8_BLOCK, GROUPS), torch.empty(M, N)
    shared = sharing({"a": a, "b": b, "out": out}, "out", "b.data")
    with pytest.raises(ValueError, match=r"^out shares memory with b\.data"):
        padless.grouped_gemm(shared["a"], shared["b"], OFFS, out=shared["out"], backend=backend)


def test_every_call_that_takes_an_output_is_tried() -> None:
    takes = {"out", "d_tensor", "tensors"}
    assert {name for name, call in CALLS.items() if takes & set(call.arguments())} <= {
        *OUTPUTS,
        "grouped_gemm_epilogue",
    }


# --- what lies apart ---------------------------------------------------------------------------------------


def test_columns_of_one_buffer_lie_apart() -> None:
    """Rows of a and of out in turn: a pass over one buffer, with the product next to its operand."""
    b, buffer = normal(GROUPS, N, K).bfloat16(), torch.empty((M, K + N), dtype=torch.bfloat16)
    a, out = buffer[:, :K], buffer[:, K:]
    a.copy_(normal(M, K))
    padless.grouped_gemm(a, b, OFFS, out=out)
    assert same(out, padless.grouped_gemm(a, b, OFFS))


def test_outputs_of_a_list_in_one_buffer_lie_apart() -> None:
    given = CALLS["grouped_gemm_list"].arguments()
    buffer = torch.empty((8, N), dtype=torch.bfloat16)
    out = padless.grouped_gemm_list(**{**given, "out": [buffer[:3], buffer[3:]]})
    want = padless.grouped_gemm_list(**{**given, "out": None})
    assert all(torch.equal(x, y) for x, y in zip(out, want, strict=True))


def test_an_empty_output_shares_nothing() -> None:
    memory = torch.zeros((M, K), dtype=torch.bfloat16)
    b = normal(GROUPS, 0, K).bfloat16()
    assert padless.grouped_gemm(memory, b, OFFS, out=memory[:, :0]).shape == (M, 0)


def test_adding_to_an_output_is_no_overlap_with_itself() -> None:
    given = CALLS["grouped_gemm_wgrad of rows"].arguments()
    out = normal(GROUPS, N, K)
    want = out + padless.grouped_gemm_wgrad(**{**given, "out": None, "out_dtype": torch.float32})
    got = padless.grouped_gemm_wgrad(**{**given, "out": out}, accumulate=True)
    assert torch.allclose(got, want, atol=1e-5)
    assert not torch.equal(got, torch.zeros_like(got))


# --- the rule ----------------------------------------------------------------------------------------------


def addresses(t: torch.Tensor) -> set[int]:
    """Bytes of all elements."""
    found = set()
    for index in itertools.product(*map(range, t.shape)):
        at = t.data_ptr() + sum(i * s for i, s in zip(index, t.stride(), strict=True)) * t.element_size()
        found |= set(range(at, at + t.element_size()))
    return found


def refused(check: Callable[[], None]) -> bool:
    try:
        check()
    except ValueError:
        return True
    return False


def test_what_shares_an_element_is_refused_and_what_has_one_row_length_is_told_exactly() -> None:
    draw, memory = random.Random(5), torch.zeros(600, dtype=torch.uint8)
    counts = {True: 0, False: 0}
    for _ in range(600):
        pitch = draw.choice([24, 32, 48])
        made = []
        for _ in range(2):
            rows, columns, size = draw.randint(1, 5), draw.randint(1, 12), draw.choice([1, 2])
            dtype = torch.uint8 if size == 1 else torch.bfloat16
            start = draw.randrange(0, 200, 2)
            made.append(memory[start:][:400].view(dtype).as_strided((rows, columns), (pitch // size, 1)))
        one, two = made
        shares = bool(addresses(one) & addresses(two))
        counts[shares] += 1
        assert refused(lambda one=one, two=two: check_outputs([("out", one)], [("a", two)])) == shares
    assert min(counts.values()) > 100


def test_what_shares_an_element_is_refused_whatever_the_strides() -> None:
    draw, memory = random.Random(6), torch.zeros(4000, dtype=torch.uint8)
    counts = {True: 0, False: 0}
    for _ in range(600):
        made = []
        for _ in range(2):
            shape = tuple(draw.randint(1, 4) for _ in range(3))
            strides = tuple(draw.randint(1, 40) for _ in range(3))
            made.append(memory[draw.randint(0, 600) :].as_strided(shape, strides))
        one, two = made
        if addresses(one) & addresses(two):
            assert refused(lambda one=one, two=two: check_outputs([("out", one)], [("a", two)]))
            counts[True] += 1
        if len(addresses(one)) < one.numel():
            assert refused(lambda one=one: check_outputs([("out", one)], []))
            counts[False] += 1
    assert min(counts.values()) > 50


def test_two_inputs_may_share_memory() -> None:
    t = normal(4, 4)
    check_outputs([("out", normal(4, 4))], [("a", t), ("b", t), ("c", t[:2]), ("d", None)])


def test_outputs_with_one_element_under_many_names_are_refused() -> None:
    given = CALLS["grouped_gemm_list"].arguments()
    out = [torch.empty((1, N), dtype=torch.bfloat16).expand(m, N) for m in (3, 5)]
    with pytest.raises(ValueError, match=r"^out\[0\] has rows that overlap, with strides \(0, 1\)"):
        padless.grouped_gemm_list(**{**given, "out": out})
    call = CALLS["GroupedGemmQuant.execute"]
    arguments = call.arguments()
    arguments["amax_tensor"] = torch.zeros(1, 1).expand(GROUPS, 1)
    with pytest.raises(ValueError, match=r"^amax_tensor has strides \(0, 1\)"):
        call.function(**arguments)


def test_a_block_scaled_output_may_not_share_its_parts() -> None:
    given = CALLS["grouped_gemm_quant into a given output"].arguments()
    row = given["out"]
    memory = torch.zeros(row.data.numel() + row.scale.numel(), dtype=torch.uint8)
    data = memory[: row.data.numel()].view(row.data.dtype).view(row.data.shape)
    scale = memory[: row.scale.numel()].view(row.scale.dtype).view(row.scale.shape)
    out = BlockScaledTensor(data, scale, row.format, row.global_scale, row.scale_layout, row.offs)
    with pytest.raises(ValueError, match=r"^out\.(data|scale) shares memory with out\.(data|scale)"):
        padless.grouped_gemm_quant(**{**given, "out": out})
    assert dataclasses.is_dataclass(out)
