"""One-layer attention as functions of its weights, computed at the query only.

The heads of many independent models share one axis, so that a thousand models cost one set of tensor operations.
With A = W_Q W_K^T (scale included) and v = W_V W_O, the output of a head is

    out = sum_l p_l (x_l, y_l) v,   p = softmax_l( x_query A[:d_x] (x_l, y_l)^T ),

because the query's y slot is 0 and, unless `attend_to_self` is set, the query does not attend to itself.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, together
from mechinterp.models.layers import pattern_and_slope
from mechinterp.models.weights import Weights


def stack(models: Sequence[Weights]) -> Weights:
    """Heads of several models without biases, along one axis.

    Raises:
        ValueError: If the models differ in head shape, scale or score, or have biases.
    """
    first = models[0]
    kinds = {
        (*(vars(m.model) | {"n_heads": 1, "d_head": m.d_head}).values(), m.d_x, m.d_y, m.scale)
        for m in models
    }
    if len(kinds) != 1:
        raise ValueError(
            f"Stacked models must share head shape, scale and score, got {len(kinds)} kinds."
        )
    if first.model.biases:
        raise ValueError("Stacked models must have no biases, got some that have.")
    return first.of_heads(
        {name: torch.cat([each.tensors[name] for each in models], 1) for name in first.tensors}
    )


def attend_at_query(
    weights: Weights,
    context: Float[Tensor, "batch context d_model"],
    x_query: Float[Tensor, "batch d_x"],
) -> tuple[
    Float[Tensor, "batch context head"],
    Float[Tensor, "batch context head"],
    Float[Tensor, "batch d_model head"],
]:
    """Attention at the query: pattern, factor of its gradient, and weighted average of the context tokens, per head."""
    batch, d_x = x_query.shape
    d_model = context.shape[-1]
    query_key = weights.QK[:, :d_x].permute(1, 2, 0).reshape(d_x, -1)
    key_side = (x_query @ query_key).view(batch, d_model, -1)
    scores = context @ key_side
    model = weights.model
    if model.biases:
        # Bias terms of the scores: b_Q W_K^T per key token, and q b_K per query.
        b_Q, b_K = (weights.tensors[f"attn.{name}"][0] for name in ("b_Q", "b_K"))
        by_key = torch.einsum("he,hme->mh", b_Q, weights.W_K[0])
        query = torch.einsum("bm,hme->bhe", x_query, weights.W_Q[0, :, :d_x]) + b_Q
        by_query = weights.scale * (query * b_K).sum(-1)
        scores = scores + context @ (weights.scale * by_key) + by_query[:, None]
    pattern, slope = pattern_and_slope(scores, score=model.score, slope=model.score_slope, dim=1)
    return pattern, slope, context.mT @ pattern


def head_outputs(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch head d_y"]:
    """Output of each head, its share of the prediction, in units of y.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (2.3): softmax over the context tokens only.
    Example:
        >>> from mechinterp.models.constructions.one_layer import kernel_head
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator, dtype=torch.float64)
        >>> tuple(head_outputs(kernel_head(omega=0.5, mu=1.5, d_x=5), prompts).shape)
        (8, 1, 1)
    """
    n_heads, d_model = weights.n_heads, weights.d_model
    length = prompts.x.shape[1]
    # Scores, pattern and slope of each head, and a copy of the tokens.
    numbers = (length + 1) * (2 * d_model + 4 * n_heads) + 2 * n_heads * d_model
    per_prompt = weights.dtype.itemsize * numbers
    size = together(per_prompt, f"outputs of {n_heads} heads on prompts of {length} pairs")
    if len(prompts) <= size:
        return _head_outputs(weights, prompts)
    return torch.cat([_head_outputs(weights, prompts[rows]) for rows in chunks(len(prompts), size)])


def _head_outputs(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch head d_y"]:
    model = weights.model
    keys = prompts.tokens if model.attend_to_self else prompts.context_tokens
    pattern, _, averaged = attend_at_query(weights, keys, prompts.x_query)
    outputs = torch.einsum("bmh,hmn->bhn", averaged, weights.OV)
    if not model.biases:
        return outputs
    W_O = weights.W_O[0, ..., weights.d_x :]
    constant = torch.einsum("he,hen->hn", weights.tensors["attn.b_V"][0], W_O)
    return outputs + pattern.sum(1)[..., None] * constant


def share_of(outputs: Float[Tensor, "batch *models head d_y"]) -> Float[Tensor, "*models head"]:
    """Standard deviation of each head's output over prompts, divided by the sum of these over heads."""
    spread = outputs.var(0).sum(-1).sqrt()
    return spread / spread.sum(-1, keepdim=True).clamp_min(1e-300)


def predict(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Prediction of one model: sum of its heads' outputs and b_O, in units of y.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> generator = generator_for(0, "eval", 0)
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator, dtype=torch.float64)
        >>> predict(zero_head(d_x=5), prompts).any()
        tensor(False)
    """
    return head_outputs(weights, prompts).sum(1) + weights.output_bias
