"""Checkpoints of tiny models of transformers, written once for each file of tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folder_of(name, kind): a checkpoint, written once. kind: bf16, fp8, ue8m0, linear or mxfp4."""
    from support.hub_checkpoints import write_bf16, write_fp8, write_mxfp4

    root = tmp_path_factory.mktemp("models")

    def folder(name: str, kind: str) -> Path:
        path = root / f"{name}-{kind}"
        if path.exists():
            return path
        if kind == "bf16":
            return write_bf16(name, path)
        source = folder(name, "bf16")
        if kind == "mxfp4":
            return write_mxfp4(source, path)
        return write_fp8(source, path, scales="ue8m0" if kind == "ue8m0" else "float", linear=kind == "linear")

    return folder
