"""Launches of the quantizers that are packed once for the same operands: whatever differs is packed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padless.kernels import group_tiles, remembered
from padless.kernels.group_tiles import TokenGroups
from padless.kernels.sm90_rows_columns import host as columns_host
from padless.kernels.sm90_swiglu_backward import host as swiglu_host
from padless.testing.compile_ahead import RecordingDevice

M, HIDDEN, GROUPS, TOKENS = 40, 128, 3, 256
KERNEL = SimpleNamespace(num_threads=256)
Given = dict[str, Any]


class Device(RecordingDevice):
    """Whose launches are what they were packed from."""

    def prepare(self, function: Any, kernel: Any, shape: Any, arguments: Any, tensors: Any) -> Any:
        return function, shape, tuple(arguments)


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(remembered, "_KNOWN", {})
    monkeypatch.setattr(group_tiles, "load_kernel", lambda driver, source, config, index: (KERNEL, config))


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def groups() -> TokenGroups:
    return TokenGroups(*(torch.zeros(GROUPS, dtype=torch.int32) for _ in range(3)), 32, 7)


def columns() -> Given:
    return {
        "x": torch.empty(M, HIDDEN).bfloat16(), "tokens": torch.zeros(M, dtype=torch.int32), "groups": groups(),
        "row_codes": bytes_of(M, HIDDEN), "row_scale": torch.empty(1, M).t(), "codes": bytes_of(HIDDEN, TOKENS),
        "scale": torch.empty(5, HIDDEN), "square": False,
    }  # fmt: skip


def swiglu() -> Given:
    out = {
        "row_codes": bytes_of(M, 2 * HIDDEN), "row_scale": torch.empty(2, M).t(), "dz_codes": bytes_of(256, TOKENS),
        "dz_scale": torch.empty(5, 256), "hidden_codes": bytes_of(HIDDEN, TOKENS), "hidden_scale": torch.empty(5, 128),
        "sums": torch.empty(1, M),
    }  # fmt: skip
    return {
        "dh": torch.empty(M, HIDDEN).bfloat16(), "z": torch.empty(M, 2 * HIDDEN).bfloat16(), "prob": torch.empty(M),
        "groups": groups(), "interleaved": False, "square": False, "out": swiglu_host.Outputs(**out),
    }  # fmt: skip


def variants(given: Given) -> Iterator[Given]:
    """Everything that can be another, each alone: addresses, strides, sizes, options, and what may be absent."""
    yield from moved(given)
    yield {"groups": replace(given["groups"], alignment=128)}
    yield {"groups": replace(given["groups"], num_tiles=9)}
    yield {"tokens": None} if "tokens" in given else {"prob": None, "out": replace(given["out"], sums=None)}


def moved(given: Given) -> Iterator[Given]:
    for name, value in given.items():
        if isinstance(value, bool):
            yield {name: not value}
        elif isinstance(value, torch.Tensor):
            yield {name: value.clone()}
            if value.dtype == torch.bfloat16:
                wide = torch.empty(len(value), value.shape[1] + 8, dtype=value.dtype)
                yield {name: wide[:, : value.shape[1]]}
        elif not isinstance(value, int):
            for inner in moved(vars(value)):
                yield {name: replace(value, **inner)}


@pytest.mark.parametrize(("host", "make"), [(columns_host, columns), (swiglu_host, swiglu)])
def test_what_differs_is_packed_anew(host: Any, make: Callable[[], Given], monkeypatch: pytest.MonkeyPatch) -> None:
    device, given = Device("sm_90a", "cubin", 132), make()
    cases = [given, *(given | changed for changed in variants(given))]
    assert len(cases) > 12
    found = [host.prepare(device, **case) for case in cases]
    for once, case in zip(found, cases, strict=True):
        assert host.prepare(device, **case) is once
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    for once, case in zip(found, cases, strict=True):
        anew = host.prepare(device, **case)
        assert anew is not once
        assert anew.launch == once.launch


def test_no_more_are_kept_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    made: list[int] = []
    device, x = Device("sm_90a", "cubin", 132), torch.empty(1)
    for i in (1, 2, 3, 1, 2, 3, 4, 1):
        group_tiles.prepared_before(device, "a.cu", (i,), lambda i=i: made.append(i), (x,), (), 1, 1)
    assert made == [1, 2, 3, 4, 1]
