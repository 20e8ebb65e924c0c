"""Sums of omega and mu over the heads of a model, and the step size they amount to."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.one_layer.head_statistics import Form, Heads, spread_over_heads
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.scores import score_derivative_at_zero
from mechinterp.theory.softmax import debiased_step_size, manifold_mu

ON_SUPPORT = 0.5  # theta is on its support where it is above this part of its largest entry
ROUNDS, POINTS = 3, 1251
"""Grids of so many points, each between the neighbours of the last one's best: (2/1250)^3 of the range. To import scipy's
search takes longer than a whole reading of a model."""


@dataclass(frozen=True, eq=False)
class Scales:
    """Numbers over the active groups of equal heads; omega is a head's factor of its form."""

    omega_spread: float
    """max/min minus 1 over heads: of |omega_mean|, with several responses of the norm of omega, over the heads
    that serve one response."""
    zero_sum: float
    """|sum mu| / sum |mu|, the largest over responses."""
    unserved: tuple[int, ...]
    """Responses for which the sum of |mu| is below the share of an active head, relative to the largest."""
    eta: Float[np.ndarray, " d_y"]
    """f'(0) sum mu * omega_mean: the step size the model takes; unit 1/x^2."""
    eta_optimal: float
    """Best debiased step size for the task, 1/(1 + (1 + s^2) d/L); NaN unless x is isotropic."""
    gamma: float
    """|omega| of the nearest point of the solution manifold, unit 1/x^2; NaN without omega of both signs."""
    manifold_distance: float
    """Distance of (omega, mu) to the solution manifold, each relative to its norm; NaN as for gamma."""
    theta: Float[np.ndarray, "d_y d_x"]
    """f'(0) sum mu_n diag(QK): how strongly response n is regressed on each coordinate; unit 1/x^2."""
    supports: tuple[tuple[int, ...], ...]
    """The task's supports where it states them, else the coordinates with theta_n above half its largest."""
    support_leak: float
    """Largest |theta_n| off its support over the mean on it; 0 where supports are full."""
    theta_spread: float
    """max/min of theta_n on its support minus 1, the largest over responses."""
    step: Float[Tensor, "d_y d_x d_x"]
    """The step's matrix, f'(0) sum mu_n times the idealised QK x blocks; unit 1/x^2."""


def scales_of(
    groups: Heads, form: Form, weights: AttentionWeights, task: TaskConfig, limits: Thresholds
) -> Scales:
    """The numbers of active groups of equal heads.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.2)-(4.8) and (5.7) (theta).
    """
    slope = score_derivative_at_zero(
        weights.score, weights.score_slope, context_length=task.context_length
    )
    mu, fitted = groups.mu, form.fitted(groups.blocks)
    omega = form.omega(groups.blocks).numpy()
    means = omega.mean(1)
    sizes = np.abs(means) if task.d_y == 1 else np.linalg.norm(omega, axis=1)
    gamma, distance = np.nan, np.nan
    if form.kind == "scalar" and task.d_y == 1:
        gamma, distance = nearest_on_manifold(means, mu[:, 0], task)
    theta = slope * mu.T @ groups.blocks.diagonal(dim1=1, dim2=2).numpy()
    large = theta > ON_SUPPORT * np.abs(theta).max(1, keepdims=True)
    supports = task.supports or tuple(tuple(np.flatnonzero(row).tolist()) for row in large)
    leak, theta_spread = _on_supports(theta, supports)
    tensors = torch.from_numpy(sizes), torch.from_numpy(mu)
    spread = spread_over_heads(*tensors, serving=limits.task_leak) if len(sizes) else np.nan
    return Scales(
        omega_spread=float(spread),
        zero_sum=float(np.max([_ratio(abs(m.sum()), np.abs(m).sum()) for m in mu.T])),
        unserved=_unserved(mu, limits.share),
        eta=slope * means @ mu,
        eta_optimal=_optimal_step(task),
        gamma=gamma,
        manifold_distance=distance,
        theta=theta,
        supports=supports,
        support_leak=leak,
        theta_spread=theta_spread,
        step=slope * torch.einsum("gn,gij->nij", tensors[1], fitted),
    )


def _unserved(mu: np.ndarray, share: float) -> tuple[int, ...]:
    total = np.abs(mu).sum(0)
    return tuple(np.flatnonzero(total <= share * total.max()).tolist()) if len(mu) else ()


def _ratio(part: float, whole: float) -> float:
    """part / whole, infinite if only the whole is 0, NaN if both are."""
    if whole == 0:
        return float("inf") if part else float("nan")
    return float(part / whole)


def _on_supports(theta: np.ndarray, supports: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """How much of theta is off its supports, and how much it varies on them; NaN for an empty one."""
    leak, spread = 0.0, 0.0
    for row, support in zip(theta, supports, strict=True):
        on, off = row[list(support)], np.delete(row, list(support))
        if not len(on) or on.min() <= 0:
            return float("nan"), float("nan")
        leak = max(leak, float(np.abs(off).max(initial=0) / on.mean()))
        spread = max(spread, float(np.ptp(on) / on.min()))
    return leak, spread


def _optimal_step(task: TaskConfig) -> float:
    if task.covariance.kind != "identity" or task.supports is not None:
        return float("nan")
    ratio = task.noise_var / task.signal_var
    step = debiased_step_size(d_x=task.d_x, context_length=task.context_length, noise_var=ratio)
    return step / task.covariance.scale


def nearest_on_manifold(
    omega: Float[np.ndarray, " head"], mu: Float[np.ndarray, " head"], task: TaskConfig
) -> tuple[float, float]:
    """gamma of the nearest point of the solution manifold, and the distance to it.

    For a given gamma the nearest point has |omega_h| = gamma and shifts the mu of each sign equally, so
    that they sum to +-mu_gamma. Distances in omega and in mu are relative to their norms.

    Args:
        omega: Mean omega of each active head, of both signs; unit 1/x^2.
        mu: mu of each active head.
    Returns:
        gamma in 1/x^2 and the distance; NaN unless the covariance of x is the identity and mu is not 0, with omega of both signs.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.6)-(4.7); the projection is derived here.
    Example:
        >>> total = manifold_mu(0.13, d_x=5, context_length=40, noise_var=0.1)
        >>> gamma, distance = nearest_on_manifold(
        ...     np.array([0.13, -0.13]), np.array([total, -total]), TaskConfig()
        ... )
        >>> round(gamma, 4), round(distance, 4)
        (0.13, 0.0)
    """
    both_signs = (omega > 0).any() and (omega < 0).any()
    if task.covariance != CovarianceConfig() or not both_signs or not mu.any():
        return float("nan"), float("nan")
    mu_at = partial(
        manifold_mu,
        d_x=task.d_x,
        context_length=task.context_length,
        noise_var=task.noise_var / task.signal_var,
    )

    def distances(gammas: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        targets = mu_at(gammas)
        off_omega = np.square(np.abs(omega) - gammas[:, None]).sum(1) / np.sum(omega**2)
        off_mu = sum(
            np.square(np.abs(mu[group]).sum() - targets) / group.sum()
            for group in (omega > 0, omega < 0)
        ) / np.sum(mu**2)
        return np.sqrt(off_omega + off_mu)

    low, high = np.abs(omega).min() / 4, np.abs(omega).max() * 4
    for _ in range(ROUNDS):
        gammas = np.linspace(low, high, POINTS)
        away = distances(gammas)
        nearest = int(np.argmin(away))
        low, high = gammas[max(nearest - 1, 0)], gammas[min(nearest + 1, POINTS - 1)]
    return float(gammas[nearest]), float(away[nearest])
