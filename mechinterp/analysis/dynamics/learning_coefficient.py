"""The local learning coefficient of a model: how fast the volume of weights of nearly its loss shrinks with the loss.

lambda_hat = n_beta (E[L(w)] - L(w*)), w drawn from exp(-n_beta L(w) - (localisation / 2) |w - w*|^2). At a quadratic
minimum in D directions it is D / 2; of linear attention trained on moments the exact value is known. Away from a
minimum the estimate means nothing, and none is given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.dynamics.local_losses import (
    LocalLoss,
    heads_of_linear,
    population_loss,
    prompts_loss,
)
from mechinterp.analysis.dynamics.minima import FALL, descend, why_no_minimum
from mechinterp.analysis.dynamics.sampler import (
    Chains,
    effective_draws,
    hamiltonian_draws,
    mean_error,
    r_hat,
)
from mechinterp.checkpoints.native import Checkpoint, checkpoint_of
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.predictor import Source
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.training.linear import task_moments

N_BETA = 30_000.0
LOCALISATION = 1.0
PROMPT_CHAINS = Chains(n_chains=4, n_draws=200, n_warmup=100, n_leapfrog=20)
"""On prompts a gradient takes milliseconds."""


@dataclass(frozen=True, eq=False, repr=False)
class LearningCoefficient(Result):
    """An estimate of the local learning coefficient, with how it was drawn."""

    estimate: float
    """lambda_hat, no unit; NaN if the weights are no minimum."""
    sem: float
    """Standard error over chains, autocorrelation included; NaN if the weights are no minimum."""
    exact: float | None
    """The known value at a minimum of this loss; None where it is not known."""
    is_minimum: bool
    reason: str
    """Why the weights are no minimum; empty if they are."""
    unknown: str
    """Why the exact value is not known; empty if it is."""
    per_chain: Float[np.ndarray, " chain"]
    """The estimate of each chain; NaN if the weights are no minimum."""
    acceptance: float
    """Part of the draws that were accepted."""
    r_hat: float
    """Spread of all half-chains over that within them; 1 where they agree."""
    effective_draws: float
    """Independent draws with the same error of the mean."""
    excess: Float[np.ndarray, "chain draw"]
    """n_beta (L - L*) at each draw; without draws if descent alone has shown that the weights are no minimum."""
    n_beta: float
    localisation: float
    """Strength of the pull to the weights, unit 1 / weight^2."""
    loss: float
    """L* at the weights, unit y^2."""
    gradient_norm: float
    fall: float
    """By how much descent from the weights lowers n_beta L within the pull."""
    sampled: str
    """Which entries are drawn; all others stay fixed."""
    over: str
    """What the loss is a mean over."""
    moved: float
    """Distance that the weights were moved to the minimum before, unit of the weights; 0 unless asked for."""
    curve: tuple["LearningCoefficient", ...] = ()
    """The same at other n_beta, as asked for."""

    def __repr__(self) -> str:
        where = f"{self.sampled}; {self.over}"
        if not self.is_minimum:
            return f"LearningCoefficient(not a minimum: {self.reason} {where})"
        exact = "" if self.exact is None else f", exact {self.exact:g}"
        agree = "" if self.r_hat < 1.05 else f", chains disagree: R-hat {self.r_hat:.3g}"
        return f"LearningCoefficient({self.estimate:.4g} ± {self.sem:.2g}{exact}{agree}; {where})"

    def to_frame(self) -> pd.DataFrame:
        """One row per n_beta."""
        names = (
            *("n_beta", "localisation", "estimate", "sem", "exact", "is_minimum", "acceptance"),
            *("r_hat", "effective_draws", "loss", "gradient_norm", "fall", "moved"),
            *("sampled", "over", "reason", "unknown"),
        )
        each = [self, *self.curve]
        frame = pd.DataFrame({name: [getattr(one, name) for one in each] for name in names})
        return frame.astype({"exact": float})

    def chains_frame(self) -> pd.DataFrame:
        """One row per chain and draw."""
        chain, draw = np.indices(self.excess.shape).reshape(2, -1)
        return pd.DataFrame({"chain": chain, "draw": draw, "excess": self.excess.ravel()})

    def plot(self) -> go.Figure:
        """The trace of n_beta (L - L*), with the exact value dotted; empty without draws."""
        n_chains, n_draws = self.excess.shape
        title = "n_beta (L - L*) at each draw"
        if not n_draws:
            title = "No draws: descent alone shows that the weights are no minimum"
        return figures.lines(
            np.arange(n_draws, dtype=float),
            {f"chain {chain}": self.excess[chain] for chain in range(n_chains)},
            title=f"{title}; the exact mean is dotted" if self.exact and n_draws else title,
            x_title="draw",
            y_title="n_beta (L - L*)",
            levels=[] if self.exact is None else [self.exact],
            zero_line=True,
        )

    def plot_posterior(self) -> go.Figure:
        """The density of n_beta (L - L*) over all draws, and of the Gamma law of shape lambda where it is known."""
        edges = np.histogram_bin_edges(self.excess, 40) if self.excess.size else np.arange(2.0)
        middle = (edges[1:] + edges[:-1]) / 2
        found = np.histogram(self.excess, edges, density=True)[0] if self.excess.size else middle
        curves = {"draws": found}
        if self.exact:
            shape, positive = self.exact, np.clip(middle, 1e-12, None)
            log = (shape - 1) * np.log(positive) - positive - math.lgamma(shape)
            curves[f"Gamma({shape:g})"] = np.where(middle > 0, np.exp(log), 0)
        return figures.lines(
            middle,
            curves,
            title="Density of n_beta (L - L*)",
            x_title="n_beta (L - L*)",
            y_title="density",
        )

    def plot_curve(self) -> go.Figure:
        """The estimate over n_beta: flat where it has settled."""
        each = sorted([self, *self.curve], key=lambda one: one.n_beta)
        return figures.lines(
            np.array([one.n_beta for one in each]),
            {"estimate": np.array([one.estimate for one in each])},
            errors={"estimate": np.array([one.sem for one in each])},
            title="Learning coefficient over n_beta",
            x_title="n_beta (1/y²)",
            y_title="learning coefficient",
            levels=[] if self.exact is None else [self.exact],
            log_x=True,
        )


def local_learning_coefficient(
    source: Source,
    *,
    task: TaskConfig | None = None,
    step: int | None = None,
    sampled_heads: Sequence[int] | None = None,
    n_beta: float = N_BETA,
    localisation: float = LOCALISATION,
    other_n_beta: Sequence[float] = (),
    chains: Chains | None = None,
    settle: bool = False,
    n_prompts: int = 1024,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> LearningCoefficient:
    """The local learning coefficient of a checkpoint, by Hamiltonian Monte Carlo.

    Linear attention that was trained on moments has the exact loss of its population, everything else the loss on
    `n_prompts` prompts.

    Args:
        task: Law of the prompts; None: the checkpoint's own.
        step: A kept step of training; None: the last weights.
        sampled_heads: Heads of linear attention whose entries are drawn; None: all.
        localisation: Strength of the pull to the weights, unit 1 / weight^2.
        other_n_beta: Temperatures to estimate at besides, for `plot_curve`.
        chains: Number and length of chains; None: 8 of 1,000 draws, on prompts 4 of 200.
        settle: Whether to go to the nearest minimum first, as no model is at the minimum of the loss on a set of
            prompts that it was not trained on; how far is in `moved`.
        n_prompts: Of the loss on prompts.
    Raises:
        ValueError: If the gradient of such a model is not written out, there is no such step or head, or a number is
            not positive.
    Source:
        Lau et al. 2023, arXiv 2308.12108; the exact values are derived in theory.learning_coefficient.
    Example:
        >>> from mechinterp.checkpoints.native import load
        >>> chains = Chains(n_chains=4, n_draws=100, n_warmup=50)
        >>> found = local_learning_coefficient(load("checkpoints/linear-separate-s0"), chains=chains)
        >>> found.exact, abs(found.estimate - 8) < 4 * found.sem
        (8.0, True)
    """
    checkpoint = checkpoint_of(source, "local_learning_coefficient")
    law = checkpoint.task if task is None else task
    weights = _weights_at(checkpoint, step)
    if is_trained_on_moments(checkpoint):
        heads = heads_of_linear(weights)
        chosen = _heads(sampled_heads, heads.v.size)
        loss = population_loss(heads, task_moments(law), sampled_heads=chosen)
    else:
        if sampled_heads is not None:
            raise ValueError("sampled_heads is of linear attention trained on moments only.")
        drawn = sample_prompts(law, n_prompts, seed=seed, dtype=weights.dtype)
        loss = prompts_loss(checkpoint, weights, drawn)
        chains = PROMPT_CHAINS if chains is None else chains
    return coefficient_of_loss(
        loss,
        n_beta=n_beta,
        localisation=localisation,
        other_n_beta=other_n_beta,
        chains=chains,
        settle=settle,
        seed=seed,
        progress=progress,
    )


def is_trained_on_moments(checkpoint: Checkpoint) -> bool:
    """Whether it is one layer of linear attention whose heads are v, K and Q (or U) alone."""
    model, train = checkpoint.config.model, checkpoint.config.train
    return model.score == "linear/L" and model.one_attention and train.optimizer != "adam"


def coefficient_of_loss(
    loss: LocalLoss,
    *,
    n_beta: float = N_BETA,
    localisation: float = LOCALISATION,
    other_n_beta: Sequence[float] = (),
    chains: Chains | None = None,
    settle: bool = False,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> LearningCoefficient:
    """The local learning coefficient of any loss with a gradient; arguments as in `local_learning_coefficient`.

    Example:
        >>> def square(points):
        ...     return (points[:, :3] ** 2).sum(1), np.pad(2 * points[:, :3], ((0, 0), (0, 2)))
        >>> loss = LocalLoss(square, np.zeros(5), "5 entries", "a quadratic in 3 of them", exact=1.5)
        >>> found = coefficient_of_loss(loss, chains=Chains(4, 300, 100, 10))
        >>> found.is_minimum, abs(found.estimate - 1.5) < 4 * found.sem
        (True, True)
    """
    for name, value in (("n_beta", n_beta), ("localisation", localisation)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be > 0, got {value}.")
    moved = 0.0
    if settle:
        settled, _ = descend(loss, n_beta, 0.0, most=20_000)
        moved = float(np.linalg.norm(settled - loss.at))
        loss = replace(loss, at=settled)
    chains = Chains() if chains is None else chains
    first = _estimate(loss, n_beta, localisation, chains, seed, moved, progress)
    curve = [
        _estimate(loss, other, localisation, chains, seed, moved, progress)
        for other in other_n_beta
    ]
    return replace(first, curve=tuple(curve))


def _estimate(
    loss: LocalLoss,
    n_beta: float,
    localisation: float,
    chains: Chains,
    seed: int,
    moved: float,
    progress: ProgressCallback,
) -> LearningCoefficient:
    found = _before_drawing(loss, n_beta, localisation, chains, moved)
    if found.reason:
        return found
    draws = hamiltonian_draws(
        loss.function,
        loss.at,
        chains,
        n_beta=n_beta,
        localisation=localisation,
        seed=seed,
        progress=progress,
    )
    excess = draws.excess
    found = replace(
        found,
        excess=excess,
        reason=why_no_minimum(excess),
        acceptance=float(draws.accepted.mean()),
        r_hat=r_hat(excess),
        effective_draws=effective_draws(excess),
    )
    if found.reason:
        return found
    return replace(
        found,
        is_minimum=True,
        estimate=float(excess.mean()),
        sem=mean_error(excess),
        per_chain=excess.mean(1),
    )


def _before_drawing(
    loss: LocalLoss, n_beta: float, localisation: float, chains: Chains, moved: float
) -> LearningCoefficient:
    """What is known without draws; with a reason if descent shows that the weights are no minimum."""
    value, gradient = loss.function(loss.at[None])
    _, fall = descend(loss, n_beta, localisation)
    norm = float(np.linalg.norm(gradient))
    lower = f"descent lowers n_beta L by {fall:.3g}, the loss by {fall / n_beta:.3g}"
    return LearningCoefficient(
        estimate=math.nan,
        sem=math.nan,
        exact=loss.exact,
        is_minimum=False,
        reason=f"{lower} (gradient {norm:.2g}){loss.remedy}." if fall > FALL else "",
        unknown=loss.unknown,
        per_chain=np.full(chains.n_chains, math.nan),
        acceptance=math.nan,
        r_hat=math.nan,
        effective_draws=math.nan,
        excess=np.zeros((chains.n_chains, 0)),
        n_beta=n_beta,
        localisation=localisation,
        loss=float(value[0]),
        gradient_norm=norm,
        fall=fall,
        sampled=loss.sampled,
        over=loss.over,
        moved=moved,
    )


def _weights_at(checkpoint: Checkpoint, step: int | None) -> Weights:
    if step is None:
        return checkpoint.weights
    if step not in checkpoint.snapshots:
        kept = ", ".join(map(str, list(checkpoint.snapshots)[:6])) or "none"
        raise ValueError(f"step must be one that is kept ({kept}, ...), got {step}.")
    return checkpoint.snapshots[step]


def _heads(sampled: Sequence[int] | None, n_heads: int) -> list[int] | None:
    if sampled is None:
        return None
    chosen = sorted(set(sampled))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n_heads:
        raise ValueError(
            f"sampled_heads must name heads from 0 to {n_heads - 1}, got {list(sampled)}."
        )
    return chosen
