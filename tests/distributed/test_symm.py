"""The "symm" backend: virtual ranks in Triton's interpreter and in the emulator, planted bugs, real processes, GPUs."""

from __future__ import annotations

import re

import pytest
import torch

import padless
from padless.distributed.symm_state import FEW_SLOTS
from padless.testing import exchange
from support.interpreter import interpreted

pytest.importorskip("triton")
from padless.quantization.triton import launches as launches_of_triton
from support import ep_bugs, ep_cases, ep_emulated, ep_symm_cases, ep_symm_regions, ep_virtual

QUICK = ("three_ranks", "one_rank_ahead", "waits", "sums_of_slots")


@pytest.fixture(scope="module")
def quick() -> dict[str, str | None]:
    return interpreted("ep_symm_cases.py", *QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_virtual_ranks(name: str, quick: dict[str, str | None]) -> None:
    assert quick[name] is None, quick[name]


@pytest.mark.slow
def test_all_virtual_ranks() -> None:
    found = interpreted("ep_symm_cases.py", *(name for name in ep_symm_cases.CASES if name not in QUICK))
    assert not any(found.values()), found


def test_sizes_of_buffers() -> None:
    ep_symm_regions.CASES["sizes_of_buffers"]("cpu")


def test_memory_is_where_it_is_wanted_whatever_the_default_device() -> None:
    p = exchange.draw([2, 1], 4, 32, 3, 1)
    with torch.device("meta"):
        (state, _) = ep_virtual.make(p, device="cpu").states
    made = (state.buffer, state.pointers, state.counters, state.status)
    assert [t.device.type for t in made] == ["cpu"] * len(made)


@pytest.mark.slow
def test_regions_of_virtual_ranks() -> None:
    found = interpreted("ep_symm_regions.py")
    assert not any(found.values()), found


@pytest.mark.slow
def test_planted_bugs_are_found() -> None:
    found = interpreted("ep_bugs.py")
    assert list(found) == list(ep_bugs.BUGS)
    assert all(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_memory(size: int) -> None:
    """The same cases as on gloo with no other synchronization than the kernels' own."""
    names = (
        "invariance",
        "gradients",
        "gradient_rows",
        "transposes",
        "errors",
        "sizes",
        "functions_of_slots",
        "batches_in_one_memory",
        "gradients_of_slots",
        *(("training",) if size == 2 else ()),
    )
    found = interpreted("ep_shared.py", str(size), *names)
    assert not any(found.values()), found


@pytest.mark.slow
def test_processes_with_little_or_nothing() -> None:
    names = "construction", "no_gradients", "shared_rows", "router_of_inference_mode", "little_or_nothing"
    found = interpreted("ep_shared.py", "2", *names)
    assert not any(found.values()), found


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", [*ep_symm_cases.CASES, *ep_symm_regions.CASES])
def test_on_the_gpu(name: str) -> None:
    {**ep_symm_cases.CASES, **ep_symm_regions.CASES}[name]("cuda")


@pytest.mark.gpu(capability=None)
def test_on_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = ep_cases.run(cuda=True, backend="symm", timeout_s=300)
    assert not any(found.values()), found


# --- machine code for Hopper, in the emulator ------------------------------------------------------------

WAIT, LAST, SIGNAL = "sys.acquire.add", "sys.acq_rel.add", "sys.release.exch"  # a wait that ends early signals too


def signals(*, is_few: bool, polls: bool) -> dict[str, set[str]]:
    """Of each kernel; few slots: there are two halves of sums, and none waits until others were read."""
    waits, tells = {WAIT, SIGNAL} if polls else set[str](), {LAST, SIGNAL}
    return {
        "await_ranks": {WAIT, SIGNAL},
        "publish": tells,
        "publish_ids": tells,
        "localize": waits,
        "fan_out": waits,
        "receive_few": waits,
        "fan_out_gradients": waits,
        "fan_in": tells if is_few else tells | waits,
        "finish": waits if is_few else tells | waits,
    }


def atomics(kernel: ep_emulated.EmulatedExchange) -> set[str]:
    """Scope, order and operation of the atomics. The emulator takes the system's scope for the device's."""
    ptx = [compiled.asm["ptx"] for compiled in kernel._compiled.values()]
    return {word for text in ptx for word in re.findall(r"\b(?:atom|red)\.(?:global\.)?(\w+\.\w+\.\w+)", text)}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if i in (0, 3) else pytest.mark.slow) for i, way in enumerate(ep_symm_cases.WAYS)],
    ids=str,
)
def test_machine_code(way: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels, as compiled, on two ranks: rows, sums, and no multiply-add where two roundings are defined."""
    p = exchange.draw([2, 1], 4, 256, 3, 1)
    is_few, polls = (value > 0 for value in way.values())
    ranks = ep_virtual.make(p, **way)
    with monkeypatch.context() as patch:
        patch.setattr(launches_of_triton, "is_programmatic", lambda device: True)
        kernels = ep_emulated.emulate(patch, [s.buffer for s in ranks.states])
        ep_symm_cases.check_dispatch(p, ranks, ranks.settings[0].row_format.format, ranks.dispatch(p))
        ep_symm_cases.check_combine(p, ranks, 1, weighted=True)
        ep_symm_cases.check_again(p, ranks, 1)
        ep_symm_cases.check_no_error(ranks)
    launches = {"publish": 4, "fan_in": 2, "finish": 2}
    launches |= {"receive_few": 2, "fan_out": 2} if is_few else {"publish_ids": 2, "localize": 2, "fan_out": 4}
    if not polls:
        launches["await_ranks"] = 6 if is_few else 10  # with few slots neither for ids nor for sums that were read
    assert {name: k.launches for name, k in kernels.items() if k.launches} == launches
    wanted = signals(is_few=is_few, polls=polls)
    for name in launches:
        assert atomics(kernels[name]) == wanted[name], name
    for name in ("await_ranks", "publish", "receive_few", "fan_in", "finish"):
        for compiled in kernels[name]._compiled.values():  # they begin ahead, and wait first
            assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == (is_few or name != "publish"), name
    for name in ("receive_few", "finish") if polls else ("await_ranks",):
        for compiled in kernels[name]._compiled.values():  # and let nothing begin before all ranks are there
            ptx = compiled.asm["ptx"]
            assert 0 < ptx.rindex("sys.acquire.add") < ptx.index("griddepcontrol.launch_dependents"), name
    for name in ("fan_in", "finish"):
        assert all("fma.rn.f32" not in c.asm["ptx"] for c in kernels[name]._compiled.values())


@pytest.mark.parametrize("few_slots", [0, pytest.param(FEW_SLOTS, marks=pytest.mark.slow)])
def test_machine_code_of_sums_of_slots(few_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two roundings where two are defined, at home as well."""
    p = exchange.draw([2, 1], 4, 256, 3, 1)
    ranks = ep_virtual.make(p, fmt=torch.bfloat16, few_slots=few_slots, sums="slots")
    with monkeypatch.context() as patch:
        kernels = ep_emulated.emulate(patch, [s.buffer for s in ranks.states])
        ranks.dispatch(p)
        ep_symm_cases.check_slots(p, ranks, 0, weighted=True, out_dtype=torch.bfloat16)
        ep_symm_cases.check_no_error(ranks)
    for name in ("fan_in", "finish"):
        assert all("fma.rn.f32" not in c.asm["ptx"] for c in kernels[name]._compiled.values())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1], [1, 1]])
def test_machine_code_of_one_token(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, tokens, slots and experts of which there is one are constants to the compiler."""
    p = exchange.draw(sizes, len(sizes), 160, 1, 1, distinct=True)
    ranks = ep_virtual.make(p)
    monkeypatch.setattr(launches_of_triton, "is_programmatic", lambda device: True)
    kernels = ep_emulated.emulate(monkeypatch, [s.buffer for s in ranks.states])
    for call in range(2):
        ep_symm_cases.check_dispatch(p, ranks, ranks.settings[0].row_format.format, ranks.dispatch(p))
        ep_symm_cases.check_combine(p, ranks, call, weighted=True)
    ep_symm_cases.check_no_error(ranks)
    assert kernels["receive_few"].launches == 2 * len(sizes)


@pytest.mark.slow
def test_machine_code_of_three_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and signals used again, by other tokens."""
    p = exchange.draw([3, 1], 4, 256, 3, 1)
    ranks = ep_virtual.make(p, few_slots=0)
    kernels = ep_emulated.emulate(monkeypatch, [s.buffer for s in ranks.states])
    for call in range(3):
        p = exchange.draw([3 - call, 1 + call], 4, 256, 3, call)
        ep_symm_cases.check_dispatch(p, ranks, ranks.settings[0].row_format.format, ranks.dispatch(p))
        ep_symm_cases.check_combine(p, ranks, call, weighted=call == 1)
    ep_symm_cases.check_no_error(ranks)
    assert (kernels["fan_out"].launches, kernels["fan_in"].launches, kernels["finish"].launches) == (6, 6, 6)


@pytest.mark.slow
def test_machine_code_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in FP8 by a plan, one of them tiny, decoded by the GPU's own conversion, on two ranks."""
    p = exchange.draw([2, 1], 4, 160, 3, 1)
    ranks = ep_virtual.make(p, fmt=torch.bfloat16, few_slots=0, gradient_format=padless.FP8_BLOCK)
    kernels = ep_emulated.emulate(monkeypatch, [s.buffer for s in ranks.states])
    ranks.dispatch(p)
    generator = torch.Generator().manual_seed(2)
    x = [torch.randn(t.shape, generator=generator) for t in p.tokens]
    x = [(t * 2.0 ** torch.randint(-20, 3, t.shape, generator=generator)).to(torch.bfloat16) for t in x]
    values = [padless.dequantize(padless.quantize(t, padless.FP8_BLOCK), torch.bfloat16) for t in x]
    x[0][1] *= 2.0**-48
    values[0][1] *= 2.0**-48
    for r, got in enumerate(ranks.redispatch(x)):
        want = exchange.rows_of(exchange.Problem(values, p.ids, p.weights, p.expert_map), r, torch.bfloat16)
        exchange.assert_rows(got, want, f"rank {r}")
    ep_symm_cases.check_no_error(ranks)
    assert kernels["fan_out_gradients"].launches == 2
    assert atomics(kernels["fan_out_gradients"]) == {WAIT, SIGNAL}
    assert all("fma.rn.f32" not in c.asm["ptx"] for c in kernels["fan_out_gradients"]._compiled.values())


@pytest.mark.slow
def test_rows_move_in_words_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads from and stores to other ranks' buffers, whose addresses are numbers to the compiler."""
    p = exchange.draw([1, 1], 2, 2048, 2, 2)
    ranks = ep_virtual.make(p, few_slots=0)
    kernels = ep_emulated.emulate(monkeypatch, [s.buffer for s in ranks.states])
    ranks.dispatch(p)
    ep_symm_cases.check_combine(p, ranks, 1, weighted=False)
    for name, loads, stores in (("fan_out", 1, 2), ("fan_in", 2, 1), ("finish", 2, 1), ("publish", 1, 1)):
        for compiled in kernels[name]._compiled.values():
            ptx = compiled.asm["ptx"]
            assert ptx.count("ld.global.v4") >= loads, name
            assert ptx.count("st.global.v4") >= stores, name
