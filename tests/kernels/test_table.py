"""The table of what runs where is the code's, all of it, and the page in docs is that table."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from padless import formats
from padless.cli import supported
from padless.cli.supported import supported_markdown
from padless.kernels import table as paths_module
from padless.kernels.table import PLAIN_ROUTES, ROUTES, KernelHost, QuantHost, find_route
from support.ragged import ROOT

EVERY = (*ROUTES, *PLAIN_ROUTES)
PAGE = ROOT / "docs/supported.md"


def rows_of(text: str, operation: str) -> dict[tuple[str, str], list[str]]:
    """(activations, weights): the cells of the architectures, parsed back from the Markdown."""
    section = text.split(f"## `{operation}`\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.strip().splitlines()]
    return {(cells[0].strip("`"), cells[1].strip("`")): cells[2:] for cells in lines[2:]}


def test_the_page_is_the_generators_output() -> None:
    assert PAGE.read_text() == supported_markdown(), "run: padless info --formats > docs/supported.md"


def test_every_route_is_in_the_table_and_nothing_else() -> None:
    text = supported_markdown()
    for operation in {route.operation for route in ROUTES}:
        rows = rows_of(text, operation)
        archs = ["sm_90a", "sm_100a"]
        listed = {
            (pair, arch, kernel)
            for pair, cells in rows.items()
            for arch, cell in zip(archs, cells, strict=True)
            for kernel in re.findall(r"`(\w+)`", cell)
        }
        wanted = {((p.a, p.b), p.arch, p.name) for p in EVERY if p.operation == operation}
        assert listed == wanted
    for route in EVERY:
        page = f"kernels/{route.kernel.split('/')[0]}/index.md"
        assert f"| [`{route.name}.cu`]({page}) | {route.accumulation} |" in text
        assert (PAGE.parent / page).is_file()


def test_the_named_default_is_the_one_that_is_taken() -> None:
    text = supported_markdown()
    for operation in {route.operation for route in ROUTES}:
        for (a, b), cells in rows_of(text, operation).items():
            for arch, cell in zip(("sm_90a", "sm_100a"), cells, strict=True):
                if cell == "-":
                    continue
                kernels = re.findall(r"`(\w+)`", cell)
                assert find_route(operation, arch, a, b).name == kernels[0], cell
                for route in EVERY:
                    if (route.operation, route.arch, route.a, route.b) == (operation, arch, a, b):
                        assert find_route(operation, arch, a, b, route.load().Config) == route, "by its class"


def test_every_call_takes_the_same_kernel_for_a_pair() -> None:
    """What is quantised is what grouped_gemm and gemm round: but for Blackwell's dense kernel one kernel does all."""
    for route in ROUTES:
        first = find_route(route.operation, route.arch, route.a, route.b)
        grouped = find_route("grouped_gemm", route.arch, route.a, route.b)
        if (route.operation, route.arch, route.a[:5], route.b[:5]) == ("gemm", "sm_100a", "MXFP8", "MXFP8"):
            assert first.kernel == "sm100_dense/sm100_mxfp8_gemm.cu"
        else:
            assert (first.kernel, first.accumulation) == (grouped.kernel, grouped.accumulation)


def test_a_new_route_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = supported_markdown()
    extra = paths_module.Route("gemm", "sm_90a", "NVFP4", "MXFP8", "nothing", "made_up.cu", "by hand")
    monkeypatch.setattr(supported, "ROUTES", (*ROUTES, extra))
    text = supported_markdown()
    assert text != before
    assert rows_of(text, "gemm")["NVFP4", "MXFP8"] == ["`made_up`", "-"]
    default = next(route for route in ROUTES if route.operation == "gemm")
    other = paths_module.Route("gemm", default.arch, default.a, default.b, "nothing", "other.cu", "by hand")
    monkeypatch.setattr(supported, "ROUTES", (*ROUTES, other))
    cells = rows_of(supported_markdown(), "gemm")[default.a, default.b]
    assert any(cell.startswith(f"`{default.name}`") and cell.endswith("`other`") for cell in cells)


def test_every_format_is_described() -> None:
    text = supported_markdown()
    for format in formats.FORMATS:
        assert f"| `{format.name}` |" in text
    assert "| `NVFP4` | e2m1, two a byte | e4m3, and a float32 for all | 1 x 16 | 1 x 16 | 4.50 |" in text
    assert "| `FP8_BLOCK` | e4m3 | float32 | 1 x 128 | 128 x 128 | 8.25 and 8.00 |" in text


# --- host sides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted({route.module for route in EVERY}))
def test_a_host_side_is_what_the_protocol_says(module: str) -> None:
    """Names and kinds of parameters, and that the configuration is a frozen dataclass with a prelude."""
    route = next(route for route in EVERY if route.module == module)
    quant = route.operation == paths_module.QUANT
    host, protocol = (route.load_quant(), QuantHost) if quant else (route.load(), KernelHost)
    wanted = list(inspect.signature(protocol.prepare).parameters.values())[1:]
    found = list(inspect.signature(host.prepare).parameters.values())
    required = [p for p in found if p.default is p.empty]
    assert [(p.name, p.kind) for p in required] == [(p.name, p.kind) for p in wanted]
    assert route.config_class is host.Config
    assert dataclasses.is_dataclass(host.Config)
    assert host.Config.__dataclass_params__.frozen
    assert callable(host.Config.prelude)


def test_every_route_of_a_module_has_its_operation_in_common() -> None:
    """So that load() and load_quant() are right for a whole module."""
    for route in ROUTES:
        assert route.module.endswith("_quant") == (route.operation == paths_module.QUANT)


def test_the_configurations_tell_the_kernels_of_a_pair_apart() -> None:
    for route in ROUTES:
        same = [
            r.config_class
            for r in ROUTES
            if (r.operation, r.arch, r.a, r.b) == (route.operation, route.arch, route.a, route.b)
        ]
        assert len(same) == len(set(same))


def test_rows_may_start_anywhere_in_the_dense_kernel_alone() -> None:
    assert {route.name for route in ROUTES if route.any_n} == {"sm100_mxfp8_gemm"}
