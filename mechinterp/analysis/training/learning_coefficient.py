"""Local learning coefficient: how fast the volume of weights with almost the same loss shrinks with
the loss.

lambda_hat = n_beta (E[L(w)] - L(w*)), with w drawn from exp(-n_beta L(w) - (localisation / 2) |w -
w*|^2). At a quadratic minimum in D directions it is D / 2. For linear attention trained on moments
the exact value is known. Away from a minimum the estimate has no meaning, and none is given."""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import nn

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.local_losses import ModuleLoss, local_loss
from mechinterp.analysis.training.sampler import (
    Chains,
    Langevin,
    LocalLoss,
    Tempered,
    effective_draws,
    hamiltonian_draws,
    langevin_draws,
    mean_error,
    r_hat,
)
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.gradients import gradients_explained
from mechinterp.models.run.predictor import Source

N_BETA = 30_000.0
LONG = 600.0
"""Number of seconds of drawing from which a warning says what to reduce."""
FALL = 0.05
"""Largest n_beta (L - L_min) of weights that count as a minimum; the estimate is too low by this
much at most."""
GROWTH = (4.0, 0.1)
"""An estimate counts as growing if its last third differs from its first by more than GROWTH[0]
standard errors and by more than the fraction GROWTH[1]."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearningCoefficient(Result):
    """Estimate of the local learning coefficient, with the sampler's diagnostics."""

    estimate: float = math.nan
    """lambda_hat, without unit; NaN if the weights are not at a minimum."""
    sem: float = math.nan
    """Standard error over chains, including autocorrelation; NaN if the weights are not at a
    minimum."""
    exact: float | None
    """Exact value at a minimum of this loss; None if unknown."""
    is_minimum: bool = False
    """True if neither descent nor the draws find a lower loss nearby."""
    reason: str
    """Why the weights are not at a minimum; empty if they are."""
    unknown: str
    """Why the exact value is unknown; empty if it is known."""
    per_chain: Float[np.ndarray, " chain"]
    """Estimate of each chain; NaN if the weights are not at a minimum."""
    acceptance: float = math.nan
    """Fraction of the draws that were accepted."""
    r_hat: float = math.nan
    """Variation over half-chains relative to the variation within them; 1 if the chains agree."""
    effective_draws: float = math.nan
    """Number of independent draws with the same error of the mean."""
    excess: Float[np.ndarray, "chain draw"]
    """n_beta (L - L*) at each draw; empty if descent already shows that the weights are not at a
    minimum."""
    n_beta: float
    """Weight of the loss in the sampled density, unit 1/y^2."""
    localisation: float
    """Strength of the pull towards the weights, unit 1 / weight^2."""
    loss: float
    """L* at the weights, unit y^2."""
    gradient_norm: float
    """Norm of the gradient of L at the weights, over the sampled entries."""
    fall: float
    """Decrease of n_beta L by descent from the weights, with the pull."""
    sampled: str
    """Sampled entries; all others stay fixed."""
    over: str
    """Data of the loss: the population, or prompts."""
    moved: float = 0.0
    """Distance from the weights to the minimum that `settle` went to, unit of the weights; 0
    without `settle`."""
    curve: tuple["LearningCoefficient", ...] = ()
    """Estimates at the other n_beta."""
    bias: str = ""
    """Why the draws are biased; empty for Hamiltonian Monte Carlo, which is unbiased."""

    def __repr__(self) -> str:
        where = f"{self.sampled}; {self.over}"
        if not self.is_minimum:
            return f"LearningCoefficient(not a minimum: {self.reason} {where})"
        exact = "" if self.exact is None else f", exact {self.exact:g}"
        agree = "" if self.r_hat < 1.05 else f", chains disagree: R-hat {self.r_hat:.3g}"
        bias = f", biased: {self.bias}" if self.bias else ""
        moved = f"; at a minimum {self.moved:.2g} away" if self.moved else ""
        return f"LearningCoefficient({self.estimate:.4g} ± {self.sem:.2g}{exact}{agree}{bias}; {where}{moved})"

    def to_frame(self) -> pd.DataFrame:
        """One row per n_beta."""
        arrays = ("per_chain", "excess", "curve")
        names = [each.name for each in fields(self) if each.name not in arrays]
        each = [self, *self.curve]
        frame = pd.DataFrame({name: [getattr(one, name) for one in each] for name in names})
        return frame.astype({"exact": float})

    def tables(self) -> dict[str, Table]:
        """Table with one row per n_beta."""
        return {"learning_coefficient": Table(self.to_frame(), quiet=("sampled", "over"))}

    def plot(self) -> go.Figure:
        """Trace of n_beta (L - L*), with the exact mean dotted; empty without draws."""
        n_chains, n_draws = self.excess.shape
        title = "n_beta (L - L*) at each draw"
        if not n_draws:
            title = "No draws: descent shows that the weights are not at a minimum"
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
        """Density of n_beta (L - L*) over all draws, and the Gamma density with shape lambda if
        that is known."""
        from scipy.stats import gamma  # slow import

        edges = np.histogram_bin_edges(self.excess, 40) if self.excess.size else np.arange(2.0)
        middle = (edges[1:] + edges[:-1]) / 2
        density = np.histogram(self.excess, edges, density=True)[0] if self.excess.size else middle
        curves = {"draws": density}
        if self.exact:
            curves[f"Gamma({self.exact:g})"] = gamma.pdf(middle, self.exact)
        return figures.lines(
            middle,
            curves,
            title="Density of n_beta (L - L*)",
            x_title="n_beta (L - L*)",
            y_title="density",
        )

    def plot_curve(self) -> go.Figure:
        """Estimate over n_beta; a flat part is reliable."""
        frame = self.to_frame().sort_values("n_beta")
        return figures.lines(
            frame["n_beta"].to_numpy(),
            {"estimate": tuple(frame[["estimate", "sem"]].to_numpy().T)},
            title="Learning coefficient over n_beta",
            x_title="n_beta (1/y²)",
            y_title="learning coefficient",
            levels=[] if self.exact is None else [self.exact],
            log_x=True,
        )


@gradients_explained()
def local_learning_coefficient(
    source: Source | nn.Module | LocalLoss,
    prompts: Prompts | None = None,
    *,
    weights: str | Sequence[str] | None = None,
    loss: ModuleLoss | None = None,
    sampled_heads: Sequence[int] | None = None,
    n_beta: float = N_BETA,
    localisation: float = 1.0,
    other_n_beta: Sequence[float] = (),
    chains: Chains | None = None,
    langevin: Langevin | None = None,
    settle: bool = False,
    n_prompts: int = 1024,
    seed: int = 0,
) -> LearningCoefficient:
    """Local learning coefficient of a model or of any module, by Hamiltonian Monte Carlo.

    Linear attention trained on moments uses the exact loss of the population; other models use the
    loss on `n_prompts` prompts, and a module the given loss.

    Args:
        source: A model, for example a saved step `checkpoint.at(1000)`; with `loss`, any PyTorch
            module; or a loss with its gradient.
        prompts: Prompts of the loss, then for every model; None draws them if they are needed.
        weights: Patterns of the names of the parameters that are sampled, such as
            "blocks.0.attn.W_*", or "blocks.0.attn.W_*[1]" for head 1; all others stay fixed. None
            means all.
        loss: Function from the module to its loss, a tensor without axes that PyTorch can
            differentiate.
        sampled_heads: Heads of linear attention whose entries are sampled; None means all.
        n_beta: Weight of the loss in the sampled density, unit 1/y^2.
        localisation: Strength of the pull towards the weights, unit 1 / weight^2.
        other_n_beta: Further values of n_beta, for `plot_curve`.
        chains: Number and length of chains; None means 8 chains of 1,000 draws, or 4 of 200 on
            prompts.
        langevin: Settings of stochastic-gradient sampling on mini-batches, which is common
            elsewhere and replaces Hamiltonian Monte Carlo. It is biased by its step size and its
            mini-batches; `bias` says so.
        settle: True: descend to a minimum first. No model is at the minimum of the loss on prompts
            that it was not trained on. The minimum may be far away: `moved` is the distance.
        n_prompts: Number of prompts of the loss.
    Raises:
        ValueError: If there is no such parameter or head, `loss` does not fit the source or stands
            beside prompts or heads, or a number is not positive.
    Source:
        Lau et al. 2023, arXiv 2308.12108; the exact values are derived in theory.learning_coefficient.
    See also:
        `linear_components`, `jump_forecast`.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> chains = Chains(n_chains=4, n_draws=30, n_warmup=30)
        >>> found = local_learning_coefficient(load("checkpoints/linear-separate-s0"), chains=chains)
        >>> found.exact, abs(found.estimate - 8) < 4 * found.sem
        (8.0, True)
        >>> def square(points):
        ...     return (points[:, :3] ** 2).sum(1), np.pad(2 * points[:, :3], ((0, 0), (0, 2)))
        >>> loss = LocalLoss(square, np.zeros(5), "5 entries", "a quadratic in 3 of them", exact=1.5)
        >>> found = local_learning_coefficient(loss, chains=Chains(4, 100, 50, 10))
        >>> found.is_minimum, abs(found.estimate - 1.5) < 4 * found.sem
        (True, True)
    """
    local = local_loss(source, prompts, weights, loss, sampled_heads, n_prompts, seed)
    for name, value in (("n_beta", n_beta), ("localisation", localisation)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be > 0, got {value}.")
    chains, moved = chains or local.chains, 0.0
    warn_of_long(Tempered(local, n_beta, localisation), chains)
    if settle:
        settled, _ = descend(Tempered(local, n_beta, 0.0), most=20_000)
        moved = float(np.linalg.norm(settled - local.at))
        local = replace(local, at=settled)
    first, *curve = (
        _estimate(Tempered(local, each, localisation), chains, langevin, moved, seed)
        for each in (n_beta, *other_n_beta)
    )
    return replace(first, curve=tuple(curve))


def _estimate(
    law: Tempered, chains: Chains, langevin: Langevin | None, moved: float, seed: int
) -> LearningCoefficient:
    """Estimate at one n_beta; draws are left out if descent already lowers the loss."""
    loss = law.loss
    norm = float(np.linalg.norm(loss.function(loss.at[None])[1]))
    _, fall = descend(law)
    lower = f"descent lowers n_beta L by {fall:.3g}, the loss by {fall / law.n_beta:.3g}"
    reason = f"{lower} (gradient {norm:.2g}){loss.remedy}." if fall > FALL else ""
    excess, drawn = np.zeros((chains.n_chains, 0)), dict[str, Any]()
    if not reason:
        if langevin is None:
            excess, accepted = hamiltonian_draws(law, chains, seed=seed)
        else:
            excess, accepted = langevin_draws(law, chains, langevin, seed=seed)
            drawn["bias"] = langevin.bias
        reason = why_no_minimum(excess)
        drawn |= {"acceptance": float(accepted.mean()), "r_hat": r_hat(excess)}
        drawn["effective_draws"] = effective_draws(excess)
    if not reason:
        drawn |= {"is_minimum": True, "estimate": float(excess.mean()), "sem": mean_error(excess)}
    return LearningCoefficient(
        **drawn,
        exact=loss.exact,
        reason=reason,
        unknown=loss.unknown,
        per_chain=np.full(chains.n_chains, math.nan) if reason else excess.mean(1),
        excess=excess,
        n_beta=law.n_beta,
        localisation=law.localisation,
        loss=law.least,
        gradient_norm=norm,
        fall=fall,
        sampled=loss.sampled,
        over=loss.over,
        moved=moved,
    )


def warn_of_long(law: Tempered, chains: Chains) -> None:
    """Warn if drawing would take longer than LONG, by the time of one gradient of all chains."""
    points = np.repeat(law.loss.at[None], chains.n_chains, axis=0)
    count = (chains.n_warmup + chains.n_draws) * chains.n_leapfrog
    seconds = math.inf
    for _ in range(2):  # the first call may also compile and import
        start = time.perf_counter()
        law.energy(points)
        seconds = min(seconds, count * (time.perf_counter() - start))
        if seconds < LONG:
            return
    warnings.warn(
        f"drawing takes about {seconds / 60:.0f} minutes, {count:,} gradients of {law.loss.sampled.split(':')[0]} on "
        f"{law.loss.over}; fewer prompts (n_prompts=), entries (weights=) or draws (chains=) take less.",
        stacklevel=4,
    )


def descend(law: Tempered, *, most: int = 200) -> tuple[Float[np.ndarray, " weight"], float]:
    """Lowest weights that descent finds within the pull, and the decrease of n_beta L.

    Args:
        most: Largest number of L-BFGS steps.
    """
    from scipy.optimize import minimize  # slow import

    def pulled(point: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            _, energy, gradient = law.energy(point[None])
        return float(energy[0]), gradient[0]

    # Weights are stored in float32: a decrease of 1e-6 is rounding.
    settings = {"maxiter": most, "maxfun": 2 * most, "ftol": 0.0, "gtol": 1e-4, "maxcor": 30}
    lowest = minimize(pulled, law.loss.at, jac=True, method="L-BFGS-B", options=settings).x
    fall = -float(law.energy(lowest[None])[0][0])
    return (lowest, fall) if fall > 0 else (law.loss.at, 0.0)


def why_no_minimum(excess: Float[np.ndarray, "chain draw"]) -> str:
    """Evidence of the draws' n_beta (L - L*) against a minimum at L*; empty if there is none.

    Example:
        >>> why_no_minimum(np.random.default_rng(0).gamma(3.0, size=(4, 300)))
        ''
        >>> why_no_minimum(-np.ones((4, 300)))
        'draws have a lower loss than the weights: n_beta (L - L*) has minimum -1 and mean -1.'
    """
    if not np.isfinite(excess).all():
        return "draws overflow."
    if excess.min() < -FALL:
        return (
            f"draws have a lower loss than the weights: n_beta (L - L*) has minimum {excess.min():.3g} "
            f"and mean {excess.mean():.3g}."
        )
    third = max(excess.shape[1] // 3, 2)
    first, last = excess[:, :third], excess[:, -third:]
    change = float(last.mean() - first.mean())
    error = math.hypot(mean_error(first), mean_error(last))
    if abs(change) > GROWTH[0] * error and abs(change) > GROWTH[1] * excess.mean():
        return f"the estimate grows during sampling, by {change:.3g} ± {error:.2g}."
    return ""
