"""Mixture-of-Experts layer around the grouped GEMM: routing, gather with quantization, activation, weighted sum."""

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
