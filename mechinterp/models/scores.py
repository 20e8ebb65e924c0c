"""Attention score functions: how scores become the weights f(s_i) / sum_j f(s_j) of an average.

This is the one place that knows them. A score of -inf is a masked key: its weight is exactly 0, and a
query all of whose keys are masked gets a row of zeros with finite gradients.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def attention_pattern(
    scores: Float[Tensor, "*axes"], *, score: str = "softmax", slope: float = 1.0, dim: int = -1
) -> Float[Tensor, "*axes"]:
    """Attention weights f(s_i) / sum_j f(s_j) along one axis.

    Args:
        scores: Scores with the scale included; -inf masks a key.
        score: "softmax" (f = exp), "1+tanh", "1+Cx" or "(1+Cx)^2".
        slope: The constant C.
    Source:
        He et al. 2025, arXiv 2503.12734, section 5 (normalised activations).
    Example:
        >>> attention_pattern(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    values = _values(scores, score, slope, dim)
    total = values.sum(dim, keepdim=True)
    return values / total.masked_fill(total == 0, 1)


def pattern_and_slope(
    scores: Float[Tensor, "*axes"], *, score: str = "softmax", slope: float = 1.0, dim: int = -1
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Attention weights without masked keys, and f'(s_i) / sum_j f(s_j), which carries their gradient.

    With p the pattern and t the second result, dp_i/ds_k = t_k (1[i = k] - p_i).
    """
    if score == "softmax":
        pattern = torch.softmax(scores, dim)
        return pattern, pattern
    values = _values(scores, score, slope, dim)
    total = values.sum(dim, keepdim=True)
    if score == "1+tanh":
        derivative = 1 - (values - 1) ** 2
    elif score == "1+Cx":
        derivative = torch.full_like(values, slope)
    else:
        derivative = 2 * slope * (1 + slope * scores)
    return values / total, derivative / total


def score_derivative_at_zero(score: str, slope: float) -> float:
    """f'(0) for f scaled to f(0) = 1: the C0 that multiplies omega wherever omega is small.

    Example:
        >>> score_derivative_at_zero("(1+Cx)^2", 0.5)
        1.0
    """
    return {"softmax": 1.0, "1+tanh": 1.0, "1+Cx": slope, "(1+Cx)^2": 2 * slope}[score]


def _values(scores: Tensor, score: str, slope: float, dim: int) -> Tensor:
    if score == "softmax":
        # Written out instead of torch.softmax, which gives NaN where all keys are masked.
        peak = scores.amax(dim, keepdim=True).detach()
        return (scores - peak.masked_fill(peak == -torch.inf, 0)).exp()
    masked = scores == -torch.inf
    scores = scores.masked_fill(masked, 0)
    if score == "1+tanh":
        values = 1 + torch.tanh(scores)
    elif score == "1+Cx":
        values = 1 + slope * scores
    elif score == "(1+Cx)^2":
        values = (1 + slope * scores) ** 2
    else:
        raise ValueError(f"score must be one of softmax, 1+tanh, 1+Cx, (1+Cx)^2, got {score!r}.")
    return values.masked_fill(masked, 0)
