"""`padless emulate --program`: whole programs, their host code unmodified, on a device that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from padless.emulator import LaunchError
from padless.emulator.cli import app
from padless.emulator.program.autocast import FLOAT32, LOWER, WIDEST

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "docs" / "learn" / "tma_program.py"


def emulate(program: Path | str, folder: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str):
    """A run of a program, given as a file or its text; in a process of its own, where nothing is taken back."""
    if isinstance(program, str):
        (folder / "program.py").write_text(program)
        program = folder / "program.py"
    command = [sys.executable, "-m", "padless", "emulate", *options, "--program", str(program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240, env={**os.environ, **environment}
    )


def test_a_program_of_the_driver_and_nvrtc_runs_and_the_page_shows_what_it_prints(tmp_path: Path) -> None:
    done = emulate(LESSON, tmp_path)
    assert (done.returncode, done.stdout) == (0, "largest error: 0\n"), done.stderr
    launched, end = done.stderr.splitlines()
    page = (ROOT / "docs" / "emulator_programs.md").read_text()
    for line in (launched.rpartition(",")[0], end):  # but for the seconds
        assert line in page
    assert f"--program {LESSON.relative_to(ROOT)}" in page


def test_a_bug_in_a_kernel_of_the_program_is_reported_with_its_line(tmp_path: Path) -> None:
    done = emulate(LESSON, tmp_path, "--break", "no-proxy-fence", options=("--seed", "1"))
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("missing-proxy-fence: ")
    assert "tma_copy.cu:55" in lines[0]
    assert lines[-1].startswith("1 launch, 1 errors, 0 refusals")


PADLESS = """
import sys
import torch, padless

fmt, options = getattr(padless, sys.argv[1]), {}
draw = torch.Generator().manual_seed(0)
x, w = torch.randn(70, 288, generator=draw), torch.randn(3, 80, 288, generator=draw)
offs = torch.tensor([1, 1, 65], dtype=torch.int32)
on_gpu = offs.cuda()
a, b = padless.quantize(x.cuda(), fmt), padless.quantize(w.cuda(), fmt, kind="weight")
c, d = padless.quantize(x, fmt), padless.quantize(w, fmt, kind="weight")
assert a.data.is_cuda and a.data.device == torch.device("cuda", 0) and not c.data.is_cuda
assert torch.equal(a.data.cpu().view(torch.uint8), c.data.view(torch.uint8))
assert torch.equal(b.scale.cpu().view(torch.uint8), d.scale.view(torch.uint8))
out = torch.full((70, 80), float("nan"), device="cuda")
padless.grouped_gemm(a, b, on_gpu, out=out)
want = padless.grouped_gemm(c, d, offs, out_dtype=torch.float32, backend=sys.argv[2])
assert out.is_cuda and torch.equal(out.cpu()[:65], want[:65]) and bool(out.cpu()[65:].isnan().all())
exact = padless.grouped_gemm(c, d, offs, out_dtype=torch.float32)[:65]
print("off by", float((out.cpu()[:65] - exact).abs().max() / exact.abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "chip", "backend"),
    [
        ("FP8_BLOCK", "H200", "emulator"),
        ("MXFP8", "H200", "emulator"),
        ("MXFP8", "B200", "emulator:sm_100a"),
        ("FP8_BLOCK", "B200", "emulator:sm_100a"),
    ],
)
def test_this_librarys_own_calls_for_a_gpu_give_the_emulators_bits(
    tmp_path: Path, fmt: str, chip: str, backend: str
) -> None:
    """Triton's quantizers, tensor maps by cuTensorMapEncodeTiled, cubins, cuLaunchKernelEx: the path of a real GPU."""
    pytest.importorskip("triton")
    done = emulate(PADLESS, tmp_path, fmt, backend, options=("--chip", chip, "--sms", "2"))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-3
    launches = re.findall(r"launch \d+: (\w+) grid", done.stderr)
    assert len(launches) == 3
    assert launches[-1].startswith("padless_sm90" if chip == "H200" else "padless_sm100")


TENSORS = """
import torch

x = torch.randn(4, 4, device="cuda:0", requires_grad=True)
(x * 2).sum().backward()
layer = torch.nn.Linear(4, 4).cuda()
on_gpu = [x, x.grad, x[0], torch.cat([x, x]), x.to(torch.bfloat16), torch.zeros_like(x), torch.tensor([1]).cuda(),
          torch.zeros(3, device=torch.device("cuda")), torch.empty(2).to("cuda:0"), layer.weight, layer(x),
          torch.nn.Linear(4, 4, device="cuda").weight]
assert all(t.is_cuda and t.device == torch.device("cuda", 0) and t.get_device() == 0 for t in on_gpu)
copied = torch.zeros(4, 4)
copied.copy_(x.detach())
on_cpu = [copied, x.cpu(), x.to("cpu"), x.detach().to("cpu", torch.float64), torch.zeros(2), layer.cpu().weight]
assert not any(t.is_cuda or t.device.type != "cpu" for t in on_cpu)
assert torch.equal(copied, x.cpu()) and x.cpu().data_ptr() != x.data_ptr() and x.is_cuda
x.detach().add_(copied)
whole = torch.zeros(100).numpy()
shared = [torch.from_numpy(whole[a:b]) for a, b in ((0, 60), (20, 40), (40, 100))]
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()):
    start.record(), end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0 and torch.cuda.get_device_properties(0).multi_processor_count == 4
from padless.emulator.program.device import Memory
seen = Memory().visible()
for t in (x, shared[0], shared[2]):
    found = seen.find(t.data_ptr())
    assert found.end >= t.data_ptr() + 4 * t.numel()
assert seen.find(shared[1].data_ptr()).size == 400
from cuda.bindings import runtime
assert int(runtime.cudaMalloc(16)[0]) != 0
"""


def test_cuda_tensors_of_torch_are_on_the_cpu_and_do_not_say_so(tmp_path: Path) -> None:
    done = emulate(TENSORS, tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert "refused: the program uses the CUDA runtime API" in done.stderr


AUTOCAST = """
import torch
import torch.nn.functional as F

layer, x = torch.nn.Linear(48, 32, device="cuda"), torch.randn(8, 48, device="cuda")
w, norm, host = torch.randn(32, 8, device="cuda"), torch.nn.LayerNorm(32, device="cuda"), torch.randn(8, 48)
for kind in (torch.bfloat16, torch.float16):
    with torch.autocast("cuda", kind):
        y = layer(x)
        assert y.is_cuda and torch.equal(y, F.linear(x.to(kind), layer.weight.to(kind), layer.bias.to(kind)))
        for made in (y @ w, torch.matmul(y, w), w.T @ y.T, torch.einsum("ij,jk->ik", y, w), y + y, F.relu(y), y.exp_(),
                     F.scaled_dot_product_attention(x[None], x[None], x[None]), torch.tensordot(y, y.T, 1)):
            assert made.dtype is kind, made.dtype
        for made in (y.softmax(-1), F.softmax(y, -1), norm(y), y.sum(), y ** 2, 2 ** y, torch.exp(y), y + x[:, :32],
                     F.cross_entropy(y, torch.arange(8, device="cuda")), torch.cat([y, x]  if 0 else [y, x[:, :32]]),
                     torch.addcmul(x[:, :32], y, y), F.mse_loss(y, y), x.double().float() * 1, F.normalize(y)):
            assert made.dtype is torch.float32, made.dtype
        assert y.softmax(-1, dtype=kind).dtype is kind and (x.double() @ x.double().T).dtype is torch.float64
        assert (host @ host.T).dtype is torch.float32 and torch.nn.Linear(48, 4)(host).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype is torch.float32
        layer.zero_grad()
        layer(x).float().square().sum().backward()
        assert layer.weight.grad.dtype is torch.float32 and bool(layer.weight.grad.any())
        assert torch.mm(x, x.T, out=torch.empty(8, 8, device="cuda")).dtype is torch.float32
    assert layer(x).dtype is torch.float32
print(torch.compile(lambda v: v * 2, backend="eager")(torch.ones(4, device="cuda")).sum().item())
assert torch.compile(layer, backend="eager")(x).is_cuda
print("done")
"""


def test_autocast_has_a_gpus_dtypes_and_eager_compilation_is_the_function(tmp_path: Path) -> None:
    done = emulate(AUTOCAST, tmp_path)
    assert (done.returncode, done.stdout) == (0, "8.0\ndone\n"), done.stderr


REFUSED = """
import torch

x = torch.ones(4, device="cuda")

@torch.compile
def first(v):
    return v * 2

second = torch.compile(lambda v: v * 2, mode="max-autotune")  # refused when it is called, as imports may come to it
def encode():
    with torch.autocast("cuda", torch.bfloat16):
        torch.nn.LSTM(4, 4, device="cuda")(x[None])

calls = [lambda: first(x), lambda: second(x), lambda: torch.compile(torch.nn.Linear(4, 4)), torch.cuda.CUDAGraph, encode,
         lambda: torch.cuda.make_graphed_callables(first, (x,))]
for call in calls:
    try:
        call()
    except NotImplementedError as error:
        print(error)
assert first.__name__ == "first"
"""


def test_what_torch_cannot_do_here_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = emulate(REFUSED, tmp_path)
    assert done.returncode == 2, done.stderr
    compiled = "torch.compile with backend='inductor' is not emulated; backend=\"eager\" runs the same function"
    graphs = "torch.cuda's graphs are not emulated: kernels run when they are launched; call the function itself"
    lstm = 'torch.autocast("cuda") around lstm is not emulated; leave autocast there, or use its parts'
    assert done.stdout.splitlines() == [compiled] * 3 + [graphs, lstm, graphs]
    assert done.stderr.splitlines()[-1].startswith("0 launches, 0 errors, 6 refusals")
    assert "Traceback" not in done.stderr


def test_autocast_has_the_lists_of_torch() -> None:
    """Each name of torch's own header is in the list of its macro, or is one that no function of Python has."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    macros = dict(re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)", header.read_text()))
    inner = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention", "nll_loss2d"}
    lists = {"LOWER_PRECISION_FP": LOWER, "FP32": FLOAT32, "FP32_SET_OPT_DTYPE": FLOAT32, "PROMOTE": WIDEST}
    for macro, own in lists.items():
        names = set(re.findall(r"_\((\w+)", macros[macro])) - inner
        assert len(names) >= 8
        assert {name for name in names if "upsample" not in name} <= own, macro


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, B: tl.constexpr, BOUND: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < (n if BOUND else n + 8)
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)

x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
for bound in (True, False):
    out = torch.full_like(x, float("nan"))
    add[(triton.cdiv(1000, 256),)](x, y, out, 1000, B=256, BOUND=bound)
    assert torch.equal(out, x + y)
"""


@pytest.mark.slow
def test_a_triton_program_runs_and_an_access_past_a_tensor_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = emulate(TRITON, tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"launch 1: add .* no reports", done.stderr)
    assert re.search(r"^out-of-bounds: .*program.py:8", done.stderr, re.MULTILINE)


CALLS = """
import ctypes, sys
import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = b'''
__device__ int counter[4]; __constant__ float factors[2];
extern "C" __global__ void __cluster_dims__(1) scale(float* x, float y, int n) {
  extern __shared__ float s[];
  s[threadIdx.x] = factors[1] * x[threadIdx.x] + y;
  if (threadIdx.x < n) { x[threadIdx.x] = s[threadIdx.x]; atomicAdd(counter + 1, 1); }
}'''

def ok(result, code=0):
    assert int(result[0]) == code, result
    return result[1] if len(result) == 2 else result[1:]

program = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"k.cu", 0, [], []))
ok(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"]))
ptx = bytes(ok(nvrtc.nvrtcGetPTXSize(program)))
ok(nvrtc.nvrtcGetPTX(program, ptx))
ok(driver.cuInit(0))
assert ok(driver.cuDeviceGetCount()) == 1
device = ok(driver.cuDeviceGet(0))
A = driver.CUdevice_attribute
named = {A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9, A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 3,
         A.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32, A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448}
for attribute, value in named.items():
    assert ok(driver.cuDeviceGetAttribute(attribute, device)) == value
assert ok(driver.cuDeviceGetName(64, device)).startswith(b"NVIDIA H200")
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
module = ok(driver.cuModuleLoadData(ptx))
ok(driver.cuModuleGetFunction(module, b"nosuch"), 500)
kernel = ok(driver.cuModuleGetFunction(module, b"scale"))
counter, size = ok(driver.cuModuleGetGlobal(module, b"counter"))
assert size == 16
factors, _ = ok(driver.cuModuleGetGlobal(module, b"factors"))
given = np.array([0.0, 3.0], np.float32)
ok(driver.cuMemcpyHtoD(factors, given.ctypes.data, 8))
x = ok(driver.cuMemAlloc(256))
ok(driver.cuMemsetD32(x, 0x3F800000, 64))  # ones
stream = ok(driver.cuStreamCreate(0))
types = (ctypes.c_void_p, ctypes.c_float, ctypes.c_int)

def launch(shared, config=True):
    values = ((int(x), 0.5, 50), types)
    if not config:
        return driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, shared, stream, values, 0)
    c = driver.CUlaunchConfig()
    c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ = 1, 1, 1, 64, 1, 1
    c.sharedMemBytes, c.hStream = shared, stream
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    c.attrs, c.numAttrs = [cluster], 1
    return driver.cuLaunchKernelEx(c, kernel, values, 0)

ok(launch(256, config=False))
out = np.empty(64, np.float32)
ok(driver.cuMemcpyDtoH(out.ctypes.data, x, 256))
assert (out[:50] == 3.5).all() and (out[50:] == 1).all()
attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
if sys.argv[1:] != ["good"]:
    ok(launch(50000), 1)  # more than 48 KiB, and nobody has asked for it
    ok(driver.cuFuncSetAttribute(kernel, attribute, 1 << 20), 1)
    ok(driver.cuMemcpyDtoH(out.ctypes.data, int(x) + 4, 256), 1)
    ok(driver.cuModuleLoadData(b"\\x7fELF" + bytes(200)), 209)
    ok(driver.cuModuleLoadData(b".version 9.0 .target sm_90a .address_size 64 nonsense\\0"), 209)
    ok(driver.cuMemFree(int(x) + 4), 1)
ok(driver.cuFuncSetAttribute(kernel, attribute, 50000))
ok(launch(50000))
count = np.zeros(4, np.int32)
ok(driver.cuMemcpyDtoH(count.ctypes.data, counter, 16))
assert count.tolist() == [0, 100, 0, 0]
ok(driver.cuMemFree(x))
ok(driver.cuStreamSynchronize(stream))
print("done")
"""


def test_calls_of_the_driver_do_and_refuse_what_it_would(tmp_path: Path) -> None:
    done = emulate(CALLS, tmp_path, "good", options=("--sms", "3"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.splitlines()[-1].startswith("2 launches, 0 errors, 0 refusals")
    refused = emulate(CALLS, tmp_path, options=("--sms", "3"))
    assert (refused.returncode, refused.stdout) == (2, "done\n"), refused.stderr
    for sentence in (
        "scale: a launch with 50000 bytes of dynamic shared memory, allowed are 49152; set CU_FUNC_ATTRIBUTE_MAX_",
        "scale: 1048576 bytes of dynamic shared memory are more than a CTA has",
        "copy of 256 bytes: 256 bytes at 0x",
        "a cubin was loaded: the emulator runs PTX",
        "a module was refused: ",
    ):
        assert f"refused: {sentence}" in refused.stderr


def test_exit_codes_and_arguments_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("CODE = 7")
    done = emulate("import sys, beside; print(sys.argv[1:], __name__); sys.exit(beside.CODE)", tmp_path, "--seed", "x")
    assert (done.returncode, done.stdout) == (7, "['--seed', 'x'] __main__\n")
    raised = emulate("raise ValueError('mine')", tmp_path)
    assert raised.returncode == 1
    assert "ValueError: mine" in raised.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--program", "SELF"], "nosuch-compiler cannot compile the stand-in for libcuda"),
        (["--chip", "A100", "--program", "SELF"], "--chip is 'A100', with --program allowed are H200, B200"),
        (["--program", "nosuch.py"], "--program is nosuch.py, there is no such file"),
        ([], "a PTX file and --launch FILE are needed, or --program FILE"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "nosuch-compiler")
    result = CliRunner().invoke(app, [__file__ if word == "SELF" else word for word in arguments])
    assert isinstance(result.exception, LaunchError)
    assert sentence in str(result.exception)


TUNED = """
import torch, triton, triton.language as tl
from cuda.bindings import driver

@triton.autotune([triton.Config({"B": b}, num_warps=w) for b, w in ((64, 2), (1024, 4), (256, 4))], key=["n"])
@triton.jit
def add_one(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

x = torch.randn(5000, device="cuda")
out = torch.full_like(x, float("nan"))
call = lambda: add_one[lambda meta: (triton.cdiv(5000, meta["B"]),)](x, out, 5000)
call()
assert torch.equal(out, x + 1)
start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
out.fill_(float("nan"))
start.record(), call(), end.record(), call(), call(), last.record()
assert torch.equal(out, x + 1)
once, twice = start.elapsed_time(end), end.elapsed_time(last)
out.fill_(7)
low, mid, high = triton.testing.do_bench(call, quantiles=[0.2, 0.5, 0.8])
assert low == mid == high and abs(mid / once - 1) < 1e-6 and bool((out == 7).all())  # timed, and not run
assert abs(twice / (2 * once) - 1) < 1e-6 and 1e-3 < once < 1e-1, (once, twice)
assert end.elapsed_time(end) == 0.0005  # as fine as events are
print(sorted(c.kwargs["B"] for c in add_one.configs_timings), add_one.best_config.kwargs["B"])

@triton.testing.perf_report(triton.testing.Benchmark(["n"], [1, 2, 3], "p", ["a", "b"], ["a", "b"], "plot", {}))
def sweep(n, p):
    raise AssertionError

sweep.run(print_data=True)
assert int(driver.cuGraphCreate(0)[0]) == 801
"""


@pytest.mark.slow
def test_events_have_the_clocks_time_and_every_configuration_is_timed_once(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = {emulate(TUNED, tmp_path, options=("--seed", seed)).stdout for seed in ("0", "3")}
    assert len(found) == 1  # no noise
    (stdout,) = found
    assert re.fullmatch(r"\[64, 256, 1024\] (64|256|1024)\n", stdout)
    done = emulate(TUNED, tmp_path, options=("--sms", "2"))
    assert done.stdout == stdout, done.stderr
    assert done.stderr.count("launch ") >= 4
    lines = done.stderr.splitlines()
    assert "left out: sweep, a sweep of 6 measurements of speed" in lines
    assert "refused: graphs and captured streams are not emulated: kernels run when they are launched; " \
        "launch them directly" in lines  # fmt: skip
    assert "4 benchmarks, each timed once by the clock, not run" in lines
    assert lines[-1].startswith("4 launches, 0 errors, 1 refusals, the program's exit code 0")


MANY = """
import torch, triton, triton.language as tl

@triton.jit
def past(x, out, n: tl.constexpr):
    for k in tl.static_range(n):
        tl.store(out + k, tl.load(x + 1000 + k))

x = torch.randn(8, device="cuda")
for n in (6, 6, 2):
    past[(1,)](x, x, n)
"""


@pytest.mark.slow
def test_reports_are_counted_by_kind_with_the_option_that_leaves_them_out(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = emulate(MANY, tmp_path)
    lines = done.stderr.splitlines()
    assert sum(line.startswith("out-of-bounds: ") and "program.py" in line for line in lines) == 3
    (count,) = [line for line in lines if line.endswith("--ignore out-of-bounds leaves them out")]
    found = re.match(r"out-of-bounds: (\d+) in past \(an access outside every allocation\); ", count)
    assert found
    assert int(found[1]) >= 10
    assert re.search(rf"3 launches, {found[1]} errors", lines[-1])
    whole = emulate(MANY, tmp_path, options=("--reports", "100")).stderr
    assert len(re.findall(r"^out-of-bounds: .*program.py", whole, re.MULTILINE)) > 5
    assert emulate(MANY, tmp_path, options=("--ignore", "out-of-bounds")).returncode == 0
