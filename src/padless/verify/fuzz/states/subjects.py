"""Subjects of sequences: what operations there are for each, and how they are drawn and compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from torch import nn

from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Draw, Options, Subject
from padless.verify.fuzz.states import layers, sequence, sites
from padless.verify.fuzz.states.gpu import GPU
from padless.verify.fuzz.states.modules import MODULES
from padless.verify.fuzz.states.peers import ALONE, PEERS
from padless.verify.fuzz.states.sequence import Operations
from padless.verify.fuzz.states.uses import USES
from padless.verify.fuzz.states.writes import WRITES

_OF_LAYERS = WRITES | MODULES | USES | GPU | ALONE
_OF_HUB = {name: one for name, one in _OF_LAYERS.items() if name not in ("delayed", "graphed", "compiled")}


def _hub(o: Options, **how: Any) -> nn.Module:
    from padless.verify.fuzz.states.hub import hub_experts

    return hub_experts(o, **how)


_FAMILIES = layers.FAMILIES | {
    "transformers": layers.Family(_hub, lambda layer, generator: layers.experts_inputs(layer, generator)[:3])
}


def _of_layers(operations: Operations, draw: Draw, constants: Options) -> Options:
    del constants
    return {"rows": layers.rows_of(draw), "seed": draw.data_seed(), "operations": sequence.drawn(draw, operations)}


def _layer(
    family: str,
    constants: Callable[[Draw], Options],
    share: int,
    variants: int,
    operations: Operations = _OF_LAYERS,
    **where: Any,
) -> Subject:
    compare = partial(sequence.judge, partial(layers.Layer, _FAMILIES[family]), operations)
    return Subject(constants, partial(_of_layers, operations), compare, share, variants, **where)


def _hub_constants(draw: Draw) -> Options:
    return layers.experts_constants(draw) | {"keep_codes": False}


def _quantized_constants(draw: Draw) -> Options:
    sizes = {"groups": draw.randint(1, 4), "n": draw.one((128, 256)), "k": draw.one((128, 256))}
    formats = ("FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4")
    return sizes | {"format": draw.one(formats), "top_k": draw.randint(1, 2)}


def _quantized(draw: Draw, constants: Options) -> Options:
    from padless.verify.fuzz.states.hub import QUANTIZED

    return _of_layers(QUANTIZED, draw, constants)


def _compare_quantized(o: Options, place: Place) -> None:
    from padless.verify.fuzz.states.hub import QUANTIZED, Quantized

    sequence.judge(Quantized, QUANTIZED, o, place)


def _has_transformers() -> bool:
    """Whether a transformers is installed that the integration takes."""
    try:
        return tuple(int(part) for part in metadata.version("transformers").split(".")[:2]) >= (5, 17)
    except metadata.PackageNotFoundError:
        return False


STATES: dict[str, Subject] = {
    "states.linear": _layer("linear", layers.constants, 20, 8),
    "states.experts": _layer("experts", layers.experts_constants, 8, 6),
    "states.moe": _layer("moe", layers.experts_constants, 6, 6),
    "states.call": Subject(sites.constants, sites.rest, partial(sequence.judge, sites.Site, sites.SITES), 30, 12),
    "states.ranks": _layer("linear", layers.constants, 1, 1, _OF_LAYERS | PEERS, kernels=("reference",)),
}
if _has_transformers():
    STATES["states.transformers"] = _layer("transformers", _hub_constants, 3, 3, _OF_HUB)
    STATES["states.quantized"] = Subject(_quantized_constants, _quantized, _compare_quantized, 4, 4)
