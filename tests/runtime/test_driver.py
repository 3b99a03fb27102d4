"""The CUDA driver's caller, judged by a driver that writes down what it was asked and by NVIDIA's own declarations."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver as cuda

from padless.kernels import maps
from padless.runtime import driver as driver_module
from padless.runtime import tensor_map
from padless.runtime.driver import CudaDriver, DriverError, LaunchShape
from padless.runtime.jit import CompiledKernel
from padless.runtime.tensor_map import TensorMapSpec
from support import libcuda
from support.libcuda import Stub, in_new_thread

KERNEL = CompiledKernel(b"\x7fELFfake", "cubin", "the_entry", 202_752, 384, 5, 168, 0, 0, "")
CONTEXT_OF_DEVICE_0 = "0xc0000000000"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return libcuda.built(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def stub(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return libcuda.installed(library, monkeypatch)


def prepared(driver: CudaDriver, cluster: int = 1, programmatic: bool = False) -> driver_module.PreparedLaunch:
    arguments = [bytes([0x5A]) + bytes(254) + bytes([0xC3]), (0x123456789AB0, 8), (-7, 4)]
    shape = LaunchShape(grid=130, block=384, cluster=cluster, programmatic=programmatic)
    return driver.prepare(ctypes.c_void_p(0x7000000000020), KERNEL, shape, arguments, [torch.zeros(1)])


# --- calls -------------------------------------------------------------------------------------------------


def test_loading_a_kernel(stub: Stub) -> None:
    driver = CudaDriver()
    assert driver.num_sms(3) == 135
    stub.forget()
    function = driver.load(KERNEL, 0)
    assert function.value == 0x7000000000020
    assert stub.calls == [
        "cuDevicePrimaryCtxRetain 0",
        f"cuCtxPushCurrent {CONTEXT_OF_DEVICE_0}",
        "cuModuleLoadData \x7fELFfake"[:25],
        "cuModuleGetFunction 0x7000000000010 the_entry",
        "cuFuncSetAttribute 0x7000000000020 8 202752",
        f"cuCtxPopCurrent {CONTEXT_OF_DEVICE_0}",
    ]


def test_a_context_is_retained_once(stub: Stub) -> None:
    driver = CudaDriver()
    for _ in range(3):
        driver.load(KERNEL, 0)
    driver.load(KERNEL, 1)
    assert [call for call in stub.calls if "Retain" in call] == [
        "cuDevicePrimaryCtxRetain 0",
        "cuDevicePrimaryCtxRetain 1",
    ]


def test_encoding_a_tensor_map(stub: Stub) -> None:
    spec = TensorMapSpec(9, 0x7F0000001230, (72, 100, 5), (160, 16000), (64, 32, 1), 3, 2)
    driver = CudaDriver()
    for _ in range(50):  # a buffer of every alignment that malloc may give
        image = driver.encode(spec)
        assert len(image) == 128
        assert image == (0x7F0000001230).to_bytes(8, "little") + bytes([0xA5] * 120)
    assert stub.calls[-1] == ("cuTensorMapEncodeTiled 9 3 0x7f0000001230 72,160,64,1;100,16000,32,1;5,-,1,1; 0 3 2 0")


def test_numbers_that_need_64_bits(stub: Stub) -> None:
    d = torch.zeros((4, 64), dtype=torch.float32)
    CudaDriver().encode(maps.output_ragged(d, 64))
    assert f"1073741824,256,64,1;2147418112,{4 * (2**34 - 64)},1,1;2147418112,-,1,1;" in stub.calls[-1]


def test_one_dimension_has_no_strides(stub: Stub) -> None:
    CudaDriver().encode(tensor_map.flat(torch.zeros(1000), 256))
    assert " 7 1 " in stub.calls[-1]
    assert " 1000,-,256,1; " in stub.calls[-1]


@pytest.mark.parametrize(
    ("cluster", "programmatic", "attributes"),
    [(1, False, "0"), (2, False, "1 4:2,1,1"), (1, True, "1 6:1,0,0"), (2, True, "2 4:2,1,1 6:1,0,0")],
)
def test_a_launch_carries_everything(stub: Stub, cluster: int, programmatic: bool, attributes: str) -> None:
    driver = CudaDriver()
    driver.load(KERNEL, 0)
    launch = prepared(driver, cluster, programmatic)
    stub.forget()
    launch(0x5EED0)
    (call,) = stub.calls
    assert call == (
        f"cuLaunchKernelEx grid=130,1,1 block=384,1,1 shared=202752 stream=0x5eed0 attributes={attributes}"
        + " function=0x7000000000020 map=5ac3 pointer=0x123456789ab0 number=-7 extra=(nil)"
        + f" context={CONTEXT_OF_DEVICE_0}"
    )


def test_clusters_that_no_gpu_holds_are_refused_before_they_are_launched(stub: Stub) -> None:
    """Asked once for a kernel and a size of cluster, in the GPU's context; where the driver does not say, launched."""
    driver = CudaDriver()
    asked = "cuOccupancyMaxActiveClusters 0x7000000000020 cluster=2 block=384 shared=202752"
    stub.library.stub_set_resident(0)
    prepared(driver)  # no cluster
    for _ in range(2):
        with pytest.raises(DriverError, match=r"the_entry needs clusters of 2 CTAs .* not one is resident on GPU 0"):
            prepared(driver, 2)
    stub.library.stub_set_resident(1)
    for _ in range(3):
        prepared(driver, 2)
    assert [call for call in stub.calls if "Occupancy" in call] == [asked] * 3
    assert stub.calls[-2:] == [asked, f"cuCtxPopCurrent {CONTEXT_OF_DEVICE_0}"]
    stub.library.stub_set_resident(0)
    stub.fail("cuOccupancyMaxActiveClusters", 1)
    prepared(CudaDriver(), 2)(0)
    assert stub.calls[-1].startswith("cuLaunchKernelEx")


def test_every_stream_gets_its_own_launch(stub: Stub) -> None:
    driver = CudaDriver()
    driver.load(KERNEL, 0)
    launch = prepared(driver)
    stub.forget()
    for stream in (0x10, 0x20, 0x10, 0):
        launch(stream)
    assert [re.findall(r"stream=(\S+)", call)[0] for call in stub.calls] == ["0x10", "0x20", "0x10", "(nil)"]


def test_a_thread_without_a_context_is_given_one(stub: Stub) -> None:
    driver = CudaDriver()
    launch = prepared(driver)
    in_new_thread(lambda: launch(0x30))
    names = [call.split()[0] for call in stub.calls]
    assert names == ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
    assert f"context={CONTEXT_OF_DEVICE_0}" in stub.calls[-2]


def test_threads_may_share_a_launch(stub: Stub) -> None:
    driver = CudaDriver()
    launch = prepared(driver)
    start = threading.Barrier(6)

    def work(stream: int) -> None:
        start.wait()
        for _ in range(50):
            launch(stream)

    threads = [threading.Thread(target=work, args=(16 * (i + 1),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    streams = re.findall(r"cuLaunchKernelEx .*stream=(\S+)", "\n".join(stub.calls))
    assert {stream: streams.count(stream) for stream in set(streams)} == {hex(16 * (i + 1)): 50 for i in range(6)}


# --- failures ----------------------------------------------------------------------------------------------


def test_no_driver_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match=r"no CUDA driver on this machine \(libcuda.so.1: cannot open"):
        CudaDriver()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("cuInit", lambda d: CudaDriver()),
        ("cuDeviceGetAttribute", lambda d: d.num_sms(0)),
        ("cuDevicePrimaryCtxRetain", lambda d: d.load(KERNEL, 0)),
        ("cuModuleLoadData", lambda d: d.load(KERNEL, 0)),
        ("cuModuleGetFunction", lambda d: d.load(KERNEL, 0)),
        ("cuFuncSetAttribute", lambda d: d.load(KERNEL, 0)),
        ("cuTensorMapEncodeTiled", lambda d: d.encode(TensorMapSpec(0, 16, (1,), (), (16,)))),
        ("cuLaunchKernelEx", lambda d: (d.load(KERNEL, 0), prepared(d)(0))),
    ],
)
def test_a_refused_call_is_an_error_with_the_drivers_words(
    stub: Stub, name: str, use: Callable[[CudaDriver], object]
) -> None:
    driver = CudaDriver()
    stub.fail(name, 1)
    with pytest.raises(DriverError, match=rf"{name}.*CUresult 1\)") as error:
        use(driver)
    assert "invalid argument" in str(error.value) or name == "cuTensorMapEncodeTiled"


def test_an_error_without_words_keeps_its_number(stub: Stub) -> None:
    driver = CudaDriver()
    stub.fail("cuDeviceGetAttribute", 999)
    with pytest.raises(DriverError, match=r"unknown error \(CUresult 999\)"):
        driver.num_sms(0)


def test_kernels_are_compiled_for_the_devices_capability(stub: Stub) -> None:
    assert (CudaDriver().arch, CudaDriver(1).arch) == ("sm_103a", "sm_90a")


# --- NVIDIA's declarations ---------------------------------------------------------------------------------


def memory(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_the_launch_configuration_lies_in_memory_as_declared() -> None:
    theirs = cuda.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 130, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 384, 5, 6
    theirs.sharedMemBytes = 202_752
    theirs.hStream = cuda.CUstream(0x5EED0)
    ours = driver_module._LaunchConfig((130, 2, 3), (384, 5, 6), 202_752, 0x5EED0, None, 0)
    size = ctypes.sizeof(ours)
    assert size == 56
    assert memory(ctypes.addressof(ours), size) == memory(theirs.getPtr(), size)


def test_a_launch_attribute_lies_in_memory_as_declared() -> None:
    theirs = cuda.CUlaunchAttribute()
    theirs.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    theirs.value.clusterDim.x, theirs.value.clusterDim.y, theirs.value.clusterDim.z = 2, 1, 1
    ours = driver_module._Attribute(id=driver_module._CLUSTER_DIMENSION, x=2, y=1, z=1)
    size = ctypes.sizeof(ours)
    assert size == 72
    assert memory(ctypes.addressof(ours), 20) == memory(theirs.getPtr(), 20)


def test_the_programmatic_attribute_lies_in_memory_as_declared() -> None:
    theirs = cuda.CUlaunchAttribute()
    theirs.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    theirs.value.programmaticStreamSerializationAllowed = 1
    ours = driver_module._Attribute(id=driver_module._PROGRAMMATIC_SERIALIZATION, x=1)
    assert ours.id == theirs.id
    assert memory(ctypes.addressof(ours), 12) == memory(theirs.getPtr(), 12)


def test_numbers_of_the_driver_api() -> None:
    function, device = cuda.CUfunction_attribute, cuda.CUdevice_attribute
    assert function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == driver_module._MAX_DYNAMIC_SHARED
    assert device.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == driver_module._MULTIPROCESSOR_COUNT
    assert driver_module._COMPUTE_CAPABILITY == (
        device.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        device.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    )
    assert cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT == driver_module._INVALID_CONTEXT
    assert cuda.CUresult.CUDA_ERROR_INVALID_HANDLE == driver_module._INVALID_HANDLE
    types = cuda.CUtensorMapDataType
    for dtype, name in (
        (torch.float8_e4m3fn, "UINT8"),
        (torch.float16, "FLOAT16"),
        (torch.bfloat16, "BFLOAT16"),
        (torch.float32, "FLOAT32"),
    ):
        number, size = tensor_map.DATA_TYPES[dtype]
        assert number == getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
        assert size == dtype.itemsize
    for kind in ("NONE", "32B", "64B", "128B"):
        declared = getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{kind}")
        assert getattr(tensor_map, f"SWIZZLE_{kind}") == declared
    for kind in ("NONE", "64B", "128B", "256B"):
        promotion = "NONE" if kind == "NONE" else f"L2_{kind}"
        declared = getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")
        assert getattr(tensor_map, f"L2_PROMOTION_{kind}") == declared


def test_nothing_else_talks_to_the_driver() -> None:
    """The seam: one module names libcuda; the emulator takes its place there."""
    package = Path(driver_module.__file__).parent
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"libcuda\.so|cuLaunchKernel|cuda\.bindings import driver", path.read_text())
    }
    assert "driver.py" in naming
    assert not {name for name in naming if name not in ("driver.py", "info.py") and not name.startswith("emulator/")}
