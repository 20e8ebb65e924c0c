"""Attention-only models from stacked matrices."""

from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ModelConfig
from mechinterp.config.model import NAMES
from mechinterp.models.weights import Weights


def stack_of_layers(
    W_Q: Float[Tensor, "layer head d_model d_head"],
    W_K: Float[Tensor, "layer head d_model d_head"],
    W_V: Float[Tensor, "layer head d_model d_head"],
    W_O: Float[Tensor, "layer head d_head d_model"],
    *,
    d_y: int,
    scale: float,
    reading: tuple[Float[Tensor, "d_token d_model"], Float[Tensor, "d_model d_y"]] | None = None,
    score: str = "softmax",
    score_slope: float = 1.0,
) -> Weights:
    """Attention-only model in which every token reads the context tokens and not the query.

        H_0 = tokens W_in,   H_l = H_{l-1} + sum_h P_lh H_{l-1} W_V,lh W_O,lh,   y_hat = H_n[query] W_U

    Args:
        scale: Factor on the scores.
        reading: W_in and W_U; None: the tokens (x, y) are the stream, and its y entries the prediction.
    Example:
        >>> import torch
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        Weights(2 x 1 heads, d_x=5, d_y=1, torch.float32)
    """
    n_layers, n_heads, d_model, d_head = W_Q.shape
    model = ModelConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        d_head=d_head,
        score=score,
        score_slope=score_slope,
        context_only=True,
        d_model=None if reading is None else d_model,
    )
    parts = (f"attn.{name}" for name in NAMES)
    tensors = dict(zip(parts, (W_Q, W_K, W_V, W_O), strict=True))
    if reading is not None:
        tensors |= dict(zip(("W_in", "unembed.W_U"), reading, strict=True))
    d_token = d_model if reading is None else len(reading[0])
    return Weights(model, d_token - d_y, d_y, tensors, scale)
