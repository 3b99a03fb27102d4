"""padless info: what it says must be what the machine is."""

from __future__ import annotations

import io
import json
import platform
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console

import padless
from padless.cli import environment as info
from padless.testing import machine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(folder))
    return folder


def printed(**options: bool) -> str:
    buffer = io.StringIO()
    info.print_info(Console(file=buffer, width=200), **options)
    return buffer.getvalue()


def test_versions_are_those_imported(cache):
    found = info.collect()
    assert found["padless"] == padless.__version__
    assert found["python"] == platform.python_version()
    # The wheel's version may lack the build's name that torch adds ("+cu130").
    assert found["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["nvrtc"].startswith("13.0")


def test_an_absent_package_is_none(cache, monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package-anywhere"))
    assert info.collect()["packages"]["no-such-package-anywhere"] is None
    assert "not installed" in printed()


def test_devices_and_backends_agree_with_torch(cache):
    found = info.collect()
    assert len(found["devices"]) == torch.cuda.device_count()
    assert set(found["backends"]) == set(padless.backends())
    assert found["backends"]["reference"]["available"] is True
    if not torch.cuda.is_available():
        assert found["backends"]["cuda"] == {"available": False, "reason": "torch sees no CUDA GPU"}
        assert "no CUDA GPU" in printed()


def test_the_cache_is_counted(cache):
    assert info.collect()["cache"] == {"directory": str(cache), "entries": 0, "bytes": 0}
    assert not cache.exists(), "asking must not create it"
    cache.mkdir()
    (cache / "one.cubin").write_bytes(b"x" * 1000)
    (cache / "one.json").write_bytes(b"x" * 24)
    (cache / "two.ptx").write_bytes(b"x" * 500)
    assert info.collect()["cache"] == {"directory": str(cache), "entries": 2, "bytes": 1524}
    assert f"2 kernels, 0.0 MB in {cache}" in printed()


def test_a_file_that_is_moved_while_it_is_counted_is_none(cache, monkeypatch):
    """Another process writes a kernel under a name of its own, and moves it."""
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder / "kernel.cubin.tmp"]))
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert info.collect()["cache"] == {"directory": str(cache), "entries": 0, "bytes": 0}


def test_the_table_of_tile_costs_in_use_is_named(cache, monkeypatch):
    from padless.kernels import cost_model

    kernel = "sm90_fp8_grouped_gemm"
    monkeypatch.setattr(cost_model, "gpu_name", lambda: "Made Up GPU")
    cost_model.cost_table.cache_clear()
    assert info.collect()["tile_costs"][kernel] == cost_model.BUILT_IN[kernel].source
    assert "built in" in printed()
    cost_model.store_tuned("Made Up GPU", "2031-02-03", {kernel: cost_model.BUILT_IN[kernel].costs})
    cost_model.cost_table.cache_clear()
    try:
        assert "tuned on this machine, Made Up GPU, 2031-02-03" in printed()
    finally:
        cost_model.cost_table.cache_clear()


def test_json_is_what_collect_says(cache):
    assert json.loads(printed(as_json=True)) == info.collect()


def test_tables_name_every_backend_and_its_reason(cache):
    text = printed()
    for name, backend in padless.backends().items():
        assert name in text
        assert backend.reason[:60] in text


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.12  Release Build\n", "570.12"),
        ("nothing to see\n", None),
    ],
)
def test_driver_version_is_read(tmp_path, monkeypatch, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr(info, "_DRIVER_VERSION", path)
    assert info.collect()["driver"] == version
    path.unlink()
    assert info.collect()["driver"] is None
