"""Draws by stochastic gradient Langevin dynamics on mini-batches: cheap, usual, and biased.

No step is rejected, so that the law that is drawn from is wider than exp(-n_beta L), by the size of the step and by the
noise of the mini-batches. How far off is an estimate that others have made in this way?
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.training.local_losses import LocalLoss
from mechinterp.analysis.training.sampler import Chains, Draws
from mechinterp.icl.prompts import generator_for
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True)
class Langevin:
    """Stochastic gradient Langevin dynamics in the place of Hamiltonian Monte Carlo."""

    step_size: float
    """epsilon of w -> w - (epsilon / 2) force + N(0, epsilon), unit weight^2."""
    batch_size: int = 64
    """Prompts of a mini-batch; every chain draws its own at every step."""

    def __post_init__(self) -> None:
        for name in ("step_size", "batch_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}.")

    @property
    def bias(self) -> str:
        """What a result says of its draws."""
        return f"drawn on mini-batches of {self.batch_size} without rejection, step size {self.step_size:g}"


def langevin_draws(
    loss: LocalLoss,
    chains: Chains,
    langevin: Langevin,
    *,
    n_beta: float,
    localisation: float,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Draws:
    """Draws of n_beta (L - L*) around the weights; L itself is the whole loss, the gradient that of a mini-batch.

    Raises:
        ValueError: If the loss has no mini-batches.
    Source:
        Welling and Teh 2011; Lau et al. 2023, arXiv 2308.12108, section 4. At a quadratic minimum of curvature h, gradient
        noise of variance s^2 and a = n_beta h + localisation, a direction counts
        (n_beta h / 2a) (1 + epsilon n_beta^2 s^2 / 4) / (1 - epsilon a / 4) in the place of n_beta h / 2a (derived here).
    """
    # w' = (1 - epsilon a / 2) w - (epsilon / 2) n_beta noise + N(0, epsilon) has the variance
    # (epsilon + (epsilon n_beta s / 2)^2) / (1 - (1 - epsilon a / 2)^2), and n_beta (L - L*) = n_beta h w^2 / 2.  QED
    if loss.on_minibatch is None:
        raise ValueError("langevin needs a loss with mini-batches, got one without.")
    rng, generator = np.random.default_rng(seed), generator_for(seed, "eval", 1)
    points = np.repeat(loss.at[None], chains.n_chains, axis=0)
    least, step = float(loss.function(loss.at[None])[0][0]), langevin.step_size
    excess: list[Float[np.ndarray, " chain"]] = []
    for _ in progress(range(chains.n_warmup + chains.n_draws), "drawing weights"):
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(chains.n_leapfrog):
                gradient = loss.on_minibatch(points, langevin.batch_size, generator)
                force = n_beta * gradient + localisation * (points - loss.at)
                points = points - step / 2 * force + step**0.5 * rng.standard_normal(points.shape)
            excess.append(n_beta * (loss.function(points)[0] - least))
    kept = np.array(excess[chains.n_warmup :]).T
    return Draws(kept, np.ones(kept.shape, bool), step)
