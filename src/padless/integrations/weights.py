"""Weights of a framework's experts as BlockScaledTensors: codes and scales by their dtypes and shapes, built once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import torch

from padless.checkpoints import from_deepseek, from_torch
from padless.formats import FORMAT_BY_NAME, MXFP4, MXFP4_REPACKED, MXFP8, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.layouts import _with_kernel_scales
from padless.moe.layer import ACTIVATIONS, BF16
from padless.runtime.architecture import BLACKWELL
from padless.runtime.devices import is_capturing, kernels_for
from padless.runtime.locks import ProcessLock
from padless.runtime.streams import Kept


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Both projections of E experts: w13 (E, 2 I, H) or without a gate (E, I, H), w2 (E, H, I), biases or None.

    activations: name of the format that activations are quantized to, "BF16" for none.
    """

    w13: BlockScaledTensor
    w2: BlockScaledTensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    activations: str

    @property
    def activation_format(self) -> BlockScaledFormat | torch.dtype:
        """activations as `padless.moe` takes them."""
        return torch.bfloat16 if self.activations == BF16 else FORMAT_BY_NAME[self.activations]


def block_scaled(
    name: str, codes: torch.Tensor, scale: torch.Tensor, remedy: str, global_scale: torch.Tensor | None = None
) -> BlockScaledTensor:
    """The weight of codes (.., N, K) float8_e4m3fn, or (.., N, K / 2) int8 or uint8 of two FP4 values, or (.., N, K / 8)
    int32 that `padless.integrations.codes.repack` made of them, and its scales.

    scale: one for each 128 x 128 values, float32, bfloat16, float8_e8m0fnu or its bytes (FP8_BLOCK), or one power of
        two for each 1 x 32 (MXFP8, MXFP4), or float8_e4m3fn for each 1 x 16 (NVFP4). float32 scales of blocks and
        one-byte scales are not copied. Blocks' scales may lack dimensions of size 1, as files that transformers 5.17
        has saved do.
    global_scale: NVFP4's decode scale, one or one for each expert.
    name, remedy: words of the errors. Raises ValueError.
    """
    codes, scale = codes.detach(), scale.detach()
    if codes.dtype == torch.int32:
        data = codes.view(torch.uint8).view(MXFP4_REPACKED.data_dtype)
        return BlockScaledTensor(data, exponents(scale), MXFP4_REPACKED)
    if codes.dtype in (torch.int8, torch.uint8):
        packed = codes.view(torch.uint8)
        if scale.dtype == torch.float8_e4m3fn:
            return from_torch(packed, scale, None if global_scale is None else global_scale.detach())
        return from_torch(packed, exponents(scale))
    if codes.dtype != torch.float8_e4m3fn or codes.dim() not in (2, 3):
        raise ValueError(f"{name} is {tuple(codes.shape)} {codes.dtype}; padless takes FP8 or FP4: {remedy}")
    *experts, n, k = codes.shape
    if tuple(scale.shape) == (*experts, n, ceil_div(k, MXFP8.block_k)):
        return from_torch(codes, exponents(scale))
    blocks = (*experts, ceil_div(n, 128), ceil_div(k, 128))
    if scale.dim() < len(blocks) and scale.numel() == prod(blocks):  # transformers 5.17 saves no dimension of size 1
        scale = scale.reshape(blocks)
    if tuple(scale.shape) == blocks:
        return from_deepseek(codes, scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale)
    raise ValueError(
        f"the scales of {name} have shape {tuple(scale.shape)} for {tuple(codes.shape)}; padless takes a scale for "
        f"each 128 x 128 or 1 x 32 values: {remedy}"
    )


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """Power-of-two scales as e8m0: as they are, bytes reinterpreted, and float32 converted, which is exact."""
    if scale.dtype == torch.uint8:
        return scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float8_e8m0fnu)


def in_tiles(t: BlockScaledTensor) -> BlockScaledTensor:
    """t with its scales as kernels read them; t itself where no kernel does, or where it has them so.

    Scales in tiles take as many bytes again while the plain ones are kept, a quarter of a bit a weight.
    """
    return _with_kernel_scales(t) if is_on_gpu(t) else t


def is_on_gpu(t: BlockScaledTensor) -> bool:
    """Whether kernels read it; the reference copies nothing."""
    return t.device.type == "cuda"


def activations_for(weights: BlockScaledTensor) -> str:
    """Name of the format for activations with the weights, "BF16" for none.

    FP4 weights take bfloat16 activations on Hopper, MXFP4 ones as the models were made for; where no kernel does, MXFP4
    weights take MXFP8. The others take their own format.
    """
    if weights.format.codes_per_byte == 1:
        return ACTIVATIONS[weights.format].name
    if weights.format == MXFP4_REPACKED:
        return BF16
    if kernels_for(weights.device) != BLACKWELL.name:
        return BF16
    return "MXFP8" if weights.format == MXFP4 else weights.format.name


def is_offloaded(module: Any) -> bool:
    """Whether accelerate brings the module's parameters for every call, and takes them away behind it."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,)))


def refuse_offloaded(path: str, module: torch.nn.Module, what: str) -> None:
    """Raises ValueError for a module whose parameters are elsewhere, so that nothing can be done to them."""
    if is_offloaded(module) and any(t.is_meta for t in module.parameters(recurse=False)):
        raise ValueError(
            f"{path or type(module).__name__} is offloaded by its device_map: {what} needs the experts in memory; load "
            "the model with a device_map that keeps them on a device"
        )


Sources = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class _Built:
    """Weights, and what they were built from.

    memory: of the sources, alive, so that nothing else is at its address, also where ``.data`` of a parameter is
        assigned.
    """

    key: tuple[Any, ...]
    sources: Sources
    memory: Sources
    weights: ExpertWeights
    kept: Kept


class KeptWeights(ABC):
    """ExpertWeights of one layer, built at the first call and again when a tensor is another or was written to.

    `refresh` knows of them while this lives.
    """

    def __init__(self) -> None:
        self._built: _Built | None = None  # replaced as a whole, which other threads may read meanwhile
        with _KEPT_GUARD.lock:
            _KEPT.add(self)

    @property
    def sources(self) -> Sources:
        """The tensors that the weights were built from."""
        return () if self._built is None else self._built.sources

    def of(self, sources: Sources, build: Callable[[], ExpertWeights], chosen: object = None) -> ExpertWeights:
        """The weights, which ``build`` makes of the sources and of what else was chosen."""
        built = self._built
        if built is None or built.key != _key_of(sources, chosen):
            origin = _origin(sources, chosen)  # in front of the weights: what is written meanwhile is seen later
            weights = build()
            if is_capturing(weights.w13.device):  # they are there when the graph runs, and for it alone
                return weights
            built = self._built = _Built(*origin, weights, kept_parts(weights, sources))
        built.kept.read()
        return built.weights

    @abstractmethod
    def write_again(self) -> None:
        """Writes what was built anew, where it lies: `_rewrite` with the sources of now."""

    def _rewrite(self, sources: Sources, build: Callable[[], ExpertWeights], chosen: object = None) -> None:
        if (built := self._built) is not None:
            weights = rewritten(built.weights, build())  # in front of the key: sources may count what is written here
            self._built = _Built(*_origin(sources, chosen), weights, kept_parts(weights, sources))


_KEPT: WeakSet[KeptWeights] = WeakSet()
_KEPT_GUARD = ProcessLock()  # a set that grows cannot be walked


def _origin(sources: Sources, chosen: object) -> tuple[tuple[Any, ...], Sources, Sources]:
    """The first fields of `_Built`."""
    memory = tuple(None if t is None else t.detach() for t in sources)
    return _key_of(memory, chosen), sources, memory


def _key_of(sources: Sources, chosen: object) -> tuple[Any, ...]:
    return chosen, *(
        None if t is None else (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.shape, t.stride())
        for t in sources
    )


def refresh(*written: torch.Tensor) -> None:
    """Writes anew, where they lie, the copies that plug-ins made of weights: for those who wrote to parameters in place.

    written: the parameters; none stands for all of the process. What torch counts as a write is seen without this at the
    next call, which then has new copies; but CUDA graphs read the old ones, and writes through ``.data``, by another
    process or in inference mode are not counted.
    """
    addresses = {t.data_ptr() for t in written}
    with _KEPT_GUARD.lock:
        known = list(_KEPT)
    for kept in known:
        if not written or any(t is not None and t.data_ptr() in addresses for t in kept.sources):
            kept.write_again()


def rewritten(old: ExpertWeights, new: ExpertWeights) -> ExpertWeights:
    """``old`` with the values of ``new``, copied to where they are not the same memory; new where they are not alike."""
    pairs = list(zip(_parts(old), _parts(new), strict=True))
    if any(_kind(mine) != _kind(other) for mine, other in pairs) or old.activations != new.activations:
        return new
    for mine, other in pairs:
        if mine is not None and other is not None and mine.data_ptr() != other.data_ptr():
            with torch.inference_mode(mine.is_inference()), torch.no_grad():
                mine.copy_(other)
    return old


def _parts(weights: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
    """All tensors, codes and scales as bytes."""
    parts: list[torch.Tensor | None] = []
    for t in (weights.w13, weights.w2):
        scale = t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
        parts += [t.data.view(torch.uint8), scale, t.global_scale]
    return *parts, weights.bias13, weights.bias2


def _kind(t: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def kept_parts(weights: ExpertWeights, sources: Iterable[torch.Tensor | None]) -> Kept:
    """Parts of weights that have just been written: those that they do not share with their sources."""
    shared = {t.data_ptr() for t in sources if t is not None}
    return Kept(t for t in _parts(weights) if t is not None and t.data_ptr() not in shared)


class WeightCache(KeptWeights):
    """ExpertWeights of one layer of an engine. A copy, also of the layer that holds it, starts without any."""

    def __init__(self, remedy: str) -> None:
        super().__init__()
        self._remedy = remedy

    def get(
        self,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        bias13: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
    ) -> ExpertWeights:
        """The weights of these codes, scales and biases. Raises ValueError for a layout that is not known."""
        sources = (w13, w13_scale, w2, w2_scale, bias13, bias2)
        return self.of(sources, partial(self._build, *sources))

    def write_again(self) -> None:
        """Writes what was built anew, where it lies."""
        sources = self.sources
        self._rewrite(sources, partial(self._build, *sources))

    def write_values_of(self, *sources: Any) -> None:
        """Writes what was built where it lies, with the values of other sources, which its own are about to have.

        Sources of other shapes or dtypes leave nothing, and the next `get` builds.
        """
        if (built := self._built) is not None:
            weights = rewritten(built.weights, self._build(*sources))
            origin, kept = _origin(built.sources, None), kept_parts(weights, built.sources)
            self._built = _Built(*origin, weights, kept) if weights is built.weights else None

    def _build(self, w13: Any, w13_scale: Any, w2: Any, w2_scale: Any, bias13: Any, bias2: Any) -> ExpertWeights:
        first, second = (
            in_tiles(block_scaled(*given, self._remedy)) for given in (("w13", w13, w13_scale), ("w2", w2, w2_scale))
        )
        return ExpertWeights(first, second, in_float32(bias13), in_float32(bias2), activations_for(first))

    def __deepcopy__(self, memo: Any) -> WeightCache:
        return WeightCache(self._remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, (self._remedy,)


def in_float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias as the kernels read it, detached: converted at every call it would be another tensor to each launch."""
    return None if bias is None else bias.detach().float().contiguous()
