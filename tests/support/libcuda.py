"""A libcuda that writes down what it was asked and computes nothing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from padless.runtime import driver

FUNCTION = 0x7000000000020  # the handle of every function of device 0; that of device i lies i << 16 behind

# A libcuda of which every call is one line of a log. Declarations after the CUDA driver API's documentation. As in the
# real one contexts are a thread's stack, a launch without one fails with 201, and one of a function that was loaded
# into another context than the current one with 400.
STUB = r"""
#include <mutex>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

typedef int CUresult;
struct CUlaunchAttribute { unsigned id; char pad[4]; union { unsigned dim[3]; char bytes[64]; } value; };
struct CUlaunchConfig {
    unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, sharedMemBytes;
    void* stream;
    CUlaunchAttribute* attrs;
    unsigned numAttrs;
};

static int resident = 66;  // clusters that a device can hold
static int capabilities[] = {103, 90};  // of devices but 1, and of 1
static std::mutex guard;
static bool are_read = true;  // arguments of a launch: two tensor maps, a pointer, a number
static std::string log_text, failing;
static int failing_code;
static thread_local std::vector<void*> contexts;  // the last one is current
static const uintptr_t FUNCTION = 0x7000000000020ull;  // of device 0; that of device i lies i << 16 behind

static void* current() { return contexts.empty() ? nullptr : contexts.back(); }
static uintptr_t current_device() { return current() ? (uintptr_t)current() & 0xFF : 0; }

static CUresult record(const char* name, const char* format, ...) {
    char line[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    std::lock_guard<std::mutex> hold(guard);
    log_text += std::string(name) + " " + line + "\n";
    return failing == name ? failing_code : 0;
}

extern "C" {
const char* stub_log() {
    static std::string copy;
    std::lock_guard<std::mutex> hold(guard);
    copy = log_text;
    return copy.c_str();
}
void stub_forget() { std::lock_guard<std::mutex> hold(guard); log_text.clear(); }
void stub_fail(const char* name, int code) { failing = name; failing_code = code; }
void stub_set_resident(int clusters) { resident = clusters; }
void stub_reads_arguments(int yes) { are_read = yes; }
void* stub_current() { return current(); }
int stub_device() { return current_device(); }
void stub_set_capabilities(int first, int second) { capabilities[0] = first; capabilities[1] = second; }
void stub_set_device(int device) { contexts.assign(1, (void*)(0xC0000000000ull + device)); }

CUresult cuInit(unsigned flags) { return record("cuInit", "%u", flags); }
CUresult cuGetErrorString(CUresult code, const char** text) {
    *text = code == 1 ? "invalid argument" : code == 201 ? "invalid device context" : nullptr;
    return *text ? 0 : 1;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    int capability = capabilities[device == 1];
    *value = attribute == 16 ? 132 + device : attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : -1;
    return record("cuDeviceGetAttribute", "%d %d", attribute, device);
}
CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = (void*)(uintptr_t)(0xC0000000000ull + device);
    return record("cuDevicePrimaryCtxRetain", "%d", device);
}
CUresult cuCtxSetCurrent(void* context) {
    if (!contexts.empty()) contexts.pop_back();
    contexts.push_back(context);
    return record("cuCtxSetCurrent", "%p", context);
}
CUresult cuCtxPushCurrent_v2(void* context) {
    contexts.push_back(context);
    return record("cuCtxPushCurrent", "%p", context);
}
CUresult cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return 201;
    *context = contexts.back();
    contexts.pop_back();
    return record("cuCtxPopCurrent", "%p", *context);
}
CUresult cuModuleLoadData(void** module, const void* image) {
    *module = (void*)0x7000000000010ull;
    return record("cuModuleLoadData", "%.8s", (const char*)image);
}
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
    if (!current()) return 201;
    *function = (void*)(FUNCTION + (current_device() << 16));
    return record("cuModuleGetFunction", "%p %s", module, name);
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, void* function, const CUlaunchConfig* c) {
    if (!current()) return 201;
    unsigned size = 1;
    for (unsigned i = 0; i < c->numAttrs; ++i)
        if (c->attrs[i].id == 4) size = c->attrs[i].value.dim[0];
    *clusters = resident;
    return record("cuOccupancyMaxActiveClusters", "%p cluster=%u block=%u shared=%u", function, size, c->blockX,
                  c->sharedMemBytes);
}
CUresult cuFuncSetAttribute(void* function, int attribute, int value) {
    return record("cuFuncSetAttribute", "%p %d %d", function, attribute, value);
}
CUresult cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                int interleave, int swizzle, int promotion, int fill) {
    if (!current()) return 201;
    if (!current()) return 201;
    std::string text;
    for (uint32_t i = 0; i < rank; ++i)
        text += std::to_string(dims[i]) + "," + (i + 1 < rank ? std::to_string(strides[i]) : "-") + "," +
                std::to_string(box[i]) + "," + std::to_string(element_strides[i]) + ";";
    if ((uintptr_t)map % 64) return 1;
    memset(map, 0xA5, 128);
    memcpy(map, &address, 8);
    return record("cuTensorMapEncodeTiled", "%d %u %p %s %d %d %d %d", type, rank, address, text.c_str(), interleave,
                  swizzle, promotion, fill);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, void* function, void** params, void** extra) {
    if (!current()) return 201;
    if ((uintptr_t)function != FUNCTION + (current_device() << 16)) return 400;
    std::string attributes;
    for (unsigned i = 0; i < c->numAttrs; ++i) {
        const CUlaunchAttribute& a = c->attrs[i];
        attributes += " " + std::to_string(a.id);
        for (int k = 0; k < 3; ++k) attributes += (k ? "," : ":") + std::to_string(a.value.dim[k]);
    }
    std::string values;
    if (are_read) {
        char line[100];
        const unsigned char* map = (const unsigned char*)params[0];
        snprintf(line, sizeof line, "map=%02x%02x pointer=%p number=%d ", map[0], map[255], *(void**)params[1],
                 *(int*)params[2]);
        values = line;
    }
    return record("cuLaunchKernelEx", "grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p attributes=%u%s function=%p "
                  "%sextra=%p context=%p", c->gridX, c->gridY, c->gridZ, c->blockX, c->blockY, c->blockZ,
                  c->sharedMemBytes, c->stream, c->numAttrs, attributes.c_str(), function, values.c_str(),
                  (void*)extra, current());
}
}
"""


class Stub:
    """The library, and the lines of its log."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.stub_log.restype = ctypes.c_char_p
        library.stub_current.restype = ctypes.c_void_p
        library.stub_fail(b"", 0)
        library.stub_set_device(0)
        library.stub_reads_arguments(1)
        library.stub_set_resident(66)
        library.stub_set_capabilities(103, 90)
        library.stub_forget()

    @property
    def calls(self) -> list[str]:
        return self.library.stub_log().decode().splitlines()

    @property
    def context(self) -> int | None:
        """The context that is current in this thread."""
        return self.library.stub_current()

    def forget(self) -> None:
        self.library.stub_forget()

    def fail(self, name: str, code: int) -> None:
        self.library.stub_fail(name.encode(), code)


def built(folder: Path) -> ctypes.CDLL:
    """The library, compiled in ``folder``; skips the test where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    (folder / "stub.cpp").write_text(STUB)
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "stub.cpp", "-o", "libcuda.so.1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "libcuda.so.1"))


def installed(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """What a CudaDriver finds from here on; the first GPU is current in this thread, as after torch's first call."""
    found = Stub(library)

    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(driver, "current_device", library.stub_device)
    return found


def in_new_thread(work: Callable[[], None]) -> None:
    """Runs `work` where no context is current; raises what it raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
