"""Scalars of algorithms, fitted to a model's predictions by nonlinear least squares, and their standard errors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.prompts import generator_for

TOLERANCE = 1e-8
EXACT_FIT = 1e-26
"""A mean squared difference below this fraction of the target's mean square counts as rounding."""
MAX_STEPS = 100
DAMPING = 1e-2
"""Initial damping, relative to the squared derivatives."""
SEEN = 1e-12
"""A scalar is not measured if its relative change changes the mean square of the predictions by less than this fraction."""
CLEARLY = 0.01
"""A fit that starts from one step is taken if its mean square is lower by more than this fraction."""


@dataclass(frozen=True, eq=False, repr=False)
class AlgorithmFit:
    """Algorithm with fitted scalars."""

    algorithm: str
    n_layers: int
    names: tuple[str, ...]
    scalars: Float[np.ndarray, " scalar"]
    error: float
    """Mean squared difference from the target on the prompts of the fit, unit y^2."""

    def __repr__(self) -> str:
        values = zip(self.names, self.scalars, strict=True)
        listed = ", ".join(f"{name} {value:.4g}" for name, value in values)
        return f"AlgorithmFit({self.algorithm}: {listed or 'no scalars'}; error {self.error:.3g})"


@torch.inference_mode(False)
def fit_algorithm(
    algorithm: Algorithm,
    moments: PromptMoments,
    target: Float[Tensor, "*layer batch d_y"],
    *,
    n_layers: int,
    n_starts: int = 4,
    start: Float[Tensor, " scalar"] | None = None,
    tolerance: float = TOLERANCE,
) -> AlgorithmFit:
    """Scalars that minimise the mean squared difference from a model's predictions.

    Args:
        target: Prediction after the last layer [batch, d_y], or after every layer
            [layer, batch, d_y].
        n_starts: Number of starts: the natural scalars, and these times fixed random factors. If only the last
            prediction is given and steps can be exchanged, equal step sizes would stay equal. More than one start
            then includes a further one with step sizes far apart. Without `start`, a search from one step
            follows, with the scalars of all later layers at 0: other searches may end at several steps instead.
        start: First start; None: the natural scalars.
        tolerance: The fit stops when a step lowers the mean square by less than this fraction.
    Raises:
        ValueError: If target has neither shape or is not finite, or n_starts is below 1.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.algorithms import ALGORITHMS
        >>> from mechinterp.icl.predictors import ridge
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 64, generator=generator_for(0, "eval", 0))
        >>> moments, by_name = PromptMoments(prompts, TaskConfig()), {a.name: a for a in ALGORITHMS}
        >>> target = ridge(moments.prompts, penalty=2.0)
        >>> fit_algorithm(by_name["ridge"], moments, target, n_layers=4).scalars.round(6)
        array([2.])
    """
    if n_starts < 1:
        raise ValueError(f"n_starts must be >= 1, got {n_starts}.")
    wanted = target.detach().to(moments.S)
    _require_predictions(wanted, tuple(moments.prompts.y_query.shape), n_layers)

    def difference(scalars: Tensor) -> Tensor:
        predictions = algorithm.predictions(moments, scalars, n_layers)
        return ((predictions if wanted.ndim == 3 else predictions[-1]) - wanted).flatten()

    lower, goal = algorithm.lower(n_layers), EXACT_FIT * wanted.square().mean().item()
    fits: list[tuple[float, Tensor]] = []
    starts = [algorithm.start(moments, n_layers) if start is None else start]
    if n_starts > 1 and wanted.ndim == 2:
        starts += _apart(algorithm, moments, len(starts[0]))
    for scalars in (*starts, *_disturbed(starts[0], n_starts - 1)):
        fits.append(_minimise(difference, scalars, lower, goal, tolerance))
        if fits[-1][0] <= goal:
            break
    error, scalars = min(fits, key=lambda fit: fit[0])
    alone = None if start is not None else _one_step(algorithm, moments, n_layers)
    if error > goal and alone is not None:
        fit = _minimise(difference, alone, lower, goal, tolerance)
        error, scalars = fit if fit[0] < (1 - CLEARLY) * error else (error, scalars)
    names = algorithm.names(n_layers)
    return AlgorithmFit(algorithm.name, n_layers, names, scalars.numpy(), error)


def _require_predictions(target: Tensor, shape: tuple[int, ...], n_layers: int) -> None:
    """Refuse a target that is not a finite prediction of this shape, or one for every layer."""
    if tuple(target.shape) not in (shape, (n_layers, *shape)):
        raise ValueError(
            f"target must have shape {list(shape)} or {[n_layers, *shape]}, "
            f"got {list(target.shape)}."
        )
    if not target.isfinite().all():
        raise ValueError("target must be finite, got a prediction that is not.")


@torch.inference_mode(False)
def scalar_errors(
    algorithm: Algorithm,
    moments: PromptMoments,
    target: Float[Tensor, "batch d_y"],
    scalars: Sequence[float] | Float[np.ndarray, " scalar"],
    *,
    n_layers: int = 1,
) -> Float[np.ndarray, " scalar"]:
    """Standard errors over prompts of scalars that are fitted to the last prediction.

    A scalar that the predictions hardly depend on has an infinite error. Rests of the prompts are independent and may have any size: H^-1 (sum_i g_i g_i^T) H^-1 with H = J^T J and
    g_i = J_i^T rest_i / (1 - leverage_i), nearly the jackknife over prompts.

    Source:
        MacKinnon and White 1985, Some heteroskedasticity-consistent covariance matrix estimators (HC3).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.algorithms import ALGORITHMS
        >>> from mechinterp.icl.predictors import ridge
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 64, dtype=torch.float64)
        >>> learner = next(each for each in ALGORITHMS if each.label == "ridge_like")
        >>> moments = PromptMoments(prompts, TaskConfig())
        >>> bool(scalar_errors(learner, moments, ridge(prompts, penalty=0.3), [0.3])[0] < 1e-9)
        True
    """
    values = torch.as_tensor(np.asarray(scalars), dtype=torch.float64)

    def difference(at: Tensor) -> Tensor:
        return (algorithm.predictions(moments, at, n_layers)[-1] - target).flatten()

    if not len(values):
        return np.zeros(0)
    J = _jacobian(difference, values)
    rest = difference(values)
    # Changes of predictions by changes of the scalars relative to their size, per size of the predictions.
    size = values.abs().clamp(min=1e-6)
    scaled = J * size / target.norm()
    strengths, along = torch.linalg.eigh(scaled.mT @ scaled)
    lost = (along.square() * (strengths < SEEN)).sum(1) > 0.01
    inverse = torch.linalg.pinv(scaled.mT @ scaled, hermitian=True)
    inverse = inverse * size[:, None] * size / target.norm() ** 2
    leverage = ((J @ inverse) * J).sum(1).unflatten(0, (len(target), -1)).sum(1).clamp(max=0.99)
    by_prompt = (J * rest[:, None]).unflatten(0, (len(target), -1)).sum(1) / (1 - leverage)[:, None]
    variances = (inverse @ by_prompt.mT @ by_prompt @ inverse).diagonal().clamp(min=0)
    return torch.where(lost, torch.inf, variances.sqrt()).numpy()


def _one_step(algorithm: Algorithm, moments: PromptMoments, n_layers: int) -> Tensor | None:
    """Start with the natural scalars of the first step, and 0 in all later layers; None if no scalar has two layers."""
    natural = algorithm.start(moments, n_layers)
    counts = [len(scalar.layers(n_layers)) for scalar in algorithm.scalars]
    if max(counts, default=0) < 2:
        return None
    first = torch.cat([torch.arange(count, device=natural.device) == 0 for count in counts])
    return natural * first


def _apart(algorithm: Algorithm, moments: PromptMoments, steps: int) -> list[Tensor]:
    """Start with step sizes far apart, if steps can be exchanged: those of Chebyshev's iteration, which are
    optimal for the interval that contains most eigenvalues."""
    if algorithm.modes is None or steps < 2:
        return []
    modes = algorithm.modes(moments)
    least, most = modes[..., 0].quantile(0.1), modes[..., -1].quantile(0.9)
    angles = (
        (2 * torch.arange(steps, dtype=torch.float64, device=modes.device) + 1)
        * torch.pi
        / (2 * steps)
    )
    return [1 / ((most + least) / 2 + (most - least) / 2 * angles.cos())]


def _disturbed(natural: Tensor, count: int) -> Iterator[Tensor]:
    for start in range(1, count + 1 if len(natural) else 1):
        factors = torch.randn(
            len(natural),
            generator=generator_for(0, "init", start),
            dtype=torch.float32,
            device="cpu",
        )
        yield natural * (0.5 * factors.double()).exp()


def _minimise(
    difference: Callable[[Tensor], Tensor],
    scalars: Tensor,
    lower: Tensor,
    goal: float,
    tolerance: float,
) -> tuple[float, Tensor]:
    """Smallest mean square and its scalars, by Levenberg-Marquardt steps. A scalar at its lower bound stays there
    while the mean square would decrease only beyond the bound."""
    rest = difference(scalars)
    error = rest.square().mean().nan_to_num(nan=torch.inf).item()
    if not len(scalars) or not np.isfinite(error):
        return error, scalars
    damping = DAMPING
    for _ in range(MAX_STEPS):
        J = _jacobian(difference, scalars)
        free = (scalars > lower) | (rest @ J < 0)
        Q, R = torch.linalg.qr(J * free)
        before, growth = error, 2.0
        scale = J.norm(dim=0).clamp(min=1e-12).diag()
        if not (R.isfinite().all() and scale.isfinite().all()):
            break  # predictions of a high degree can be finite with infinite derivatives
        while error == before and damping < 1e12:
            # Least squares instead of normal equations, which would square the condition number.
            stacked = torch.cat([R, damping**0.5 * scale])
            wanted = torch.cat([-rest @ Q, torch.zeros_like(scalars)])
            # The default driver returns 0 if the first column is 0.
            step = torch.linalg.lstsq(stacked, wanted[:, None], driver="gelsd").solution[:, 0]
            tried = torch.maximum(scalars + step, lower)
            tried_rest = difference(tried)
            tried_error = tried_rest.square().mean().item()
            if tried_error < error:
                foreseen = before - (rest + J @ (tried - scalars)).square().mean().item()
                damping = max(damping * _damping_factor(before - tried_error, foreseen), 1e-12)
                scalars, rest, error = tried, tried_rest, tried_error
            else:
                damping, growth = damping * growth, 2 * growth
        if error <= goal or before - error <= tolerance * before:
            break
    return error, scalars


def _damping_factor(gain: float, foreseen: float) -> float:
    """Factor on the damping: below 1 if the step gained what the linearisation predicted, above 1 if it gained little.
    Otherwise steps oscillate where predictions are curved and the smallest error is not 0 (Nielsen 1999)."""
    if foreseen <= 0:
        return 2.0
    return max(1 / 3, 1 - (2 * gain / foreseen - 1) ** 3)


def _jacobian(difference: Callable[[Tensor], Tensor], scalars: Tensor) -> Tensor:
    """Derivatives [difference, scalar], computed as the derivatives of J^T u with respect to u.

    Only gradients of single numbers are taken: with given output gradients torch imports sympy, which takes 0.4 s.
    """
    at = scalars.clone().requires_grad_()
    rest = difference(at)
    u = torch.zeros_like(rest, requires_grad=True)
    (product,) = torch.autograd.grad((rest * u).sum(), at, create_graph=True)
    rows = [torch.autograd.grad(each, u, retain_graph=True)[0] for each in product]
    return torch.stack(
        rows
    ).mT  # one scalar after the other in memory; other strides have other bits
