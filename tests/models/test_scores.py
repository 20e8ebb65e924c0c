"""Score functions: they are the f they are named for, and masked keys have no weight and no gradient."""

from functools import partial

import pytest
import torch
from einops import einsum
from torch import Tensor

from mechinterp.config import CONTEXT_ONLY_SCORES, SCORES, ModelConfig
from mechinterp.config.model import LINEAR, OVER_PAIRS
from mechinterp.models.layers import (
    AVERAGE,
    attention_pattern,
    is_normalised,
    pattern_and_slope,
    score_derivative_at_zero,
)
from mechinterp.models.run.attend import attend, pattern_of

SLOPE = 0.7
F = {
    "softmax": torch.exp,
    "1+tanh": lambda s: 1 + torch.tanh(s),
    "1+Cx": lambda s: 1 + SLOPE * s,
    "(1+Cx)^2": lambda s: (1 + SLOPE * s) ** 2,
}
SUMMED = {
    "linear": (SLOPE, lambda s: s),
    "linear/L": (SLOPE / 7, lambda s: s),
    "relu/L": (SLOPE / 7, torch.relu),
}
"""Weights of 7 keys by scores that are not divided by their sum: a factor, and a function of the score."""


@pytest.fixture
def scores(generator: torch.Generator) -> Tensor:
    return 0.5 * torch.randn(4, 3, 7, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("score", SUMMED)
def test_weights_that_need_no_sum_are_scores_or_their_positive_part(scores: Tensor, score: str):
    factor, f = SUMMED[score]
    pattern, slope = pattern_and_slope(scores, score=score, slope=SLOPE)
    torch.testing.assert_close(pattern, factor * f(scores), rtol=1e-12, atol=0)
    rising = torch.ones_like(scores) if f is not torch.relu else (scores > 0).double()
    torch.testing.assert_close(slope, factor * rising, rtol=1e-12, atol=0)
    same = attention_pattern(scores, score=score, slope=SLOPE)
    torch.testing.assert_close(same, pattern, rtol=1e-12, atol=0)


@pytest.mark.parametrize("score", F)
@pytest.mark.parametrize("dim", [-1, 1])
def test_weights_are_f_over_the_sum_of_f(scores: Tensor, score: str, dim: int):
    values = F[score](scores)
    expected = values / values.sum(dim, keepdim=True)
    actual = attention_pattern(scores, score=score, slope=SLOPE, dim=dim)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    without_mask, _ = pattern_and_slope(scores, score=score, slope=SLOPE, dim=dim)
    torch.testing.assert_close(without_mask, expected, rtol=1e-12, atol=0)


def jacobian_of(score: str, scores: Tensor) -> Tensor:
    pattern = partial(attention_pattern, score=score, slope=SLOPE)
    return torch.autograd.functional.jacobian(pattern, scores)


@pytest.mark.parametrize("score", CONTEXT_ONLY_SCORES)
def test_slope_gives_the_derivative_of_the_weights(scores: Tensor, score: str):
    row = scores[0, 0]
    pattern, slope = pattern_and_slope(row, score=score, slope=SLOPE)
    jacobian = jacobian_of(score, row)
    others = pattern[:, None] if is_normalised(score) else 0
    expected = slope * (torch.eye(7, dtype=torch.float64) - others)
    torch.testing.assert_close(jacobian, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", ["linear", *CONTEXT_ONLY_SCORES])
def test_a_masked_key_is_as_if_it_were_not_there(scores: Tensor, score: str):
    masked = scores.clone()
    masked[..., [2, 5]] = -torch.inf
    kept = [0, 1, 3, 4, 6]
    pattern = attention_pattern(masked, score=score, slope=SLOPE)
    expected = attention_pattern(scores[..., kept], score=score, slope=SLOPE)
    assert (pattern[..., [2, 5]] == 0).all()
    torch.testing.assert_close(pattern[..., kept], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("score", CONTEXT_ONLY_SCORES)
def test_a_query_without_keys_gets_zeros_and_finite_gradients(scores: Tensor, score: str):
    allowed = torch.ones(3, 7, dtype=torch.bool)
    allowed[0] = False
    allowed[1, 4] = False
    leaf = scores.clone().requires_grad_()
    pattern = attention_pattern(leaf.masked_fill(~allowed, -torch.inf), score=score, slope=SLOPE)
    assert (pattern[:, 0] == 0).all()
    if is_normalised(score):
        torch.testing.assert_close(pattern[:, 1:].sum(-1), torch.ones(4, 2, dtype=torch.float64))
    (pattern * torch.arange(1, 8)).sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[:, ~allowed] == 0).all()
    moved = (scores[:, 2] > 0) if score == "relu/L" else torch.ones(4, 7, dtype=torch.bool)
    assert ((leaf.grad[:, 2] != 0) == moved).all()


def test_large_scores_do_not_overflow():
    for function in (attention_pattern, lambda scores: pattern_and_slope(scores)[0]):
        assert function(torch.tensor([1e4, 1e4, -1e4])).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("score", SCORES)
def test_derivative_at_zero(score: str):
    jacobian = jacobian_of(score, torch.zeros(8, dtype=torch.float64))
    own = jacobian[0, 0] - (jacobian[0, 1] if is_normalised(score) else 0)
    derivative = score_derivative_at_zero(score, SLOPE, context_length=8)
    assert derivative == pytest.approx(8 * own.item(), abs=1e-12)


def test_derivative_of_rectified_scores_is_that_of_their_odd_part():
    # The slope of sum_i y_i max(s_i, 0) in y = x, s = omega x, over x of both signs: C omega x^2 / 2 for each pair.
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.cat([x, -x])
    pattern = attention_pattern(0.3 * x, score="relu/L", slope=SLOPE)
    slope = score_derivative_at_zero("relu/L", SLOPE, context_length=len(x))
    torch.testing.assert_close((pattern * x).sum(), slope * 0.3 * x.square().mean())


ATTENTIONS = [(score, own) for score in LINEAR for own in (False, True)]
"""Linear scores, with the query among its own keys or not."""


@pytest.mark.parametrize(
    ("score", "own"), [each for each in ATTENTIONS if each != (OVER_PAIRS, False)]
)
def test_linear_attention_by_moments_is_that_by_weights(score: str, own: bool):
    model = ModelConfig(score=score, score_slope=0.7, context_only=True, attend_to_self=own)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 3, 4, generator=generator, dtype=torch.float64)
    for rows in (slice(0, None), slice(-1, None), slice(0, None, 2)):
        weights = pattern_of(q[:, rows], k, model, rows)
        expected = einsum(weights, v, AVERAGE)
        torch.testing.assert_close(attend(q[:, rows], k, v, model, rows), expected)
