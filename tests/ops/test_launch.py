"""Launches of a call: one launch, with arguments that fit the kernel's parameters, never more."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels import launch as launching
from padless.kernels import maps
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import SCALE_MAJORS, STORES, Sm90Fp8Config
from padless.layouts import to_mn_major
from padless.runtime import jit
from padless.runtime.driver import Argument, LaunchShape
from padless.runtime.jit import CompiledKernel
from padless.runtime.tensor_map import TensorMapSpec

MODULE = importlib.import_module("padless.ops.grouped_gemm")  # the function has the name of its module


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: CompiledKernel
    shape: LaunchShape
    arguments: list[Argument]
    specs: list[TensorMapSpec]
    streams: list[int]


class RecordingDriver:
    """A device that multiplies nothing and remembers what it was asked."""

    kind = "ptx"
    arch = "sm_90a"
    sms = 132

    def __init__(self) -> None:
        self.specs: list[TensorMapSpec] = []
        self.launches: list[Launch] = []

    def num_sms(self, device: int) -> int:
        return self.sms

    def load(self, kernel: CompiledKernel, device: int) -> str:
        return kernel.entry

    def encode(self, spec: TensorMapSpec) -> bytes:
        self.specs.append(spec)
        return len(self.specs).to_bytes(128, "little")

    def prepare(
        self,
        function: Any,
        kernel: CompiledKernel,
        shape: LaunchShape,
        arguments: Sequence[Argument],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        launch = Launch(kernel, shape, list(arguments), self.specs, [])
        self.specs = []

        def call(stream: int) -> None:
            launch.streams.append(stream)
            self.launches.append(launch)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording = RecordingDriver()
    monkeypatch.setattr(MODULE, "device_of", lambda backend, out: recording)
    monkeypatch.setattr(launching, "_COUNTERS", {})
    return recording


def operands(m: int, n: int, k: int, groups: int, scale_major: str = "mn") -> tuple[Any, Any]:
    sfa = torch.ones((m, -(-k // 128)))
    a = BlockScaledTensor(
        torch.zeros((m, k), dtype=torch.uint8).view(torch.float8_e4m3fn),
        to_mn_major(sfa) if scale_major == "mn" else sfa,
        FP8_BLOCK,
    )
    codes = torch.zeros((groups, n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return a, BlockScaledTensor(codes, torch.ones((groups, -(-n // 128), -(-k // 128))), FP8_BLOCK)


def parameter_bytes(kernel: CompiledKernel) -> list[int]:
    """Sizes of the entry function's parameters, from its PTX."""
    entry = re.search(r"\.entry padless_sm90_fp8_grouped_gemm\(([^)]*)\)", kernel.image.decode())
    assert entry is not None
    sizes = []
    for line in entry[1].splitlines():
        if array := re.search(r"\.b8 \w+\[(\d+)\]", line):
            sizes.append(int(array[1]))
        elif scalar := re.search(r"\.param \.[ubsf](\d+) ", line):
            sizes.append(int(scalar[1]) // 8)
    return sizes


def sizes_of(arguments: list[Argument]) -> list[int]:
    return [len(argument) if isinstance(argument, bytes) else argument[1] for argument in arguments]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("scales", SCALE_MAJORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_arguments_are_the_kernels_parameters(
    device: RecordingDriver, store: str, scales: str, dtype: torch.dtype
) -> None:
    a, b = operands(300, 136, 400, 3, scales)
    offs = padless.group_offsets([100, 0, 150])
    out = torch.empty((300, 136), dtype=dtype)
    config = Sm90Fp8Config(block_n=64, store=store, scales=scales)
    padless.grouped_gemm(a, b, offs, out=out, backend="emulator", config=config)
    (launch,) = device.launches
    assert sizes_of(launch.arguments) == parameter_bytes(launch.kernel)
    assert launch.shape.block == launch.kernel.num_threads

    numbers = [argument[0] for argument in launch.arguments if not isinstance(argument, bytes)]
    assert numbers[:2] == [b.scale.data_ptr(), offs.data_ptr()]
    assert numbers[2:6] == [300, 136, 400, 3]
    assert numbers[7:] == [0, b.data.data_ptr(), 400, 136 * 400]  # 0: nothing is ready ahead

    # Every tensor map is of the operand it should be, and in the argument where the kernel looks for it.
    encoded = [argument for argument in launch.arguments if isinstance(argument, bytes)]
    assert b"".join(encoded) == b"".join((i + 1).to_bytes(128, "little") for i in range(len(launch.specs)))
    spec_a, spec_b, spec_scales, *spec_out = launch.specs
    assert (spec_a.address, spec_a.dims) == (a.data.data_ptr(), (400, 300))
    assert (spec_b.address, spec_b.dims) == (b.data.data_ptr(), (400, 136, 3))
    assert spec_b.box[1] == 64
    assert spec_scales.address == a.scale.data_ptr()
    assert spec_scales.dims == ((300, 4) if scales == "mn" else (1200,))
    if store == "pool":
        assert tuple(spec_out) == maps.output_pool(out, 64)
    else:
        assert spec_out == [maps.output_ragged(out, 64)]


def test_the_dense_product_has_no_offs(device: RecordingDriver) -> None:
    a, b = operands(300, 136, 400, 1)
    dense = BlockScaledTensor(b.data[0], b.scale[0], FP8_BLOCK)
    padless.gemm(a, dense, backend="emulator")
    (launch,) = device.launches
    numbers = [argument[0] for argument in launch.arguments if not isinstance(argument, bytes)]
    assert numbers[:6] == [b.scale.data_ptr(), 0, 300, 136, 400, 1]


@pytest.mark.parametrize(
    ("m", "n", "groups", "cluster"),
    [(1, 8, 1, 1), (1, 8, 1, 2), (300, 8, 3, 1), (8192, 4096, 8, 1), (8192, 4096, 8, 2), (10, 4096, 64, 2)],
)
@pytest.mark.parametrize("sms", [2, 7, 132])
def test_no_more_ctas_than_multiprocessors_and_enough_for_the_tiles(
    device: RecordingDriver, m: int, n: int, groups: int, cluster: int, sms: int
) -> None:
    device.sms = sms
    a, b = operands(m, n, 128, groups)
    config = Sm90Fp8Config(cluster_n=cluster)
    offs = padless.group_offsets([m] + [0] * (groups - 1))
    padless.grouped_gemm(a, b, offs, backend="emulator", config=config)
    (launch,) = device.launches
    assert launch.shape.cluster == cluster
    assert 0 < launch.shape.grid <= sms
    assert launch.shape.grid % cluster == 0
    # The most tiles that m rows in so many groups can make: every group but one a single row.
    single = min(groups - 1, m - 1)
    tiles = (single + -(-(m - single) // 128)) * -(-n // (128 * cluster))
    assert launch.shape.grid >= min(sms // cluster, tiles) * cluster


@pytest.mark.parametrize(("m", "n", "groups"), [(0, 64, 2), (5, 0, 2), (5, 64, 0)])
def test_nothing_to_do_is_not_launched(device: RecordingDriver, m: int, n: int, groups: int) -> None:
    a, b = operands(m, n, 128, groups)
    out = padless.grouped_gemm(a, b, torch.zeros(groups, dtype=torch.int32), backend="emulator")
    assert out.shape == (m, n)
    assert device.launches == []


@pytest.mark.parametrize("given", SCALE_MAJORS)
@pytest.mark.parametrize("read", SCALE_MAJORS)
def test_scales_are_copied_only_when_the_kernel_reads_them_otherwise(
    device: RecordingDriver, given: str, read: str
) -> None:
    a, b = operands(300, 136, 400, 3, given)
    offs = padless.group_offsets([100, 0, 150])
    padless.grouped_gemm(a, b, offs, backend="emulator", config=Sm90Fp8Config(scales=read))
    (launch,) = device.launches
    assert (launch.specs[2].address == a.scale.data_ptr()) == (given == read)
    assert launch.specs[2].dims == ((300, 4) if read == "mn" else (1200,))


def test_a_config_is_fitted_to_the_operands(device: RecordingDriver) -> None:
    """A caller names the tile; output type and room for groups follow from the call."""
    a, b = operands(600, 136, 400, 300)
    offs = padless.group_offsets([2] * 300)
    config = Sm90Fp8Config(block_m=64, block_n=64, out_dtype=torch.float16, max_groups=1)
    padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend="emulator", config=config)
    fitted = dataclasses.replace(config, out_dtype=torch.float32, max_groups=1024)
    assert device.launches[0].kernel is jit.compile_kernel(sm90_fp8.KERNEL, fitted.prelude(), "sm_90a", "ptx")


def test_a_config_that_cannot_be_fitted_is_refused(device: RecordingDriver) -> None:
    a, b = operands(8, 8, 16 * 1100, 1)
    with pytest.raises(ValueError, match="config has scales='k' and K is 17600"):
        padless.gemm(
            a, BlockScaledTensor(b.data[0], b.scale[0], FP8_BLOCK), backend="emulator", config=Sm90Fp8Config(scales="k")
        )
    assert device.launches == []


def test_a_config_that_does_not_fit_in_shared_memory_is_refused(device: RecordingDriver) -> None:
    a, b = operands(8, 8, 128, 1)
    with pytest.raises(ValueError, match="num_stages"):
        padless.grouped_gemm(a, b, padless.group_offsets([8]), backend="emulator", config=Sm90Fp8Config(num_stages=12))


# --- counters ----------------------------------------------------------------------------------------------


def counter_of(launch: Launch) -> int:
    value = launch.arguments[-5]  # after it: what is ready, and where the weights are
    assert not isinstance(value, bytes)
    return value[0]


def test_launches_that_can_run_together_have_different_counters(device: RecordingDriver) -> None:
    a, b = operands(300, 136, 400, 3)
    offs = padless.group_offsets([100, 0, 150])
    outs = [torch.empty((300, 136), dtype=torch.bfloat16) for _ in range(5)]
    config = Sm90Fp8Config()
    for out in [*outs, *reversed(outs)]:
        padless.grouped_gemm(a, b, offs, out=out, backend="emulator", config=config)
    counters = [counter_of(launch) for launch in device.launches]
    assert len(set(counters[:5])) == 5
    assert counters[5:] == counters[4::-1], "the same output, the same counter"


def test_when_all_counters_are_taken_the_shares_are_fixed(
    device: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_NUM_COUNTERS", 3)
    config = Sm90Fp8Config()
    assert [launching.tile_counter(config, 0, address) for address in (16, 32, 48, 64, 32, 80)] == [0, 1, 2, -1, 1, -1]
    # Another kernel or device has counters of its own.
    assert launching.tile_counter(Sm90Fp8Config(block_n=64), 0, 64) == 0
    assert launching.tile_counter(config, 1, 64) == 0


def test_the_host_and_the_kernel_have_as_many_counters() -> None:
    (exponent,) = re.findall(r"NUM_COUNTERS = 1 << (\d+);", jit.sources()["device/tile_queue.cuh"])
    assert 1 << int(exponent) == launching._NUM_COUNTERS
