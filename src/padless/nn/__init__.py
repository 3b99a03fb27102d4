"""Layers that train in block-scaled FP8: modules, recipes, CUDA graphs, adapters, and weight gradients that wait."""

from padless.nn.experts import Experts, MoE
from padless.nn.graphs import graphed
from padless.nn.linear import GroupedLinear
from padless.nn.lora import LoraExperts
from padless.nn.recipe import RECIPES, Recipe
from padless.nn.weight_gradient import DelayedWgrad

__all__ = ["RECIPES", "DelayedWgrad", "Experts", "GroupedLinear", "LoraExperts", "MoE", "Recipe", "graphed"]
