"""What an estimate of the local learning coefficient says: number, error, chains and figures."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.display import Result


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LearningCoefficient(Result):
    """An estimate of the local learning coefficient, with how it was drawn."""

    estimate: float = math.nan
    """lambda_hat, no unit; NaN if the weights are no minimum."""
    sem: float = math.nan
    """Standard error over chains, autocorrelation included; NaN if the weights are no minimum."""
    exact: float | None
    """The known value at a minimum of this loss; None where it is not known."""
    is_minimum: bool = False
    """Whether neither descent nor the draws find a lower loss nearby."""
    reason: str
    """Why the weights are no minimum; empty if they are."""
    unknown: str
    """Why the exact value is not known; empty if it is."""
    per_chain: Float[np.ndarray, " chain"]
    """The estimate of each chain; NaN if the weights are no minimum."""
    acceptance: float = math.nan
    """Part of the draws that were accepted."""
    r_hat: float = math.nan
    """Spread of all half-chains over that within them; 1 where they agree."""
    effective_draws: float = math.nan
    """Independent draws with the same error of the mean."""
    excess: Float[np.ndarray, "chain draw"]
    """n_beta (L - L*) at each draw; without draws if descent alone has shown that the weights are no minimum."""
    n_beta: float
    """Weight of the loss in the law that is drawn from, unit 1/y^2."""
    localisation: float
    """Strength of the pull to the weights, unit 1 / weight^2."""
    loss: float
    """L* at the weights, unit y^2."""
    gradient_norm: float
    """Norm of the gradient of L at the weights, over the entries that are drawn."""
    fall: float
    """By how much descent from the weights lowers n_beta L within the pull."""
    sampled: str
    """Which entries are drawn; all others stay fixed."""
    over: str
    """What the loss is a mean over."""
    moved: float = 0.0
    """Distance that the weights were moved to the minimum before, unit of the weights; 0 unless asked for."""
    curve: tuple["LearningCoefficient", ...] = ()
    """The same at other n_beta, as asked for."""
    bias: str = ""
    """Why the draws are biased; empty for Hamiltonian Monte Carlo, which has no bias."""

    def __repr__(self) -> str:
        where = f"{self.sampled}; {self.over}"
        if not self.is_minimum:
            return f"LearningCoefficient(not a minimum: {self.reason} {where})"
        exact = "" if self.exact is None else f", exact {self.exact:g}"
        agree = "" if self.r_hat < 1.05 else f", chains disagree: R-hat {self.r_hat:.3g}"
        bias = f", biased: {self.bias}" if self.bias else ""
        return f"LearningCoefficient({self.estimate:.4g} ± {self.sem:.2g}{exact}{agree}{bias}; {where})"

    def to_frame(self) -> pd.DataFrame:
        """One row per n_beta."""
        names = (
            *("n_beta", "localisation", "estimate", "sem", "exact", "is_minimum", "acceptance"),
            *("r_hat", "effective_draws", "loss", "gradient_norm", "fall", "moved"),
            *("sampled", "over", "reason", "unknown", "bias"),
        )
        each = [self, *self.curve]
        frame = pd.DataFrame({name: [getattr(one, name) for one in each] for name in names})
        return frame.astype({"exact": float})

    def tables(self) -> dict[str, Table]:
        """Each n_beta."""
        return {"learning_coefficient": Table(self.to_frame(), quiet=("sampled", "over"))}

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
            {"estimate": (np.array([o.estimate for o in each]), np.array([o.sem for o in each]))},
            title="Learning coefficient over n_beta",
            x_title="n_beta (1/y²)",
            y_title="learning coefficient",
            levels=[] if self.exact is None else [self.exact],
            log_x=True,
        )
