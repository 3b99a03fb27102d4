"""Interface of the backends, and the choice of one."""

from __future__ import annotations

import socket
from typing import Protocol

import torch
import torch.distributed as dist

from padless.distributed import deepep
from padless.distributed.collective import CollectiveBackend
from padless.distributed.placement import Placement
from padless.distributed.plan import ExpertPlan
from padless.distributed.settings import Settings
from padless.formats import BlockScaledTensor
from padless.quantization.quantize import has_triton

BACKENDS = ("auto", "collective", "symm", "deepep")


class Backend(Protocol):
    """Moves rows. Calls are collective: every rank makes the same ones in the same order."""

    name: str

    def dispatch(
        self,
        tokens: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        problem: str | None = None,
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        """Rows and plan of tokens (T, H), ids and weights (T, k). problem: this rank's error, told to the others."""

    def redispatch(self, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """Rows of x (T, H), by the plan of an earlier dispatch, as they are or through the gradients' format."""

    def combine(
        self,
        rows: torch.Tensor,
        plan: ExpertPlan,
        prob: torch.Tensor | None,
        dprob: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(sums (T, H), dprob by slot (T, k) or None) of rows (C, H), each times its prob.

        shared (T, H), and a type of the sums that is not the rows': where sums are of slots alone.
        """

    def check(self) -> None:
        """Raises RuntimeError for what a device found out."""


def choose_backend(
    backend: str, group: dist.ProcessGroup, device: torch.device, settings: Settings, placement: Placement
) -> Backend:
    """The backend of a name; "auto": "symm" for GPUs of one host with Triton, "deepep" for those of several with DeepEP,
    else "collective". Raises ValueError.
    """
    if backend == "auto":
        backend = _automatic(group, device, settings)
    if backend == "deepep" and settings.sums == "slots":
        raise ValueError("sums is 'slots' and backend 'deepep', which adds up itself; use 'symm' or 'collective'")
    if backend == "collective":
        return CollectiveBackend(group, settings, placement)
    if backend == "deepep":
        return deepep.DeepEpBackend(deepep.connect(group, device, settings), settings, placement)
    if device.type != "cuda":
        raise ValueError(f"backend is 'symm' and the device {device}; it needs GPUs, use 'collective' or 'auto'")
    from padless.distributed.symm import SymmBackend
    from padless.distributed.symm_state import allocate

    return SymmBackend(allocate(group, device, settings), settings, placement)


def packages(backend: str) -> dict[str, object]:
    """Whether what a backend needs can be imported here."""
    if backend == "symm":
        return {"whether triton can be imported": has_triton()}
    return {"whether deep_ep can be imported": deepep.is_there()} if backend == "deepep" else {}


def _automatic(group: dist.ProcessGroup, device: torch.device, settings: Settings) -> str:
    """The backend for what all ranks have."""
    if device.type != "cuda":
        return "collective"
    every: list[tuple[str, bool, bool]] = [("", False, False)] * dist.get_world_size(group)
    dist.all_gather_object(every, (socket.gethostname(), has_triton(), deepep.is_there()), group=group)
    hosts, triton, deep_ep = zip(*every, strict=True)
    if len(set(hosts)) == 1:
        return "symm" if all(triton) and settings.capacity != "exact" else "collective"
    return "deepep" if all(deep_ep) and deepep.fits(settings) and settings.sums == "ranks" else "collective"
