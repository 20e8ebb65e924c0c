"""Sums over the heads of one layer: the step that the model makes, and how evenly its heads share it."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.one_layer.descent import descent
from mechinterp.analysis.one_layer.head_statistics import HeadStatistics
from mechinterp.analysis.one_layer.qk_form import QKForm
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import TaskConfig
from mechinterp.models.layers import score_derivative_at_zero
from mechinterp.models.weights import Weights
from mechinterp.theory.softmax import debiased_step_size

ON_SUPPORT = 0.5
"""A coordinate belongs to the support if theta exceeds this fraction of its maximum."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Numbers over the active groups of equal heads; omega is the factor of a head on its form."""

    omega_spread: float
    """max/min - 1 over heads of |omega_mean|. With several responses it is that of the norm of
    omega, over the heads that serve the same response."""
    zero_sum: float
    """|sum mu| / sum |mu|, the largest over responses."""
    unserved: tuple[int, ...]
    """Responses that no head serves: their sum of |mu|, relative to the largest, is below the limit
    `share`."""
    eta: Float[np.ndarray, " d_y"]
    """Step size of the model, f'(0) sum mu * omega_mean; unit 1/x^2."""
    eta_optimal: float
    """Best debiased step size for the task, 1/(1 + (1 + s^2) d/L); NaN unless x is isotropic."""
    theta: Float[np.ndarray, "d_y d_x"]
    """Step size of response n along each coordinate, f'(0) sum mu_n diag(QK); unit 1/x^2."""
    supports: tuple[tuple[int, ...], ...]
    """Supports that the task states; otherwise the coordinates where theta_n exceeds half of its
    maximum."""
    support_leak: float
    """Largest |theta_n| off the support divided by the mean on it; 0 for full supports."""
    theta_spread: float
    """max/min - 1 of theta_n on its support, the largest over responses."""
    step: Float[Tensor, "d_y d_x d_x"]
    """Matrix of the step, f'(0) sum mu_n times the idealised QK x blocks; unit 1/x^2."""
    descent: float
    """Smallest eigenvalue of the step's symmetric part divided by the largest |eigenvalue|, in coordinates in which the
    task's covariance of x is the identity; the smallest over responses. Negative if the step ascends in some direction."""


def spread_over_heads(
    sizes: Float[Tensor, "*models head"], mu: Float[Tensor, "*models head d_y"], *, serving: float
) -> Float[Tensor, "*models"]:
    """max/min - 1 of sizes over the heads that serve a response, the largest over responses.

    Args:
        serving: A head serves response n if |mu_n| exceeds this fraction of the head's largest
            |mu|.
    Example:
        >>> sizes, mu = torch.tensor([1.0, 1.5, 9.0]), torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]])
        >>> spread_over_heads(sizes, mu, serving=0.25).item()
        0.5
    """
    serves = mu.abs() > serving * mu.abs().amax(-1, keepdim=True)
    wide = sizes[..., None].expand_as(mu)
    largest = wide.masked_fill(~serves, 0).amax(-2)
    smallest = wide.masked_fill(~serves, torch.inf).amin(-2)
    return (largest / smallest - 1).amax(-1)


def scales_of(
    groups: HeadStatistics, form: QKForm, weights: Weights, task: TaskConfig, limits: Thresholds
) -> Scales:
    """Numbers of the active groups of equal heads.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.2)-(4.5) and (5.7) (theta).
    """
    model = weights.model
    slope = score_derivative_at_zero(
        model.score, model.score_slope, context_length=task.context_length
    )
    mu, fitted = groups.mu, form.fitted(groups.blocks)
    omega = form.omega(groups.blocks).numpy()
    means = omega.mean(1)
    sizes = np.abs(means) if task.d_y == 1 else np.linalg.norm(omega, axis=1)
    theta = slope * mu.T @ groups.blocks.diagonal(dim1=1, dim2=2).numpy()
    large = theta > ON_SUPPORT * np.abs(theta).max(1, keepdims=True)
    supports = task.supports or tuple(tuple(np.flatnonzero(row).tolist()) for row in large)
    leak, theta_spread = _on_supports(theta, supports)
    total = np.abs(mu).sum(0) if len(mu) else np.full(task.d_y, np.nan)
    with np.errstate(invalid="ignore"):  # NaN if all mu are 0
        zero_sum = np.abs(mu.sum(0)) / np.abs(mu).sum(0)
    tensors = torch.from_numpy(sizes), torch.from_numpy(mu)
    spread = spread_over_heads(*tensors, serving=limits.leak) if len(sizes) else np.nan
    step = slope * torch.einsum("gn,gij->nij", tensors[1], fitted)
    return Scales(
        omega_spread=float(spread),
        zero_sum=float(zero_sum.max()),
        unserved=tuple(np.flatnonzero(total <= limits.share * total.max()).tolist()),
        eta=slope * means @ mu,
        eta_optimal=_optimal_step(task),
        theta=theta,
        supports=supports,
        support_leak=leak,
        theta_spread=theta_spread,
        step=step,
        descent=descent(step, task),
    )


def _on_supports(theta: np.ndarray, supports: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """Leak of theta off its supports and spread on them; NaN for an empty support."""
    leak, spread = 0.0, 0.0
    for row, support in zip(theta, supports, strict=True):
        on, off = row[list(support)], np.delete(row, list(support))
        if not len(on) or on.min() <= 0:
            return float("nan"), float("nan")
        leak = max(leak, float(np.abs(off).max(initial=0) / on.mean()))
        spread = max(spread, float(np.ptp(on) / on.min()))
    return leak, spread


def _optimal_step(task: TaskConfig) -> float:
    if task.covariance.kind != "identity" or task.supports is not None or task.drift != 1:
        return float("nan")
    ratio = task.noise_variance / task.signal_var
    step = debiased_step_size(d_x=task.d_x, context_length=task.context_length, noise_var=ratio)
    return step / task.covariance.scale
