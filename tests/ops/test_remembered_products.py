"""Calls that were made before: launched again only when everything the launch was packed from is as it was.

The tensors here lie in host memory and say that they are on a GPU; the device is a recorder. What a launch was packed
from is told by the recorder, so a launch with anything stale in it shows.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels import ahead, remembered
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.layouts import to_mn_major
from padless.runtime import driver
from padless.runtime.tensor_map import TensorMapSpec

MODULE = importlib.import_module("padless.ops.grouped_gemm")
M, N, K, GROUPS = 300, 136, 400, 3


class Device:
    """A driver whose launches say what they were packed from."""

    kind = "ptx"
    arch = "sm_90a"

    def __init__(self) -> None:
        self.prepared = 0
        self.launches: list[tuple[Any, ...]] = []  # (what it was packed from, stream)
        self._specs: list[TensorMapSpec] = []

    def num_sms(self, device: int) -> int:
        return 132

    def load(self, kernel: Any, device: int) -> str:
        return kernel.entry

    def encode(self, spec: TensorMapSpec) -> bytes:
        self._specs.append(spec)
        return bytes(128)

    def prepare(self, function: Any, kernel: Any, shape: Any, arguments: Sequence[Any], tensors: Any) -> Any:
        self.prepared += 1
        specs, self._specs = tuple(self._specs), []
        numbers = tuple(argument[0] for argument in arguments if not isinstance(argument, bytes))

        def launch(stream: int) -> None:
            self.launches.append((specs, numbers, stream))

        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    recording = Device()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(MODULE, "device_of", lambda backend, out: recording)
    monkeypatch.setattr(driver, "current_stream", lambda index: 77)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    return recording


def operands(seed: int = 0, m: int = M, n: int = N, k: int = K, groups: int = GROUPS) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)

    blocks = -(-k // 128)
    a = BlockScaledTensor(codes(m, k), to_mn_major(torch.rand(m, blocks, generator=generator)), FP8_BLOCK)
    b = BlockScaledTensor(codes(groups, n, k), torch.rand(groups, -(-n // 128), blocks, generator=generator), FP8_BLOCK)
    return a, b, torch.tensor([100, 100, 250][:groups], dtype=torch.int32)


def addresses(launch: tuple[Any, ...]) -> tuple[int, ...]:
    """Of a.data, b.data, a.scale, out (the maps), b.scale, offs (numbers)."""
    specs, numbers, _ = launch
    return (*(spec.address for spec in specs[:3]), numbers[0], numbers[1])


def expected_addresses(a: Any, b: Any, offs: Any) -> tuple[int, ...]:
    tensors = (a.data, b.data, a.scale, b.scale, offs)
    return tuple(t.data_ptr() for t in tensors)


def empty_out(m: int = M, n: int = N, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((m, n), dtype=dtype)


def test_the_second_call_packs_nothing(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    for _ in range(3):
        assert padless.grouped_gemm(a, b, offs, out=out) is out
    assert device.prepared == 1
    assert len(device.launches) == 3
    assert len(set(device.launches)) == 1
    assert device.launches[0][2] == 77, "on the current stream"
    assert addresses(device.launches[0]) == expected_addresses(a, b, offs)


def test_other_objects_over_the_same_memory_pack_nothing(device: Device) -> None:
    """Activations are quantised anew at every call, often into the memory of the last ones."""
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    again = BlockScaledTensor(a.data.view(a.data.shape), a.scale.as_strided(a.scale.shape, a.scale.stride()), a.format)
    assert again.data is not a.data
    padless.grouped_gemm(again, b, offs.view(-1), out=out.view(M, N))
    assert device.prepared == 1
    assert len(device.launches) == 2


def test_the_dense_product_is_remembered_too_and_apart(device: Device) -> None:
    a, b, _ = operands(groups=1)
    dense = BlockScaledTensor(b.data[0], b.scale[0], FP8_BLOCK)
    out = empty_out()
    for _ in range(3):
        padless.gemm(a, dense, out=out)
    assert device.prepared == 1
    offs = torch.tensor([200], dtype=torch.int32)
    padless.grouped_gemm(a, b, offs, out=out)
    assert device.prepared == 2
    assert device.launches[-1][1][1] == offs.data_ptr()
    with pytest.raises(ValueError, match="rank 3"):
        padless.grouped_gemm(a, dense, None, out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize("moved", ["a", "offs", "out"])
def test_addresses_of_another_gpu_are_another_call(device: Device, monkeypatch: pytest.MonkeyPatch, moved: str) -> None:
    """An address that one GPU gave back may be another one's next."""
    a, b, offs = operands()
    out, elsewhere = empty_out(), set[int]()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: int(t.data_ptr() in elsewhere))
    monkeypatch.setattr(driver, "current_stream", lambda index: 77 + index)
    padless.grouped_gemm(a, b, offs, out=out)
    elsewhere.add({"a": a.data, "b": b.data, "offs": offs, "out": out}[moved].data_ptr())
    padless.grouped_gemm(a, b, offs, out=out)
    assert device.prepared == 2
    elsewhere.update(t.data_ptr() for t in (a.data, b.data, offs, out))
    for _ in range(2):
        padless.grouped_gemm(a, b, offs, out=out)
    assert device.prepared == 3
    assert device.launches[-1][2] == 78, "on the current stream of that GPU"


def test_a_new_output_is_made_when_none_is_given(device: Device) -> None:
    a, b, offs = operands()
    kept = [padless.grouped_gemm(a, b, offs) for _ in range(3)]
    assert len({out.data_ptr() for out in kept}) == 3
    for out, launch in zip(kept, device.launches, strict=True):
        assert out.shape == (M, N)
        assert out.dtype == torch.bfloat16
        assert launch[0][3].address == out.data_ptr()
    wanted = padless.grouped_gemm(a, b, offs, out_dtype=torch.float32)
    assert wanted.dtype == torch.float32
    with pytest.raises(ValueError, match="out_dtype"):
        padless.grouped_gemm(a, b, offs, out_dtype=torch.float64)


def test_a_call_allocates_one_output_and_packs_for_that_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that hands out two addresses in turns must not have every call packed anew."""
    a, b, offs = operands()
    places = [empty_out(), empty_out()]
    asked: list[torch.Size] = []

    def in_turns(shape: Any, **options: Any) -> torch.Tensor:
        asked.append(shape)
        return places[len(asked) % 2]

    monkeypatch.setattr(torch, "empty", in_turns)
    for _ in range(9):
        padless.grouped_gemm(a, b, offs)
    assert len(asked) == 9
    assert device.prepared == 2
    assert [launch[0][3].address for launch in device.launches[:2]] == [places[1].data_ptr(), places[0].data_ptr()]


# Each changes one thing that a launch depends on, in place: the objects and, where it says so, the addresses stay.
def _resize(t: torch.Tensor, shape: tuple[int, ...]) -> None:
    before = t.data_ptr()
    t.resize_(shape)
    assert t.data_ptr() == before


CHANGES: dict[str, Any] = {
    "a.data moves": lambda a, b, offs, out: a.data.set_(a.data.clone()),
    "a.scale moves": lambda a, b, offs, out: a.scale.set_(to_mn_major(a.scale.contiguous())),
    "b.data moves": lambda a, b, offs, out: b.data.set_(b.data.clone()),
    "b.scale moves": lambda a, b, offs, out: b.scale.set_(b.scale.clone()),
    "offs moves": lambda a, b, offs, out: offs.set_(offs.clone()),
    "out moves": lambda a, b, offs, out: out.set_(out.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_moves_in_place_is_packed_again(device: Device, change: str) -> None:
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    before = device.launches[-1]
    keep = [t.view(-1).clone() if t.is_contiguous() else t for t in (a.data, b.data)]  # addresses stay taken
    CHANGES[change](a, b, offs, out)
    padless.grouped_gemm(a, b, offs, out=out)
    assert device.prepared == 2, change
    after = device.launches[-1]
    assert after != before
    assert addresses(after) == expected_addresses(a, b, offs)
    del keep


def test_what_is_cut_in_place_is_packed_again_or_refused(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    _resize(a.data, (200, K))
    with pytest.raises(ValueError, match=r"scales of shape|out must be"):
        padless.grouped_gemm(a, b, offs, out=out)
    _resize(a.data, (M, K))
    _resize(offs, (2,))
    with pytest.raises(ValueError, match="offs has 2 entries"):
        padless.grouped_gemm(a, b, offs, out=out)
    _resize(offs, (3,))
    _resize(out, (200, N))
    with pytest.raises(ValueError, match="out must be"):
        padless.grouped_gemm(a, b, offs, out=out)
    _resize(out, (M, N))
    _resize(b.data, (2, N, K))
    with pytest.raises(ValueError, match=r"."):
        padless.grouped_gemm(a, b, offs, out=out)
    _resize(b.data, (GROUPS, N, K))
    launches = len(device.launches)
    padless.grouped_gemm(a, b, offs, out=out)
    assert len(device.launches) == launches + 1


def test_fewer_rows_in_the_same_buffers(device: Device) -> None:
    """A server's buffers: the addresses never change, the number of rows always does."""
    codes = torch.zeros((M, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(4 * M)
    _, b, offs = operands()
    result = empty_out()
    for m in (300, 280, 300, 4, 280):
        scale = scales[: 4 * m].view(4, m).t()
        a = BlockScaledTensor(codes[:m], scale, FP8_BLOCK)
        padless.grouped_gemm(a, b, offs, out=result[:m])
        specs, numbers, _ = device.launches[-1]
        assert specs[0].dims == (K, m)
        assert numbers[2] == m
    assert device.prepared == 3, "each number of rows once"


def test_rows_that_lie_further_apart_are_packed_again(device: Device) -> None:
    a, b, offs = operands()
    wide = torch.empty((M, N + 8), dtype=torch.bfloat16)
    narrow = wide.flatten()[: M * N].view(M, N)
    padless.grouped_gemm(a, b, offs, out=wide[:, :N])
    padless.grouped_gemm(a, b, offs, out=narrow)
    padless.grouped_gemm(a, b, offs, out=wide[:, :N])
    assert device.prepared == 2
    first, second, third = device.launches
    assert first == third
    assert first[0][3:] != second[0][3:]


def test_operands_whose_rows_lie_further_apart_are_packed_again(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    wide = torch.zeros((M, K + 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    experts = torch.zeros((GROUPS, N + 8, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
    far_x, near_x = wide[:, :K], wide.flatten()[: M * K].view(M, K)
    far_w, near_w = experts[:, :N], experts.flatten()[: GROUPS * N * K].view(GROUPS, N, K)
    for x, w in ((far_x, far_w), (near_x, far_w), (near_x, near_w), (far_x, near_w)):  # one changes at a time
        a, b = BlockScaledTensor(x, a.scale, FP8_BLOCK), BlockScaledTensor(w, b.scale, FP8_BLOCK)
        padless.grouped_gemm(a, b, offs, out=out)
        specs = device.launches[-1][0]
        assert (specs[0].strides, specs[1].strides) == (x.stride()[:1], (w.stride(1), w.stride(0)))
    assert device.prepared == 4


def test_another_type_at_the_same_address_is_packed_again(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    padless.grouped_gemm(a, b, offs, out=out.view(torch.float16))
    assert device.prepared == 2
    with pytest.raises(ValueError, match="offs must be a 1-D int32"):
        padless.grouped_gemm(a, b, offs.view(torch.float32), out=out)
    with pytest.raises(ValueError, match="out must be"):
        padless.grouped_gemm(a, b, offs, out=out.view(torch.int16))


def test_another_config_is_packed_again(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    for config in (None, Sm90Fp8Config(block_n=64), None, Sm90Fp8Config(block_n=64), Sm90Fp8Config(block_n=128)):
        padless.grouped_gemm(a, b, offs, out=out, config=config)
    assert device.prepared == 3


def test_a_format_of_another_kind_over_the_same_memory_is_not_taken_for_it(device: Device) -> None:
    """A format that is not FP8_BLOCK, made and dropped again and again: its id may be that of an older one."""
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    for _ in range(50):
        other = dataclasses.replace(FP8_BLOCK, name="OTHER")
        with pytest.raises(ValueError, match="OTHER"):
            padless.grouped_gemm(BlockScaledTensor(a.data, a.scale, other), b, offs, out=out)
        del other
    assert device.prepared == 1


def test_no_operand_is_kept_alive(device: Device) -> None:
    a, b, offs = operands()
    out = empty_out()
    padless.grouped_gemm(a, b, offs, out=out)
    padless.grouped_gemm(a, b, offs, out=out)
    watched = [weakref.ref(t) for t in (a, b, offs, out, a.data, a.scale, b.data, b.scale)]
    del a, b, offs, out
    gc.collect()
    assert [watch() for watch in watched] == [None] * len(watched)


def test_freed_operands_and_others_in_their_place(device: Device) -> None:
    """Operands come and go; ids and addresses repeat. Every launch is of the operands of its call."""
    ids, places = set(), set()
    repeated_id = repeated_place = turn = 0
    while min(repeated_id, repeated_place) < 3 and turn < 2000:  # the allocator decides when
        m = (300, 200, 100)[turn % 3]
        a, b, offs = operands(turn, m=m, n=16, k=32)
        out = empty_out(m, 16)
        padless.grouped_gemm(a, b, offs, out=out)
        specs, numbers, _ = device.launches[-1]
        assert addresses(device.launches[-1]) == expected_addresses(a, b, offs)
        assert specs[0].dims == (32, m)
        assert numbers[2] == m
        repeated_id += id(a) in ids
        repeated_place += a.data.data_ptr() in places
        ids.add(id(a))
        places.add(a.data.data_ptr())
        turn += 1
        del a, b, offs, out
    assert repeated_id >= 3, "no id was used again: this test saw nothing"
    assert repeated_place >= 3, "no address was used again: this test saw nothing"


def test_what_is_refused_is_not_remembered(device: Device) -> None:
    a, b, offs = operands()
    for _ in range(2):
        with pytest.raises(ValueError, match="out must be"):
            padless.grouped_gemm(a, b, offs, out=empty_out(M + 1))
    assert device.prepared == 0
    assert device.launches == []


def test_tensors_on_the_host_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_KNOWN", {})
    a, b, offs = operands(m=8, n=16, k=32)
    offs = torch.tensor([2, 2, 8], dtype=torch.int32)
    padless.grouped_gemm(a, b, offs)
    assert remembered._KNOWN == {}


def test_the_memory_is_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 4)
    monkeypatch.setattr(MODULE, "_MOST_OUTPUTS", 4)
    a, b, offs = operands()
    outs = [empty_out() for _ in range(9)]
    for out in outs:
        padless.grouped_gemm(a, b, offs, out=out)
    (known,) = remembered._KNOWN.values()
    assert 0 < len(known) <= 4
    kept = [operands(seed) for seed in range(9)]
    for a, b, offs in kept:
        padless.grouped_gemm(a, b, offs, out=outs[0])
    assert 0 < len(remembered._KNOWN) <= 4


def test_threads_share_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads over the same and over their own operands, the memory overflowing all the time."""
    monkeypatch.setattr(remembered, "_MOST", 3)
    monkeypatch.setattr(MODULE, "_MOST_OUTPUTS", 2)
    stream = threading.local()
    monkeypatch.setattr(driver, "current_stream", lambda index: stream.number)
    monkeypatch.setattr(MODULE, "device_of", lambda backend, out: stream.device)  # packing is each thread's own
    launches = device.launches  # launching is noted in one place, whoever packed it
    shared = operands()
    problems: list[str] = []

    def work(number: int) -> None:
        stream.number, stream.device = number, Device()
        stream.device.launches = launches
        own = operands(number)
        out = empty_out()
        for turn in range(100):
            a, b, offs = own if turn % 2 else shared
            padless.grouped_gemm(a, b, offs, out=out)
        mine = [launch for launch in launches if launch[2] == number]
        wanted = [expected_addresses(*(own if turn % 2 else shared)) for turn in range(100)]
        if [addresses(launch) for launch in mine] != wanted:
            problems.append(f"thread {number} launched something else")
        if {launch[0][3].address for launch in mine} != {out.data_ptr()}:
            problems.append(f"thread {number} wrote elsewhere")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_the_operands_are_read_once_a_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the call is new, is like one before but for its output, or is one before."""
    count: list[int] = []
    right = MODULE.facts_of

    def counted(options: Any, *operands: Any, **how: Any) -> Any:
        count.extend([1] * (len(operands) == 3))
        return right(options, *operands, **how)

    monkeypatch.setattr(MODULE, "facts_of", counted)
    a, b, offs = operands()
    out, other = empty_out(), empty_out()
    for calls, tensor in enumerate((out, other, out, other), start=1):
        padless.grouped_gemm(a, b, offs, out=tensor)
        assert len(count) == calls
    assert device.prepared == 2
    assert len(device.launches) == 4


def test_operands_that_changed_since_they_were_missed_are_not_confused(device: Device) -> None:
    """A launch is kept for what was read of the operands before it was packed."""
    a, b, offs = operands()
    out = empty_out()
    facts = remembered.facts_of(("grouped_gemm", None), a, b, offs)
    other, _, _ = operands(seed=1)
    assert facts is not None
    remembered.remember(facts, {remembered.facts_of((None,), out): lambda stream: None})
    padless.grouped_gemm(other, b, offs, out=out)
    assert device.prepared == 1, "other activations are packed for"


def test_a_launch_that_reads_ahead_is_not_taken_for_one_that_waits(device: Device) -> None:
    """Nor one that reads other ids ahead, for the same operands and output."""
    a, b, offs = operands()
    out = empty_out()
    ids, others = (torch.zeros(M, 1, dtype=torch.int64) for _ in range(2))
    states = (None, ahead.Ready(), ahead.Ready(ids), ahead.Ready(others), ahead.Ready(ids.to(torch.int32)))
    for _ in range(2):
        for what in states:
            with ahead.ready(what):
                padless.grouped_gemm(a, b, offs, out=out)
        assert device.prepared == len(states)


def test_an_output_in_the_memory_of_known_operands_is_refused_each_time(device: Device) -> None:
    a, b, offs = operands()
    padless.grouped_gemm(a, b, offs, out=torch.empty(M, N, dtype=torch.bfloat16))
    shared = b.data.view(torch.uint8).flatten()[: M * N * 2].view(torch.bfloat16).view(M, N)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out shares memory with b\.data"):
            padless.grouped_gemm(a, b, offs, out=shared)
    assert len(device.launches) == 1
