"""combine and its gradients against float64 loops, and that the checks notice wrong ones."""

from __future__ import annotations

import pytest
import torch

import padless
from padless.moe import combine_backward, gather_backward, gather_quantize, twins
from padless.testing.guarded import GuardedOutput
from support.moe_cases import DTYPES, combine_problem
from support.triton_cases import bits

PROBLEMS = ((1, 1, 8), (7, 3, 130), (33, 8, 264), (5, 16, 40))
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def dense(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """(T, N) float64, slot by slot."""
    out = shared.double().clone()
    for t in range(inverse.shape[0]):
        for j in range(inverse.shape[1]):
            if inverse[t, j] >= 0:
                out[t] += weights[t, j].double() * y[inverse[t, j]].double()
    return out


def check_combined(
    out: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor
) -> None:
    """Every element within the roundings of the sum and of the result."""
    want = dense(y, inverse, weights, shared)
    size = dense(y.abs(), inverse, weights.abs(), shared.abs())
    bound = size * (inverse.shape[1] + 2) * 2.0**-24 + want.abs() * UNIT[out.dtype] + 1e-7
    assert out.isfinite().all()
    worst = ((out.double() - want).abs() / bound).amax(dim=1)
    assert (worst <= 1).all(), f"tokens {worst.gt(1).nonzero().flatten().tolist()} are off"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_combine(problem: tuple[int, int, int], dtype: torch.dtype) -> None:
    """NaN in rows and weights of slots that are dropped does not show."""
    y, inverse, weights, shared = combine_problem(*problem, dtype, 1)
    out = padless.moe.combine(y, inverse, weights, shared, out_dtype=dtype)
    check_combined(out, y, inverse, weights, shared)
    without = padless.moe.combine(y, inverse, weights, out_dtype=torch.float32)
    check_combined(without, y, inverse, weights, torch.zeros_like(shared))
    ones = padless.moe.combine(y, inverse, None)
    check_combined(ones, y, inverse, torch.ones_like(weights), torch.zeros_like(shared))


def test_rows_behind_the_last_are_not_read() -> None:
    y, inverse, weights, _ = combine_problem(6, 2, 16, torch.float32, 2)
    guarded = GuardedOutput(40, 16, torch.float32)
    guarded.out[:12] = y
    assert torch.equal(padless.moe.combine(guarded.out, inverse, weights), padless.moe.combine(y, inverse, weights))


@pytest.mark.parametrize("planted", ["weight of the wrong slot", "tail counted", "order of rows", "shared twice"])
def test_a_wrong_sum_is_noticed(planted: str) -> None:
    y, inverse, weights, shared = combine_problem(33, 8, 264, torch.bfloat16, 1)
    given = [y, inverse, weights, shared]
    if planted == "weight of the wrong slot":
        given[2] = weights.nan_to_num(0.5).roll(1, dims=1)
    elif planted == "tail counted":
        given[1] = torch.where(inverse < 0, -1 - inverse, inverse)
    elif planted == "order of rows":
        given[0] = y.roll(1, dims=0)
    else:
        given[3] = shared * 2
    with pytest.raises(AssertionError):
        check_combined(twins.combine(*given, torch.bfloat16), y, inverse, weights, shared)


def test_order_of_the_sum() -> None:
    """1e8 + 1 - 1e8 in float32 is 0 from left to right, and 1 in another order."""
    inverse = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    y = torch.tensor([[1e8], [1.0], [-1e8]]).repeat(2, 1)
    assert padless.moe.combine(y, inverse, None).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients(problem: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against float64 autograd, dropped slots without."""
    y, inverse, weights, dout = combine_problem(*problem, dtype, 3)
    dy, dweights = combine_backward(dout.to(dtype), y, inverse, weights)
    kept = inverse >= 0
    exact_y = torch.where(y.isnan(), 0.0, y.double()).requires_grad_()
    exact_weights = torch.where(kept, weights, 0.0).double().requires_grad_()
    rows = exact_y[inverse.clamp(min=0).long()] * (exact_weights * kept)[..., None]
    rows.sum(dim=1).backward(dout.to(dtype).double())
    assert dy.dtype == dtype
    torch.testing.assert_close(dy.double(), exact_y.grad, rtol=2 * UNIT[dtype], atol=1e-7)
    n = y.shape[1]
    size = (
        torch.where(y.isnan(), 0.0, y.double()).abs()[inverse.clamp(min=0).long()]
        * dout.to(dtype).double().abs()[:, None]
    ).sum(-1)
    assert ((dweights.double() - exact_weights.grad * kept).abs() <= size * (n // 256 + 10) * 2.0**-24 + 1e-40).all()
    assert (dweights[~kept] == 0).all()
    assert (dy[(-1 - inverse[~kept]).long()] == 0).all()


def test_a_gradient_does_not_depend_on_the_batch() -> None:
    y, inverse, weights, dout = combine_problem(9, 4, 300, torch.bfloat16, 4)
    _, dweights = combine_backward(dout, y, inverse, weights)
    for t in range(9):
        alone = torch.arange(4, dtype=torch.int32)[None].clone()
        alone[0, inverse[t] < 0] = -1 - alone[0, inverse[t] < 0]
        rows = torch.where(inverse[t] < 0, -1 - inverse[t], inverse[t]).long()
        _, of_one = combine_backward(dout[t : t + 1], y[rows], alone, weights[t : t + 1])
        assert torch.equal(of_one[0], dweights[t])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_gather(dtype: torch.dtype) -> None:
    drows, inverse, _, _ = combine_problem(12, 5, 40, dtype, 5)
    dx = gather_backward(drows, inverse)
    assert dx.dtype == dtype
    check_combined(dx, drows, inverse, torch.ones(inverse.shape), torch.zeros(dx.shape))


def test_no_tokens_and_no_columns() -> None:
    nothing = torch.empty((0, 3), dtype=torch.int32)
    assert padless.moe.combine(torch.empty(0, 8), nothing, torch.empty(0, 3)).shape == (0, 8)
    dy, dweights = combine_backward(torch.empty(0, 8), torch.empty(0, 8), nothing, torch.empty(0, 3))
    assert dy.shape == (0, 8)
    assert dweights.shape == (0, 3)


def test_gather_quantize_is_quantize_of_gathered_rows() -> None:
    """The tail too, in every format; a token's codes are those of the token alone."""
    x = torch.randn(21, 160).bfloat16()
    routing = padless.moe.route(torch.randint(-1, 6, (21, 3)), 5)
    for fmt in (padless.FP8_BLOCK, padless.MXFP8, padless.MXFP8_E5M2, padless.MXFP4, padless.NVFP4):
        given = torch.tensor(0.002) if fmt == padless.NVFP4 else None
        got = gather_quantize(x, routing.inverse, fmt, global_scale=given)
        want = padless.quantize(x[routing.tokens.long()], fmt, global_scale=given)
        assert torch.equal(bits(got.data), bits(want.data))
        assert torch.equal(bits(got.scale), bits(want.scale))
        assert got.scale.stride() == want.scale.stride()


def test_tokens_of_another_routing_are_refused() -> None:
    routing = padless.moe.route(torch.randint(0, 5, (21, 3)), 5)
    for wrong in (routing.tokens[1:], routing.tokens.long(), routing.tokens.view(21, 3)):
        with pytest.raises(ValueError, match=r"tokens must be \(63,\) int32 of the same route"):
            gather_quantize(torch.randn(21, 160), routing.inverse, padless.FP8_BLOCK, tokens=wrong)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"y": torch.zeros(3)}, "y must be"),
        ({"y": torch.zeros(11, 16)}, "12 entries"),
        ({"inverse": torch.zeros(6, 2)}, "inverse must be"),
        ({"weights": torch.zeros(6, 3)}, "weights must be 6 x 2"),
        ({"weights": torch.zeros(6, 2, dtype=torch.int32)}, "weights must be"),
        ({"shared": torch.zeros(6, 15)}, "shared must be 6 x 16"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ({"y": torch.zeros(12, 16, requires_grad=True)}, r"y requires grad.*detach"),
    ],
)
def test_errors(change: dict[str, object], named: str) -> None:
    given = {"y": torch.zeros(12, 16), "inverse": torch.zeros((6, 2), dtype=torch.int32), "weights": torch.zeros(6, 2)}
    with pytest.raises(ValueError, match=named):
        padless.moe.combine(**(given | change))
