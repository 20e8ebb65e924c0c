"""Attention score functions: how scores become attention weights.

Most weights are averages f(s_i) / sum_j f(s_j). Linear and rectified attention have the weights C s_i and C max(s_i, 0),
which do not sum to 1. A score of -inf masks a key: its weight is exactly 0. A query without readable keys gets a row
of zeros with finite gradients. The compiled training steps (`training.one_layer.kernel`, `training.general.kernel`) have
their own softmax, linear and relu/L; tests compare them with this file.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.config import CONTEXT_ONLY_SCORES, ModelConfig

LINEAR = ("linear", "linear/L")


def attention_pattern(
    scores: Float[Tensor, "*axes"], *, score: str = "softmax", slope: float = 1.0, dim: int = -1
) -> Float[Tensor, "*axes"]:
    """Attention weights along one axis: f(s_i) / sum_j f(s_j), or unnormalised for linear and rectified attention.

    Args:
        scores: Scores with the scale included; -inf masks a key.
        score: "softmax" (f = exp), "1+tanh", "1+Cx" or "(1+Cx)^2"; "linear" for C s_i, "linear/L" for
            C s_i and "relu/L" for C max(s_i, 0) over the number of keys.
        slope: The constant C.
    Source:
        He et al. 2025, arXiv 2503.12734, section 5 (normalised activations, linear attention).
    Example:
        >>> attention_pattern(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    if not is_normalised(score):
        masked = scores == -torch.inf
        read = scores.masked_fill(masked, 0)
        if score == "linear":
            return slope * read
        factor = slope / (~masked).sum(dim, keepdim=True).clamp_min(1).to(scores)
        return factor * (read.clamp_min(0) if score == "relu/L" else read)
    values = _values(scores, score, slope, dim)
    total = values.sum(dim, keepdim=True)
    return values / total.masked_fill(total == 0, 1)


def pattern_and_slope(
    scores: Float[Tensor, "*axes"], *, score: str = "softmax", slope: float = 1.0, dim: int = -1
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Attention weights for scores without masked keys, and the factor t of their gradient.

    With p the pattern, dp_i/ds_k = t_k (1[i = k] - p_i) for normalised scores (`is_normalised`), and t_k 1[i = k] for
    linear and rectified attention.
    """
    if score == "softmax":
        pattern = torch.softmax(scores, dim)
        return pattern, pattern
    if not is_normalised(score):
        factor = slope if score == "linear" else slope / scores.shape[dim]
        if score == "relu/L":
            return factor * scores.clamp_min(0), factor * (scores > 0).to(scores)
        return factor * scores, torch.full_like(scores, factor)
    values = _values(scores, score, slope, dim)
    total = values.sum(dim, keepdim=True)
    if score == "1+tanh":
        derivative = 1 - (values - 1) ** 2
    elif score == "1+Cx":
        derivative = torch.full_like(values, slope)
    else:
        derivative = 2 * slope * (1 + slope * scores)
    return values / total, derivative / total


def is_normalised(score: str) -> bool:
    """True if the attention weights of a query sum to 1.

    Example:
        >>> [is_normalised(score) for score in ("softmax", "linear", "linear/L")]
        [True, False, False]
    """
    return score not in ("linear", "linear/L", "relu/L")


def kernel_text(score: str, slope: float) -> str:
    """Weight of a key as a formula in its score {s}, up to a factor common to all keys.

    Example:
        >>> kernel_text("softmax", 1.0), kernel_text("(1+Cx)^2", 0.5)
        ('exp({s})', '(1 + 0.5 ({s}))²')
    """
    return {
        "softmax": "exp({s})",
        "1+tanh": "1 + tanh({s})",
        "1+Cx": f"1 + {slope:.3g} ({{s}})",
        "(1+Cx)^2": f"(1 + {slope:.3g} ({{s}}))²",
        "relu/L": "max({s}, 0)",
    }.get(score, "{s}")


def score_derivative_at_zero(score: str, slope: float, *, context_length: int) -> float:
    """L dp/ds at zero scores: the constant C0 that multiplies omega when omega is small.

    For weights f(s_i) / sum_j f(s_j) with f(0) = 1 it is f'(0); "linear" has C L, "linear/L" has C. "relu/L" has C/2,
    the mean of its two one-sided slopes: max(s, 0) = s/2 + |s|/2, and |s| averages out over x and -x.

    Example:
        >>> score_derivative_at_zero("(1+Cx)^2", 0.5, context_length=40)
        1.0
    """
    derivatives = {"softmax": 1.0, "1+tanh": 1.0, "1+Cx": slope, "(1+Cx)^2": 2 * slope}
    over_length = {"linear": slope * context_length, "linear/L": slope, "relu/L": slope / 2}
    return (derivatives | over_length)[score]


def readable_keys(
    n_pos: int, model: ModelConfig, *, device: torch.device | None = None
) -> Bool[Tensor, "query key"]:
    """Keys that each position reads. By default: earlier positions, plus itself with attend_to_self. With
    context_only: all positions except the last, or all with attend_to_self.

    Example:
        >>> readable_keys(2, ModelConfig(context_only=True)).tolist()
        [[True, False], [True, False]]
    """
    reads = torch.ones(n_pos, n_pos, dtype=torch.bool, device=device)
    if not model.context_only:
        return reads.tril(0 if model.attend_to_self else -1)
    if not model.attend_to_self:
        reads[:, -1] = False
    return reads


def _values(scores: Tensor, score: str, slope: float, dim: int) -> Tensor:
    if score == "softmax":
        # Not torch.softmax, which gives NaN for a row whose keys are all masked.
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
        raise ValueError(f"score must be one of {', '.join(CONTEXT_ONLY_SCORES)}, got {score!r}.")
    return values.masked_fill(masked, 0)
