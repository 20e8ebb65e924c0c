"""Training steps from which parts of the pattern hold, and the overshoot of omega."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from mechinterp import figures
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.analysis.training.history import History, history
from mechinterp.display import Result
from mechinterp.models.run.predictor import Source

PATTERNS = ("sign_matching", "diagonal", "last_entry", "zero_sum", "homogeneous")


@dataclass(frozen=True, eq=False, repr=False)
class Milestones(Result):
    """Logged step from which each part of the pattern holds to the end; NaN if it does not hold at
    the end."""

    sign_matching: float
    """Step for: omega and mu of every active head have the same sign."""
    diagonal: float
    """Step for: qk_diagonal of every active head is above its limit."""
    last_entry: float
    """Step for: ov_last_entry of every active head is above its limit."""
    zero_sum: float
    """Step for: |sum mu| / sum |mu| is below its limit."""
    homogeneous: float
    """Step for: omega_spread of the active heads, max/min |omega| - 1, is below its limit."""
    peak_omega: Float[np.ndarray, " head"]
    """Largest |omega| of each head after step 0, unit 1/x^2."""
    peak_step: Float[np.ndarray, " head"]
    """Step of `peak_omega`."""
    final_omega: Float[np.ndarray, " head"]
    """Mean |omega| over the last logged steps."""

    @property
    def overshoot(self) -> Float[np.ndarray, " head"]:
        """peak_omega / final_omega; infinite for a head that ends at 0."""
        nothing = np.full_like(self.peak_omega, np.inf)
        return np.divide(self.peak_omega, self.final_omega, out=nothing, where=self.final_omega > 0)

    def __repr__(self) -> str:
        steps = ", ".join(f"{name} {getattr(self, name):g}" for name in PATTERNS)
        return f"Milestones(steps: {steps})"

    def to_frame(self) -> pd.DataFrame:
        """One row per part of the pattern."""
        return pd.DataFrame(
            {"pattern": PATTERNS, "step": [getattr(self, name) for name in PATTERNS]}
        )

    def plot(self) -> go.Figure:
        """Step from which each part of the pattern holds."""
        return figures.bars(
            PATTERNS,
            {"step": (self.to_frame()["step"].to_numpy(), np.zeros(len(PATTERNS)))},
            title="Step from which each part of the pattern holds",
            y_title="step",
        )


def milestones(
    source: Source | History, *, thresholds: Thresholds | None = None, tail: int = 20
) -> Milestones:
    """Steps from which the parts of the pattern hold, from the logged scales of a checkpoint.

    A head is active in a row if its part of the sum of |mu omega| over heads exceeds the limit `share`.

    Args:
        source: A checkpoint with a history, or its dynamics.
        thresholds: Limits; None means those of the classifier.
        tail: Number of last rows that `final_omega` averages.
    Source:
        He et al. 2025, arXiv 2503.12734, section 3 and figures 1, 3, 13.
    See also:
        `history`, `over_steps`.
    Example:
        >>> from mechinterp import load
        >>> found = milestones(load("checkpoints/softmax-h2-s0"))
        >>> found.sign_matching <= 2000
        True
    """
    dynamics = source if isinstance(source, History) else history(source)
    limits = Thresholds() if thresholds is None else thresholds
    omega, mu = np.abs(dynamics.omega), np.abs(dynamics.mu)
    active = omega * mu > limits.share * (omega * mu).sum(1, keepdims=True)
    diagonal, last_entry = (
        dynamics.heads(name).to_numpy() for name in ("qk_diagonal", "ov_last_entry")
    )
    largest = np.where(active, omega, -np.inf).max(1)
    smallest = np.where(active, omega, np.inf).min(1)
    total = mu.sum(1)
    holds = {
        "sign_matching": ((dynamics.omega * dynamics.mu > 0) | ~active).all(1),
        "diagonal": ((diagonal > limits.qk_diagonal) | ~active).all(1),
        "last_entry": ((last_entry > limits.ov_last_entry) | ~active).all(1),
        "zero_sum": np.abs(dynamics.mu.sum(1)) < limits.zero_sum * total,
        "homogeneous": largest < (1 + limits.omega_spread) * smallest,
    }
    steps = {name: _from_then_on(dynamics.step, held) for name, held in holds.items()}
    peak = omega[1:].argmax(0)
    return Milestones(
        **steps,
        peak_omega=omega[1:].max(0),
        peak_step=dynamics.step[1:][peak].astype(float),
        final_omega=omega[-tail:].mean(0),
    )


def _from_then_on(step: np.ndarray, held: Bool[np.ndarray, " row"]) -> float:
    """First step from which the condition `held` holds in every row; NaN if it does not hold in the last
    row."""
    broken = np.flatnonzero(~held)
    first = broken[-1] + 1 if len(broken) else 0
    return float(step[first]) if first < len(step) else float("nan")
