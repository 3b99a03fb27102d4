"""`padless emulate`, and the parser on what it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from padless.emulator import Emulator, LaunchError, cli
from padless.emulator.cli import app, main
from padless.emulator.ptx.ast import Address, Immediate, Instruction, Register, Vector
from padless.emulator.ptx.parser import parse
from padless.emulator.timing import H200
from support.emulator_cuda import compile_cuda

SOURCE = r"""
extern "C" __global__ void k(float* y, const float* x, int n, float factor) {
  __shared__ float s[64];
  s[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0;
  __syncthreads();
  y[threadIdx.x] = factor * s[63 - threadIdx.x];
}"""
LAUNCH: dict[str, Any] = {
    "block": 64,
    "buffers": {
        "x": {"dtype": "float32", "shape": [64], "fill": "random", "seed": 4},
        "y": {"dtype": "float32", "shape": [64], "fill": "nan", "save": "y.npy"},
    },
    "args": ["y", "x", 50, {"f32": 0.5}],
}


def emulate(folder: Path, source: str, launch: dict[str, object], *options: str) -> tuple[int, str]:
    (folder / "kernel.ptx").write_text(compile_cuda(source))
    (folder / "launch.json").write_text(json.dumps(launch))
    result = CliRunner().invoke(app, [str(folder / "kernel.ptx"), "--launch", str(folder / "launch.json"), *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_runs_and_saves(tmp_path: Path) -> None:
    code, output = emulate(tmp_path, SOURCE, LAUNCH, "--seeds", "2")
    assert code == 0
    assert "seed 1: 0 reports" in output
    x = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    x[50:] = 0
    assert (np.load(tmp_path / "y.npy") == np.float32(0.5) * x[::-1]).all()


@pytest.mark.parametrize(("save", "there"), [("new/y.npy", "new/y.npy"), ("y", "y.npy"), (5, "5.npy")])
def test_a_buffer_is_saved_wherever_it_is_wanted(tmp_path: Path, save: object, there: str) -> None:
    x, y = LAUNCH["buffers"].values()
    code, _ = emulate(tmp_path, SOURCE, LAUNCH | {"buffers": {"x": x, "y": y | {"save": save}}})
    assert code == 0
    assert np.load(tmp_path / there).shape == (64,)


def test_a_buffer_that_cannot_be_saved_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "y.npy").mkdir()
    with pytest.raises(ValueError, match=r"^save of buffer y is .*y.npy', a folder; it must be a file"):
        emulate(tmp_path, SOURCE, LAUNCH, "--trace")


def test_finds_a_race_and_says_so_with_its_exit_code(tmp_path: Path) -> None:
    broken = SOURCE.replace("__syncthreads();", "")
    code, output = emulate(tmp_path, broken, LAUNCH, "--seeds", "4")
    assert code == 1
    assert "race: " in output
    assert "test.cu:6" in output
    code, _ = emulate(tmp_path, broken, LAUNCH, "--no-check", "--seeds", "4")
    assert code == 0


@pytest.mark.parametrize("seeds", ["0", "-1"])
def test_no_seeds_is_an_error(tmp_path: Path, seeds: str) -> None:
    """Nothing would be run, and nothing found."""
    code, output = emulate(tmp_path, SOURCE, LAUNCH, "--seeds", seeds)
    assert code == 2
    assert "--seeds" in output


def test_trace_prints_instructions(tmp_path: Path) -> None:
    code, output = emulate(tmp_path, SOURCE, LAUNCH, "--trace")
    assert code == 0
    assert output.count("bar.sync 0") == 2


def test_toml_and_tensor_maps(tmp_path: Path) -> None:
    source = r"""
    extern "C" __global__ void k(const __grid_constant__ TensorMap m, uint32_t* y) {
      __shared__ alignas(128) uint32_t s[64]; __shared__ alignas(8) uint64_t full;
      if (threadIdx.x == 0) {
        init(smem(&full), 1); fence_init(); expect(smem(&full), 256); tma_load(m, smem(s), smem(&full), 4, 2);
      }
      __syncwarp(); wait(smem(&full), 0);
      y[threadIdx.x] = s[threadIdx.x]; y[threadIdx.x + 32] = s[threadIdx.x + 32];
    }"""
    (tmp_path / "kernel.ptx").write_text(compile_cuda(source))
    (tmp_path / "launch.toml").write_text(
        'block = 32\nargs = [{ tensor_map = { buffer = "x", box = [16, 4] } }, "y"]\n'
        '[buffers.x]\ndtype = "uint32"\nshape = [5, 32]\nfill = "index"\n'
        '[buffers.y]\ndtype = "uint32"\nshape = [64]\nsave = "y.npy"\n'
    )
    result = CliRunner().invoke(app, [str(tmp_path / "kernel.ptx"), "--launch", str(tmp_path / "launch.toml")])
    assert result.exit_code == 0, result.output
    expected = np.zeros((4, 16), np.uint32)
    expected[:3] = np.arange(160).reshape(5, 32)[2:, 4:20]
    assert (np.load(tmp_path / "y.npy").reshape(4, 16) == expected).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": ["z"]}, "names no buffer"),
        ({"args": []}, "takes 4 parameters"),
        ({"buffers": {"x": {"dtype": "float32"}}}, "needs dtype and shape"),
        ({"args": ["y", "x", {"what": 1}, 2]}, "is not a number"),
        ({"gird": 8}, r"the launch description has \['gird'\], allowed are args, block"),
        ({"buffers": {"x": {"dtype": "float32", "shape": [4], "file": "x.npy"}}}, r"buffer x has \[.file.\], allowed"),
    ],
)
def test_bad_descriptions(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        emulate(tmp_path, SOURCE, LAUNCH | change)


# ---- the parser
def test_parser_keeps_modifiers_operands_and_lines() -> None:
    text = """.version 9.0
.target sm_90a
.address_size 64
.global .align 8 .b64 table[2] = {generic(other)+8, 5};
.global .align 4 .f32 other = 0f3F800000;
.visible .entry k(.param .align 64 .b8 map[128], .param .u32 n)
.maxntid 128, 1, 1
{
  .reg .b32 %r<4>; .reg .pred %p; .reg .b64 %rd<2>;
  .loc 1 7 3
  @!%p ld.global.L2::cache_hint.v2.b32 {%r1, _}, [%rd1+-16], %rd0; // comment
  .loc 1 9 3, function_name $name, inlined_at 1 30 5
  { .reg .pred %p; L: @%p bra L; }
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, -3}], [%r3];
  mov.b32 %r1, 0fBF800000; /* a
  comment */ ret;
}
.file 1 "a.cu"
"""
    module = parse(text, "x.ptx")
    function = module.functions["k"]
    load, branch, copy, move, _ = (s for s in function.body if isinstance(s, Instruction))
    assert (load.name, load.guard, load.guard_negated) == ("ld.global.L2::cache_hint.v2.b32", Register("%p"), True)
    assert load.operands[1] == Address(Register("%rd1"), -16)
    assert (load.line, str(load.source)) == (11, "a.cu:7")
    assert str(branch.source) == "a.cu:9 (inlined at a.cu:30)"
    assert branch.guard != load.guard  # the inner %p is another register
    assert copy.operands[1] == Address(Register("%rd1"), 0, (Register("%r2"), Immediate(-3)))
    assert move.operands[1] == Immediate(0xBF800000, 32)
    assert move.line == 15
    assert isinstance(load.operands[0], Vector)
    assert function.max_threads == (128, 1, 1)
    assert module.variables["table"].relocations == ((0, "other", 8),)
    assert module.variables["other"].initial == bytes([0, 0, 0x80, 0x3F])


def test_module_variables_point_at_each_other() -> None:
    source = r"""
    __device__ int value = 41; __device__ int* pointer = &value;
    extern "C" __global__ void k(int* out) { *out = *pointer + 1; }"""
    emulator = Emulator(compile_cuda(source))
    out = np.zeros(1, np.int32)
    emulator.launch("k", 1, 1, [emulator.memory.register(out)]).raise_on_reports()
    assert out[0] == 42


# ------------------------------------------------------------------------------------------------------ time
def test_time_prints_cycles_and_writes_trace_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "new" / "t.json", tmp_path / "other" / "new" / "t.png"
    options = ["--time", "--chip", "H200", "--time-trace", str(trace), "--time-picture", str(picture)]
    code, output = emulate(tmp_path, SOURCE, LAUNCH, *options)
    assert code == 0
    assert re.match(r"H200: [\d,]+ cycles, [\d.]+ to [\d.]+ us at 1.98 to 1.42 GHz", output)
    assert "values" in output
    assert re.search(r"^caveats: \d+ of \d+ rates of the H200", output, re.MULTILINE)
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_time_repeats(tmp_path: Path) -> None:
    first, second = (emulate(tmp_path, SOURCE, LAUNCH, "--time")[1] for _ in range(2))
    assert first == second


def test_time_goes_up_with_work(tmp_path: Path) -> None:
    slow = SOURCE.replace("factor * s", "sinf(expf(factor)) / (1 + factor) * s")
    cycles = [
        int(emulate(tmp_path, source, LAUNCH, "--time")[1].split()[1].replace(",", "")) for source in (SOURCE, slow)
    ]
    assert cycles[0] < cycles[1]


def test_unknown_chip_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--chip is 'A100', allowed are H200, B200"):
        emulate(tmp_path, SOURCE, LAUNCH, "--time", "--chip", "A100")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time-trace", "t.json"], "--time-trace is of a timed run; add --time"),
        (["--chip", "H200"], "--chip is of a timed run or of a program; add --time or --program FILE"),
        (["--sms", "8"], "--sms is of a program; add --program FILE"),
        (["--reports", "0"], "--reports is of a program; add --program FILE"),
        (["--time", "--seeds", "2"], "--time and --seeds exclude each other"),
        (["--time", "--time-trace", "."], "--time-trace is '.', a folder; it must be a file"),
        (["--time", "--time-picture", "t.weird"], "--time-picture is 't.weird'; its name must end in .pdf, .png, .svg"),
    ],
)
def test_options_of_no_use_are_refused_before_anything_runs(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were passed over; a picture that cannot be written ended in a traceback, after all had run."""
    monkeypatch.setattr("sys.argv", ["ptx-emulate", "--launch", "absent.toml", *options])
    with pytest.raises(SystemExit) as stop:
        main("ptx-emulate")
    said_there = capsys.readouterr()
    assert (stop.value.code, said_there.out) == (2, "")
    assert said_there.err.startswith(f"ptx-emulate: {said}")
    assert said_there.err.count("\n") == 1


def test_a_picture_without_matplotlib_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["--launch", "absent.toml", "--time", "--time-picture", "t.png"])
    assert str(done.exception) == "--time-picture needs matplotlib, which is not installed; pip install matplotlib"


WARP_PRODUCT = r"""
extern "C" __global__ void k(float* y, const unsigned* x, int n, float factor) {
  float d[4] = {factor, factor, factor, factor};
  unsigned a = x[threadIdx.x];
  for (int i = 0; i < n; ++i)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
                 "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
  y[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}"""


def test_products_of_one_warp_take_time(tmp_path: Path) -> None:
    cycles = []
    for n in (10, 110):
        launch = {**LAUNCH, "args": ["y", "x", n, {"f32": 0.5}], "block": 32}
        code, output = emulate(tmp_path, WARP_PRODUCT, launch, "--time")
        assert code == 0
        cycles.append(int(output.split()[1].replace(",", "")))
    pipe = 16 * 8 * 32 / (H200["tensor_bytes_per_clk"] / 4 * H200["mma_sync_share"])
    assert cycles[1] - cycles[0] >= 100 * pipe


def test_target_without_a_chip_is_named(tmp_path: Path) -> None:
    (tmp_path / "kernel.ptx").write_text(compile_cuda(SOURCE).replace(".target sm_90a", ".target sm_80"))
    (tmp_path / "launch.json").write_text(json.dumps(LAUNCH))
    result = CliRunner().invoke(
        app, [str(tmp_path / "kernel.ptx"), "--launch", str(tmp_path / "launch.json"), "--time"]
    )
    assert isinstance(result.exception, LaunchError)
    assert "--chip has to say which of H200, B200" in str(result.exception)
