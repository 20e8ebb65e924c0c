"""Recurrent layers built by hand, whose learner and scalars are known."""

import math

import torch
from torch import Tensor

from mechinterp.config import ModelConfig
from mechinterp.config.model import FORGETTING
from mechinterp.models.recurrence import LARGEST_LOGIT
from mechinterp.models.weights import Weights

BETA = 0.5
"""Strength of writing of the layers, which the keys' size makes the step eta."""


def recurrent_layer(
    score: str,
    *,
    d_x: int,
    alpha: float = 1.0,
    eta: float = 0.1,
    penalty: float = 0.5,
) -> Weights:
    """One recurrent head in float64 that is descent with forgetting, the delta rule or recursive least squares.

    Args:
        score: "gated": w = eta sum_l alpha^(L - l) x_l y_l; "delta" and "gated_delta": w_l = alpha w_(l-1) + eta x_l
            (y_l - alpha <w_(l-1), x_l>), with alpha 1 for "delta"; "mesa": least squares with weights alpha^(L - l) and this
            penalty.
        alpha: Gate, in (0, 1].
        eta: Step for one pair; not used by "mesa".
        penalty: Ridge penalty; "mesa" only.
    Raises:
        ValueError: If alpha is outside (0, 1], or not 1 for "delta"; or eta or the penalty is not above 0.
    Source:
        Yang et al. 2024 (arXiv 2412.06464) for the gated delta rule, von Oswald et al. 2025 (arXiv 2506.05233) for mesa layers.
    Example:
        >>> from mechinterp import sample_prompts
        >>> from mechinterp.icl.predictors import ridge
        >>> from mechinterp.models.run.general import predictions
        >>> weights = recurrent_layer("mesa", d_x=5, penalty=0.5)
        >>> prompts = sample_prompts(weights, 8)
        >>> torch.allclose(predictions(weights, prompts), ridge(prompts, penalty=0.5))
        True
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}.")
    model = ModelConfig(n_heads=1, score=score)
    if score not in FORGETTING and alpha != 1:
        raise ValueError(f"alpha must be 1 for score {score!r}, which has no gate, got {alpha}.")
    for name, value in {"eta": eta, "penalty": penalty}.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}.")
    width, scale = d_x + 1, (d_x + 1) ** -0.5
    identity = torch.eye(width, dtype=torch.float64, device="cpu")
    on_y = torch.zeros_like(identity)
    on_y[-1, -1] = 1
    size = math.sqrt(eta / BETA) if score in ("delta", "gated_delta") else 1.0
    asked = eta if score == "gated" else size
    matrices = {
        "W_Q": asked / scale * (identity - on_y),
        "W_K": size * (identity - on_y),
        "W_V": on_y,
        "W_O": on_y,
    }
    tensors = {f"attn.{name}": matrix[None, None] for name, matrix in matrices.items()}
    if score in FORGETTING:
        tensors["attn.b_gate"] = _number(alpha).logit().clamp_max(LARGEST_LOGIT)
    if score != "gated":
        tensors["attn.b_beta"] = _number(BETA).logit()
    if score == "mesa":
        tensors["attn.b_ridge"] = (
            _number(penalty * BETA).expm1().log()[..., None].repeat(1, 1, width)
        )
    return Weights(model, d_x, 1, tensors, scale)


def _number(value: float) -> Tensor:
    """The number for the one head of the one layer, [1, 1]."""
    return torch.full((1, 1), value, dtype=torch.float64, device="cpu")
