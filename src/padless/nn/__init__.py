"""Layers that train in block-scaled FP8: modules, recipes, CUDA graphs, adapters, and weight gradients that wait."""

from padless.nn.codes import ExpertCodes, expert_codes
from padless.nn.experts import Experts, MoE
from padless.nn.graphs import graphed
from padless.nn.linear import GroupedLinear
from padless.nn.lora import LoraExperts, LoraGroupedLinear
from padless.nn.recipe import RECIPES, Recipe
from padless.nn.rows_function import experts_of_rows
from padless.nn.weight_gradient import DelayedWgrad

__all__ = [
    "RECIPES",
    "DelayedWgrad",
    "ExpertCodes",
    "Experts",
    "GroupedLinear",
    "LoraExperts",
    "LoraGroupedLinear",
    "MoE",
    "Recipe",
    "expert_codes",
    "experts_of_rows",
    "graphed",
]
