"""A machine with a B200 that is not here: what `padless verify`, `bench` and `tune` would do on it, up to the launch.

The device is a stub: kernels are compiled to cubins, configurations chosen, tensor maps encoded and checked, launches
packed; nothing runs.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench.cases.blackwell import DENSE_SIZES
from padless.bench.cases.formats import COMPETITION, offered
from padless.bench.tune import costs as tune
from padless.bench.tune import tiles_sm100 as tune_tiles
from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor, blocked_size
from padless.kernels import cost_model
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host_list import prepare_list
from padless.kernels.table import find_route, kernels_arch
from padless.runtime import driver, jit
from padless.runtime.architecture import ARCHITECTURES
from padless.runtime.devices import backends
from padless.runtime.driver import LaunchShape
from padless.testing import progress
from padless.verify import lines as verify_lines
from padless.verify import run as verify
from padless.verify.emulator.products import emulate
from padless.verify.fuzz import epilogue_lines, epilogues, product_lines
from padless.verify.tiles import configs_of, routes_of
from support.quant_cases import ALL
from support.ragged import missing_gpu

HERE = [found for found in ARCHITECTURES if found.kernels == "sm_100a"]
ARCHS = [found.name for found in HERE]


class Stub(EmulatedDriver):
    """A B200 of 148 multiprocessors that compiles and packs and never runs."""

    kind = "cubin"

    def __init__(self, arch: str = "sm_100a") -> None:
        super().__init__(arch)
        self.kernels: list[jit.CompiledKernel] = []
        self.shapes: list[LaunchShape] = []

    def num_sms(self, device: int) -> int:
        return 148

    def load(self, kernel: jit.CompiledKernel, device: int) -> Any:
        assert kernel.image[:4] == b"\x7fELF"
        self.kernels.append(kernel)
        return kernel

    def prepare(
        self, function: Any, kernel: Any, shape: LaunchShape, arguments: Sequence[Any], tensors: Sequence[Any]
    ) -> Any:
        packed = sum(len(a) if isinstance(a, bytes) else a[1] for a in arguments)
        assert 0 < packed <= 4096
        assert shape.grid % shape.cluster == 0
        assert 0 < shape.grid <= 148
        assert kernel.shared_bytes <= 227 * 1024
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
        self.shapes.append(shape)
        return lambda stream: None


def empty_operand(fmt: BlockScaledFormat, shape: tuple[int, ...], groups: int | None = None) -> BlockScaledTensor:
    """Uninitialised codes, with scales in 32x4x4 tiles; one global scale for NVFP4."""
    data = torch.empty((*shape[:-1], shape[-1] // fmt.codes_per_byte), dtype=torch.uint8)
    size = blocked_size(shape[-2], -(-shape[-1] // fmt.block_k))
    scale = torch.empty((size,) if groups is None else (groups, size), dtype=torch.uint8)
    one = torch.ones(1) if fmt == NVFP4 else None
    return BlockScaledTensor(data.view(fmt.data_dtype), scale.view(fmt.scale_dtype), fmt, one, "blocked")


def problem(fmt: BlockScaledFormat, rows: int, n: int, k: int, groups: int) -> tuple[Any, Any, torch.Tensor]:
    offs = (torch.arange(groups) + 1).to(torch.int32) * rows
    return empty_operand(fmt, (groups * rows, k)), empty_operand(fmt, (groups, n, k), groups), offs


@pytest.mark.parametrize("rows", [16, pytest.param(128, marks=pytest.mark.slow), 2048])
def test_grouped_products_are_ready_to_launch(rows: int) -> None:
    stub = Stub()
    for fmt in (MXFP8, NVFP4):
        a, b, offs = problem(fmt, rows, 4096, 7168, 8)
        route = find_route("grouped_gemm", stub.arch, fmt.name, fmt.name)
        out = torch.empty((8 * rows, 4096), dtype=torch.bfloat16)
        assert route.load().prepare(stub, a, b, offs, out, None).copies == ()
    assert {shape.cluster for shape in stub.shapes} == ({1, 2} if rows == 16 else {2})


def test_the_dense_table_is_ready_to_launch() -> None:
    stub = Stub()
    for size in DENSE_SIZES:
        a, b = empty_operand(MXFP8, (size, size)), empty_operand(MXFP8, (1, size, size), 1)
        route = find_route("gemm", stub.arch, "MXFP8", "MXFP8")
        out = torch.empty((size, size), dtype=torch.bfloat16)
        route.load().prepare(stub, a, b, None, out, None)
    assert route.config_class is Sm100DenseConfig
    assert len(stub.shapes) == len(DENSE_SIZES)


def test_the_competitions_shapes_are_ready_to_launch() -> None:
    stub = Stub()
    for sizes, n, k in COMPETITION.values():
        a = [empty_operand(NVFP4, (m, k)) for m in sizes]
        b = [empty_operand(NVFP4, (n, k)) for _ in sizes]
        out = [torch.empty((m, n), dtype=torch.float16) for m in sizes]
        assert prepare_list(stub, a, b, out, None, None).copies == ()


def test_quantizing_calls_are_ready_to_launch() -> None:
    stub = Stub()
    a, b, offs = problem(MXFP8, 512, 4096, 7168, 8)
    epilogue = Epilogue(
        activation="swiglu", gate_up="concatenated", row_format=MXFP8, row_layout="blocked", scale_rule="rceil"
    )
    codes = torch.empty((4096, 2048), dtype=torch.uint8)
    scale = torch.empty(blocked_size(4096, 64), dtype=torch.uint8)
    tensors = EpilogueTensors(row_codes=codes, row_scale=scale)
    route = find_route("grouped_gemm_quant", stub.arch, "MXFP8", "MXFP8")
    assert route.load_quant().prepare(stub, a, b, offs, tensors, None, epilogue=epilogue).copies == ()


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles_the_same_source(arch: str) -> None:
    grouped = Sm100GroupedConfig(kind="NVFP4", cta_group=2)
    epilogue = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", **ALL)
    quantizing = QuantConfig(Sm100GroupedConfig(cta_group=2, mma_n=256), epilogue)
    for source, prelude in (
        ("sm100_grouped/sm100_grouped_gemm.cu", grouped.prelude()),
        ("sm100_grouped/sm100_grouped_gemm.cu", quantizing.prelude()),
        ("sm100_dense/sm100_mxfp8_gemm.cu", Sm100DenseConfig().prelude()),
    ):
        kernel = jit.compile_kernel(source, prelude, arch)
        assert kernel.image[:4] == b"\x7fELF"
        assert kernel.spill_bytes == 0


# ---- the commands


@pytest.mark.parametrize("capability", [found.capability for found in HERE])
def test_the_backend_is_there(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA B200")
    monkeypatch.setattr(driver, "cuda_driver", Stub)
    found = backends()["cuda"]
    assert found.available, found.reason


@pytest.mark.parametrize("arch", ARCHS)
def test_verify_runs_what_concerns_this_gpu(arch: str) -> None:
    jobs, sanitized = verify.jobs_of(arch, None, against_emulator=True)
    assert list(jobs) == [
        "quantizers agree", "training quantizers agree", "dense MXFP8", "lists of problems", "formats", "epilogues",
        "chains", "batch invariance", *verify.MOE_CHECKS, "two devices", "emulator agrees on formats",
        "emulator agrees on epilogues",
    ]  # fmt: skip
    assert sanitized == [
        "padless.verify.lines grouped_gemm gemm grouped_gemm_list",
        "padless.verify.lines grouped_gemm_epilogue",
    ]
    assert {p.arch for p in routes_of(arch)} == {"sm_100a"}
    on_hopper, both = verify.jobs_of("sm_90a", None, against_emulator=True)
    assert set(jobs) - {"dense MXFP8", "lists of problems"} < set(on_hopper)
    assert set(sanitized) < set(both)
    assert list(verify.jobs_of(arch, ["dense"])[0]) == ["dense"]


def test_verify_tries_every_tile() -> None:
    for route in routes_of("sm_100a"):
        configs = configs_of(route)
        assert configs[0] is None
        tiles = {(c.cta_group, c.tokens_on_n, c.mma_n) for c in configs[1:]}
        assert len(tiles) == 12
        assert {c.cluster for c in configs[1:]} == {1, 2, 4}
        assert {c.cta_group for c in configs[1:] if c.multicast > 1} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["MXFP8", "NVFP4"])
def test_small_launches_of_verify_in_the_emulator(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compute-sanitizer would watch on a GPU: the product and every quantising call that Blackwell takes."""
    for module in (product_lines, epilogue_lines):
        of = module.routes_of
        few = lambda *given, of=of: [p for p in of(*given) if (p.a, p.b) == (fmt, fmt)]  # noqa: E731
        monkeypatch.setattr(module, "routes_of", few)
    assert verify_lines.small_of("grouped_gemm").on("emulator:sm_100a")
    launched: list[object] = []
    call = epilogues.grouped_gemm_epilogue
    monkeypatch.setattr(epilogues, "grouped_gemm_epilogue", lambda *a, **k: (launched.append(a), call(*a, **k))[1])
    assert verify_lines.small_of("grouped_gemm_epilogue").on("emulator:sm_100a")
    assert len(launched) == 6


@pytest.mark.parametrize("arch", ARCHS)
def test_bench_formats_finds_the_kernels(arch: str) -> None:
    names, missing = offered(arch)
    assert set(names) == {"FP8_BLOCK x FP8_BLOCK", "MXFP8 x MXFP8", "NVFP4 x NVFP4", "MXFP4 x MXFP4"}
    assert "FP8_BLOCK x MXFP4" in missing
    assert kernels_arch(arch) == "sm_100a"


def test_tune_shows_where_another_tile_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def clock(point: tune_tiles.Point, configs: Sequence[Sm100GroupedConfig]) -> list[float]:
        asked.append(len(configs))
        assert len(set(configs)) == len(configs)
        # The chosen tile takes 30 us, pairs of 256 columns 20, the others 40.
        return [30.0] + [20.0 if (c.cta_group, c.mma_n) == (2, 256) else 40.0 for c in configs[1:]]

    monkeypatch.setattr(cost_model, "gpu_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(tune, "cuda_driver", lambda: SimpleNamespace(arch="sm_103a"))
    monkeypatch.setattr(tune_tiles, "gpu_clock", lambda repeats: clock)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    text = io.StringIO()
    assert tune.run_tune(console=Console(file=text, width=140)) == 0
    shown = text.getvalue()
    assert len(asked) == len(tune_tiles.FORMATS) * len(tune_tiles.ROWS)
    assert set(asked) == {16}
    assert "Problems: 16 of 16" in shown
    assert "1.500" in shown
    assert "Nothing stored" in shown
    for rows in tune_tiles.ROWS:
        for config in tune_tiles.tiles(rows):
            assert config.tile_m * config.tile_n > 0


def test_tests_that_need_a_blackwell_name_it() -> None:
    assert missing_gpu((10, 0), (10, 0)) is None
    assert missing_gpu((10, 0), (9, 0)) is not None
    assert missing_gpu((9, 0), (10, 0)) is not None


@pytest.mark.parametrize("seed", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_verify_emulates_clusters(seed: int) -> None:
    """The emulated device has room for the largest cluster that verify tries."""
    route = next(p for p in routes_of("sm_100a") if (p.a, p.b) == ("MXFP8", "MXFP8"))
    o = product_lines.random_line(route, seed)
    expected = emulate("grouped_gemm", "sm_100a", o)[""]
    widest = max(configs_of(route)[1:], key=lambda c: (c.cluster, c.cta_group))
    assert widest.cluster == 4
    tile = configs_of(route).index(widest)
    assert torch.equal(emulate("grouped_gemm", "sm_100a", o | {"tile": tile})[""], expected)
