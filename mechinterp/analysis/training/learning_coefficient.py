"""Local learning coefficient: how fast the volume of weights with almost the same loss shrinks with
the loss.

lambda_hat = nbeta (E[L(w)] - L(w*)), with w drawn from exp(-nbeta L(w) - (localization / 2) |w -
w*|^2). At a quadratic minimum in D directions it is D / 2. For linear attention trained on moments
the exact value is known. Away from a minimum the estimate has no meaning, and none is given.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import nn

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.cost_of_chains import Cost
from mechinterp.analysis.training.local_losses import local_loss, quick_parts
from mechinterp.analysis.training.minimum import FALL, fall_nearby, lowest_nearby, why_no_minimum
from mechinterp.analysis.training.module_losses import ModuleLoss
from mechinterp.analysis.training.sampler import (
    Chains,
    LocalLoss,
    Tempered,
    changed_chains,
    effective_draws,
    hamiltonian_draws,
    langevin_draws,
    mean_error,
    r_hat,
)
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.gradients import gradients_explained
from mechinterp.models.run.evaluation import require_prompts
from mechinterp.models.run.predictor import Source


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearningCoefficient(Result):
    """Estimate of the local learning coefficient, with the sampler's diagnostics."""

    COLUMNS: ClassVar = {
        "estimate": "lambda_hat, without unit; NaN if the weights are not at a minimum.",
        "sem": "Standard error over chains, including autocorrelation; NaN if the weights are not at a minimum.",
        "exact": "Exact value at a minimum of this loss; None if unknown.",
        "is_minimum": "True if neither descent nor the draws find a lower loss nearby.",
        "reason": "Why the weights are not at a minimum; empty if they are.",
        "unknown": "Why the exact value is unknown; empty if it is known.",
        "acceptance": "Fraction of the draws that were accepted.",
        "r_hat": "Variation over half-chains relative to the variation within them; 1 if the chains agree.",
        "effective_draws": "Number of independent draws with the same error of the mean.",
        "nbeta": "Weight of the loss in the sampled density.",
        "localization": "Strength of the pull towards the weights.",
        "loss": "L* at the weights.",
        "gradient_norm": "Norm of the gradient of L at the weights, over the sampled entries.",
        "fall": "Decrease of nbeta L by descent from the weights, with the pull. On the prompts of several layers, and for a module, descent ends once it finds a lower loss: then the decrease is at least as large.",
        "sampled": "Sampled entries; all others stay fixed.",
        "over": "Data of the loss: the population, or prompts.",
        "moved": "Distance from the weights to the minimum that settle went to, in the unit of the weights; 0 without settle.",
        "bias": "Why the draws are biased; empty for Hamiltonian Monte Carlo, which is unbiased.",
    }
    UNITS: ClassVar = {"y²": ("loss",), "1/y²": ("nbeta",), "1/weight²": ("localization",)}

    estimate: float = math.nan
    sem: float = math.nan
    exact: float | None
    is_minimum: bool = False
    reason: str
    unknown: str
    per_chain: Float[np.ndarray, " chain"]
    """Estimate of each chain; NaN if the weights are not at a minimum."""
    acceptance: float = math.nan
    r_hat: float = math.nan
    effective_draws: float = math.nan
    excess: Float[np.ndarray, "chain draw"]
    """nbeta (L - L*) at each draw; empty if descent already shows that the weights are not at a
    minimum."""
    nbeta: float
    localization: float
    loss: float
    gradient_norm: float
    fall: float
    sampled: str
    over: str
    moved: float = 0.0
    curve: tuple["LearningCoefficient", ...] = ()
    """Estimates at the other nbeta."""
    bias: str = ""

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
        """One row per nbeta."""
        arrays = ("per_chain", "excess", "curve")
        names = [each.name for each in fields(self) if each.name not in arrays]
        each = [self, *self.curve]
        frame = pd.DataFrame({name: [getattr(one, name) for one in each] for name in names})
        return frame.astype({"exact": float})

    def tables(self) -> dict[str, Table]:
        """Table with one row per nbeta."""
        return {"learning_coefficient": Table(self.to_frame(), quiet=("sampled", "over"))}

    def plot(self) -> go.Figure:
        """Trace of nbeta (L - L*), with the exact mean dotted; empty without draws."""
        n_chains, n_draws = self.excess.shape
        title = "nbeta (L - L*) at each draw"
        if not n_draws:
            title = "No draws: descent shows that the weights are not at a minimum"
        return figures.lines(
            np.arange(n_draws, dtype=float),
            {f"chain {chain}": self.excess[chain] for chain in range(n_chains)},
            title=f"{title}; the exact mean is dotted" if self.exact and n_draws else title,
            x_title="draw",
            y_title="nbeta (L - L*)",
            levels=[] if self.exact is None else [self.exact],
            zero_line=True,
        )

    def plot_posterior(self) -> go.Figure:
        """Density of nbeta (L - L*) over all draws, and the Gamma density with shape lambda if
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
            title="Density of nbeta (L - L*)",
            x_title="nbeta (L - L*)",
            y_title="density",
        )

    def plot_curve(self) -> go.Figure:
        """Estimate over nbeta; a flat part is reliable."""
        frame = self.to_frame().sort_values("nbeta")
        return figures.lines(
            frame["nbeta"].to_numpy(),
            {"estimate": tuple(frame[["estimate", "sem"]].to_numpy().T)},
            title="Learning coefficient over nbeta",
            x_title="nbeta (1/y²)",
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
    chains: Chains | Mapping[str, object] | None = None,
    settle: bool = False,
    n_prompts: int = 1024,
    seed: int = 0,
) -> LearningCoefficient:
    """Local learning coefficient of a model or of any module, by Hamiltonian Monte Carlo.

    Linear attention trained on moments uses the exact loss of the population; other models use the
    loss on `n_prompts` prompts, and a module the given loss. Draws on prompts use the loss in
    float32 where its rounding does not matter; descent is in float64.

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
        chains: Settings of the sampler, or some of them by name; None means 8 chains of 1,000 draws, or 4 of 200 on
            prompts.
        settle: True: descend to a minimum first. No model is at the minimum of the loss on prompts
            that it was not trained on. The minimum may be far away: `moved` is the distance.
        n_prompts: Number of prompts of the loss.
    Raises:
        ValueError: If there is no such parameter or head, `loss` does not fit the source or stands
            beside prompts or heads, or drawing would take more than ten minutes and no `chains` are
            given. The time is measured on a few gradients, before the first draw.
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
    require_prompts(prompts, "local_learning_coefficient")
    local = local_loss(source, prompts, weights, loss, sampled_heads, n_prompts, seed)
    sampler = chains if isinstance(chains, Chains) else changed_chains(local.chains, chains or {})
    whole = loss is None and weights is None and not isinstance(source, LocalLoss)
    parts = partial(quick_parts, source, prompts, n_prompts, seed) if whole else tuple
    cost = Cost(local, sampler, stated=chains is not None, parts=parts)
    settled = _settled(local, sampler, cost) if settle else local
    first, *curve = (
        _estimate(Tempered(settled, each, sampler.localization), sampler, cost, seed)
        for each in (sampler.nbeta, *sampler.other_nbeta)
    )
    moved = float(np.linalg.norm(settled.at - local.at))
    return replace(first, moved=moved, curve=tuple(replace(each, moved=moved) for each in curve))


def _settled(loss: LocalLoss, chains: Chains, cost: Cost) -> LocalLoss:
    """The loss around the minimum that descent from the weights finds."""
    cost.check()
    lowest, _ = lowest_nearby(Tempered(loss, chains.nbeta, 0.0), most=20_000)
    return replace(loss, at=lowest)


def _estimate(law: Tempered, chains: Chains, cost: Cost, seed: int) -> LearningCoefficient:
    """Estimate at one nbeta; there are no draws if descent already lowers the loss."""
    loss = law.loss
    norm = float(np.linalg.norm(loss.function(loss.at[None])[1]))
    fall, at_least = fall_nearby(law)
    by = f"{'at least ' if at_least else ''}{fall:.3g}"
    lower = f"descent lowers nbeta L by {by}, the loss by {fall / law.nbeta:.3g}"
    reason = f"{lower} (gradient {norm:.2g}){loss.remedy}." if fall > FALL else ""
    excess, drawn = np.zeros((chains.n_chains, 0)), dict[str, Any]()
    if not reason:
        cost.check()
        if chains.langevin is None:
            excess, accepted = hamiltonian_draws(law.for_draws, chains, seed=seed)
        else:
            excess, accepted = langevin_draws(law, chains, chains.langevin, seed=seed)
            drawn["bias"] = chains.langevin.bias
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
        nbeta=law.nbeta,
        localization=law.localization,
        loss=law.least,
        gradient_norm=norm,
        fall=fall,
        sampled=loss.sampled,
        over=loss.over,
    )
