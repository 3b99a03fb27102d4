"""Every call on tensors of a second GPU while the first is current: the tensors decide, and the first stays current."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import padless
from padless import NVFP4, moe
from padless.kernels.table import ROUTES
from padless.runtime import driver
from padless.runtime.driver import CudaDriver, DriverError
from support import libcuda
from support.public_calls import GROUPS, OFFS, K, M, N, normal

pytest.importorskip("triton")

from support import device_calls, two_gpus
from support.device_calls import Made
from support.two_gpus import STREAM, TwoGpus

# Calls that launch nothing of padless's own.
TORCH_ALONE = {"BlockScaledTensor", "GroupedColumns", "GroupedGemmQuant", "dequantize", "group_offsets"}
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return libcuda.built(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture(scope="module")
def calls() -> dict[str, Made]:
    return device_calls.every_call(None)


def launched(gpus: TwoGpus, name: str, call: Made) -> int | None:
    """Launches of three calls, None where the architecture has none: the first packs what the others launch again."""
    for _ in range(3):
        try:
            call()
        except ValueError as error:
            if not any(word in str(error) for word in ("supported", "sm_90a", "sm_100a")):
                raise
            return None
        finally:
            assert gpus.current == 0, name
    assert all(f"stream={STREAM:#x}" in line for line in gpus.of_cuda), name
    return gpus.of_triton + len(gpus.of_cuda)


def test_every_call_on_hopper(library: ctypes.CDLL, calls: dict[str, Made]) -> None:
    found = {}
    for name, call in calls.items():
        with two_gpus.pretended(library, HOPPER) as gpus:
            found[name] = launched(gpus, name, call)
    here = {(r.a, r.b) for r in ROUTES if r.arch == "sm_90a" and r.operation == "grouped_gemm"}
    absent = {(r.a, r.b) for r in ROUTES if r.operation == "grouped_gemm"} - here
    names = {f"{op} of {a} x {b}{out}" for a, b in absent for op in ("gemm", "grouped_gemm") for out in ("", ", out")}
    assert {name for name, count in found.items() if count is None} == {"grouped_gemm_list", *names}
    assert {name for name, count in found.items() if count == 0} == TORCH_ALONE
    assert all(count >= 3 for count in found.values() if count)


def test_every_call_on_blackwell(library: ctypes.CDLL, calls: dict[str, Made]) -> None:
    found = {}
    for name, call in calls.items():
        if not name.startswith(("Experts", "GroupedLinear")):
            with two_gpus.pretended(library, BLACKWELL) as gpus:
                found[name] = launched(gpus, name, call)
    assert {name for name, count in found.items() if count == 0} == TORCH_ALONE
    assert found["grouped_gemm_list"] == found["gemm"] == 3


SOME = ("grouped_gemm of FP8_BLOCK x FP8_BLOCK, out", "grouped_gemm_wgrad", "moe of FP8_BLOCK-None", "Experts, fp8")


@pytest.mark.parametrize("name", SOME)
def test_calls_of_a_thread_that_has_no_context(library: ctypes.CDLL, calls: dict[str, Made], name: str) -> None:
    with two_gpus.pretended(library, HOPPER) as gpus:
        for _ in range(2):
            libcuda.in_new_thread(lambda: launched(gpus, name, calls[name]))
        assert len(gpus.of_cuda) >= 6


@pytest.mark.parametrize("name", SOME)
def test_the_first_stays_current_after_an_error(library: ctypes.CDLL, calls: dict[str, Made], name: str) -> None:
    for works_first in (False, True):
        with two_gpus.pretended(library, HOPPER) as gpus:
            if works_first:
                calls[name]()
            library.stub_fail(b"cuLaunchKernelEx", 700)
            with pytest.raises(DriverError, match="CUresult 700"):
                calls[name]()
            assert gpus.current == 0


ROWS, IDS = normal(M, K).bfloat16(), torch.arange(2 * M).view(M, 2) % GROUPS
SCALE, SCALES = torch.tensor(0.01), normal(GROUPS).abs()
ON_THE_FIRST: dict[str, tuple[str, Made, torch.Tensor]] = {
    "quantize": ("offs", lambda: padless.quantize(ROWS, NVFP4, offs=OFFS), OFFS),
    "route_quantize": ("global_scale", lambda: moe.route_quantize(ROWS, IDS, GROUPS, NVFP4, global_scale=SCALE), SCALE),
    "gather_quantize": ("global_scale", lambda: moe.gather_quantize(ROWS, IDS.int(), NVFP4, global_scale=SCALE), SCALE),
    "activate_quantize, offs": ("offs", lambda: activated(), OFFS),
    "activate_quantize, scales": ("global_scale", lambda: activated(), SCALES),
    "grouped_gemm": ("offs", lambda: padless.grouped_gemm(ROWS, PLAIN, OFFS), OFFS),
}
PLAIN = normal(GROUPS, N, K).bfloat16()


def activated() -> Any:
    return moe.activate_quantize(ROWS, moe.Activation("swiglu"), NVFP4, global_scale=SCALES, offs=OFFS)


@pytest.mark.parametrize("name", ON_THE_FIRST)
def test_a_tensor_of_the_other_gpu_is_refused(library: ctypes.CDLL, name: str) -> None:
    """Before anything is launched: a kernel that reads another GPU's memory ends the process's use of its own."""
    argument, call, tensor = ON_THE_FIRST[name]
    with two_gpus.pretended(library, HOPPER) as gpus:
        gpus.on_the_first.add(tensor.data_ptr())
        with pytest.raises(ValueError, match=rf"{argument} is on cuda:0 and \w+ on cuda:1; they must be on one device"):
            call()
        assert (gpus.of_triton, gpus.of_cuda) == (0, [])


# --- graphs of a layer -----------------------------------------------------------------------------------


def test_graphs_are_captured_on_a_stream_of_the_layers_gpu(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.graph's own stream is of the GPU that was current at the first capture of the process."""
    captured = []
    with two_gpus.pretended(library, HOPPER) as gpus:

        @contextmanager
        def graph(cuda_graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
            captured.append(stream)
            yield

        def made(device: Any = None) -> SimpleNamespace:
            return SimpleNamespace(device=gpus.current, wait_stream=lambda other: None, record_event=lambda: None)

        answers = {
            "graph": graph, "Stream": made, "current_stream": made,
            "stream": lambda stream: gpus.device(two_gpus.SECOND), "graph_pool_handle": object,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        device_calls.trained(None, in_graphs=True, recipes=("fp8",))
        assert gpus.current == 0
    assert len(captured) >= 6
    assert {stream.device for stream in captured} == {1}


# --- planted -----------------------------------------------------------------------------------------------


def test_a_launch_in_the_current_context_is_seen(
    library: ctypes.CDLL, calls: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: Any, stream: int) -> None:
        self._driver._check("cuLaunchKernelEx", self._call(stream)())

    monkeypatch.setattr(driver.CudaLaunch, "__call__", launch)
    with two_gpus.pretended(library, HOPPER) as gpus, pytest.raises(DriverError, match="CUresult 400"):
        launched(gpus, SOME[0], calls[SOME[0]])


def test_a_context_that_stays_is_seen(
    library: ctypes.CDLL, calls: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def entered(self: CudaDriver, device: int) -> Iterator[None]:
        library.stub_set_device(device)
        yield

    monkeypatch.setattr(CudaDriver, "context_of", entered)
    with two_gpus.pretended(library, HOPPER) as gpus, pytest.raises(AssertionError, match=SOME[0]):
        launched(gpus, SOME[0], calls[SOME[0]])


def test_a_launch_of_triton_on_the_current_device_is_seen(
    library: ctypes.CDLL, calls: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_gpus.pretended(library, HOPPER) as gpus:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        with pytest.raises(AssertionError, match=r"tensors are on \{1\} and cuda:0 is current"):
            launched(gpus, "quantize to FP8_BLOCK", calls["quantize to FP8_BLOCK"])


# --- two GPUs ----------------------------------------------------------------------------------------------

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one process")


@pytest.fixture(scope="module")
def on_both() -> tuple[dict[str, Made], dict[str, Made]]:
    first, second = (device_calls.every_call(f"cuda:{index}") for index in (0, 1))
    return first, second


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("name", device_calls.every_call(None) if torch.cuda.device_count() > 1 else [])
def test_on_the_second_gpu(on_both: tuple[dict[str, Made], dict[str, Made]], name: str) -> None:
    """First calls and later ones, on a side stream, in a thread, captured: the bits of the first GPU."""
    first, second = (calls[name] for calls in on_both)
    assert device_calls.wrong_on_the_second(name, first, second) == []


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("recipe", ["fp8", "fp8_compact", "bf16"])
def test_graphs_of_layers_on_the_second_gpu(recipe: str) -> None:
    assert device_calls.wrong_in_graphs(recipe) == []
