"""Draws from exp(-n_beta (L - L*) - (localisation / 2) |w - w*|^2) by Hamiltonian Monte Carlo, many chains at once.

The chains share a step size, adapted in warm-up only, and see the loss and its gradient as they are: no minibatches.
How far do draws agree between chains, and to how many independent ones do they amount?
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from mechinterp.progress import ProgressCallback, no_progress

Points = Float[np.ndarray, "chain weight"]
BatchLoss = Callable[[Points], tuple[Float[np.ndarray, " chain"], Points]]
"""Loss and gradient at many points, a row each."""
TARGET = 0.9
"""Acceptance that the step size is adapted to."""
SHORTEST = 0.15
"""Each chain takes between this part of the step size and the whole, anew at every draw: where the loss is steeper
than in warm-up a chain would stand still otherwise."""


@dataclass(frozen=True)
class Chains:
    """How long to draw."""

    n_chains: int = 8
    n_draws: int = 1000
    """Kept draws per chain."""
    n_warmup: int = 500
    """Draws that adapt the step size and are thrown away."""
    n_leapfrog: int = 40
    """Mean number of steps between two draws."""

    def __post_init__(self) -> None:
        least = {"n_chains": 2, "n_draws": 8, "n_warmup": 8, "n_leapfrog": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be >= {bound}, got {getattr(self, name)}.")


@dataclass(frozen=True, eq=False)
class Draws:
    """What the chains found."""

    excess: Float[np.ndarray, "chain draw"]
    """n_beta (L - L*), no unit."""
    accepted: Bool[np.ndarray, "chain draw"]
    step_size: float
    """After warm-up, unit of the weights."""


def hamiltonian_draws(
    loss: BatchLoss,
    at: Float[np.ndarray, " weight"],
    chains: Chains,
    *,
    n_beta: float,
    localisation: float,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Draws:
    """Draws of n_beta (L - L*) around `at`; steps that overflow are rejected.

    Source:
        Hoffman and Gelman 2014, arXiv 1111.4246, section 3.2, for the step size by dual averaging.
    Example:
        >>> def square(points):
        ...     return (points**2).sum(1), 2 * points
        >>> found = hamiltonian_draws(square, np.zeros(4), Chains(4, 250, 100, 5), n_beta=1e4, localisation=1.0)
        >>> bool(abs(found.excess.mean() - 2) < 0.2)
        True
    """
    state = _State(loss, at, chains.n_chains, n_beta, localisation, np.random.default_rng(seed))
    adapt = DualAveraging(state.first_step())
    for _ in progress(range(chains.n_warmup), "warming up chains"):
        chance, _ = state.move(adapt.step, chains.n_leapfrog)
        adapt.update(float(chance.mean()))
    excess, accepted = [], []
    for _ in progress(range(chains.n_draws), "drawing weights"):
        _, taken = state.move(adapt.average, chains.n_leapfrog)
        excess.append(state.excess)
        accepted.append(taken)
    return Draws(np.array(excess).T, np.array(accepted).T, adapt.average)


class DualAveraging:
    """A step size whose acceptance comes near TARGET."""

    def __init__(self, step: float):
        self.step, self.average = step, step
        self.centre, self.error, self.count = math.log(10 * step), 0.0, 0

    def update(self, chance: float) -> None:
        """Take the acceptance of one more draw into account."""
        self.count += 1
        weight = 1 / (self.count + 10)
        self.error += weight * (TARGET - chance - self.error)
        log_step = self.centre - self.count**0.5 / 0.05 * self.error
        share = self.count**-0.75
        log_average = share * log_step + (1 - share) * math.log(self.average)
        self.step, self.average = math.exp(log_step), math.exp(log_average)


class _State:
    """Where the chains are, with energy and force there."""

    def __init__(self, loss: BatchLoss, at, n_chains, n_beta, localisation, rng):
        self.loss, self.at, self.rng = loss, at, rng
        self.n_beta, self.localisation = n_beta, localisation
        self.least = float(loss(at[None])[0][0])
        self.points = np.repeat(at[None], n_chains, axis=0)
        self.excess, self.energy, self.force = self._energy(self.points)

    def _energy(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        loss, gradient = self.loss(points)
        away = points - self.at
        excess = self.n_beta * (loss - self.least)
        energy = excess + self.localisation / 2 * np.square(away).sum(1)
        return excess, energy, -self.n_beta * gradient - self.localisation * away

    def first_step(self) -> float:
        """A step at which about half of the single steps are accepted."""
        step, grow = 0.1, None
        for _ in range(60):
            chance = float(self._trial(step, 1)[0].mean())
            wanted = chance > 0.5
            grow = wanted if grow is None else grow
            if wanted != grow:
                break
            step *= 2.0 if grow else 0.5
        return step

    def move(self, step: float, n_leapfrog: int) -> tuple[np.ndarray, np.ndarray]:
        """One draw: the chance of acceptance of every chain, and whether it was taken."""
        # Lengths that vary do not fall in step with the periods of the directions; all chains share one, drawn
        # without a look at where they are.
        n_steps = int(
            self.rng.integers(max(1, n_leapfrog // 2), n_leapfrog + (n_leapfrog + 1) // 2 + 1)
        )
        steps = step * self.rng.uniform(SHORTEST, 1, (len(self.points), 1))
        chance, found = self._trial(steps, n_steps)
        taken = self.rng.random(len(chance)) < chance
        points, excess, energy, force = found
        self.points = np.where(taken[:, None], points, self.points)
        self.force = np.where(taken[:, None], force, self.force)
        self.excess = np.where(taken, excess, self.excess)
        self.energy = np.where(taken, energy, self.energy)
        return chance, taken

    def _trial(
        self, step: float | np.ndarray, n_steps: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        momentum = self.rng.standard_normal(self.points.shape)
        before = self.energy + np.square(momentum).sum(1) / 2
        points, force = self.points, self.force
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(n_steps):
                momentum = momentum + step / 2 * force
                points = points + step * momentum
                excess, energy, force = self._energy(points)
                momentum = momentum + step / 2 * force
            change = before - energy - np.square(momentum).sum(1) / 2
        # What overflows is NaN or infinite here: never accepted.
        chance = np.where(np.isfinite(change), np.exp(np.minimum(change, 0)), 0.0)
        return chance, (points, excess, energy, force)


def effective_draws(values: Float[np.ndarray, "chain draw"]) -> float:
    """Number of independent draws with the same error of the mean, over all chains; 0 if no chain moves.

    Source:
        Gelman et al., Bayesian Data Analysis, 3rd edition, eq. (11.8); Geyer's sums of pairs, made to fall.
    Example:
        >>> values = np.random.default_rng(0).standard_normal((4, 1000))
        >>> 3000 < effective_draws(values) <= 4000
        True
    """
    n_chains, n_draws = values.shape
    within, total = _variances(values)
    if not total > 0:
        return 0.0
    centred = values - values.mean(1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(centred, 2 * n_draws, axis=1)) ** 2
    covariance = np.fft.irfft(spectrum, axis=1)[:, :n_draws].mean(0) / n_draws
    correlation = 1 - (within - covariance * n_draws / (n_draws - 1)) / total
    pairs = correlation[: n_draws // 2 * 2].reshape(-1, 2).sum(1)
    negative = np.flatnonzero(pairs < 0)
    pairs = np.minimum.accumulate(pairs[: negative[0] if len(negative) else None])
    spread = max(2 * float(pairs.sum()) - 1, 1.0)
    return n_chains * n_draws / spread


def r_hat(values: Float[np.ndarray, "chain draw"]) -> float:
    """Spread over half-chains relative to that within them: 1 where they agree. NaN if none moves.

    Source:
        Gelman et al., Bayesian Data Analysis, 3rd edition, eq. (11.4).
    Example:
        >>> values = np.random.default_rng(0).standard_normal((4, 1000))
        >>> r_hat(values) < 1.01, r_hat(values + np.arange(4)[:, None]) > 1.5
        (True, True)
    """
    half = values.shape[1] // 2
    within, total = _variances(np.concatenate([values[:, :half], values[:, -half:]]))
    return math.sqrt(total / within) if within > 0 else math.nan


def mean_error(values: Float[np.ndarray, "chain draw"]) -> float:
    """Standard error of the mean over all draws, autocorrelation and differences between chains included.

    Example:
        >>> values = np.random.default_rng(0).standard_normal((4, 1000))
        >>> round(mean_error(values), 2)
        0.02
    """
    effective = effective_draws(values)
    return math.sqrt(_variances(values)[1] / effective) if effective else math.nan


def _variances(values: np.ndarray) -> tuple[float, float]:
    """Within chains, and of the law that all draw from, differences between chains included."""
    n_draws = values.shape[1]
    within = float(values.var(1, ddof=1).mean())
    return within, within * (n_draws - 1) / n_draws + float(values.mean(1).var(ddof=1))
