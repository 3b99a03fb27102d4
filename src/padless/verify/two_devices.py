"""Two GPUs in one process: what is launched for tensors of the second one while the first is current."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from padless.verify import lines
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place
from padless.verify.training import graphs

_PRODUCTS = ("grouped_gemm", "gemm", "grouped_gemm_list")
_HOPPERS = ("grouped_gemm_wgrad", "plain.grouped_gemm", "plain.grouped_gemm_wgrad", "fp4_input_gradient", "moe.decode")
# Every eighth problem of a check, on the second GPU; all small launches.
_SOME = (0, 8)


def parts_of(arch: str) -> dict[str, Check]:
    """Checks by name: launches of every kernel, and steps of a layer, as calls and in CUDA graphs."""
    parts = {"products": lines.small_of(*_PRODUCTS), "epilogues": lines.small_of("grouped_gemm_epilogue")}
    if arch == "sm_90a":
        parts |= {call: lines.check_of(call) for call in _HOPPERS}
        parts["layer in graphs"] = graphs.CHECK
    return parts


def check_two_devices(place: Place) -> None:
    """Everything of ``parts_of``, twice: the second time launches are remembered. The first GPU stays current."""
    for name, part in parts_of(place.arch).items():
        for _ in place.times(2):
            part.calls(replace(place, part=(0, 1) if name in ("products", "epilogues") else _SOME))
            place.judge.ask(partial(_require_first_is_current, name))


def _require_first_is_current(name: str) -> None:
    if torch.cuda.is_available():
        now = torch.cuda.current_device()
        torch.cuda.set_device(0)
        assert now == 0, f"{name}: cuda:{now} was current afterwards, and cuda:0 before"


CHECK = Check(check_two_devices, gpu=1)
