"""Draws from exp(-nbeta (L - L*) - (localization / 2) |w - w*|^2) by Hamiltonian Monte Carlo, many
chains at once.

The chains share a step size, which is adapted during warm-up only, and use the exact loss and
gradient, without mini-batches. `r_hat` and `effective_draws` measure their agreement. Stochastic
gradient Langevin dynamics on mini-batches is included because it is common elsewhere. It is cheap
but biased: no step is rejected, so that the step size and the noise of the mini-batches widen the
sampled density."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float

from mechinterp.icl.prompts import generator_for
from mechinterp.progress import progress

Points = Float[np.ndarray, "chain weight"]
BatchLoss = Callable[[Points], tuple[Float[np.ndarray, " chain"], Points]]
"""Function from many points to the loss and gradient at each, one row per point."""
MinibatchGradient = Callable[[Points, int, torch.Generator], Points]
"""Function (points, prompts per mini-batch, generator) to the gradient at each point, each on its
own mini-batch."""
NBETA = 30_000.0
"""Default weight of the loss in the sampled density, unit 1/y^2."""
TARGET = 0.9
"""Acceptance rate that the step size is adapted to."""
SHORTEST = 0.15
"""Step sizes are jittered uniformly in [0.15, 1] per draw, so that chains do not stall where the
loss is steeper than during warm-up."""
ROUNDED = 0.01
"""Draws use the loss in float32 if four roundings, 2^-22 of it, move nbeta L by at most this much: a
fifth of FALL, the largest fall of a minimum."""


@dataclass(frozen=True)
class Langevin:
    """Settings of stochastic gradient Langevin dynamics, which replaces Hamiltonian Monte Carlo."""

    step_size: float
    """epsilon of w -> w - (epsilon / 2) force + N(0, epsilon), unit weight^2."""
    batch_size: int = 64
    """Number of prompts in a mini-batch; every chain draws its own at every step."""

    def __post_init__(self) -> None:
        for name in ("step_size", "batch_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}.")

    @property
    def bias(self) -> str:
        """Sentence about the bias of the draws."""
        return f"drawn on mini-batches of {self.batch_size} without rejection, step size {self.step_size:g}"


@dataclass(frozen=True)
class Chains:
    """Settings of the sampler: number and length of the chains, and the density that they sample."""

    n_chains: int = 8
    """Number of chains."""
    n_draws: int = 1000
    """Number of kept draws per chain."""
    n_warmup: int = 500
    """Number of discarded draws per chain, during which the step size is adapted."""
    n_leapfrog: int = 40
    """Mean number of leapfrog steps between two draws."""
    nbeta: float = NBETA
    """Weight of the loss in the sampled density, unit 1/y^2."""
    localization: float = 1.0
    """Strength of the pull towards the weights, unit 1 / weight^2."""
    other_nbeta: tuple[float, ...] = ()
    """Further values of nbeta, for `plot_curve`."""
    langevin: Langevin | None = None
    """Settings of stochastic-gradient sampling on mini-batches, which is common elsewhere and replaces Hamiltonian Monte
    Carlo. It is biased by its step size and its mini-batches; `bias` says so."""

    def __post_init__(self) -> None:
        least = {"n_chains": 2, "n_draws": 8, "n_warmup": 8, "n_leapfrog": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be >= {bound}, got {getattr(self, name)}.")
        others = {f"other_nbeta[{at}]": value for at, value in enumerate(self.other_nbeta)}
        weights = {"nbeta": self.nbeta, "localization": self.localization}
        for name, value in (weights | others).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be > 0, got {value}.")

    @property
    def n_gradients(self) -> int:
        """Number of gradients of all chains, for one nbeta."""
        return (self.n_warmup + self.n_draws) * self.n_leapfrog


PROMPT_CHAINS = Chains(n_chains=4, n_draws=200, n_warmup=100, n_leapfrog=20)
"""Default chains for a loss on prompts, where a gradient takes milliseconds."""


def changed_chains(chains: Chains, settings: Mapping[str, object]) -> Chains:
    """Chains with other settings, by name.

    Raises:
        ValueError: If there is no such setting.
    Example:
        >>> changed_chains(Chains(), {"n_draws": 100}).n_draws
        100
    """
    known = [each.name for each in fields(Chains)]
    for name in settings:
        if name not in known:
            raise ValueError(f"chains must have settings among {', '.join(known)}, got {name!r}.")
    return replace(chains, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class LocalLoss:
    """A loss around the weights of a model."""

    function: BatchLoss
    at: Float[np.ndarray, " weight"]
    sampled: str
    """Names of the entries of a point."""
    over: str
    """Data of the loss: the population, or prompts."""
    exact: float | None = None
    """Learning coefficient at the minimum of this loss, if known."""
    unknown: str = ""
    """Why the exact coefficient is unknown."""
    remedy: str = ""
    """Advice if the weights are not at a minimum."""
    on_minibatch: MinibatchGradient | None = None
    """Gradient on mini-batches; None if there are no prompts to draw."""
    chains: Chains = Chains()
    """Default chains around these weights."""
    first_look: BatchLoss | None = None
    """The same loss where a gradient takes long, in float32 if that is faster: the search for a lower loss then ends once
    one is found. None: the search goes on to the minimum."""
    in_float32: BatchLoss | None = None
    """The same loss in float32, if that is faster; draws use it where its rounding does not matter."""


@dataclass(frozen=True, eq=False)
class Tempered:
    """A loss and the density that is sampled around its weights."""

    loss: LocalLoss
    nbeta: float
    """Weight of the loss in the density, unit 1/y^2."""
    localization: float
    """Strength of the pull towards the weights, unit 1 / weight^2."""

    @property
    def for_draws(self) -> "Tempered":
        """The density with the loss in float32, unless rounding then moves nbeta L by more than ROUNDED."""
        single = self.loss.in_float32
        if single is None or not self.nbeta * abs(self.least) * 2**-22 <= ROUNDED:
            return self
        return replace(self, loss=replace(self.loss, function=single))

    @cached_property
    def least(self) -> float:
        """Loss at the weights."""
        return float(self.loss.function(self.loss.at[None])[0][0])

    def energy(self, points: Points) -> tuple[np.ndarray, np.ndarray, Points]:
        """nbeta (L - L*), the same plus the pull, and the gradient of the latter."""
        loss, gradient = self.loss.function(points)
        away = points - self.loss.at
        excess = self.nbeta * (loss - self.least)
        energy = excess + self.localization / 2 * np.square(away).sum(1)
        return excess, energy, self.nbeta * gradient + self.localization * away


Draws = tuple[Float[np.ndarray, "chain draw"], Bool[np.ndarray, "chain draw"]]
"""nbeta (L - L*) at each draw, without unit, and whether the draw was accepted."""


def hamiltonian_draws(law: Tempered, chains: Chains, *, seed: int = 0) -> Draws:
    """Draws around the weights; steps that overflow are rejected.

    Source:
        Hoffman and Gelman 2014, arXiv 1111.4246, section 3.2, for the step size by dual averaging.
    Example:
        >>> def square(points):
        ...     return (points**2).sum(1), 2 * points
        >>> law = Tempered(LocalLoss(square, np.zeros(4), "4 entries", "a quadratic"), 1e4, 1.0)
        >>> excess, _ = hamiltonian_draws(law, Chains(4, 250, 100, 5))
        >>> bool(abs(excess.mean() - 2) < 0.2)
        True
    """
    state = _State(law, chains.n_chains, np.random.default_rng(seed))
    adapt = DualAveraging(state.first_step())
    for _ in progress(range(chains.n_warmup), "warming up chains"):
        chance, _ = state.move(adapt.step, chains.n_leapfrog)
        adapt.update(float(chance.mean()))
    excess, accepted = [], []
    for _ in progress(range(chains.n_draws), "drawing weights"):
        _, taken = state.move(adapt.average, chains.n_leapfrog)
        excess.append(state.excess)
        accepted.append(taken)
    return np.array(excess).T, np.array(accepted).T


class DualAveraging:
    """Adaptation of the step size to the acceptance rate TARGET."""

    def __init__(self, step: float):
        self.step, self.average = step, step
        self.centre, self.error, self.count = math.log(10 * step), 0.0, 0

    def update(self, chance: float) -> None:
        """Update the step size with the acceptance of one more draw."""
        self.count += 1
        weight = 1 / (self.count + 10)
        self.error += weight * (TARGET - chance - self.error)
        log_step = self.centre - self.count**0.5 / 0.05 * self.error
        share = self.count**-0.75
        log_average = share * log_step + (1 - share) * math.log(self.average)
        self.step, self.average = math.exp(log_step), math.exp(log_average)


class _State:
    """Positions of the chains, with their energy and its gradient."""

    def __init__(self, law: Tempered, n_chains: int, rng: np.random.Generator):
        self.law, self.rng = law, rng
        self.points = np.repeat(law.loss.at[None], n_chains, axis=0)
        self.excess, self.energy, self.gradient = law.energy(self.points)

    def first_step(self) -> float:
        """Step size at which about half of the single steps are accepted."""
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
        """One draw: probability of acceptance of every chain, and whether it was accepted."""
        # Random lengths avoid resonance with the periods of the directions. All chains share one
        # length, which does not depend on their positions.
        n_steps = int(
            self.rng.integers(max(1, n_leapfrog // 2), n_leapfrog + (n_leapfrog + 1) // 2 + 1)
        )
        steps = step * self.rng.uniform(SHORTEST, 1, (len(self.points), 1))
        chance, (points, excess, energy, gradient) = self._trial(steps, n_steps)
        taken = self.rng.random(len(chance)) < chance
        self.points = np.where(taken[:, None], points, self.points)
        self.gradient = np.where(taken[:, None], gradient, self.gradient)
        self.excess = np.where(taken, excess, self.excess)
        self.energy = np.where(taken, energy, self.energy)
        return chance, taken

    def _trial(
        self, step: float | np.ndarray, n_steps: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        momentum = self.rng.standard_normal(self.points.shape)
        before = self.energy + np.square(momentum).sum(1) / 2
        points, excess, energy = self.points, self.excess, self.energy
        gradient = self.gradient
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for _ in range(n_steps):
                momentum = momentum - step / 2 * gradient
                points = points + step * momentum
                excess, energy, gradient = self.law.energy(points)
                momentum = momentum - step / 2 * gradient
            change = before - energy - np.square(momentum).sum(1) / 2
            # An overflow gives NaN or infinity here and is never accepted.
            chance = np.where(np.isfinite(change), np.exp(np.minimum(change, 0)), 0.0)
        return chance, (points, excess, energy, gradient)


def langevin_draws(law: Tempered, chains: Chains, langevin: Langevin, *, seed: int = 0) -> Draws:
    """Draws of nbeta (L - L*) around the weights; L is the full loss, its gradient that of a
    mini-batch.

    Raises:
        ValueError: If the loss has no mini-batches.
    Source:
        Welling and Teh 2011; Lau et al. 2023, arXiv 2308.12108, section 4. At a quadratic minimum
        of curvature h, with gradient noise of variance s^2 and a = nbeta h + localization, a
        direction contributes (nbeta h / 2a) (1 + epsilon nbeta^2 s^2 / 4) / (1 - epsilon a / 4)
        instead of nbeta h / 2a (derived here).
    """
    # w' = (1 - epsilon a / 2) w - (epsilon / 2) nbeta noise + N(0, epsilon) has the variance
    # (epsilon + (epsilon nbeta s / 2)^2) / (1 - (1 - epsilon a / 2)^2), and nbeta (L - L*) = nbeta h w^2 / 2.  QED
    loss = law.loss
    if loss.on_minibatch is None:
        raise ValueError("langevin needs a loss with mini-batches, got one without.")
    rng, generator = np.random.default_rng(seed), generator_for(seed, "eval", 1)
    points, step = np.repeat(loss.at[None], chains.n_chains, axis=0), langevin.step_size
    excess: list[Float[np.ndarray, " chain"]] = []
    for _ in progress(range(chains.n_warmup + chains.n_draws), "drawing weights"):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for _ in range(chains.n_leapfrog):
                gradient = loss.on_minibatch(points, langevin.batch_size, generator)
                force = law.nbeta * gradient + law.localization * (points - loss.at)
                points = points - step / 2 * force + step**0.5 * rng.standard_normal(points.shape)
            excess.append(law.energy(points)[0])
    kept = np.array(excess[chains.n_warmup :]).T
    return kept, np.ones(kept.shape, bool)


def effective_draws(values: Float[np.ndarray, "chain draw"]) -> float:
    """Number of independent draws with the same error of the mean, over all chains; 0 if no chain
    moves.

    Source:
        Gelman et al., Bayesian Data Analysis, 3rd edition, eq. (11.8), with Geyer's monotone sums
        of pairs.
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
    """Variation over half-chains relative to the variation within them: 1 if they agree. NaN if no
    chain moves.

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
    """Standard error of the mean over all draws, including autocorrelation and differences between
    chains.

    Example:
        >>> values = np.random.default_rng(0).standard_normal((4, 1000))
        >>> round(mean_error(values), 2)
        0.02
    """
    effective = effective_draws(values)
    return math.sqrt(_variances(values)[1] / effective) if effective else math.nan


def _variances(values: np.ndarray) -> tuple[float, float]:
    """Variance within chains, and of the common density, including differences between chains."""
    n_draws = values.shape[1]
    within = float(values.var(1, ddof=1).mean())
    return within, within * (n_draws - 1) / n_draws + float(values.mean(1).var(ddof=1))
