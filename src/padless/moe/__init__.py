"""Mixture-of-Experts layer around the grouped GEMM: routing, gather with quantization, activation, weighted sum."""

import sys
from types import ModuleType
from typing import NoReturn

from padless.moe.activation import Activation
from padless.moe.choosing import TopK, topk
from padless.moe.combining import combine, combine_backward
from padless.moe.gather import activate_quantize, gather_backward, gather_quantize, route_quantize
from padless.moe.layer import moe
from padless.moe.router import Router
from padless.moe.routing import Routing, route

__all__ = [
    "Activation",
    "Router",
    "Routing",
    "TopK",
    "activate_quantize",
    "combine",
    "combine_backward",
    "gather_backward",
    "gather_quantize",
    "moe",
    "route",
    "route_quantize",
    "topk",
]


class _Package(ModuleType):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "padless.moe is a package; the layer is padless.moe.moe(x, top_k_index, top_k_weights, w13, w2)"
        )


sys.modules[__name__].__class__ = _Package
