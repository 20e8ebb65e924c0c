"""Formulas of a layer: tokens of prompts, norms, rotary positions, biases, activations, and score functions.

Most attention weights are averages f(s_i) / sum_j f(s_j). Linear and rectified attention have the weights C s_i and
C max(s_i, 0), which do not sum to 1. A score of -inf masks a key: its weight is exactly 0. A query without readable keys
gets a row of zeros with finite gradients. The compiled training steps (`training.one_layer.kernel`,
`training.general.kernel`) have their own softmax, linear and relu/L; tests compare them with this file.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.config import CONTEXT_ONLY_SCORES, ModelConfig
from mechinterp.config.model import LINEAR, OVER_PAIRS
from mechinterp.icl.prompts import Prompts

SCORE_PRODUCTS = "batch query head d, batch key head d -> batch head query key"
AVERAGE = "batch head query key, batch key head d -> batch query head d"
"""Products of queries and keys, and averages of values under attention weights; a query may be any row."""
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def affine(
    values: Float[Tensor, "*axes d_in"], W: Float[Tensor, "d_in d_out"], b: Tensor | None
) -> Float[Tensor, "*axes d_out"]:
    """values W + b."""
    return F.linear(values, W.mT, b)


def normed(
    stream: Float[Tensor, "*axes d_model"],
    w: Float[Tensor, " d_model"],
    b: Float[Tensor, " d_model"],
    model: ModelConfig,
) -> Float[Tensor, "*axes d_model"]:
    """The stream after a layer norm or a root-mean-square norm, with weights and biases."""
    if model.rms_norm:
        return F.rms_norm(stream, w.shape, w, model.norm_eps) + b
    return F.layer_norm(stream, w.shape, w, b, model.norm_eps)


def turned_by_position(
    heads: Float[Tensor, "*batch pos head d_head"],
    model: ModelConfig,
    *,
    first: int = 0,
    step: int = 1,
) -> Float[Tensor, "*batch pos head d_head"]:
    """Queries or keys rotated by their positions; unchanged without rotary positions.

    Entry pair i, with i < rotary_dim/2, is rotated by the angle position / rotary_base^(2i / rotary_dim), as in
    HookedTransformer. Entries beyond rotary_dim are unchanged.

    Args:
        first: Position of the first row.
        step: Number of positions from row to row.
    Source:
        Su et al. 2021, arXiv 2104.09864, section 3.2.
    """
    n = model.rotary_dim
    if n is None:
        return heads
    end = first + step * heads.shape[-3]
    at = torch.arange(first, end, step, dtype=torch.float64, device=heads.device)
    turns = model.rotary_base ** (-torch.arange(0, n, 2, dtype=at.dtype, device=at.device) / n)
    angle = at[:, None, None] * turns  # [pos, 1, pair]
    cos, sin = angle.cos().to(heads), angle.sin().to(heads)
    axes, pair = ((-1, 2), -1) if model.rotary_adjacent_pairs else ((2, -1), -2)
    one, other = heads[..., :n].unflatten(-1, axes).unbind(pair)
    turned = torch.stack([one * cos - other * sin, other * cos + one * sin], pair).flatten(-2)
    return torch.cat([turned, heads[..., n:]], -1)


def attention_pattern(
    scores: Float[Tensor, "*axes"], *, score: str = "softmax", slope: float = 1.0, dim: int = -1
) -> Float[Tensor, "*axes"]:
    """Attention weights along one axis: f(s_i) / sum_j f(s_j), or unnormalised for linear and rectified attention.

    Args:
        scores: Scores with the scale included; -inf masks a key.
        score: "softmax" (f = exp), "1+tanh", "1+Cx" or "(1+Cx)^2"; "linear" for C s_i, "linear/L" for
            C s_i and "relu/L" for C max(s_i, 0) over the number of keys, "linear/pairs" for C s_i over the number of pairs.
            Along the axis, masked keys included, stand all pairs and the query.
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
        if score == OVER_PAIRS:
            return slope / max(scores.shape[dim] - 1, 1) * read
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
        factor = slope if score == "linear" else slope / max(scores.shape[dim], 1)
        if score == OVER_PAIRS:
            factor = slope / max(scores.shape[dim] - 1, 1)
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
    return score not in (*LINEAR, "relu/L")


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

    For weights f(s_i) / sum_j f(s_j) with f(0) = 1 it is f'(0); "linear" has C L, "linear/L" and "linear/pairs" have C. "relu/L" has C/2,
    the mean of its two one-sided slopes: max(s, 0) = s/2 + |s|/2, and |s| averages out over x and -x.

    Example:
        >>> score_derivative_at_zero("(1+Cx)^2", 0.5, context_length=40)
        1.0
    """
    derivatives = {"softmax": 1.0, "1+tanh": 1.0, "1+Cx": slope, "(1+Cx)^2": 2 * slope}
    over_length = {"linear": slope * context_length, "linear/L": slope, "relu/L": slope / 2}
    over_length[OVER_PAIRS] = slope
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


def tokens_of(
    prompts: Prompts, model: ModelConfig, *, d_x: int, d_y: int
) -> Float[Tensor, "batch pos d_token"]:
    """Tokens of the prompts in the model's layout; the query is the last token.

    Raises:
        ValueError: If the prompts have another d_x or d_y, or more positions than the model.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(tokens_of(prompts, ModelConfig(), d_x=5, d_y=1).shape)
        (8, 41, 6)
    """
    prompts.require_sizes(d_x=d_x, d_y=d_y)
    length, most = prompts.x.shape[1], model.longest_context
    if most is not None and length > most:
        raise ValueError(
            f"context_length must be <= {most}, all that n_positions = {model.n_positions} has room for, "
            f"got {length}."
        )
    return interleaved(prompts) if model.layout == "in_turn" else prompts.tokens


def interleaved(prompts: Prompts) -> Float[Tensor, "batch pos d_x"]:
    """x_1, y_1, ..., x_L, y_L, x_query, each y padded with zeros to d_x.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(interleaved(prompts).shape)
        (8, 81, 5)
    """
    padded = F.pad(prompts.y, (0, prompts.x.shape[2] - prompts.y.shape[2]))
    pairs = torch.stack([prompts.x, padded], dim=2).flatten(1, 2)
    return torch.cat([pairs, prompts.x_query[:, None]], dim=1)
