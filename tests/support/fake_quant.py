"""An expert layer's step as its recipe defines it, expert by expert in float64: slow, obvious, of public calls alone.

Operands are quantized by `padless.quantize` and decoded, products are float64 matrix products, and what is stored
between them is rounded as the layer stores it. Shares neither the column layout nor a product nor the derivative of
SwiGLU with what it judges.
"""

from __future__ import annotations

import torch

from padless import FP8_BLOCK, MXFP8, dequantize, quantize
from padless.nn import Recipe
from support.training_layer import Layer


def decoded(x: torch.Tensor, kind: str = "activation", format: object = FP8_BLOCK) -> torch.Tensor:
    """x as the format keeps it, in float64."""
    if format == torch.bfloat16:
        return rounded(x)
    return dequantize(quantize(x.detach().float(), format, kind=kind)).double()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as bfloat16 keeps it, in float64."""
    return x.float().bfloat16().double()


def of_rows(x: torch.Tensor, format: object) -> torch.Tensor:
    return decoded(x, format=format)


def of_tokens(x: torch.Tensor, format: object, square: bool = False) -> torch.Tensor:
    """x (tokens of one expert, features) with scales along the tokens, counted from the expert's first."""
    if format not in (FP8_BLOCK, MXFP8):
        return rounded(x)
    return decoded(x.T.contiguous(), "weight" if square else "activation", format).T


def of_gradient(x: torch.Tensor, format: object, along_tokens: bool = False) -> torch.Tensor:
    """A gradient as the format keeps it along its rows, or along the tokens: FP8_BLOCK has no least scale there."""
    far = 2.0**60 if format == FP8_BLOCK else 1.0
    x = x * far
    return (decoded(x.T.contiguous(), format=format).T if along_tokens else decoded(x, format=format)) / far


def step(problem: Layer, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The output and the gradients, float64; gate above up in w13."""
    forward, dgrad, wgrad = recipe.forward, recipe.dgrad, recipe.fp8_wgrad
    square = wgrad and recipe.wgrad_mode == "1d2d"
    along = recipe.wgrad in (FP8_BLOCK, MXFP8)
    found = {
        "out": problem.shared.double(),
        "x": torch.zeros(problem.x.shape, dtype=torch.float64),
        "prob": torch.zeros(problem.prob.shape, dtype=torch.float64),
        "w13": torch.zeros(problem.w13.shape, dtype=torch.float64),
        "w2": torch.zeros(problem.w2.shape, dtype=torch.float64),
    }
    half = problem.w2.shape[2]
    for e in range(problem.w2.shape[0]):
        token, slot = torch.nonzero(problem.index == e, as_tuple=True)
        if len(token) == 0:
            continue
        x, prob = problem.x[token], problem.prob[token, slot].double()[:, None]
        w13, w2 = (decoded(w[e], "weight", forward) for w in (problem.w13, problem.w2))
        along_n = dgrad == MXFP8  # quantized once more
        w13_dgrad, w2_dgrad = (
            decoded(w[e].T.contiguous(), "weight", dgrad).T if along_n else decoded(w[e], "weight", dgrad)
            for w in (problem.w13, problem.w2)
        )
        z = of_rows(x, forward) @ w13.T
        hidden = torch.nn.functional.silu(rounded(z)[:, :half]) * rounded(z)[:, half:]
        y = rounded(of_rows(hidden, forward) @ w2.T)
        found["out"].index_add_(0, token, y * prob)

        dy = problem.dout[token]
        dh = rounded(of_gradient(dy, dgrad) @ w2_dgrad)
        kept = (rounded(decoded(rounded(z))) if recipe.save == "fp8" else rounded(z)).requires_grad_()
        of_prob = prob.clone().requires_grad_()
        hidden = torch.nn.functional.silu(kept[:, :half]) * kept[:, half:] * of_prob
        hidden.backward(dh)
        dz = kept.grad
        if not (recipe.fp8_dgrad and wgrad):  # stored in between
            dz, hidden = rounded(dz), rounded(hidden.detach())
        found["prob"][token, slot] = of_prob.grad[:, 0]
        found["x"].index_add_(0, token, rounded(of_gradient(dz, dgrad) @ w13_dgrad))
        found["w13"][e] = of_gradient(dz, recipe.wgrad, along).T @ of_tokens(x, recipe.wgrad, square)
        found["w2"][e] = of_gradient(dy, recipe.wgrad, along).T @ of_tokens(hidden.detach(), recipe.wgrad, square)
    return found
